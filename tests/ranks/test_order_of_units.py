"""Driven models whose use of units is not what their structure says: other orders, units without gradients,
recomputation around several units; on one rank and on two, against the plain module."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.ranks import each_rank, launch
from support.scenario import SGD, Scenario, Seen, alike, plain, run
from support.tables import FULL
from torch.utils.checkpoint import checkpoint

import functional_fsdp as fsdp
from functional_fsdp import Schedule, Spec
from functional_fsdp import transforms as T

WIDTH = 4


class Chain(nn.Module):
    """Linear layers one after another; `how` says what is special about a step."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        if how == "checkpoint":
            return checkpoint(self.through, x, use_reentrant=False)
        if how == "detached":
            return self.layers[-1](self.through(x, -1).detach())
        if how == "no grad":
            with torch.no_grad():
                bias = self.layers[1](x)
            return self.layers[-1](self.layers[0](x).tanh() + bias)
        return self.through(x)

    def through(self, x: torch.Tensor, to: int | None = None) -> torch.Tensor:
        for layer in self.layers[:to]:
            x = layer(x).tanh()
        return x


class Backwards(nn.Module):
    """Blocks that share a weight, used last first; and perhaps a weight of no block between them."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        second.weight = first.weight
        self.blocks = nn.ModuleList(nn.Sequential(linear, nn.Tanh()) for linear in (first, second))
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.scaled = scaled

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        x = self.blocks[1](x)
        return self.blocks[0](x * self.scale if self.scaled else x)


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    module = Backwards(name == "scaled") if name in ("backwards", "scaled") else Chain(int(name))
    return module.double()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def scenario(name: str, hows: list[str], transport: str = "collective", **schedule: Any) -> Scenario:
    """A step for each of `hows`."""
    return Scenario(
        model=lambda: make(name), loss_fn=lambda model, data: model(*data).square().mean(), optimizer=SGD,
        data=lambda step, rank, micro: (batch(step, rank), hows[step]), steps=len(hows),
        spec={"schedule": Schedule(debug=True, **schedule), "transport": transport},
    )  # fmt: skip


CASES: list[tuple[str, list[str], dict[str, Any]]] = [
    ("4", ["detached", "", "detached", ""], {}),
    ("4", ["no grad", "", "no grad"], {}),
    ("4", ["", "no grad", "detached"], {"prefetch": 0}),
    ("3", ["no grad", "no grad"], {"order": "recorded"}),
    ("backwards", ["", "", ""], {}),
    ("scaled", ["", "", ""], {}),
    ("scaled", ["", ""], {"prefetch": 0, "transport": "copy_engine"}),
    *((str(n), ["checkpoint"] * 2, {"prefetch": depth}) for n in (3, 5) for depth in (0, 1, 2)),
    ("4", ["checkpoint", "", "checkpoint"], {"keep": "all"}),
]


SOME = [scenario(name, hows, **more) for name, hows, more in (CASES if FULL else CASES[::2])]


def several() -> list[Seen]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "unshard.* is not what the schedule expects here: it works")
        return [run(one) for one in SOME]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.large), 2])
def test_weights_are_the_plain_modules(ranks: int) -> None:
    wanted = [plain(one, ranks) for one in SOME]
    for rank, found in enumerate(launch(several, nprocs=ranks, timeout=100)):
        for seen, want in zip(found, wanted, strict=True):
            alike(seen, want[rank], 1e-12)


class Tower(nn.Module):
    """Registered first, used second; perhaps not on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(WIDTH, WIDTH)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, image: bool) -> torch.Tensor:
        h = self.embed(x)
        if image:
            h = h + self.tower(x)
        for layer in self.layers:
            h = layer(h).tanh()
        return h


ORDER = ("embed", "tower", "layers.0", "layers.1", "layers.2")


@pytest.mark.parametrize(("order", "first"), [
    ((*ORDER, *reversed(ORDER)), False), (None, True),  # the first step has shown it
    (None, False),  # nor need all ranks show it
])  # fmt: skip
@each_rank(2, timeout=60)
def test_a_rank_may_leave_out_what_comes_where_the_schedule_has_it(order: Any, first: bool) -> None:
    """Three steps in which rank 1 has no image, or, with `first`, none but in the first."""
    params, model = fsdp.functionalize(Tower())
    state = fsdp.shard(params, Spec(fsdp.local_mesh(), schedule=Schedule(order=order)), fsdp.sgd(lr=0.1))
    forward_backward = T.forward_backward(model, lambda model, x, image: model(x, image).square().mean())
    for step in range(3):
        image = dist.get_rank() == 0 or (first and step == 0)
        state, _ = forward_backward(state, torch.randn(2, WIDTH), image)
        state = fsdp.step(state)
    assert state.steps == 3
