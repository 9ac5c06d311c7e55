"""Lanes and marks: ordered queues of device work, and points on them.

What runs on a lane is a job, a generator that issues collectives:

|       | CUDA                                        | CPU                                                        |
|-------|---------------------------------------------|------------------------------------------------------------|
| lane  | a stream                                    | a queue of jobs, done in order                             |
| job   | runs to its end at once, on the stream      | yields what to issue, goes on when that has ended          |
| mark  | an event                                    | the job, and all before it                                 |
| wait  | the current stream waits, the host does not | the host waits                                             |

A job that yields the name of another lane goes on there (on the CPU it stays where it is). Marks may be used again: who
waits for one waits for the point where it was set last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch

from ._interrupts import whole
from ._record import Collective
from ._torch import current_stream, set_stream

__all__ = ["ARENA", "Job", "Log", "Mark", "Queue", "Steps", "Streams", "together"]

Call = Callable[[], Any]  # issues an asynchronous work
Steps = Iterator[list[Any] | str]  # calls to issue and to wait for, or the name of the lane to go on on
REMEMBER = 1 << 14  # jobs: how far apart two ranks may be and still be drained
ARENA = "(arena)"  # in the place of a bucket: a barrier for all of a gather, before its buckets part


class Log:
    """The jobs issued on one lane: how many, and the last of them."""

    def __init__(self) -> None:
        self.count = 0
        self.tail: deque[tuple[Collective, ...]] = deque(maxlen=REMEMBER)

    def append(self, hops: tuple[Collective, ...]) -> None:
        self.count += 1
        self.tail.append(hops)

    def extend(self, jobs: list[tuple[Collective, ...]]) -> None:
        self.count += len(jobs)
        self.tail.extend(jobs)


class Job:
    """A job on the CPU. It is its own mark, which has passed when it and all jobs before it on its lane are done.

    Its own code (`steps`), issuing (`issue`) and waiting (`pause`) are apart: only a wait can end with "not yet".
    """

    __slots__ = (
        "__weakref__", "calls", "done", "hops", "issued", "lane", "number", "ordered", "ordinal", "single", "started",
        "steps", "works",
    )  # fmt: skip

    def __init__(
        self, steps: Steps, lane: str, hops: tuple[Any, ...] = (), single: bool = False, ordered: bool = False
    ) -> None:
        self.steps = steps
        self.lane = lane
        self.hops = hops
        self.single = single  # once it has started, all its collectives are issued
        self.ordered = ordered  # starts when all before it are done
        self.number = 0  # on its lane, from 1
        self.ordinal = 0  # among the jobs that the log has
        self.calls: list[Call] = []  # what it issues next
        self.works: list[Any] = []  # what it waits for
        self.issued = 0  # calls
        self.started = self.done = False

    def issue(self) -> None:
        """Issue what comes next. After an interrupt call it again to go on."""
        while self.calls:
            self.works.append(self.calls[0]())
            del self.calls[0]
            self.issued += 1

    def pause(self, patience: timedelta | None = None) -> RuntimeError | None:
        """Until all that was issued has ended. With `patience` an error when a work takes longer, or has failed."""
        try:
            while self.works:
                self.works[0].wait(patience) if patience else self.works[0].wait()
                del self.works[0]
        except RuntimeError as error:  # a work's: none of the job's own code runs here
            return error.with_traceback(None)  # its frames would keep it, and all tensors of their callers
        return None

    def ready(self) -> bool:
        """Whether all that was issued has ended, and well."""
        return not self.calls and all(work.is_completed() for work in self.works) and not self.failed()

    def failed(self) -> bool:
        """Whether a work has ended with an error. (It may have ended well since `pause` gave up.)"""
        for work in self.works:
            if work.is_completed():
                try:
                    work.wait()
                except RuntimeError:
                    return True
        return False

    def forsake(self, twin: Steps) -> None:
        """Its own code has raised: what it did not issue is issued by its twin, since peers wait for that."""
        self.calls = []
        self.steps = _left(twin, self.issued)


def _left(steps: Steps, issued: int) -> Steps:
    """What these steps issue after the first so many calls."""
    for item in steps:
        if isinstance(item, str):
            yield item
        else:
            left = item[issued:]
            issued = max(0, issued - len(item))
            if left:
                yield left


class Queue:
    """A lane on the CPU: jobs under way, oldest first. One starts when that before it has issued all that it will.

    Args:
        forsake: called with a job whose own code has raised, see `Job.forsake`.
        issue: issues what a job's own code has come to.
    """

    def __init__(self, forsake: Callable[[Job], None], issue: Callable[[Job], None]) -> None:
        self.forsake, self.issue = forsake, issue
        self.jobs: deque[Job] = deque()
        self.count = 0

    @whole
    def add(self, job: Job, log: Log | None = None) -> None:
        """The newest job; it starts if it may. What is logged is issued, even if an interrupt comes."""
        if log is not None:
            if job.hops:
                log.append(job.hops)
            job.ordinal = log.count
        self.count += 1
        job.number = self.count
        jobs = self.jobs
        free = not jobs or (jobs[-1].started and jobs[-1].single and not job.ordered)
        jobs.append(job)
        if not free:
            self.start()
            return
        self.advance(job)
        if job.done and jobs and jobs[0] is job:
            jobs.popleft()

    def start(self) -> None:
        """Forget jobs that are done, and start those that may."""
        jobs = self.jobs
        while jobs and jobs[0].done:
            jobs.popleft()
        if not jobs or jobs[-1].started:
            return
        for before, job in pairwise([None, *jobs]):
            assert job is not None
            if not job.started:
                if before is not None and (job.ordered or not (before.single or before.done)):
                    return
                self.advance(job)

    @whole
    def advance(self, job: Job, quiet: bool = False) -> None:
        """Take a job that waits for nothing on to what it waits for next: run its own code up to what it issues, and
        issue that.

        Args:
            quiet: what the job's own code raises is no news.
        """
        if not job.calls:  # else it was interrupted while it issued them
            job.started = True
            try:
                for item in job.steps:
                    if not isinstance(item, str) and item:
                        job.calls = list(item)
                        break
                else:
                    job.done = True
            except BaseException as error:
                self.forsake(job)
                if not quiet or not isinstance(error, Exception):
                    raise
        if job.calls:
            self.issue(job)

    def over(self, job: Job) -> bool:
        """Whether it and all jobs before it are done."""
        return all(other.done for other in self.jobs if other.number <= job.number)

    def progress(self) -> None:
        """Go as far as possible without waiting."""
        while self.jobs:
            job = self.jobs[0]
            if not job.done:
                if not job.ready():
                    return
                job.works = []
                self.advance(job)
            self.start()

    def reap(self) -> None:
        """Forget jobs that are over, and let go of what they hold. Issues nothing."""
        while self.jobs:
            job = self.jobs[0]
            if not job.done:
                if not (job.single and job.started and job.ready()) or getattr(job.steps, "gi_running", False):
                    return
                job.works = []
                self.advance(job)
            if self.jobs and self.jobs[0] is job:
                self.jobs.popleft()

    def drain(self, patience: timedelta) -> RuntimeError | None:
        """Finish every job, in order, for those who wait for what they issue. Returns the error of a work that takes
        longer, or has failed; call again to go on.

        An error of a job's own code is no news: `forsake` has seen to it that its step is void.
        """
        while self.jobs:
            job = self.jobs[0]
            while not job.done:
                error = job.pause(patience) if not job.calls else None
                if error is not None:
                    return error
                self.advance(job, quiet=True)
            self.start()
        return None


class Streams:
    """The lanes on a GPU, each a stream, beside the compute lane, which is whatever stream is current.

    `torch.cuda.stream` and `torch.cuda.current_stream` take longer than the rest of a verb; this asks for ids only.
    """

    def __init__(self, device: torch.device, names: Iterable[str]) -> None:
        self.device = device
        self.lanes = {name: torch.cuda.Stream(device, priority=-1) for name in names}
        self.known = torch.cuda.current_stream(device)
        self.used: set[str] = set()  # lanes that were given something since the last graph
        self.behind: set[str] = set()  # lanes that have yet to wait for it
        self.graph = torch.cuda.Event()  # its end

    def current(self) -> torch.cuda.Stream:
        found = current_stream(self.device.index)
        if found[0] != self.known.stream_id:
            self.known = torch.cuda.Stream(stream_id=found[0], device_index=found[1], device_type=found[2])
        return self.known

    def set(self, stream: torch.cuda.Stream) -> None:
        set_stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """What the current stream is given inside comes after all that lanes have, and before what they are given next:
        a graph has parts on lanes, which would else run beside another lineage's. Lanes wait when they are used."""
        home = self.current()
        home.wait_event(self.graph)
        for name in self.used:
            home.wait_stream(self.lanes[name])
        self.used.clear()
        try:
            yield
        finally:
            self.graph.record(home)
            self.behind.update(self.lanes)

    def lane(self, name: str) -> torch.cuda.Stream:
        """A lane, to be given something."""
        self.used.add(name)
        stream = self.lanes[name]
        if name in self.behind:
            self.behind.discard(name)
            stream.wait_event(self.graph)
        return stream

    def catch_up(self) -> None:
        """Have all lanes wait for the last graph now: while another is captured they cannot."""
        for name in list(self.behind):
            self.lane(name)

    def run(self, lane: str, job: Steps, after: Mark, mark: Mark) -> Mark:
        """Issue all of a job on a lane's stream ("side": on the current one). The host waits for nothing."""
        home = stream = self.current()
        event = mark or torch.cuda.Event()
        try:
            if lane in self.lanes:
                stream = self.lane(lane)
                self.set(stream)
            if after is not None:
                stream.wait_event(after)
            for item in job:
                if isinstance(item, str):
                    turn = torch.cuda.Event()
                    turn.record(stream)
                    stream = self.lane(item)
                    self.set(stream)
                    stream.wait_event(turn)
                else:
                    for call in item:
                        call().wait()
            event.record(stream)
        finally:
            self.set(home)
        return event


Mark = Any  # torch.cuda.Event, Job, or None: nothing to wait for


def together(jobs: list[Steps]) -> Steps:
    """Jobs side by side, as one: all issue their first collectives, then all their second ones."""
    while jobs:
        steps = [(job, next(job, None)) for job in jobs]
        calls = [call for _, step in steps if isinstance(step, list) for call in step]
        if calls:
            yield calls
        yield from dict.fromkeys(step for _, step in steps if isinstance(step, str))
        jobs = [job for job, step in steps if step is not None]
