"""Copies: gathers and reductions by reading other ranks' memory, instead of by collectives.

    gather   the first of a unit in a pass: cast the shard into the slab, barrier, one copy from every rank; the
             second: one copy from every rank, and no barrier; before the first of a pass a barrier more, after which
             nobody reads what lay in the slab before
    reduce   gradients staged in a slab: barrier, one copy of the own part from every rank, barrier; summed in float32,
             in the order of ranks

Main weights do not change within a pass, so the second gather of a unit reads what nobody writes, and waits for nobody.
On GPUs copies run on the copy engines and leave the multiprocessors to compute. Which barriers a gather takes follows
from its place in the plan, which is the same on every rank.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

from ._lanes import Issued, Steps
from ._layout import ALIGN, Bucket, Layout, Unit, aligned
from ._plan import Plan
from ._route import Partial, Replicate, partial_states, route, states_of
from ._runtime import Runtime
from ._slab import Slab, check_reach
from ._weights import keeps_copy

__all__ = ["Copies", "Pull", "exchange"]

T = TypeVar("T")

BYTES = 4 * ALIGN


class Shard(NamedTuple):
    """Where a bucket's shard lies in the slab of its axis."""

    axis: str
    at: int
    nbytes: int


class Pull:
    """How one bucket is gathered: where its shards are."""

    def __init__(self, copies: Copies, bucket: Bucket, whole: torch.Tensor) -> None:
        shard = copies.shards[bucket.name]
        slab = copies.slab(shard.axis)
        cut = slice(shard.at, shard.at + shard.nbytes)
        theirs = [peer[cut].view(bucket.compute) for peer in slab.peers]
        self.run = copies.run
        self.axis = shard.axis
        self.mine = slab.mine[cut].view(bucket.compute)
        pairs = list(zip(whole.chunk(len(theirs)), theirs, strict=True))
        self.pairs = turned(pairs, copies.run.coordinate[shard.axis])
        self.barrier = Issued("gather", shard.axis, "barrier", 1, torch.float32, "", bucket.name)

    def job(self, source: torch.Tensor, first: bool, begins: bool) -> tuple[tuple[Issued, ...], Steps]:
        """The gather of `source`, this rank's shard: the barriers it takes, and what to do.

        first: of this unit in this pass; begins: of all along the axis.
        """
        barriers = (self.barrier,) * (first + begins)
        return barriers, _pulled(self.run, barriers, source if first else None, self.mine, self.pairs)


def _pulled(
    run: Runtime, barriers: tuple[Issued, ...], source: torch.Tensor | None, mine: torch.Tensor,
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
) -> Steps:  # fmt: skip
    if source is not None:
        for barrier in barriers[1:]:
            yield from run.collective(barrier, mine, mine)  # all are in this pass: nobody reads the old one any more
        mine.copy_(source)
        source = None  # the job may outlive the state
        yield from run.collective(barriers[0], mine, mine)  # everybody's is there
    for part, theirs in pairs:
        part.copy_(theirs, non_blocking=True)


