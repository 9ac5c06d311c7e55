"""Units that stay gathered, over several microbatches of a step: one gather each, and the same bits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.presets import PRESETS, placement_of, ranks_of
from support.problems import Block, Tree, batch, full_grads, loss_fn, net
from support.ranks import launch
from support.scenario import Scenario, Seen, alike, all_alike, on_ranks, plain
from support.tables import FULL, marked
from support.transactions import Boom, taken

import functional_fsdp as fsdp
from functional_fsdp import Schedule
from functional_fsdp import transforms as T

MICRO, STEPS = 3, 3


@cache
def both(model: Any) -> Any:
    return T.apply(model), T.forward_backward(model, loss_fn)


def driven(model: Any, state: fsdp.State, data: Any, last: bool) -> tuple[fsdp.State, torch.Tensor]:
    """With evaluations between microbatches."""
    evaluate, forward_backward = both(model)
    state, loss = forward_backward(state, data, last_microbatch=last)
    if last:
        return state, loss
    state, out = evaluate(state, data[0])
    return state, loss + out.sum()


def gathers(seen: Seen, preset: str) -> Counter[str]:
    """How often each bucket was gathered in the last step; where two axes shard it, along the first."""
    axis, found = placement_of(preset).weights[0], Counter[str]()
    for hop, n in seen.traffic.items():
        found[hop.bucket] += n * (hop.lane == "gather" and hop.axis == axis)
    return +found


ROWS = [(p, how, t) for p in PRESETS for how in ("driven", "by_unit") for t in ("collective", "copy_engine")]
ONCE = [("zero3", "driven", "collective"), ("zero3", "by_unit", "copy_engine")]


@pytest.mark.parametrize(("preset", "how", "transport"), marked(ROWS, ONCE))
def test_microbatches_share_one_gather_of_each_unit(preset: str, how: str, transport: str) -> None:
    ranks, spec = ranks_of(preset), {"transport": transport, "schedule": Schedule(keep=())}
    one = Scenario(preset=preset, loop=driven if how == "driven" else how, spec=spec, steps=STEPS, micro=MICRO)
    each = on_ranks(one, ranks)
    for seen, want in zip(each, plain(one, ranks), strict=True):  # losses of driven steps have what evaluations give
        alike(replace(seen, losses=want.losses) if how == "driven" else seen, want)
    once = all_alike(replace(one, spec=spec | {"schedule": Schedule(keep="all")}), ranks, 0.0, each)
    if placement_of(preset).weights and transport == "collective":  # a read is no collective
        for kept, anew in zip(once, each, strict=True):
            assert sorted(gathers(kept, preset).values()) == [1] * 6  # a unit has two buckets
            assert gathers(anew, preset)["blocks.0"] == 2 * MICRO + (how == "driven") * (MICRO - 1)


def accumulated(keep: Any, compiled: bool) -> tuple[list[Any], Counter[str]]:
    """A step over two microbatches; what its graph has, by kind."""
    params, model = fsdp.functionalize(net(depth=1))  # to trace them is what takes time
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), schedule=Schedule(keep=keep)), fsdp.sgd(lr=0.1))
    forward_backward = T.accumulate(T.forward_backward(model, lambda model, *data: loss_fn(model, data)), 2)

    def train_step(state: fsdp.State, *data: torch.Tensor) -> Any:
        state, loss = forward_backward(state, *data)
        return fsdp.step(state), loss

    data = batch(0, dist.get_rank(), 0)
    issued = Counter(one.kind for one in fsdp.lower(train_step, state, *data).collectives)
    step: Any = T.compile(train_step, "aot_eager") if compiled else train_step
    losses = []
    for _ in range(STEPS):
        state, loss = step(state, *data)
        losses.append(loss)
    return [losses, fsdp.full_params(state)], issued


def test_a_compiled_step_gathers_what_stays_once() -> None:
    each, once = (launch(accumulated, one, nprocs=2, processes=True) for one in (((), FULL), ("all", True)))
    for (kept, few), (anew, many) in zip(once, each, strict=True):
        torch.testing.assert_close(kept, anew, rtol=1e-12, atol=1e-13)
        assert few["all_gather"] == 4
        assert many["all_gather"] > 8
        assert few["reduce_scatter"] == many["reduce_scatter"]


# ---------------------------------------------------------------- ranks that leave units out


class Skipping(nn.Module):
    """Blocks that a rank leaves out, in this microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6) for _ in range(4))

    def forward(self, x: torch.Tensor, left_out: tuple[int, ...]) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            if i not in left_out:
                x = block(x)
        return x


LEFT_OUT = [[(), (1, 2), (3,)], [(0,), (), (1,)]]  # by rank, by microbatch


def skipping(keep: Any, stops: bool) -> list[Tree]:
    torch.manual_seed(0)
    params, model = fsdp.functionalize(Skipping().double())
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), schedule=Schedule(keep=keep)), fsdp.sgd(lr=0.1))
    f = T.forward_backward(model, lambda model, x, out: model(x, out).square().mean())
    rank, seen = dist.get_rank(), []

    def take(state: fsdp.State, step: int, met: list[str]) -> fsdp.State:
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
        for k in range(MICRO):
            state, _ = f(state, x * (k + 1), LEFT_OUT[rank][k], last_microbatch=k == MICRO - 1)
            if stops and step == k == 1 and rank == 0 and not met:
                raise Boom
        state = fsdp.finish_reductions(state)
        seen.append(full_grads(state))
        return fsdp.step(state)

    taken(state, take, 3)
    return seen


@pytest.mark.parametrize("stops", [False, True])
def test_ranks_may_leave_units_out_and_begin_a_step_anew(stops: bool) -> None:
    each, once = launch(skipping, ((), False), nprocs=2), launch(skipping, ("all", stops), nprocs=2)
    for mine, others in zip(once, each, strict=True):
        torch.testing.assert_close(mine, others, rtol=0, atol=0)
