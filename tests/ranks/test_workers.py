"""`workers`: handles, what becomes of them when a rank dies or a call is stopped, and which code runs."""

from __future__ import annotations

import copy
import gc
import importlib
import os
import pickle
import signal
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.commands import ROOT

import functional_fsdp as fsdp
from functional_fsdp import Handle, LaunchError, WorkerGroup
from functional_fsdp._launch import pool as _pool
from functional_fsdp._launch import pool as _server
from functional_fsdp._launch import transfer as _results
from functional_fsdp._launch import worker as _worker
from functional_fsdp._launch import workers as _workers
from functional_fsdp._runtime import runtime as _runtime
from functional_fsdp._runtime.runtime import runtime_of

SOON = 60  # seconds: far above what a busy machine takes, far below the timeout of a collective


@pytest.fixture(scope="module")
def shared() -> Iterator[WorkerGroup]:
    with fsdp.workers(nprocs=2) as w:
        yield w


@pytest.fixture
def w(shared: WorkerGroup) -> WorkerGroup:
    """Two workers, new ones if a test has ended the last."""
    return shared


def rank() -> int:
    return int(os.environ["RANK"])


# ------------------------------------------------------------------------------------------------------- handles


def compilers() -> bool:
    return "torch._inductor.compile_fx" in sys.modules


