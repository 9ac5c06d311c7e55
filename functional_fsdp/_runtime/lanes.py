"""Lanes and marks: ordered queues of device work, and points on them.

What runs on a lane is a job, a generator that issues collectives:

|       | `StreamLanes`, on GPUs (`stream_lanes`)     | `HostLanes`, on the CPU                                    |
|-------|---------------------------------------------|------------------------------------------------------------|
| lane  | a CUDA stream                               | a queue of jobs, done in order                             |
| job   | runs to its end at once, on the stream      | yields what to issue, goes on when that has ended          |
| mark  | an event                                    | the job, and all before it                                 |
| wait  | the current stream waits, the host does not | the host waits                                             |

A job that yields the name of another lane goes on there (on the CPU it stays where it is). Marks may be used again: who
waits for one waits for the point where it was set last. Nobody asks which kind of lanes there are: attributes of
`HostLanes` say what differs.

A lane of the host is a queue of jobs. The collectives on gloo are a generator: it yields calls that issue
asynchronous works, and goes on when these are done. gloo's own all-gather and reduce-scatter copy through temporary
buffers; its broadcast and reduce work in place, so here a gather is one broadcast a slice, a reduce-scatter one reduce
a slice, and an all-reduce both, one after the other. That is several times faster, and makes reduce-scatter and
all-reduce equal bit for bit at every world size: the same reduces, in the same order. (A traced step on CPUs calls
torch's functional collectives instead, of groups with one thread each: `one_thread` in `_graph/traced.py`.)

The host carries jobs on while it waits, and as far as they go without that when it submits the next one. It waits in
short turns, and looks around in between: for works that other lanes wait for, for a peer that restarts, and for one
that waits for what this rank issues later.
"""

from __future__ import annotations

import json
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import lru_cache, partial
from itertools import count, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._common.calls import ranged, uninterruptible
from .._common.errors import ScheduleError
from .._common.record import QUEUES, Call, Collective, Mark, Steps
from .._common.torch_names import profiler
from .._distributed import Case
from .agreement import Agreement
from .restart import POLL, twin

BESIDE = {"side", "control", "reduce"}  # lanes on which it is waited for in the middle of what no plan names
FIRST = timedelta(seconds=0.005)  # one turn of waiting, which then double up to POLL
SAME = (
    "Use the same units in the same order on every rank; only units of the schedule may be left out, and only where "
    "the schedule has them. If ranks leave units out before the order of use is known, give it: Schedule(order=[...]). "
    "The state before the step is valid."
)


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


_NUMBERS = count(1)


