"""Runtime: the lanes and communicators of one mesh, the log of what was issued, and how ranks that parted meet again.

Every lane with collectives has a communicator of its own on every axis, so that gathers and reductions are never
ordered behind each other, and so that a user's own collectives on the mesh are never paired with ours.

    lane      collectives
    gather    all-gather of weights; or barriers, where ranks read each other's memory
    reduce    reduce-scatter and all-reduce of gradients; or barriers
    outer     what follows on a second axis of the mesh
    update    none: an optimizer, beside the backward
    side      what no plan names: whole trees, exports, metrics; on the compute lane's stream
    control   (all ranks of the mesh; the host) the vote before `step` commits; uses outside the plan
"""

from __future__ import annotations

import math
import time
import uuid
import weakref
import zlib
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._board import Board
from ._collectives import all_gather, all_reduce, all_to_all, barrier, reduce_scatter
from ._errors import CommError, RestartError, ScheduleError, SpecError
from ._given import FULL
from ._groups import level, new_group, one_thread
from ._lanes import Issued, Job, Log, Mark, Queue, Steps, Streams
from ._restart import QUEUES, restart
from ._signals import Signals

T = TypeVar("T")

__all__ = ["Runtime", "any_failed", "runtime_of"]

LANES = ("gather", "reduce", "outer", "side")  # with communicators on every axis
POLL = timedelta(seconds=0.1)
GIVEN = 2  # bits of a vote's number; the other 32 are its digest
ALIKE = 1 << 38  # no vote's number, which has 34 bits
OUTSIDE = 1 << 40  # ballots from here on name a unit that is used outside the plan


class Vote(NamedTuple):
    """A vote under way: this rank's value, the largest of (value, -value) in the end, and the job."""

    mine: int
    ballot: Any  # [value, -value]: numbers for the board, a tensor for gloo
    job: Mark


