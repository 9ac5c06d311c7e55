"""Arena: the bytes in which gathered units lie at planned addresses.

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

from collections.abc import Callable, Mapping

import torch

from .._common.device import keeps_released
from .._common.record import check_kinds
from .._nn.packed_weight import PackedWeight
from .._plan.layout import Bucket, Unit
from .._plan.plan import Plan
from .._plan.records import records
from .._runtime.runtime import Runtime
from .._storage.place import BucketPlace, Place
from .._storage.weights import Loan, Stored, alias_of, lent_leaves, own_of, read
from .carrier import Carrier

__all__ = ["Arena"]


class Arena:
    """The bytes, and a `Place` for each unit, made when it is first used."""

    def __init__(self, run: Runtime, plan: Plan, carrier: Carrier) -> None:
        self.run = run
        self.plan = plan
        self.carrier = carrier
        self.stays = carrier.keeps_arena  # whether the bytes are the transport's, which stay
        self.kept = keeps_released(run.device)
        self.places: dict[str, Place] = {}
        sides = not self.stays and all(u.address in (0, plan.arena - u.nbytes) for u in plan.units if u.nbytes)
        #: where each unit lies: (which allocation, the address in it)
        self.where = {u.name: (int(u.address > 0), 0) if sides else (0, u.address) for u in plan.units}
        self.sizes = {u.name: u.nbytes if sides else plan.arena for u in plan.units}
        self.memory = [torch.empty(0, dtype=torch.uint8, device=run.device).untyped_storage() for _ in range(1 + sides)]
        self.bytes = {name: (self.memory[which], self.sizes[name]) for name, (which, _) in self.where.items()}

    def place(self, state: Stored, unit: str) -> Place:
        if self.stays and not self.places:
            self.memory[0] = self.carrier.arena(self.plan.arena).untyped_storage()
        found = self.places.get(unit)
        if (
            found is None
            or (
                found.resident
                and any(own_of(state, b, self.plan.schedule.debug) is not whole for b, whole in found.resident)
            )
            or (found.scales and any(state.scales[name] is not scale for name, scale in found.scales))
        ):
            found = self.places[unit] = self._make(state, self.carrier.layout.by_name[unit])
        return found

    def loan(self, unit: str) -> Loan | None:
        """What a unit was lent by, if it has been gathered here."""
        place = self.places.get(unit)
        return place.loan if place else None

    def allocate(self, unit: str) -> bool:
        """Have the bytes for a unit, before it is gathered. Returns whether they are new: views come back to life.

        What lay there was released, and compute has waited for all that wrote it.
        """
        memory, size = self.bytes[unit]
        if self.stays:
            return False
        there = memory.nbytes()
        if there == size or (there > size and (self.plan.schedule.debug or self.kept)):
            return False
        memory.resize_(0)
        memory.resize_(size)
        return True

    def overwrite(self, unit: str, whole: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Have a unit lie in its place, from these buckets, for residuals that point there, although the plan may have
        something else there now. Returns what puts that back."""
        memory, _ = self.bytes[unit]
        size, parts = memory.nbytes(), self.places[unit].parts
        there = [part.whole for part in parts]
        if size != self.sizes[unit]:  # the bytes of another one, which may go
            there = [torch.empty(0, dtype=torch.uint8, device=self.run.device).set_(memory)]
        kept = [some.clone() for some in there]
        self.allocate(unit)
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
                place.poison(self.carrier.spared())
        elif not (self.kept or self.stays):
            for memory in self.memory:
                memory.resize_(0)
        self.carrier.step_begins()

    def _make(self, state: Stored, unit: Unit) -> Place:
        planned = self.plan.by_name[unit.name]
        starts = {part.bucket: part.address - planned.address for part in planned.parts}
        views: dict[str, torch.Tensor] = {}
        parts, resident, aliases = [], [], []
        for bucket in unit.buckets:
            if bucket.name in starts:
                memory, address = self.where[unit.name]
                whole = torch.empty(0, dtype=bucket.gather, device=self.run.device)
                at = (address + starts[bucket.name]) // bucket.gather.itemsize
                whole.set_(self.memory[memory], at, (bucket.gathered.numel,), (1,))
                parts.append(self._part(state, bucket, whole))
            else:
                kept = own_of(state, bucket, self.plan.schedule.debug)
                assert kept is not None
                whole = kept
                resident.append((bucket, whole))
            aliases.append(alias_of(whole))
            views |= lent_leaves(bucket, aliases[-1], state.scales)
        # packed weights have counters of their own
        aliases += [view for view in views.values() if isinstance(view, PackedWeight)]
        weights = {key: views[path] for key, path in zip(unit.keys, unit.paths, strict=True)}
        scales = tuple((b.name, state.scales[b.name]) for b in unit.buckets if b.in_float8)
        return Place(Loan(unit.name, weights, aliases), tuple(parts), tuple(resident), aliases, scales)

    def _part(self, state: Stored, bucket: Bucket, whole: torch.Tensor) -> BucketPlace:
        start, stop = read(state, bucket).span()
        way = records(bucket, self.run.position, "mean", self.carrier.traits).unshard
        steps = tuple((one, whole[at : at + size]) for _, (one,), at, size in way.steps)
        steps = self.carrier.gathers(bucket, whole, steps)
        check_kinds(one for one, _ in steps)
        return BucketPlace(bucket, whole, whole[start:stop], steps)
