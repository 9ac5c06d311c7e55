"""Jobs: how a rank submits jobs to lanes, and waits for marks. What all lanes of a mesh have in common.

On the CPU the host carries jobs on while it waits. It waits in short turns, and looks around in between: for works that
other lanes wait for, for a peer that restarts, and for one that waits for what this rank issues later. The last is how
ranks get past each other whose gradients come in another order:

    rank 0   gather 1   reduce 1   gather 2 ...   reduce 2: waits for the staging of reduction 1
    rank 1   gather 1   gather 2   gather 3: waits for rank 0          reduction 1 would come now

Rank 0 then leaves reduction 2 for later, and goes on to gather 3.
"""

from __future__ import annotations

import json
import pickle
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from ._agreement import APART, Agreement
from ._errors import ScheduleError
from ._interrupts import whole
from ._lanes import Job, Log, Mark, Queue, Steps, Streams
from ._record import Collective
from ._restart import POLL, QUEUES, twin

__all__ = ["Jobs", "Waiting"]

AHEAD = {"gather", "side", "control"}  # lanes on which peers may have to be ahead of this rank's reductions
BESIDE = {"side", "control"}  # lanes of what no plan names
FIRST = timedelta(seconds=0.005)  # one turn of waiting, which then double up to POLL
SAME = (
    "Use the same units in the same order on every rank; only units of the schedule may be left out, and only where "
    "the schedule has them. If ranks leave units out before the order of use is known, give it: Schedule(order=[...]). "
    "The state before the step is valid."
)


class Waiting(NamedTuple):
    """What a rank says that waits: for which job of a lane, along which axes, for what, how many jobs it has issued on
    each lane, and whether it goes on by itself if others need it, or starts what they need."""

    rank: int
    ordinal: int
    axes: list[str]
    what: str
    counts: dict[str, int]
    relents: bool


