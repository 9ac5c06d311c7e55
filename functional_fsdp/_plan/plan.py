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

    schedule + layout -> uses (`program`) -> lives (`lives_of`) -> addresses (`pack`) -> Plan (hash, print)
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from .._common.calls import provided
from .._common.errors import expect
from .._spec.schedule import Schedule, named, schedule_of
from .layout import STAGED, Bucket, Layout, aligned
from .pack import Interval, pack
from .program import Program, program
from .route import Partial, Replicated, states_of

_plan_table = provided("look.plan_table")
TRIED = 1 << 20  # sets of units that are tried for a budget; of more kinds of units all or none stay


class Gather(NamedTuple):
    """One gather of a unit: its bytes are live from the use `start` to the use `last`, both included.

    Attributes:
        start: the use whose `unshard` starts it.
        first: the use that waits for it.
        last: the use whose `release` frees the bytes.
    """

    unit: str
    start: int
    first: int
    last: int


def lives_of(
    schedule: Schedule, program: Program, sizes: Mapping[str, int], kept: Collection[str]
) -> dict[str, list[Gather]]:
    """Each unit's gathers, those of `kept` once. A group counts as one use ahead, resident units do not count."""
    found: dict[str, list[Gather]] = {name: [] for name in sizes}
    depths = schedule.depths([*sizes])
    order = program.order
    moments = [(a, b) for a, b in dict.fromkeys(program.groups) if any(sizes[name] for name in order[a : b + 1])]
    before: dict[str, int] = {}
    for i, (first, end) in enumerate(moments):
        for k in range(first, end + 1):
            name = order[k]
            if not sizes[name]:
                continue
            begin = max(0, i - depths[name])
            if name in before:
                begin = max(begin, before[name] + 1)  # its bytes are in use until then
                idle = begin > before[name] + 1
                if name in kept or not (idle or isinstance(schedule.keep, tuple)):
                    found[name][-1] = found[name][-1]._replace(last=end)
                    before[name] = i
                    continue
            found[name].append(Gather(name, moments[begin][0], k, end))
            before[name] = i
    return found


def choose_kept(
    schedule: Schedule, program: Program, sizes: Mapping[str, int], frozen: Mapping[str, int] | None = None
) -> set[str]:
    """The units that stay gathered from first use to last, beside those that do so anyway. `frozen`: of their sizes,
    bytes of leaves that do not train."""
    keep = schedule.keep
    if keep == "frozen":
        return {name for name, nbytes in (frozen or {}).items() if 2 * nbytes > sizes[name]}
    if keep is None or keep == "all":
        return set(sizes) if keep else set()
    if isinstance(keep, tuple):
        return named(keep, [*sizes])
    saves: dict[int, list[str]] = {}
    for name, gathers in lives_of(schedule, program, sizes, ()).items():
        if len(gathers) > 1:
            saves.setdefault(len(gathers) - 1, []).append(name)
    # Among units that save as many gathers each, the smallest first (of equal ones the last, whose lives are short), so
    # it remains to choose how many of each kind: gathers saved -> (fewest bytes, those units).
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for save, names in saves.items():
        names.reverse()
        names.sort(key=lambda name: sizes[name])
        costs = list(accumulate((sizes[name] for name in names), initial=0))
        grown: dict[int, tuple[int, tuple[int, ...]]] = {}
        few = len(best) * len(costs) <= TRIED
        for saved, (spent, counts) in best.items():
            most = bisect_right(costs, keep - spent)
            for n in range(most) if few else (0, most - 1):
                total = saved + n * save
                if total not in grown or spent + costs[n] < grown[total][0]:
                    grown[total] = (spent + costs[n], (*counts, n))
        best = grown
    _, counts = best[max(best)]
    return {name for names, n in zip(saves.values(), counts, strict=True) for name in names[:n]}


ALIGN = STAGED  # bytes: every bucket in the arena and in staging starts at a multiple
REDUCTIONS_AT_ONCE = 2  # reductions that may be under way at once


@dataclass(frozen=True)
class Extent:
    """A bucket's place: `arena[address : address + nbytes]`, or the same of staging (bytes)."""

    bucket: str
    address: int
    nbytes: int


@dataclass(frozen=True)
class Use:
    """One use of a unit; uses are counted from 0.

    Attributes:
        start: the use whose `unshard` starts this one's gather, its own at the latest; None: nothing to gather.
        end: the use after which the bytes are free: the last one of its group, or a later one if the unit stays
            gathered.
        group: the first and the last of the uses at once with it, itself included; it alone: `(k, k)`.
        reduces: the gradient of this unit is complete here and is reduced. It may also be complete at another unit's
            use, if it is not used in the backward: `Plan.reductions` has them all.
    """

    unit: str
    start: int | None
    end: int
    group: Interval
    reduces: bool


