"""Jobs on the CPU, and queues of them: what a lane of the host is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

from .._common.interrupts import whole
from .lanes import Call, Log, Steps

__all__ = ["Job", "Queue"]


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