@pytest.mark.parametrize("gpus", [pytest.param(0, marks=pytest.mark.large), 2])
def test_the_server_imports_compilers_only_where_it_may_fork_after_that(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With GPUs the import initializes CUDA, which no fork of that process could use."""
    for name in ("torch._dynamo", "torch._inductor"):
        importlib.import_module(name)
    monkeypatch.setattr(_pool, "_server", [])  # one of its own
    monkeypatch.setattr(_server, "PRELOAD", [])  # of tests: it runs none
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with fsdp.workers(nprocs=1) as w:
        assert w(compilers).get() == [not gpus]
    _pool._server.pop().end()


@pytest.mark.large
def test_a_function_may_read_a_configuration_of_torch() -> None:
    """A module of a class of its own, which goes by name as any other does."""
    config = importlib.import_module("torch._dynamo.config")

    def limit() -> int:
        return int(config.recompile_limit)

    assert fsdp.launch(limit, nprocs=2) == [limit()] * 2


def test_a_call_returns_a_handle_that_prints_each_rank_and_is_given_to_the_next(w: WorkerGroup) -> None:
    value = w(lambda a, *, b: torch.full((2,), float(rank() + a + b)), 1, b=1)
    assert type(value) is Handle
    assert repr(value) == "rank 0: tensor([2., 2.])\nrank 1: tensor([3., 3.])"
    assert [t.tolist() for t in value.get()] == [[2.0, 2.0], [3.0, 3.0]]
    assert [t.tolist() for t in w(torch.neg, value).get()] == [[-2.0, -2.0], [-3.0, -3.0]]
    inside = w(lambda d: d["x"][0] + value, {"x": [value]})  # in an argument, and in a closure
    assert [t.tolist() for t in inside.get()] == [[4.0, 4.0], [6.0, 6.0]]


def test_a_handle_may_be_what_is_called(w: WorkerGroup) -> None:
    add = w(lambda: lambda x: x + rank())
    assert w(add, 1).get() == [1, 2]


def test_a_long_value_is_one_line_a_rank(w: WorkerGroup) -> None:
    lines = repr(w(torch.zeros, 40, 40)).splitlines()
    assert [line[:20] for line in lines] == ["rank 0: tensor([[0.,", "rank 1: tensor([[0.,"]
    assert all(len(line) == len("rank 0: ") + _results.WIDTH and line.endswith("…") for line in lines)


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no picture")


def test_a_value_that_cannot_be_printed_says_so(w: WorkerGroup) -> None:
    assert "rank 1: cannot be printed: Traceback" in repr(w(Unprintable))


def test_tuples_are_a_handle_for_each_item(w: WorkerGroup) -> None:
    a, (b, c) = w(lambda: (rank(), "x")), ("b", "c")
    assert isinstance(a, tuple)
    first, second = a
    assert (first.get(), second.get()) == ([0, 1], ["x", "x"])
    assert w(lambda x, y: (x, y), first, [second])[1].get() == [["x"], ["x"]]
    uneven = w(lambda: (1,) * (rank() + 1))
    assert uneven.get() == [(1,), (1, 1)]
    assert w(len, uneven).get() == [1, 2]
    assert w(tuple).get() == [(), ()]
    assert b + c == "bc"


def kept_values() -> int:
    return len(sys.modules["functional_fsdp._launch.transfer"]._values)


def kept_by(w: WorkerGroup) -> list[int]:
    """Of each rank, without the handles that earlier tests left as garbage: a collection at any time drops those."""
    gc.collect()
    return w(kept_values).get()


def test_values_without_a_handle_are_dropped(w: WorkerGroup) -> None:
    kept = w(int)
    count = kept_by(w)
    value, (one, _) = w(bytes, 10), w(lambda: (1, 2))
    del value, one, _
    assert kept_by(w) == count
    assert kept.get() == [0, 0]


def fails_on_one(how: type, says: str = "") -> tuple[bytes, bytes]:
    """says: a file that rank 0 makes. It ends well all the same."""
    if rank() == 1 and how is not KeyboardInterrupt:
        raise how("bad data")
    with suppress(KeyboardInterrupt):
        if says:
            Path(says).touch()
            time.sleep(600)
    return b"1", b"2"


def test_the_result_of_a_call_that_failed_elsewhere_is_dropped(w: WorkerGroup, tmp_path: Path) -> None:
    count = kept_by(w)
    with pytest.raises(LaunchError, match="bad data"):
        w(fails_on_one, ValueError)
    assert kept_by(w) == count
    with interrupted(tmp_path / "said"):
        w(fails_on_one, KeyboardInterrupt, str(tmp_path / "said"))
    assert kept_by(w) == count


def test_an_interrupt_before_a_call_is_sent_loses_no_value_that_is_to_be_dropped(
    w: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = kept_by(w)
    value = w(bytes, 10)
    del value
    gc.collect()
    with monkeypatch.context() as patch:
        patch.setattr(_workers, "interrupts", stopped)
        with pytest.raises(KeyboardInterrupt):
            w(int)
    assert kept_by(w) == count


def fails_with(refs: list[Any]) -> None:
    gc.disable()
    value = torch.ones(3)
    refs.append(weakref.ref(value))
    raise ValueError("bad data")


def alive(refs: list[Any]) -> list[bool]:
    gc.enable()
    return [ref() is not None for ref in refs]


def test_what_a_function_held_is_gone_once_it_has_raised(w: WorkerGroup) -> None:
    refs = w(list)
    with pytest.raises(LaunchError, match="bad data"):
        w(fails_with, refs)
    assert w(alive, refs).get() == [[False], [False]]


def stopped(*_: object) -> None:
    raise KeyboardInterrupt


def kept_messages() -> list[str]:
    """The variables of the loop that serves calls which refer to something that was sent."""
    frame = sys._getframe()
    while frame.f_code is not _worker._Worker.work.__code__:
        assert frame.f_back is not None
        frame = frame.f_back
    return [name for name, value in frame.f_locals.items() if isinstance(value, bytes | tuple)]


def test_a_worker_keeps_no_result_that_was_fetched(w: WorkerGroup) -> None:
    assert w(bytes, 10).get() == [bytes(10)] * 2
    assert w(kept_messages).get() == [[], []]


def test_a_handle_stays_with_its_workers(w: WorkerGroup) -> None:
    value = w(int)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"a handle is a value on workers: .* fetch the value with .get\(\)"):
            copied(value)
    with fsdp.workers(nprocs=1) as other, pytest.raises(ValueError, match=r"was given a handle of other workers"):
        other(int, value)
    with pytest.raises(ValueError, match=r"launch\(int\) was given a handle of other workers"):
        fsdp.launch(int, (value,), nprocs=2)


def test_a_value_whose_class_was_defined_anew_is_not_fetched(w: WorkerGroup) -> None:
    def define() -> type:
        class Box:
            def __init__(self) -> None:
                self.number = rank()

        return Box

    cls = define()
    value = w(cls)
    assert type(value.get()[1]) is cls
    cls = define()
    gc.collect()
    with pytest.raises(LaunchError, match=r"^Handle.get\(\): what rank 0 sent .* Box that .* defined anew") as caught:
        value.get()
    assert caught.value.rank == 0
    assert w(vars, value).get() == [{"number": 0}, {"number": 1}]
    assert [one.number for one in w(cls).get()] == [0, 1]


def setup() -> fsdp.State:
    params = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5)}
    return fsdp.shard(params, fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.sgd(lr=0.1))


def train(state: fsdp.State, steps: int, fails: int = -1, says: str = "") -> tuple[fsdp.State, float]:
    """Steps that multiply by 0.9. says: a file that it makes in the fourth."""
    for step in range(steps):
        if step == 3 and says:
            Path(says).touch()
        state, params = fsdp.unshard(state)
        if step == fails and rank() == 1:
            raise ValueError("bad data")
        time.sleep(0.01 if says else 0)
        state = fsdp.step(fsdp.reduce(state, params))
    return state, float(state.steps)


def whole(state: fsdp.State) -> dict[str, torch.Tensor]:
    return fsdp.full_params(state)


def expected(steps: int) -> torch.Tensor:
    return torch.arange(12.0).view(3, 4) * 0.9**steps


def same(w: WorkerGroup, state: Any, steps: int) -> bool:
    return all(torch.allclose(found["a"], expected(steps)) for found in w(whole, state).get())


def test_a_state_stays_and_is_consumed_like_any_other(w: WorkerGroup) -> None:
    first = w(setup)
    assert "between steps" in repr(first).splitlines()[1]
    state, steps = w(train, first, 3)
    assert steps.get() == [3.0, 3.0]
    state, steps = w(train, state, 2)
    assert same(w, state, 5)
    assert "consumed by step() number 1" in repr(first)
    with pytest.raises(LaunchError, match=r"StaleStateError: unshard: this State was consumed by step\(\) number 1"):
        w(train, first, 1)
    with pytest.raises(LaunchError, match=r"^Handle.get\(\): rank \d of 2 failed: .* return tensors, not a State"):
        state.get()


def test_closing(w: WorkerGroup) -> None:
    mine = fsdp.workers(nprocs=1)
    value, pids = mine(int), mine(os.getpid).get()
    assert repr(mine) == "workers(nprocs=1): idle"
    mine.close()
    mine.close()
    assert repr(mine) == "workers(nprocs=1): closed"
    assert repr(value) == "Handle of workers that are gone: they were closed"
    for call, name in ((lambda: mine(int), "int"), (value.get, r"Handle.get\(\)")):
        with pytest.raises(
            RuntimeError, match=rf"workers\(nprocs=1\) was closed, so {name} cannot run. Start new ones: fsdp.workers"
        ):
            call()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_sets_of_workers_do_not_meet() -> None:
    with fsdp.workers(nprocs=2) as one, fsdp.workers(nprocs=2) as two:
        pids = one(os.getpid).get() + two(os.getpid).get() + fsdp.launch(os.getpid, nprocs=2)
        assert len(set(pids)) == 6


def test_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"workers\(nprocs=0\): nprocs is 0; expected the number of ranks, at least 1"):
        fsdp.workers(nprocs=0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(RuntimeError, match=r"this process already is rank 0 of 1"):
        fsdp.workers()


# ------------------------------------------------------------------------------------- deaths, errors, interrupts


def test_a_worker_that_dies_takes_its_handles_along() -> None:
    with fsdp.workers(nprocs=2) as w:
        state = w(setup)
        pids = w(os.getpid).get()
        os.kill(pids[1], signal.SIGKILL)
        deadline = time.monotonic() + SOON
        while "gone" not in repr(state) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert repr(state) == "Handle of workers that are gone: rank 1 was killed by SIGKILL"
        assert "gone (rank 1 was killed by SIGKILL); the next call starts new ones" in repr(w)
        for call in (lambda: w(train, state, 1), state.get):
            with pytest.raises(LaunchError, match=r"rank 1 was killed by SIGKILL. What they held is lost. Begin again"):
                call()
        assert not {*w(os.getpid).get()} & {*pids}
        state = w(setup)
        assert same(w, w(train, state, 2)[0], 2)
        with pytest.raises(LaunchError, match=r"rank 1 of 2 failed: the process exited with code 3") as caught:
            w(lambda state: (rank() and os._exit(3), whole(state)), w(setup))  # in a call, while the other waits
        assert caught.value.rank == 1
        assert "Handle of workers that are gone: rank 1 exited with code 3" in repr(state)


def test_an_error_on_one_rank_ends_the_call_and_keeps_the_last_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other waits for it in a collective; it is stopped, and both go on from the same state."""
    monkeypatch.setattr(_pool, "GRACE", 0.3)
    with fsdp.workers(nprocs=2) as w:
        state, pids = w(setup), w(os.getpid).get()
        begun = time.monotonic()
        with pytest.raises(LaunchError, match=r"(?s)rank 1 of 2 failed: ValueError: bad data.*in train") as caught:
            w(train, state, 100, fails=4)
        assert time.monotonic() - begun < SOON
        assert str(caught.value).endswith("Stopped while still running: rank 0.")
        assert next(iter(caught.value.reports)) == 1
        assert w(os.getpid).get() == pids
        assert same(w, state, 4)
        state, _ = w(train, state, 2)
        assert same(w, state, 6)


def replicated() -> fsdp.State:
    spec = fsdp.Spec(fsdp.local_mesh("cpu"), fsdp.ddp("data"))
    return fsdp.shard({"a": torch.arange(12.0).view(3, 4)}, spec, fsdp.sgd(lr=0.1))


def begins_on(state: fsdp.State, begun: int) -> None:
    """Fails on every rank, before a step or within it; with whole weights a step begins without a collective."""
    if rank() == begun:
        fsdp.unshard(state)
    raise ValueError("bad data")


@pytest.mark.parametrize("begun", [0, 1])
def test_ranks_that_stopped_before_a_step_and_in_it_go_on_from_one_state(w: WorkerGroup, begun: int) -> None:
    state = w(replicated)
    for steps in (0, 1):
        with pytest.raises(LaunchError, match="bad data"):
            w(begins_on, state, begun)
        if steps:
            assert same(w, state, steps)
        state, _ = w(train, state, 1)
    assert same(w, state, 2)


def through_pickle(state: fsdp.State) -> fsdp.State:
    return pickle.loads(pickle.dumps(state))


@pytest.mark.parametrize("begun", [0, 1])
@pytest.mark.parametrize("again", [copy.deepcopy, through_pickle])
def test_ranks_that_stopped_before_a_step_of_a_copy_and_in_it_go_on_from_one_state(again: Any, begun: int) -> None:
    """Copies have no number by which ranks know them."""
    with fsdp.simulate(data=2) as ranks:
        copied = ranks(again, ranks(replicated))
        with pytest.raises(LaunchError, match="bad data"):
            ranks(begins_on, copied, begun)
        copied, _ = ranks(train, copied, 1)
        assert same(ranks, copied, 1)


def traced(state: fsdp.State) -> fsdp.State:
    """A step that a compiler replays: it changes what is on the device, and nothing that the host knows."""
    state.count.add_(1)
    return state._evolve(version=state.version.lineage.stepped(state.version))


def test_a_count_that_one_rank_has_read_after_compiled_steps_is_not_another_one() -> None:
    with fsdp.simulate(data=2) as ranks:
        state = ranks(traced, ranks(replicated))
        assert ranks(lambda state: state.steps if rank() else None, state).get() == [None, 1]
        with pytest.raises(LaunchError, match="bad data"):
            ranks(begins_on, state, 1)
        state, _ = ranks(train, state, 1)
        assert ranks(lambda state: state.steps, state).get() == [2, 2]


def stops_in_a_meeting(state: fsdp.State) -> None:
    """All begin the step anew, so they meet. Rank 1 is stopped there; rank 0 goes on, and waits for it in the step."""
    fsdp.unshard(state)
    lanes: Any = runtime_of(state.spec.mesh).lanes
    with mock.patch.object(lanes, "synchronize", side_effect=KeyboardInterrupt) if rank() else nullcontext():
        train(state, 1)


def test_a_rank_that_was_stopped_in_a_meeting_meets_the_others_after_the_call() -> None:
    with fsdp.simulate(data=2) as ranks:
        state = ranks(replicated)
        with pytest.raises(LaunchError, match="KeyboardInterrupt"):
            ranks(stops_in_a_meeting, state)
        assert same(ranks, state, 0)
        assert same(ranks, ranks(train, state, 2)[0], 2)


@contextmanager
def interrupted(file: Path) -> Iterator[None]:
    """KeyboardInterrupt is raised within, by a Ctrl-C once the file is there."""

    def strike() -> None:
        deadline = time.monotonic() + SOON
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    file.unlink(missing_ok=True)
    thread = threading.Thread(target=strike)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match="all 2 ranks have stopped, and keep what they hold"):
        yield
    thread.join()


