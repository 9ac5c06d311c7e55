"""What follows from a layout and a schedule, as integers: which bytes are live when, and where; and what is sent.

    schedule + layout ─▶ uses (`program`) ─▶ lives (`lives_of`) ─▶ addresses (`pack`) ─▶ `Plan`
                         reductions (`_plan_reductions`) ─▶ staging (`pack`) ───────────────┘
    bucket + placement ─▶ `Records`: the collectives of each verb

All is pure: no ranks, no device; every rank comes to the same. Part by part, in the order of the file:

`pack`: things of given sizes, live at given times, get addresses in one stretch of bytes. A thing keeps one address for
all its intervals. Two things that are ever live at once share no byte. Below, units 0 to 4 of a chain, each gathered
while the one before it is used, forward and backward; time runs to the right:

    top     +-----------------------------------------------+
            |     [  1  ][   3   ]     [   3   ][  1  ]     |  odd ones hang from the top
            |                                               |
            | [  0  ][   2   ][    4     ][   2   ][  0  ]  |  even ones stand on the bottom
    bottom  +-----------------------------------------------+

No more than two are ever live at once, one from each side, so the largest sum of two neighbours is enough: the lower
bound is met. The same holds wherever "ever live at once" can be two-coloured. Otherwise the best of these is taken:

| rule       | how                                                                 | bytes                          |
|------------|---------------------------------------------------------------------|--------------------------------|
| two sides  | one colour from the bottom, the other from the top                  | the lower bound, exactly       |
| with kept  | what is kept lies above, the rest as if it were alone               | that of the rest, plus kept    |
| slots      | one slot for each colour, as large as its largest                   | at most (depth + 1) × max      |
| first fit  | large ones first, lowest gap; then again, what stuck out first      | within a few % of the bound    |

Things that meet are looked at in pairs, up to `PAIRS` a thing. Where more meet, those that are kept, which nearly all
others meet, are stacked above at once, so that only the rest is looked at; where the rest has more pairs, too, nothing
shares a byte.

`Program`: which units are used one after another, and at which use each gradient is complete. The default order, where
`a` is tied to a leaf between `c` and `d` (and so used there again):

    use      0    1    2    3    4  |  5    6    7    8    9
    unit     a    b    c    a    d  |  d    a    c    b    a        backward is forward reversed
    reduces                            d         c    b    a        each at its last use

A unit whose backward needs no weights may be used in the forward only, as `a` here. Its gradient is complete when the
backward is through with all that came after it:

    use      0    1    2 |  3    4
    unit     a    b    c |  c    b
    reduces                 c    b, a

`KnownOrder`: what a lineage knows of how its units are used: one value, of four kinds; `_extend` has the guessed one,
that of driven modules.

    Schedule(order=[...])          fixed
    Schedule(order="recorded")     recorded ── the first step, without a plan ──▶ fixed: as the first rank used them
    nothing                        default ── a module says it better ──▶ guessed ── the first step ──▶ fixed

While an order is recorded, every use is one that no plan names. A guess is followed, and what ranks really did becomes
the order after the first step.

`Plan`: when each unit is gathered, how long it lives, and where. A plan is a cyclic program of uses. Three units in the
default order, at depth 1 (`g` gathered meanwhile, `U` used):

    use      0    1    2    3    4    5
    unit     a    b    c    c    b    a
    a        gU                  g    U      gathered twice, to one address: residuals point at it
    b        g    U         g    U
    c             g    U----U                stays gathered: its bytes would not be free in between anyway

While a use computes, the gathers of the next `prefetch` uses are in flight; a unit's bytes are live from the use whose
`unshard` starts its gather to the use whose `release` ends its life, both included. Weights change in `step`, so no
gather runs past the last use. Gradients leave through staging, sized by what travels: a reduction holds its staging
until the next but one needs some, so that compute waits for a reduction only when two more are due. Here is where it
lies; that it is waited for is the engine's (`_engine/reductions.py`, which has a table).

`Records`: what each verb does with a bucket, as routes of collectives; worked out once a bucket.

| verb    | from               | to                     | as                                   |
|---------|--------------------|------------------------|--------------------------------------|
| unshard | what is stored     | whole                  | `unshard`; `beside` on the side lane |
| reduce  | fresh gradients    | main gradients         | `reduce[True]`                       |
| reduce  | fresh gradients    | as far as it needs be  | `reduce[False]`, `last_microbatch=False`        |
| finish  | as far as that was | main gradients         | `finish_reductions`                             |
| step    | main weights       | compute copies         | `step`                               |

The engine (`_engine/gathers.py`, `_engine/reductions.py`) carries them out on lanes, a traced step
(`_graph/traced.py`) as operations of a graph.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from itertools import accumulate, groupby, pairwise
from typing import Any, ClassVar, NamedTuple

import torch

from .._common.calls import provided
from .._common.errors import ScheduleError, SpecError, expect
from .._common.tree import PathIndex, grouped
from .._spec.spec import Order, Schedule, Traits, named, schedule_of
from .._spec.units import in_order_of_use
from .layout import STAGED, Bucket, Layout, aligned
from .route import Coordinate, How, Partial, Replicated, Route, States, all_axes, route, states_of

Interval = tuple[int, int]  # first and last moment of a life, both included
PAIRS = 100  # that are looked at, for each thing
WORK = 150_000  # placements tried while searching for a better first fit
PATIENCE = 12  # tries without progress before the next order
TRIED = 1 << 20  # sets of units that are tried for a budget; of more kinds of units all or none stay
ALIGN = STAGED  # bytes: every bucket in the arena and in staging starts at a multiple
REDUCTIONS_AT_ONCE = 2  # reductions that may be under way at once

_plan_table = provided("look.plan_table")


class Packing(NamedTuple):
    """Addresses (one for each thing), the bytes they need in all, the lower bound, and the rule that found them."""

    addresses: tuple[int, ...]
    total: int
    bound: int
    rule: str


def pack(sizes: Sequence[int], lives: Sequence[Sequence[Interval]], kept: Collection[int] = ()) -> Packing:
    """Addresses for things of `sizes` (bytes), live during `lives`, such that none ever lie over each other.

    Args:
        kept: things that live long: their bytes may be added to whatever the others need.

    Returns:
        A packing of `bound` bytes if the rules above find one, else the smallest found. The bound is the largest sum of
        sizes that are live at one moment. Deterministic: every rank finds the same.

    >>> pack([3, 4, 2], [[(0, 0)], [(0, 1)], [(1, 2)]])
    Packing(addresses=(0, 3, 0), total=7, bound=7, rule='two sides')
    """
    everything = range(len(sizes))
    above = set(kept)
    rest = [i for i in everything if i not in above]
    bound, pairs = _most(sizes, lives, everything)
    few = pairs <= PAIRS * len(sizes)
    rules: list[tuple[str, Callable[[], list[int] | None]]]
    if few or _most(sizes, lives, rest)[1] <= PAIRS * len(sizes):
        near = _meet(sizes, lives, everything if few else rest)
        rules = [
            ("two sides, kept above", lambda: _above(sizes, above, _two_sides(sizes, near, rest))),
            ("slots, kept above", lambda: _above(sizes, above, _slots(sizes, near, rest))),
        ]
        if few:  # all pairs are known
            rules.insert(0, ("two sides", lambda: _two_sides(sizes, near, everything)))
            rules.insert(2, ("first fit", lambda: _search(sizes, lives, near, bound)))
    else:
        rules = [("nothing shared", lambda: _above(sizes, set(everything), [0] * len(sizes)))]
    best: Packing | None = None
    for rule, find in rules:
        addresses = find()
        if addresses is None:
            continue
        total = _top(sizes, addresses, everything)
        if best is None or total < best.total:
            best = Packing(tuple(addresses), total, bound, rule)
        if best.total == bound:
            break
    assert best is not None  # the last rule always finds one
    return best


def _top(sizes: Sequence[int], addresses: Sequence[int], things: Iterable[int]) -> int:
    return max((addresses[i] + sizes[i] for i in things), default=0)


def _moments(
    lives: Sequence[Sequence[Interval]], things: Iterable[int]
) -> Iterator[tuple[int, list[int], dict[int, None]]]:
    """As time goes on: who comes, who has gone since the last one came, and who is there."""
    events = sorted((first, last, i) for i in things for first, last in lives[i])
    live: dict[int, None] = {}
    ends: list[tuple[int, int]] = []
    for first, last, i in events:
        gone = []
        while ends and ends[0][0] < first:
            gone.append(heappop(ends)[1])
            del live[gone[-1]]
        assert i not in live, "a thing's own intervals must not overlap"
        yield i, gone, live
        live[i] = None
        heappush(ends, (last, i))


def _most(sizes: Sequence[int], lives: Sequence[Sequence[Interval]], things: Iterable[int]) -> tuple[int, int]:
    """The largest sum of bytes live at once, and how many pairs meet, counted each time."""
    now = bound = pairs = 0
    for i, gone, live in _moments(lives, things):
        now += sizes[i] - sum(sizes[j] for j in gone)
        bound, pairs = max(bound, now), pairs + len(live)
    return bound, pairs


def _meet(sizes: Sequence[int], lives: Sequence[Sequence[Interval]], things: Iterable[int]) -> list[set[int]]:
    """Who is ever live together with whom."""
    near: list[set[int]] = [set() for _ in sizes]
    for i, _, live in _moments(lives, things):
        near[i].update(live)
        for j in live:
            near[j].add(i)
    return near


def _two_sides(sizes: Sequence[int], near: Sequence[set[int]], things: Iterable[int]) -> list[int] | None:
    """Those of one colour from the bottom up, those of the other from the top down; None if two colours are too few."""
    chosen = set(things)
    side: dict[int, int] = {}
    for root in sorted(chosen):
        if root in side:
            continue
        side[root], queue = 0, [root]
        while queue:
            i = queue.pop()
            for j in near[i] & chosen:
                if j not in side:
                    side[j] = 1 - side[i]
                    queue.append(j)
                elif side[j] == side[i]:
                    return None
    top = max((sizes[i] + max((sizes[j] for j in near[i] & chosen), default=0) for i in chosen), default=0)
    return [top - sizes[i] if side.get(i) else 0 for i in range(len(sizes))]


def _above(sizes: Sequence[int], kept: AbstractSet[int], addresses: list[int] | None) -> list[int] | None:
    """The kept ones stacked on top of all others, which have `addresses` already."""
    if addresses is None:
        return None
    at = _top(sizes, addresses, (i for i in range(len(sizes)) if i not in kept))
    for i in sorted(kept):
        addresses[i] = at
        at += sizes[i]
    return addresses


def _slots(sizes: Sequence[int], near: Sequence[set[int]], things: Sequence[int]) -> list[int]:
    """Max-pool: colour in order of first use, give each colour one slot as large as its largest."""
    colour: dict[int, int] = {}
    widths: list[int] = []
    last = -1
    for i in things:
        taken = {colour[j] for j in near[i] if j in colour}
        # The least recently used of the free ones: round robin in a chain, which needs no more than depth + 1.
        turn = [(last + 1 + k) % len(widths) for k in range(len(widths))]
        last = next((c for c in turn if c not in taken), len(widths))
        if last == len(widths):
            widths.append(0)
        colour[i] = last
        widths[last] = max(widths[last], sizes[i])
    below = [0, *accumulate(widths)]
    return [below[colour[i]] if i in colour else 0 for i in range(len(sizes))]


def _first_fit(sizes: Sequence[int], near: Sequence[set[int]], order: Iterable[int]) -> list[int]:
    """One after the other, each at the lowest address where it meets nobody."""
    addresses = [-1] * len(sizes)
    for i in order:
        at, size = 0, sizes[i]
        for start, stop in sorted([(addresses[j], addresses[j] + sizes[j]) for j in near[i] if addresses[j] >= 0]):
            if start - at >= size:
                break
            at = max(at, stop)
        addresses[i] = at
    return addresses


def _search(
    sizes: Sequence[int], lives: Sequence[Sequence[Interval]], near: Sequence[set[int]], bound: int
) -> list[int]:
    """First fit from a few good orders; then, while there is work left, again with what stuck out placed first."""
    span = [sum(last - first + 1 for first, last in intervals) for intervals in lives]
    start = [min((first for first, _ in intervals), default=0) for intervals in lives]
    everything = range(len(sizes))
    orders = [
        sorted(everything, key=lambda i: (-sizes[i], -span[i], start[i])),
        sorted(everything, key=lambda i: (-span[i], -sizes[i], start[i])),
        sorted(everything, key=lambda i: (-sizes[i] * span[i], start[i])),
        sorted(everything, key=lambda i: (start[i], -sizes[i])),
    ]
    work = WORK
    cost = max(1, len(sizes), sum(map(len, near)) // 4)
    best, least = [0] * len(sizes), -1
    for order in orders:
        stuck = 0
        while least != bound and stuck < PATIENCE:
            addresses = _first_fit(sizes, near, order)
            total = _top(sizes, addresses, everything)
            work -= cost
            stuck += 1
            if least < 0 or total < least:
                best, least, stuck = addresses, total, 0
            if work <= 0:
                return best
            high = {i for i in order if addresses[i] + sizes[i] > max(bound, least - 1)} or {order[-1]}
            order = sorted(order, key=lambda i: i not in high)  # stable: the others keep their order
    return best


@dataclass(frozen=True)
class KnownOrder:
    """What is known of the order of use.

    Attributes:
        open: whether ranks decide on the order at the end of a step.
        recording: whether it is being recorded, and nothing is planned.
        what: the order's name in errors of ranks that wait for each other to decide.
    """

    open: ClassVar[bool] = False
    recording: ClassVar[bool] = False
    what: ClassVar[str] = ""

    def used(self, names: Sequence[str]) -> KnownOrder:
        """One more call, where an order is recorded."""
        return self

    def turned(self) -> KnownOrder:
        """The forward is over, where an order is recorded and it was not before."""
        return self

    @property
    def said(self) -> Any:
        """What this rank tells the others at the end of a step; None where there is nothing to decide."""
        return None

    def decided(self, everyone: Sequence[Any], planned: Order, frozen: Collection[str]) -> Decision | None:
        """The order by what every rank has said; None if it stays open.

        Args:
            planned: the order that the step was planned by. frozen: units without a gradient.
        """
        raise NotImplementedError


Decision = tuple[Order, int | None]  # calls, and how many uses of them are the forward, if that is known


class FixedOrder(KnownOrder):
    """The plan's order is that of the program."""


