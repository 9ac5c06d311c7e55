"""Program: which units are used one after another, and at which use each gradient is complete. Pure.

The default order, where `a` is tied to a leaf between `c` and `d` (and so used there again):

    use      0    1    2    3    4  |  5    6    7    8    9
    unit     a    b    c    a    d  |  d    a    c    b    a        backward is forward reversed
    reduces                            d         c    b    a        each at its last use

A unit whose backward needs no weights may be used in the forward only, as `a` here. Its gradient is complete when the
backward is through with all that came after it:

    use      0    1    2 |  3    4
    unit     a    b    c |  c    b
    reduces                 c    b, a

An order is what a lineage knows of how its units are used: one value, of four kinds; `_extend.orders` has the guessed
one, that of driven modules.

    Schedule(order=[...])          fixed
    Schedule(order="recorded")     recorded ── the first step, without a plan ──▶ fixed: as the first rank used them
    nothing                        default ── a module says it better ──▶ guessed ── the first step ──▶ fixed

While an order is recorded, every use is one that no plan names. A guess is followed, and what ranks really did becomes
the order after the first step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, ClassVar

from .._common.errors import ScheduleError, SpecError
from .._common.tree import PathIndex
from .._spec.schedule import Order, Schedule
from .._spec.units import in_order_of_use
from .layout import Layout
from .pack import Interval


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


@dataclass(frozen=True)
class FixedOrder(KnownOrder):
    """The plan's order is that of the program."""


@dataclass(frozen=True)
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
        found: dict[str, list[int]] = {}
        for k, name in enumerate(self.order):
            found.setdefault(name, []).append(k)
        return found

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
