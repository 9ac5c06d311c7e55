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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._common.errors import SpecError
from .._common.record import LANES, QUEUES, Collective
from .._distributed import PatientStore
from .agreement import DESTROYED, Agreement
from .stream_lanes import lanes_of

T = TypeVar("T")
Kind = tuple[str, tuple[int, ...], timedelta]  # of groups: the backend, the ranks, the timeout


class Runtime(Agreement):
    """What all states on one mesh share. Made once per mesh and process, by `runtime_of`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.gate: Any = None  # what may take the step back, see `gated`
        self.watcher: Any = None  # what verbs are called through, see `watched`
        self.chosen: dict[tuple[bool, tuple[str, ...]], Any] = {}  # "auto", for large models or not, and by axes
        self.spare: dict[tuple[str, str], dict[int, torch.Tensor]] = {}  # windows that no lineage uses, by number
        self.windows = 0  # how many were made
        self.generators: dict[int, torch.Generator] = {}  # on GPUs, by microbatch
        self.draws: dict[tuple[int, int], int] = {}  # what a step draws again: offsets, by microbatch and place
        self.again: dict[tuple[int, int], torch.Generator] = {}  # that a captured step draws them from
        self.lanes = lanes_of(self)
        self.users: dict[int, int] = {}  # under 0 the thread that is in a call, see `_common.calls`
        self.own_groups: dict[Kind, list[dist.ProcessGroup]] = {}
        self.spare_groups: dict[Kind, list[dist.ProcessGroup]] = {}  # of meshes that are no more
        self.place = ""  # in the store
        if self.size == 1:
            return
        if mesh.get_coordinate() is None:
            raise SpecError(f"rank {dist.get_rank()} is not part of the mesh of ranks {mesh.mesh.flatten().tolist()}.")
        self.timeout = _timeout(mesh, self.device)
        self.rank = self.ranks.index(dist.get_rank())
        offers = [run.place for run in _unused if run.ranks == self.ranks and run.idle()]
        self.place, again, processes = self.medium.level(self.ranks, self.timeout, offers)
        self.watch = self.medium.watch(processes)
        for run in sorted((run for run in _unused if run.place in again), key=lambda run: again.index(run.place)):
            _unused.remove(run)
            for kind, groups in run.let_go().items():
                self.spare_groups.setdefault(kind, []).extend(groups)
        self.store = self.medium.store(self.place)
        for i, axis in enumerate(self.sizes):
            mine = mesh.mesh.movedim(i, -1).reshape(-1, mesh.shape[i])
            row = self.rows[axis] = next(row.tolist() for row in mine if dist.get_rank() in row)
            if len(row) > 1:
                for lane in LANES:
                    self.groups[lane, axis] = self._group(row, f"{lane} {axis}", self.lanes.backend)
        self.control = self._group(self.ranks, "control", "gloo")
        self.host_vote = self.medium.vote(self)
        if self.host_vote is not None and self.lanes.waits_on_host:
            for i, lane in enumerate(QUEUES):
                if lane != "control":
                    self.issued[lane].compare(self.host_vote.jobs(i), self.rank, self.size)
        if not all(self.everyone(len(self.watch) == self.size - 1, "who sees whom")):
            self.arrivals = self._group(self.ranks, "arrivals", "gloo")
            self.store = PatientStore(self.store, self.timeout)
        self.medium.forget(self.place, self.ranks)

    def _group(self, ranks: list[int], what: str, backend: str) -> dist.ProcessGroup:
        """A group of these ranks: one that was used before, or a new one. Collective."""
        kind = backend, tuple(ranks), self.timeout
        spare = self.spare_groups.get(kind)
        group = spare.pop(0) if spare else self.medium.group(ranks, what, self.timeout, backend, gone=self.gone)
        self.own_groups.setdefault(kind, []).append(group)
        return group

    def idle(self) -> bool:
        """Whether its communicators can be used again: nothing is under way on this rank, and no memory knows them."""
        return self.lanes.idle() and not (self.failed or self.parted or self.windows)

    def let_go(self) -> dict[Kind, list[dist.ProcessGroup]]:
        """Its communicators, which nobody will use for it again."""
        destroyed = self.world is not dist.group.WORLD
        self.lose(DESTROYED if destroyed else "Nobody held their mesh any more.", tell=False)
        found = self.own_groups
        for kind, groups in self.spare_groups.items():
            found.setdefault(kind, []).extend(groups)
        self.groups, self.own_groups, self.spare_groups = {}, {}, {}
        self.control = None
        self.arrivals = self.host_vote = self.watch = None
        return found

    def extra_group(self, lane: str, axis: str, backend: str, options: Any = None) -> dist.ProcessGroup:
        """The communicator, on an axis, of a lane that only a satellite knows, made when it is first asked for. Then it
        is collective. One without options is kept for the next mesh of these ranks."""
        if (lane, axis) not in self.groups:
            row = self.rows[axis]
            kind = backend, tuple(row), self.timeout
            if options is None and self.spare_groups.get(kind):
                group = self._group(row, "", backend)
            else:
                place = self.medium.level(row, self.timeout).place
                group = self.medium.group(row, f"{lane} {axis}", self.timeout, backend, options, self.gone)
                if options is None:  # else ranks are not connected before they communicate, and may still read there
                    self.medium.forget(place, row)
                    self.own_groups.setdefault(kind, []).append(group)
            self.groups[lane, axis] = group
        return self.groups[lane, axis]

    # ---- lineages, and what they share

    def count_windows(self, count: int) -> None:
        """So many windows were made, on the rank that has made most."""
        self.windows = count

    def choose(self, large: bool, axes: tuple[str, ...], choose: Callable[[], T]) -> T:
        """The choice of a transport for such models, made once for the mesh."""
        key = large, axes
        if key not in self.chosen:
            self.chosen[key] = choose()
        return self.chosen[key]

    # ---- steps that are watched, or captured

    @contextmanager
    def watched(self, watcher: Callable[..., Any]) -> Iterator[None]:
        """Within, each verb, and each forward of a driven unit, is called through `watcher(name, fn, *args, **kwargs)`,
        and no longer through another one around it."""
        outer, self.watcher = self.watcher, watcher
        try:
            yield
        finally:
            self.watcher = outer

    @contextmanager
    def gated(self, gate: Any) -> Iterator[None]:
        """Within, steps are taken that the device may take back after ranks have voted for them.

        Args:
            gate: `join()` when gradients are whole, `decided(skip)`, whether the update changes nothing, and
                `stands(skip)`, whether the step is skipped all the same.
        """
        self.gate = gate
        try:
            yield
        finally:
            self.gate = None

    # ---- jobs

    def now(self, hop: Collective, out: torch.Tensor, given: torch.Tensor) -> None:
        """One collective on its lane; the compute lane waits for it."""
        self.remark(f"{hop.kind} {hop.axis} {hop.bucket}")
        after = self.lanes.mark() if hop.lane != "side" else None  # that one is compute's own, on GPUs
        self.lanes.wait(self.lanes.submit(hop.lane, (hop,), self.collective(hop, out, given), after))


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
    _RUNTIMES[id(mesh)] = weakref.ref(mesh, partial(_dropped, _RUNTIMES, _unused, id(mesh))), run
    return run


def _dropped(runtimes: dict[int, Any], unused: list[Runtime], key: int, _: Any) -> None:
    """A mesh is no more. This may be in the middle of anything."""
    _, run = runtimes.pop(key, (None, None))
    if run is not None and run.size > 1 and not any(run is other for _, other in runtimes.values()):
        unused.append(run)


def _forget_groups() -> None:
    """Drop what belongs to process groups that the program has destroyed."""
    for key, (_, run) in [*_RUNTIMES.items()]:
        if run.world is not dist.group.WORLD:
            del _RUNTIMES[key]
            _unused.append(run)
    for run in [run for run in _unused if run.world is not dist.group.WORLD]:
        _unused.remove(run)
        run.let_go()


def runtimes() -> dict[str, Runtime]:
    """Those of this process that have other ranks, by their names in the store: also of meshes that are no more, whose
    communicators the next one takes."""
    _forget_groups()
    return {run.place: run for run in [*(run for _, run in [*_RUNTIMES.values()]), *_unused] if run.size > 1}


def forget_runtime(run: Runtime, why: str) -> None:
    """The next call for its mesh makes another one. What is under way in this one comes to no end."""
    run.lose(why, tell=False)
    for key, (_, other) in [*_RUNTIMES.items()]:
        if other is run:
            del _RUNTIMES[key]
    if run in _unused:
        _unused.remove(run)


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