class DefaultOrder(KnownOrder):
    """That of the layout, until a module's structure says it better."""


@dataclass(frozen=True)
class RecordedOrder(KnownOrder):
    """It is being recorded: the calls of this step so far, and how many uses of them are the forward, once known."""

    open: ClassVar[bool] = True
    recording: ClassVar[bool] = True
    what: ClassVar[str] = "the recorded order"
    calls: Order = ()
    forward: int | None = None

    def used(self, names: Sequence[str]) -> RecordedOrder:
        call = names[0] if len(names) == 1 else tuple(names)
        return replace(self, calls=(*self.calls, call))

    def turned(self) -> RecordedOrder:
        if self.forward is not None:
            return self
        return replace(self, forward=len(Program(self.calls).order))

    @property
    def said(self) -> Any:
        return self if self.calls else None

    def decided(self, everyone: Sequence[Any], planned: Order, frozen: Collection[str]) -> Decision | None:
        """As the first rank used them."""
        return everyone[0].calls, everyone[0].forward


def known(schedule: Schedule) -> KnownOrder:
    """What a schedule says before the first step."""
    if schedule.order == "recorded":
        return RecordedOrder()
    return DefaultOrder() if schedule.order is None else FixedOrder()


@dataclass(frozen=True)
class Program:
    """Units in order of use, each use of a group counted on its own.

    Attributes:
        calls: the units, one or a group each.
        once: it is one pass, even if it looks like several.
    """

    calls: Order
    once: bool = False

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The unit of each use."""
        return tuple(name for names in map(names_of, self.calls) for name in names)

    @cached_property
    def groups(self) -> tuple[Interval, ...]:
        """For each use, the first and the last of those at once with it: `(k, k)` where it is alone."""
        ends = accumulate((len(names_of(call)) for call in self.calls), initial=0)
        return tuple((first, end - 1) for first, end in pairwise(ends) for _ in range(first, end))

    @cached_property
    def uses(self) -> dict[str, list[int]]:
        """Each unit's uses; units in order of first use."""
        return grouped((name, k) for k, name in enumerate(self.order))

    @cached_property
    def length(self) -> int:
        """Uses of one pass. Several equal passes, each of which uses units twice, are one of several microbatches."""
        calls, count = self.calls, len(self.calls)
        for n in range(1, 1 if self.once else count):
            if count % n == 0 and calls[n:] == calls[:-n]:
                once = Program(calls[:n])
                if len(once.uses) < len(once.order):
                    return len(once.order)
        return len(self.order)

    @cached_property
    def newest(self) -> int:
        """How many uses there are up to the first one of the last new unit, its group included."""
        return 1 + self.groups[max(ks[0] for ks in self.uses.values())][1]

    @cached_property
    def turn(self) -> int:
        """Uses of the forward: up to the last new unit, and then tied ones for as long as what is left is no backward.

        >>> Program(("a", "b", "c", "c", "b", "a")).turn, Program(("a", "b", "c", "a", "a", "c", "b", "a")).turn
        (3, 4)
        """
        ends = dict.fromkeys(last + 1 for _, last in self.groups[self.newest - 1 : self.length])
        reaches = self._reaches()
        for end in ends:
            if end - self.newest < self.length - end and reaches[end] < end:
                return end
        return self.newest

    def _reaches(self) -> list[int]:
        """For each use, up to which one the program has to have come so that this use and all after it may be its
        backward: they are in the reverse order of some of the uses up to there. Its length where there are none."""
        never = len(self.order)
        calls = [*dict.fromkeys(self.groups)]
        found = [0] * self.length
        at = 0
        for k in reversed(range(self.length)):
            while at < len(calls) and self.order[k] not in self.order[calls[at][0] : calls[at][1] + 1]:
                at += 1
            found[k] = calls[at][1] if at < len(calls) else never
        return found

    def completed(self, forward: int | None = None) -> list[tuple[str, int]]:
        """(unit, use) in order of time: where the gradient of each unit is complete, in each pass.

        That is its last use; or, where that lies in the forward, where all units that were new after it are complete.
        Within one use: reverse order of first use.

        Args:
            forward: how many uses the forward has, if that is known.

        >>> Program(("a", "b", "c", "a", "c", "b")).completed()
        [('c', 4), ('b', 5), ('a', 5)]
        """
        turn = forward or self.turn
        uses = {name: [k for k in ks if k < self.length] for name, ks in self.uses.items()}
        found: list[tuple[str, int]] = []
        latest = 0
        for name in reversed(uses):
            last = uses[name][-1]
            latest = max(latest, last)
            found.append((name, last if last >= turn else latest))
        found.sort(key=lambda item: item[1])  # stable: reverse order of first use
        return [(name, begin + k) for begin in range(0, len(self.order), self.length) for name, k in found]


