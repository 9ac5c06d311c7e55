"""What is under way on lanes when something ends at once, and when a job dies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

import functional_fsdp as fsdp
from functional_fsdp import Precision, Spec, launch
from functional_fsdp import _exact_sums as _steps
from functional_fsdp._plan.layout import LeafInfo, plan_layout

BIG = 200_000


steps: Any = _steps


def stepped(case: str, transport: Any) -> int:
    """How many of five steps have wrong weights: reductions without a collective end before those in flight."""
    mesh = fsdp.local_mesh(data=1, expert=2) if case == "experts" else fsdp.local_mesh()
    params = {"a": torch.zeros(64), "b": torch.zeros(BIG), "c": torch.zeros(0)}
    if case == "experts":  # 'a' lies on an axis of one rank
        rules: Any = {"a": fsdp.zero3("data"), "*": fsdp.zero2("data", "expert")}
        lasts: tuple[bool, ...] = (True,)
    else:
        rules = {"a": fsdp.ddp("data"), "*": fsdp.zero2("data")}
        lasts = (False, False, True)
    state = fsdp.shard(params, Spec(mesh, rules, transport=transport), fsdp.sgd(lr=1.0))
    rank, wrong = dist.get_rank(), 0
    for step in range(5):
        before = fsdp.full_params(state)["b"].clone()
        for last in lasts:
            state, w = fsdp.unshard(state)
            grads = {key: torch.full_like(t, rank + 1.0 + step) for key, t in w.items()}
            state = fsdp.reduce(state, grads, last_microbatch=last)
        state = fsdp.step(state)
        wrong += not torch.equal(before - fsdp.full_params(state)["b"], torch.full((BIG,), len(lasts) * (1.5 + step)))
    return wrong


def several(cases: list[tuple[str, str]]) -> list[int]:
    return [stepped(*case) for case in cases]


def test_staging_is_not_given_back_under_a_reduction() -> None:
    cases = [(case, transport) for case in ("experts", "empty") for transport in ("collective", "copy_engine")]
    assert launch(several, (cases,), nprocs=2) == [[0] * len(cases)] * 2


# ---------------------------------------------------------------- what a job's own code raises


def dies(place: str, who: int, kind: type[BaseException]) -> tuple[list[str], float]:
    """Training in which rank `who`, once, has an error in a job; then from the state before the step."""
    mesh = fsdp.local_mesh()
    rank = dist.get_rank()
    spec = Spec(mesh, precision=Precision(sum="fp32"))
    state = fsdp.shard({f"u{i}": torch.zeros(512) for i in range(4)}, spec, fsdp.sgd(lr=1.0))
    real, left = steps.ordered_sum, [1] if rank == who else []

    def failing(*args: Any) -> None:
        if left and place == "sum":
            left.pop()
            raise kind("can't allocate memory")
        real(*args)

    steps.ordered_sum = failing
    met: list[str] = []
    try:
        for step in range(3):
            while True:
                try:
                    middle = state
                    for unit in state.units:
                        middle, _ = fsdp.unshard(middle, unit)
                        middle = fsdp.release(middle, unit)
                    for unit in reversed(state.units):
                        middle, w = fsdp.unshard(middle, unit)
                        middle = fsdp.reduce(middle, {k: torch.full_like(t, rank + 1.0) for k, t in w.items()}, unit)
                        middle = fsdp.release(middle, unit)
                    state = fsdp.step(middle)
                    break
                except (RuntimeError, MemoryError) as error:
                    met.append(f"{step} {type(error).__name__}")
                    with pytest.raises(fsdp.StaleStateError):  # what is left of the step is of no use
                        fsdp.step(middle)
        values = torch.cat([leaf.flatten() for leaf in fsdp.full_params(state).values()]).unique().tolist()
    finally:
        steps.ordered_sum = real
    assert len(values) == 1
    return met, values[0]


@pytest.mark.parametrize(("who", "kind"), [(0, RuntimeError), (1, MemoryError)])
def test_an_error_in_a_job_is_itself_and_costs_the_step_only(who: int, kind: type[BaseException]) -> None:
    for rank, (met, value) in enumerate(launch(dies, ("sum", who, kind), nprocs=2, timeout=60)):
        assert met == [f"0 {kind.__name__}" if rank == who else "0 RestartError"]
        assert value == -4.5


# ---------------------------------------------------------------- exact sums


def test_an_exact_sum_that_stays_whole_has_room_where_nothing_is_cut() -> None:
    leaves = [LeafInfo("w", (300,), torch.float32)]
    precision = Precision(sum="fp32")

    def staged(replica: int, shard: int, placement: fsdp.Placement) -> int:
        spec = Spec({"replica": replica, "shard": shard}, placement, precision=precision)
        (bucket,) = plan_layout(leaves, spec).buckets.values()
        return (bucket.staged + bucket.received) // (4 * bucket.numel)

    hsdp, hfsdp = fsdp.hsdp("replica", "shard"), fsdp.hfsdp("replica", "shard")
    assert staged(2, 1, hsdp) == 3  # what is sent, what comes in, the sum
    assert staged(2, 2, hsdp) == staged(1, 2, hsdp) == 2
    assert staged(2, 1, hfsdp) == staged(2, 2, hfsdp) == 2
    assert staged(1, 1, hsdp) == 1


def flagged(lasts: list[tuple[bool, ...]], transport: Any) -> list[list[float]]:
    """Gradients of a few rounds with these flags, on an axis that cuts nothing."""
    mesh = fsdp.local_mesh(replica=2, shard=1)
    rank, found = dist.get_rank(), []
    spec = Spec(mesh, fsdp.hsdp("replica", "shard"), transport=transport, precision=Precision(sum="fp32"))
    for flags in lasts:
        state = fsdp.shard({"a": torch.zeros(300), "b": torch.zeros(7)}, spec, fsdp.sgd(lr=1.0))
        for k, last in enumerate(flags):
            for unit in state.units:
                state, w = fsdp.unshard(state, unit)
                state = fsdp.release(state, unit)
            for unit in reversed(state.units):
                state, w = fsdp.unshard(state, unit)
                grads = {key: torch.full_like(t, (rank + 1.0) * 10**k) for key, t in w.items()}
                state = fsdp.reduce(state, grads, unit, last_microbatch=last)
                state = fsdp.release(state, unit)
        state = fsdp.step(state)
        found.append(torch.cat([leaf.flatten() for leaf in fsdp.full_params(state).values()]).unique().tolist())
    return found


@pytest.mark.parametrize("transport", ["collective", "copy_engine"])
def test_microbatches_after_the_last_one_count(transport: str) -> None:
    lasts = [(a, b, c) for a in (False, True) for b in (False, True) for c in (False, True)]
    for found in launch(flagged, (lasts, transport), nprocs=2):
        assert found == [[-166.5]] * len(lasts)


# ---------------------------------------------------------------- reductions that are under way


def looked_at(whole_tree: bool, rebuild: bool) -> tuple[int, list[float], list[float]]:
    """A look at gradients that are under way, perhaps of a State that somebody has rebuilt; then another one, in which
    ranks communicate.

    Returns:
        of how many units the state has gradients once `reduce` is over, the sums of what the look finds, and those of
        the weights after the step.
    """
    params = {f"u{i}.w": torch.zeros(300) for i in range(4)}
    state = one_step(fsdp.shard(params, Spec(fsdp.local_mesh(), units=["u*"]), fsdp.sgd(lr=1.0)))
    if whole_tree:
        state = fsdp.reduce(state, {path: torch.ones(300) for path in params})
    else:
        for unit in reversed(state.units):
            state = fsdp.reduce(state, {"w": torch.ones(300)}, unit)
    units = len(state.grads)
    if rebuild:
        state = pytree.tree_map(lambda t: t, state)
    found = fsdp.local_shards(state, "grads")
    fsdp.full_params(state)
    state = fsdp.step(state)
    return (
        units,
        [float(part.sum()) for part in found.values()],
        [float(w.sum()) for w in fsdp.full_params(state).values()],
    )


@pytest.mark.parametrize(("whole_tree", "rebuild"), [(False, False), (False, True), (True, False)])
def test_a_look_at_gradients_finds_those_that_are_under_way(whole_tree: bool, rebuild: bool) -> None:
    for rank, (units, sums, weights) in enumerate(launch(looked_at, (whole_tree, rebuild), nprocs=2)):
        assert units == 4
        assert sum(sums) == (256.0 if rank == 0 else 44.0) * 4
        assert weights == [-600.0] * 4


def staged(microbatches: int) -> tuple[int, list[float]]:
    """One rank's reductions come to no end before the step, as those of a rank do whose peers are behind.

    Returns:
        how often this rank has waited for one before the step, and the sums of the weights after it.
    """
    params = {f"u{i}.w": torch.zeros(300) for i in range(6)}
    state = one_step(fsdp.shard(params, Spec(fsdp.local_mesh(), units=["u*"]), fsdp.sgd(lr=1.0)))
    lanes: Any = state.version.lineage.runtime.lanes
    kind, waits = type(lanes), 0

    def wait(self: Any, mark: Any) -> None:
        nonlocal waits
        waits += mark is not None and mark.lane == "reduce"
        real(self, mark)

    real = kind.wait
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "passed", lambda self, mark: False)
        patch.setattr(kind, "wait", wait)
        for _ in range(microbatches):
            for unit in reversed(state.units):
                state = fsdp.reduce(state, {"w": torch.ones(300)}, unit)
        before = waits
        state = fsdp.step(state)
    return before, [float(w.sum()) for w in fsdp.full_params(state).values()]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_no_rank_waits_for_room_in_the_hosts_staging(microbatches: int) -> None:
    assert launch(staged, (microbatches,), nprocs=2) == [(0, [-300.0 * (1 + microbatches)] * 6)] * 2


# ---------------------------------------------------------------- two states


def interleaved() -> list[float]:
    """Reductions of a state are under way; then another state's step begins, and ends."""
    params = {f"u{i}.w": torch.zeros(300) for i in range(4)}
    spec = Spec(fsdp.local_mesh(), units=["u*"])
    one, two = (fsdp.shard(params, spec, fsdp.sgd(lr=1.0)) for _ in range(2))
    for state in (one, two):  # from here on the order is known
        one_step(state)
    one, two = fsdp.newest(one), fsdp.newest(two)
    for unit in reversed(one.units):
        one = fsdp.reduce(one, {"w": torch.ones(300)}, unit)
    two = one_step(two)
    one = fsdp.step(one)
    return [float(w.sum()) for state in (one, two) for w in fsdp.full_params(state).values()]


def one_step(state: fsdp.State) -> fsdp.State:
    for unit in reversed(state.units):
        state = fsdp.reduce(state, {"w": torch.ones(300)}, unit)
    return fsdp.step(state)


def test_a_states_reductions_may_be_under_way_while_another_takes_a_step() -> None:
    assert launch(interleaved, nprocs=2) == [[-600.0] * 8] * 2
