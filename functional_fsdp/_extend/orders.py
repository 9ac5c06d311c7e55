"""Orders of use that driven modules come to: a guess, from a module's structure, and what ranks did in the first step.

    rank 0   a    c    | c    a          combined   a  b  c  | c  b  a
    rank 1   a  b      |    b a

Pure: from what each rank says to one order for all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .._plan.plan import Decision, KnownOrder, Program, names_of
from .._spec.spec import Order

Seen = tuple[Order, Order, Collection[str]]  # what a rank did: forward, backward, and units without a gradient


@dataclass(frozen=True)
class GuessedOrder(KnownOrder):
    """That of a module's structure. `seen`: what this rank did in the first step, once it is over."""

    open: ClassVar[bool] = True
    what: ClassVar[str] = "the order of use"
    seen: Seen | None = None

    @property
    def said(self) -> Any:
        return self.seen

    def decided(self, everyone: Sequence[Any], planned: Order, frozen: Collection[str]) -> Decision | None:
        """What some ranks did not use goes where others used it, and what none used stays between its neighbours."""
        forward, backward = combined(everyone, planned, frozen)
        if not forward:  # they used the same units in different orders, and may again
            return None
        return forward + backward, len(Program(forward).order)


def combined(seen: Sequence[Seen], planned: Order, frozen: Collection[str] = ()) -> tuple[Order, Order]:
    """One order for all ranks, forward and backward, from what each did, and from a plan for what none used.

    Where a unit is not used in the backward, that is because its gradient needs no weights; or because no rank had a
    gradient of it, which another step may have. Empty if ranks used the same units in different orders.

    >>> combined([(("a", "c"), ("c", "a"), ()), (("a", "b"), ("a",), ("b",))], tuple("abcddcba"))
    (('a', 'b', 'c', 'd'), ('d', 'c', 'b', 'a'))
    >>> combined([(("a", "b"), ("b", "a"), ()), (("a", "b", "c"), ("c", "a"), ("b",))], ())
    (('a', 'b', 'c'), ('c', 'b', 'a'))
    """
    half = len(planned) // 2
    forwards, backwards = ([*dict.fromkeys(some)] for some in ([s[0] for s in seen], [s[1][::-1] for s in seen]))
    forward, backward = max(forwards, key=len), max(backwards, key=len)
    for other in forwards:
        forward = _merged(forward, other)
    for other in backwards:
        backward = _merged(backward, other, (), forward)
    if not all(_within(one, forward) for one in forwards) or not all(_within(one, backward) for one in backwards):
        return (), ()
    used = _units(forward)
    forward = _merged(forward, planned[:half], used)
    given = {name for forth, _, skipped in seen for name in _units(forth) - set(skipped)}
    kept = {name for _, _, skipped in seen for name in skipped} - given
    first = next((i for i, call in enumerate(forward) if not kept.isdisjoint(names_of(call))), len(forward))
    back = _units(backward)  # a gradient of what comes before a frozen unit would go through it
    kept |= {name for name in _units(forward[first:]) if name in frozen and name not in back}
    return forward, _filled(backward, forward, kept, used)[::-1]


def _units(order: Order) -> set[str]:
    return {name for call in order for name in names_of(call)}


def _merged(order: Order, other: Order, but: Collection[str] = (), natural: Order = ()) -> Order:
    """An order with what only another one has put in, each after what comes before it there, or before what comes
    after it; of several places that which the natural order says; but not the units in `but`."""
    found = list(order)
    there = set(found)
    if there.issuperset(other):
        return order
    place = {call: i for i, call in reversed([*enumerate(natural)])}  # its first
    for i, call in enumerate(other):
        if call not in there and not all(name in but for name in names_of(call)):
            before = next((one for one in reversed(other[:i]) if one in there), None)
            after = next((one for one in other[i + 1 :] if one in there), None)
            low = found.index(before) + 1 if before is not None else 0
            high = len(found) - 1 - found[::-1].index(after) if after is not None else len(found)
            at = low if before is not None or after is None else high
            if call in place and low < high:
                at = next((k for k in range(low, high) if place.get(found[k], -1) > place[call]), high)
            found.insert(at, call)
            there.add(call)
    return tuple(found)


def _filled(order: Order, natural: Order, kept: set[str], used: set[str]) -> Order:
    """An order, and what it lacks of the natural one, each time where that has it: what is kept, and what none used."""
    places: dict[str | tuple[str, ...], list[int]] = {}
    for i, call in enumerate(order):
        places.setdefault(call, []).append(i)
    found: list[str | tuple[str, ...]] = []
    at = 0  # how much of the order is in `found`
    for call in natural:
        there = places.get(call, ())
        if not kept.isdisjoint(names_of(call)) or (not there and not used.issuperset(names_of(call))):
            found.append(call)
        elif (k := bisect_left(there, at)) < len(there):
            found += order[at : there[k] + 1]
            at = there[k] + 1
    return (*found, *order[at:])


def _within(some: Order, order: Order) -> bool:
    """Whether these uses come in this order, among others."""
    left = iter(order)
    return all(call in left for call in some)
