"""Something beside the plan, such as a whole tree or metrics, where ranks left units out before: none waits for ever,
and every gradient counts once."""

from __future__ import annotations

import itertools
import random
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.problems import batch, loss_fn, net
from support.ranks import each_rank, launch
from support.scenario import SGD, Scenario, Seen, alike, plain, run
from support.tables import FULL, each
from torch.utils.checkpoint import checkpoint

import functional_fsdp as fsdp
from functional_fsdp import Schedule, Spec
from functional_fsdp import transforms as T
from functional_fsdp._common.record import Collective
from functional_fsdp._runtime.lanes import HostLanes

UNITS = 5
BESIDE: dict[str, Callable[[fsdp.State], fsdp.State]] = {
    "unshard": lambda state: fsdp.unshard(state)[0],
    "pmean": lambda state: fsdp.pmean(state, torch.ones(()))[0],
    "full_params": lambda state: (fsdp.full_params(state), state)[1],
}
SKIPPED = ((0,), (2,), (3, 4), (1, 3), *(((4,), (0, 1), (2, 3, 4)) if FULL else ()))


def ones(weights: Any, times: float = 1.0) -> Any:
    return {key: torch.full_like(w, times) for key, w in weights.items()}


def pass_of(state: fsdp.State, used: list[str], train: bool, last: bool = True) -> fsdp.State:
    """Units forward, and backward if it is training: a gradient of ones for each."""
    for unit in used:
        state, _ = fsdp.unshard(state, unit)
        state = fsdp.release(state, unit)
    for unit in reversed(used) if train else ():
        state, weights = fsdp.unshard(state, unit)
        state = fsdp.reduce(state, ones(weights), unit, last_microbatch=last)
        state = fsdp.release(state, unit)
    return state


def moved_to(state: fsdp.State, want: dict[str, float], *case: Any) -> None:
    """All elements of these leaves are there."""
    full = fsdp.full_params(state)
    for name, value in want.items():
        assert (full[name] == value).all(), (name, float(full[name].mean()), *case)


def five(size: int = 300) -> dict[str, torch.Tensor]:
    return {f"l{i}": torch.zeros(size) for i in range(UNITS)}


@pytest.mark.parametrize(("transport", "beside", "prefetch"), each(("collective", "copy_engine"), BESIDE, (0, 1, 2)))
@each_rank(2, timeout=30)
def test_who_left_units_out_starts_them_before_something_beside_the_plan(
    transport: Any, beside: str, prefetch: int
) -> None:
    spec = Spec(fsdp.local_mesh(), fsdp.zero3("data"), schedule=Schedule(prefetch=prefetch), transport=transport)
    for train, skipped in itertools.product((False, True), SKIPPED):
        state = fsdp.shard(five(), spec, fsdp.sgd(lr=1.0))
        used = [unit for i, unit in enumerate(state.units) if dist.get_rank() or i not in skipped]
        state = BESIDE[beside](pass_of(state, used, train))
        state = fsdp.step(pass_of(state, list(state.units), True))
        want = {f"l{i}": -1.0 - train * (0.5 if i in skipped else 1.0) for i in range(UNITS)}
        moved_to(state, want, train, skipped)


@pytest.mark.parametrize(
    "order", [None, pytest.param(["a", "b", "b", "a"], marks=pytest.mark.large), ["b", "a", "a", "b"]]
)
@each_rank(2, timeout=30)
def test_a_whole_tree_is_reduced_in_the_order_of_the_plan(order: Any) -> None:
    """Two microbatches; in the first rank 0 leaves a unit out, the second is a whole tree."""
    presets = "zero3", "zero2", "zero1", "ddp"
    for second, name, skipped, last in itertools.product((300, 5000), presets, "ab", (False, True)):
        spec = Spec(fsdp.local_mesh(), getattr(fsdp, name)("data"), schedule=Schedule(order=order))
        state = fsdp.shard({"a": torch.zeros(300), "b": torch.zeros(second)}, spec, fsdp.sgd(lr=1.0))
        used = [unit for unit in dict.fromkeys(order or state.units) if dist.get_rank() or unit != skipped]
        state = pass_of(state, used, True, last)
        state, weights = fsdp.unshard(state)
        state = fsdp.step(fsdp.reduce(state, ones(weights, 4.0)))
        want = {key: -4.0 - (0.5 if key == skipped else 1.0) for key in "ab"}
        moved_to(state, want, second, name, skipped, last)


