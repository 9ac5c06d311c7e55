"""Leaves that get a gradient on no rank keep their weights and moments, as torch.optim's do with `grad=None`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from problems import mesh_and_placement

import functional_fsdp as fsdp
from functional_fsdp import Optimizer, Spec, launch

Tree = dict[str, Any]
SHAPES = {
    "blocks.0.w": (9, 40), "blocks.0.bias": (130,), "blocks.0.empty": (0, 2), "blocks.0.other": (300,),
    "blocks.1.w": (4, 4), "blocks.1.bias": (1,), "blocks.2.w": (33,), "blocks.2.frozen": (7,),
    "norm": (9,), "scale": (), "tied": (140,), "twin": (140,), "never": (200,),
}  # fmt: skip
LABELS = {"*.bias": "bias", "norm": "norm"}
UNITS = ["blocks.*", "norm", "scale", "never"]
DECAY = {"bias": 0.0, "default": 0.2}
STEPS, MICRO = 6, 2
PRESETS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp")


def has(leaf: str, step: int, rank: int, micro: int, world: int) -> bool:
    """Whether a leaf gets a gradient."""
    if leaf == "never":
        return False
    if leaf == "blocks.0.bias":
        return step in (1, 4)  # first in the second step
    if leaf == "blocks.0.other":
        return step != 2 and micro == 1
    if leaf == "blocks.0.w":
        return step < 5 or rank == world - 1
    if leaf.startswith("blocks.1"):
        return step not in (0, 3) and (rank == 0 or step == 5)  # a whole unit, on one rank most of the time
    if leaf == "scale":
        return rank == step % world and micro == 0
    if leaf == "twin":
        return step > 2  # of the tied leaf, once
    if leaf == "tied":
        return step in (1, 4)
    return leaf != "norm" or step % 2 == 0


def start(name: str) -> torch.Tensor:
    g = torch.Generator().manual_seed(len(name))
    return torch.randn(SHAPES[name], generator=g, dtype=torch.float64)


def gradient(name: str, step: int, rank: int, micro: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(1000 * step + 100 * rank + 10 * micro + len(name))
    return torch.randn(SHAPES[name], generator=g, dtype=torch.float64)


def tree(zeros: bool = False) -> Tree:
    found = {name: start(name) for name in SHAPES}
    return found | {"twin": found["tied"]}


def grads_of(step: int, rank: int, micro: int, world: int) -> Tree:
    return {n: gradient(n, step, rank, micro) if has(n, step, rank, micro, world) else None for n in SHAPES}


OPTIMIZERS: dict[str, tuple[Any, Callable[..., torch.optim.Optimizer]]] = {
    "adamw": (
        lambda: fsdp.adamw(lr=0.05, weight_decay=DECAY),
        lambda groups: torch.optim.AdamW(groups, lr=0.05),
    ),
    "sgd": (
        lambda: fsdp.sgd(lr=0.05, momentum=0.9, weight_decay=DECAY, nesterov=True),
        lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    ),
    "plain sgd": (
        lambda: fsdp.sgd(lr=0.05, weight_decay=DECAY),
        lambda groups: torch.optim.SGD(groups, lr=0.05),
    ),
    "pair": (lambda: momentum(), lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9)),
}


def momentum(in_place: bool = False) -> Optimizer:
    """SGD with momentum and decay as somebody else's pair, which knows nothing of gradients that did not come."""

    def update(grads: Tree, opt: Tree, main: Tree, count: torch.Tensor) -> tuple[Tree, Tree]:
        new_main, new_opt = {}, {}
        for name, p in main.items():
            flat = torch.zeros_like(p.local)
            for (label, view), (_, weight) in zip(p.but(flat).by_label(), p.by_label(), strict=True):
                view.copy_(DECAY.get(label, DECAY["default"]) * weight)
            moving = 0.9 * opt[name].local + grads[name].local + flat
            new_opt[name] = opt[name].but(moving)
            new_main[name] = p.but(p.local - 0.05 * moving)
        return new_main, new_opt

    return Optimizer(lambda main: pytree.tree_map(torch.zeros_like, main), update)


def reference(world: int, make: Callable[..., torch.optim.Optimizer], steps: int = STEPS) -> list[Tree]:
    """Weights after each step of torch's own optimizer; those of tied leaves under their first name."""
    params = {name: torch.nn.Parameter(p) for name, p in tree().items() if name != "twin"}
    groups: list[Tree] = [
        {"params": [], "weight_decay": DECAY["bias"]},
        {"params": [], "weight_decay": DECAY["default"]},
    ]
    for name, p in params.items():
        if "frozen" not in name:
            groups["bias" not in name]["params"].append(p)
    optimizer = make(groups)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            for micro in range(MICRO):
                for name, grad in grads_of(step, rank, micro, world).items():
                    p = params["tied" if name == "twin" else name]
                    if grad is not None:
                        p.grad = grad / world if p.grad is None else p.grad + grad / world
        optimizer.step()
        seen.append({name: p.detach().clone() for name, p in params.items()})
    return seen


def spec(preset: str, **kwargs: Any) -> Spec:
    mesh, placement = mesh_and_placement(preset)
    return Spec(mesh, placement, units=UNITS, labels=LABELS, trainable={"*.frozen": False}, **kwargs)


def reduced(state: fsdp.State, step: int, by_unit: bool) -> fsdp.State:
    rank, world = dist.get_rank() if dist.is_initialized() else 0, state.spec.mesh.size()
    for micro in range(MICRO):
        grads = grads_of(step, rank, micro, world)
        if not by_unit:
            state = fsdp.reduce(state, grads, last=micro == MICRO - 1)
            continue
        for unit in reversed(state.layout.units):
            mine = {key: grads[path] for key, path in zip(unit.keys, unit.paths, strict=True)}
            if unit.paths == ("tied",):
                both = [g for g in (grads["tied"], grads["twin"]) if g is not None]
                mine = dict.fromkeys(mine, sum(both) if both else None)
            if any(g is not None for g in mine.values()) or unit.name == "norm":  # others are skipped on this rank
                state = fsdp.reduce(state, mine, unit.name, last=micro == MICRO - 1)
    return state


def trained(preset: str, which: str, by_unit: bool, steps: int = STEPS) -> list[Tree]:
    state = fsdp.shard(tree(), spec(preset), OPTIMIZERS[which][0]())
    seen = []
    for step in range(steps):
        state = fsdp.step(reduced(state, step, by_unit))
        seen.append(fsdp.full_params(state))
    return seen


def equal(found: list[Tree], wanted: list[Tree]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        for name, p in theirs.items():
            torch.testing.assert_close(
                mine[name], p, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )


def all_of(preset: str, by_unit: bool) -> dict[str, list[Tree]]:
    return {which: trained(preset, which, by_unit) for which in OPTIMIZERS}


@pytest.mark.parametrize("by_unit", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_optimizer_leaves_alone_what_torchs_leaves_alone(ranks: int, preset: str, by_unit: bool) -> None:
    if ranks == 2 and preset in ("hsdp", "hfsdp"):
        return
    wanted = {which: reference(ranks, make) for which, (_, make) in OPTIMIZERS.items()}
    for found in launch(all_of, ranks, preset, by_unit):
        for which, weights in wanted.items():
            equal(found[which], weights)