def program(layout: Layout, schedule: Schedule) -> Program:
    """The program of a schedule. Every name that the schedule mentions is checked here.

    Raises:
        SpecError: a name that the layout does not have.
        ScheduleError: the order is still to be recorded.
    """
    if schedule.order == "recorded":
        raise ScheduleError(
            "plan: Schedule(order='recorded') has no order before the first step. Give an order, as "
            "Schedule(order=('a', 'b', 'b', 'a')), or look at state.cursor after a step."
        )
    found = Program(schedule.order) if schedule.order is not None else Program(_default(layout), once=True)
    names = tuple(layout.by_name)
    keep = schedule.keep if isinstance(schedule.keep, tuple) else ()
    depths = () if isinstance(schedule.prefetch, int) else tuple(name for name, _ in schedule.prefetch)
    unknown = tuple(name for name in found.uses if name not in layout.by_name)
    index = PathIndex(names)
    for what, wanted in (("order", unknown), ("keep", keep), ("prefetch", depths)):
        for name in wanted:
            if what == "order" or (name != "*" and not index.any(name)):
                raise SpecError(
                    f"Schedule({what}): {name!r} {'is not a unit' if what == 'order' else 'matches no unit'} of this "
                    f"layout. Its {len(names)} units are {', '.join(map(repr, names[:4]))}"
                    f"{', ...' if len(names) > 4 else ''}. Use one of them, or leave {what} out."
                )
    return found


