"""Copies: gathers and reductions by reading other ranks' memory, instead of by collectives.

    gather   once a step: barrier, cast the shard into the slab, barrier; then, each time, one copy from every rank
    reduce   gradients staged in a slab: barrier, one copy of the own part from every rank, barrier; summed in float32,
             in the order of ranks

Main weights do not change within a step, so a gather reads what nobody writes, and the second gather of a unit waits
for nobody. On GPUs copies run on the copy engines and leave the multiprocessors to compute.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from ._lanes import Issued, Steps
from ._layout import ALIGN, Bucket, Layout, aligned
from ._route import Replicate, route, states_of
from ._runtime import Runtime
from ._slab import Slab
from ._weights import keeps_copy

__all__ = ["Copies", "Pull", "exchange"]

BYTES = 4 * ALIGN


class Place(NamedTuple):
    """Where a bucket's shard lies in the slab of its axis."""

    axis: str
    at: int
    nbytes: int


class Pull:
    """How one bucket is gathered: where its shards are."""

    def __init__(self, copies: Copies, bucket: Bucket, whole: torch.Tensor) -> None:
        self.copies = copies
        self.name = bucket.name
        place = copies.places[bucket.name]
        slab = copies.slabs[place.axis]
        cut = slice(place.at, place.at + place.nbytes)
        theirs = [peer[cut].view(bucket.compute) for peer in slab.peers]
        self.mine = slab.mine[cut].view(bucket.compute)
        self.pairs = list(zip(whole.chunk(len(theirs)), theirs, strict=True))
        self.barrier = Issued("gather", place.axis, "barrier", 1, torch.float32, "", bucket.name)

    def job(self, source: torch.Tensor) -> tuple[tuple[Issued, ...], Steps]:
        """The gather of `source`, this rank's shard: the barriers it takes, and what to do."""
        copies, known = self.copies, self.copies.published.get(self.name)
        if known is not None and known.source() is source and known.version == source._version:
            return (), _pulled(copies.run, (), None, self.mine, self.pairs)
        # Before a step commits all ranks have voted, and on the CPU they have read by then what they will.
        settled = not copies.run.cuda and (known is None or known.commits < copies.commits)
        barriers = (self.barrier,) if settled else (self.barrier, self.barrier)
        copies.published[self.name] = Published(weakref.ref(source), source._version, copies.commits)
        return barriers, _pulled(copies.run, barriers, source, self.mine, self.pairs)


def _pulled(
    run: Runtime, barriers: tuple[Issued, ...], source: torch.Tensor | None, mine: torch.Tensor,
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
) -> Steps:  # fmt: skip
    if source is not None:
        for barrier in barriers[1:]:
            yield from run.collective(barrier, mine, mine)  # nobody reads the old one any more
        mine.copy_(source)
        source = None  # the job may outlive the state
        yield from run.collective(barriers[0], mine, mine)  # everybody's is there
    for part, theirs in pairs:
        part.copy_(theirs, non_blocking=True)


class Published(NamedTuple):
    """What of the state is in the slab: a tensor, its version, and how many steps were committed before."""

    source: weakref.ref[torch.Tensor]
    version: int
    commits: int


class Copies:
    """The slabs of one lineage of states, and what lies in them. Making one is collective."""

    def __init__(self, run: Runtime, layout: Layout) -> None:
        self.run = run
        self.places: dict[str, Place] = {}
        self.sizes: dict[str, int] = {}
        self.published: dict[str, Published] = {}
        self.commits = 0
        self.staging: dict[str, Slab] = {}
        for bucket in layout.buckets.values():
            axis = self._axis(bucket)
            if axis is not None:
                nbytes = bucket.nbytes("weights")
                at = self.sizes.get(axis, 0)
                self.places[bucket.name] = Place(axis, at, nbytes)
                self.sizes[axis] = aligned(at + nbytes, BYTES)
        self.slabs = {axis: self._made(axis, nbytes) for axis, nbytes in self.sizes.items()}

    def _made(self, axis: str, nbytes: int) -> Slab:
        slab = Slab(self.run, axis, nbytes)
        if self.run.cuda:
            self.run.signals.setdefault(axis, slab)
        return slab

    def _axis(self, bucket: Bucket) -> str | None:
        """The axis along which a bucket is gathered, if it is one."""
        stored = states_of(bucket, "weights" if keeps_copy(bucket) else "main")
        way = route(bucket, stored, tuple((axis, Replicate) for axis, _ in stored), self.run.position)
        axes = [hop.axis for hop in way.hops if self.run.sizes[hop.axis] > 1]
        return axes[0] if len(axes) == 1 else None

    def stage(self, axis: str, nbytes: int) -> Slab:
        """Staging along an axis, of at least so many bytes; perhaps a new one."""
        found = self.staging.get(axis)
        if found is None or found.nbytes < nbytes:
            found = self.staging[axis] = self._made(axis, nbytes)
        return found

    def forget(self) -> None:
        """A step was abandoned: ranks differ in what they have put into their slabs."""
        self.published.clear()


def exchange(
    run: Runtime, issued: tuple[Issued, ...], slab: Slab, at: int, came: torch.Tensor, ranks: int, place: int
) -> Steps:
    """In the place of an all-to-all: `came` [ranks · n], this rank's part of what each has staged at byte `at`."""
    n = came.numel() // ranks
    size = n * came.element_size()
    begin = at + place * size
    yield from run.collective(issued[0], came, came)  # all have staged
    for mine, peer in zip(came.chunk(ranks), slab.peers, strict=True):
        mine.copy_(peer[begin : begin + size].view(came.dtype), non_blocking=True)
    yield from run.collective(issued[1], came, came)  # all have read
