"""Lanes: the order of streams around graphs that are replayed, with streams that only remember what came before; jobs
on the CPU, with works that end when the test says so."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from functional_fsdp._common.record import Collective, Steps, together
from functional_fsdp._runtime.lanes import HostLanes, Job
from functional_fsdp._runtime.stream_lanes import StreamLanes
from functional_fsdp._storage import Loan, Place

LANES = ("gather", "reduce", "update")


class Stream:
    """What was given to it, and what that comes after."""

    def __init__(self) -> None:
        self.before: set[int] = set()

    def wait_event(self, event: Event) -> None:
        self.before |= event.before

    def wait_stream(self, stream: Stream) -> None:
        self.before |= stream.before


class Event:
    def __init__(self) -> None:
        self.before: set[int] = set()

    def record(self, stream: Stream) -> None:
        self.before = set(stream.before)


class Remembered(StreamLanes):
    def __init__(self) -> None:
        self.lanes: Any = {name: Stream() for name in LANES}
        self.homes: Any = [Stream(), Stream()]
        self.home = 0
        self.used, self.unjoined, self.connecting = set(), set(), []
        self.graph: Any = Event()

    def current(self) -> Any:
        return self.homes[self.home]


events = st.one_of(
    st.sampled_from(LANES), st.tuples(st.integers(0, 1), st.sampled_from(["replayed", "launched", "refused"]))
)


@given(st.lists(events, max_size=30))
def test_graphs_come_after_what_lanes_have_and_before_what_they_are_given_next(program: list[Any]) -> None:
    streams = Remembered()
    graphs: set[int] = set()
    every: set[int] = set()
    for number, event in enumerate(program):
        if isinstance(event, str):
            lane: Any = streams.lane(event)
            assert graphs <= lane.before
            lane.before.add(number)
            every.add(number)
        else:
            streams.home, how = event
            with suppress(InterruptedError), streams.joined():  # it is refused, or interrupted once it was launched
                home = streams.current()
                assert every <= home.before
                if how == "refused":
                    raise InterruptedError
                home.before.add(number)
                graphs.add(number)
                every.add(number)
                if how == "launched":
                    raise InterruptedError


class Issuing(Remembered):
    """Jobs are issued, on no stream."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run, self.skips, self.connecting = run, 0, []

    def enqueue(self, lane: str, job: Steps, after: Any = None, mark: Any = None) -> None:
        for _ in job:
            pass


def test_a_collective_that_could_not_be_issued_is_issued_for_those_who_wait() -> None:
    """The second of two raises, and the first is issued: peers wait for the second, and not for the first again."""
    two = hops(2, 3)
    issued: list[int] = []

    def all_reduce(out: torch.Tensor, **_: Any) -> None:
        if len(out) == 3 and issued == [2] and bool(out.any()):
            raise RuntimeError("out of memory")
        issued.append(len(out))

    run = SimpleNamespace(size=2, capturing=False, device=torch.device("cpu"), logs={"reduce": []}, void=lambda: None)
    streams = Issuing(run)
    run.collective = lambda hop, out, given: streams.collective(hop, out, given, None)

    def job() -> Steps:
        for hop in two:
            yield from run.collective(hop, one := torch.ones(hop.numel), one)

    with patch("torch.distributed.all_reduce", all_reduce), pytest.raises(RuntimeError, match="out of memory"):
        streams.submit("reduce", two, job())
    assert issued == [2, 3]
    assert run.logs == {"reduce": [two]}


# ---------------------------------------------------------------- jobs on the CPU


class Work:
    """An asynchronous work that ends when the test says so."""

    def __init__(self) -> None:
        self.over = False
        self.error: RuntimeError | None = None

    def is_completed(self) -> bool:
        return self.over

    def wait(self, patience: Any = None) -> None:
        if not self.over:
            raise RuntimeError("not yet")
        if self.error:
            raise self.error