@dataclass(frozen=True)
class PlannedUnit:
    """A unit's place in the arena (bytes) and its lives: (first use, last use) during which its bytes are taken.

    A unit without `parts` is resident: its weights are not sharded, so nothing is gathered.
    """

    name: str
    address: int
    nbytes: int
    parts: tuple[Extent, ...]
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
    """A reduction's staging: bytes from `use` on. The next but one may take them, at `until` (all uses: nobody does).

    Where a transport keeps the staging, `address` is where its bytes are. With collectives each reduction allocates its
    own, and the plan counts them. `until` is for peaks, prints and tests: `Staging.reduce` waits by itself.

    Several may fall on one `use`, of units that are used in the forward only. No two in a row share bytes, unless the
    plan has one slot: then all lie on the same, and the next one may take them. `received`:
    bytes that an exact sum takes beside them, which come and go with it whatever the transport.
    """

    unit: str
    use: int
    until: int
    address: int
    nbytes: int
    parts: tuple[Extent, ...]
    received: int = 0


@dataclass(frozen=True, repr=False)
class Plan:
    """A schedule worked out on a layout. Frozen, equal by value; printing it gives a table.

    Attributes:
        uses: the program, one entry a use; it is cyclic.
        units: every unit of the program in order of first use, with its address and lives.
        reductions: in the order in which they are issued.
        arena: bytes of the arena; `bound`: the largest sum of live bytes, which no packing can beat.
        staging: bytes of gradient staging; `received`: the most that exact sums take beside it at once.
        rule: how the addresses were found.
        at_once: every reduction makes its main gradients whole, so that it is the same in each microbatch.
        forward: how many uses the forward has, if that is known; None: `turn` is a guess from the order.
        slots: how many reductions in a row have staging of their own.
        activations: (path of a module, what becomes of what it saves), where a transform has chosen that: `T.budget`.
    """

    schedule: Schedule
    uses: tuple[Use, ...]
    units: tuple[PlannedUnit, ...]
    reductions: tuple[Reduction, ...]
    arena: int
    bound: int
    staging: int
    rule: str
    at_once: bool = True
    forward: int | None = None
    slots: int = REDUCTIONS_AT_ONCE
    activations: tuple[tuple[str, str], ...] = ()

    def __hash__(self) -> int:
        return hash(self.hash)

    @cached_property
    def hash(self) -> str:
        """A fingerprint (16 hex digits) of the program and of every address, to compare between ranks."""
        parts = (self.schedule, self.uses, self.units, self.reductions, *([self.activations] * bool(self.activations)))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @property
    def excess(self) -> float:
        """By how many percent the arena exceeds the lower bound."""
        return 100 * (self.arena / self.bound - 1) if self.bound else 0.0

    @cached_property
    def by_name(self) -> dict[str, PlannedUnit]:
        return {unit.name: unit for unit in self.units}

    @cached_property
    def groups(self) -> tuple[Interval, ...]:
        """The first and the last use of each call."""
        return tuple(dict.fromkeys(use.group for use in self.uses))

    @cached_property
    def index(self) -> dict[str, int]:
        """The number of each unit."""
        return {unit.name: i for i, unit in enumerate(self.units)}

    @cached_property
    def turn(self) -> int:
        """Uses of the forward, which is what evaluation uses: up to the first use of the last new unit and, where tied
        units follow, up to where the backward begins."""
        if self.forward is not None:
            return self.forward
        calls = tuple(tuple(use.unit for use in self.uses[a : b + 1]) for a, b in self.groups)
        return Program(calls, once=self.schedule.order is None).turn

    @cached_property
    def gathers(self) -> tuple[Gather, ...]:
        """Every gather in order of issue: by the use that starts it, then by the use that waits for it."""
        found = (Gather(use.unit, use.start, k, use.end) for k, use in enumerate(self.uses) if use.start is not None)
        return tuple(sorted(found, key=lambda gather: (gather.start, gather.first)))

    @cached_property
    def due(self) -> tuple[int, ...]:
        """For each use, how many of `gathers` its `unshard` and those before it start."""
        return tuple(bisect_right(self.gathers, k, key=lambda gather: gather.start) for k in range(len(self.uses)))

    @cached_property
    def opens(self) -> tuple[bool, ...]:
        """For each use whether it may be a unit's first one in a pass: before the turn, or after its reduction."""
        done: set[str] = set()
        found = []
        for k, use in enumerate(self.uses):
            found.append(k < self.turn or use.unit in done)
            done.discard(use.unit)
            if use.reduces:
                done.add(use.unit)
        return tuple(found)

    @cached_property
    def last_open(self) -> int:
        """The last use that may be a unit's first one; 0 where there is none."""
        return max((k for k, opens in enumerate(self.opens) if opens), default=0)

    @cached_property
    def settles(self) -> frozenset[int]:
        """The last uses of units without gradients: whoever has come there owes nothing more."""
        trained = {reduction.unit for reduction in self.reductions}
        return frozenset(unit.uses[-1] for unit in self.units if unit.name not in trained)

    def overlap(self, one: str, other: str) -> bool:
        """Whether two units share bytes: the release of one comes before the gather of the other."""
        if one == other:
            return False
        a, b = self.by_name[one], self.by_name[other]
        return a.address < b.address + b.nbytes and b.address < a.address + a.nbytes and min(a.nbytes, b.nbytes) > 0

    @cached_property
    def crowded(self) -> frozenset[str]:
        """The units that share bytes with any other."""
        found: set[str] = set()
        above: PlannedUnit | None = None  # of those seen, that which ends last
        for unit in sorted((u for u in self.units if u.nbytes), key=lambda u: u.address):
            if above is not None and above.address + above.nbytes > unit.address:
                found |= {above.name, unit.name}
            if above is None or unit.address + unit.nbytes > above.address + above.nbytes:
                above = unit
        return frozenset(found)

    @cached_property
    def crowded_bits(self) -> int:
        """The same, a bit for the number of each unit."""
        return sum(1 << self.index[name] for name in self.crowded)

    @cached_property
    def crowded_gathers(self) -> int:
        """The gathers of these, a bit for each."""
        return sum(1 << i for i, gather in enumerate(self.gathers) if gather.unit in self.crowded)

    @cached_property
    def gathers_of(self) -> dict[str, int]:
        """The gathers of each unit, a bit for each."""
        found = dict.fromkeys(self.by_name, 0)
        for i, gather in enumerate(self.gathers):
            found[gather.unit] |= 1 << i
        return found

    @cached_property
    def reductions_of(self) -> dict[str, list[int]]:
        """The reductions of each unit that has any."""
        found: dict[str, list[int]] = {}
        for i, reduction in enumerate(self.reductions):
            found.setdefault(reduction.unit, []).append(i)
        return found

    @cached_property
    def stays(self) -> frozenset[str]:
        """The units that are gathered once a step, however many passes there are: the schedule keeps them, and nothing
        else lies where they do. Not with `debug`, where what is released is to be good no more."""
        if self.schedule.keep is None or self.schedule.debug:
            return frozenset()
        return frozenset(unit.name for unit in self.units if unit.gathers == 1 and unit.name not in self.crowded)

    @cached_property
    def received(self) -> int:
        sizes = [reduction.received for reduction in self.reductions]
        return max((sum(sizes[i : i + REDUCTIONS_AT_ONCE]) for i in range(len(sizes))), default=0)

    def live(self, use: int) -> tuple[str, ...]:
        """The units whose bytes are live during a use: gathered, or being gathered."""
        return tuple(u.name for u in self.units if any(first <= use <= last for first, last in u.lives))

    def __repr__(self) -> str:
        return _plan_table(self)


