"""Two pipeline stages, each sharded along "data", by the schedule 1F1B.

    python examples/pipeline.py                   # 4 ranks in this process: 2 stages × data 2
    torchrun --nproc-per-node 4 examples/pipeline.py

    stage 0     F0 F1    B0 F2    B1 F3    B2       B3        F: forward, its output goes to stage 1
    stage 1        F0B0     F1B1     F2B2     F3B3            B: backward, from the gradient of its output

Each stage is a model with a state of its own, on its row of the mesh. Stage 1 hands back the gradients of its input
(`input_grads=True`). Stage 0 keeps only the tokens of a microbatch: its backward computes the forward again, as
`<h, gradient of h>` is a loss whose gradients are those. Source: Narayanan et al., "PipeDream", 2019.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

WIDTH, VOCAB, LENGTH, DEPTH, MICRO = 16, 32, 8, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))).cumsum(1) / LENGTH


class Stage(nn.Module):
    """Half of the model: its blocks, after the embedding or before the head."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.first = nn.Embedding(VOCAB, WIDTH) if number == 0 else nn.Identity()
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH // 2)))
        self.last = nn.Linear(WIDTH, VOCAB) if number == 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.first(x)))


def inner(model: Any, tokens: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return (model(tokens) * gradient).sum()


def loss_fn(model: Any, h: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(h).flatten(0, 1), targets.flatten())


def first_stage(state: fsdp.State, model: Any, windows: list[torch.Tensor], to: int) -> fsdp.State:
    """One step of stage 0."""
    forward, backward = T.apply(model, lambda model, x: model(x)), T.forward_backward(model, inner)
    sent: list[Any] = []
    for i in range(MICRO + 1):
        if i < MICRO:
            state, h = forward(state, windows[i][:, :-1])
            sent.append((h, dist.isend(h.contiguous(), to)))  # kept until it has gone
        if i:
            gradient = torch.empty_like(sent[i - 1][0])
            dist.recv(gradient, to)
            sent[i - 1][1].wait()
            state, _ = backward(state, windows[i - 1][:, :-1], gradient, last_microbatch=i == MICRO)
    return state


def second_stage(
    state: fsdp.State, model: Any, windows: list[torch.Tensor], source: int, like: torch.Tensor
) -> tuple[fsdp.State, torch.Tensor]:
    """One step of stage 1, and its loss."""
    step = T.forward_backward(model, loss_fn, input_grads=True)
    total, sent = like.new_zeros(()), list[Any]()
    for i in range(MICRO):
        h = torch.empty_like(like)
        dist.recv(h, source)
        last = i == MICRO - 1
        state, (loss, (gradient, _)) = step(state, h, windows[i][:, 1:], last_microbatch=last, scale=1 / MICRO)
        sent.append(dist.isend(gradient.contiguous(), source))
        total += loss / MICRO
    for work in sent:
        work.wait()
    return state, total


def main(steps: int, dtype: torch.dtype = torch.float32) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, where this is the last stage; whole weights of this rank's stage."""
    mesh = fsdp.local_mesh(stage=2, data=-1)
    number, row = mesh.get_local_rank("stage"), mesh["data"]
    torch.manual_seed(0)
    params, model = fsdp.functionalize([Stage(0), Stage(1)][number].to(dtype))  # both draw from one seed
    state = fsdp.shard(params, fsdp.Spec(row), fsdp.adamw(lr=1e-2))
    other = int(mesh.mesh[1 - number, row.get_local_rank()])
    like = torch.empty(2, LENGTH, WIDTH, dtype=dtype, device=state.count.device)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + row.get_local_rank())
        drawn = torch.randint(0, VOCAB // 4, (MICRO, 2, LENGTH + 1), generator=generator).cumsum(2) % VOCAB
        windows = [*drawn.to(like.device)]
        if number == 0:
            state = first_stage(state, model, windows, other)
        else:
            state, loss = second_stage(state, model, windows, other, like)
            state, loss = fsdp.pmean(state, loss)
            losses.append(float(loss))
        state = fsdp.step(state)
    return losses, fsdp.full_params(state)


if __name__ == "__main__":
    found = main(30) if "RANK" in os.environ else fsdp.launch(main, (30,), nprocs=4, simulate=True)[-1]
    print("losses:", ", ".join(f"{loss:.3f}" for loss in found[0][::5]))
