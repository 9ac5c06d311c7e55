"""Interrupts: wherever a SIGINT strikes, no step is half taken, no state is lost, and no interrupt either."""

from __future__ import annotations

import copy
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from support.problems import mesh_and_placement
from support.ranks import each_rank
from support.strikes import WAYS, bits, disturbed, interruptible, training
from support.tables import FULL

import functional_fsdp as fsdp
from functional_fsdp import _verbs as _step
from functional_fsdp import launch
from functional_fsdp import transforms as T
from functional_fsdp._common import calls as _interrupts
from functional_fsdp._common.record import Collective
from functional_fsdp._runtime.agreement import Agreement
from functional_fsdp._runtime.runtime import runtime_of

FEW = [("alone", "whole"), ("one of two", "by_unit"), ("both", "driven")]
ROWS = [
    pytest.param(ranks, who, way, id=f"{said}-{way}", marks=[pytest.mark.large] * ((said, way) not in FEW))
    for ranks, who, said in ((1, [0], "alone"), (2, [1], "one of two"), (2, [0, 1], "both"))
    for way in WAYS
]


@pytest.mark.parametrize(("ranks", "who", "way"), ROWS)
def test_an_interrupt_at_any_bytecode_costs_nothing(ranks: int, who: list[int], way: str) -> None:
    preset = "zero3" if ranks == 1 else "zero2"
    assert launch(disturbed, (way, preset, 12 if FULL else 6, 3, who), nprocs=ranks) == [[]] * ranks


class Optimizer:
    """Gradient descent, in the middle of which there are as many SIGINTs as `struck` says, once."""

    def __init__(self) -> None:
        self.struck = 0

    def init(self, main: Any) -> Any:
        return ()

    def update(self, grads: Any, opt: Any, main: Any, count: torch.Tensor) -> Any:
        tensors = [t for t in pytree.tree_leaves(main) if isinstance(t, torch.Tensor)]
        for i, (p, g) in enumerate(zip(tensors, pytree.tree_leaves(grads), strict=True)):
            p.sub_(0.1 * g)
            while i == len(tensors) // 2 and self.struck:
                self.struck -= 1
                signal.raise_signal(signal.SIGINT)
        return main, opt


def ready() -> tuple[fsdp.State, Optimizer, list[torch.Tensor]]:
    """A state with gradients, its optimizer, and the bits after the step."""
    found = []
    for _ in range(2):
        optimizer = Optimizer()
        params = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5), "c": torch.ones(2)}
        state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), optimizer)
        found.append((fsdp.reduce(state, params), optimizer))
    return *found[0], bits(fsdp.step(found[1][0]))


def test_an_interrupt_in_an_optimizer_comes_once_the_state_is_in_the_callers_hands() -> None:
    """The new state is there, with the right bits, before the interrupt; whose handler is Python's again."""
    with interruptible():
        state, optimizer, wanted = ready()
        optimizer.struck = 1
        new = None
        with suppress(KeyboardInterrupt):
            new = fsdp.step(state)
            time.sleep(5)
        assert new is not None
        assert all(map(torch.equal, bits(new), wanted))
        assert new.between_steps
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_waits_comes_at_the_next_verb() -> None:
    """Before the first verb that is given the new state has done anything."""
    with interruptible():
        state, optimizer, wanted = ready()
        optimizer.struck = 1
        params = {"a": torch.ones(3, 4), "b": torch.ones(5), "c": torch.ones(2)}
        with pytest.raises(KeyboardInterrupt):
            fsdp.reduce(fsdp.step(state), params)
        new = fsdp.newest(state)
        assert all(map(torch.equal, bits(new), wanted))
        assert new.between_steps
        assert fsdp.step(fsdp.reduce(new, params)).steps == 2


@contextmanager
def handled_by(mine: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, mine)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_of_the_programs_own_is_called_once_for_each_signal_and_stays() -> None:
    calls: list[int] = []
    mine = lambda number, frame: calls.append(number)  # noqa: E731
    with handled_by(mine):
        state, optimizer, _ = ready()
        optimizer.struck = 1
        state = fsdp.step(state)
        deadline = time.monotonic() + 60
        while not calls and time.monotonic() < deadline:
            time.sleep(0.001)
        assert calls == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is mine
        assert state.steps == 1


