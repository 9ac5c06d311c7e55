"""A mixture of experts whose tokens travel: all-to-all dispatch along "ep", on a mesh (data, ep).

    python examples/expert_parallel.py            # 4 ranks in this process: data 2 × ep 2
    torchrun --nproc-per-node 4 examples/expert_parallel.py

                 ep 0                     ep 1
    data 0       experts 0, 1             experts 2, 3         every rank has tokens of its own;
    data 1       experts 0, 1             experts 2, 3         an expert is sharded along its column

Experts are cut along "ep" and sharded along "data"; all else is sharded along both. Tokens differ along both axes, so
the loss is the mean over all ranks. An expert's gradient has come from the tokens of a whole row, so it is divided by
all ranks, not by those of its column: the placements say so (moe.py has the same with an all-gather, local experts).
Source: Lepikhin et al., "GShard", 2020. No token is dropped here: each expert has room for all.
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

WIDTH, EXPERTS, VOCAB, LENGTH, DEPTH = 16, 4, 32, 8, 2


class Experts(nn.Module):
    """Whole leaves [experts, ...]: a rank gets its own ones."""

    def __init__(self, ep: Any) -> None:
        super().__init__()
        self.ep = ep
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * (2 * WIDTH) ** -0.5)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Tokens [n, d] and the expert of each [n] -> what these make of them [n, d]."""
        sent = F.one_hot(chosen, EXPERTS).to(x)
        slots = torch.einsum("ne,nd->end", sent, x)  # [experts, n, d]: a token is in the slots of its expert
        slots = C.all_to_all(slots, self.ep, cut=0, join=1)  # [experts/ep, ep · n, d]
        done = torch.bmm(torch.bmm(slots, self.up).relu(), self.down)
        done = C.all_to_all(done, self.ep, cut=1, join=0)  # [experts, n, d]: back where they came from
        return torch.einsum("ne,end->nd", sent, done)


class Block(nn.Module):
    def __init__(self, ep: Any) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts(ep)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.norm(x)).cumsum(1) / LENGTH  # tokens see those before them
        flat = self.norm(x).flatten(0, 1)
        gate, chosen = self.router(flat).softmax(-1).max(-1)
        return x + (gate[:, None] * self.experts(flat, chosen)).view_as(x)


class Model(nn.Module):
    def __init__(self, ep: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(ep) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: Any, windows: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def main(steps: int, data: int = 2, dtype: torch.dtype = torch.float32) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and whole weights."""
    mesh = fsdp.local_mesh(data=data, ep=-1)
    placement = {"*.experts.*": fsdp.zero3("data"), "*": fsdp.zero3("data", "ep")}
    spec = fsdp.Spec(mesh, placement, own={"*.experts.*": ("ep", 0)})
    state, model = fsdp.init(lambda: Model(mesh["ep"]).to(dtype), spec, fsdp.adamw(lr=1e-2), seed=0)
    forward_backward = T.forward_backward(model, loss_fn)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + mesh.get_rank())
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
