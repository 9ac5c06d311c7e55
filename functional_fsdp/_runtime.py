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
import weakref
import zlib
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._board import Board
from ._collectives import all_gather, all_reduce, all_to_all, barrier, reduce_scatter
from ._errors import SpecError
from ._groups import forget, level, new_group, one_thread
from ._jobs import Jobs
from ._lanes import Log, Queue, Steps, Streams
from ._record import Collective
from ._restart import QUEUES
from ._signals import Signals
from ._torch import default_store
from ._watch import Watch

__all__ = ["LANES", "Runtime", "any_failed", "runtime_of"]

Kind = tuple[str, tuple[int, ...], timedelta]  # of groups: the backend, the ranks, the timeout
LANES = ("gather", "reduce", "outer", "side")  # with communicators on every axis


class Runtime(Jobs):
    """What all states on one mesh share. Made once per mesh and process, by `runtime_of`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        names = mesh.mesh_dim_names or ()
        self.sizes = dict(zip(names, mesh.shape, strict=True))
        self.coordinate = {axis: mesh.get_local_rank(axis) for axis in names}
        self.position = tuple(self.coordinate.items())
        self.size = mesh.size()
        self.device = torch.device(mesh.device_type)
        self.cuda = self.device.type == "cuda"
        if self.cuda:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.issued = {name: Log() for name in QUEUES}
        self.logs = self.issued  # where jobs are logged: elsewhere while they are only captured
        self.capturing = False
        self.remarks: list[str] = []  # of the step that is captured
        self.behind = None
        self.chosen: dict[tuple[bool, tuple[str, ...]], Any] = {}  # "auto", for large models or not, and by axes
        self.spare: dict[tuple[str, str], dict[int, torch.Tensor]] = {}  # windows that no lineage uses, by number
        self.windows = 0  # how many were made
        self.generators: dict[int, torch.Generator] = {}  # on GPUs, by microbatch
        self.given_rows: dict[tuple[str, bytes], list[bytes]] = {}  # of traced steps, see `_recipes`
        self.queues = {name: Queue(self._forsake, self._issue) for name in QUEUES}
        self.issues = self.skips = 0  # on GPUs: collectives that the job has issued, and that its twin leaves out
        self.streams = Streams(self.device, ("gather", "reduce", "outer", "update")) if self.cuda else None
        self.users: dict[int, int] = {}  # under 0 the thread that is in a call, see `_entry`
        self.lineages = 0
        self.ledgers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.groups: dict[tuple[str, str], dist.ProcessGroup] = {}
        self.signals: dict[str, Signals] = {}  # by axis: barriers on GPUs
        self.own_groups: dict[Kind, list[dist.ProcessGroup]] = {}
        self.spare_groups: dict[Kind, list[dist.ProcessGroup]] = {}  # of meshes that are no more
        self.arrivals: dist.ProcessGroup | None = None  # of restarts, where not all ranks see each other's processes
        self.rows: dict[str, list[int]] = {}  # of ranks, along each axis, that this one is in
        self.seats: dict[str, list[int]] = {"": []}  # the other ranks along each axis, by their place in the mesh
        self.grid = mesh.mesh  # ranks [sizes]; the mesh itself is not kept: when it is let go, so is this
        self.ranks: list[int] = sorted(mesh.mesh.flatten().tolist())
        self.rank = 0  # which of them this one is
        self.world: Any = dist.group.WORLD
        self.place = ""  # in the store
        if self.size == 1:
            return
        if mesh.get_coordinate() is None:
            raise SpecError(f"rank {dist.get_rank()} is not part of the mesh of ranks {mesh.mesh.flatten().tolist()}.")
        self.timeout = _timeout(mesh, self.device)
        self.rank = self.ranks.index(dist.get_rank())
        offers = [run.place for run in _unused if run.ranks == self.ranks and run.idle()]
        self.place, again, processes = level(self.ranks, self.timeout, offers)
        self.watch = Watch(processes)
        for run in sorted((run for run in _unused if run.place in again), key=lambda run: again.index(run.place)):
            _unused.remove(run)
            for kind, groups in run.let_go().items():
                self.spare_groups.setdefault(kind, []).extend(groups)
        self.store = dist.PrefixStore(f"{self.place}/run", default_store())  # type: ignore[attr-defined]
        backend = "nccl" if self.cuda else "gloo"
        for i, axis in enumerate(names):
            mine = mesh.mesh.movedim(i, -1).reshape(-1, mesh.shape[i])
            row = self.rows[axis] = next(row.tolist() for row in mine if dist.get_rank() in row)
            self.seats[axis] = [self.ranks.index(rank) for rank in row if rank != dist.get_rank()]
            if len(row) > 1:
                for lane in LANES:
                    self.groups[lane, axis] = self._group(row, f"{lane} {axis}", backend)
        self.control: Any = self._group(self.ranks, "control", "gloo")
        self.board = Board.of(self)
        if not all(self.everyone(len(self.watch) == self.size - 1, "who sees whom")):
            self.arrivals = self._group(self.ranks, "arrivals", "gloo")
        forget(self.place, self.ranks)

    def _group(self, ranks: list[int], what: str, backend: str) -> dist.ProcessGroup:
        """A group of these ranks: one that was used before, or a new one. Collective."""
        kind = backend, tuple(ranks), self.timeout
        spare = self.spare_groups.get(kind)
        group = spare.pop(0) if spare else new_group(ranks, what, self.timeout, backend, gone=self.gone)
        self.own_groups.setdefault(kind, []).append(group)
        return group

    def idle(self) -> bool:
        """Whether its communicators can be used again: nothing is under way on this rank, and no memory knows them."""
        busy = any(not job.ready() for queue in self.queues.values() for job in queue.jobs)
        return not (busy or self.failed or self.parted or self.windows or self.signals)

    def let_go(self) -> dict[Kind, list[dist.ProcessGroup]]:
        """Its communicators, which nobody will use for it again."""
        self.lose("Nobody held their mesh any more.", tell=False)
        found = self.own_groups
        for kind, groups in self.spare_groups.items():
            found.setdefault(kind, []).extend(groups)
        self.groups, self.own_groups, self.spare_groups = {}, {}, {}
        self.control = None
        self.arrivals = self.board = self.watch = None
        return found

    def group(self, lane: str, axis: str) -> dist.ProcessGroup:
        """The communicator of a lane on an axis. "zero_cta" and "traced" (for all traced lanes of CPUs) have one when
        it is first asked for, which is collective."""
        if (lane, axis) not in self.groups and lane in ("zero_cta", "traced"):
            backend, options = one_thread() if lane == "traced" else "nccl", None
            if lane == "zero_cta":
                options = dist.ProcessGroupNCCL.Options()
                options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]
            if lane == "traced" and self.spare_groups.get((backend, tuple(self.rows[axis]), self.timeout)):
                self.groups[lane, axis] = self._group(self.rows[axis], "", backend)
                return self.groups[lane, axis]
            place = level(self.rows[axis], self.timeout).place
            group = new_group(self.rows[axis], f"{lane} {axis}", self.timeout, backend, options, self.gone)
            if lane == "traced":  # else ranks are not connected before they communicate, and may still read there
                forget(place, self.rows[axis])
                self.own_groups.setdefault((backend, tuple(self.rows[axis]), self.timeout), []).append(group)
            self.groups[lane, axis] = group
        return self.groups[lane, axis]

    # ---- jobs

    def collective(self, hop: Collective, out: Any, given: Any) -> Steps:
        """One collective, as a part of a job. `given` may be the rank's own slice of `out`, or the same
        tensor. (A ballot of the board is a list.)"""
        if self.sizes.get(hop.axis, self.size) == 1:
            if out.data_ptr() != given.data_ptr():
                out.copy_(given)
            return iter(())
        if hop.lane == "control" and hop.kind == "all_reduce" and hop.dtype is torch.int64 and self.board is not None:
            return self.board.largest(out)
        group = self.control if hop.lane == "control" else self.groups[hop.lane, hop.axis]
        if self.cuda and hop.lane != "control":
            if self.skips:
                self.skips -= 1
                return iter(())
            self.issues += 1
        if hop.kind == "barrier":
            return barrier(group) if not self.cuda else self._barrier(hop)
        if hop.kind == "all_gather":
            return all_gather(out, given, group)
        if hop.kind == "reduce_scatter":
            return reduce_scatter(out, given, hop.op, group)
        if hop.kind == "all_to_all":
            return all_to_all(out, given, group)
        return all_reduce(out, hop.op, group, sliced=hop.lane != "control" and bool(hop.bucket))

    def _barrier(self, hop: Collective) -> Steps:
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

    def now(self, hop: Collective, out: torch.Tensor, given: torch.Tensor) -> None:
        """One collective on its lane; the compute lane waits for it."""
        self.note(hop)
        after = self.mark() if hop.lane != "side" else None  # that one is compute's own, on GPUs
        self.wait(self.submit(hop.lane, (hop,), self.collective(hop, out, given), after))

    def note(self, hop: Collective) -> None:
        """Have the next vote compare this collective of the side lane."""
        self.remark(f"{hop.kind} {hop.axis} {hop.bucket}")

    def remark(self, said: str) -> None:
        """Have the next vote compare this."""
        self.digest = zlib.crc32(said.encode(), self.digest)
        if self.capturing:
            self.remarks.append(said)


# Communicators belong to the process, as torch's own do: one Runtime for all equal meshes of one process group, as long
# as somebody holds one of them.
_RUNTIMES: dict[int, tuple[weakref.ref[DeviceMesh], Runtime]] = {}  # by the mesh's id
_unused: list[Runtime] = []  # of meshes that are no more: the next one of the same ranks takes their communicators


def runtime_of(mesh: Any) -> Runtime:
    """The Runtime of a mesh. The first call for a mesh is collective: it makes the communicators.

    Raises:
        SpecError: for a mesh that is only a mapping of axis sizes: that plans, but cannot run.
        CommError: not every rank of the mesh came, or one is gone.
    """
    found = _RUNTIMES.get(id(mesh))
    if found is not None and found[1].world is dist.group.WORLD:
        return found[1]
    if not isinstance(mesh, DeviceMesh):
        raise SpecError(
            f"the mesh {dict(mesh)} is a plan without ranks. To run, give Spec a DeviceMesh: fsdp.local_mesh(), or "
            f"torch's init_device_mesh(device, {tuple(dict(mesh).values())}, mesh_dim_names={tuple(dict(mesh))})."
        )
    run = next((run for held, run in [*_RUNTIMES.values()] if held() == mesh and run.world is dist.group.WORLD), None)
    if run is None:
        _forget_groups()
        run = Runtime(mesh)
    _RUNTIMES[id(mesh)] = weakref.ref(mesh, partial(_dropped, id(mesh))), run
    return run


def _dropped(key: int, _: Any) -> None:
    """A mesh is no more. This may be in the middle of anything."""
    _, run = _RUNTIMES.pop(key, (None, None))
    if run is not None and run.size > 1 and not any(run is other for _, other in _RUNTIMES.values()):
        _unused.append(run)


def _forget_groups() -> None:
    """Drop what belongs to process groups that the program has destroyed."""
    for key, (_, run) in [*_RUNTIMES.items()]:
        if run.world is not dist.group.WORLD:
            del _RUNTIMES[key]
            _unused.append(run)
    for run in [run for run in _unused if run.world is not dist.group.WORLD]:
        _unused.remove(run)
        run.let_go()


def any_failed() -> bool:
    """Whether the communicators of any mesh of this process are of no more use."""
    return any(run.failed for _, run in _RUNTIMES.values()) or any(not run.idle() for run in _unused)


def _timeout(mesh: DeviceMesh, device: torch.device) -> timedelta:
    """The timeout of the mesh's own groups, which ours inherit, or that of all ranks' group if it is shorter."""
    found = []
    for group in (mesh.get_group(0), dist.group.WORLD):
        limit = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None) if group else None
        if isinstance(limit, timedelta) and math.isfinite(limit.total_seconds()):
            found.append(limit)
    return min(found, default=timedelta(minutes=10))
