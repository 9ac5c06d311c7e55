"""Lanes on GPUs: CUDA streams beside the compute lane, which is whatever stream is current. The control lane stays on
the host.

`torch.cuda.stream` and `torch.cuda.current_stream` take longer than the rest of a verb; here only ids are asked for.

Lanes of the host: how a rank submits jobs to queues on the CPU, and waits for them.

The host carries jobs on while it waits, and as far as they go without that when it submits the next one. It waits in
short turns, and looks around in between: for works that other lanes wait for, for a peer that restarts, and for one
that waits for what this rank issues later.
"""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from .._common.calls import provided
from .._common.errors import ScheduleError
from .._common.interrupts import uninterruptible
from .._common.ranges import ranged
from .._common.record import Collective
from .._common.torch_names import all_gather_single, current_stream, profiler, reduce_scatter_single, set_stream
from .._distributed.ballots import Case
from .._distributed.lanes import LANES, OPS, QUEUES, Job, Log, Mark, Queue, Steps, Waiting, gloo
from .agreement import Agreement
from .restart import POLL, twin

BESIDE = {"side", "control", "reduce"}  # lanes on which it is waited for in the middle of what no plan names
FIRST = timedelta(seconds=0.005)  # one turn of waiting, which then double up to POLL
SAME = (
    "Use the same units in the same order on every rank; only units of the schedule may be left out, and only where "
    "the schedule has them. If ranks leave units out before the order of use is known, give it: Schedule(order=[...]). "
    "The state before the step is valid."
)


