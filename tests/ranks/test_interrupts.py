"""Interrupts: wherever a SIGINT strikes, no step is half taken, no state is lost, and no interrupt either."""

from __future__ import annotations

import copy
import pickle
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from support.problems import mesh_and_placement
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


def in_the_optimizer() -> tuple[bool, bool, bool]:
    """The new state is there, with the right bits, before the interrupt; whose handler is Python's again."""
    with interruptible():
        state, optimizer, wanted = ready()
        optimizer.struck = 1
        new = None
        try:
            new = fsdp.step(state)
            time.sleep(5)
        except KeyboardInterrupt:
            pass
        assert new is not None
        same = all(map(torch.equal, bits(new), wanted))
        return same, new.between_steps, signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_in_an_optimizer_comes_once_the_state_is_in_the_callers_hands() -> None:
    assert launch(in_the_optimizer, nprocs=1) == [(True, True, True)]


def at_the_next_verb() -> tuple[bool, int]:
    """An interrupt comes through before the first verb that is given the new state has done anything."""
    with interruptible():
        state, optimizer, wanted = ready()
        optimizer.struck = 1
        params = {"a": torch.ones(3, 4), "b": torch.ones(5), "c": torch.ones(2)}
        with pytest.raises(KeyboardInterrupt):
            fsdp.reduce(fsdp.step(state), params)
        new = fsdp.newest(state)
        same = all(map(torch.equal, bits(new), wanted))
        return same and new.between_steps, fsdp.step(fsdp.reduce(new, params)).steps


def test_an_interrupt_that_waits_comes_at_the_next_verb() -> None:
    assert launch(at_the_next_verb, nprocs=1) == [(True, 2)]


def own_handlers() -> tuple[list[int], bool, int]:
    """A handler of the program's own is called, once for each signal, and is there afterwards."""
    calls: list[int] = []

    def mine(number: int, frame: Any) -> None:
        calls.append(number)

    before = signal.signal(signal.SIGINT, mine)
    try:
        state, optimizer, _ = ready()
        optimizer.struck = 1
        state = fsdp.step(state)
        deadline = time.monotonic() + 60
        while not calls and time.monotonic() < deadline:
            time.sleep(0.001)
        return calls, signal.getsignal(signal.SIGINT) is mine, state.steps
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_of_the_programs_own_is_called_and_stays() -> None:
    assert launch(own_handlers, nprocs=1) == [([signal.SIGINT], True, 1)]


def saved_and_put_back() -> tuple[int, list[int], bool]:
    """A context around each epoch puts its own handler there, and the one that it found back: after a metric was
    reduced that is one of ours."""
    flags: list[int] = []
    with interruptible():
        state = fsdp.shard({"w": torch.ones(5)}, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
        for _ in range(3):
            before = signal.signal(signal.SIGINT, lambda *_: flags.append(1))
            state = fsdp.step(fsdp.reduce(state, {"w": torch.ones(5)}))
            signal.signal(signal.SIGINT, before)
            state, _ = fsdp.pmean(state, torch.ones(()))
        struck = 0
        for _ in range(3):
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                struck += 1
        state = fsdp.step(fsdp.reduce(state, {"w": torch.ones(5)}))
        return struck, flags, signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_was_saved_and_put_back_is_still_the_programs() -> None:
    assert launch(saved_and_put_back, nprocs=1) == [(3, [], True)]


def called_by_the_next() -> tuple[int, bool, int]:
    """A program's handler that calls the one before it, which is one of ours."""
    with interruptible():
        state = fsdp.shard({"w": torch.ones(5)}, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
        middle, _ = fsdp.unshard(state)
        ours: Any = signal.getsignal(signal.SIGINT)
        calls: list[int] = []

        def mine(number: int, frame: Any) -> None:
            calls.append(number)
            ours(number, frame)

        signal.signal(signal.SIGINT, mine)
        middle = fsdp.reduce(middle, {"w": torch.ones(5)})
        struck = False
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            struck = True
        return len(calls), struck, fsdp.step(middle).steps


def test_a_handler_may_call_the_one_before_it() -> None:
    assert launch(called_by_the_next, nprocs=1) == [(1, True, 1)]


def after_a_look() -> list[bool]:
    """Whether the program's own handler is there after each call that only looks at a state."""
    with interruptible():
        params, model = fsdp.functionalize(torch.nn.Linear(3, 2))
        state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
        looks = (
            lambda: fsdp.full_params(state),
            lambda: T.apply(model, lambda m: m(torch.ones(3)))(state),
            lambda: fsdp.state_dict(state),
        )
        found = []
        for look in looks:
            look()
            found.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        middle, _ = fsdp.unshard(state)
        fsdp.full_params(state)
        return [*found, signal.getsignal(signal.SIGINT) is signal.default_int_handler, middle.between_steps]


def test_who_only_looks_leaves_the_programs_handler() -> None:
    assert launch(after_a_look, nprocs=1) == [[True, True, True, False, False]]


def begins_and_waits(state: fsdp.State, interrupt: threading.Timer) -> None:
    interrupt.start()
    fsdp.unshard(state)
    time.sleep(60)


def looks_after_it(begun: int, preset: str, folder: str) -> list[bool]:
    """One rank is stopped in a step, or in its first wait, the other before it; then all look at the state, and go on
    from it."""
    mesh, placement = mesh_and_placement(preset)
    state = fsdp.shard({"a": torch.arange(12.0).view(3, 4)}, fsdp.Spec(mesh, placement), fsdp.sgd(lr=0.1))
    found = []
    for step, look in enumerate((fsdp.full_params, lambda state: fsdp.save(state, folder))):
        state, params = fsdp.unshard(state)
        state = fsdp.step(fsdp.reduce(state, params))
        if dist.get_rank() == begun:
            main = threading.main_thread().ident
            assert main is not None
            with interruptible(), pytest.raises(KeyboardInterrupt):
                begins_and_waits(state, threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)))
            Path(f"{folder}.stopped{step}").touch()
        while not Path(f"{folder}.stopped{step}").exists():  # a rank that waits and one that looks would be told so
            time.sleep(0.01)
        look(state)
        found.append(torch.allclose(fsdp.full_params(state)["a"], torch.arange(12.0).view(3, 4) * 0.9 ** (step + 1)))
    return found


