"""A trained state with extras of every kind, what it holds by leaf, and how training goes on from it on any ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.problems import loss_fn, mesh_and_placement, net

import functional_fsdp as fsdp
from functional_fsdp import Precision, extend
from functional_fsdp import transforms as T

TREES = ("main", "opt.mean", "opt.square", "extras.ema")

Whole = dict[str, torch.Tensor]


def tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a batch of 12, the same for any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randint(0, 11, (12, 5), generator=generator) for _ in range(2))
    return x.chunk(dist.get_world_size())[dist.get_rank()], y.chunk(dist.get_world_size())[dist.get_rank()]


def spec_of(preset: str, dtype: torch.dtype, **settings: Any) -> fsdp.Spec:
    mesh, placement = mesh_and_placement(preset)
    return fsdp.Spec(mesh, placement, precision=Precision(compute=dtype), **settings)


def trained(state: fsdp.State, first: int, steps: int) -> tuple[fsdp.State, list[float]]:
    model = fsdp.functionalize(net(torch.float32))[1]
    forward_backward = T.forward_backward(model, loss_fn)
    losses = []
    for step in range(first, first + steps):
        state, loss = forward_backward(state, tokens(step))
        state, loss = fsdp.pmean(fsdp.step(state), loss)
        losses.append(float(loss))
    return state, losses


def whole_trees(trees: dict[str, Any]) -> Whole:
    """Every leaf of trees of FlatBuffers."""
    return {
        f"{name}.{path}": value.clone()
        for name, tree in trees.items()
        for buffer in tree.values()
        for path, value in extend.gather_leaves(buffer).items()
    }


def whole(state: fsdp.State) -> Whole:
    """Every leaf of what is kept for each."""
    trees = (state.main, state.opt.mean, state.opt.square, state.extras["ema"])
    return whole_trees(dict(zip(TREES, trees, strict=True)))


def begun(preset: str, dtype: torch.dtype) -> fsdp.State:
    """After two steps."""
    params, _ = fsdp.functionalize(net(torch.float32))
    buffers = {"seen": torch.arange(3)}
    state = fsdp.shard(params, spec_of(preset, dtype), fsdp.adamw(lr=1e-2), buffers=buffers, seed=5)
    state, _ = trained(state, 0, 2)
    ema = {name: buffer.but(buffer.local.double() * 0.5) for name, buffer in state.main.items()}
    return fsdp.replace_extras(state, ema=ema, note={"scale": torch.tensor(0.3, dtype=torch.float64)})


def wrong_in(state: fsdp.State, kept: Whole) -> list[str]:
    """What of a state that `begun` made is not the same."""
    found = whole(state)
    wrong = [name for name in kept.keys() | found.keys() if not torch.equal(kept[name], found[name])]
    others = {
        "buffers": state.buffers["seen"].tolist() == [0, 1, 2],
        "note": state.extras["note"]["scale"].item() == 0.3,
        "steps": state.steps == 2,
        "rng": state.rng.item() == 5,
        "padding": all(not b.local[_padding(b)].any() for b in state.main.values()),
    }
    return wrong + [name for name, right in others.items() if not right]


def _padding(buffer: fsdp.FlatBuffer) -> torch.Tensor:
    start, stop = buffer.span()
    mask = torch.ones(buffer.bucket.numel, dtype=torch.bool)
    for leaf in buffer.bucket.leaves:
        mask[leaf.offset : leaf.offset + leaf.numel] = False
    return mask[start:stop]
