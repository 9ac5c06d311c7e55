"""Lanes and marks: ordered queues of device work, and points on them.

What runs on a lane is a job, a generator that issues collectives:

|       | CUDA                                        | CPU                                                        |
|-------|---------------------------------------------|------------------------------------------------------------|
| lane  | a stream                                    | a queue of jobs, done in order                             |
| job   | runs to its end at once, on the stream      | issues asynchronous works, yields them, goes on when done  |
| mark  | an event                                    | the job                                                    |
| wait  | the current stream waits, the host does not | the host waits                                             |

A job that yields the name of another lane goes on there (on the CPU it stays where it is). Marks may be used again: who
waits for one waits for the point where it was set last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from ._interrupts import whole

__all__ = ["ARENA", "Issued", "Job", "Log", "Mark", "Queue", "Steps", "Streams", "passed", "together"]

Steps = Iterator[list[Any] | str]
REMEMBER = 1 << 14  # jobs: how far apart two ranks may be and still be drained
ARENA = "(arena)"  # in the place of a bucket: a barrier for all of a gather, before its buckets part


class Issued(NamedTuple):
    """One collective, as the log keeps it: enough to issue its twin on a rank that missed it."""

    lane: str
    axis: str
    kind: str
    numel: int  # elements of the larger side
    dtype: torch.dtype
    op: str
    what: str  # the bucket, for the digest


class Log:
    """The jobs issued on one lane: how many, and the last of them."""

    def __init__(self) -> None:
        self.count = 0
        self.tail: deque[tuple[Issued, ...]] = deque(maxlen=REMEMBER)

    def append(self, hops: tuple[Issued, ...]) -> None:
        self.count += 1
        self.tail.append(hops)

    def extend(self, jobs: list[tuple[Issued, ...]]) -> None:
        self.count += len(jobs)
        self.tail.extend(jobs)


class Job:
    """A job on the CPU, under way: the generator, and the works that it waits for now. It is its own mark."""

    __slots__ = ("__weakref__", "done", "hops", "lane", "single", "steps", "works")

    def __init__(self, steps: Steps, lane: str, hops: tuple[Any, ...] = (), single: bool = False) -> None:
        self.steps = steps
        self.lane = lane
        self.hops = hops  # for error texts
        self.single = single  # all its collectives are issued by now
        self.works: list[Any] = []
        self.done = False
        self._advance()

    @whole
    def _advance(self) -> None:
        for item in self.steps:
            if not isinstance(item, str) and item:
                self.works = item
                return
        self.done = True

    def wait(self, patience: timedelta | None = None) -> None:
        """Until it is done. With `patience` RuntimeError when a work takes longer; call again to go on."""
        while not self.done:
            while self.works:
                self.works[0].wait(patience) if patience else self.works[0].wait()
                self.works.pop(0)
            self._advance()

    def step(self) -> None:
        """On to what it issues next: the works that it waits for are done."""
        for work in self.works:
            work.wait()
        self.works = []
        self._advance()

    def ready(self) -> bool:
        """Whether `wait` would not wait for what is issued now."""
        return self.done or (self.single and all(work.is_completed() for work in self.works) and not self.failed())

    def failed(self) -> bool:
        """Whether the work that it waits for has ended with an error. (It may have ended well since `wait` gave up.)"""
        if not self.works or not self.works[0].is_completed():
            return False
        try:
            self.works[0].wait()
        except RuntimeError:
            return True
        return False


class Queue:
    """A lane on the CPU: jobs under way, oldest first."""

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()

    def reap(self) -> None:
        """Forget jobs that are done."""
        while self.jobs and self.jobs[0].ready():
            self.jobs.popleft().wait()

    def drain(self) -> None:
        """Finish every job, in order."""
        while self.jobs:
            self.jobs[0].wait()
            self.jobs.popleft()


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
        found = torch._C._cuda_getCurrentStream(self.device.index)
        if found[0] != self.known.stream_id:
            self.known = torch.cuda.Stream(stream_id=found[0], device_index=found[1], device_type=found[2])
        return self.known

    def set(self, stream: torch.cuda.Stream) -> None:
        torch._C._cuda_setStream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

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
                    for work in item:
                        work.wait()
            event.record(stream)
        finally:
            self.set(home)
        return event


Mark = Any  # torch.cuda.Event, Job, or None: nothing to wait for


def passed(mark: Mark) -> bool:
    """Whether nobody would wait for it."""
    return mark is None or (mark.done if isinstance(mark, Job) else bool(mark.query()))


def together(jobs: list[Steps]) -> Steps:
    """Jobs side by side, as one: all issue their first collectives, then all their second ones."""
    while jobs:
        steps = [(job, next(job, None)) for job in jobs]
        works = [work for _, step in steps if isinstance(step, list) for work in step]
        if works:
            yield works
        yield from dict.fromkeys(step for _, step in steps if isinstance(step, str))
        jobs = [job for job, step in steps if step is not None]