class HostLanes:
    """The lanes of one mesh on this rank, beside the compute lane: queues of jobs, which the host carries on while it
    waits. What the host has no use for does nothing here.

    Args:
        run: the ranks of the mesh, as they agree.

    Attributes:
        backend: of the communicators.
        waits_on_host: whether it is the host that waits. Then it hears of its peers meanwhile, what has been released
            is free, and waiting may fail. Else streams wait for each other, and what the host frees may be in use.
        copies_on_lanes: whether gradients are copied into staging by the lane, beside compute: until then they stay.
        collective: one collective of a lane, as a part of a job; see `Runtime.collective`.
        queues: jobs of the host, by lane. (On GPUs those of "control" only.)
        behind: starts what peers wait for, where this rank waits for them.
    """

    backend = "gloo"
    waits_on_host = True
    copies_on_lanes = False
    collective = staticmethod(gloo)

    def __init__(self, run: Agreement) -> None:
        self.run = run
        self.queues = {name: Queue(self._forsake, self._issue) for name in QUEUES}
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
        """
        queue = self.queues[lane]
        if queue.jobs and (ordered or not queue.jobs[-1].single):
            queue.progress()
        log = self.run.logs[lane] if self.run.size > 1 else None
        new = Job(job, lane, hops, single, ordered)
        if self.run.host_vote is not None and log is not None and hops and lane != "control":
            self._add(queue, new, log)
        else:
            queue.add(new, log)
        return new

    @uninterruptible
    def _add(self, queue: Queue, job: Job, log: Log) -> None:
        """Log a job and start it, unless another rank has issued something else in its place.

        Raises:
            ScheduleError: it has. This rank issues nothing, and the state before the step is valid.
        """
        hop, run = job.hops[0], self.run
        assert run.host_vote is not None
        issued = run.issued[job.lane]
        number = 1 + issued.count + (log.count if log is not issued else 0)  # a captured job has that of its eager twin
        other = run.host_vote.differs(QUEUES.index(job.lane), number, _code(job.hops))
        if other is not None:
            raise self._apart(
                f"this rank is about to issue {hop.kind} of {hop.bucket!r} ({job.lane} lane, {hop.numel} elements), "
                f"where rank {run.ranks[other]} issues something else. {SAME}{run.of_several()}"
            )
        queue.add(job, log)

    def _forsake(self, job: Job) -> None:
        """A job's own code has raised. What it did not issue is issued for those who wait."""
        job.forsake(twin(self.run, job.hops))
        self.run.void()

    def _issue(self, job: Job) -> None:
        try:
            job.issue()
        except RuntimeError as error:
            raise self.run.fail(f"{_said(job)} could not be issued", error) from error

    def enqueue(self, lane: str, job: Steps, after: Mark = None, mark: Mark = None) -> Mark:
        """Start a job without collectives on the lane "update", "fetch" or "store", where it goes beside compute.
        Unlogged. On the CPU it is done at once. `after` and `mark`: as of `submit`."""
        for _ in job:
            pass

    def join(self, lane: str) -> None:
        """Compute waits for all that a lane has been given."""

    def mark(self, mark: Mark = None) -> Mark:
        """A point on the compute lane, within a job on the job's lane; None on the CPU, where it is the host's present.
        May use an old one again."""

    def wait(self, mark: Mark) -> None:
        """The compute lane waits; within a job its lane does. On the CPU this listens for restarts; a peer that is gone
        becomes a CommError."""
        if mark is None:
            return
        queue = self.queues[mark.lane]
        jobs = queue.jobs
        while jobs and jobs[0].number <= mark.number:  # all that is before it, too: it may be done already
            job, finish = jobs[0], self._finish
            if profiler._is_profiler_enabled and job.hops:
                finish = ranged(finish, f"wait {job.lane} {job.hops[0].bucket}")
            if not job.done:
                finish(queue, job)
            queue.start()

    def passed(self, mark: Mark) -> bool:
        """Whether nobody would wait for it, now that the host has looked."""
        return mark is None or self.queues[mark.lane].over(mark)

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

    def let_go(self, marks: list[Mark]) -> None:
        """A lineage is gone, and with it what its jobs hold, up to these marks."""
        for queue in self.queues.values():  # jobs hold what they write: let go of those that are done
            queue.reap()

    def idle(self) -> bool:
        """Whether nothing is under way, and no memory knows the communicators: others may use them."""
        return all(job.ready() for queue in self.queues.values() for job in queue.jobs)

    def synchronize(self) -> None:
        """The host waits until the device has done all that it was given."""

    # ---- waiting

    def _finish(self, queue: Queue, job: Job) -> None:
        """Wait for a job. Only that a work has not ended means "not yet": what its own code raises goes on its way."""
        run, begun, patience = self.run, self.run.medium.now(), FIRST
        job.awaited += 1
        try:
            while not job.done:
                error = job.pause(patience) if job.works and not job.calls else None
                if error is None:
                    queue.advance(job)
                    continue
                patience = min(2 * patience, POLL)
                for other in self.queues.values():  # a peer may wait for what a job on another lane issues next
                    other.progress()
                run.listen(_said(job), begun, error, job.failed(), lambda: self._short(job))
                if run.capturing:
                    continue  # its jobs have numbers of their own, which say nothing to peers
                try:
                    counts = {name: log.count for name, log in run.issued.items()}
                    axes = [*{hop.axis for hop in job.hops}]
                    this = Waiting(dist.get_rank(), job.lane, job.ordinal, axes, job.hops[0].bucket, counts, False)
                    waiting = self._waiting()
                    awaited = [peer for peer in waiting if self._lacking(peer, [this])]
                    before = {peer.lane: peer for peer in self._late(this, awaited, waiting)}
                    follows = job.lane in BESIDE and self._follows(before)
                    if before and follows:
                        patience = FIRST
                        continue
                    if run.store.check([told := f"apart/{run.meetings}"]):
                        run.void()
                        raise ScheduleError(run.store.get(told).decode())
                    for peer in self._late(this, awaited, [peer for peer in waiting if not peer.helps]):
                        self._part(job, peer)
                    said = this._replace(helps=follows)
                    run.store.set(f"waits/{run.meetings}/{said.rank}", json.dumps(said))
                except dist.DistError as why:
                    raise run.fail(f"{_said(job)} failed: the ranks' store cannot be reached", why) from why
        finally:
            job.awaited -= 1

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


@lru_cache(maxsize=1 << 12)
def _code(hops: tuple[Collective, ...]) -> int:
    """A checksum of what a job issues."""
    return zlib.crc32(repr(hops).encode())


def _said(job: Job) -> str:
    hop = job.hops[0]
    return f"{hop.kind} over the axis {hop.axis!r} ({hop.lane} lane, {hop.bucket}, {hop.numel} elements)"


_signals = provided("transports.Signals")
STREAMS = ("gather", "reduce", "outer", "update", "fetch", "store")


