"""A small model that trains in the three ways of writing a step: for cases that are about what happens meanwhile."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, TypeVar

import torch
import torch.nn as nn
import torch.nn.functional as F

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

Case = dict[str, Any]
M = TypeVar("M", bound=nn.Module)
WAYS = ("tree", "unit", "driven")
PRESETS = ("zero3", "zero3", "zero2", "zero1", "ddp", "hsdp", "hfsdp")


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, d: int = 8, n: int = 3) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(d) for _ in range(n)), nn.Linear(d, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def uneven(model: Callable[[Any], M], case: Case) -> M:
    """A case's model in float64, whose weights are all unlike each other, those of norms, too."""
    torch.manual_seed(case["seed"])
    plain = model(case["model"]).double()
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return plain


def mesh_of(preset: str, world: int) -> tuple[Any, fsdp.Placement]:
    placement = getattr(fsdp, preset)
    if preset in ("hsdp", "hfsdp"):
        outer = 2 if world % 2 == 0 else 1
        return fsdp.local_mesh(replica=outer, shard=-1), placement("replica", "shard")
    return fsdp.local_mesh(), placement("data")


def parts(weights: int) -> tuple[Any, Any]:
    """Parameters and a skeleton."""
    torch.manual_seed(weights)
    return fsdp.functionalize(Net())


kept_parts, kept_driver = cache(parts), lru_cache(maxsize=4)(T.forward_backward)  # for as long as this process lives


def make(case: Case, kept: bool = False) -> tuple[fsdp.State, Any]:
    """A state and a skeleton, the same on every rank and in every call. kept: the skeleton is that of earlier cases."""
    mesh, placement = mesh_of(case["preset"], case["world"])
    params, model = (kept_parts if kept else parts)(case.get("weights", 0))
    schedule = fsdp.Schedule(prefetch=case["prefetch"])
    precision = fsdp.Precision(compute=torch.bfloat16) if case.get("bfloat16") else None
    optimizer = fsdp.sgd(lr=1e-2, momentum=0.9) if case.get("sgd") else fsdp.adamw(lr=1e-2)
    transport = case["transport"]
    spec = fsdp.Spec(mesh, placement, schedule=schedule, precision=precision, transport=transport)
    return fsdp.shard(params, spec, optimizer), model


def batch(case: Case, step: int, rank: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro + 100_000 * case.get("data", 0))
    x = torch.randn(4, 8, generator=generator)
    return x.bfloat16() if case.get("bfloat16") else x


def steps_of(case: Case, model: Any, rank: int, kept: bool = False) -> Callable[[fsdp.State, int], fsdp.State]:
    """The train step of this case: `f(state, number) -> state`. kept: what drives it has driven earlier cases."""
    way, micros, clip = case["way"], case["micros"], case.get("clip")
    driven = (kept_driver if kept else T.forward_backward)(model, loss_fn) if way == "driven" else None

    def micro(state: fsdp.State, x: torch.Tensor, last: bool) -> fsdp.State:
        if driven is not None:
            return driven(state, x, last_microbatch=last)[0]
        if way == "tree":
            state, params = fsdp.unshard(state)
            grads, _ = torch.func.grad_and_value(lambda p: loss_fn(fsdp.bind(model, p), x))(params)
            return fsdp.reduce(state, grads, last_microbatch=last)
        return by_unit(state, model, x, last)

    def step(state: fsdp.State, number: int) -> fsdp.State:
        for k in range(micros):
            state = micro(state, batch(case, number, rank, k), k == micros - 1)
        if clip:
            state, _ = T.clip_by_global_norm(state, 0.5)
        return fsdp.step(state)

    return step


def by_unit(state: fsdp.State, model: Any, h: torch.Tensor, last: bool) -> fsdp.State:
    """The second way, by hand."""
    blocks = [unit for unit in state.units if unit.startswith("blocks.")]

    def block(i: int, w: Any, h: torch.Tensor) -> torch.Tensor:
        return fsdp.bind(model.blocks[i], w)(h)

    def head(w: Any, h: torch.Tensor) -> torch.Tensor:
        return fsdp.bind(model.head, w)(h).square().mean()

    stage = {unit: partial(block, i) for i, unit in enumerate(blocks)} | {"head": head}
    pullbacks: dict[str, Any] = {}
    for unit, fn in stage.items():
        state, w = fsdp.unshard(state, unit)
        h, pullbacks[unit] = T.vjp(fn, w, h)
        state = fsdp.release(state, unit)
    dh = torch.ones_like(h)
    for unit in reversed(stage):
        state, w = fsdp.unshard(state, unit)
        dw, dh = pullbacks.pop(unit)(w, dh)
        state = fsdp.reduce(state, dw, unit, last_microbatch=last)
        state = fsdp.release(state, unit)
    return state


def digest(state: fsdp.State) -> str:
    """Of the bits of main weights, optimizer state and count that this rank holds."""
    found = hashlib.sha256()
    for leaf in torch.utils._pytree.tree_leaves((state.main, state.opt, state.count)):
        if isinstance(leaf, torch.Tensor):
            found.update(bytes(leaf.detach().contiguous().reshape(-1).view(torch.uint8).tolist()))
    return found.hexdigest()
