"""Steps that are disturbed, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.problems import batch, loss_fn, mesh_and_placement, net, on

import functional_fsdp as fsdp
from functional_fsdp import launch

STEPS, BAD = 4, 2


class Boom(Exception):
    pass


def start(preset: str = "zero3") -> tuple[fsdp.State, Any]:
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net(torch.float32))
    return fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.adamw(lr=1e-2)), model


def train_step(state: fsdp.State, model: Any, step: int, at: Callable[[str], None]) -> fsdp.State:
    at("before")
    state, params = fsdp.unshard(state)
    at("unshard")
    data = on(state, batch(step, dist.get_rank()))
    grads, _ = torch.func.grad_and_value(lambda p: loss_fn(fsdp.bind(model, p), data))(params)
    at("grad")
    state = fsdp.reduce(state, grads)
    at("reduce")
    return fsdp.step(state)


def undisturbed(preset: str) -> dict[str, torch.Tensor]:
    state, model = start(preset)
    for step in range(STEPS):
        state = train_step(state, model, step, lambda place: None)
    return fsdp.full_params(state)


def raising(error: type[BaseException], place: str, together: bool) -> Callable[[str], None]:
    """`together`: when all ranks are there; one that still waits in a verb would hear of the others first."""

    def at(here: str) -> None:
        if here == place:
            if together:
                dist.barrier()
            raise error("on purpose")

    return at


def disturbed(preset: str, place: str, who: list[int], error: type[BaseException]) -> tuple[dict[str, Any], int, int]:
    """Train; in step BAD, ranks in `who` raise `error` at `place`. All go on from the state before the step."""
    state, model = start(preset)
    together = len(who) == dist.get_world_size()

    def take(state: fsdp.State, step: int, met: list[str]) -> fsdp.State:
        bad = step == BAD and dist.get_rank() in who and {*met} <= {"RestartError"}
        return train_step(state, model, step, raising(error, place if bad else "", together))

    state, met = taken(state, take, STEPS)
    restarts = met.count("RestartError")
    return fsdp.full_params(state), len(met) - restarts, restarts


def taken(
    state: fsdp.State,
    take: Callable[[fsdp.State, int, list[str]], fsdp.State],
    steps: int,
    *errors: type[BaseException],
) -> tuple[fsdp.State, list[str]]:
    """Steps, each taken from the state before it until that is done; the names of the errors that were met.

    Args:
        take: (state, number of the step, what was met so far) -> the state after it.
        errors: that may come, beside those of an interrupt and of a peer that begins anew.
    """
    known: tuple[type[BaseException], ...] = (Boom, KeyboardInterrupt, fsdp.RestartError, *errors)
    met: list[str] = []
    for number in range(steps):
        while True:
            try:
                state = take(state, number, met)
                break
            except known as error:
                met.append(type(error).__name__)
    return state, met


def another_order() -> dict[str, torch.Tensor]:
    """Rank 0 reduces two units in another order than rank 1, and neither reduces the others."""
    state, _ = start()
    grads = {}
    for unit in ("blocks.0", "blocks.1"):
        state, w = fsdp.unshard(state, unit)
        grads[unit] = {key: torch.full_like(t, dist.get_rank() + 1.0) for key, t in w.items()}
        state = fsdp.release(state, unit)
    for unit in sorted(grads, reverse=dist.get_rank() == 0):
        state = fsdp.reduce(state, grads[unit], unit)
    return fsdp.local_shards(fsdp.finish_reductions(state), "grads")


def outside_the_plan() -> tuple[str, bool]:
    """Rank 1 uses a unit that the order does not name, rank 0 does not."""
    params, _ = fsdp.functionalize(net(torch.float32))
    order = [f"blocks.{i}" for i in (0, 1, 2, 2, 1, 0)]
    schedule = fsdp.Schedule(order)
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), schedule=schedule), fsdp.adamw(lr=1e-2))
    before = fsdp.full_params(state)
    middle, weights = fsdp.unshard(state)
    middle = fsdp.reduce(middle, {**weights, "head.weight": None})
    with pytest.raises(fsdp.ScheduleError) as error:
        fsdp.unshard(middle, "tail") if dist.get_rank() else fsdp.step(middle)
    after = fsdp.full_params(state)
    return str(error.value), all(torch.equal(before[key], after[key]) for key in before)


def check_that_different_collectives_do_not_commit() -> None:
    (stepped, same), (outside, same_too) = launch(outside_the_plan, nprocs=2)
    assert "ranks issued different collectives" in stepped
    assert "the step was not taken" in stepped
    assert "unshard('tail') is not what the schedule expects here" in outside
    assert "ranks came with step and 'tail'" in outside
    assert same
    assert same_too