def names_of(call: str | tuple[str, ...]) -> tuple[str, ...]:
    """The units of a call."""
    return (call,) if isinstance(call, str) else call


def _default(layout: Layout) -> tuple[str, ...]:
    """All units forward, then backward. A tied unit is used again before the unit that comes after its further path."""
    forward: list[str] = []
    seen: set[str] = set()
    tied: dict[str, None] = {}  # used again before the next new unit
    for i in in_order_of_use(layout.paths):
        path, source = layout.paths[i], layout.source[i]
        name = layout.unit_of[source]
        if path != source:
            if name not in (tied or forward[-1:]):
                tied[name] = None
        elif name not in seen:
            seen.add(name)
            forward += [*tied, name]
            tied = {}
    forward = [name for name, _ in groupby([*forward, *tied])]
    return (*forward, *reversed(forward))


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
    lives = lives_of(schedule, program, sizes, ())
    saves = grouped((len(gathers) - 1, name) for name, gathers in lives.items() if len(gathers) > 1)
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


class Extent(NamedTuple):
    """A bucket's place: `arena[address : address + nbytes]`, or the same of staging (bytes)."""

    bucket: str
    address: int
    nbytes: int


class Use(NamedTuple):
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


class PlannedUnit(NamedTuple):
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


class Reduction(NamedTuple):
    """A reduction's staging: bytes from `use` on. The next but one may take them, at `until` (all uses: nobody does).

    Where a transport keeps the staging, `address` is where its bytes are. With collectives each reduction allocates its
    own, and the plan counts them. `until` is for peaks, prints and tests: `Staging._stage` waits by itself.

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
        return grouped((reduction.unit, i) for i, reduction in enumerate(self.reductions))

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


class Records(NamedTuple):
    """Of one bucket, see the table at the top of this file."""

    unshard: Route
    beside: Route
    reduce: dict[bool, Route]
    finish: Route
    step: Route


def keeps_copy(bucket: Bucket) -> bool:
    """Whether compute weights persist beside main weights: they are less sharded, or whole and of another dtype, or
    `Precision(gather=)` asks for them; or main weights are in the host's memory, from which a gather would have to
    fetch them twice a step."""
    if bucket.on_host or bucket.copy:
        return True
    return not _sharded_alike(bucket) or (not bucket.placement.weights and bucket.compute is not bucket.main)


def copied_alike(bucket: Bucket) -> bool:
    """Whether each rank's part of a compute copy is that of main weights, so that an update alone can renew it."""
    if bucket.in_float8 or bucket.gather_codec is not None or bucket.on_host or bucket.by_leaf:
        return False
    return keeps_copy(bucket) and _sharded_alike(bucket)