def plain_state() -> fsdp.State:
    return fsdp.shard({"w": torch.ones(5)}, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))


def test_a_handler_that_was_saved_and_put_back_is_still_the_programs() -> None:
    """A context around each epoch puts its own handler there, and the one that it found back: after a metric was
    reduced that is one of ours."""
    flags: list[int] = []
    with interruptible():
        state = plain_state()
        for _ in range(3):
            with handled_by(lambda *_: flags.append(1)):
                state = fsdp.step(fsdp.reduce(state, {"w": torch.ones(5)}))
            state, _ = fsdp.pmean(state, torch.ones(()))
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        fsdp.step(fsdp.reduce(state, {"w": torch.ones(5)}))
        assert flags == []
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_may_call_the_one_before_it() -> None:
    """A program's handler that calls the one before it, which is one of ours."""
    with interruptible():
        middle, _ = fsdp.unshard(plain_state())
        ours: Any = signal.getsignal(signal.SIGINT)
        calls: list[int] = []

        def mine(number: int, frame: Any) -> None:
            calls.append(number)
            ours(number, frame)

        signal.signal(signal.SIGINT, mine)
        middle = fsdp.reduce(middle, {"w": torch.ones(5)})
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert len(calls) == 1
        assert fsdp.step(middle).steps == 1


def test_who_only_looks_leaves_the_programs_handler() -> None:
    with interruptible():
        params, model = fsdp.functionalize(torch.nn.Linear(3, 2))
        state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
        looks = (
            lambda: fsdp.full_params(state),
            lambda: T.apply(model, lambda m: m(torch.ones(3)))(state),
            lambda: fsdp.state_dict(state),
        )
        for look in looks:
            look()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        middle, _ = fsdp.unshard(state)
        fsdp.full_params(state)
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert not middle.between_steps


def begins_and_waits(state: fsdp.State, interrupt: threading.Timer) -> None:
    interrupt.start()
    fsdp.unshard(state)
    time.sleep(60)


@pytest.mark.parametrize(("begun", "preset"), [(0, "zero3"), (1, "ddp")])
@each_rank(2, processes=True)
def test_all_may_look_where_some_had_begun_a_step(begun: int, preset: str, tmp_path: Path) -> None:
    """One rank is stopped in a step, or in its first wait, the other before it; then all look at the state, and go on
    from it."""
    mesh, placement = mesh_and_placement(preset)
    state = fsdp.shard({"a": torch.arange(12.0).view(3, 4)}, fsdp.Spec(mesh, placement), fsdp.sgd(lr=0.1))
    for step, look in enumerate((fsdp.full_params, lambda state: fsdp.save(state, tmp_path / "saved"))):
        stopped = tmp_path / f"stopped{step}"
        state, params = fsdp.unshard(state)
        state = fsdp.step(fsdp.reduce(state, params))
        if dist.get_rank() == begun:
            main = threading.main_thread().ident
            assert main is not None
            with interruptible(), pytest.raises(KeyboardInterrupt):
                begins_and_waits(state, threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)))
            stopped.touch()
        while not stopped.exists():  # a rank that waits and one that looks would be told so
            time.sleep(0.01)
        look(state)
        wanted = torch.arange(12.0).view(3, 4) * 0.9 ** (step + 1)
        assert torch.allclose(fsdp.full_params(state)["a"], wanted)


