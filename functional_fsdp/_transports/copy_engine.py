"""Copies: gathers and reductions by reading other ranks' memory, instead of by collectives.

    gather   cast the shard into the own slice of the unit's place in the arena, barrier, one copy from the same place
             of every other rank's arena
    reduce   gradients staged in a peer memory: barrier, one copy of the own part from every other rank, barrier; summed
             in float32, in the order of ranks

A gather's barrier says that all have read what was gathered before, too. Only where bytes of the last gather are filled
again, and where a step begins, one more comes first. Copies run on the copy engines and barriers are stream memory
operations, so that on GPUs multiprocessors do nothing for either but cast and add up.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from .._common.record import ARENA, Collective, Steps, together
from .._engine.gathers import Carrier, GatherSteps, Portions
from .._plan.layout import Bucket, Layout, Unit
from .._plan.plan import Plan, records
from .._plan.route import Route
from .._runtime.runtime import Runtime
from .._spec.spec import Traits, Transport
from .._storage import Filling, Place, Stored, read, span_of
from .peer_memory import PeerMemory, check_reach, uneven

T = TypeVar("T")
Barriers = list[Collective]
EVERYTHING = range(1 << 62)  # bytes


class RemoteRead(NamedTuple):
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
        self.last: dict[str, list[RemoteRead] | None] = dict.fromkeys(axes)  # None: anything

    def anything(self) -> None:
        """A step begins, or is begun anew, and others may still be in the one before."""
        self.last = dict.fromkeys(self.last)

    def filled(self, spans: list[range], pulls: list[RemoteRead]) -> tuple[Barriers, Barriers]:
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


class Copies(Carrier):
    """The arena and the staging of one lineage of states, in memory that peers reach, and which buckets are gathered by
    reading them.

    Making a peer memory is collective.

    Attributes:
        axis: along which a bucket is gathered, for those that are gathered by reading.
        pulls: how those are, that have a place.
    """

    def __init__(self, run: Runtime, layout: Layout) -> None:
        super().__init__(run, layout)
        self.pulls: dict[str, RemoteRead] = {}
        self.whole: PeerMemory | None = None  # the arena's
        self.stages: dict[str, PeerMemory] = {}  # of the staging, by axis
        axes = {bucket.name: gathered(bucket, run) for bucket in layout.buckets.values()}
        self.axis = {name: axis for name, axis in axes.items() if axis is not None}
        self.keeps_arena = self.read = bool(self.axis)
        self.reading = Reading(self.axis.values())

    def prepare(self, plan: Plan) -> bool:
        """Make all that a plan needs, and that not every rank has: one may have been stopped in it. Collective.

        Returns whether something is new.

        Raises:
            SpecError: on every rank, if ranks cannot read each other's memory.
        """
        check_reach(self.run, self.axes())
        before = self.memories
        have = {name: peer_memory.nbytes for name, peer_memory in before.items()}
        for name in uneven(self.run, have, "memories"):
            if name:
                del self.stages[name]
            else:
                self.whole = None
        if self.axis:
            self.arena(plan.arena)
        for reduction in plan.reductions:
            self.staging(self.layout.by_name[reduction.unit], plan.staging)
        return self.memories != before

    @property
    def memories(self) -> dict[str, PeerMemory]:
        """Those of the staging by axis, and that of the arena as ""."""
        return self.stages | ({"": self.whole} if self.whole else {})

    def axes(self) -> list[str]:
        """The axes along which anything is read."""
        found = dict.fromkeys(self.axis.values())
        for bucket in self.layout.trainable.values():
            if bucket.exact:
                found |= dict.fromkeys(reduced(bucket, self.run))
        return list(found)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Of all memories, on this rank."""
        return sum(peer_memory.nbytes for peer_memory in self.memories.values())

    def _memory(self, axes: Sequence[str], nbytes: int) -> PeerMemory:
        for axis in axes:
            self.run.lanes.signalling(axis)
        return PeerMemory(self.run, axes, nbytes)

    def arena(self, nbytes: int) -> torch.Tensor:
        """At least so many bytes [uint8] for gathered units."""
        if self.whole is None or self.whole.nbytes < nbytes:
            self.whole = None  # before there is a larger one
            self.whole = self._memory(list(dict.fromkeys(self.axis.values())), nbytes)
        return self.whole.mine

    # ---- gathers

    def gathers(self, bucket: Bucket, whole: torch.Tensor, steps: GatherSteps) -> GatherSteps:
        axis = self.axis.get(bucket.name)
        if axis is None or self.whole is None:
            return steps
        ranks, place = self.run.sizes[axis], self.run.coordinate[axis]
        spans = [span_of(part) for part in whole.chunk(ranks)]
        peers = zip(self.whole.peers[axis], spans, strict=True)
        theirs = [peer[span.start : span.stop].view(whole.dtype) for peer, span in peers]
        reads = rotated(list(zip(whole.chunk(ranks), theirs, strict=True)), place)[1:]
        self.pulls[bucket.name] = RemoteRead(axis, span_of(whole), spans[place], reads)
        return ()

    def fill(self, place: Place, state: Stored) -> Filling:
        if not self.axis:
            return super().fill(place, state)
        sources = [read(state, part.bucket).local for part in place.parts]
        before, between = self.reading.filled(place.spans, self._pulls(place))
        return (*before, *between, *place.issued), self._filled(place, sources, before, between), False

    def _pulls(self, place: Place) -> list[RemoteRead]:
        return [self.pulls[part.bucket.name] for part in place.parts if part.bucket.name in self.pulls]

    def _filled(self, place: Place, sources: list[torch.Tensor], before: Barriers, between: Barriers) -> Steps:
        some = place.parts[0].whole if place.parts else torch.empty(0, device=self.run.device)
        for barrier in before:
            yield from self.run.collective(barrier, some, some)
        rest = []
        for part, source in zip(place.parts, sources, strict=True):
            if part.bucket.name in self.pulls:
                part.own.copy_(source)
            else:
                rest.append(self.gather(place, part, source))
        sources.clear()  # the job may outlive the state
        for barrier in between:
            yield from self.run.collective(barrier, some, some)
        for pull in self._pulls(place):
            pull.read()
        yield from together(rest)

    def spared(self, place: Place | None = None) -> list[range]:
        if place is not None:
            return [pull.own for pull in self._pulls(place)]
        return self.reading.spans if self.axis else []

    def step_begins(self) -> None:
        self.reading.anything()

    # ---- reductions

    def staging(self, unit: Unit, nbytes: int) -> torch.Tensor | None:
        axis = self._reduced_along(unit)
        return None if axis is None else self._staged(axis, nbytes).mine

    def _reduced_along(self, unit: Unit) -> str | None:
        """The axis along which all of a unit's gradients are reduced by reading, if there is one."""
        trainable = [bucket for bucket in unit.buckets if bucket.trainable]
        axes: set[str] = set()
        if all(bucket.exact for bucket in trainable):
            axes = axes.union(*(reduced(bucket, self.run) for bucket in trainable))
        return axes.pop() if len(axes) == 1 else None

    def _staged(self, axis: str, nbytes: int) -> PeerMemory:
        """Perhaps a new peer_memory."""
        if axis in self.stages and self.stages[axis].nbytes < nbytes:
            del self.stages[axis]  # before there is a larger one
        if axis not in self.stages:
            self.stages[axis] = self._memory([axis], nbytes)
        return self.stages[axis]

    def reduces(self, way: Route) -> Route:
        """The same with barriers in the place of its all-to-all: in between ranks read what the others have staged."""
        if not way.exact:
            return way
        first = way.steps[0]
        sent = first.collectives[0]
        # `op` stays: it says whether the sum is a mean
        barrier = Collective("barrier", sent.axis, 1, torch.float32, sent.op, sent.lane, sent.bucket)
        steps = (first._replace(collectives=(barrier, barrier, *first.collectives[1:])), *way.steps[1:])
        every = tuple(one for step in steps for one in step.collectives)
        return way._replace(steps=steps, collectives=every, single=False)

    def exchange(
        self, collectives: tuple[Collective, ...], stage: torch.Tensor, came: torch.Tensor, portions: Portions
    ) -> Generator[Any, None, bool]:
        first = collectives[0]
        if first.kind != "barrier":  # it is staged elsewhere
            return (yield from super().exchange(collectives, stage, came, portions))
        peers, place = self.stages[first.axis].peers[first.axis], self.run.coordinate[first.axis]
        size = came.numel() // len(peers) * came.element_size()
        begin = int(stage.storage_offset()) * stage.element_size() + place * size
        theirs = [peer[begin : begin + size].view(came.dtype) for peer in peers]
        reads = rotated(list(zip(came.chunk(len(peers)), theirs, strict=True)), place)[1:]
        yield from self.run.collective(first, came, came)  # all have staged
        for start, stop in portions.cuts:
            for mine, peer in reads:
                mine[start:stop].copy_(peer[start:stop], non_blocking=True)
            portions.there.append(self.run.lanes.mark())
        for mine, peer in () if portions.cuts else reads:
            mine.copy_(peer, non_blocking=True)
        yield from self.run.collective(collectives[1], came, came)  # all have read
        return True


class CopyEngine(Transport):
    """Ranks read each other's memory; see the top of this file."""

    name = "copy_engine"
    stays = exact = True

    def on(self, run: Runtime, layout: Layout) -> Copies:
        return Copies(run, layout)


def gathered(bucket: Bucket, run: Runtime) -> str | None:
    """The axis along which a bucket is gathered, if it is one."""
    axes = [one.axis for one in records(bucket, run.position, "mean", Traits()).unshard.collectives]
    return axes[0] if len(axes) == 1 else None


def reduced(bucket: Bucket, run: Runtime) -> set[str]:
    """The axes along which a bucket's fresh gradients are first reduced, whether the last or not."""
    ways = records(bucket, run.position, "mean", Traits()).reduce.values()
    return {way.collectives[0].axis for way in ways if way.collectives}


def rotated(items: list[T], place: int) -> list[T]:
    """Beginning with the own one: when every rank reads, each is read by one other at a time, and no link by all."""
    return items[place:] + items[:place]