def _sharded_alike(bucket: Bucket) -> bool:
    """Whether weights are sharded along the axes of main weights."""
    return set(bucket.placement.weights) == set(bucket.placement.main)


def gathering(bucket: Bucket, states: States, target: States, here: Coordinate, lane: str) -> Route:
    """Weights, in the dtype in which they are gathered."""
    return route(bucket.gathered, states, target, here, How(bucket.gather, bucket.gather, (lane, lane)))


def reducing(
    bucket: Bucket, states: States, target: States, here: Coordinate, average: str, traits: Traits, share: int = 1
) -> Route:
    """Gradients, in the wire's dtype; where sums are exact in float32 from the first one on. The first axis is reduced
    on the reduce lane, a second one on the outer lane."""
    fresh = states == all_axes(bucket, Partial)
    exact = bucket.exact and fresh  # what has been added up once carries float32
    then = torch.float32 if bucket.exact else bucket.wire
    packs = bucket.codec is not None and (fresh or bool(bucket.codec_axis))
    wire = bucket.wire if fresh else then
    how = How(wire, then, ("reduce", "outer"), average, exact, traits.averages, share, packs)
    return route(bucket, states, target, here, how)


@lru_cache(maxsize=1 << 16)
def records(bucket: Bucket, here: Coordinate, average: str, traits: Traits) -> Records:
    """Of the rank at `here`. `average`: "mean" or "sum"."""
    stored = states_of(bucket, "weights" if keeps_copy(bucket) else "main")  # what a gather reads
    whole, final = all_axes(bucket, Replicated), states_of(bucket, "main")
    fresh, rest = all_axes(bucket, Partial), states_of(bucket, "grads", Partial)
    ends = {True: final, False: rest}
    return Records(
        gathering(bucket, stored, whole, here, traits.gathers),
        gathering(bucket, stored, whole, here, "side"),
        {last: reducing(bucket, fresh, ends[last], here, average, traits, bucket.share) for last in ends},
        reducing(bucket, rest, final, here, average, traits),
        gathering(bucket, final, stored, here, "side"),
    )


def staging_slots(layout: Layout, here: Coordinate, average: str, traits: Traits, kept: bool) -> int:
    """How many reductions in a row have staging of their own. Where the transport keeps the staging (on lanes that copy
    it there) and one lane reduces in order, each lies where the last one lay."""
    ways = [records(bucket, here, average, traits).reduce for bucket in layout.trainable.values()] if kept else []
    return 1 if kept and all(way.ends == "reduce" for both in ways for way in both.values()) else REDUCTIONS_AT_ONCE


def reductions_at_once(ways: Iterable[Mapping[bool, Route]], stays: bool) -> int:
    """How many reductions have staging at once on GPUs: compute waits for those before them. One, where staging comes
    and goes and nothing of a reduction travels beside the next; else two. `ways`: `Records.reduce` of each bucket of
    the newest one."""
    single = all(len(way.collectives) <= 1 for both in ways for way in both.values())
    return 1 if single and not stays else REDUCTIONS_AT_ONCE
