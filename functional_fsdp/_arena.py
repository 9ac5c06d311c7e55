"""Arena: the bytes in which gathered units lie at planned addresses, and the jobs that fill them.

    main shard ──cast──▶ own slice of the unit's place ──all-gather, in place──▶ the unit's weights, as views

The arena is one allocation, which comes and goes; where other ranks read it, or NCCL knows it, it stays. Where it
comes and goes, and the plan has two sides, units that stand on the bottom and units that hang from the top, it is two,
each as large as the unit that is there: a step's peak then need not hold the largest pair.

On GPUs compute begins with a unit when the cast of the next one is done, if that is all there is between:

    gather lane   ── cast 1 ── gather 1 ── cast 2 ────────── gather 2 ── cast 3 ──
    compute                                       unit 1 ───────────────         unit 2 ──

Both may begin at the same moment, and a matrix product that is first leaves a cast no room until its end: the gather
behind it would come too late to be hidden.

A unit's views are made once and handed out again and again, so that residuals that point at them stay good. They lie
on the arena's bytes and have a version counter of their own: filling a place again is no in-place change to autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from ._copies import Barriers, Copies, Pull, Reading, span_of, without
from ._flat import leaves_of
from ._lanes import Mark, Steps, together
from ._layout import Bucket, Unit
from ._plan import Plan
from ._record import Collective
from ._records import Traits, records
from ._runtime import Runtime
from ._symmetric import Windows
from ._weights import Lease, alias_of, poison, read, whole_of

if TYPE_CHECKING:
    from ._state import State

__all__ = ["Arena", "Place"]

Filling = tuple[tuple[Collective, ...], Steps, bool]


class Part(NamedTuple):
    """A bucket's place: where this rank's slice goes, and the gathers that complete the whole.

    pull: how it is copied from the other ranks instead, where that is what the transport does. inside: what is gathered
    must not be read from the shard where it is, but from this rank's slice.
    """

    bucket: Bucket
    whole: torch.Tensor
    own: torch.Tensor
    steps: tuple[tuple[Collective, torch.Tensor], ...]  # and where each one lands
    pull: Pull | None = None
    inside: bool = False


class Place:
    """A unit's place: its parts, and the tensors that are handed out."""

    def __init__(
        self,
        lease: Lease,
        parts: tuple[Part, ...],
        resident: tuple[tuple[Bucket, torch.Tensor], ...],
        aliases: list[torch.Tensor],
    ) -> None:
        self.lease = lease
        self.parts = parts
        self.resident = resident
        self.aliases = aliases  # of each bucket: the base of what is handed out, with its version counter
        self.issued = tuple(one for part in parts for one, _ in part.steps)
        self.key = lease.unit.encode()  # for the digest that ranks compare
        self.single = all(len(part.steps) <= 1 for part in parts)
        self.pulls = [part.pull for part in parts if part.pull]
        self.spans = [span_of(part.whole) for part in parts]
        self.cast: Mark = None  # on GPUs: the point in its last gather from which on it only communicates
        self.gathered: Mark = None  # the end of its last gather
        self.released: Mark = None  # the point on compute where it was last given back

    def poison(self, spared: Iterable[range] = ()) -> None:
        """So that a use past the release shows; but for these bytes, and what other ranks may be reading of it."""
        for part, span in zip(self.parts, self.spans, strict=True):
            size = part.whole.element_size()
            for free in without(span, [*spared, *([part.pull.own] if part.pull else [])]):
                poison(part.whole[(free.start - span.start) // size : (free.stop - span.start) // size])

    def fill(self, run: Runtime, state: State, reading: Reading | None) -> Filling:
        """The job: cast the shards into this rank's slices, gather in place. Parts travel together.

        Args:
            reading: of the arena, where other ranks read it; brought up to date.

        Returns the collectives it will issue, the job, and whether these all start at once.
        """
        if reading is None:
            if len(self.parts) == 1:
                (part,) = self.parts
                return self.issued, self._fill(run, part, read(state, part.bucket).local, True), self.single
            parts = enumerate(self.parts)
            jobs = [self._fill(run, part, read(state, part.bucket).local, i == 0) for i, part in parts]
            return self.issued, together(jobs), self.single
        sources = [read(state, part.bucket).local for part in self.parts]
        before, between = reading.filled(self.spans, self.pulls)
        return (*before, *between, *self.issued), self._pulled(run, sources, before, between), False

    def _pulled(self, run: Runtime, sources: list[torch.Tensor], before: Barriers, between: Barriers) -> Steps:
        some = self.parts[0].whole if self.parts else torch.empty(0)
        for barrier in before:
            yield from run.collective(barrier, some, some)
        rest = []
        for part, source in zip(self.parts, sources, strict=True):
            if part.pull:
                part.own.copy_(source)
            else:
                rest.append(self._fill(run, part, source))
        sources.clear()  # the job may outlive the state
        for barrier in between:
            yield from run.collective(barrier, some, some)
        for pull in self.pulls:
            pull.read()
        yield from together(rest)

    def ready(self, behind: Mapping[str, Place], newest: Mark) -> Mark:
        """What compute waits for before it uses the unit: see the top of this file.

        Args:
            behind: the other units that are being gathered.
            newest: the end of the gather that was started last.
        """
        if len(behind) == 1 and self.single:
            (other,) = behind.values()
            if other.single and other.cast is not None and other.gathered is newest:
                return other.cast
        return self.gathered

    def _fill(self, run: Runtime, part: Part, source: torch.Tensor, first: bool = False) -> Steps:
        given = part.own
        if source.dtype is part.whole.dtype and not part.inside:
            given = source  # no cast: the first gather reads the shard itself
        else:
            part.own.copy_(source)
            if first and run.streams is not None:
                self.cast = self.cast or torch.cuda.Event()
                self.cast.record(run.streams.lanes["gather"])
        for one, out in part.steps:
            yield from run.collective(one, out, given)
            given = out
        if not part.steps and given is source:
            part.own.copy_(source)


class Arena:
    """The bytes, and a `Place` for each unit, made when it is first used."""

    def __init__(self, run: Runtime, plan: Plan, copies: Copies | None = None, windows: Windows | None = None) -> None:
        self.run = run
        self.plan = plan
        self.copies = copies
        self.windows = windows
        self.traits = windows.traits if windows else Traits()
        self.reading = Reading(copies.axis.values()) if copies and copies.axis else None
        self.shared = windows or (copies if self.reading else None)  # has the bytes, which stay then
        self.places: dict[str, Place] = {}
        sides = not self.shared and all(u.address in (0, plan.arena - u.nbytes) for u in plan.units if u.nbytes)
        #: where each unit lies: (which allocation, the address in it)
        self.where = {u.name: (int(u.address > 0), 0) if sides else (0, u.address) for u in plan.units}
        self.sizes = {u.name: u.nbytes if sides else plan.arena for u in plan.units}
        self.memory = [torch.empty(0, dtype=torch.uint8, device=run.device).untyped_storage() for _ in range(1 + sides)]
        self.bytes = {name: (self.memory[which], self.sizes[name]) for name, (which, _) in self.where.items()}

    def place(self, state: State, unit: str) -> Place:
        if self.shared and not self.places:
            self.memory[0] = self.shared.arena(self.plan.arena).untyped_storage()
        found = self.places.get(unit)
        if found is None or (
            found.resident and any(whole_of(state, bucket) is not whole for bucket, whole in found.resident)
        ):
            found = self.places[unit] = self._make(state, state.layout.by_name[unit])
        return found

    def lease(self, unit: str) -> Lease | None:
        """What a unit was lent by, if it has been gathered here."""
        place = self.places.get(unit)
        return place.lease if place else None

    def take(self, unit: str) -> bool:
        """Have the bytes for a unit, before it is gathered. Returns whether they are new: views come back to life.

        What lay there was released, and compute has waited for all that wrote it.
        """
        memory, size = self.bytes[unit]
        if self.shared:
            return False
        there = memory.nbytes()
        if there == size or (there > size and (self.plan.schedule.debug or not self.run.cuda)):
            return False
        memory.resize_(0)
        memory.resize_(size)
        return True

    def put(self, unit: str, whole: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Have a unit lie in its place, from these buckets, for residuals that point there, although the plan may have
        something else there now. Returns what puts that back."""
        memory, _ = self.bytes[unit]
        size, parts = memory.nbytes(), self.places[unit].parts
        there = [part.whole for part in parts]
        if size != self.sizes[unit]:  # the bytes of another one, which may go
            there = [torch.empty(0, dtype=torch.uint8, device=self.run.device).set_(memory)]
        kept = [some.clone() for some in there]
        self.take(unit)
        for part in parts:
            part.whole.copy_(whole[part.bucket.name])

        def undo() -> None:
            if memory.nbytes() != size:
                memory.resize_(0)
                memory.resize_(size)
            for some, was in zip(there, kept, strict=True):
                some.copy_(was)

        return undo

    def free(self) -> None:
        """Give all bytes back, when compute has waited for all that reads or writes them; in debug mode poison them.

        On the CPU they stay, so that reading weights after the step is wrong, but no crash.
        """
        if self.plan.schedule.debug:
            for place in self.places.values():
                place.poison(self.reading.spans if self.reading else ())
        elif self.run.cuda and not self.shared:
            for memory in self.memory:
                memory.resize_(0)
        if self.reading:
            self.reading.anything()

    def _make(self, state: State, unit: Unit) -> Place:
        planned = self.plan.by_name[unit.name]
        starts = {part.bucket: part.address - planned.address for part in planned.parts}
        views: dict[str, torch.Tensor] = {}
        parts, resident, aliases = [], [], []
        for bucket in unit.buckets:
            if bucket.name in starts:
                memory, address = self.where[unit.name]
                whole = torch.empty(0, dtype=bucket.compute, device=self.run.device)
                at = (address + starts[bucket.name]) // bucket.compute.itemsize
                whole.set_(self.memory[memory], at, (bucket.numel,), (1,))
                parts.append(self._part(state, bucket, whole))
            else:
                kept = whole_of(state, bucket)
                assert kept is not None
                whole = kept
                resident.append((bucket, whole))
            aliases.append(alias_of(whole))
            views |= leaves_of(bucket, aliases[-1])
        weights = {key: views[path] for key, path in zip(unit.keys, unit.paths, strict=True)}
        return Place(Lease(unit.name, weights), tuple(parts), tuple(resident), aliases)

    def _part(self, state: State, bucket: Bucket, whole: torch.Tensor) -> Part:
        start, stop = read(state, bucket).span()
        way = records(bucket, self.run.position, "mean", self.traits).unshard
        steps = tuple((one, whole[at : at + size]) for _, (one,), at, size in way.steps)
        pull = self.copies.pull(bucket, whole) if self.copies else None
        return Part(bucket, whole, whole[start:stop], () if pull else steps, pull, bool(self.windows))
