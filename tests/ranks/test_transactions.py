"""A step is a transaction: whatever stops it, on all ranks or one, the state before it trains on to the same bits."""

from __future__ import annotations

import signal
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.problems import LOOPS, batch, loss_fn, on
from support.ranks import each_rank
from support.tables import FULL, each
from support.transactions import (
    STEPS,
    Boom,
    another_order,
    check_that_different_collectives_do_not_commit,
    disturbed,
    start,
    train_step,
    undisturbed,
)

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp._distributed import Ballot, Case
from functional_fsdp._runtime.agreement import Agreement

in_turns = partial(launch, simulate=not FULL)  # two sums of which are compared bit for bit


@cache
def undisturbed_weights(preset: str, ranks: int) -> dict[str, torch.Tensor]:
    return in_turns(undisturbed, (preset,), nprocs=ranks)[0]


PLACES = ("before", "unshard", "grad", "reduce")


@pytest.mark.parametrize(("ranks", "preset", "place"), each((2, 4), ("zero3", "zero1", "hfsdp"), PLACES))
def test_an_exception_on_every_rank_costs_nothing(ranks: int, preset: str, place: str) -> None:
    expected = undisturbed_weights(preset, ranks)
    for weights, raised, restarts in in_turns(disturbed, (preset, place, list(range(ranks)), Boom), nprocs=ranks):
        assert raised == 1
        assert restarts == 0
        assert all(torch.equal(weights[key], expected[key]) for key in expected)


@pytest.mark.parametrize(("ranks", "preset", "place"), each((2, 4), ("zero3", "ddp", "hsdp"), PLACES[1:]))
def test_an_exception_on_one_rank_restarts_the_others(ranks: int, preset: str, place: str) -> None:
    expected = undisturbed_weights(preset, ranks)
    for rank, (weights, raised, restarts) in enumerate(
        in_turns(disturbed, (preset, place, [ranks - 1], Boom), nprocs=ranks)
    ):
        assert (raised, restarts) == ((1, 0) if rank == ranks - 1 else (0, 1))
        assert all(torch.equal(weights[key], expected[key]) for key in expected)


@pytest.mark.parametrize("who", [[0, 1], [0]])
def test_an_interrupt_between_two_verbs(who: list[int]) -> None:
    expected = launch(undisturbed, ("zero3",), nprocs=2)[0]
    for weights, _, _ in launch(disturbed, ("zero3", "grad", who, KeyboardInterrupt), nprocs=2):
        assert all(torch.equal(weights[key], expected[key]) for key in expected)


@each_rank(2, processes=True)
def test_no_rank_takes_a_step_whose_flags_are_not_equal() -> None:
    """Two microbatches, of which rank 1 says already at the first one that it is the last. Weights stay, and the state
    takes a step after that, with equal flags."""
    base, model = start("ddp")
    before = {path: leaf.clone() for path, leaf in fsdp.full_params(base).items()}

    def step(first: bool) -> fsdp.State:
        state = base
        for k, last in enumerate((first, True)):
            state, _ = LOOPS["whole"](model, state, batch(k, dist.get_rank()), last)
        return fsdp.step(state)

    with pytest.raises(fsdp.ScheduleError, match="The state before the step is valid"):
        step(dist.get_rank() == 1)
    assert all(torch.equal(before[path], leaf) for path, leaf in fsdp.full_params(base).items())
    assert step(False).steps == 1


def test_a_rank_does_not_commit_where_a_peer_cannot_come() -> None:
    """The second round of a vote, to which a peer has come that waits for a collective of this rank's."""
    agreement: Any = object.__new__(Agreement)
    agreement.size, agreement.votes, agreement.lineages = 2, 0, {}
    agreement.ballot, agreement.tally = (lambda *_: None), (lambda vote: (Ballot(Case.APART, 0), vote))
    with pytest.raises(fsdp.ScheduleError, match="so the step was not taken"):
        agreement.confirm()
    assert (agreement.votes, agreement.stage) == (0, "")


