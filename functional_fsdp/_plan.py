"""Plan: when each unit is gathered, how long it lives, and where. Pure: a layout and a schedule in, integers out.

A plan is a cyclic program of uses. Three units in the default order, at depth 1 (`g` gathered meanwhile, `U` used):

    use      0    1    2    3    4    5
    unit     a    b    c    c    b    a
    a        gU                  g    U      gathered twice, to one address: residuals point at it
    b        g    U         g    U
    c             g    U----U                stays gathered: its bytes would not be free in between anyway

While a use computes, the gathers of the next `prefetch` uses are in flight; a unit's bytes are live from the use whose
`unshard` starts its gather to the use whose `release` ends its life, both included. Weights change in `step`, so no
gather runs past the last use. Gradients leave through staging, sized by what travels: a reduction holds its staging
until the next but one needs some, so that compute waits for a reduction only when two more are due.

    schedule + layout -> lives of each unit (simulated) -> addresses (_pack.py) -> Plan (a value: hash, print, draw)
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from os import PathLike
from typing import Any

from ._errors import ScheduleError, SpecError
from ._layout import Bucket, Layout, aligned
from ._pack import Interval, pack
from ._schedule import Schedule, means
from ._tree import bytes_text, table

__all__ = ["Part", "Plan", "PlannedUnit", "Reduction", "Use", "plan"]

ALIGN = 512  # bytes: every bucket in the arena and in staging starts at a multiple
SLOTS = 2  # reductions that may hold staging at once


@dataclass(frozen=True)
class Part:
    """A bucket's place: `arena[address : address + nbytes]`, or the same of staging (bytes)."""

    bucket: str
    address: int
    nbytes: int


@dataclass(frozen=True)
class Use:
    """One use of a unit; uses are counted from 0.

    Attributes:
        start: the use whose `unshard` starts this one's gather, its own at the latest; None: nothing to gather.
        end: the use after which the bytes are free: this one, or a later one if the unit stays gathered.
        reduces: its gradient is complete here and is reduced.
    """

    unit: str
    start: int | None
    end: int
    reduces: bool


@dataclass(frozen=True)
class PlannedUnit:
    """A unit's place in the arena (bytes) and its lives: (first use, last use) of each, both included.

    A unit without `parts` is resident: its weights are not sharded, so nothing is gathered.
    """

    name: str
    address: int
    nbytes: int
    parts: tuple[Part, ...]
    uses: tuple[int, ...]
    lives: tuple[Interval, ...]

    @property
    def gathers(self) -> int:
        """Gathers a step."""
        return len(self.lives)

    @property
    def kept(self) -> bool:
        """Whether it stays gathered from one use to another."""
        return 0 < len(self.lives) < len(self.uses)


@dataclass(frozen=True)
class Reduction:
    """A reduction's staging: bytes from `use` up to and without the use `until` (the number of uses: until `step`)."""

    unit: str
    use: int
    until: int
    address: int
    nbytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, repr=False)
