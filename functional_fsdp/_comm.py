"""Runtime: the communicators of one mesh, the log of what was issued on them, and how ranks that parted meet again.

Every lane has a communicator of its own on every axis, so that gathers and reductions are never ordered behind each
other, and so that a user's own collectives on the mesh are never paired with ours.

    lane      collectives
    gather    all-gather of weights
    reduce    reduce-scatter and all-reduce of gradients
    side      what is outside a step: exports, metrics, checks
    control   (gloo, all ranks of the mesh) the vote before `step` commits

Restart. A rank that abandons a step and goes back to the state before it must not pair its first collective with
whatever its peers are waiting in. So it announces a restart in the store; peers notice while they wait for a
collective; each publishes its log; whoever is behind issues the missing collectives with scratch buffers, until every
log is equal and every lane is drained; then all continue in a new epoch, on the same communicators. Ranks that had not
abandoned the step themselves get a `RestartError`. A peer that never answers is a `CommError` within the group's
timeout.
"""

from __future__ import annotations

import math
import pickle
import time
import uuid
import weakref
import zlib
from collections import deque
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._collectives import Collective, all_gather, all_reduce, reduce_scatter
from ._errors import CommError, RestartError, ScheduleError, SpecError

__all__ = ["Runtime", "any_failed", "runtime_of"]

LANES = ("gather", "reduce", "side")
POLL = timedelta(seconds=0.1)
REMEMBER = 1 << 14  # collectives: how far apart two ranks may be and still be drained


