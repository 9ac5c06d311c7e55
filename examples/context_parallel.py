"""Attention over sequences that are cut along "cp": by a ring, or by Ulysses' exchange of heads.

    python examples/context_parallel.py           # 4 ranks in this process: data 2 × cp 2
    torchrun --nproc-per-node 4 examples/context_parallel.py

    ring      keys and values go round; each rank adds up what its queries see of them       s/cp tokens at a time
    Ulysses   all_to_all: whole sequences of some heads, attention, all_to_all back           needs heads ≥ cp

Tokens differ along "cp", so it is one more axis of the data: weights are sharded and gradients averaged over both, and
nothing is said in `own`. Source: Liu et al., "Ring Attention with Blockwise Transformers", 2023; Jacobs et al.,
"DeepSpeed Ulysses", 2023.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp.transforms import collectives as C

WIDTH, HEADS, VOCAB, LENGTH, DEPTH = 16, 4, 32, 16, 2
NEVER = -1e30  # a score that no softmax sees


def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: Any) -> torch.Tensor:
    """Causal attention of [b, h, s/cp, d]. What is kept of a block are its output and the logarithm of its sum."""
    n, me, length = cp.size(), cp.get_local_rank(), q.shape[2]
    at = torch.arange(length, device=q.device)
    outs, sums = [], []
    for hop in range(n):
        source = (me - hop) % n  # whose keys these are
        seen = (at[:, None] + me * length) >= (at + source * length)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~seen, NEVER)
        sums.append(scores.logsumexp(-1, keepdim=True))
        outs.append((scores - sums[-1]).exp() @ v)
        if hop < n - 1:
            k, v = C.ppermute(torch.stack([k, v]), cp, [(r, (r + 1) % n) for r in range(n)])
    weights = torch.stack(sums).softmax(0)
    return (weights * torch.stack(outs)).sum(0)


def ulysses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: Any) -> torch.Tensor:
    """The same: [b, h, s/cp, d] -> [b, h/cp, s, d], attention, and back."""
    q, k, v = C.all_to_all(torch.stack([q, k, v]), cp, cut=2, join=3)
    return C.all_to_all(F.scaled_dot_product_attention(q, k, v, is_causal=True), cp, cut=2, join=1)


class Block(nn.Module):
    def __init__(self, cp: Any, attention: Any) -> None:
        super().__init__()
        self.cp, self.attention = cp, attention
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s/cp, d] -> [b, s/cp, d]"""
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(self.attention(q, k, v, self.cp).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, cp: Any, attention: Any) -> None:
        super().__init__()
        self.cp = cp
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH) / 4)
        self.blocks = nn.ModuleList(Block(cp, attention) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[b, s/cp] -> [b, s/cp, vocabulary]"""
        x = self.embed(tokens) + self.place.chunk(self.cp.size())[self.cp.get_local_rank()]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model: Any, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Of this rank's tokens. The mean over all ranks is the loss."""
    return F.cross_entropy(model(data[0]).flatten(0, 1), data[1].flatten())


def main(
    steps: int, how: str = "ring", data: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and whole weights."""
    mesh = fsdp.local_mesh(data=data, cp=-1)
    cp, attention = mesh["cp"], {"ring": ring, "ulysses": ulysses}[how]
    spec = fsdp.Spec(mesh, fsdp.zero3("data", "cp"))
    state, model = fsdp.init(lambda: GPT(cp, attention).to(dtype), spec, fsdp.adamw(lr=1e-2), seed=0)
    forward_backward = T.forward_backward(model, loss_fn)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + mesh.get_local_rank("data"))
        windows = torch.randint(0, VOCAB // 4, (2, LENGTH + 1), generator=generator).cumsum(1) % VOCAB
        parts = [t.chunk(cp.size(), 1)[cp.get_local_rank()] for t in (windows[:, :-1], windows[:, 1:])]
        state, loss = forward_backward(state, [part.to(state.count.device) for part in parts])
        state, _ = T.clip_by_global_norm(state, 1.0)
        state = fsdp.step(state)
        state, loss = fsdp.pmean(state, loss)
        losses.append(float(loss))
    return losses, fsdp.full_params(state)


if __name__ == "__main__":
    found = main(30)[0] if "RANK" in os.environ else fsdp.launch(main, (30,), nprocs=4, simulate=True)[0][0]
    print("losses:", ", ".join(f"{loss:.3f}" for loss in found[::5]))