class Job:
    """A job on the CPU. It is its own mark, which has passed when it and all jobs before it on its lane are done.

    Its own code (`steps`), issuing (`calls`) and waiting (`pause`) are apart: only a wait can end with "not yet".
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
        self.number = next(_NUMBERS)  # larger than that of each job before it
        self.ordinal = 0  # among the jobs that the log has
        self.calls: list[Call] = []  # what it issues next
        self.works: list[Any] = []  # what it waits for
        self.issued = 0  # calls
        self.started = self.done = False
        self.awaited = 0  # how many wait for it, who take it on: a destructor may come to `let_go` meanwhile

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


class HostLanes:
    """The lanes of one mesh on this rank, beside the compute lane: queues of jobs, which the host carries on while it
    waits. What the host has no use for does nothing here.

    Args:
        run: the ranks of the mesh, as they agree.

    Attributes:
        backend: of the communicators.
        waits_on_host: whether it is the host that waits. Then it hears of its peers meanwhile, what has been released
            is free, and waiting may fail. Else streams wait for each other, and what the host frees may be in use.
        connects: whether communicators are connected by their first collectives; see `StreamLanes.connect`.
        copies_on_lanes: whether gradients are copied into staging by the lane, beside compute: until then they stay.
        collective: one collective of a lane, as a part of a job; see `Runtime.collective`. exchange: of "control".
        generator: that compute draws random numbers from by default; None: the host's.
        queues: jobs of the host, by lane. (On GPUs those of "control" only.)
        behind: starts what peers wait for, where this rank waits for them.
    """

    backend = "gloo"
    waits_on_host = True
    connects = copies_on_lanes = False
    generator: torch.Generator | None = None
    collective = exchange = staticmethod(gloo)

    def __init__(self, run: Agreement) -> None:
        self.run = run
        self.queues: dict[str, deque[Job]] = {lane: deque() for lane in QUEUES}
        self.behind: Callable[[Mapping[str, Waiting]], bool] | None = None

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

        Raises:
            ScheduleError: another rank has issued something else in its place. This rank issues nothing, and the state
                before the step is valid.
        """
        jobs = self.queues[lane]
        if jobs and (ordered or not jobs[-1].single):
            self.progress(lane)
        new = Job(job, lane, hops, single, ordered)
        self._add(new)
        return new

    def enqueue(self, lane: str, job: Steps, after: Mark = None, mark: Mark = None) -> Mark:
        """Start a job without collectives on the lane "update", "fetch" or "store", where it goes beside compute.
        Unlogged. On the CPU it is done at once. `after` and `mark`: as of `submit`."""
        for _ in job:
            pass

    def join(self, lane: str) -> None:
        """Compute waits for all that a lane has been given."""

    # ---- queues of jobs

    @uninterruptible
    def _add(self, job: Job) -> None:
        """The newest job of its lane, which starts if it may. What is logged is issued, even if an interrupt comes."""
        run, jobs = self.run, self.queues[job.lane]
        if run.size > 1:
            log = run.logs[job.lane]
            if job.hops:
                other = log.append(job.hops)
                if other is not None:
                    raise self._differs(job, run.ranks[other])
            job.ordinal = log.count
        free = not jobs or (jobs[-1].started and jobs[-1].single and not job.ordered)
        jobs.append(job)
        if not free:
            self._start(jobs)
            return
        self.advance(job)
        if job.done and jobs and jobs[0] is job:
            jobs.popleft()

    def _differs(self, job: Job, other: int) -> ScheduleError:
        """The error for a job in whose place another rank of this host issues something else."""
        hop = job.hops[0]
        return self._apart(
            f"this rank is about to issue {hop.kind} of {hop.bucket!r} ({job.lane} lane, {hop.numel} elements), "
            f"where rank {other} issues something else. {SAME}{self.run.of_several()}"
        )

    def _start(self, jobs: deque[Job]) -> None:
        """Forget jobs of a lane that are done, and start those that may: one starts when that before it has issued all
        that it will."""
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
        issue that. If its own code raises, what it did not issue is issued for those who wait, and its step is void.

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
                job.calls, job.steps = [], _left(twin(self.run, job.hops), job.issued)  # peers wait for that
                self.run.void()
                if not quiet or not isinstance(error, Exception):
                    raise
        try:
            while job.calls:
                job.works.append(job.calls[0]())
                del job.calls[0]
                job.issued += 1
        except RuntimeError as error:
            raise self.run.fail(f"{_said(job)} could not be issued", error) from error

    def progress(self, lane: str) -> None:
        """Take the jobs of a lane as far as they go without waiting."""
        jobs = self.queues[lane]
        while jobs:
            job = jobs[0]
            if not job.done:
                if not job.ready():
                    return
                job.works = []
                self.advance(job)
            self._start(jobs)

    def drain(self, lane: str, patience: timedelta) -> RuntimeError | None:
        """Finish every job of a lane, in order, for those who wait for what they issue. Returns the error of a work
        that takes longer, or has failed; call again to go on. An error of a job's own code is no news."""
        jobs = self.queues[lane]
        while jobs:
            job = jobs[0]
            job.awaited += 1
            try:
                while not job.done:
                    error = job.pause(patience) if not job.calls else None
                    if error is not None:
                        return error
                    self.advance(job, quiet=True)
            finally:
                job.awaited -= 1
            self._start(jobs)
        return None

    def let_go(self, marks: list[Mark]) -> None:
        """A lineage is gone, and with it what its jobs hold, up to these marks. Issues nothing: this may come at any
        time, in any thread."""
        for jobs in self.queues.values():  # jobs hold what they write: forget those that are over
            while jobs:
                job = jobs[0]
                if not job.done:
                    if job.awaited or not (job.single and job.started and job.ready()):
                        break
                    if getattr(job.steps, "gi_running", False):
                        break
                    job.works = []
                    self.advance(job)
                if jobs and jobs[0] is job:
                    jobs.popleft()

    # ---- points on lanes

    def mark(self, mark: Mark = None) -> Mark:
        """A point on the compute lane, within a job on the job's lane; None on the CPU, where it is the host's present.
        May use an old one again."""

    def wait(self, mark: Mark) -> None:
        """The compute lane waits; within a job its lane does. On the CPU this listens for restarts; a peer that is gone
        becomes a CommError."""
        if mark is None:
            return
        jobs = self.queues[mark.lane]
        while jobs and jobs[0].number <= mark.number:  # all that is before it, too: it may be done already
            job, finish = jobs[0], self._finish
            if profiler._is_profiler_enabled and job.hops:
                finish = ranged(finish, f"wait {job.lane} {job.hops[0].bucket}")
            if not job.done:
                finish(job)
            self._start(jobs)

    def passed(self, mark: Mark) -> bool:
        """Whether nobody would wait for it, now that the host has looked."""
        if mark is None:
            return True
        self.progress(mark.lane)
        jobs = self.queues[mark.lane]
        return not jobs or jobs[0].number > mark.number

    def signalling(self, axis: str) -> None:
        """Have what barriers along an axis need. Collective where there is none yet.

        Raises:
            SpecError: on every rank, if GPUs cannot have memory that the others reach.
        """

    def traced(self, lane: str) -> str:
        """The lane whose communicators a traced step uses for this lane's collectives."""
        return "traced"

    def keep(self, *tensors: torch.Tensor, lanes: tuple[str, ...] = ("reduce", "outer")) -> None:
        """These are given back while lanes may still use them. (A job of the host's holds what it uses.)"""

    def idle(self) -> bool:
        """Whether nothing is under way, and no memory knows the communicators: others may use them."""
        return all(job.ready() for jobs in self.queues.values() for job in jobs)

    def synchronize(self) -> None:
        """The host waits until the device has done all that it was given."""

    # ---- waiting

    def _finish(self, job: Job) -> None:
        """Wait for a job. Only that a work has not ended means "not yet": what its own code raises goes on its way."""
        run, begun, patience = self.run, self.run.medium.now(), FIRST
        job.awaited += 1
        try:
            while not job.done:
                error = job.pause(patience) if job.works and not job.calls else None
                if error is None:
                    self.advance(job)
                    continue
                patience = min(2 * patience, POLL)
                for lane in self.queues:  # a peer may wait for what a job on another lane issues next
                    self.progress(lane)
                run.listen(_said(job), begun, error, job.failed(), lambda: self._short(job))
                if not run.capturing and self._help(job):  # else its jobs have numbers that say nothing to peers
                    patience = FIRST
        finally:
            job.awaited -= 1

    # ---- peers that wait for this rank while it waits

    def _help(self, job: Job) -> bool:
        """Start what peers wait for who have to come first, for this rank to go on. Whether it could; else peers are
        told that it waits.

        Raises:
            ScheduleError: this rank and a peer wait for each other. CommError: the ranks' store is gone.
        """
        run, this = self.run, self._as_told(job)
        try:
            waiting = self._waiting()
            awaited = [peer for peer in waiting if self._lacking(peer, [this])]
            before = {peer.lane: peer for peer in self._late(this, awaited, waiting)}
            follows = job.lane in BESIDE and self._follows(before)
            if before and follows:
                return True
            if run.store.check([told := f"apart/{run.meetings}"]):
                run.void()
                raise ScheduleError(run.store.get(told).decode())
            for peer in self._late(this, awaited, [peer for peer in waiting if not peer.helps]):
                self._part(job, peer)
            run.store.set(f"waits/{run.meetings}/{this.rank}", json.dumps(this._replace(helps=follows)))
        except dist.DistError as why:
            raise run.fail(f"{_said(job)} failed: the ranks' store cannot be reached", why) from why
        return False

    def _as_told(self, job: Job) -> Waiting:
        """What this rank says while it waits for a job."""
        counts = {lane: log.count for lane, log in self.run.issued.items()}
        axes = [*{hop.axis for hop in job.hops}]
        return Waiting(dist.get_rank(), job.lane, job.ordinal, axes, job.hops[0].bucket, counts, False)

    def _follows(self, before: Mapping[str, Waiting]) -> bool:
        """Whether this rank has started some of what peers wait for who are before it, or would."""
        behind, self.behind = self.behind, None  # not while it does
        try:
            return behind is not None and (not before or behind(before))
        finally:
            self.behind = behind

    def _waiting(self) -> list[Waiting]:
        """What the other ranks say that wait."""
        run, found = self.run, []
        for rank in run.ranks:
            key = f"waits/{run.meetings}/{rank}"
            if rank != dist.get_rank() and run.store.check([key]):
                found.append(Waiting(*json.loads(run.store.get(key))))
        return found

    def _lacking(self, waits: Waiting, others: Iterable[Waiting]) -> list[Waiting]:
        """Of these ranks, those that have not issued what a rank waits for, and without which it does not come to its
        end. (Along several axes, too: a rank that is along one axis comes to the next only when those along the first
        have come.)"""
        late = [other for other in others if other.counts[waits.lane] < waits.ordinal]
        if not late or "" in waits.axes:
            return late
        along = self.run.along(frozenset(waits.axes), waits.rank) if waits.axes else ()
        return [other for other in late if other.rank in along]

    def _late(self, this: Waiting, awaited: list[Waiting], waiting: list[Waiting]) -> list[Waiting]:
        """Of the ranks that wait for this one, those without which its own wait does not end, perhaps by way of others
        that wait: the ranks that it lacks, those that these lack, and so on. None of them will ever go on by itself."""
        found: dict[int, Waiting] = {}
        todo = [this] if awaited else []
        while todo:
            reached = self._lacking(todo.pop(), [other for other in waiting if other.rank not in found])
            found.update({other.rank: other for other in reached})
            todo += reached
        return [peer for peer in awaited if peer.rank in found]

    def _part(self, job: Job, peer: Waiting) -> None:
        """Raise: this rank and the peer wait for each other, perhaps by way of others."""
        if job.lane == "control":
            return
        if peer.what == "metrics" and self.run.forms.form and self.run.forms.presumed:
            return  # it has asked this rank to compare them, which hears of it next
        hop = job.hops[0]
        raise self._apart(
            f"this rank waits for {hop.kind} of {hop.bucket!r} ({hop.lane} lane), which rank {peer.rank} has not "
            f"issued: that rank waits for this one at {peer.what!r}. {SAME}{self.run.of_several()}"
        )

    def _apart(self, said: str) -> ScheduleError:
        """The error for a step in which ranks will never meet. The others are told: at a vote by a ballot, else by the
        store."""
        self.run.ballot(Case.APART, 0, "apart")
        self.run.void()
        self.run.store.set(f"apart/{self.run.meetings}", f"rank {dist.get_rank()} says: {said}")
        return ScheduleError(said)

    def _short(self, job: Job) -> bool:
        """Whether a rank that has come to restart has not issued a job that this rank waits for. Else the job comes to
        its end, and a step that all have agreed on is taken."""
        run = self.run
        for rank in range(run.size):
            key = f"status/{run.meetings}/{rank}"
            if run.store.check([key]) and pickle.loads(run.store.get(key)).counts[job.lane] < job.ordinal:
                return True
        return False


def _said(job: Job) -> str:
    hop = job.hops[0]
    return f"{hop.kind} over the axis {hop.axis!r} ({hop.lane} lane, {hop.bucket}, {hop.numel} elements)"