def make_plan(
    layout: Layout, schedule: Schedule | None = None, forward: int | None = None, slots: int = REDUCTIONS_AT_ONCE
) -> Plan:
    """Work a schedule out on a layout: lives, addresses, staging. Needs no ranks and no device.

    Args:
        forward: how many uses of the order are the forward, if that is known.
        slots: how many reductions in a row have staging of their own: 2, or 1 where one lane carries them out in order
            and the staging stays, as with "copy_engine" and "symmetric" on GPUs.

    Raises:
        SpecError: the order, `prefetch` or `keep` names what the layout does not have.
        ScheduleError: the order is "recorded": it is not known before the first step.

    >>> import torch
    >>> import functional_fsdp as fsdp
    >>> params = {name: {"w": torch.empty(1024)} for name in "abc"}
    >>> print(fsdp.make_plan(fsdp.make_layout(params, fsdp.Spec({"data": 4}))))
    unit    bytes  address  gathered in uses  gathers  kept  reduces
    ----  -------  -------  ----------------  -------  ----  -------
    a     4.0 KiB        0            0, 4–5        2  -           1
    b     4.0 KiB    4,096          0–1, 3–4        2  -           1
    c     4.0 KiB        0               1–3        1  yes         1
    6 uses, 5 gathers, 3 reductions a step; prefetch 1
    arena 8.0 KiB (two sides; lower bound 8.0 KiB, +0.0 %), staging 8.0 KiB
    """
    expect("make_plan(layout)", layout, Layout, "what make_layout gives, or state.layout")
    schedule = schedule_of("make_plan(schedule)", schedule)
    found = program(layout, schedule)
    where = found.uses
    buckets = {name: [b for b in layout.by_name[name].buckets if b.gathers(schedule.debug)] for name in where}
    sizes = {name: _total(b.nbytes_gathered for b in buckets[name]) for name in where}
    frozen = {}
    if schedule.keep == "frozen":
        frozen = {name: _total(b.nbytes_gathered for b in buckets[name] if not b.trainable) for name in where}
    kept = choose_kept(schedule, found, sizes, frozen)
    held = lives_of(schedule, found, sizes, kept)

    gathered = [name for name in where if sizes[name]]
    lives = {name: tuple((gather.start, gather.last) for gather in held[name]) for name in where}
    long = [i for i, name in enumerate(gathered) if name in kept]
    packing = pack([sizes[name] for name in gathered], [lives[name] for name in gathered], long)
    address = dict(zip(gathered, packing.addresses, strict=True))
    units = []
    for name in where:
        at = address.get(name, 0)
        parts = _parts(buckets[name], at, [b.nbytes_gathered for b in buckets[name]])
        units.append(PlannedUnit(name, at, sizes[name], parts, tuple(where[name]), lives[name]))
    reductions, staging = _plan_reductions(layout, found, forward, slots)
    starts = {gather.first: gather.start for gathers in held.values() for gather in gathers}
    ends = {k: g.last for name in where for g in held[name] for k in where[name] if g.first <= k <= g.last}
    reducing = {(reduction.unit, reduction.use) for reduction in reductions}
    uses = tuple(
        Use(name, starts.get(k), ends.get(k, k), found.groups[k], (name, k) in reducing)
        for k, name in enumerate(found.order)
    )
    ends_of = (("grads", Partial), ("main", Replicated))
    at_once = all(len({states_of(bucket, *end) for end in ends_of}) == 1 for bucket in layout.trainable.values())
    return Plan(
        schedule, uses, tuple(units), reductions, packing.total, packing.bound, staging, packing.rule, at_once,
        forward, slots,
    )  # fmt: skip


