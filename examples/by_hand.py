"""A train step unit by unit, by hand, and the plain module's step beside it.

    python examples/by_hand.py                           # 2 ranks on the CPU, or one for each GPU
    torchrun --nproc-per-node 2 examples/by_hand.py

Each rank holds half of every weight. A unit's weights exist whole only between its `unshard` and its `release`:

    forward    embed ▆▁▁▁▁     backward   ▁▁▁▁▆ embed         ▆ gathered
               block ▁▆▁▁▁                ▁▁▁▆▁ block
               block ▁▁▆▁▁                ▁▁▆▁▁ block
               block ▁▁▁▆▁                ▁▆▁▁▁ block
               head  ▁▁▁▁▆  ── loss ──▶   ▆▁▁▁▁ head

The ranks see different data. What comes out must be what the plain module gives on all of the data at once.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

Batch = dict[str, torch.Tensor]

# ------------------------------------------------- an ordinary model


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.down(F.gelu(self.up(self.norm(h))))


class Model(nn.Module):
    """Guesses a byte from the byte before it. Its units are found from the paths: embed, blocks.0, ..., head."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 256)

    def forward(self, batch: Batch) -> torch.Tensor:
        h = self.embed(batch["byte"])
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h), batch["next"])


def batch_of(step: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    byte = torch.randint(256, (128,), generator=generator, device="cpu")
    return {"byte": byte, "next": (5 * byte + 3) % 256}


# ------------------------------------------------- the sharded step


def stages(model: Any, batch: Batch) -> dict[str, Any]:
    """The model cut into units: `{unit: function of (weights, what the stage before returned)}`. Pure."""

    def embed(w: Any, _: None) -> Any:
        return fsdp.bind(model.embed, w)(batch["byte"])

    def block(w: Any, h: torch.Tensor, i: int) -> Any:
        return fsdp.bind(model.blocks[i], w)(h)

    def head(w: Any, h: torch.Tensor) -> Any:
        return F.cross_entropy(fsdp.bind(model.head, w)(h), batch["next"])

    return {"embed": embed, **{f"blocks.{i}": partial(block, i=i) for i in range(len(model.blocks))}, "head": head}


def forward_backward(state: fsdp.State, model: nn.Module, batch: Batch) -> tuple[fsdp.State, torch.Tensor]:
    stage, pullbacks = stages(model, batch), {}
    h: Any = None

    for unit in state.units:
        state, w = fsdp.unshard(state, unit)  # all-gather: every rank has the unit's weights now
        h, pullbacks[unit] = T.vjp(stage[unit], w, h)  # compute, and remember how to go back
        state = fsdp.release(state, unit)  # the weights are gone, the residuals stay

    loss, dh = h, torch.ones_like(h)
    for unit in reversed(state.units):
        state, w = fsdp.unshard(state, unit)  # gathered again, to the same place
        dw, dh = pullbacks.pop(unit)(w, dh)  # the pullback is a function of the weights
        state = fsdp.release(state, unit)
        state = fsdp.reduce(state, dw, unit)  # reduce-scatter: each rank keeps its part of the mean gradient

    return state, loss


def train_step(state: fsdp.State, model: nn.Module, batch: Batch) -> tuple[fsdp.State, torch.Tensor]:
    state, loss = forward_backward(state, model, batch)
    state = fsdp.step(state)  # each rank updates its own part
    return fsdp.pmean(state, loss)  # the loss of the whole batch


# ------------------------------------------------- the plain step: the reference


def plain_gradients(model: nn.Module, batches: list[Batch]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    params = dict(model.named_parameters())
    loss = torch.stack([model(batch) for batch in batches]).mean()
    return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True)), loss.detach()


def main(steps: int = 5) -> None:
    mesh = fsdp.local_mesh()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_default_device(mesh.device_type)
    torch.manual_seed(0)
    plain = Model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)

    spec = fsdp.Spec(mesh, fsdp.zero3("data"), units=["embed", "blocks.*", "head"])
    params, model = fsdp.functionalize(plain)  # weights, and the structure without weights
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-3))
    if rank == 0:
        print(state)
        print("\nstep    loss  plain loss  largest difference of a gradient")

    for step in range(steps):
        batches = [{k: v.to(mesh.device_type) for k, v in batch_of(step, r).items()} for r in range(ranks)]
        grads, plain_loss = plain_gradients(plain, batches)

        # Look, before the step is taken. `state` stays valid until then, so looking costs nothing.
        looked, _ = forward_backward(state, model, batches[rank])
        mine = fsdp.local_shards(looked, "grads")  # this rank's part of the mean gradient
        theirs = fsdp.local_shards(fsdp.shard(grads, spec))  # the same part of the plain one
        difference = max((mine[path] - theirs[path]).abs().max().item() for path in mine if mine[path].numel())
        assert difference < 1e-6, f"gradients differ by {difference}"

        state, loss = train_step(state, model, batches[rank])
        assert abs(loss.item() - plain_loss.item()) < 1e-5, f"losses differ: {loss.item()}, plain {plain_loss.item()}"
        for path, param in plain.named_parameters():
            param.grad = grads[path]
        optimizer.step()
        if rank == 0:
            print(f"{step:4}  {loss.item():6.4f}      {plain_loss.item():6.4f}  {difference:.1e}")

    whole = fsdp.full_params(state)
    difference = max((whole[path] - param).abs().max().item() for path, param in plain.named_parameters())
    if rank == 0:
        print(f"\nweights after {steps} steps of AdamW: largest difference {difference:.1e}")


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun started the ranks
        main()
        dist.destroy_process_group()
    else:
        fsdp.launch(main)