class Runtime:
    """What all states on one mesh share. Made once per mesh and process, by `runtime_of`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        names = mesh.mesh_dim_names or ()
        self.mesh = mesh
        self.sizes = dict(zip(names, mesh.shape, strict=True))
        self.coordinate = {axis: mesh.get_local_rank(axis) for axis in names}
        self.position = tuple(self.coordinate.items())
        self.size = mesh.size()
        self.device = torch.device(mesh.device_type)
        self.cuda = self.device.type == "cuda"
        if self.cuda:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.epoch = 0  # how often a restart dropped what was under way
        self.meetings = 0  # restarts, and meetings that found every rank at the same place
        self.issued = {name: Log() for name in QUEUES}
        self.logs = self.issued  # where jobs are logged: elsewhere while they are only captured
        self.capturing = False
        self.board: Board | None = None  # for votes, where all ranks are on one host
        self.votes = 0  # that ended with all ranks agreed
        self.voted = (0, 0)  # in the last vote: the digest given, and how many side jobs were logged before it
        self.chosen: dict[tuple[bool, tuple[str, ...]], Any] = {}  # "auto", for large models or not, and by axes
        self.spare: dict[tuple[str, str], dict[int, torch.Tensor]] = {}  # windows that no lineage uses, by number
        self.windows = 0  # how many were made
        self.generators: dict[int, torch.Generator] = {}  # on GPUs, by microbatch
        self.digest = 0  # of the side lane, since the last vote
        self.rows: dict[tuple[str, bytes], list[bytes]] = {}  # of traced steps, which leaves ranks had gradients for
        self.queues = {name: Queue() for name in QUEUES}
        self.streams = Streams(self.device, ("gather", "reduce", "outer", "update")) if self.cuda else None
        self.failed = False  # a collective never came to an end: the communicators are of no more use
        self.lineages = 0
        self.ledgers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.groups: dict[tuple[str, str], dist.ProcessGroup] = {}
        self.signals: dict[str, Signals] = {}  # by axis: barriers on GPUs
        self.ranks: list[int] = sorted(mesh.mesh.flatten().tolist())
        self.rank = 0  # which of them this one is
        if self.size == 1:
            return
        if mesh.get_coordinate() is None:
            raise SpecError(f"rank {dist.get_rank()} is not part of the mesh of ranks {mesh.mesh.flatten().tolist()}.")
        self.timeout = _timeout(mesh, self.device)
        level(self.ranks, self.timeout)
        backend = "nccl" if self.cuda else "gloo"
        for i, axis in enumerate(names):
            mine = mesh.mesh.movedim(i, -1).reshape(-1, mesh.shape[i])
            ranks = next(row.tolist() for row in mine if dist.get_rank() in row)
            if len(ranks) > 1:
                for lane in LANES:
                    self.groups[lane, axis] = new_group(ranks, f"{lane} {axis}", self.timeout, backend)
        self.rank = self.ranks.index(dist.get_rank())
        self.control = new_group(self.ranks, "control", self.timeout, "gloo")
        self.board = Board.of(self)
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=self.ranks[0], group=self.control)
        self.store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"functional_fsdp/{name[0]}", dist.distributed_c10d._get_default_store()
        )

    def group(self, lane: str, axis: str) -> dist.ProcessGroup:
        """The communicator of a lane on an axis. "zero_cta" and "traced" (for all traced lanes of CPUs) have one when
        it is first asked for, which is collective."""
        if (lane, axis) not in self.groups and lane in ("zero_cta", "traced"):
            backend, options = one_thread() if lane == "traced" else "nccl", None
            if lane == "zero_cta":
                options = dist.ProcessGroupNCCL.Options()
                options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]
            ranks = dist.get_process_group_ranks(self.groups["gather", axis])
            level(ranks, self.timeout)
            self.groups[lane, axis] = new_group(ranks, f"{lane} {axis}", self.timeout, backend, options)
        return self.groups[lane, axis]

    # ---- jobs

    def collective(self, hop: Issued, out: Any, given: Any) -> Steps:
        """One collective, as a part of a job. `given` may be the rank's own slice of `out`, or the same
        tensor. (A ballot of the board is a list.)"""
        if self.sizes.get(hop.axis, self.size) == 1:
            if out.data_ptr() != given.data_ptr():
                out.copy_(given)
            return iter(())
        if hop.lane == "control" and self.board is not None and hop.dtype is torch.int64:
            return self.board.largest(out)
        group = self.control if hop.lane == "control" else self.groups[hop.lane, hop.axis]
        if hop.kind == "barrier":
            return barrier(group) if not self.cuda else self._barrier(hop)
        if hop.kind == "all_gather":
            return all_gather(out, given, group)
        if hop.kind == "reduce_scatter":
            return reduce_scatter(out, given, hop.op, group)
        if hop.kind == "all_to_all":
            return all_to_all(out, given, group)
        return all_reduce(out, hop.op, group, sliced=hop.lane != "control" and bool(hop.what))

    def _barrier(self, hop: Issued) -> Steps:
        """On the current stream, with signals of the lane's own."""
        self.signals[hop.axis].barrier(LANES.index(hop.lane))
        return iter(())

    def signalling(self, axis: str) -> None:
        """Have signals along an axis, on GPUs. Collective where there are none yet.

        Raises:
            SpecError: on every rank, if GPUs cannot have memory that the others reach.
        """
        if self.cuda and axis not in self.signals:
            self.signals[axis] = Signals(self, axis, len(LANES))

    def submit(
        self,
        lane: str,
        hops: tuple[Issued, ...],
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
            ordered: it begins with what the job before it ends with (on the CPU it waits for that one's end).
        """
        jobs = self.queues[lane].jobs
        if jobs and (ordered or not jobs[-1].single):
            self.wait(jobs[-1])
        if self.size > 1 and hops:
            self.logs[lane].append(hops)
        if self.streams is not None and lane != "control":
            return self.streams.run(lane, job, after, mark)
        jobs.append(Job(job, lane, hops, single))
        return jobs[-1]

    def now(self, hop: Issued, out: torch.Tensor, given: torch.Tensor) -> None:
        """One collective on the side lane; the compute lane waits for it."""
        self.note(hop)
        self.wait(self.submit("side", (hop,), self.collective(hop, out, given)))

    def note(self, hop: Issued) -> None:
        """Have the next vote compare this collective of the side lane."""
        self.digest = zlib.crc32(f"{hop.kind} {hop.axis} {hop.what}".encode(), self.digest)

    def mark(self, mark: Mark = None) -> Mark:
        """A point on the compute lane; None on the CPU, where it is the host's present. May use an old one again."""
        if self.streams is None:
            return None
        event = mark or torch.cuda.Event()
        event.record(self.streams.current())
        return event

    def wait(self, mark: Mark) -> None:
        """The compute lane waits. On the CPU this listens for restarts; a peer that is gone becomes a CommError."""
        if mark is None:
            return
        if not isinstance(mark, Job):
            assert self.streams is not None
            self.streams.current().wait_event(mark)
            return
        jobs = self.queues[mark.lane].jobs
        while not mark.done and jobs:
            self._finish(jobs[0])
            jobs.popleft()
        while jobs and jobs[0].done:
            jobs.popleft()

    def _finish(self, job: Job) -> None:
        begun = time.monotonic()
        while not job.done:
            try:
                job.wait(POLL)
            except RuntimeError as error:
                self._progress()
                spent, limit = time.monotonic() - begun, self.timeout.total_seconds()
                if job.failed() or spent > limit:
                    self.failed = True
                    hop = job.hops[0]
                    raise CommError(
                        f"{hop.kind} over the axis {hop.axis!r} ({hop.lane} lane, {hop.what}, {hop.numel} "
                        f"elements) failed after {spent:.1f} s of {limit:.0f} s: a rank died, hangs, or issued another "
                        f"collective. Restart the job from its last checkpoint. The backend says: {str(error)[:300]}"
                    ) from error
                if self.store.check([f"restart/{self.meetings}"]):
                    if not self.capturing:  # else the next verb meets them: what is captured now must not be drained
                        self.restart(noticed=True)
                    raise RestartError(
                        "another rank abandoned this step and restarted. Nothing is lost: go on from the state that "
                        "the step started from (it is still valid), on every rank."
                    ) from None

    def _progress(self) -> None:
        """Meanwhile take the other lanes' jobs as far as they go: a peer may wait for what one of them issues next."""
        for queue in self.queues.values():
            for job in list(queue.jobs)[:1]:
                if not job.done and job.works and all(work.is_completed() for work in job.works) and not job.failed():
                    job.step()

    # ---- agreement

    def _ballot(self, value: int, what: str) -> Vote:
        """Start comparing every rank's `value`. Host, 16 bytes."""
        ballot: Any = [value, -value]
        if self.board is None:
            ballot = torch.tensor(ballot)
        hop = Issued("control", "", "all_reduce", 2, torch.int64, "max", what)
        return Vote(value, ballot, self.submit("control", (hop,), self.collective(hop, ballot, ballot)))

    def vote(self, digest: int, given: int = FULL) -> Vote | None:
        """Start the vote before `step` commits; the host may do something else before it waits in `compare`.

        Args:
            digest: of what this lineage issued since its last step.
            given: whether this rank has a gradient for every leaf; see `_given`.
        """
        if self.size == 1:
            return None
        self.voted = digest, self.logs["side"].count
        mine, self.digest = zlib.crc32(f"{digest} {self.digest}".encode()), 0
        return self._ballot(mine << GIVEN | given, "vote")

    def compare(self, vote: Vote | None) -> tuple[int, int]:
        """The first round: every rank arrived at `step`, having issued the same collectives. Returns the least and the
        most of what was `given`.

        In this round ranks wait for the slowest; whoever is interrupted there, or before `confirm`, abandons the step,
        which its peers hear in `confirm`.

        Raises:
            ScheduleError: ranks issued different collectives since the last step.
            RestartError, CommError: as for every collective.
        """
        if vote is None:
            return FULL, FULL
        most, least = self._count(vote)
        mine, lowest, highest = (number >> GIVEN for number in (vote.mine, least, most))
        if highest != lowest:
            raise ScheduleError(
                f"ranks issued different collectives in this step (this rank's digest is {mine}, the digests lie "
                f"between {lowest} and {highest}), so the step was not taken. Call unshard and reduce for the same "
                "units, in the same order, on every rank; only units of the schedule may be left out. The state "
                "before the step is valid."
            )
        return least & (1 << GIVEN) - 1, most & (1 << GIVEN) - 1

    def _count(self, vote: Vote) -> tuple[int, int]:
        """The largest and the smallest of every rank's value, once all have come."""
        self.wait(vote.job)
        return int(vote.ballot[0]), -int(vote.ballot[1])

    def confirm(self) -> None:
        """The second round: nobody waits here for longer than a message takes, and then all commit."""
        if self.size > 1:
            self._count(self._ballot(0, "confirm"))
        self.votes += 1

    def alike(self, what: str, number: int = 0) -> bool:
        """Whether every rank comes here, and not to a vote, with the same number. For what is rare. Host."""
        if self.size == 1:
            return True
        most, least = self._count(self._ballot(ALIKE + number, what))
        return most == least

    def most(self, what: str, number: int) -> int:
        """The largest of every rank's number. Host."""
        return number if self.size == 1 else self._count(self._ballot(ALIKE + number, what))[0] - ALIKE

    def agree(self, number: int, names: tuple[str, ...], verb: str) -> None:
        """Before a use outside the plan: every rank is about to `verb` the unit `names[number]`. Host, 16 bytes.

        Raises:
            ScheduleError: ranks came with different units, or are elsewhere.
        """
        if self.size == 1:
            return
        most, least = self._count(self._ballot(OUTSIDE + number, f"{verb} {names[number]}"))
        if most != least:
            both = [repr(names[n - OUTSIDE]) if n >= OUTSIDE else "step" for n in (least, most)]
            raise ScheduleError(
                f"{verb}({names[number]!r}) is not what the schedule expects here, so every rank must do the same, but "
                f"ranks came with {both[0]} and {both[1]}. Use the same units in the same order on every rank, or "
                "give the order: Schedule(order=...). The state before the step is valid."
            )

    def everyone(self, value: T) -> list[T]:
        """Every rank's value, by rank: a small object. Host; waits for all."""
        found = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(found, value, group=self.control)
        return found

    def complaint(self, text: str) -> str | None:
        """What the first rank that has something to say says; None if all are content (""). Host; waits for all."""
        return next((said for said in self.everyone(text) if said), None)

    def restart(self, lineage: int = 0, noticed: bool = False) -> None:
        """Meet every rank of the mesh; see `_restart`."""
        if self.size > 1:
            restart(self, lineage, noticed)


# Communicators belong to the process, as torch's own do: one Runtime for all equal meshes of one process group.
_RUNTIMES: dict[tuple[int, DeviceMesh], Runtime] = {}


def runtime_of(mesh: Any) -> Runtime:
    """The Runtime of a mesh. The first call for a mesh is collective: it makes the communicators.

    Raises:
        SpecError: for a mesh that is only a mapping of axis sizes: that plans, but cannot run.
    """
    if not isinstance(mesh, DeviceMesh):
        raise SpecError(
            f"the mesh {dict(mesh)} is a plan without ranks. To run, give Spec a DeviceMesh: fsdp.local_mesh(), or "
            f"torch's init_device_mesh(device, {tuple(dict(mesh).values())}, mesh_dim_names={tuple(dict(mesh))})."
        )
    key = (id(dist.group.WORLD), mesh)
    if key not in _RUNTIMES:
        _RUNTIMES[key] = Runtime(mesh)
    return _RUNTIMES[key]


def any_failed() -> bool:
    """Whether the communicators of any mesh of this process are of no more use."""
    return any(run.failed for run in _RUNTIMES.values())


def _timeout(mesh: DeviceMesh, device: torch.device) -> timedelta:
    """The timeout of the mesh's own groups, which ours inherit, or that of all ranks' group if it is shorter."""
    found = []
    for group in (mesh.get_group(0), dist.group.WORLD):
        limit = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None) if group else None
        if isinstance(limit, timedelta) and math.isfinite(limit.total_seconds()):
            found.append(limit)
    return min(found, default=timedelta(minutes=10))
