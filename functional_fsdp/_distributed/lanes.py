"""Lanes and marks: ordered queues of device work, and points on them.

What runs on a lane is a job, a generator that issues collectives:

|       | `stream_lanes`, on GPUs                     | `host_lanes`, on the CPU                                   |
|-------|---------------------------------------------|------------------------------------------------------------|
| lane  | a CUDA stream                               | a queue of jobs, done in order                             |
| job   | runs to its end at once, on the stream      | yields what to issue, goes on when that has ended          |
| mark  | an event                                    | the job, and all before it                                 |
| wait  | the current stream waits, the host does not | the host waits                                             |

A job that yields the name of another lane goes on there (on the CPU it stays where it is). Marks may be used again: who
waits for one waits for the point where it was set last. Nobody asks which kind of lanes there are: `Lanes` says what
differs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from .._common.record import Collective

__all__ = ["ARENA", "LANES", "QUEUES", "Call", "Lanes", "Log", "Mark", "Steps", "Waiting", "together"]

Call = Callable[[], Any]  # issues an asynchronous work
Steps = Iterator[list[Any] | str]  # calls to issue and to wait for, or the name of the lane to go on on
Mark = Any  # torch.cuda.Event, Job, or None: nothing to wait for
REMEMBER = 1 << 14  # jobs: how far apart two ranks may be and still be drained
ARENA = "(arena)"  # in the place of a bucket: a barrier for all of a gather, before its buckets part
LANES = ("gather", "reduce", "outer", "side")  # with communicators on every axis
QUEUES = ("gather", "reduce", "side", "control")  # in which jobs are issued; a job of "reduce" may go on on "outer"


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


class Waiting(NamedTuple):
    """What a rank says that waits: on which lane, for which of its jobs, along which axes, for what, how many jobs it
    has issued on each lane, and whether it goes on by itself if others need it, or starts what they need."""

    rank: int
    lane: str
    ordinal: int
    axes: list[str]
    what: str
    counts: dict[str, int]
    relents: bool


class Lanes:
    """The lanes of one mesh on this rank, beside the compute lane. What the host has no use for does nothing there.

    Attributes:
        backend: of the communicators.
        waits_on_host: whether it is the host that waits. Then it hears of its peers meanwhile, what has been released
            is free, and waiting may fail. Else streams wait for each other, and what the host frees may be in use.
        copies_on_lanes: whether gradients are copied into staging by the lane, beside compute: until then they stay.
        queues: jobs of the host, by lane. (On GPUs those of "control" only.)
        behind: starts what peers wait for, where this rank waits for them.
    """

    backend: ClassVar[str]
    waits_on_host: ClassVar[bool]
    copies_on_lanes: ClassVar[bool]
    queues: dict[str, Any]
    behind: Callable[[Mapping[str, Waiting]], bool] | None

    def submit(
        self, lane: str, hops: tuple[Collective, ...], job: Steps, after: Mark = None, single: bool = False,
        ordered: bool = False, mark: Mark = None,
    ) -> Mark:  # fmt: skip
        """Log a job and start it on its lane once the mark `after` has passed. Returns the mark at its end.

        Args:
            hops: the collectives that it will issue, for the log.
            single: its collectives all start at once (on the CPU the next job then need not wait for its end).
            ordered: it begins with what the job before it ends with (on the CPU it starts after that one's end).
            mark: an old one that may be used again.
        """

    def enqueue(self, lane: str, job: Steps, after: Mark = None, mark: Mark = None) -> Mark:
        """Start a job without collectives on the lane "update", "fetch" or "store", where it goes beside compute.
        Unlogged. On the CPU it is done at once. `after` and `mark`: as of `submit`."""

    def join(self, lane: str) -> None:
        """Compute waits for all that a lane has been given."""

    def mark(self, mark: Mark = None) -> Mark:
        """A point on the compute lane, within a job on the job's lane; None on the CPU, where it is the host's present.
        May use an old one again."""

    def wait(self, mark: Mark, relents: bool = False) -> bool:
        """The compute lane waits; within a job its lane does. On the CPU this listens for restarts; a peer that is gone
        becomes a CommError.

        Args:
            relents: it stops waiting (False) if a peer waits for something that this rank issues later, perhaps before
                it comes to what is waited for here.
        """
        raise NotImplementedError

    def passed(self, mark: Mark) -> bool:
        """Whether nobody would wait for it."""
        raise NotImplementedError

    def collective(self, hop: Collective, out: Any, given: Any, group: Any) -> Steps:
        """One collective of a lane with a communicator of its own, as a part of a job; see `Runtime.collective`."""
        raise NotImplementedError

    def signalling(self, axis: str) -> None:
        """Have what barriers along an axis need. Collective where there is none yet.

        Raises:
            SpecError: on every rank, if GPUs cannot have memory that the others reach.
        """

    def traced(self, lane: str) -> str:
        """The lane whose communicators a traced step uses for this lane's collectives."""
        raise NotImplementedError

    def keep(self, *tensors: torch.Tensor) -> None:
        """These are given back while lanes may still use them. (A job of the host's holds what it uses.)"""

    def let_go(self, marks: list[Mark]) -> None:
        """A lineage is gone, and with it what its jobs hold, up to these marks."""

    def idle(self) -> bool:
        """Whether nothing is under way, and no memory knows the communicators: others may use them."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """The host waits until the device has done all that it was given."""


def together(jobs: list[Steps]) -> Steps:
    """Jobs side by side, as one: all issue their first collectives, then all their second ones."""
    while jobs:
        steps = [(job, next(job, None)) for job in jobs]
        calls = [call for _, step in steps if isinstance(step, list) for call in step]
        if calls:
            yield calls
        yield from dict.fromkeys(step for _, step in steps if isinstance(step, str))
        jobs = [job for job, step in steps if step is not None]