@pytest.mark.parametrize("again", [1, 2])
def test_an_interrupt_keeps_the_state_of_the_last_whole_step(w: WorkerGroup, tmp_path: Path, again: int) -> None:
    file = tmp_path / "said"
    state, pids = w(setup), w(os.getpid).get()
    for _ in range(again):
        before = w(lambda state: state.steps, w(lambda x: x, state)).get()[0]
        begun = time.monotonic()
        with interrupted(file):
            w(train, state, 10**6, says=str(file))
        assert time.monotonic() - begun < SOON
        steps = w(lambda state: state.steps, state).get()
        assert steps[0] == steps[1] >= before + 3
        assert same(w, state, steps[0])
    state, count = w(train, state, 2)
    assert count.get() == [steps[0] + 2] * 2
    assert same(w, state, steps[0] + 2)
    assert w(os.getpid).get() == pids


def test_an_interrupt_that_comes_as_all_ranks_have_ended(w: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    state = w(setup)
    run = _pool.Pool.run

    def struck(*args: Any) -> list[Any]:
        found = run(*args)
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        return found

    count = kept_by(w)
    monkeypatch.setattr(_pool.Pool, "run", struck)
    with pytest.raises(KeyboardInterrupt, match="What it returned is dropped"):
        w(train, state, 2)
    assert same(w, w(lambda state: state, state), 2)
    assert kept_by(w) == count
    assert same(w, w(train, state, 1)[0], 3)


def waits(state: fsdp.State, steps: int, says: str) -> None:
    fsdp.unshard(train(state, steps)[0])
    Path(says).touch()
    time.sleep(600)


class Run:
    """Of a user's program."""

    def __init__(self) -> None:
        self.inner = self.itself = self
        self.state, self.name = setup(), "one"
        self.others: list[Any] = [setup(), "two"]


def trains(run: Run, steps: int, fails: int = -1) -> None:
    for step in range(steps):
        state, _ = train(run.state, 1)
        if step != fails:
            run.state, run.others[0] = state, train(run.others[0], 1)[0]
        elif rank():
            raise ValueError("bad data")


def test_states_in_attributes_of_a_users_object_are_renewed(w: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pool, "GRACE", 0.3)
    run = w(lambda: {"run": Run()})
    for _ in range(2):
        with pytest.raises(LaunchError, match="ValueError: bad data"):
            w(lambda both: trains(both["run"], 3, fails=2), run)
    steps = w(lambda both: (both["run"].state.steps, both["run"].others[0].steps), run)
    assert [one.get() for one in steps] == [[6, 6], [4, 4]]
    assert w(lambda both: both["run"].inner is both["run"], run).get() == [True, True]
    w(lambda both: trains(both["run"], 1), run)
    assert same(w, w(lambda both: both["run"].state, run), 7)


def moves(state: fsdp.State, steps: int, says: str) -> None:
    state = fsdp.freeze(state, "b")
    waits(fsdp.redistribute(state, fsdp.Spec(fsdp.local_mesh("cpu", other=2), trainable={"b": False})), steps, says)


#: what a handle holds, a call of it that is stopped, the state in it, and how many steps that has taken by then
RENEWED: dict[str, tuple[Any, Any, Any, int]] = {
    "before the first step": (setup, lambda state, says: waits(state, 0, says), lambda state: state, 0),
    "inside a dict": (lambda: {"s": setup()}, lambda held, says: waits(held["s"], 3, says), lambda held: held["s"], 3),
    "moved": (setup, lambda state, says: moves(state, 0, says), lambda state: state, 0),
    "moved and trained": (setup, lambda state, says: moves(state, 2, says), lambda state: state, 2),
}


@pytest.mark.parametrize("what", RENEWED)
def test_an_interrupt_renews_states(w: WorkerGroup, tmp_path: Path, what: str) -> None:
    make, call, find, steps = RENEWED[what]
    held = w(make)
    with interrupted(tmp_path / "said"):
        w(call, held, str(tmp_path / "said"))
    state = w(find, held)
    assert repr(state).count(f"step {steps}, between steps") == 2
    assert same(w, state, steps)
    assert same(w, w(train, state, 1)[0], steps + 1)


def parts(state: fsdp.State) -> None:
    """One rank is stopped at the end of a verb that moves the state, the other after it."""
    fsdp.redistribute(state, fsdp.Spec(fsdp.local_mesh("cpu", other=2)))
    if rank():
        state.version.lineage.successor = None
    raise ValueError("bad data")


def test_a_state_that_was_moved_on_some_ranks_only_is_lost_on_all(w: WorkerGroup) -> None:
    state = w(setup)
    begun = time.monotonic()
    with pytest.raises(LaunchError, match="bad data"):
        w(parts, state)
    assert repr(state).count("taken by redistribute()") == 2
    with pytest.raises(LaunchError, match=r"StaleStateError: unshard: redistribute\(\) has taken"):
        w(train, state, 1)
    assert time.monotonic() - begun < SOON


class Slow:
    """Its finalizer is where the interrupt strikes, which Python drops there."""

    def __init__(self, says: str) -> None:
        self.says = says

    def __del__(self) -> None:
        Path(self.says).touch()
        time.sleep(600)


def finalized(says: str) -> None:
    Slow(says)
    time.sleep(600)


def test_an_interrupt_in_a_finalizer_comes_again(w: WorkerGroup, tmp_path: Path) -> None:
    pids = w(os.getpid).get()
    with interrupted(tmp_path / "said"):
        w(finalized, str(tmp_path / "said"))
    assert w(os.getpid).get() == pids


def test_an_interrupt_that_comes_before_a_rank_has_taken_the_call_up_stops_it() -> None:
    worker = object.__new__(_worker._Worker)
    worker.stopping, worker.serving, worker.sending, worker.reporting = 7, 0, False, False
    _results.keep(6, (b"1", b"2"))
    kind, (what, _) = worker._serve(_worker.Call(7, b"not read", False, "", [], 1.0, [(6, None)], ({}, False)))
    assert (kind, what) == ("failed", "KeyboardInterrupt")
    assert not {(6, 0), (6, 1)} & {*_results._values}  # what it was told to drop is gone: nobody says it again
    assert (worker.stopping, worker.serving) == (0, 0)


def apart(state: fsdp.State, says: str) -> None:
    """One rank is in the next step when it is stopped, the other one is not."""
    state, _ = train(state, 3)
    Path(says).touch()
    if dist.get_rank():
        fsdp.unshard(state)
    time.sleep(600)


def test_ranks_that_are_stopped_apart_meet_before_the_next_call(w: WorkerGroup, tmp_path: Path) -> None:
    state = w(setup)
    for steps in (3, 6):
        with interrupted(tmp_path / "said"):
            w(apart, state, str(tmp_path / "said"))
        assert same(w, state, steps)


class Unreadable:
    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            raise ValueError("no attributes here")
        return super().__getattribute__(name)


def test_where_ranks_cannot_meet_after_a_call_that_failed_its_workers_are_gone() -> None:
    with fsdp.workers(nprocs=2) as w:
        value = w(Unreadable)
        with pytest.raises(LaunchError, match="bad data"):
            w(lambda value: fails(), value)
        assert "gone: their ranks could not meet after a call that failed: renew: rank" in repr(value)
        assert "no attributes here" in repr(value)
        assert w(rank).get() == [0, 1]


def own(how: str, says: str = "") -> float:
    """A call that makes a state of its own, which nobody else holds."""
    state, params = fsdp.unshard(setup())
    if how == "one rank" and rank():
        raise ValueError("bad data")
    if how == "in a step" and not rank():
        state = fsdp.reduce(state, params)
    if how in ("all ranks", "in a step"):
        raise ValueError("bad data")
    if how == "before a metric":
        state = fsdp.reduce(state, params)
        if rank():
            raise ValueError("bad data")
        fsdp.psum(state, torch.ones(()))
    if how == "Ctrl-C":
        waits(state, 2 + rank(), says)
    return fsdp.step(fsdp.reduce(state, params)).steps


@pytest.mark.parametrize("how", ["one rank", "all ranks", "in a step", "before a metric", "Ctrl-C"])
def test_a_call_that_failed_with_a_state_of_its_own_leaves_the_workers_as_they_were(
    w: WorkerGroup, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pool, "GRACE", 0.3)
    kept, pids = w(train, w(setup), 2)[0], w(os.getpid).get()
    begun = time.monotonic()
    for _ in range(2):
        if how == "Ctrl-C":
            with interrupted(tmp_path / "said"):
                w(own, how, str(tmp_path / "said"))
        else:
            with pytest.raises(LaunchError, match="ValueError: bad data"):
                w(own, how)
        assert w(own, "").get() == [1, 1]
    assert same(w, w(train, kept, 1)[0], 3)
    assert w(os.getpid).get() == pids
    assert time.monotonic() - begun < SOON


def test_launch_goes_on_after_a_call_that_failed_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pool, "GRACE", 0.3)
    pids = fsdp.launch(os.getpid, nprocs=2)
    for _ in range(2):
        with pytest.raises(LaunchError, match="ValueError: bad data"):
            fsdp.launch(own, ("one rank",), nprocs=2)
        assert fsdp.launch(own, ("",), nprocs=2) == [1, 1]
    assert fsdp.launch(os.getpid, nprocs=2) == pids