@each_rank(2, processes=True)
def test_ranks_that_stopped_at_different_units_do_not_mix_them_up() -> None:
    """Rank 0 stops after two units, rank 1 after four; both begin again, by another route, on clean lanes."""
    state, _ = start()
    before = fsdp.full_params(state)
    middle = state
    for unit in state.units[: 2 if dist.get_rank() == 0 else 4]:
        try:
            middle, _ = fsdp.unshard(middle, unit)
            middle = fsdp.release(middle, unit)
        except fsdp.RestartError:
            break
    state, params = fsdp.unshard(state)
    assert all(torch.equal(params[key], before[key]) for key in params)
    with pytest.raises(fsdp.StaleStateError, match="consumed by the restart of its step"):
        fsdp.unshard(middle, state.units[0])


def test_ranks_that_reduce_units_in_another_order_are_not_mixed_up() -> None:
    for grads in launch(another_order, nprocs=2):
        for path, part in grads.items():
            expected = 1.5 if path.startswith(("blocks.0.", "blocks.1.")) else 0.0
            assert torch.equal(part, torch.full_like(part, expected)), path


def test_ranks_that_issue_different_collectives_do_not_commit() -> None:
    check_that_different_collectives_do_not_commit()


@each_rank(2, turns=True)
def test_gradients_that_ranks_see_apart_are_voted_on_in_the_step() -> None:
    """A look at all units, and a microbatch in which the first rank leaves one out, which goes on from that look: its
    first use may be the look's backward."""
    params = {"a": {"w": torch.ones(3)}, "b": {"w": torch.ones(0)}}
    mesh = fsdp.local_mesh()
    base = fsdp.shard(params, fsdp.Spec(mesh, fsdp.zero2("data"), average="sum"), fsdp.sgd(lr=0.5))

    def microbatch(state: fsdp.State, units: str) -> fsdp.State:
        for unit in units:
            state, _ = fsdp.unshard(state, unit)
            state = fsdp.release(state, unit)
        for unit in reversed(units):
            state, w = fsdp.unshard(state, unit)
            state = fsdp.reduce(state, {"w": torch.full_like(w["w"], 1.0 + dist.get_rank())}, unit)
            state = fsdp.release(state, unit)
        return state

    def shown_and_stepped(state: fsdp.State) -> None:
        state = fsdp.finish_reductions(state)
        shown = fsdp.local_shards(state, "grads")["a.w"].tolist()
        assert dist.get_rank() or shown == [1.0, 1.0, 1.0], "of this rank alone: nobody has voted"
        fsdp.step(state)

    state = base
    for unit in "ab":
        state, _ = fsdp.unshard(state, unit)
        state = fsdp.release(state, unit)
    state = microbatch(state, "ab" if dist.get_rank() else "a")
    with pytest.raises(fsdp.ScheduleError, match="The state before the step is valid"):
        shown_and_stepped(state)
    state = fsdp.step(microbatch(base, "ab" if dist.get_rank() else "a"))
    assert fsdp.full_params(state)["a"]["w"].tolist() == [1 - 0.5 * 3.0] * 3


@each_rank(2, processes=True)
def test_an_evaluation_that_drops_its_state_costs_nothing() -> None:
    state, model = start()
    _, params = fsdp.unshard(state)  # a look that keeps the old state
    loss = loss_fn(fsdp.bind(model, params), on(state, batch(0, 0)))
    state = train_step(state, model, 0, lambda place: None)
    assert torch.isfinite(loss)
    assert state.between_steps


def hangs() -> str:
    state, _ = start()
    if dist.get_rank() == 1:
        time.sleep(4)
        return ""
    with pytest.raises(fsdp.CommError) as error:
        fsdp.unshard(state)
    return str(error.value)


