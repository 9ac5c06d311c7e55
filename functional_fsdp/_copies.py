"""Copies: gathers and reductions by reading other ranks' memory, instead of by collectives.

    gather   cast the shard into the own slice of the unit's place in the arena, barrier, one copy from the same place
             of every other rank's arena
    reduce   gradients staged in a slab: barrier, one copy of the own part from every other rank, barrier; summed in
             float32, in the order of ranks

A gather's barrier says that all have read what was gathered before, too. Only where bytes of the last gather are filled
again, and where a step begins, one more comes first. Copies run on the copy engines and barriers are stream memory
operations, so that on GPUs multiprocessors do nothing for either but cast and add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch

from ._exchange import uneven
from ._lanes import ARENA, Steps
from ._layout import Bucket, Layout, Unit
from ._plan import Plan
from ._record import Collective
from ._records import Traits, records
from ._route import Route
from ._runtime import Runtime
from ._slab import Slab, check_reach

__all__ = ["Barriers", "Copies", "Pull", "Reading", "exchange", "read_by_peers", "span_of", "without"]

T = TypeVar("T")
Barriers = list[Collective]
EVERYTHING = range(1 << 62)  # bytes


class Pull(NamedTuple):
    """How a bucket in the arena is gathered along an axis: its bytes, those of the own slice, and the other slices with
    where they are read from."""

    axis: str
    whole: range
    own: range
    reads: list[tuple[torch.Tensor, torch.Tensor]]

    def read(self) -> None:
        """All have filled their slices."""
        for part, theirs in self.reads:
            part.copy_(theirs, non_blocking=True)


class Reading:
    """What others may be reading of this rank's arena, along each axis: its own slices in what was gathered last.

    Barriers go by the whole buckets: slices are elsewhere on each rank, and all must come to the same barriers.
    """

    def __init__(self, axes: Iterable[str]) -> None:
        self.last: dict[str, list[Pull] | None] = dict.fromkeys(axes)  # None: anything

    def anything(self) -> None:
        """A step begins, or is begun anew, and others may still be in the one before."""
        self.last = dict.fromkeys(self.last)

    def filled(self, spans: list[range], pulls: list[Pull]) -> tuple[Barriers, Barriers]:
        """These bytes are filled next, and then read so. Returns the barriers before that, and those between."""
        before = [axis for axis, last in self.last.items() if last is None or _meet(spans, [p.whole for p in last])]
        for axis in before:
            self.last[axis] = []
        between = list(dict.fromkeys(pull.axis for pull in pulls))
        for axis in between:  # whoever is there has read what was gathered before
            self.last[axis] = [pull for pull in pulls if pull.axis == axis]
        return [_barrier(axis) for axis in before], [_barrier(axis) for axis in between]

    @property
    def spans(self) -> list[range]:
        """The bytes of this rank's that others may be reading."""
        last = [pulls for pulls in self.last.values() if pulls is not None]
        return [pull.own for pulls in last for pull in pulls] if len(last) == len(self.last) else [EVERYTHING]


def _barrier(axis: str) -> Collective:
    return Collective("barrier", axis, 1, torch.float32, "", "gather", ARENA)


def _meet(some: list[range], others: list[range]) -> bool:
    return any(a.start < b.stop and b.start < a.stop for a in some for b in others)


def without(span: range, holes: Iterable[range]) -> list[range]:
    """What is left of a span."""
    left = [span]
    for hole in holes:
        pieces = [(range(s.start, min(s.stop, hole.start)), range(max(s.start, hole.stop), s.stop)) for s in left]
        left = [piece for both in pieces for piece in both if piece]
    return left


