"""What is under way on lanes when something ends at once, and when a job dies."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from support.ranks import each_rank

import functional_fsdp as fsdp
from functional_fsdp import Precision, Spec, launch
from functional_fsdp import _exact_sums as _steps
from functional_fsdp._plan.layout import LeafInfo, plan_layout

BIG = 200_000


steps: Any = _steps


@pytest.mark.parametrize("transport", ["collective", "copy_engine"])
@pytest.mark.parametrize("case", ["experts", "empty"])
@each_rank(2, processes=True)
def test_staging_is_not_given_back_under_a_reduction(case: str, transport: Any) -> None:
    """Reductions without a collective end before those in flight."""
    mesh = fsdp.local_mesh(data=1, expert=2) if case == "experts" else fsdp.local_mesh()
    params = {"a": torch.zeros(64), "b": torch.zeros(BIG), "c": torch.zeros(0)}
    if case == "experts":  # 'a' lies on an axis of one rank
        rules: Any = {"a": fsdp.zero3("data"), "*": fsdp.zero2("data", "expert")}
        lasts: tuple[bool, ...] = (True,)
    else:
        rules = {"a": fsdp.ddp("data"), "*": fsdp.zero2("data")}
        lasts = (False, False, True)
    state = fsdp.shard(params, Spec(mesh, rules, transport=transport), fsdp.sgd(lr=1.0))
    for step in range(5):
        before = fsdp.full_params(state)["b"].clone()
        for last in lasts:
            state, w = fsdp.unshard(state)
            grads = {key: torch.full_like(t, dist.get_rank() + 1.0 + step) for key, t in w.items()}
            state = fsdp.reduce(state, grads, last_microbatch=last)
        state = fsdp.step(state)
        assert torch.equal(before - fsdp.full_params(state)["b"], torch.full((BIG,), len(lasts) * (1.5 + step)))


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


@pytest.mark.parametrize("transport", ["collective", "copy_engine"])
@each_rank(2, processes=True)
def test_microbatches_after_the_last_one_count(transport: Any) -> None:
    """Rounds with any flags, on an axis that cuts nothing."""
    mesh = fsdp.local_mesh(replica=2, shard=1)
    spec = Spec(mesh, fsdp.hsdp("replica", "shard"), transport=transport, precision=Precision(sum="fp32"))
    for flags in itertools.product((False, True), repeat=3):
        state = fsdp.shard({"a": torch.zeros(300), "b": torch.zeros(7)}, spec, fsdp.sgd(lr=1.0))
        for k, last in enumerate(flags):
            for unit in state.units:
                state = fsdp.release(fsdp.unshard(state, unit)[0], unit)
            for unit in reversed(state.units):
                state, w = fsdp.unshard(state, unit)
                grads = {key: torch.full_like(t, (dist.get_rank() + 1.0) * 10**k) for key, t in w.items()}
                state = fsdp.reduce(state, grads, unit, last_microbatch=last)
                state = fsdp.release(state, unit)
        state = fsdp.step(state)
        assert all((leaf == -166.5).all() for leaf in fsdp.full_params(state).values()), flags


# ---------------------------------------------------------------- reductions that are under way


def made(units: int) -> fsdp.State:
    params = {f"u{i}.w": torch.zeros(300) for i in range(units)}
    return fsdp.shard(params, Spec(fsdp.local_mesh(), units=["u*"]), fsdp.sgd(lr=1.0))


def reduced(state: fsdp.State) -> fsdp.State:
    for unit in reversed(state.units):
        state = fsdp.reduce(state, {"w": torch.ones(300)}, unit)
    return state


def moved_to(state: fsdp.State, where: float) -> None:
    assert all((w == where).all() for w in fsdp.full_params(state).values())


@pytest.mark.parametrize(("whole_tree", "rebuild"), [(False, False), (False, True), (True, False)])
@each_rank(2, processes=True)
def test_a_look_at_gradients_finds_those_that_are_under_way(whole_tree: bool, rebuild: bool) -> None:
    """Perhaps of a State that somebody has rebuilt; then another look, in which ranks communicate."""
    state = fsdp.step(reduced(made(4)))
    state = fsdp.reduce(state, {f"u{i}.w": torch.ones(300) for i in range(4)}) if whole_tree else reduced(state)
    assert len(state.grads) == 4
    if rebuild:
        state = pytree.tree_map(lambda t: t, state)
    found = fsdp.local_shards(state, "grads")
    assert sum(float(part.sum()) for part in found.values()) == (44.0 if dist.get_rank() else 256.0) * 4
    fsdp.full_params(state)
    moved_to(fsdp.step(state), -2.0)


@pytest.mark.parametrize("microbatches", [1, 3])
@each_rank(2, processes=True)
def test_no_rank_waits_for_room_in_the_hosts_staging(microbatches: int) -> None:
    """One rank's reductions come to no end before the step, as those of a rank do whose peers are behind."""
    state = fsdp.step(reduced(made(6)))
    lanes: Any = state.version.lineage.runtime.lanes
    kind, waits = type(lanes), list[Any]()
    real = kind.wait

    def wait(self: Any, mark: Any) -> None:
        if mark is not None and mark.lane == "reduce":
            waits.append(mark)
        real(self, mark)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "passed", lambda self, mark: False)
        patch.setattr(kind, "wait", wait)
        for _ in range(microbatches):
            state = reduced(state)
        assert waits == []
        state = fsdp.step(state)
    moved_to(state, -1.0 - microbatches)


# ---------------------------------------------------------------- two states


@each_rank(2, processes=True)
def test_a_states_reductions_may_be_under_way_while_another_takes_a_step() -> None:
    one, two = (fsdp.step(reduced(made(4))) for _ in range(2))  # from here on the order is known
    one = reduced(one)
    two = fsdp.step(reduced(two))
    moved_to(fsdp.step(one), -2.0)
    moved_to(two, -2.0)