@pytest.mark.parametrize(("begun", "preset"), [(0, "zero3"), (1, "ddp")])
def test_all_may_look_where_some_had_begun_a_step(begun: int, preset: str, tmp_path: Path) -> None:
    assert launch(looks_after_it, (begun, preset, str(tmp_path / "saved")), nprocs=2) == [[True, True]] * 2


def stopped_in_a_look(place: str, begun: bool) -> list[Any]:
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
    found: list[Any] = fsdp.full_params(state)["a"].flatten().tolist()
    return found


@pytest.mark.parametrize(("place", "begun"), [("tally", False), ("come_to_look", False), ("now", False), ("now", True)])
def test_whoever_is_stopped_in_a_look_meets_the_others(place: str, begun: bool) -> None:
    assert launch(stopped_in_a_look, (place, begun), nprocs=2, simulate=True) == [[float(i) for i in range(12)]] * 2


def stopped_in_the_middle(place: str) -> list[float]:
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
    found: list[float] = fsdp.full_params(fsdp.step(fsdp.reduce(state, params)))["a"].tolist()
    return found


@pytest.mark.parametrize("place", ["tally", "now"])
def test_who_looks_again_in_the_middle_of_a_step_hears_that_it_was_abandoned(place: str) -> None:
    assert launch(stopped_in_the_middle, (place,), nprocs=2, simulate=True) == [[0.0] * 4] * 2


def looks_at_two() -> tuple[list[float], str, list[float]]:
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
    before = fsdp.full_params(states[0])["a"].tolist()
    with pytest.raises(fsdp.ScheduleError) as caught:
        fsdp.full_params(states[dist.get_rank()])
    return before, str(caught.value), fsdp.full_params(states[1])["a"].tolist()


def test_looks_at_two_states_do_not_meet() -> None:
    for before, said, after in launch(looks_at_two, nprocs=2, simulate=True):
        assert (before, after) == ([1.0] * 4, [2.0] * 4)
        assert "another one to something else, or to another state" in said


def two_copies(kind: str, folder: str) -> tuple[list[float], list[str], list[list[float]]]:
    """Ranks copy a state twice, and look each at another copy: before the copies take a step, and after it. Then they
    save them, and step them."""
    made = copy.deepcopy if kind == "deepcopy" else lambda state: pickle.loads(pickle.dumps(state))

    def step(state: fsdp.State, gradient: float) -> fsdp.State:
        return fsdp.step(fsdp.reduce(state, {"a": torch.full((4,), gradient)}))

    state = fsdp.shard({"a": torch.ones(4)}, fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.sgd(lr=1.0))
    copies, rank, said = [made(state), made(state)], dist.get_rank(), []
    before = fsdp.full_params(copies[rank])["a"].tolist()
    copies = [step(copies[0], 1.0), step(copies[1], 2.0)]
    mine = copies[rank]
    for call in (fsdp.full_params, fsdp.state_dict, lambda _: fsdp.save(mine, folder), lambda _: step(mine, 3.0)):
        with pytest.raises(fsdp.FsdpError) as caught:
            call(mine)
        said.append(str(caught.value))
    return before, said, [fsdp.full_params(state)["a"].tolist() for state in (*copies, made(copies[1]))]