@pytest.mark.parametrize(("place", "begun"), [("tally", False), ("come_to_look", False), ("now", False), ("now", True)])
@each_rank(2, turns=True)
def test_whoever_is_stopped_in_a_look_meets_the_others(place: str, begun: bool) -> None:
    """Rank 0 is stopped in the ballot of a look, after it, or in its gather; rank 1 is past the ballot. Then both look.
    `begun`: a step of the state was given up before."""
    spec = fsdp.Spec(fsdp.local_mesh("cpu"), fsdp.zero3("data"))
    state, other = (fsdp.shard({"a": torch.arange(12.0).view(3, 4)}, spec, fsdp.sgd(lr=0.1)) for _ in range(2))
    run: Any = runtime_of(spec.mesh)
    look = run.come_to_look

    def stops(*args: Any) -> None:
        if place == "come_to_look":
            look(*args)
        raise KeyboardInterrupt

    if begun:
        fsdp.unshard(state)
    mid, _ = fsdp.unshard(other)
    if dist.get_rank():
        other, _ = fsdp.unshard(other)  # the ranks meet, which `state` has not heard of
    else:
        with pytest.raises(fsdp.RestartError):
            fsdp.full_params(mid)
        other, _ = fsdp.unshard(other)
    with ExitStack() as stack:
        if dist.get_rank() == 0:
            stack.enter_context(mock.patch.object(run, place, stops))
            stack.enter_context(pytest.raises(KeyboardInterrupt))
        else:
            stack.enter_context(pytest.raises(fsdp.RestartError))
        fsdp.full_params(state)
    assert fsdp.full_params(state)["a"].flatten().tolist() == [*range(12)]


