"""`torch.nn.utils.parametrize.cached()` around steps: it keeps values by module, and here a module has other weights in
each call."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.utils.parametrize as P
from support.chains import mean_square as loss_of
from support.tables import FULL, each

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

WIDTH, STEPS = 4, 4 if FULL else 2


class Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w @ w.T / 2 + w


class View(nn.Module):
    """What it gives has the weight's bytes."""

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.T


class Net(nn.Module):
    """A cell that is used twice with another one between, and a weight of no unit's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for part, how in ((self.a, View), (self.b, Symmetric)):
            P.register_parametrization(part, "weight", how())
        self.scale = nn.Parameter(torch.ones(WIDTH, WIDTH))
        P.register_parametrization(self, "scale", Symmetric())
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with P.cached():
            for part in (self.a, self.b, self.c, self.a, self.b):
                x = torch.tanh(part(x) @ self.scale)
        return x


WAYS = ("driven", "recomputed", "second order", "whole tree", "by hand")


def losses(way: str, preset: str, around: str) -> list[float]:
    """Of some steps; `around`: "steps", "step" or "" has the cache open."""
    module, mesh = Net(), fsdp.local_mesh()
    params, model = fsdp.functionalize(module)
    spec = fsdp.Spec(mesh, getattr(fsdp, preset)("data"), units=["a", "b", "c"])
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.3))
    x = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    how = T.remat(model, "a", "b") if way == "recomputed" else model
    driven = T.forward_backward(how, loss_of, second_order=way == "second order")
    skeletons = {unit: fsdp.functionalize(getattr(module, unit))[1] for unit in "abc"}

    def step(state: fsdp.State) -> tuple[fsdp.State, float]:
        if way == "whole tree":
            state, w = fsdp.unshard(state)
            grads, loss = torch.func.grad_and_value(lambda w: loss_of(fsdp.bind(model, w), x))(w)
            return fsdp.step(fsdp.reduce(state, grads)), loss.item()
        if way == "by hand":
            h, pullbacks = x, {}
            for unit in "abc":
                state, w = fsdp.unshard(state, unit)
                call = partial(lambda unit, w, h: torch.tanh(fsdp.bind(skeletons[unit], w)(h)), unit)
                h, pullbacks[unit] = T.vjp(call, w, h)
                state = fsdp.release(state, unit)
            dh = 2 * h / h.numel()
            for unit in "cba":
                state, w = fsdp.unshard(state, unit)
                dw, dh = pullbacks.pop(unit)(w, dh)
                state = fsdp.release(fsdp.reduce(state, dw, unit), unit)
            return fsdp.step(state), h.square().mean().item()
        state, out = driven(state, x)
        state, looked = T.apply(model)(fsdp.step(state), x)
        return state, out.item() + looked.sum().item()

    def cached(where: str) -> AbstractContextManager[Any]:
        return P.cached() if around == where else nullcontext()

    found = []
    with cached("steps"):
        for _ in range(STEPS):
            with cached("step"):
                state, loss = step(state)
            found.append(loss)
    assert not P._cache
    return found


@pytest.mark.parametrize(("way", "preset"), each(WAYS, ["zero3", "ddp"]))
def test_a_cache_that_is_open_has_the_weights_of_each_call(way: str, preset: str) -> None:
    """Also one that is shut by a rank while another one, that takes turns with it, has it open."""
    every = [fsdp.launch(losses, (way, preset, around), nprocs=2, simulate=True) for around in ("", "step", "steps")]
    for found in every:
        torch.testing.assert_close(found, every[0], rtol=1e-12, atol=0)
    assert every[0][0][0] != every[0][0][1]


def test_and_on_processes() -> None:
    found = [fsdp.launch(losses, ("driven", "zero3", around), nprocs=2) for around in ("", "steps")]
    assert found[0] == found[1] == fsdp.launch(losses, ("driven", "zero3", ""), nprocs=2, simulate=True)
