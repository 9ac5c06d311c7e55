"""What of `T.cuda_graph` and of the transports needs no GPU."""

from __future__ import annotations

import copy
import gc
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from support.choices import choices, logged
from support.driven import refused
from support.presets import PRESETS, ranks_of
from support.problems import LOOPS, Stack, mesh_and_placement, reference, sharded, through_the_stack
from support.ranks import each_rank, launch
from support.tables import marked
from support.traced import BLOCKS, trained
from torch._inductor.exc import InductorError

import functional_fsdp as fsdp
from functional_fsdp import Schedule, ScheduleError, Spec, SpecError, StaleStateError, TreeError
from functional_fsdp import transforms as T
from functional_fsdp._capture import Capture
from functional_fsdp._launch.launch import stop_workers
from functional_fsdp._runtime.runtime import runtime_of
from functional_fsdp._seams import torch_private
from functional_fsdp._shared.device import cuda_driver as driver
from functional_fsdp._transports import auto
from functional_fsdp.extend import Ranks, Session
from functional_fsdp.transforms._cuda_graph import capturing as _capturing
from functional_fsdp.transforms._cuda_graph import graphed as graphs
from functional_fsdp.transforms._cuda_graph.capturing import (
    GraphBuffers,
    as_kernels,
    edge_functions,
    stale_streams_followed,
    words,
)
from functional_fsdp.transforms._cuda_graph.capturing import _explain as explain
from functional_fsdp.transforms._cuda_graph.graphed import Graphed, signature
from functional_fsdp.transforms._cuda_graph.host_traffic import Recording


def made(**spec: Any) -> fsdp.State:
    torch.manual_seed(0)
    params, _ = fsdp.functionalize(Stack(16, 3))
    return fsdp.shard(params, Spec(fsdp.local_mesh(), **spec), fsdp.adamw(lr=1e-2))


def data(step: int = 0) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step))


def train_step(state: fsdp.State, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
    state, loss = through_the_stack(state, x)
    return fsdp.step(state), loss


# ---------------------------------------------------------------- without GPUs


def test_no_garbage_is_collected_while_a_stream_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.MagicMock())
    monkeypatch.setattr(_capturing, "as_kernels", lambda graph, device: None)
    monkeypatch.setattr(_capturing, "_abandon", lambda ranks, graph, pool: None)
    ranks: Any = mock.MagicMock(generators={}, again={})
    assert gc.isenabled()
    with _capturing.captured(ranks, None):
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), _capturing.captured(ranks, None):
        raise ZeroDivisionError
    assert gc.isenabled()
    gc.disable()
    try:
        with _capturing.captured(ranks, None):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_fails_to_compile_while_it_is_captured_is_told_from_what_waits() -> None:
    refused = "operation not permitted when stream is capturing"

    def backend(graph: Any, inputs: Any) -> Any:
        raise RuntimeError(refused)

    with pytest.raises(RuntimeError) as caught:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    for error in (caught.value, InductorError(RuntimeError(refused), None)):
        with pytest.raises(ScheduleError, match=rf"a part is compiled.*torch says: RuntimeError: {refused}"):
            explain(error)
    with pytest.raises(ScheduleError, match=rf"the host waits for the device.*torch says: {refused}"):
        explain(RuntimeError(refused))
    explain(RuntimeError("attention with backend='flash' takes no mask"))  # nothing to do with it: left as it is


def test_without_a_gpu_it_says_so_or_passes_through() -> None:
    state = made()
    with pytest.raises(ScheduleError, match=r"on the cpu, and CUDA graphs need a GPU.*pass_through=True"):
        T.cuda_graph(train_step)(state, data())
    state, loss = T.cuda_graph(train_step, pass_through=True)(state, data())
    assert state.steps == 1
    assert loss > 0