def span_of(tensor: torch.Tensor) -> range:
    """The bytes of its storage on which a contiguous tensor lies."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return range(begin, begin + tensor.numel() * tensor.element_size())


class Copies:
    """The arena and the staging of one lineage of states, in slabs, and which buckets are gathered by reading them.

    Making a slab is collective.

    Attributes:
        axis: along which a bucket is gathered, for those that are gathered by reading.
    """

    def __init__(self, run: Runtime, layout: Layout) -> None:
        self.run = run
        self.layout = layout
        self.whole: Slab | None = None  # the arena's
        self.staging: dict[str, Slab] = {}
        axes = {bucket.name: gathered(bucket, run) for bucket in layout.buckets.values()}
        self.axis = {name: axis for name, axis in axes.items() if axis is not None}

    def prepare(self, plan: Plan) -> bool:
        """Make all that a plan needs, and that not every rank has: one may have been stopped in it. Collective.

        Returns whether something is new.

        Raises:
            SpecError: on every rank, if ranks cannot read each other's memory.
        """
        check_reach(self.run, self.axes())
        before = self.slabs
        have = {name: slab.nbytes for name, slab in before.items()}
        for name in uneven(self.run, have, "slabs"):
            if name:
                del self.staging[name]
            else:
                self.whole = None
        if self.axis:
            self.arena(plan.arena)
        for reduction in plan.reductions:
            self.staged(self.layout.by_name[reduction.unit], plan.staging)
        return self.slabs != before

    @property
    def slabs(self) -> dict[str, Slab]:
        """Those of the staging by axis, and that of the arena as ""."""
        return self.staging | ({"": self.whole} if self.whole else {})

    def axes(self) -> list[str]:
        """The axes along which anything is read."""
        found = dict.fromkeys(self.axis.values())
        for bucket in self.layout.trainable.values():
            if bucket.exact:
                found |= dict.fromkeys(reduced(bucket, self.run))
        return list(found)

    @property
    def nbytes(self) -> int:
        """Of all slabs, on this rank."""
        return sum(slab.nbytes for slab in self.slabs.values())

    def _slab(self, axes: Sequence[str], nbytes: int) -> Slab:
        for axis in axes:
            self.run.signalling(axis)
        return Slab(self.run, axes, nbytes)

    def arena(self, nbytes: int) -> torch.Tensor:
        """At least so many bytes [uint8] for gathered units."""
        if self.whole is None or self.whole.nbytes < nbytes:
            self.whole = None  # before there is a larger one
            self.whole = self._slab(list(dict.fromkeys(self.axis.values())), nbytes)
        return self.whole.mine

    def pull(self, bucket: Bucket, whole: torch.Tensor) -> Pull | None:
        """How a bucket that lies in the arena as `whole` is gathered, if it is by reading."""
        axis = self.axis.get(bucket.name)
        if axis is None or self.whole is None:
            return None
        ranks, place = self.run.sizes[axis], self.run.coordinate[axis]
        spans = [span_of(part) for part in whole.chunk(ranks)]
        peers = zip(self.whole.peers[axis], spans, strict=True)
        theirs = [peer[span.start : span.stop].view(whole.dtype) for peer, span in peers]
        reads = turned(list(zip(whole.chunk(ranks), theirs, strict=True)), place)[1:]
        return Pull(axis, span_of(whole), spans[place], reads)

    def staged(self, unit: Unit, nbytes: int) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
        """At least so many bytes [uint8] in which all of a unit's gradients are staged, and those of every rank along
        the axis, by place, which can be read; None where they are not reduced that way. Perhaps a new slab."""
        trainable = [bucket for bucket in unit.buckets if bucket.trainable]
        axes: set[str] = set()
        if all(bucket.exact for bucket in trainable):
            axes = axes.union(*(reduced(bucket, self.run) for bucket in trainable))
        if len(axes) != 1:
            return None
        (axis,) = axes
        if axis in self.staging and self.staging[axis].nbytes < nbytes:
            del self.staging[axis]  # before there is a larger one
        if axis not in self.staging:
            self.staging[axis] = self._slab([axis], nbytes)
        return self.staging[axis].mine, self.staging[axis].peers[axis]


def gathered(bucket: Bucket, run: Runtime) -> str | None:
    """The axis along which a bucket is gathered, if it is one."""
    axes = [one.axis for one in records(bucket, run.position, "mean", Traits()).unshard.collectives]
    return axes[0] if len(axes) == 1 else None


def reduced(bucket: Bucket, run: Runtime) -> set[str]:
    """The axes along which a bucket's fresh gradients are first reduced, whether the last or not."""
    ways = records(bucket, run.position, "mean", Traits()).reduce.values()
    return {way.collectives[0].axis for way in ways if way.collectives}


def read_by_peers(way: Route) -> Route:
    """The same with barriers in the place of its all-to-all, around which ranks read what the others have staged."""
    if not way.exact:
        return way
    first = way.steps[0]
    sent = first.collectives[0]
    barrier = Collective("barrier", sent.axis, 1, torch.float32, "", sent.lane, sent.bucket)
    first = first._replace(collectives=(barrier, barrier, *first.collectives[1:]))
    steps = (first, *way.steps[1:])
    every = tuple(one for step in steps for one in step.collectives)
    return way._replace(steps=steps, collectives=every, single=False)


def turned(items: list[T], place: int) -> list[T]:
    """Beginning with the own one: when every rank reads, each is read by one other at a time, and no link by all."""
    return items[place:] + items[:place]


def exchange(
    run: Runtime, issued: tuple[Collective, ...], peers: list[torch.Tensor], at: int, came: torch.Tensor, place: int
) -> Steps:
    """In the place of an all-to-all: `came` [ranks · n], this rank's part of what each has staged at byte `at`, without
    its own, which is in the slab already."""
    size = came.numel() // len(peers) * came.element_size()
    begin = at + place * size
    yield from run.collective(issued[0], came, came)  # all have staged
    for mine, peer in turned(list(zip(came.chunk(len(peers)), peers, strict=True)), place)[1:]:
        mine.copy_(peer[begin : begin + size].view(came.dtype), non_blocking=True)
    yield from run.collective(issued[1], came, came)  # all have read