def fails() -> None:
    raise ValueError("bad data")


def test_a_state_in_the_middle_of_a_step_outlives_a_call_that_failed_elsewhere(w: WorkerGroup) -> None:
    state, params = w(lambda state: fsdp.unshard(state), w(setup))
    with pytest.raises(LaunchError, match="bad data"):
        w(fails)
    assert w(lambda state, params: fsdp.step(fsdp.reduce(state, params)).steps, state, params).get() == [1, 1]


def other() -> fsdp.State:
    return fsdp.shard({"a": torch.ones(8)}, fsdp.Spec(fsdp.local_mesh("cpu", other=2)), fsdp.sgd(lr=0.1))


def makes_communicators() -> None:
    """One rank was stopped before it had a mesh's communicators, and the other after that."""
    other()
    if rank():
        runs = [run for run in _runtime.runtimes().values() if "other" in run.sizes]
        _runtime.forget_runtime(runs[0], "Stopped.")
    raise ValueError("bad data")


def test_ranks_that_were_stopped_while_communicators_were_made_make_others(w: WorkerGroup) -> None:
    kept, pids = w(train, w(setup), 2)[0], w(os.getpid).get()
    with pytest.raises(LaunchError, match="bad data"):
        w(makes_communicators)
    begun = time.monotonic()
    assert w(lambda: float(whole(other())["a"].sum())).get() == [8.0, 8.0]
    assert same(w, kept, 2)
    assert w(os.getpid).get() == pids
    assert time.monotonic() - begun < SOON