class StreamLanes(HostLanes):
    """A stream for each lane. The host issues all of a job at once, and waits for nothing."""

    backend = "nccl"
    waits_on_host = False
    copies_on_lanes = True

    def __init__(self, run: Agreement) -> None:
        super().__init__(run)
        self.device = run.device
        self.lanes = {name: torch.cuda.Stream(self.device, priority=-1) for name in STREAMS}
        self.known = torch.cuda.current_stream(self.device)
        self.used: set[str] = set()  # lanes that were given something since the last graph
        self.unjoined: set[str] = set()  # lanes that have yet to wait for it
        self.graph = torch.cuda.Event()  # its end
        self.issues = self.skips = 0  # collectives that the job has issued, and that its twin leaves out
        self.signals: dict[str, Any] = {}  # by axis: barriers

    # ---- streams

    def current(self) -> torch.cuda.Stream:
        found = current_stream(self.device.index)
        if found[0] != self.known.stream_id:
            self.known = torch.cuda.Stream(stream_id=found[0], device_index=found[1], device_type=found[2])
        return self.known

    def set(self, stream: torch.cuda.Stream) -> None:
        self.known = stream
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
            self.unjoined.update(self.lanes)

    def lane(self, name: str) -> torch.cuda.Stream:
        """A lane, to be given something."""
        self.used.add(name)
        stream = self.lanes[name]
        if name in self.unjoined:
            self.unjoined.discard(name)
            stream.wait_event(self.graph)
        return stream

    def catch_up(self) -> None:
        """Have all lanes wait for the last graph now: while another is captured they cannot."""
        for name in list(self.unjoined):
            self.lane(name)

    def join(self, lane: str) -> None:
        self.current().wait_stream(self.lanes[lane])

    def keep(self, *tensors: torch.Tensor, lanes: tuple[str, ...] = ("reduce", "outer")) -> None:
        for tensor in tensors:
            for lane in lanes:
                tensor.record_stream(self.lanes[lane])

    def let_go(self, marks: list[Mark]) -> None:
        for mark in marks:  # what is freed now may still be in use
            if mark is not None and torch.cuda.is_initialized():
                self.wait(mark)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    # ---- marks

    def mark(self, mark: Mark = None) -> Mark:
        event = mark or torch.cuda.Event()
        event.record(self.current())
        return event

    def wait(self, mark: Mark) -> None:
        if isinstance(mark, Job):
            super().wait(mark)
        elif mark is not None:
            self.current().wait_event(mark)

    def passed(self, mark: Mark) -> bool:
        return super().passed(mark) if mark is None or isinstance(mark, Job) else bool(mark.query())

    # ---- jobs

    def submit(
        self, lane: str, hops: tuple[Collective, ...], job: Steps, after: Mark = None, single: bool = False,
        ordered: bool = False, mark: Mark = None,
    ) -> Mark:  # fmt: skip
        if lane == "control":
            return super().submit(lane, hops, job, after, single, ordered, mark)
        return self._submit(lane, hops, job, after, mark)

    @uninterruptible
    def _submit(self, lane: str, hops: tuple[Collective, ...], job: Steps, after: Mark, mark: Mark) -> Mark:
        """What is logged is issued, even if an interrupt comes. If the job's own code raises, what it did not issue is
        issued for those who wait."""
        run = self.run
        if hops and run.size > 1:
            run.logs[lane].append(hops)
        self.issues = 0
        try:
            return self.enqueue(lane, job, after, mark)
        except BaseException:
            if not run.capturing:
                run.void()
                self.skips = self.issues
                try:
                    self.enqueue(lane, twin(run, hops))
                except BaseException as error:
                    run.lose(f"What peers wait for on the {lane} lane could not be issued: {error}.")
                    raise
                finally:
                    self.skips = 0
            raise

    def enqueue(self, lane: str, job: Steps, after: Mark = None, mark: Mark = None) -> Mark:
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

    # ---- collectives

    def collective(self, hop: Collective, out: Any, given: Any, group: Any) -> Steps:
        """One kernel of NCCL's, on the current stream; barriers by signals of the lane's own. Nothing is yielded."""
        if self.skips:
            self.skips -= 1
            return
        if hop.kind == "barrier":
            self.signals[hop.axis].barrier(LANES.index(hop.lane))
        elif hop.kind == "all_gather":
            if not out.is_floating_point() or out.itemsize == 1:  # integers, booleans and float8 travel as bytes
                out, given = out.view(torch.uint8), given.view(torch.uint8)
            all_gather_single(out, given, group=group)
        elif hop.kind == "reduce_scatter":
            reduce_scatter_single(out, given, op=OPS[hop.op], group=group)
        elif hop.kind == "all_to_all":
            came, sent = map(list, hop.splits or ((), ()))
            dist.all_to_all_single(out, given, came, sent, group=group)
        else:
            dist.all_reduce(out, op=OPS[hop.op], group=group)
        self.issues += 1  # not if it raised: peers wait for it
        yield from ()

    def signalling(self, axis: str) -> None:
        if axis not in self.signals:
            self.signals[axis] = _signals(self.run, axis, len(LANES))

    def traced(self, lane: str) -> str:
        return lane

    def idle(self) -> bool:
        return super().idle() and not self.signals


def lanes_of(run: Agreement) -> HostLanes:
    """The lanes of a mesh: its medium's own; else streams where it has GPUs, else the host's."""
    if run.medium.lanes is not None:
        found: HostLanes = run.medium.lanes(run)
        return found
    return StreamLanes(run) if run.device.type == "cuda" else HostLanes(run)