@each_rank(2, timeout=30)
def test_two_models_of_one_mesh() -> None:
    """Rank 0 leaves units of one model out and goes on to the other, whose units rank 1 comes to later."""
    mesh, steps = fsdp.local_mesh(), 2
    states = [fsdp.shard(five(size), Spec(mesh, fsdp.zero3("data")), fsdp.sgd(lr=1.0)) for size in (300, 700)]
    for _ in range(steps):
        for k, state in enumerate(states):
            used = [unit for i, unit in enumerate(state.units) if dist.get_rank() or i != 4 * k]
            states[k] = pass_of(state, used, True)
        states = [fsdp.pmean(state, torch.ones(()))[0] for state in states]
        states = [fsdp.step(state) for state in states]
    for k, state in enumerate(states):
        moved_to(state, {f"l{i}": -steps * (0.5 if i == 4 * k else 1.0) for i in range(UNITS)}, k)


@pytest.mark.parametrize("late", [0, 1, 2])
@each_rank(2, timeout=30)
def test_a_frozen_unit_may_be_used_after_the_last_gradient(late: int) -> None:
    """Rank 0 gives gradients some units late, and all use a frozen unit after the last one that trains."""
    spec = Spec(fsdp.local_mesh(), fsdp.zero3("data"), trainable={"l0": False, "l3": False})
    state = fsdp.shard(five(), spec, fsdp.sgd(lr=1.0))
    for _ in range(2):
        held: list[Any] = []
        for unit in state.units:
            state = fsdp.release(fsdp.unshard(state, unit)[0], unit)
        for unit in reversed(state.units):
            state, weights = fsdp.unshard(state, unit)
            held.append((unit, ones(weights)))
            state = fsdp.release(state, unit)
            while len(held) > (0 if dist.get_rank() else late):
                whose, grads = held.pop(0)
                state = fsdp.reduce(state, grads, whose)
        for whose, grads in held:
            state = fsdp.reduce(state, grads, whose)
    moved_to(fsdp.step(state), {f"l{i}": 0.0 if i in (0, 3) else -2.0 for i in range(UNITS)})