def makes_a_state() -> None:
    """One rank was stopped before a state was made, and the other after that."""
    runtime = setup().version.lineage.runtime
    runtime.lineage_count += not rank()
    raise ValueError("bad data")


def test_states_are_told_apart_after_ranks_were_stopped_while_one_was_made(w: WorkerGroup) -> None:
    with pytest.raises(LaunchError, match="bad data"):
        w(makes_a_state)
    one, two = w(train, w(setup), 2)[0], w(train, w(setup), 1)[0]
    with pytest.raises(LaunchError, match="bad data"):
        w(fails)
    assert same(w, one, 2)
    assert same(w, two, 1)


def test_an_interrupt_between_calls_concerns_no_worker(w: WorkerGroup) -> None:
    state = w(setup)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert same(w, w(train, state, 1)[0], 1)


# --------------------------------------------------------------------------------------------- how workers start


def test_after_a_backward_in_the_caller() -> None:
    """A build of torch with CUDA cannot run a backward in a fork of a process that ran one."""

    def gradient() -> list[float]:
        x = torch.ones(2, requires_grad=True)
        (x * x).sum().backward()
        return list(x.grad.tolist())  # type: ignore[union-attr]

    assert gradient() == [2.0, 2.0]
    with fsdp.workers(nprocs=2) as w:
        assert w(gradient).get() == [[2.0, 2.0]] * 2