@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
def test_copies_of_a_state_do_not_meet_once_one_has_taken_a_step(kind: str, tmp_path: Path) -> None:
    for before, said, after in launch(two_copies, (kind, f"{tmp_path}/saved"), nprocs=2, simulate=True):
        assert (before, after) == ([1.0] * 4, [[0.0] * 4, [-1.0] * 4, [-1.0] * 4])
        looks = "another one to something else, or to another state"
        for got, want in zip(
            said, (looks, looks, "came with two states", "or they stepped different states"), strict=True
        ):
            assert want in got
        assert not (tmp_path / "saved").exists()


def twice() -> str:
    """Who interrupts again after a second means it: an update that takes for ever can be stopped."""
    with interruptible():
        state, optimizer, _ = ready()
        optimizer.struck = 2
        patience, _interrupts.PATIENCE = _interrupts.PATIENCE, 0.0
        try:
            with pytest.raises(KeyboardInterrupt):
                fsdp.step(state)
        finally:
            _interrupts.PATIENCE = patience
        with pytest.raises(fsdp.StaleStateError) as caught:
            fsdp.newest(state)
        return str(caught.value)


def test_a_second_interrupt_comes_through() -> None:
    assert "was stopped by KeyboardInterrupt while it was updating" in launch(twice, nprocs=1)[0]


def lost() -> tuple[str, bool, bool]:
    """An error of the caller's own between `step` and the assignment."""
    state, _, wanted = ready()
    with pytest.raises(fsdp.StaleStateError) as caught:
        fsdp.newest(state)
    fsdp.step(state)
    again = fsdp.newest(state)
    return str(caught.value), all(map(torch.equal, bits(again), wanted)), again.between_steps


def test_newest_gives_what_the_last_step_returned() -> None:
    ((text, same, resting),) = launch(lost, nprocs=1)
    assert "no step of this state's lineage has been taken" in text
    assert same
    assert resting


def nothing_in_threads() -> list[Any]:
    """Steps in another thread leave the handlers alone: signals are the main thread's."""
    from threading import Thread

    with interruptible():
        found: list[Any] = []

        def work() -> None:
            try:
                state, numbered = training("whole", "zero3")
                numbered(0)(state)
                found.append(signal.getsignal(signal.SIGINT))
            except Exception as error:
                found.append(error)

        thread = Thread(target=work)
        thread.start()
        thread.join()
        return [one if isinstance(one, Exception) else one is signal.default_int_handler for one in found]


def test_steps_in_other_threads_leave_handlers_alone() -> None:
    assert launch(nothing_in_threads, nprocs=1) == [[True]]


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


def withdrawn(way: str) -> tuple[str, bool, int]:
    """Rank 1 is stopped once ranks have voted, and does nothing until rank 0 has left its step, too."""
    state, _, wanted = ready()
    verb, name = (_step, "counting") if way == "after" else (Agreement, "compare")
    before = getattr(verb, name)

    def stopped(*args: Any, **kwargs: Any) -> Any:
        setattr(verb, name, before)
        raise KeyboardInterrupt

    if dist.get_rank():
        setattr(verb, name, stopped)
    params = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5), "c": torch.ones(2)}
    try:
        fsdp.step(state)
        raised = ""
    except (KeyboardInterrupt, fsdp.RestartError) as error:
        raised = type(error).__name__
    dist.barrier()
    base = state.version.origin
    assert isinstance(base, fsdp.State)
    new = fsdp.step(fsdp.reduce(base, params))
    return raised, all(map(torch.equal, bits(new), wanted)), new.steps


@pytest.mark.parametrize("way", ["within", "after"])
def test_who_waits_for_a_rank_that_was_stopped_after_the_vote_hears_of_it(way: str) -> None:
    """No interrupt comes through where ranks confirm a step: one that waited there for ever could not be stopped."""
    found = launch(withdrawn, (way,), nprocs=2, timeout=30)
    assert found == [("RestartError", True, 1), ("KeyboardInterrupt", True, 1)]