def in_another_order(names: str) -> str:
    params = {"a": torch.zeros(300), "b": torch.zeros(5000), "c": torch.zeros(7000)}
    state = fsdp.shard(params, Spec(fsdp.local_mesh(), fsdp.zero3("data"), schedule=Schedule(order="recorded")))
    run = state.version.lineage.runtime
    try:
        for name in names if dist.get_rank() else reversed(names):
            hop = Collective("all_gather", "data", params[name].numel(), torch.float32, "", "gather", name)
            out = torch.zeros(params[name].numel())
            run.lanes.wait(run.lanes.submit("gather", (hop,), run.collective(hop, out, out[: len(out) // 2])))
    except fsdp.FsdpError as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def test_collectives_that_would_not_fit_are_not_issued() -> None:
    said = launch(in_another_order, ("ab",), nprocs=2, timeout=2, processes=True)
    assert any("ScheduleError: this rank is about to issue all_gather of" in one for one in said)
    assert not [one for one in said if one.startswith("went on")]


def calls_apart() -> str:
    """Rank 1 gathers all axes of a leaf, the others one of them; each comes in time to see who is along another."""
    mesh, rank = fsdp.local_mesh(replica=2, shard=2), dist.get_rank()
    state = fsdp.shard({"a": torch.zeros(300)}, Spec(mesh, fsdp.hfsdp("replica", "shard")), fsdp.sgd())
    dist.barrier()
    time.sleep((0.0, 0.2, 0.4, 0.4)[rank])
    try:
        fsdp.full_params(state) if rank == 1 else fsdp.unshard(state)
    except fsdp.FsdpError as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def test_other_collectives_are_found_along_every_axis() -> None:
    said = launch(calls_apart, nprocs=4, timeout=20)
    assert not [one for one in said if not one.startswith(("ScheduleError", "went on"))], said
    assert said[1].startswith("ScheduleError")


@each_rank(4, processes=True, timeout=30)
def test_who_is_slow_leaves_nothing_out() -> None:
    """Metrics over two axes between microbatches, at another speed on each rank: who is past them waits for who is not,
    which leaves nothing out."""
    params = {f"l{i}": torch.zeros(40 * 4**i) for i in range(UNITS)}
    spec = Spec(fsdp.local_mesh(replica=2, shard=2), fsdp.hsdp("replica", "shard"))
    state, steps = fsdp.shard(params, spec, fsdp.sgd(lr=1.0)), 6 if FULL else 3
    draw, real = random.Random(dist.get_rank()), HostLanes.wait

    def wait(self: Any, mark: Any) -> None:
        if draw.random() < 0.2:
            time.sleep(0.02 * draw.random())
        real(self, mark)

    with mock.patch.object(HostLanes, "wait", wait):
        for _ in range(steps):
            for _ in range(3):
                state, weights = fsdp.unshard(state)
                state = fsdp.reduce(state, ones(weights))
                state, _ = fsdp.pmean(state, torch.ones(()))
            state = fsdp.step(state)
    moved_to(state, dict.fromkeys(params, -3.0 * steps))


def elsewhere() -> tuple[str, int]:
    """One rank drives its first pass, in which ranks agree on each use; the other goes by the plan."""
    params, model = fsdp.functionalize(net(torch.float32))
    state = fsdp.shard(params, Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    forward_backward, said = T.forward_backward(model, loss_fn), ""
    try:
        if dist.get_rank():
            begun = state
            for unit in state.units:
                begun = fsdp.release(fsdp.unshard(begun, unit)[0], unit)
        else:
            forward_backward(state, batch(0, 0))
    except fsdp.FsdpError as error:
        said = f"{type(error).__name__}: {error}"
    while True:
        try:
            return said, fsdp.step(forward_backward(state, batch(0, dist.get_rank()))[0]).steps
        except fsdp.RestartError:
            continue


def test_ranks_of_which_one_agrees_on_uses_and_one_does_not_hear_of_it() -> None:
    (first, one), (second, two) = launch(elsewhere, nprocs=2, timeout=60)
    assert first.startswith(("ScheduleError: ranks came to unshard 'embed.weight'", "ScheduleError: rank 1 says"))
    assert second.startswith("ScheduleError: this rank waits for all_gather of 'embed.weight'")
    assert one == two == 1


# ---------------------------------------------------------------- regions that are recomputed, in programs that change


class Programmed(nn.Module):
    """Blocks in any order, some of it recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)) for _ in range(5))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, program: list[tuple[str, list[int]]]) -> torch.Tensor:
        for kind, units in program:

            def body(x: torch.Tensor, units: list[int] = units) -> torch.Tensor:
                for i in units:
                    x = x + self.blocks[i](x)
                return x

            if kind == "scale":
                x = x * self.scale
            else:
                x = checkpoint(body, x, use_reentrant=False) if kind == "again" else body(x)
        return x


def programs_of(seed: int) -> list[list[tuple[str, list[int]]]]:
    draw = random.Random(seed)
    some = lambda: [draw.randrange(5) for _ in range(draw.randint(1, 4))]  # noqa: E731
    return [
        [(draw.choice(("plain", "again", "again", "scale")), some()) for _ in range(draw.randint(1, 3))]
        + [("plain", [0])]
        for _ in range(3)
    ]


KNOWN = [[("plain", [4])], [("plain", [2])], [("scale", []), ("again", [4, 3, 4])]]


def programmed(seed: int) -> Scenario:
    """Released weights are filled with NaN."""
    schedule = fsdp.Schedule(debug=True, keep="all" if seed % 4 == 3 else None, prefetch=seed % 2)
    programs = programs_of(seed) if seed else KNOWN
    x = lambda step: torch.randn(2, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)  # noqa: E731
    return Scenario(
        model=lambda: Programmed().double(), loss_fn=lambda model, data: model(*data).square().mean(), optimizer=SGD,
        data=lambda step, rank, micro: (x(step), programs[step]), spec={"schedule": schedule}, steps=len(programs),
    )  # fmt: skip


SOME = [programmed(seed) for seed in range(16 if FULL else 8)]


def several() -> list[Seen]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # units that are used beside the plan
        return [run(one) for one in SOME]


def test_recomputed_regions_read_no_released_weights() -> None:
    """Units come twice in a region, and in programs other than those of the steps before."""
    wanted = [plain(one, 2) for one in SOME]
    for rank, found in enumerate(launch(several, nprocs=2)):
        for seen, want in zip(found, wanted, strict=True):
            alike(seen, want[rank], 1e-12)
