"""Expert parallelism: each rank along the axis "expert" has experts of its own, sharded over the axis "data" only.

    python examples/moe.py                 # 4 ranks: 2 × 2, experts over one axis, the rest over both
    torchrun --nproc-per-node 4 examples/moe.py

                 data 0      data 1
    expert 0     rank 0      rank 1        experts 0, 1: sharded over ranks 0, 1
    expert 1     rank 2      rank 3        experts 2, 3: sharded over ranks 2, 3;  all else: over the four

What to read: the rules in `main`, and `Experts`. Gradients are those of the mean loss over all ranks for every leaf:
an expert's tokens came from both ranks of its column, and it is averaged over its row.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import _corpus
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

GROUP: Any = None  # the ranks of one column; None: all experts are here


def together(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(GROUP.size())]
    dist.all_gather(parts, x.contiguous(), group=GROUP)
    return torch.cat(parts)


def apart(x: torch.Tensor) -> torch.Tensor:
    whole = x.clone()
    dist.all_reduce(whole, group=GROUP)
    return whole.chunk(GROUP.size())[GROUP.rank()]


class Together(torch.autograd.Function):
    """The tokens of all ranks of the column; each rank's gradients go back to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return together(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return apart(grad)


class Apart(torch.autograd.Function):
    """The sum over the column of what each rank's experts say, and of that this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return apart(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return together(grad)


class Experts(nn.Module):
    """This rank's experts. Tokens of the whole column come in, and each rank's go back to it."""

    def __init__(self, width: int, total: int, first: int, count: int) -> None:
        super().__init__()
        self.first = first
        self.up = nn.Parameter(torch.stack([_weight(i, width, 2 * width) for i in range(total)][first : first + count]))
        self.down = nn.Parameter(
            torch.stack([_weight(i + total, 2 * width, width) for i in range(total)][first : first + count])
        )

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Tokens [n, width] and the expert of each [n] -> what those experts make of them [n, width]."""
        if GROUP is not None:
            x, chosen = Together.apply(x), Together.apply(chosen)
        mine = F.one_hot(chosen - self.first + len(self.up), 3 * len(self.up))[:, len(self.up) : 2 * len(self.up)]
        hidden = torch.einsum("nd,edh->neh", x, self.up).relu()
        out = torch.einsum("neh,ehd,ne->nd", hidden, self.down, mine.to(x))
        if GROUP is not None:
            out = Apart.apply(out)
        return out


def _weight(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * shape[0] ** -0.5


class Block(nn.Module):
    def __init__(self, width: int, total: int, first: int, count: int) -> None:
        super().__init__()
        self.mix = nn.GRU(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, total, bias=False)
        self.experts = Experts(width, total, first, count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.norm(x))[0]
        flat = self.norm(x).flatten(0, 1)
        gate, chosen = self.router(flat).softmax(-1).max(-1)
        out: torch.Tensor = x + (gate[:, None] * self.experts(flat, chosen)).view_as(x)
        return out


class Model(nn.Module):
    """Predicts each byte of a text from those before it."""

    def __init__(self, width: int = 32, depth: int = 2, total: int = 4, first: int = 0, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)  # what is not an expert is the same on every rank
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, total, first, count) for _ in range(depth))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def loss_fn(model: Any, windows: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten().long())


def sharded(mesh: Any, optimizer: Any, total: int = 4) -> tuple[fsdp.State, nn.Module]:
    """This rank's part of the model. Experts have rules of their own."""
    global GROUP
    GROUP = mesh.get_group("expert")
    count = total // mesh["expert"].size()
    params, model = fsdp.functionalize(Model(total=total, first=mesh.get_local_rank("expert") * count, count=count))
    rules = {"*experts*": fsdp.zero3("data"), "*": fsdp.zero3("expert", "data")}
    return fsdp.shard(params, fsdp.Spec(mesh, rules), optimizer), model


def main(steps: int) -> list[float]:
    mesh = fsdp.local_mesh(expert=2, data=-1)
    state, model = sharded(mesh, fsdp.adamw(lr=3e-3))
    forward_backward = T.forward_backward(model, loss_fn)
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), mesh.device_type
    if rank == 0:
        print(state.layout, "\n")
    text, losses = _corpus.load().train, []
    for step in range(steps):
        windows = _corpus.batch(text, 8 * ranks, 64, 0, step, rank, ranks).to(device)
        state, loss = forward_backward(state, windows.long())
        state, norm = T.clip_by_global_norm(state, 1.0)
        state = fsdp.step(state)
        state, loss = fsdp.pmean(state, loss)
        losses.append(loss)
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1:4}  loss {loss:.3f}  gradient norm {norm:.3f}", flush=True)
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    if "RANK" in os.environ:
        main(args.steps)
        dist.destroy_process_group()
    else:
        fsdp.launch(main, (args.steps,), nprocs=4)