def first_plan(layout: Layout, schedule: Schedule, slots: int = REDUCTIONS_AT_ONCE) -> Plan:
    """What is followed until the order of use is known."""
    return make_plan(layout, schedule.ordered(None) if schedule.order == "recorded" else schedule, slots=slots)


def _total(sizes: Iterable[int]) -> int:
    """Bytes of buckets of these sizes in a row."""
    return sum(aligned(size, ALIGN) for size in sizes)


def _parts(buckets: Sequence[Bucket], address: int, sizes: Sequence[int]) -> tuple[Extent, ...]:
    """Where each of them lies, from this address on."""
    offsets = accumulate((aligned(size, ALIGN) for size in sizes), initial=address)
    return tuple(Extent(b.name, at, size) for b, at, size in zip(buckets, offsets, sizes, strict=False))


def _plan_reductions(
    layout: Layout, program: Program, forward: int | None, slots: int
) -> tuple[tuple[Reduction, ...], int]:
    """A reduction of every trainable unit wherever its gradient is complete, and their staging, in the wire's dtype."""
    trains = {name: [b for b in layout.by_name[name].buckets if b.trainable] for name in program.uses}
    nbytes = {name: _total(b.staged for b in buckets) for name, buckets in trains.items()}
    due = [(name, k) for name, k in program.completed(forward) if nbytes[name]]
    until = [*(k for _, k in due[slots:]), *[len(program.order)] * slots]
    sizes = [nbytes[name] for name, _ in due]
    # In order of issue, since uses may coincide. With two slots this is a chain of neighbours: even ones at the
    # bottom, odd ones at the top, and there is never a choice.
    packing = pack(sizes, [[(i, i + slots - 1)] for i in range(len(due))])
    placed = zip(due, until, packing.addresses, sizes, strict=False)
    beside = {name: _total(b.received for b in buckets) for name, buckets in trains.items()}
    return tuple(
        Reduction(name, k, end, at, size, _parts(trains[name], at, [b.staged for b in trains[name]]), beside[name])
        for (name, k), end, at, size in placed
    ), packing.total
