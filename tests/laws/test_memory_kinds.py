"""Losses, gradients and weights have the same bits wherever a state lies: six strategies, on 1, 2 and 4 ranks, eagerly,
by hand, in compiled units and in a step that is compiled whole; with dropout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from support.presets import AXES, PRESETS
from support.problems import full_grads, mesh_and_placement
from support.ranks import launch
from support.tables import FULL, marked

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp._common.device import in_host_memory

KINDS = ("device", "pinned_host", {"main": "pinned_host"}, {"main": "pinned_host", "grads": "pinned_host"})
WIDTH = 9
STEPS = 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return y


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.dropout(self.head(x), 0.1)


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x).float().square().mean()
    return found


def trained(preset: str, way: str, micro: int, kind: Any) -> list[torch.Tensor]:
    """Losses, gradients (but those of a step that is compiled whole, which keeps none) and weights of each step."""
    mesh, _ = mesh_and_placement(preset)
    params, model = fsdp.functionalize(Dropping())
    placement = getattr(fsdp, preset)(*AXES[preset], memory_kind=kind)
    spec = fsdp.Spec(mesh, placement, precision=fsdp.Precision(compute=torch.bfloat16))
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-2))
    assert {in_host_memory(b.local) for b in state.main.values()} == {kind != "device"}
    compiled = {"backend": "aot_eager"} if way == "units" else False
    forward_backward = T.forward_backward(model, loss_fn, compile=compiled)

    def by_tree(state: fsdp.State, x: torch.Tensor, last_microbatch: bool = True) -> tuple[fsdp.State, torch.Tensor]:
        state, p = fsdp.unshard(state)
        grads, loss = torch.func.grad_and_value(lambda p: loss_fn(fsdp.bind(model, p), x))(p)
        return fsdp.reduce(state, grads, last_microbatch=last_microbatch), loss

    call: Any = forward_backward if way in ("eager", "units") else by_tree

    def train_step(state: fsdp.State, parts: list[torch.Tensor]) -> tuple[fsdp.State, list[torch.Tensor]]:
        losses = []
        for k, x in enumerate(parts):
            state, loss = call(state, x, last_microbatch=k == micro - 1)
            losses.append(loss)
        if way != "whole":
            state = fsdp.finish_reductions(state)
            losses += full_grads(state).values()
        return fsdp.step(state), losses

    if way == "whole":
        torch._dynamo.reset()
        train_step = T.compile(train_step, "aot_eager")
    found = []
    for i in range(STEPS):
        rank = mesh.get_rank()
        parts = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * i + 10 * k + rank)).bfloat16()
                 for k in range(micro)]  # fmt: skip
        torch.manual_seed(i)
        state, out = train_step(state, parts)
        found += [*(one.clone() for one in out), *(leaf.clone() for leaf in fsdp.full_params(state).values())]
    return found


def everywhere(preset: str, way: str, micro: int) -> list[list[torch.Tensor]]:
    few = way == "whole" or (way == "units" and not FULL)  # each compiles anew
    return [trained(preset, way, micro, kind) for kind in (KINDS[:2] if few else KINDS)]


ROWS = [*itertools.product(PRESETS, (1, 2, 4), ("eager", "tree", "units", "whole"), (1, 2))]
QUICK = [
    *((preset, 1 + i % 2, "eager", 2 - i % 2) for i, preset in enumerate(PRESETS) if preset != "zero3"),
    ("zero3", 2, "eager", 2), ("hfsdp", 4, "eager", 1), ("zero1", 2, "tree", 2), ("zero3", 2, "units", 1),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "ranks", "way", "micro"), marked(ROWS, QUICK))
def test_bits_are_the_same_wherever_a_state_lies(preset: str, ranks: int, way: str, micro: int) -> None:
    for device, *others in launch(everywhere, (preset, way, micro), nprocs=ranks):
        assert any(bool(one.isfinite().all() & one.any()) for one in device)
        for other in others:
            assert len(other) == len(device)
            assert all(map(torch.equal, other, device))