def test_a_rank_that_never_comes_is_a_timeout_and_its_workers_are_not_used_again() -> None:
    text = launch(hangs, nprocs=3, timeout=2.0)[0]  # the only test on three ranks: its process groups have this timeout
    assert "all_gather over the axis 'data'" in text
    assert "failed after" in text
    assert "a rank died, hangs, or issued another collective" in text
    assert launch(looks_in_the_middle, nprocs=3) == [True] * 3


@pytest.mark.parametrize("loop", LOOPS)
@each_rank(2, processes=True)
def test_a_state_is_consumed_by_name(loop: str) -> None:
    base, model = start()
    middle, loss = LOOPS[loop](model, base, batch(0, dist.get_rank()), True)
    assert fsdp.step(middle).between_steps
    assert torch.isfinite(loss)
    with pytest.raises(fsdp.StaleStateError, match=r"consumed by step\(\) number 1"):
        fsdp.unshard(base)
    with pytest.raises(fsdp.StaleStateError, match=r"consumed by (step\(\) number 1|finish_reductions\(\))"):
        fsdp.unshard(middle)


@pytest.mark.parametrize("how", ["full_params", "save"])
@each_rank(2, processes=True)
def test_a_rank_that_abandoned_a_step_may_look_at_the_state_before_it(how: str, tmp_path: Path) -> None:
    """Rank 1 abandons a step and, before it trains on, exports or saves the state before it; its peer waits for
    reductions."""
    state, _ = start()
    before = fsdp.full_params(state)
    middle, params = fsdp.unshard(state)
    if dist.get_rank() == 0:
        with pytest.raises(fsdp.RestartError):
            fsdp.finish_reductions(fsdp.reduce(middle, params))
    if how == "save":
        state = fsdp.load(fsdp.save(state, tmp_path / "saved"), like=state)
    after = fsdp.full_params(state)
    fsdp.step(fsdp.reduce(*fsdp.unshard(state)))
    assert all(torch.equal(before[key], after[key]) for key in before)


def looks_in_the_middle() -> bool:
    """All ranks look at the base in the middle of its step, and of another state's: both steps go on."""
    state, _ = start()
    other, _ = start("ddp")
    middle, params = fsdp.unshard(state)
    other_middle, _ = fsdp.unshard(other)
    fsdp.full_params(state)
    fsdp.unshard(other)  # begins the other's step anew
    state = fsdp.step(fsdp.reduce(middle, params))
    with pytest.raises(fsdp.StaleStateError):
        fsdp.reduce(other_middle, params)
    return state.between_steps


def test_a_look_at_the_base_on_all_ranks_drops_nothing() -> None:
    assert launch(looks_in_the_middle, nprocs=2) == [True, True]


def interrupted_in_the_vote(stopped: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Rank 1 waits for rank 0 in `step` when an alarm interrupts it. Rank 0 comes after that."""
    state, _ = start()
    met: list[str] = []

    def alarm(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, alarm)
    while len(met) < STEPS:
        try:
            middle = fsdp.reduce(*fsdp.unshard(state))
            while len(met) == 1 and dist.get_rank() == 0 and not stopped.exists():
                time.sleep(0.01)
            if len(met) == 1 and dist.get_rank() == 1:
                signal.setitimer(signal.ITIMER_REAL, 0.5)
            state = fsdp.step(middle)
            met.append("step")
        except (KeyboardInterrupt, fsdp.RestartError) as error:
            met.append(type(error).__name__)
            if dist.get_rank() == 1:
                stopped.touch()
    return met, fsdp.full_params(state)


def test_an_interrupt_while_waiting_for_a_slower_rank_in_step(tmp_path: Path) -> None:
    (first, a), (second, b) = launch(interrupted_in_the_vote, (tmp_path / "stopped",), nprocs=2)
    assert first == ["step", "RestartError", "step", "step"]
    assert second == ["step", "KeyboardInterrupt", "step", "step"]
    assert all(torch.equal(a[key], b[key]) for key in a)