class Issued(NamedTuple):
    """One collective, as the log keeps it: enough to issue its twin on a rank that missed it."""

    lane: str
    axis: str
    kind: str
    numel: int  # elements of the larger side
    dtype: torch.dtype
    op: str
    what: str  # the bucket, for the digest


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
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.epoch = 0  # how often a restart dropped what was under way
        self.meetings = 0  # restarts, and meetings that found every rank at the same place
        self.count = 0
        self.tail: deque[Issued] = deque(maxlen=REMEMBER)
        self.digest = 0
        self.pending: list[Collective] = []
        self.failed = False  # a collective never came to an end: the communicators are of no more use
        self.lineages = 0
        self.ledgers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.groups: dict[tuple[str, str], dist.ProcessGroup] = {}
        if self.size == 1:
            return
        if mesh.get_coordinate() is None:
            raise SpecError(f"rank {dist.get_rank()} is not part of the mesh of ranks {mesh.mesh.flatten().tolist()}.")
        self.timeout = _timeout(mesh, self.device)
        for i, axis in enumerate(names):
            mine = mesh.mesh.movedim(i, -1).reshape(-1, mesh.shape[i])
            ranks = next(row.tolist() for row in mine if dist.get_rank() in row)
            if len(ranks) > 1:
                for lane in LANES:
                    self.groups[lane, axis] = self._group(ranks, f"{lane} {axis}")
        self.ranks: list[int] = sorted(mesh.mesh.flatten().tolist())
        self.rank = self.ranks.index(dist.get_rank())
        self.control = self._group(self.ranks, "control", backend="gloo")
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=self.ranks[0], group=self.control)
        self.store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"functional_fsdp/{name[0]}", dist.distributed_c10d._get_default_store()
        )

    def _group(self, ranks: list[int], what: str, backend: str | None = None) -> dist.ProcessGroup:
        return dist.new_group(
            ranks,
            timeout=self.timeout,
            backend=backend or ("nccl" if self.device.type == "cuda" else "gloo"),
            use_local_synchronization=True,
            group_desc=f"functional_fsdp {what}",
        )

    # ---- collectives: each is logged, issued, and waited for (on CUDA by the current stream, not by the host)

    def all_gather(
        self, out: torch.Tensor, mine: torch.Tensor, axis: str, lane: str = "gather", what: str = ""
    ) -> None:
        """`mine` [n] -> `out` [ranks · n]; in place where `mine` is the rank's own slice of `out`."""
        self._issue(Issued(lane, axis, "all_gather", out.numel(), out.dtype, "", what), out, mine)

    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, axis: str, op: str, lane: str = "reduce", what: str = ""
    ) -> None:
        """`full` [ranks · n] -> `out` [n], averaged ("mean") or summed ("sum") over the axis."""
        self._issue(Issued(lane, axis, "reduce_scatter", full.numel(), full.dtype, op, what), out, full)

    def all_reduce(self, tensor: torch.Tensor, axis: str, op: str, lane: str = "reduce", what: str = "") -> None:
        """`tensor` [n], in place, averaged ("mean"), summed ("sum") or the largest ("max") over the axis."""
        self._issue(Issued(lane, axis, "all_reduce", tensor.numel(), tensor.dtype, op, what), tensor, tensor)

    def _issue(self, entry: Issued, out: torch.Tensor, given: torch.Tensor) -> None:
        if self.sizes.get(entry.axis, self.size) == 1:
            if out.data_ptr() != given.data_ptr():
                out.copy_(given)
            return
        self._wait(self._start(entry, out, given), entry)

    def _start(self, entry: Issued, out: torch.Tensor, given: torch.Tensor) -> Collective:
        group = self.control if entry.lane == "control" else self.groups[entry.lane, entry.axis]
        if entry.kind == "all_gather":
            works = all_gather(out, given, group)
        elif entry.kind == "reduce_scatter":
            works = reduce_scatter(out, given, entry.op, group)
        else:
            works = all_reduce(out, entry.op, group, sliced=entry.lane == "reduce")
        collective = Collective(works)
        self.pending.append(collective)
        self.count += 1
        self.tail.append(entry)
        self.digest = zlib.crc32(f"{entry.kind} {entry.axis} {entry.what}".encode(), self.digest)
        return collective

    def _wait(self, collective: Collective, entry: Issued) -> None:
        """Until it is done. On the CPU this listens for restarts; a peer that is gone becomes a CommError."""
        if self.device.type == "cuda" and entry.lane != "control":
            collective.wait()  # the current stream waits, the host does not
            self.pending.remove(collective)
            return
        begun = time.monotonic()
        while True:
            try:
                collective.wait(POLL)
                self.pending.remove(collective)
                return
            except RuntimeError as error:
                spent, limit = time.monotonic() - begun, self.timeout.total_seconds()
                if collective.failed() or spent > limit:
                    self.failed = True
                    raise CommError(
                        f"{entry.kind} over the axis {entry.axis!r} ({entry.lane} lane, {entry.what}, {entry.numel} "
                        f"elements) failed after {spent:.1f} s of {limit:.0f} s: a rank died, hangs, or issued another "
                        f"collective. Restart the job from its last checkpoint. The backend says: {str(error)[:300]}"
                    ) from error
            if self.store.check([f"restart/{self.meetings}"]):
                self.restart(noticed=True)
                raise RestartError(
                    "another rank abandoned this step and restarted. Nothing is lost: go on from the state that the "
                    "step started from (it is still valid), on every rank."
                )

    # ---- agreement

    def vote(self) -> None:
        """Before `step` commits: every rank arrived here, having issued the same collectives. Host, twice 16 bytes.

        In the first round ranks wait for the slowest; whoever is interrupted there abandons the step, which its peers
        hear in the second. Nobody waits in the second for longer than a message takes.

        Raises:
            ScheduleError: ranks issued different collectives since the last step.
            RestartError, CommError: as for every collective.
        """
        if self.size == 1:
            return
        ballot = torch.tensor([self.digest, -self.digest])
        entry = Issued("control", "", "all_reduce", 2, torch.int64, "max", "vote")
        mine = self.digest
        self._wait(self._start(entry, ballot, ballot), entry)
        most, least = ballot[0].item(), -ballot[1].item()
        self._wait(self._start(entry, ballot, ballot), entry)
        self.digest = 0
        self.tail.clear()
        if most != least:
            raise ScheduleError(
                f"ranks issued different collectives in this step (this rank's digest is {mine}, the digests lie "
                f"between {least} and {most}), so their results were mixed up and the step was not taken. Call unshard "
                "and reduce for the same units, in the same order, on every rank. The state before the step is valid."
            )

    def restart(self, lineage: int = 0, noticed: bool = False) -> None:
        """Meet every rank of the mesh, drain what any of them had issued, and begin a new epoch. Collective.

        When every rank comes of its own accord, for the same lineage and from the same place (all look at the state
        before a step, say), nothing was abandoned by some ranks only, and the epoch goes on.

        Args:
            lineage: whose state before the step is used again (0: nobody's in particular).
            noticed: this rank comes because a peer announced a restart.

        Raises:
            CommError: a rank did not answer within the timeout, or is a step ahead or behind.
        """
        if self.size == 1:
            return
        epoch = self.meetings
        here = (self.count, self.digest, 0 if noticed else lineage)
        steps = {key: ledger.steps for key, ledger in self.ledgers.items()}
        self.store.set(f"restart/{epoch}", "1")
        self.store.set(f"status/{epoch}/{self.rank}", pickle.dumps((here, steps, list(self.tail))))  # type: ignore[arg-type]
        deadline = time.monotonic() + self.timeout.total_seconds()
        keys = [f"status/{epoch}/{r}" for r in range(self.size)]
        while missing := [r for r, key in enumerate(keys) if not self.store.check([key])]:
            if time.monotonic() > deadline:
                raise CommError(
                    f"restart: rank(s) {[self.ranks[r] for r in missing]} did not answer within "
                    f"{self.timeout.total_seconds():.0f} s. They died, hang, or never use the state again. "
                    f"Restart the job from its last checkpoint."
                )
            time.sleep(0.002)
        statuses = [pickle.loads(self.store.get(key)) for key in keys]
        for rank, (_, theirs, _) in enumerate(statuses):
            for key in steps.keys() & theirs.keys():
                if steps[key] != theirs[key]:
                    raise CommError(
                        f"restart: this rank's state is at step {steps[key]}, that of rank {self.ranks[rank]} at step "
                        f"{theirs[key]}. Restart the job from its last checkpoint."
                    )
        (furthest, _, _), _, log = max(statuses, key=lambda status: status[0][0])
        behind = furthest - self.count
        if furthest - min(status[0][0] for status in statuses) > len(log):
            raise CommError(
                f"restart: ranks are {behind} collectives apart, more than the {len(log)} that are remembered."
            )
        for collective in self.pending:  # one after the other, as every rank does
            collective.wait()
        for entry in log[len(log) - behind :] if behind else []:
            device = torch.device("cpu") if entry.lane == "control" else self.device
            whole = torch.zeros(entry.numel, dtype=entry.dtype, device=device)
            part = whole if entry.kind == "all_reduce" else whole.new_zeros(entry.numel // self.sizes[entry.axis])
            self._start(entry, *((part, whole) if entry.kind == "reduce_scatter" else (whole, part))).wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.pending.clear()
        self.tail.clear()
        self.digest = 0
        self.meetings += 1
        if not (here[-1] and all(status[0] == here for status in statuses)):
            self.epoch += 1
        self.store.delete_key(f"status/{epoch - 1}/{self.rank}")


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
    """The timeout of the mesh's own groups, which ours inherit."""
    options = getattr(mesh.get_group(0)._get_backend(device), "options", None)
    found = getattr(options, "_timeout", None)
    return found if isinstance(found, timedelta) and math.isfinite(found.total_seconds()) else timedelta(minutes=10)