class Copies:
    """The slabs of one lineage of states, and where in them shards lie. Making a slab is collective."""

    def __init__(self, run: Runtime, layout: Layout) -> None:
        self.run = run
        self.layout = layout
        self.shards: dict[str, Shard] = {}
        self.sizes: dict[str, int] = {}
        self.made: dict[str, Slab] = {}
        self.staging: dict[str, Slab] = {}
        for bucket in layout.buckets.values():
            axis = self._axis(bucket)
            if axis is not None:
                nbytes = bucket.nbytes("weights")
                at = self.sizes.get(axis, 0)
                self.shards[bucket.name] = Shard(axis, at, nbytes)
                self.sizes[axis] = aligned(at + nbytes, BYTES)

    def _axis(self, bucket: Bucket) -> str | None:
        """The axis along which a bucket is gathered, if it is one."""
        stored = states_of(bucket, "weights" if keeps_copy(bucket) else "main")
        way = route(bucket, stored, tuple((axis, Replicate) for axis, _ in stored), self.run.position)
        axes = [hop.axis for hop in way.hops if self.run.sizes[hop.axis] > 1]
        return axes[0] if len(axes) == 1 else None

    def prepare(self, plan: Plan) -> None:
        """Make all that a plan needs. Collective.

        Raises:
            SpecError: on every rank, if ranks cannot read each other's memory.
        """
        check_reach(self.run, self.axes())
        for axis in self.sizes:
            self.slab(axis)
        for reduction in plan.reductions:
            self.staged(self.layout.by_name[reduction.unit], plan.staging)

    def axes(self) -> list[str]:
        """The axes along which anything is read."""
        found = dict.fromkeys(self.sizes)
        for bucket in self.layout.trainable.values():
            if bucket.exact:
                found |= dict.fromkeys(reduced(bucket, self.run))
        return list(found)

    def begins(self, plan: Plan) -> tuple[list[bool], dict[str, int]]:
        """For each of the plan's gathers whether it is its unit's first in a pass; and each axis's first gather."""
        firsts: list[bool] = []
        begin: dict[str, int] = {}
        seen: set[str] = set()
        for i, gather in enumerate(plan.gathers):
            firsts.append(gather.unit not in seen)
            seen.add(gather.unit)
            for part in plan.by_name[gather.unit].parts:
                if part.bucket in self.shards:
                    begin.setdefault(self.shards[part.bucket].axis, i)
        return firsts, begin

    @property
    def nbytes(self) -> int:
        """Of all slabs, on this rank."""
        return sum(slab.nbytes for slab in (*self.made.values(), *self.staging.values()))

    def _made(self, axis: str, nbytes: int) -> Slab:
        self.run.signalling(axis)
        return Slab(self.run, axis, nbytes)

    def slab(self, axis: str) -> Slab:
        """The shards along an axis."""
        if axis not in self.made:
            self.made[axis] = self._made(axis, self.sizes[axis])
        return self.made[axis]

    def staged(self, unit: Unit, nbytes: int) -> Slab | None:
        """At least so many bytes in which a unit's gradients are staged so that the other ranks can read them: all of
        its buckets, or none. Perhaps a new slab."""
        trainable = [bucket for bucket in unit.buckets if bucket.trainable]
        axes: set[str] = set()
        if all(bucket.exact for bucket in trainable):
            axes = axes.union(*(reduced(bucket, self.run) for bucket in trainable))
        if len(axes) != 1:
            return None
        (axis,) = axes
        found = self.staging.get(axis)
        if found is None or found.nbytes < nbytes:
            found = self.staging[axis] = self._made(axis, nbytes)
        return found


def turned(items: list[T], place: int) -> list[T]:
    """Beginning with the own one: when every rank reads, each is read by one other at a time, and no link by all."""
    return items[place:] + items[:place]


def reduced(bucket: Bucket, run: Runtime) -> set[str]:
    """The axes along which a bucket's fresh gradients are first reduced, whether the last or not."""
    found = set()
    for end in (states_of(bucket, "grads", Partial), states_of(bucket, "main")):
        hops = [hop for hop in route(bucket, partial_states(bucket), end, run.position).hops if run.sizes[hop.axis] > 1]
        found |= {hop.axis for hop in hops[:1]}
    return found


def exchange(
    run: Runtime, issued: tuple[Issued, ...], slab: Slab, at: int, came: torch.Tensor, ranks: int, place: int
) -> Steps:
    """In the place of an all-to-all: `came` [ranks · n], this rank's part of what each has staged at byte `at`, without
    its own, which is in the slab already."""
    n = came.numel() // ranks
    size = n * came.element_size()
    begin = at + place * size
    yield from run.collective(issued[0], came, came)  # all have staged
    for mine, peer in turned(list(zip(came.chunk(ranks), slab.peers, strict=True)), place)[1:]:
        mine.copy_(peer[begin : begin + size].view(came.dtype), non_blocking=True)
    yield from run.collective(issued[1], came, came)  # all have read