class Plan:
    """A schedule worked out on a layout. Frozen, equal by value; printing it gives a table.

    Attributes:
        uses: the program, one entry a use; it is cyclic.
        units: every unit of the program in order of first use, with its address and lives.
        reductions: in the order in which they are issued.
        arena: bytes of the arena; `bound`: the largest sum of live bytes, which no packing can beat.
        staging: bytes of gradient staging.
        rule: how the addresses were found.
    """

    schedule: Schedule
    uses: tuple[Use, ...]
    units: tuple[PlannedUnit, ...]
    reductions: tuple[Reduction, ...]
    arena: int
    bound: int
    staging: int
    rule: str

    def __hash__(self) -> int:
        return hash(self.hash)

    @cached_property
    def hash(self) -> str:
        """A fingerprint (16 hex digits) of the program and of every address, to compare between ranks."""
        return hashlib.sha256(repr((self.schedule, self.uses, self.units, self.reductions)).encode()).hexdigest()[:16]

    @property
    def excess(self) -> float:
        """By how many percent the arena exceeds the lower bound."""
        return 100 * (self.arena / self.bound - 1) if self.bound else 0.0

    @cached_property
    def by_name(self) -> dict[str, PlannedUnit]:
        return {unit.name: unit for unit in self.units}

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """For each use, the uses whose gathers its `unshard` starts, in the order of issue: its own first."""
        found: list[list[int]] = [[] for _ in self.uses]
        for k, use in enumerate(self.uses):
            if use.start is not None:
                found[use.start].append(k)
        return tuple(map(tuple, found))

    @cached_property
    def sharing(self) -> dict[str, tuple[str, ...]]:
        """For each unit, the others with which it shares bytes: their releases come before its gather."""
        found: dict[str, list[str]] = {unit.name: [] for unit in self.units}
        open_: list[PlannedUnit] = []
        for unit in sorted((u for u in self.units if u.nbytes), key=lambda u: u.address):
            open_ = [other for other in open_ if other.address + other.nbytes > unit.address]
            for other in open_:
                found[other.name].append(unit.name)
                found[unit.name].append(other.name)
            open_.append(unit)
        return {name: tuple(others) for name, others in found.items()}

    def next(self, cursor: int, unit: str) -> int:
        """Which use it is when `unit` is used while use number `cursor` is expected: that one, or else the next of this
        unit, going round (evaluation between steps, several microbatches). What comes after use k is `(k + 1) % uses`.

        Raises:
            ScheduleError: the unit is not part of the program.

        >>> program = Plan(Schedule(("a", "b", "a")), (), (PlannedUnit("a", 0, 1, (), (0, 2), ()),), (), 1, 1, 0, "")
        >>> program.next(0, "a"), program.next(1, "a"), program.next(3, "a")
        (0, 2, 0)
        """
        planned = self.by_name.get(unit)
        if planned is None:
            names = ", ".join(repr(u.name) for u in self.units[:4])
            raise ScheduleError(
                f"the unit {unit!r} is not one of the {len(self.units)} units of this plan ({names}, ...). "
                f"Add its uses to Schedule(order=...), or leave the order to the units' own."
            )
        at = bisect_left(planned.uses, cursor)
        return planned.uses[at if at < len(planned.uses) else 0]

    def live(self, use: int) -> tuple[str, ...]:
        """The units whose bytes are live during a use: gathered, or being gathered."""
        return tuple(u.name for u in self.units if any(first <= use <= last for first, last in u.lives))

    def __repr__(self) -> str:
        reduces = Counter(reduction.unit for reduction in self.reductions)
        rows = []
        for unit in self.units:
            lives = ", ".join(f"{a}–{b}" if a < b else str(a) for a, b in unit.lives)
            place = (bytes_text(unit.nbytes), f"{unit.address:,}", lives) if unit.parts else ("resident", "-", "-")
            kept = "yes" if unit.kept else "-"
            rows.append((unit.name, *place, unit.gathers or "-", kept, reduces.get(unit.name) or "-"))
        depth = self.schedule.prefetch
        return "\n".join(
            (
                table(("unit", "bytes", "address", "gathered in uses", "gathers", "kept", "reduces"), rows),
                f"{len(self.uses)} uses, {sum(u.gathers for u in self.units)} gathers, {len(self.reductions)} "
                f"reductions a step; prefetch {depth if isinstance(depth, int) else dict(depth)}"
                + (", debug" if self.schedule.debug else ""),
                f"arena {bytes_text(self.arena)} ({self.rule}; lower bound {bytes_text(self.bound)}, "
                f"{self.excess:+.1f} %), staging {bytes_text(self.staging)}",
            )
        )

    def timeline(
        self,
        path: str | PathLike[str],
        *,
        gather: float,
        reduce: float,
        compute: float | Mapping[str, float],
        backward: float = 2.0,
    ) -> Any:
        """Draw the predicted step as a PNG: lanes over time above, arena addresses over time below. Needs no GPU.

        Args:
            gather, reduce: bandwidths, in bytes of the whole unit (of its staging) a second.
            compute: seconds of a unit's forward, for each unit or for all.
            backward: seconds of a backward for each second of the forward.

        Returns:
            The `Timeline` that was drawn: its spans in seconds, and how much of each lane compute hides.

        Raises:
            ImportError: matplotlib is missing: `pip install "functional-fsdp[plots]"`.
        """
        from ._draw import draw, predict

        timeline = predict(self, gather=gather, reduce=reduce, compute=compute, backward=backward)
        draw(self, timeline, path)
        return timeline