@pytest.mark.parametrize("loop", ["whole", pytest.param("by_unit", marks=pytest.mark.large)])
def test_one_train_step_every_way(loop: str) -> None:
    """On lanes, compiled, and through cuda_graph, which is `tests/gpu`'s to capture."""
    ways = ["lanes", "graph", *["T.aot_eager"] * (loop == "by_unit")]  # the other is in `test_traced`
    for way in ways:
        for rank, (seen, _) in enumerate(launch(trained, ("zero3", loop, way), kwargs={"depth": BLOCKS}, nprocs=2)):
            for (loss, weights), (expected, _, after) in zip(seen, reference(2, 3, 2, depth=BLOCKS), strict=True):
                assert rank > 0 or loss == pytest.approx(expected, abs=1e-9)
                for path, weight in after.items():
                    torch.testing.assert_close(weights[path], weight, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("free", "wanted"), [(4, [1]), (2, [1, 2])])
def test_all_garbage_is_collected_only_where_memory_is_short(
    free: int, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: collected.append(generation))
    for name, found in {"synchronize": None, "empty_cache": None, "mem_get_info": (free, 8)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, found=found: found)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3)
    graphs._make_room(torch.device("cpu"))
    assert collected == wanted


class Switch:
    """Stands in for torch's, which versions before 2.13 lack. `seen` is what it was each time it was looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
        self.on, self.seen = on, list[bool]()
        monkeypatch.setattr(torch_private, "override_stale_capture_stream", lambda: self.on)
        monkeypatch.setattr(torch_private, "set_override_stale_capture_stream", lambda on: setattr(self, "on", on))

    def look(self) -> None:
        self.seen.append(self.on)


def without_streams(monkeypatch: pytest.MonkeyPatch, step: Any) -> Graphed:
    """What `T.cuda_graph` makes of a step, on a machine without GPUs: its own stream is nobody's."""
    quiet = {"reset_peak_memory_stats", "memory_allocated", "memory_reserved"}
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name in quiet:
        monkeypatch.setattr(torch.cuda, name, lambda *args: 0)
    monkeypatch.setattr(graphs, "_make_room", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    found = Graphed(step, 1, 1, False, False)
    found.stream = stream
    return found


@pytest.mark.parametrize("on", [False, True])
def test_the_switch_for_stale_streams_is_set_in_warm_up_and_capture_and_put_back(
    on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch, state = Switch(monkeypatch, on), made()

    def step(state: fsdp.State, x: torch.Tensor) -> Any:
        switch.look()
        if x is bad:
            raise KeyError("the step's own")
        return train_step(state, x)

    def refused(*_: Any) -> Any:
        switch.look()
        raise RuntimeError("nothing captures here")

    bad, graphed, known = data(1), without_streams(monkeypatch, step), graphs.Warmed(False)
    monkeypatch.setattr(graphs, "captured", refused)
    known.reads.latest = Recording(cast(Any, None))
    leaves, treedef = pytree.tree_flatten(((data(),), {}))
    state, _ = graphed._eagerly(fsdp.extend.ranks_of(state), None, state, leaves, treedef)
    assert (switch.seen, switch.on) == ([True], on)
    with pytest.raises(KeyError):
        graphed._eagerly(fsdp.extend.ranks_of(state), None, state, [bad], treedef)
    assert (switch.seen, switch.on) == ([True, True], on)
    with pytest.raises(RuntimeError, match="nothing captures here"):
        graphed._captured(fsdp.extend.ranks_of(state), None, known, state, leaves, treedef)
    assert (switch.seen, switch.on) == ([True, True, True], on)


def test_the_last_thread_puts_the_switch_back(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = Switch(monkeypatch, False)
    first, second = stale_streams_followed(), stale_streams_followed()
    for enter in (first, second):
        enter.__enter__()
    first.__exit__(None, None, None)
    assert switch.on
    second.__exit__(None, None, None)
    assert not switch.on


def test_the_switch_is_torchs_where_there_is_one() -> None:
    there = hasattr(torch.autograd.graph, "set_override_stale_capture_stream")  # from 2.13 on
    assert (torch_private.set_override_stale_capture_stream is not None) is there
    with stale_streams_followed():
        assert not there or torch_private.override_stale_capture_stream() is True
    assert not there or torch_private.override_stale_capture_stream() is False


@pytest.mark.parametrize("bad", [{"warmup": 0}, {"graphs": 0}, {"warmup": 1.5}, {"graphs": True}])
def test_numbers_below_one_are_refused(bad: Any) -> None:
    with pytest.raises(SpecError, match=r"cuda_graph\(.*\): expected a number of at least 1"):
        T.cuda_graph(train_step, **bad)


def test_a_call_without_a_state_is_refused() -> None:
    graphed: Any = T.cuda_graph(train_step)
    with pytest.raises(TypeError, match="the first argument is a State, not Tensor"):
        graphed(data(), made())


@dataclass(frozen=True)
class Said:
    value: object
    more: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Later:
    value: object
    later: int = field(init=False)  # nobody sets it


def test_a_signature_is_shapes_dtypes_and_what_is_no_tensor() -> None:
    state = made()

    def of(*args: Any) -> Any:
        return signature(state, *pytree.tree_flatten(args, is_leaf=lambda x: isinstance(x, fsdp.State)))

    x = data()
    assert of(x, 1) == of(x + 1, 1)
    assert len({of(x), of(x.double()), of(x[:2]), of(x, 1), of(x, 1.0), of(x, True), of([x]), of({"x": x})}) == 8
    assert of(x, frozenset({1, 2})) == of(x, frozenset({2, 1}))
    told = [
        Said(1), Said(True), Said(0.0), Said(-0.0), Said(1, 2), Said((1, 2)), Said((True, 2)), Said([1, 2]),
        Said({1, 2}), Said({1: [2]}), Said({1: [True]}), Later(1),
    ]  # fmt: skip
    assert len({of(x, one) for one in (*told, *map(copy.deepcopy, told))}) == len(told)
    with pytest.raises(TreeError, match="one state, its first argument"):
        of(state)
    with pytest.raises(TreeError, match=r"the batch has a ndarray.*Pass it as a tensor"):
        of(np.zeros(3))
    with pytest.raises(TreeError, match=r"the batch has a Said whose field 'more' is a ndarray"):
        of(Said(1, np.zeros(3)))  # type: ignore[arg-type]
    with pytest.raises(TreeError, match=r"whose field 'more' is a list with a ndarray, which a captured"):
        of(Said(1, [np.zeros(3)]))  # type: ignore[arg-type]
    held: list[Any] = []
    held.append(Said(held))
    with pytest.raises(SpecError, match="a Said among the step's arguments holds itself"):
        of(held[0])
    assert len({of(0.1), of(0.1 + 1e-18), of(0.1 + 1e-16), of(0.0), of(-0.0), of(math.nan), of(math.nan)}) == 5


def test_a_signature_is_of_one_optimizer_and_spec_and_of_local_buffers() -> None:
    mesh, adamw = fsdp.local_mesh(), fsdp.adamw(lr=0.1)
    params, _ = fsdp.functionalize(Stack(16, 3))

    def of(spec: Spec, optimizer: Any, local: Any = ()) -> Any:
        buffers = {"mean": torch.zeros(2)}
        return signature(fsdp.shard(params, spec, optimizer, buffers=buffers, local_buffers=local), [], None)

    plain = of(Spec(mesh), adamw)
    assert of(Spec(mesh), fsdp.adamw(lr=0.1)) == plain
    assert of(Spec(mesh), fsdp.adamw(lr=0.2)) != plain != of(Spec(mesh, average="sum"), adamw)
    assert of(Spec(mesh), adamw, ["m*"]) == of(Spec(mesh), adamw, ["mean"]) != plain


# ---------------------------------------------------------------- the lineage's side


@each_rank(2)
def test_a_replay_is_a_transaction_and_is_logged() -> None:
    """A captured step (which runs here) is taken again without its verbs: whatever `launch` does."""
    state, _ = train_step(made(), data())
    run = state.version.lineage.runtime
    before = {name: log.count for name, log in run.issued.items()}
    capture = Capture(state)
    with capture.recording():
        new, loss = train_step(state, data(1))
        new, _ = fsdp.pmean(new, loss)
    lanes = ("gather", "reduce", "side")
    assert [run.issued[name].count - before[name] for name in lanes] == [0] * 3
    assert {name: len(jobs) for name, jobs in capture.jobs.items() if name != "control"} == {
        "gather": 5, "reduce": 3, "side": 1
    }  # fmt: skip
    capture.first(lambda: None)
    launched: list[int] = []
    newer = capture.again(new, lambda: launched.append(1))
    assert (newer.steps, launched, newer.between_steps) == (3, [1], True)
    middle, _ = fsdp.unshard(newer, "layers.0")
    refused(
        (lambda: capture.again(new, lambda: launched.append(2)), "StaleStateError", "consumed by step() number 3"),
        (lambda: capture.again(middle, lambda: launched.append(3)), "StaleStateError", "in the middle of a step"),
    )
    assert launched == [1]


@each_rank(2)
def test_ranks_that_replay_different_steps_hear_of_it_before_anything_is_launched() -> None:
    """One of them with a metric."""
    state, twin = made(), made()
    captures = []
    for with_metric in (False, True):
        capture = Capture(state)
        with capture.recording():
            if with_metric:
                state, _ = fsdp.pmean(state, 1.0)
            state, _ = train_step(state, data(1))
        capture.first(lambda: None)
        captures.append(capture)
        twin, _ = train_step(twin, data(1))
    launched: list[int] = []
    with pytest.raises(ScheduleError, match=r"ranks issued different collectives|and to something else \(a step"):
        captures[dist.get_rank()].again(state, lambda: launched.append(1))
    assert not launched
    state, _ = train_step(state, data(2))  # what was not launched is not taken
    twin, _ = train_step(twin, data(2))
    assert kept(state, twin)


def kept(state: fsdp.State, twin: fsdp.State) -> bool:
    mine, theirs = fsdp.full_params(state), fsdp.full_params(twin)
    return all(torch.equal(mine[path], theirs[path]) for path in mine)


def captured_step(state: fsdp.State, step: int) -> tuple[fsdp.State, Capture]:
    capture = Capture(state)
    with capture.recording():
        state, _ = train_step(state, data(step))
    capture.first(lambda: None)
    return state, capture


@each_rank(2, processes=True)
def test_a_rank_that_is_interrupted_in_the_vote_takes_the_step_with_the_others() -> None:
    """While it waits in the vote for a replay; both take it in the end."""
    state, capture = captured_step(made(), 1)
    launched: list[int] = []
    first = dist.get_rank() == 0
    interrupted = mock.patch.object(capture.run, "compare", side_effect=KeyboardInterrupt) if first else nullcontext()
    with pytest.raises(KeyboardInterrupt if first else fsdp.RestartError), interrupted:
        capture.again(state, lambda: launched.append(1))
    state = capture.again(state, lambda: launched.append(1))
    assert launched == [1]
    assert state.steps == 2


@each_rank(2, processes=True)
def test_a_replay_votes_as_the_eager_step_does() -> None:
    """What a step that clips and averages votes with: eagerly, captured and replayed."""

    def clipped(state: fsdp.State) -> fsdp.State:
        state, weights = fsdp.unshard(state)
        state = fsdp.reduce(state, {path: torch.ones_like(w) for path, w in weights.items()})
        state, norm = T.clip_by_global_norm(state, 1.0)
        return fsdp.pmean(fsdp.step(state), norm)[0]

    state, seen = made(), []
    run = state.version.lineage.runtime
    real = run.vote

    def vote(identity: int, digest: int, *given: int) -> Any:
        seen.append((digest, run.digest))
        return real(identity, digest, *given)

    with mock.patch.object(run, "vote", vote):
        state = clipped(clipped(state))
        capture = Capture(state)
        with capture.recording():
            state = clipped(state)
        capture.first(lambda: None)
        for _ in range(2):
            state = capture.again(state, lambda: None)
    assert state.steps == 5
    first, *others = seen
    assert others[0] != first  # metrics after a step are of the next vote
    assert others == [others[0]] * 4


@each_rank(2)
def test_a_launch_that_fails_after_the_vote_breaks_the_state() -> None:
    state, capture = captured_step(made(), 1)

    def fails() -> None:
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        capture.again(state, fails)
    said = "step() number 2 was stopped on this rank after ranks had agreed"
    refused((lambda: train_step(state, data(2)), "StaleStateError: ", said))


@pytest.mark.parametrize("alike", [True, False])
def test_what_no_rank_could_capture_was_not_taken_and_what_one_alone_could_not_parts_them(alike: bool) -> None:
    launch(late_failures, (alike,), nprocs=2, processes=True)
    if not alike:
        stop_workers()  # these two have parted for good


def late_failures(alike: bool) -> None:
    """What fails after the vote, while it is captured, on every rank or on one."""
    state, twin = made(), made()
    state, _ = train_step(state, data())
    twin, _ = train_step(twin, data())
    capture = Capture(state)
    fails = alike or dist.get_rank() == 0
    try:
        with capture.recording():
            new, _ = train_step(state, data(1))
            if fails:
                raise ValueError("a host sync, say")
        capture.first(lambda: None)
    except ValueError:
        capture.abandon()
        new = state
    if not alike:  # the step was taken by the other one, which hears of it in its next vote
        with pytest.raises(StaleStateError if fails else ScheduleError):
            train_step(new, data(2)) if fails else capture.run.compare(capture.run.vote(0, 0))
        return
    for buffer, other in zip(state.main.values(), twin.main.values(), strict=True):
        buffer.local.copy_(other.local)  # here the captured step did run
    for mine, theirs in zip(pytree.tree_leaves(state.opt), pytree.tree_leaves(twin.opt), strict=True):
        mine.copy_(theirs)
    state.count.copy_(twin.count)
    state, _ = train_step(state, data(3))
    twin, _ = train_step(twin, data(3))
    assert kept(state, twin)
    assert state.steps == 2


@pytest.mark.parametrize("where", ["in its middle", "after it"])
@each_rank(2, processes=True)
def test_nothing_waits_for_what_a_capture_that_is_given_up_has_under_way(where: str) -> None:
    """It was captured, and on a GPU it never runs. It is given up while gathers are under way, in the middle of the
    step or after it; the step can be taken again, and others no longer see jobs that were captured, whose numbers are
    those of the next ones."""
    state, _ = train_step(made(), data())
    capture = Capture(state)
    executor, lanes = state._executor, capture.run.lanes
    marks, waited = list[Any](), list[Any]()

    def begin(state: fsdp.State) -> None:
        fsdp.unshard(state, "layers.0")
        marks.extend([executor.gathers.newest, *(place.gathered for place in executor.gathers.flying.values())])

    real = lanes.wait

    def wait(mark: Any) -> None:
        waited.extend(one for one in marks if one is mark)
        real(mark)

    with mock.patch.object(lanes, "wait", wait):
        with suppress(ValueError), capture.recording():
            if where == "in its middle":
                begin(state)
                raise ValueError("a host sync, say")
            begin(train_step(state, data(1))[0])
        assert len(marks) > 1
        capture.abandon()  # the end of the capture fails, say
        vote: Any = capture.run.host_vote
        assert not any(vote.cells[2 * vote.ranks + vote.rank :: vote.ranks])
        state, _ = train_step(state, data(2))
    assert not waited
    assert state.steps == 2


@each_rank(2)
def test_one_rank_may_capture_what_another_does_eagerly() -> None:
    state, twin = made(), made()
    for step in range(3):
        one = captured_step if (dist.get_rank() + step) % 2 else lambda state, step: train_step(state, data(step))
        state, _ = one(state, step)
        twin, _ = train_step(twin, data(step))
    run = state.version.lineage.runtime
    counts = {name: log.count for name, log in run.issued.items()}
    assert kept(state, twin)
    assert len(set(map(str, run.everyone(counts, "counts")))) == 1


@each_rank(2, processes=True)
def test_a_restart_that_is_heard_while_capturing_drains_what_was_issued() -> None:
    """One rank waits in the vote of a step that it captures; the other began the step and abandons it."""
    state, twin = made(), made()
    said = ""
    for _ in range(2):
        try:
            if dist.get_rank() == 1 and not said:
                time.sleep(0.3)
                raise ValueError("bad data")
            capture = Capture(state)
            with capture.recording():
                if dist.get_rank() == 0 and not said:
                    state.version.lineage.advance(state, "a verb")
                    capture.run.compare(capture.run.vote(0, 0))
                state, _ = train_step(state, data())
            capture.first(lambda: None)
            break
        except (ValueError, fsdp.RestartError, ScheduleError) as error:
            said = type(error).__name__
            if dist.get_rank() == 1:
                lineage = state.version.lineage
                lineage.runtime.restart(lineage.number)
    twin, _ = train_step(twin, data())
    assert said == ("ValueError" if dist.get_rank() else "RestartError")
    assert kept(state, twin)


def test_a_use_outside_the_plan_cannot_be_captured() -> None:
    state = made()
    capture = Capture(state)
    with (
        pytest.raises(ScheduleError, match=r"unshard\('layers.1'\) is not what the schedule expects.*captured step"),
        capture.recording(),
    ):
        Session.unshard(state, ("layers.1",))
    run = state.version.lineage.runtime
    assert not run.capturing
    assert run.logs is run.issued
    state, _ = train_step(state, data())
    assert state.steps == 1


def test_more_microbatches_than_before_cannot_be_captured() -> None:
    from functional_fsdp.transforms._seed import _standing_in

    run = made().version.lineage.runtime
    run.capturing = True
    try:
        with pytest.raises(ScheduleError, match=r"microbatch 7 .*had fewer"), _standing_in(Ranks(run), 7, 0):
            pass
    finally:
        run.capturing = False


# ---------------------------------------------------------------- where the state stays


def test_a_home_takes_values_from_elsewhere_and_keeps_its_tensors() -> None:
    state = made()
    home = GraphBuffers(state)
    home.enter(state)
    assert home.state(state).main is state.main
    other, _ = train_step(made(), data())
    home.check(other)
    home.enter(other)
    entered = home.state(other)
    name = next(iter(state.main))
    assert entered.main[name].local is state.main[name].local
    assert torch.equal(entered.main[name].local, other.main[name].local)
    assert entered.version is other.version
    with pytest.raises(StaleStateError, match="put another state in this one's memory"):
        fsdp.unshard(state)


def test_a_home_refuses_what_does_not_fit() -> None:
    state = made()
    home = GraphBuffers(state)
    with pytest.raises(TreeError, match="the state that came in has another structure"):
        home.check(state._evolve(extras={"ema": torch.ones(3)}))
    state, home = home_of(ema=torch.ones(3), n=1)
    with pytest.raises(TreeError, match=r"'extras.ema' .*is torch.float32 \(4,\); expected torch.float32 \(3,\)"):
        home.check(state._evolve(extras={"ema": torch.ones(4), "n": 1}))
    with pytest.raises(TreeError, match=r"'extras.n' of the state at the end of the step is 2; expected 1"):
        home.keep(state._evolve(extras={"ema": torch.ones(3), "n": 2}))
    local = next(iter(state.main.values())).local
    local.data = local.data.clone()
    with pytest.raises(ScheduleError, match=r"'main\..*local' of the state was moved in memory"):
        home.check(state)


def home_of(**extras: Any) -> tuple[fsdp.State, GraphBuffers]:
    state = made()._evolve(extras=extras)
    return state, GraphBuffers(state)


def test_a_history_that_moves_along_is_read_before_it_is_written() -> None:
    old = torch.ones(3)
    state, home = home_of(now=old, before=torch.zeros(3))
    home.keep(state._evolve(extras={"now": torch.full((3,), 2.0), "before": old}))
    assert torch.equal(state.extras["now"], torch.full((3,), 2.0))
    assert torch.equal(state.extras["before"], torch.ones(3))


@pytest.mark.parametrize("how", ["anew", "in place"])
def test_what_lies_on_the_host_must_not_change_in_a_captured_step(how: str) -> None:
    state, home = home_of(seen=torch.zeros(()), kept=torch.ones(2))
    home.device = torch.device("cuda")  # as if the state were there
    new = home.begin(state)
    home.keep(new)
    seen = new.extras["seen"].add_(1) if how == "in place" else new.extras["seen"] + 1
    with pytest.raises(TreeError, match=r"changes 'extras.seen', which lies on the host"):
        home.keep(new._evolve(extras={**new.extras, "seen": seen}))


def test_what_is_a_tensor_stays_one() -> None:
    state, home = home_of(a=torch.ones(()), b=2.0, c=np.ones(3))
    for extras, text in (
        ({"a": 1.0, "b": 2.0, "c": np.ones(3)}, r"'extras.a' .* is 1.0; expected torch.float32 \(\)"),
        ({"a": torch.ones(()), "b": torch.ones(3), "c": np.ones(3)}, r"'extras.b' .*expected 2.0"),
        ({"a": torch.ones(()), "b": 2.0, "c": np.ones(3)}, r"'extras.c' .* is array"),
    ):
        with pytest.raises(TreeError, match=text):
            home.check(state._evolve(extras=extras))
    kept = torch.ones((), requires_grad=True)
    home.keep(state._evolve(extras={"a": kept * 2, "b": 2.0, "c": state.extras["c"]}))
    assert state.extras["a"] == 2
    assert not state.extras["a"].requires_grad


def test_what_a_step_makes_anew_goes_home() -> None:
    state, home = home_of(ema=torch.ones(3))
    home.keep(state._evolve(extras={"ema": torch.full((3,), 2.0)}))
    assert torch.equal(state.extras["ema"], torch.full((3,), 2.0))


# ---------------------------------------------------------------- transports


@contextmanager
def pretended() -> Iterator[list[int]]:
    """Plain memory in the place of NCCL's."""
    real, asked = auto.registered, list[int]()
    forget_windows()

    def registered(run: Any, nbytes: int, groups: Any) -> torch.Tensor:
        asked.append(nbytes)
        return torch.empty(max(nbytes, 1), dtype=torch.uint8)

    auto.registered = registered
    try:
        yield asked
    finally:
        auto.registered = real
        forget_windows()


def forget_windows() -> None:
    """Of lineages before: they are no memory of NCCL's."""
    gc.collect()
    runtime_of(fsdp.local_mesh()).spare.clear()


def in_windows(preset: str, loop: str, average: str) -> tuple[list[Any], list[int]]:
    runtime_of(mesh_and_placement(preset)[0]).spare.clear()
    with pretended() as asked:
        return sharded(preset, loop, 3, 2, transport="symmetric", average=average), asked


ROWS = [(preset, loop) for preset in PRESETS for loop in LOOPS]
HALF = [(preset, [*LOOPS][i % len(LOOPS)]) for i, preset in enumerate(PRESETS)]


@pytest.mark.parametrize(("preset", "loop"), marked(ROWS, HALF[1:4:2]))
def test_steps_in_windows_are_the_plain_modules(preset: str, loop: str) -> None:
    ranks = ranks_of(preset)
    for average in ("mean", "sum") if loop == "whole" else ("mean",):
        for seen, asked in launch(in_windows, (preset, loop, average), nprocs=ranks, processes=True):
            assert len(asked) == 2  # one arena, one staging, for good
            for (_, mine, _), (_, grads, _) in zip(seen, reference(ranks, 3, 2, average=average), strict=True):
                for path, grad in grads.items():
                    torch.testing.assert_close(mine[path], grad, rtol=1e-12, atol=1e-12)


def windows_of(state: fsdp.State) -> auto.NcclWindows:
    shared = state._executor.carrier
    assert isinstance(shared, auto.NcclWindows)
    return shared


@each_rank(2, processes=True)
def test_windows_are_handed_on_and_never_freed() -> None:
    """Those of lineages that are gone, which the next ones take; and of plans that grew."""
    with pretended() as asked:
        states = [made(transport="symmetric")]
        run = runtime_of(fsdp.local_mesh())
        asked_for = [len(asked)]
        places = [window.data_ptr() for _, window in windows_of(states[0]).made.values()]
        states.append(made(transport="symmetric"))
        asked_for.append(len(asked))
        states.pop(0)
        gc.collect()
        states.append(made(transport="symmetric"))
        asked_for.append(len(asked))
        assert places == [window.data_ptr() for _, window in windows_of(states[-1]).made.values()]
        assert windows_of(states[-1]).arena(1 << 20).numel() == 1 << 20
        asked_for.append(len(asked))
        twin, _ = train_step(copy.deepcopy(states[-1]), data())  # it finds the small one
        assert [*asked_for, len(asked)] == [2, 4, 4, 5, 6]
        assert twin.steps == 1
        assert not any(run.spare.values())


@each_rank(2)
def test_symmetric_says_what_is_missing() -> None:
    forget_windows()
    said = "it needs GPUs, and this mesh is on the cpu"
    refused((lambda: made(transport="symmetric"), "SpecError: ", said, "transport='collective'"))


@each_rank(2, processes=True)
def test_auto_takes_what_there_is_and_says_so_once() -> None:
    """For states of small and of large models."""
    with choices() as said:
        runtime_of(fsdp.local_mesh()).chosen.clear()
        states = [made(transport="auto"), made(transport="auto")]
        auto.LARGE = 1000
        states += [made(transport="auto"), made(transport="auto")]
    assert {state.spec.transport.name for state in states} == {"collective"}
    assert said == [
        "Spec(transport='auto'): collective (there is little to gather)",
        "Spec(transport='auto'): collective (there are no GPUs)",
    ]
    assert train_step(states[0], data())[0].steps == 1


def test_plans_without_ranks_take_auto_for_collective() -> None:
    params, _ = fsdp.functionalize(Stack(16, 3))
    layouts = [fsdp.make_layout(params, Spec({"data": 8}, transport=t)) for t in ("auto", "collective")]
    assert layouts[0].hash == layouts[1].hash


def memset(*fields: int) -> Any:
    made = driver().CUDA_MEMSET_NODE_PARAMS()
    names = ("dst", "value", "elementSize", "width", "height")
    for name, value in zip(names, (driver().CUdeviceptr(fields[0]), *fields[1:]), strict=True):
        setattr(made, name, value)
    return made


def test_small_memsets_of_whole_words_are_words() -> None:
    found = [words(memset(*fields)) for fields in (
        (512, 0, 1, 4, 1), (512, 0xAB, 1, 8, 1), (512, 0x1234, 2, 2, 1), (512, 0x12345678, 4, 3, 1),
        (512, 0xFFAB, 1, 4, 1), (514, 0, 1, 4, 1), (512, 0, 1, 3, 1), (512, 0, 4, 1, 2), (512, 0, 4, 1 << 20, 1),
        (512, 0, 1, 0, 1))]  # fmt: skip
    assert found == [
        (0, 1), (0xABABABAB, 2), (0x12341234, 1), (0x12345678, 3), (0xABABABAB, 1), None, None, None, None, None
    ]  # fmt: skip


def test_what_is_asked_of_the_driver_is_there() -> None:
    """Names that a later version may change."""
    for name in ("cuStreamBatchMemOp", "cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphMemsetNodeGetParams",
                 "cuGraphAddKernelNode", "cuGraphDestroyNode", "cuModuleLoadData", "cuModuleGetFunction",
                 *edge_functions()):  # fmt: skip
        assert callable(getattr(driver(), name)), name


def test_without_the_drivers_module_memsets_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    driver.cache_clear()
    with logged("functional_fsdp.transforms._cuda_graph.capturing") as said:
        as_kernels(cast(torch.cuda.CUDAGraph, None), 0)  # which nobody looks at
    driver.cache_clear()
    assert "small memsets stay memsets" in " ".join(said)


def test_zero_cta_is_symmetrics() -> None:
    one = Spec({"data": 2}, transport=fsdp.symmetric(zero_cta=True))
    assert "symmetric(zero_cta=True)" in repr(one)
    assert one.transport.traits == ("zero_cta", False)
    assert one.with_schedule(Schedule(prefetch=2)).transport == fsdp.symmetric(zero_cta=True) != fsdp.symmetric()
    assert hash(one.transport) == hash(fsdp.symmetric(zero_cta=True))
    assert Spec({"data": 2}, transport="symmetric").transport == fsdp.symmetric()
    with pytest.raises(SpecError, match=r"symmetric\(zero_cta='yes'\): expected True or False"):
        fsdp.symmetric(zero_cta="yes")  # type: ignore[arg-type]


@each_rank(4)
def test_auto_on_two_axes() -> None:
    mesh, placement = mesh_and_placement("hsdp")
    state = fsdp.shard({"w": torch.ones(64)}, Spec(mesh, placement, transport="auto"), fsdp.sgd(lr=0.1))
    assert state.spec.transport.name == "collective"