class Lane(HostLanes):
    """A lane whose jobs issue works that the test ends. What a job's own code did not issue, its twin does."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        run: Any = SimpleNamespace(size=1, sizes={}, device=torch.device("cpu"), void=lambda: None)
        run.collective = lambda hop, *_: iter([[self.call] * hop.numel])
        super().__init__(run)

    def call(self) -> Work:
        self.works.append(Work())
        return self.works[-1]

    def give(self, *sizes: int, single: bool = False, ordered: bool = False, dies: int = -1) -> Any:
        """A job that issues so many works in each of its parts; before the part `dies` its own code raises."""

        def steps() -> Steps:
            for i, n in enumerate(sizes):
                if i == dies:
                    raise RuntimeError("can't allocate memory")
                yield [self.call] * n
            if dies == len(sizes):
                raise RuntimeError("can't allocate memory")

        return self.submit("gather", hops(*sizes), steps(), single=single, ordered=ordered)

    @property
    def jobs(self) -> deque[Job]:
        return self.queues["gather"]


def hops(*sizes: int) -> tuple[Collective, ...]:
    return tuple(Collective("all_reduce", "dp", n, torch.float32, "sum", "gather", "") for n in sizes)


def test_a_mark_has_passed_when_all_before_it_are_done() -> None:
    """A job without a collective is done at once, while those before it are in flight."""
    lane = Lane()
    first, empty = lane.give(1, single=True), lane.give(single=True)
    assert empty.done
    assert not lane.passed(empty)
    lane.works[0].over = True
    assert lane.passed(empty)
    assert first.done
    assert not lane.jobs


def test_a_job_starts_when_the_one_before_has_issued_all() -> None:
    lane = Lane()
    jobs = [lane.give(1, single=True), lane.give(1, 1), lane.give(1, single=True)]
    jobs.append(lane.give(1, single=True, ordered=True))
    assert [job.started for job in jobs] == [True, True, False, False]
    for n in (2, 3, 4, 5):  # of works; one more each time that those there are have ended
        assert len(lane.works) == n
        for work in lane.works:
            work.over = True
        lane.progress("gather")
    assert all(job.done for job in jobs)


def test_what_a_jobs_own_code_raises_is_no_not_yet() -> None:
    lane = Lane()
    job = lane.give(2, 3, 1, dies=2)
    error = job.pause(timedelta(seconds=0.01))
    assert str(error) == "not yet"
    assert error is not None
    assert error.__traceback__ is None  # which would keep what the callers of `pause` have, as they keep the error
    for work in lane.works:
        work.over = True
    lane.progress("gather")
    assert len(lane.works) == 5
    for work in lane.works:
        work.over = True
    with pytest.raises(RuntimeError, match="allocate memory"):
        lane.progress("gather")
    assert lane.jobs[0] is job
    lane.progress("gather")
    assert len(lane.works) == 6  # peers wait for what it would have issued
    lane.works[-1].over = True
    assert lane.drain("gather", timedelta(seconds=0.01)) is None
    assert not lane.jobs


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_a_job_that_dies_issues_as_many_as_its_peers(sizes: list[int], data: Any) -> None:
    """Wherever its own code raises, also while the lane is drained, and where it had nothing left to issue."""
    lane = Lane()
    with suppress(RuntimeError):
        lane.give(*sizes, dies=data.draw(st.integers(0, len(sizes))))
    job = lane.jobs[0]
    for _ in range(2 * len(sizes) + 2):
        for work in lane.works:
            work.over = True
        if data.draw(st.booleans()):
            lane.drain("gather", timedelta(seconds=0.01))
        else:
            with suppress(RuntimeError):
                lane.progress("gather")
    assert job.done
    assert job.issued == len(lane.works) == sum(sizes)


def test_a_work_that_failed_is_told_from_one_that_is_late() -> None:
    lane = Lane()
    job = lane.give(2)
    assert not job.failed()
    lane.works[1].over, lane.works[1].error = True, RuntimeError("connection closed")
    assert job.failed()
    lane.progress("gather")  # whoever waits for it hears of it, nobody else
    assert not job.done
    lane.works[0].over = True
    assert str(lane.drain("gather", timedelta(seconds=0.01))) == "connection closed"


def test_interrupted_issuing_goes_on_where_it_was() -> None:
    lane = Lane()
    stops = [True]

    def call() -> Work:
        if len(lane.works) == 1 and stops:
            stops.clear()
            raise KeyboardInterrupt
        return lane.call()

    with pytest.raises(KeyboardInterrupt):
        lane.submit("gather", hops(3), iter([[call, call, call]]))
    job = lane.jobs[0]
    lane.advance(job)
    assert len(lane.works) == job.issued == 3


def test_a_destructor_that_comes_while_a_job_is_waited_for_leaves_it_alone() -> None:
    """Garbage may be collected at any time, in any thread: what a state held is let go of then."""
    lane = Lane()

    class Reaps(Work):
        def wait(self, patience: timedelta | None = None) -> None:
            self.over = True
            lane.let_go([])

    def steps() -> Steps:
        for _ in range(2):
            lane.works.append(Reaps())
            yield [lambda: lane.works[-1]]

    first = lane.submit("gather", hops(1, 1), steps(), single=True)
    last = lane.give(1, single=True)
    lane.works[1].over = True
    assert lane.drain("gather", timedelta(seconds=0.01)) is None
    assert first.done
    assert last.done
    assert first.issued == 2
    assert not lane.jobs


def test_together_dies_with_each_of_its_jobs() -> None:
    def dying() -> Steps:
        yield [Work]
        raise ValueError("on purpose")

    def other() -> Steps:
        yield [Work]
        yield [Work]

    both = together([other(), dying()])
    assert len(next(both)) == 2
    with pytest.raises(ValueError, match="on purpose"):
        next(both)


# ---------------------------------------------------------------- what compute waits for


def gathering(cast: str | None, gathered: str) -> Place:
    """A unit's place whose last gather has these marks."""
    place = Place(Loan("a unit", {}), (), ())
    place.cast, place.gathered = cast, gathered
    return place


def test_compute_begins_after_the_cast_of_the_next_gather_if_that_is_all_there_is_between() -> None:
    mine, following = gathering("cast 0", "end 0"), gathering("cast 1", "end 1")
    assert mine.ready({"1": following}, "end 1") == "cast 1"
    assert mine.ready({}, "end 0") == "end 0"
    assert following.ready({"0": mine}, "end 1") == "end 1", "the other one was started before it"
    assert mine.ready({"1": following, "2": gathering("cast 2", "end 2")}, "end 2") == "end 0", "gather 1 is between"
    assert mine.ready({"1": gathering(None, "end 1")}, "end 1") == "end 0", "nothing is cast"
    mine.single = False  # it ends on another lane
    assert mine.ready({"1": following}, "end 1") == "end 0"