def plan(layout: Layout, schedule: Schedule | None = None) -> Plan:
    """Work a schedule out on a layout: lives, addresses, staging. Needs no ranks and no device.

    Raises:
        SpecError: the order, `prefetch` or `keep` names what the layout does not have.

    >>> from ._layout import LeafInfo, plan_layout
    >>> from ._spec import Spec
    >>> import torch
    >>> leaves = [LeafInfo(f"{name}.w", (1024,), torch.float32) for name in "abc"]
    >>> print(plan(plan_layout(leaves, Spec({"data": 4}))))
    unit    bytes  address  gathered in uses  gathers  kept  reduces
    ----  -------  -------  ----------------  -------  ----  -------
    a     4.0 KiB        0            0, 4–5        2  -           1
    b     4.0 KiB    4,096          0–1, 3–4        2  -           1
    c     4.0 KiB        0               1–3        1  yes         1
    6 uses, 5 gathers, 3 reductions a step; prefetch 1
    arena 8.0 KiB (two sides; lower bound 8.0 KiB, +0.0 %), staging 8.0 KiB
    """
    schedule = schedule or Schedule()
    order = _order(layout, schedule)
    where: dict[str, list[int]] = {}
    for k, name in enumerate(order):
        where.setdefault(name, []).append(k)
    buckets = {name: [b for b in layout.by_name[name].buckets if b.placement.weights] for name in where}
    sizes = {name: sum(map(_nbytes, buckets[name])) for name in where}
    kept = _kept(schedule, order, sizes)
    held = _simulate(schedule, order, sizes, kept)

    gathered = [name for name in where if sizes[name]]
    lives = {name: tuple((start, last) for start, _, last in held[name]) for name in where}
    long = [i for i, name in enumerate(gathered) if name in kept]
    packing = pack([sizes[name] for name in gathered], [lives[name] for name in gathered], long)
    address = dict(zip(gathered, packing.addresses, strict=True))
    units = tuple(
        PlannedUnit(
            name, at := address.get(name, 0), sizes[name], _parts(buckets[name], at), tuple(where[name]), lives[name]
        )
        for name in where
    )
    reductions, staging = _stage(layout, order)
    starts = {first: start for gathers in held.values() for start, first, _ in gathers}
    ends = {k: last for name in where for _, first, last in held[name] for k in where[name] if first <= k <= last}
    reducing = {reduction.use for reduction in reductions}
    uses = tuple(Use(name, starts.get(k), ends.get(k, k), k in reducing) for k, name in enumerate(order))
    return Plan(schedule, uses, units, reductions, packing.total, packing.bound, staging, packing.rule)


def _order(layout: Layout, schedule: Schedule) -> tuple[str, ...]:
    """The order of use. Every name that the schedule mentions is checked here."""
    names = tuple(layout.by_name)
    order = schedule.order or (*names, *reversed(names))
    keep = schedule.keep if isinstance(schedule.keep, tuple) else ()
    depths = () if isinstance(schedule.prefetch, int) else tuple(name for name, _ in schedule.prefetch)
    for what, wanted in (("order", set(order) - set(names)), ("keep", keep), ("prefetch", depths)):
        for name in wanted:
            if what == "order" or (name != "*" and not any(means(name, unit) for unit in names)):
                raise SpecError(
                    f"Schedule({what}): {name!r} {'is not a unit' if what == 'order' else 'matches no unit'} of this "
                    f"layout. Its {len(names)} units are {', '.join(map(repr, names[:4]))}"
                    f"{', ...' if len(names) > 4 else ''}. Use one of them, or leave {what} out."
                )
    return order


def _nbytes(bucket: Bucket) -> int:
    """Bytes of the whole bucket in the compute dtype (gathered, or on the wire), aligned."""
    return aligned(bucket.numel * bucket.compute.itemsize, ALIGN)


