"""Lanes and marks: ordered queues of device work, and points on them.

What runs on a lane is a job, a generator that issues collectives:

|       | `StreamLanes`, on GPUs                      | `HostLanes`, on the CPU                                    |
|-------|---------------------------------------------|------------------------------------------------------------|
| lane  | a CUDA stream                               | a queue of jobs, done in order                             |
| job   | runs to its end at once, on the stream      | yields what to issue, goes on when that has ended          |
| mark  | an event                                    | the job, and all before it                                 |
| wait  | the current stream waits, the host does not | the host waits                                             |

A job that yields the name of another lane goes on there (on the CPU it stays where it is). Marks may be used again: who
waits for one waits for the point where it was set last. Nobody asks which kind of lanes there are: attributes of
`HostLanes` say what differs.

A lane of the host is a `Queue` of jobs. The collectives on gloo are a generator: it yields calls that issue
asynchronous works, and goes on when these are done. (NCCL has each as one kernel, see `_runtime.lanes`.)

gloo's own all-gather and reduce-scatter copy through temporary buffers; its broadcast and reduce work in place, so here
a gather is one broadcast a slice, a reduce-scatter one reduce a slice, and an all-reduce both, one after the other.
That is several times faster, and makes reduce-scatter and all-reduce equal bit for bit at every world size: the same
reduces, in the same order.

A traced step on CPUs calls torch's functional collectives instead, of groups with one thread each: see `groups`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._common.interrupts import uninterruptible
from .._common.record import Collective

OPS = {"mean": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@lru_cache
def _rooted(rank: int, op: str = "") -> Any:
    """Options of a broadcast from this rank of a group; with an op of a reduce to it. Kept: the group's own methods
    take two thirds of the time of `dist.broadcast` and `dist.reduce`, which make them anew."""
    options: Any = dist.ReduceOptions() if op else dist.BroadcastOptions()
    options.rootRank, options.asyncOp = rank, True
    if op:
        options.reduceOp = OPS[op]
    return options


def gloo(hop: Collective, out: torch.Tensor, given: torch.Tensor, group: Any) -> Iterator[list[Any] | str]:
    """One collective of this group.

    all_gather       `given` [n] -> `out` [ranks · n], in rank order; in place where `given` is the slice of `out`
    reduce_scatter   `given` [ranks · n] -> `out` [n]; `given` is scratch afterwards
    all_to_all       `given` [ranks · n] -> `out` [ranks · n]: the n of each rank's that are this one's, by rank; with
                     `splits` (elements that come, that go) as many as they say
    all_reduce       `out` [n], in place; of a bucket (not of a few numbers) n divides by the ranks
    barrier          all ranks are here
    """
    own, how = group.rank(), dict[str, Any](group=group, async_op=True)
    if hop.kind == "barrier":
        yield [partial(dist.all_reduce, torch.zeros(1, device="cpu"), **how)]
    elif hop.kind == "all_to_all" and hop.splits:
        came, sent = ([n * hop.dtype.itemsize for n in some] for some in hop.splits)
        yield [partial(dist.all_to_all_single, out.view(torch.uint8), given.view(torch.uint8), came, sent, **how)]
    elif hop.kind == "all_to_all":
        if out.numel():
            yield [partial(dist.all_to_all_single, out, given, **how)]
    elif hop.kind == "all_reduce" and (hop.lane == "control" or not hop.bucket):
        yield [partial(dist.all_reduce, out, op=OPS[hop.op], **how)]
    elif hop.kind == "all_gather":
        if not out.is_floating_point() or out.itemsize == 1:  # integers, booleans and float8 travel as bytes
            out, given = out.view(torch.uint8), given.view(torch.uint8)
        slices = out.chunk(group.size()) if out.numel() else ()
        if slices and slices[own].data_ptr() != given.data_ptr():
            slices[own].copy_(given)
        yield [partial(group.broadcast, [part], _rooted(r)) for r, part in enumerate(slices)]
    else:
        full = out if hop.kind == "all_reduce" else given
        slices = full.chunk(group.size()) if full.numel() else ()
        yield [partial(group.reduce, [part], _rooted(r, hop.op)) for r, part in enumerate(slices)]
        if hop.kind == "all_reduce":
            yield [partial(group.broadcast, [part], _rooted(r)) for r, part in enumerate(slices)]
        elif slices and slices[own].data_ptr() != out.data_ptr():
            out.copy_(slices[own])


class Job:
    """A job on the CPU. It is its own mark, which has passed when it and all jobs before it on its lane are done.

    Its own code (`steps`), issuing (`issue`) and waiting (`pause`) are apart: only a wait can end with "not yet".
    """

    __slots__ = (
        "__weakref__", "awaited", "calls", "done", "hops", "issued", "lane", "number", "ordered", "ordinal", "single",
        "started", "steps", "works",
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
        self.awaited = 0  # how many wait for it, who take it on: a destructor may come to `reap` meanwhile

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
        for work in self.works:
            if not work.is_completed():
                return False
        return not self.calls and not self.failed()

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

    @uninterruptible
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

    @uninterruptible
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
        """Whether it and all jobs before it are done, or come to their end without a wait."""
        self.progress()
        return not self.jobs or self.jobs[0].number > job.number

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
                if job.awaited or not (job.single and job.started and job.ready()):
                    return
                if getattr(job.steps, "gi_running", False):
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
            job.awaited += 1
            try:
                while not job.done:
                    error = job.pause(patience) if not job.calls else None
                    if error is not None:
                        return error
                    self.advance(job, quiet=True)
            finally:
                job.awaited -= 1
            self.start()
        return None


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
    has issued on each lane, and whether it starts what others need."""

    rank: int
    lane: str
    ordinal: int
    axes: list[str]
    what: str
    counts: dict[str, int]
    helps: bool


def together(jobs: list[Steps]) -> Steps:
    """Jobs side by side, as one: all issue their first collectives, then all their second ones."""
    while jobs:
        steps = [(job, next(job, None)) for job in jobs]
        calls = [call for _, step in steps if isinstance(step, list) for call in step]
        if calls:
            yield calls
        yield from dict.fromkeys(step for _, step in steps if isinstance(step, str))
        jobs = [job for job, step in steps if step is not None]