def test_workers_begin_with_the_callers_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOME_SETTING", "7")
    monkeypatch.setattr(sys, "argv", ["name", "--flag"])
    with fsdp.workers(nprocs=1) as w:
        found = w(lambda: (os.environ["SOME_SETTING"], sys.argv, torch.get_num_threads()))
        assert [one.get()[0] for one in found] == ["7", ["name", "--flag"], torch.get_num_threads()]


def test_a_timeout_of_their_own() -> None:
    with fsdp.workers(nprocs=2, timeout=33) as w:
        assert w(lambda: float(os.environ[_worker.TIMEOUT])).get() == [33.0, 33.0]


# ------------------------------------------------------------------------------------------------ edited code


def test_a_module_that_was_reloaded_runs_as_it_is_now(
    w: WorkerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "edited_between_calls.py"

    def write(number: int) -> None:
        file.write_text(f"def answer():\n    return {number}\n")
        os.utime(file, ns=(number * 10**9, number * 10**9))

    write(1)
    module = importlib.import_module("edited_between_calls")
    assert w(module.answer).get() == [1, 1]
    write(2)
    assert w(module.answer).get() == [1, 1] == [module.answer()] * 2  # nobody reloaded it
    importlib.reload(module)
    assert w(module.answer).get() == [2, 2] == [module.answer()] * 2
    assert w(lambda: module.answer()).get() == [2, 2]


AUTORELOAD = [
    """
    %load_ext autoreload
    %autoreload 2
    import os, time, pathlib
    import functional_fsdp as fsdp

    def write(number, time):
        file = pathlib.Path("edited_in_a_notebook.py")
        file.write_text(
            f"class Net:\\n    def answer(self):\\n        return super().__class__.__name__, {number}\\n\\n"
            f"def answer():\\n    return {number}\\n"
        )
        os.utime(file, (time, time))

    write(1, 1000)
    w = fsdp.workers(nprocs=2)
    """,
    """
    import edited_in_a_notebook as mine
    from edited_in_a_notebook import answer
    net = w(mine.Net)
    print(w(mine.answer).get(), w(answer).get(), w(mine.Net.answer, net)[1].get())
    """,
    "write(2, 2000)",
    "print(w(mine.answer).get(), w(answer).get(), w(lambda net: net.answer(), net)[1].get())",
    """
    def local():
        return "one"
    print(w(local).get())
    """,
    """
    def local():
        return "two"
    print(w(local).get())
    """,
]


STOP = [
    """
    import os, signal, threading
    from test_workers import setup, train

    def stop():
        while not os.path.exists("said"):
            time.sleep(0.01)
        os.killpg(os.getpgrp(), signal.SIGINT)

    state = w(setup)
    """,
    "threading.Thread(target=stop).start()\nstate, steps = w(train, state, 10**6, says='said')",
    """
    before = w(lambda state: state.steps, state).get()[0]
    state, steps = w(train, state, 1)
    print(before >= 3, steps.get() == [before + 1] * 2)
    w.close()
    """,
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_edited_code_and_the_stop_button_of_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel has both. When it is stopped, its whole process group is sent a SIGINT."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}:{Path(__file__).parent}")
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(cell).strip()) for cell in (*AUTORELOAD, *STOP)]
    cells[len(AUTORELOAD) + 1].metadata["tags"] = ["raises-exception"]
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(book, timeout=250, resources={"metadata": {"path": str(tmp_path)}}).execute()
    *_, stopped, after = book.cells
    assert stopped.outputs[-1].ename == "KeyboardInterrupt"
    assert after.outputs[0].text == "True True\n"
    said = ["".join(output.text for output in cell.outputs) for cell in book.cells[: len(AUTORELOAD)]]
    assert said[1].split("\n") == ["[1, 1] [1, 1] [1, 1]", ""]
    assert said[3].split("\n") == ["[2, 2] [2, 2] [2, 2]", ""]
    assert said[4:] == ["['one', 'one']\n", "['two', 'two']\n"]


def test_a_barrier_of_the_workers(w: WorkerGroup) -> None:
    assert w(lambda: (fsdp.local_mesh("cpu"), dist.barrier())[1]).get() == [None, None]