def _parts(buckets: Sequence[Bucket], address: int) -> tuple[Part, ...]:
    offsets = accumulate(map(_nbytes, buckets), initial=address)
    return tuple(Part(b.name, at, b.numel * b.compute.itemsize) for b, at in zip(buckets, offsets, strict=False))


def _simulate(
    schedule: Schedule, order: Sequence[str], sizes: Mapping[str, int], kept: Collection[str]
) -> dict[str, list[tuple[int, int, int]]]:
    """Each unit's gathers as (use that starts it, first use, last use). Resident units' uses do not count as ahead."""
    found: dict[str, list[tuple[int, int, int]]] = {name: [] for name in sizes}
    moments = [k for k, name in enumerate(order) if sizes[name]]
    before: dict[str, int] = {}
    for i, k in enumerate(moments):
        name = order[k]
        begin = max(0, i - schedule.depth(name))
        if name in before:
            begin = max(begin, before[name] + 1)  # its bytes are in use until then
            idle = begin > before[name] + 1
            if name in kept or not (idle or isinstance(schedule.keep, tuple)):
                start, first, _ = found[name][-1]
                found[name][-1] = (start, first, k)
                before[name] = i
                continue
        found[name].append((moments[begin], k, k))
        before[name] = i
    return found


def _kept(schedule: Schedule, order: Sequence[str], sizes: Mapping[str, int]) -> set[str]:
    """The units that stay gathered from first use to last, beside those that do so anyway."""
    keep = schedule.keep
    if keep is None or keep == "all":
        return set(sizes) if keep else set()
    if isinstance(keep, tuple):
        return {name for name in sizes if any(means(pattern, name) for pattern in keep)}
    saves: dict[int, list[str]] = {}
    for name, gathers in _simulate(schedule, order, sizes, ()).items():
        if len(gathers) > 1:
            saves.setdefault(len(gathers) - 1, []).append(name)
    # Among units that save as many gathers each, the smallest first (of equal ones the last, whose lives are short), so
    # it remains to choose how many of each kind: gathers saved -> (fewest bytes, those units).
    best: dict[int, tuple[int, tuple[str, ...]]] = {0: (0, ())}
    for save, names in saves.items():
        names.reverse()
        names.sort(key=lambda name: sizes[name])
        costs = list(accumulate((sizes[name] for name in names), initial=0))
        grown: dict[int, tuple[int, tuple[str, ...]]] = {}
        for saved, (spent, chosen) in best.items():
            for n in range(bisect_right(costs, keep - spent)):
                total = saved + n * save
                if total not in grown or spent + costs[n] < grown[total][0]:
                    grown[total] = (spent + costs[n], (*chosen, *names[:n]))
        best = grown
    return set(best[max(best)][1])


def _stage(layout: Layout, order: Sequence[str]) -> tuple[tuple[Reduction, ...], int]:
    """Reductions at the last use of every trainable unit in each pass, and their staging, in the wire's dtype.

    An explicit order of several equal passes, each of which uses units twice, is one of several microbatches.
    """
    count = len(order)
    lengths = (n for n in range(1, count) if count % n == 0 and order[n:] == order[:-n] and len(set(order[:n])) < n)
    length = next(lengths, count)
    trains = {name: [b for b in layout.by_name[name].buckets if b.trainable] for name in dict.fromkeys(order)}
    last = {name: k for k, name in enumerate(order[:length]) if sum(map(_nbytes, trains[name]))}
    uses = [first + k for first in range(0, count, length) for k in sorted(last.values())]
    until = [*uses[SLOTS:], *[count] * SLOTS][: len(uses)]
    sizes = [sum(map(_nbytes, trains[order[k]])) for k in uses]
    packing = pack(sizes, [[(k, end - 1)] for k, end in zip(uses, until, strict=True)])
    placed = zip(uses, until, packing.addresses, sizes, strict=True)
    return tuple(
        Reduction(order[k], k, end, at, size, _parts(trains[order[k]], at)) for k, end, at, size in placed
    ), packing.total