class Jobs(Agreement):
    """The half of a Runtime that jobs go through."""

    streams: Streams | None
    queues: dict[str, Queue]
    rows: dict[str, list[int]]
    seats: dict[str, list[int]]
    issues: int
    skips: int
    behind: Callable[[Mapping[str, Waiting]], bool] | None  # starts what peers wait for, where this rank waits for them

    def submit(
        self,
        lane: str,
        hops: tuple[Collective, ...],
        job: Steps,
        after: Mark = None,
        single: bool = False,
        ordered: bool = False,
        mark: Mark = None,
    ) -> Mark:
        """Log a job and start it on its lane once the mark `after` has passed. Returns the mark at its end.

        Args:
            hops: the collectives that it will issue, for the log.
            single: its collectives all start at once (on the CPU the next job then need not wait for its end).
            mark: an old one that may be used again.
            ordered: it begins with what the job before it ends with (on the CPU it starts after that one's end).
        """
        queue = self.queues[lane]
        if queue.jobs and (ordered or not queue.jobs[-1].single):
            self.wait(queue.jobs[-1], relents=True)
        log = self.logs[lane] if self.size > 1 else None
        if self.streams is not None and lane != "control":
            return self._run(lane, hops, job, after, mark, log)
        new = Job(job, lane, hops, single, ordered)
        if self.board is not None and log is not None and hops and lane != "control":
            self._add(queue, new, log)
        else:
            queue.add(new, log)
        return new

    @whole
    def _add(self, queue: Queue, job: Job, log: Log) -> None:
        """Log a job and start it, unless another rank has issued something else in its place.

        Raises:
            ScheduleError: it has. This rank issues nothing, and the state before the step is valid.
        """
        hop = job.hops[0]
        assert self.board is not None
        other = self.board.differs(QUEUES.index(job.lane), log.count + 1, _code(job.hops), self.seats[hop.axis])
        if other is not None:
            raise self._apart(
                f"this rank is about to issue {hop.kind} of {hop.bucket!r} ({job.lane} lane, {hop.numel} elements), "
                f"where rank {self.ranks[other]} issues something else. {SAME}"
            )
        queue.add(job, log)

    @whole
    def _run(
        self, lane: str, hops: tuple[Collective, ...], job: Steps, after: Mark, mark: Mark, log: Log | None
    ) -> Mark:  # what is logged is issued, even if an interrupt comes
        """All of a job, on a stream. If its own code raises, what it did not issue is issued for those who wait."""
        assert self.streams is not None
        if log is not None and hops:
            log.append(hops)
        self.issues = 0
        try:
            return self.streams.run(lane, job, after, mark)
        except BaseException:
            if not self.capturing:
                self._void()
                self.skips = self.issues
                try:
                    self.streams.run(lane, twin(self, hops), None, None)
                except BaseException as error:
                    self.lose(f"What peers wait for on the {lane} lane could not be issued: {error}.")
                    raise
                finally:
                    self.skips = 0
            raise

    def _forsake(self, job: Job) -> None:
        """A job's own code has raised, on the CPU. What it did not issue is issued for those who wait."""
        job.forsake(twin(self, job.hops))
        self._void()

    def _void(self) -> None:
        """Whatever is under way on this mesh is of no use: ranks meet before anything else."""
        if self.size > 1:
            self.parted = True
            self.epoch += 1

    def _issue(self, job: Job) -> None:
        try:
            job.issue()
        except RuntimeError as error:
            raise self.fail(f"{_said(job)} could not be issued", error) from error

    def mark(self, mark: Mark = None) -> Mark:
        """A point on the compute lane; None on the CPU, where it is the host's present. May use an old one again."""
        if self.streams is None:
            return None
        event = mark or torch.cuda.Event()
        event.record(self.streams.current())
        return event

    def wait(self, mark: Mark, relents: bool = False) -> bool:
        """The compute lane waits. On the CPU this listens for restarts; a peer that is gone becomes a CommError.

        Args:
            relents: it stops waiting (False) if a peer waits for something that this rank issues later, perhaps before
                it comes to what is waited for here.
        """
        if mark is None:
            return True
        if not isinstance(mark, Job):
            assert self.streams is not None
            self.streams.current().wait_event(mark)
            return True
        queue = self.queues[mark.lane]
        jobs = queue.jobs
        while jobs and jobs[0].number <= mark.number:  # all that is before it, too: it may be done already
            job = jobs[0]
            if not job.done and not self._finish(queue, job, relents):
                return False
            queue.start()
        return True

    def passed(self, mark: Mark) -> bool:
        """Whether nobody would wait for it."""
        if mark is None:
            return True
        return self.queues[mark.lane].over(mark) if isinstance(mark, Job) else bool(mark.query())

    def _finish(self, queue: Queue, job: Job, relents: bool) -> bool:
        """Wait for a job. Only that a work has not ended means "not yet": what its own code raises goes on its way."""
        begun, patience = time.monotonic(), FIRST
        while not job.done:
            error = job.pause(patience) if job.works and not job.calls else None
            if error is None:
                queue.advance(job)
                continue
            patience = min(2 * patience, POLL)
            for other in self.queues.values():  # a peer may wait for what a job on another lane issues next
                other.progress()
            self.listen(_said(job), begun, error, job.failed(), lambda: self._short(job))
            if self.capturing:
                continue  # its jobs have numbers of their own, which say nothing to peers
            try:
                awaited = self._awaited()
                if relents and not AHEAD.isdisjoint(awaited):
                    return False
                before = {lane: peer for lane, peer in awaited.items() if self._before(job, peer)}
                follows = job.lane in BESIDE and self._follows(before)
                if before and follows:
                    patience = FIRST
                    continue
                if self.store.check([told := f"apart/{self.meetings}"]):
                    self._void()
                    raise ScheduleError(self.store.get(told).decode())
                for peer in awaited.values():
                    self._part(job, peer)
                counts = {name: log.count for name, log in self.issued.items()}
                axes = [*{hop.axis for hop in job.hops}]
                said = Waiting(dist.get_rank(), job.ordinal, axes, job.hops[0].bucket, counts, relents or follows)
                self.store.set(f"waits/{self.meetings}/{job.lane}", json.dumps(said))
            except dist.DistError as why:
                raise self.fail(f"{_said(job)} failed: the ranks' store cannot be reached", why) from why
        return True

    def _before(self, job: Job, peer: Waiting) -> bool:
        """Whether a peer that waits for this rank has not come to the job that this rank waits for: neither will ever
        come. (Who has issued it is past it, and this rank will be, too.)"""
        return job.ordinal > peer.counts[job.lane] and self._beside(peer.rank, [hop.axis for hop in job.hops])

    def _follows(self, before: Mapping[str, Waiting]) -> bool:
        """Whether this rank has started some of what peers wait for who are before it, or would."""
        behind, self.behind = self.behind, None  # not while it does
        try:
            return behind is not None and (not before or behind(before))
        finally:
            self.behind = behind

    def _awaited(self) -> dict[str, Waiting]:
        """By lane, a peer that waits for what this rank has yet to issue."""
        found = {}
        for lane in QUEUES:
            key = f"waits/{self.meetings}/{lane}"
            if self.store.check([key]):
                said = Waiting(*json.loads(self.store.get(key)))
                if said.ordinal > self.issued[lane].count and self._beside(said.rank, said.axes):
                    found[lane] = said
        return found

    def _beside(self, rank: int, axes: Iterable[str]) -> bool:
        """Whether a rank has collectives along one of these axes ("": along all) with this one."""
        return any(not axis or rank in self.rows[axis] for axis in axes)

    def _part(self, job: Job, peer: Waiting) -> None:
        """Raise if this rank and the peer wait for each other."""
        if peer.relents or job.lane == "control" or not self._before(job, peer):
            return
        if peer.what == "metrics" and self.form and self.presumed:
            return  # it has asked this rank to compare them, which hears of it next
        hop = job.hops[0]
        raise self._apart(
            f"this rank waits for {hop.kind} of {hop.bucket!r} ({hop.lane} lane), which rank {peer.rank} has not "
            f"issued: that rank waits for this one at {peer.what!r}. {SAME}"
        )

    def _apart(self, said: str) -> ScheduleError:
        """The error for a step in which ranks will never meet. The others are told: at a vote by a ballot, else by the
        store."""
        self._ballot(APART, "apart")
        self._void()
        self.store.set(f"apart/{self.meetings}", f"rank {dist.get_rank()} says: {said}")
        return ScheduleError(said)

    def _short(self, job: Job) -> bool:
        """Whether a rank that has come to restart has not issued a job that this rank waits for. Else the job comes to
        its end, and a step that all have agreed on is taken."""
        for rank in range(self.size):
            key = f"status/{self.meetings}/{rank}"
            if self.store.check([key]) and pickle.loads(self.store.get(key)).counts[job.lane] < job.ordinal:
                return True
        return False


@lru_cache(maxsize=1 << 12)
def _code(hops: tuple[Collective, ...]) -> int:
    """A checksum of what a job issues."""
    return zlib.crc32(repr(hops).encode())


def _said(job: Job) -> str:
    hop = job.hops[0]
    return f"{hop.kind} over the axis {hop.axis!r} ({hop.lane} lane, {hop.bucket}, {hop.numel} elements)"
