"""Packing: things of given sizes, live at given times, get addresses in one stretch of bytes. Pure integers.

A thing keeps one address for all its intervals. Two things that are ever live at once share no byte. Below, units 0 to
4 of a chain, each gathered while the one before it is used, forward and backward; time runs to the right:

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
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

Interval = tuple[int, int]  # first and last moment of a life, both included
PAIRS = 100  # that are looked at, for each thing
WORK = 150_000  # placements tried while searching for a better first fit
PATIENCE = 12  # tries without progress before the next order


@dataclass(frozen=True)
class Packing:
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
    rules: list[tuple[str, Callable[[], list[int] | None]]]
    if pairs <= PAIRS * len(sizes):
        near = _meet(sizes, lives, everything)
        rules = [
            ("two sides", lambda: _two_sides(sizes, near, everything)),
            ("two sides, kept above", lambda: _above(sizes, above, _two_sides(sizes, near, rest))),
            ("first fit", lambda: _search(sizes, lives, near, bound)),
            ("slots, kept above", lambda: _above(sizes, above, _slots(sizes, near, rest))),
        ]
    elif _most(sizes, lives, rest)[1] <= PAIRS * len(sizes):
        near = _meet(sizes, lives, rest)
        rules = [
            ("two sides, kept above", lambda: _above(sizes, above, _two_sides(sizes, near, rest))),
            ("slots, kept above", lambda: _above(sizes, above, _slots(sizes, near, rest))),
        ]
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
