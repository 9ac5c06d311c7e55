"""Tensor parallelism of your own: a GPT whose layers are cut along "tp", sharded further along "data".

    python examples/tensor_parallel.py            # 4 ranks in this process: data 2 × tp 2
    torchrun --nproc-per-node 4 examples/tensor_parallel.py

        tokens cut along tp        tokens whole, layers cut              tokens cut again
    x ── norm ── all_gather ──▶ columns (qkv, up) ── rows (out, down) ── reduce_scatter ──▶ x + ...

What to read: `OWN` says whose part of each leaf is whose; `Block.forward` and `loss_fn` call the collectives. Weights
are made, given and saved whole. Source: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022 (norms on cut sequences).
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

WIDTH, HEADS, VOCAB, LENGTH, DEPTH = 16, 4, 32, 8, 2
OWN: dict[str, Any] = {
    "*.qkv.*": fsdp.Along("tp", 0, parts=3),  # each rank has its heads of queries, keys and values
    "*.up.*": ("tp", 0),
    "*.out.weight": ("tp", 1),
    "*.down.weight": ("tp", 1),
    "embed.weight": ("tp", 0),  # and its part of the vocabulary
    "head.weight": ("tp", 0),
    "*": fsdp.Along("tp", grads="sum"),  # norms and biases meet cut sequences: each rank has a summand
}


class Block(nn.Module):
    def __init__(self, tp: Any) -> None:
        super().__init__()
        self.tp, self.heads = tp, HEADS // tp.size()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s/tp, d] -> [b, s/tp, d]"""
        y = self.qkv(C.all_gather(self.norm1(x), self.tp, 1))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in y.chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + C.reduce_scatter(y @ self.out.weight.T, self.tp, 1) + self.out.bias
        y = F.gelu(self.up(C.all_gather(self.norm2(x), self.tp, 1)))
        return x + C.reduce_scatter(y @ self.down.weight.T, self.tp, 1) + self.down.bias


class GPT(nn.Module):
    def __init__(self, tp: Any) -> None:
        super().__init__()
        self.tp = tp
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH) / 4)
        self.blocks = nn.ModuleList(Block(tp) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[b, s] -> [b, s, vocabulary/tp]"""
        mine, here = part_of(tokens, self.tp)
        x = C.reduce_scatter(F.embedding(mine, self.embed.weight) * here[..., None], self.tp, 1)
        x = x + self.place.chunk(self.tp.size())[self.tp.get_local_rank()]  # of other rows the gradient is zero
        for block in self.blocks:
            x = block(x)
        return self.head(C.all_gather(self.norm(x), self.tp, 1))


def part_of(tokens: torch.Tensor, tp: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens as rows of this rank's part of the vocabulary, and which of them are in it."""
    n = VOCAB // tp.size()
    mine = tokens - tp.get_local_rank() * n
    here = (mine >= 0) & (mine < n)
    return mine.where(here, 0), here


def loss_fn(model: Any, windows: torch.Tensor) -> torch.Tensor:
    """Cross entropy with a cut vocabulary: no rank has all logits. The same on every rank of tp."""
    logits, tp = model(windows[:, :-1]).flatten(0, 1), model.tp
    top = C.pmax(logits.amax(-1), tp)
    total = C.psum((logits - top[:, None]).exp().sum(-1), tp)
    mine, here = part_of(windows[:, 1:].flatten(), tp)
    chosen = C.psum(logits.gather(-1, mine[:, None])[:, 0] * here, tp)
    return (total.log() + top - chosen).mean()


def main(steps: int, data: int = 2, dtype: torch.dtype = torch.float32) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and whole weights."""
    mesh = fsdp.local_mesh(data=data, tp=-1)
    spec = fsdp.Spec(mesh, own=OWN, schedule=fsdp.Schedule(debug=True))
    state, model = fsdp.init(lambda: GPT(mesh["tp"]).to(dtype), spec, fsdp.adamw(lr=1e-2), seed=0)
    forward_backward = T.forward_backward(model, loss_fn)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + mesh.get_local_rank("data"))
        windows = torch.randint(0, VOCAB // 4, (2, LENGTH + 1), generator=generator).cumsum(1) % VOCAB
        state, loss = forward_backward(state, windows.to(state.count.device))
        state, _ = T.clip_by_global_norm(state, 1.0)
        state = fsdp.step(state)
        state, loss = fsdp.pmean(state, loss)
        losses.append(float(loss))
    return losses, fsdp.full_params(state)


if __name__ == "__main__":
    found = main(30)[0] if "RANK" in os.environ else fsdp.launch(main, (30,), nprocs=4, simulate=True)[0][0]
    print("losses:", ", ".join(f"{loss:.3f}" for loss in found[::5]))