@pytest.mark.parametrize("place", ["tally", "now"])
@each_rank(2, turns=True)
def test_who_looks_again_in_the_middle_of_a_step_hears_that_it_was_abandoned(place: str) -> None:
    """Rank 0 is stopped in a look in the middle of a step, and looks again. Then both begin the step anew."""
    spec = fsdp.Spec(fsdp.local_mesh("cpu"), fsdp.zero3("data"))
    state = fsdp.shard({"a": torch.arange(4.0), "b": torch.ones(4)}, spec, fsdp.sgd(lr=1.0))
    middle, _ = fsdp.unshard(state, ["a"])
    run: Any = runtime_of(spec.mesh)
    if dist.get_rank() == 0:
        with mock.patch.object(run, place, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            fsdp.full_params(middle)
    with pytest.raises(fsdp.RestartError, match="abandoned"):
        fsdp.full_params(middle)
    state, params = fsdp.unshard(state)
    assert fsdp.full_params(fsdp.step(fsdp.reduce(state, params)))["a"].tolist() == [0.0] * 4


ANOTHER = "another one to something else, or to another state"


@each_rank(2, turns=True)
def test_looks_at_two_states_do_not_meet() -> None:
    """Rank 0 is stopped where `shard` has made all but the number of its state. Ranks shard once more, twice, and look:
    at one state, each at another one, and at that one again."""
    spec = fsdp.Spec(fsdp.local_mesh("cpu"))

    def shard(value: float) -> fsdp.State:
        return fsdp.shard({"a": torch.full((4,), value)}, spec)

    with ExitStack() as stack:
        if dist.get_rank() == 0:
            run: Any = runtime_of(spec.mesh)
            stack.enter_context(mock.patch.object(run, "enroll", side_effect=KeyboardInterrupt))
            stack.enter_context(pytest.raises(KeyboardInterrupt))
        shard(0.0)
    if dist.get_rank():
        with pytest.raises(fsdp.RestartError):
            shard(1.0)
    states = shard(1.0), shard(2.0)
    assert fsdp.full_params(states[0])["a"].tolist() == [1.0] * 4
    with pytest.raises(fsdp.ScheduleError, match=ANOTHER):
        fsdp.full_params(states[dist.get_rank()])
    assert fsdp.full_params(states[1])["a"].tolist() == [2.0] * 4


@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
@each_rank(2, turns=True)
def test_copies_of_a_state_do_not_meet_once_one_has_taken_a_step(kind: str, tmp_path: Path) -> None:
    """Ranks copy a state twice, and look each at another copy: before the copies take a step, and after it. Then they
    save them, and step them."""
    made = copy.deepcopy if kind == "deepcopy" else lambda state: pickle.loads(pickle.dumps(state))

    def step(state: fsdp.State, gradient: float) -> fsdp.State:
        return fsdp.step(fsdp.reduce(state, {"a": torch.full((4,), gradient)}))

    state = fsdp.shard({"a": torch.ones(4)}, fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.sgd(lr=1.0))
    copies, rank = [made(state), made(state)], dist.get_rank()
    assert fsdp.full_params(copies[rank])["a"].tolist() == [1.0] * 4
    copies = [step(copies[0], 1.0), step(copies[1], 2.0)]
    calls: list[tuple[Any, str]] = [
        (fsdp.full_params, ANOTHER),
        (fsdp.state_dict, ANOTHER),
        (lambda mine: fsdp.save(mine, tmp_path / "saved"), "came with two states"),
        (lambda mine: step(mine, 3.0), "or they stepped different states"),
    ]
    for call, said in calls:
        with pytest.raises(fsdp.FsdpError, match=said):
            call(copies[rank])
    assert not (tmp_path / "saved").exists()
    after = [fsdp.full_params(state)["a"].tolist() for state in (*copies, made(copies[1]))]
    assert after == [[0.0] * 4, [-1.0] * 4, [-1.0] * 4]


def test_a_second_interrupt_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who interrupts again after a second means it: an update that takes for ever can be stopped."""
    monkeypatch.setattr(_interrupts, "PATIENCE", 0.0)
    with interruptible():
        state, optimizer, _ = ready()
        optimizer.struck = 2
        with pytest.raises(KeyboardInterrupt):
            fsdp.step(state)
        with pytest.raises(fsdp.StaleStateError, match="was stopped by KeyboardInterrupt while it was updating"):
            fsdp.newest(state)


def test_newest_gives_what_the_last_step_returned() -> None:
    """An error of the caller's own between `step` and the assignment."""
    state, _, wanted = ready()
    with pytest.raises(fsdp.StaleStateError, match="no step of this state's lineage has been taken"):
        fsdp.newest(state)
    fsdp.step(state)
    again = fsdp.newest(state)
    assert all(map(torch.equal, bits(again), wanted))
    assert again.between_steps


def test_steps_in_other_threads_leave_handlers_alone() -> None:
    """Signals are the main thread's."""
    found: list[Any] = []

    def work() -> None:
        state, numbered = training("whole", "zero3")
        numbered(0)(state)
        found.append(signal.getsignal(signal.SIGINT))

    with interruptible():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [signal.default_int_handler]


def between_two_hops() -> list[str]:
    """Rank 1 is interrupted while it waits for the first of two hops of a sum, and begins anew; rank 0, which waits for
    the second, lets the sum end."""
    run: Any = runtime_of(fsdp.local_mesh())
    hop = Collective("all_reduce", "data", 8, torch.float32, "sum", "side", "a test")
    tensor, met = torch.ones(8), []
    try:
        job = run.lanes.submit("side", (hop,), run.collective(hop, tensor, tensor))
        if dist.get_rank():
            raise KeyboardInterrupt
        run.lanes.wait(job)
        met.append(str(float(tensor.sum())))
        run.everyone("after it", "a test")
    except (KeyboardInterrupt, fsdp.RestartError) as error:
        met.append(type(error).__name__)
        if dist.get_rank():
            run.restart()
    return met


def test_a_rank_that_begins_anew_goes_on_with_what_others_wait_for() -> None:
    assert launch(between_two_hops, nprocs=2, timeout=20.0) == [["16.0", "RestartError"], ["KeyboardInterrupt"]]


@pytest.mark.parametrize("way", ["within", "after"])
@each_rank(2, processes=True, timeout=30)
def test_who_waits_for_a_rank_that_was_stopped_after_the_vote_hears_of_it(way: str) -> None:
    """Rank 1 is stopped once ranks have voted, and does nothing until rank 0 has left its step, too. No interrupt comes
    through where ranks confirm a step: one that waited there for ever could not be stopped."""
    state, _, wanted = ready()
    verb, name = (_step, "counting") if way == "after" else (Agreement, "compare")
    before = getattr(verb, name)

    def stopped(*args: Any, **kwargs: Any) -> Any:
        setattr(verb, name, before)
        raise KeyboardInterrupt

    if dist.get_rank():
        setattr(verb, name, stopped)
    with pytest.raises(KeyboardInterrupt if dist.get_rank() else fsdp.RestartError):
        fsdp.step(state)
    dist.barrier()
    base = state.version.origin
    assert isinstance(base, fsdp.State)
    params = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5), "c": torch.ones(2)}
    new = fsdp.step(fsdp.reduce(base, params))
    assert all(map(torch.equal, bits(new), wanted))
    assert new.steps == 1
