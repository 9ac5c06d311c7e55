"""Cursor: where a program stands, as a value. Names and integers only: it keeps no tensor, no event and no bytes alive.

    plan     a    b    c  |  c    b    a        uses, forward and backward; `|` is the turn
    at                 ^                        the use that is expected next

Every State carries the cursor that it was returned with: `print(state.cursor)`. What follows from it is said by
`advance(plan, cursor, event)`, see `advance`; what has come of that so far is asked of the lanes, see `in_flight`.

Walk: a cursor while an event is worked out, with names in the place of bits; and what ends rounds and passes. Pure.

An event costs what it changes, however many units there are: sets stay bits, which are looked at one by one only where
they are few (what is held or live in bytes that others share).

Cursor ──▶ Walk ── the rules of `_plan.advance` ──▶ Cursor, actions
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from .._common.errors import ScheduleError
from .._common.tree import bytes_text, table
from .plan import Plan

Bits = int  # a set of small numbers, one bit each: 0b101 is {0, 2}


def bits(some: Iterable[int]) -> Bits:
    """
    >>> bits([0, 2])
    5
    """
    found = 0
    for number in some:
        found |= 1 << number
    return found


def numbers(some: Bits) -> Iterator[int]:
    """
    >>> [*numbers(5)]
    [0, 2]
    """
    while some:
        lowest = some & -some
        yield lowest.bit_length() - 1
        some ^= lowest


def end_of_pass(plan: Plan, at: int, issued: int, training: bool) -> int:
    """The gathers of a pass up to where it ends: after the forward, if it is an evaluation."""
    if not at:
        return issued
    last = len(plan.uses) if training or at > plan.turn else plan.turn
    return max(issued, plan.due[last - 1])


class InFlight(NamedTuple):
    """What the lanes have not done yet: units that are being gathered, and how many reductions."""

    gathers: tuple[str, ...]
    reductions: int


@dataclass(frozen=True, repr=False)
class Cursor:
    """Where a step stands in its plan. Frozen, equal by value; printing it gives a table.

    Attributes:
        plan: what is followed.
        at: the use that is expected next.
        issued: gathers issued in this pass; reduced: reductions issued in this round.
        phase: "forward" or "backward", where a transform says where a pass is; else "".
        agreed: in this pass ranks agree on each use, as what the plan says of it is only a guess.
        live_bits: gathers whose bytes are good, or under way; held_bits: units handed out and not released.
        used_bits: units used in this pass; awaited_bits: of these, those whose gradient, or last use, has not come.
        seen_bits: uses seen in this pass; early_bits: reductions whose gradient came before its turn.
        due: (reduction, whether its gradient came, else zeros) that the end of a pass made due.
        training: whether a gradient came in this pass; round_done: whether the last reduction of a round was issued.
    """

    plan: Plan = field(hash=False)
    at: int = 0
    issued: int = 0
    reduced: int = 0
    phase: str = ""
    agreed: bool = False
    live_bits: Bits = 0
    held_bits: Bits = 0
    used_bits: Bits = 0
    awaited_bits: Bits = 0
    seen_bits: Bits = 0
    early_bits: Bits = 0
    due: tuple[tuple[int, bool], ...] = ()
    training: bool = False
    round_done: bool = False

    @property
    def idle(self) -> bool:
        """Whether nothing is begun."""
        return not (self.at or self.live_bits or self.held_bits or self.reduced or self.early_bits)

    @property
    def live(self) -> dict[str, int]:
        """Units whose bytes are good or under way, and the gather of each."""
        return {self.plan.gathers[i].unit: i for i in numbers(self.live_bits)}

    @property
    def held(self) -> frozenset[str]:
        """Units that are handed out and not released."""
        return self._names(self.held_bits)

    @property
    def awaited(self) -> frozenset[str]:
        """Units of this pass whose gradient, or last use, has not come."""
        return self._names(self.awaited_bits)

    def _names(self, units: Bits) -> frozenset[str]:
        return frozenset([self.plan.units[i].name for i in numbers(units)])

    @property
    def ahead(self) -> bool:
        """Whether peers may wait for gathers of this pass that this rank has not come to."""
        return self.issued < self.end

    @property
    def end(self) -> int:
        """The gathers of this pass up to where it ends."""
        return end_of_pass(self.plan, self.at, self.issued, self.training)

    def status(self, unit: str) -> str:
        """What a unit is: resident, live, held or released."""
        held = unit in self.held
        if not self.plan.by_name[unit].parts:
            return "resident, held" if held else "resident"
        if unit not in self.live:
            return "held, overwritten" if held else "released"
        return "live, held" if held else "live"

    def __repr__(self) -> str:
        plan, count = self.plan, len(self.plan.uses)
        rows = []
        for unit in plan.units:
            lives = ", ".join(f"{a}–{b}" if a < b else str(a) for a, b in unit.lives)
            place = (bytes_text(unit.nbytes), f"{unit.address:,}", lives) if unit.parts else ("-", "-", "-")
            rows.append((unit.name, *place, unit.gathers or "-", self.status(unit.name)))
        where = "nothing is begun" if self.idle else (
            f"use {self.at} of {count} comes next"
            + (f" ({plan.uses[self.at].unit})" if self.at < count else " (the program is through)")
        )  # fmt: skip
        waits = f", {self.early_bits.bit_count()} gradients wait for their turn" if self.early_bits else ""
        return (
            f"{table(('unit', 'bytes', 'address', 'gathered in uses', 'gathers', 'now'), rows)}\n"
            f"{where}; {self.issued} of {len(plan.gathers)} gathers and {self.reduced} of {len(plan.reductions)} "
            f"reductions of this pass issued{waits}"
        )


Action = tuple[str, Any]
Due = tuple[int, bool]  # a reduction, and whether its gradient came


class Collision(ScheduleError):
    """A gather would write over a unit that was not released."""


class Few:
    """A set as bits: of names or numbers, of which `number` says the place. Names that no plan has are in none."""

    __slots__ = ("bits", "number")

    def __init__(self, bits: Bits, number: Mapping[str, int] | Sequence[int]) -> None:
        self.bits = bits
        self.number: Any = number

    def __contains__(self, one: object) -> bool:
        try:
            return bool(self.bits >> self.number[one] & 1)
        except KeyError:
            return False

    def __bool__(self) -> bool:
        return bool(self.bits)

    def add(self, one: object) -> None:
        self.bits |= 1 << self.number[one]

    def update(self, some: Iterable[object]) -> None:
        for one in some:
            self.add(one)

    def discard(self, one: object) -> None:
        if one in self:
            self.bits ^= 1 << self.number[one]

    def clear(self) -> None:
        self.bits = 0


class Walk:
    """Where a program stands, and what is to be done, so far."""

    def __init__(self, plan: Plan, cursor: Cursor) -> None:
        self.plan = plan
        self.at, self.issued, self.reduced = cursor.at, cursor.issued, cursor.reduced
        self.phase, self.agreed = cursor.phase, cursor.agreed
        self.live = cursor.live_bits
        self.held, self.used, self.awaited = (
            Few(some, plan.index) for some in (cursor.held_bits, cursor.used_bits, cursor.awaited_bits)
        )
        self.seen = Few(cursor.seen_bits, range(len(plan.uses)))
        self.early = Few(cursor.early_bits, range(len(plan.reductions)))
        self.due = [*cursor.due]
        self.training, self.round_done = cursor.training, cursor.round_done
        self.actions: list[Action] = []

    def cursor(self) -> Cursor:
        return Cursor(
            self.plan,
            at=self.at,
            issued=self.issued,
            reduced=self.reduced,
            phase=self.phase,
            agreed=self.agreed,
            live_bits=self.live,
            held_bits=self.held.bits,
            used_bits=self.used.bits,
            awaited_bits=self.awaited.bits,
            seen_bits=self.seen.bits,
            early_bits=self.early.bits,
            due=tuple(self.due),
            training=self.training,
            round_done=self.round_done,
        )

    @property
    def limit(self) -> int:
        """A use comes before it: where passes are bounded, that of the forward before the turn, if that is known."""
        return self.plan.forward if self.phase == "forward" and self.plan.forward is not None else len(self.plan.uses)

    def gather(self, gathers: Iterable[int]) -> None:
        self.actions += [("gather", i) for i in gathers]

    def reduce(self, due: Sequence[Due]) -> None:
        self.actions.append(("reduce", tuple(due)))

    def in_order(self, gathers: Iterable[int], due: Iterable[Due]) -> None:
        """Gathers and reductions in the order in which peers come to them: where the host waits, ranks would else wait
        for each other on different lanes."""
        left = deque(due)
        before = -1
        for i in gathers:
            while left and (i < before or self.plan.reductions[left[0][0]].use < self.plan.gathers[i].start):
                self.reduce((left.popleft(),))
            self.gather((i,))
            before = i
        self.reduce(left)

    # ---------------------------------------------------------------- gathers

    def overwritten(self, gathers: Iterable[int], good: Mapping[str, int]) -> tuple[int, str] | None:
        """The first of these gathers that would write over one of the units, and which. Gathers before a unit's own
        one, which come to `good[unit]`, do not matter."""
        if not good:
            return None
        names = sorted(good)
        for i in gathers:
            unit = self.plan.gathers[i].unit
            for name in names if unit in self.plan.crowded else ():
                if i > good[name] and self.plan.overlap(unit, name):
                    return i, name
        return None

    def good(self) -> dict[str, int]:
        """The units that are held where others lie, too, and that are good whatever was gathered before."""
        return {self.plan.units[i].name: -1 for i in numbers(self.held.bits & self.plan.crowded_bits)}

    def refuse(self, gather: int, over: str) -> NoReturn:
        raise Collision(
            f"gathering {self.plan.gathers[gather].unit!r} would write over {over!r}, which was not released "
            f"(they share bytes of the arena). Call state = release(state, {over!r}) first, or keep it: "
            f"Schedule(keep={{{over!r}}}), or name units that are used at once in one call and in Schedule(order=...)."
        )

    def issue(self, gathers: Sequence[int]) -> list[int]:
        """These are issued. Returns those to start: units that stay are there since an earlier pass of the step."""
        start = []
        for i in gathers:
            unit = self.plan.gathers[i].unit
            there = self.live & self.plan.gathers_of[unit]
            if not there or unit not in self.plan.stays:
                start.append(i)
            self.live &= ~there
            for other in numbers(self.live & self.plan.crowded_gathers) if unit in self.plan.crowded else ():
                if self.plan.overlap(unit, self.plan.gathers[other].unit):
                    self.live &= ~(1 << other)
            self.live |= 1 << i
        self.issued += len(gathers)
        return start

    # ---------------------------------------------------------------- reductions

    def due_at(self, mine: int) -> list[Due]:
        """The gradient of reduction `mine` is there: what is issued now."""
        self.training = True
        self.awaited.discard(self.plan.reductions[mine].unit)
        due = self.take_due()
        self.early.add(mine)
        while self.early:
            came = self.reduced in self.early
            if not came and not self.passed(self.reduced):
                break
            due.append((self.reduced, came))
            self.count_reduction()
        return due

    def pass_over(self, end: int) -> None:
        """Reductions before the use `end` are due with zeros, up to the first whose gradient may still come."""
        reductions = self.plan.reductions
        while reductions and not self.round_done and reductions[self.reduced].use < end and self.zero_next():
            pass

    def zero_next(self) -> bool:
        """The next reduction is due, unless its gradient may still come."""
        came = self.reduced in self.early
        if not came and self.plan.reductions[self.reduced].unit in self.used:
            return False
        self.due.append((self.reduced, came))
        self.count_reduction()
        return True

    def count_reduction(self) -> None:
        """One more reduction of this round is issued."""
        self.early.discard(self.reduced)
        self.reduced += 1
        if self.reduced == len(self.plan.reductions):
            self.reduced, self.round_done = 0, True

    def take_due(self) -> list[Due]:
        due, self.due = self.due, []
        return due

    def passed(self, reduction: int) -> bool:
        """Whether this rank has passed a reduction without having used its unit."""
        use, unit = self.plan.reductions[reduction].use, self.plan.reductions[reduction].unit
        if self.agreed:
            return self.phase == "backward" and unit not in self.used
        if use >= self.at or unit in self.held or (self.phase and unit in self.awaited):
            return False
        return use not in self.seen if self.plan.uses[use].unit == unit else unit not in self.used

    def rest_of_round(self) -> list[Due]:
        """Everything that waits, and zeros for what did not come. Nothing if no round is under way."""
        rest = self.take_due()
        if self.reduced or self.early:
            rest += [(i, i in self.early) for i in range(self.reduced, len(self.plan.reductions))]
            self.early.clear()
            self.reduced = 0
        return rest

    # ---------------------------------------------------------------- passes

    @property
    def end(self) -> int:
        """The gathers of this pass up to where it ends."""
        return end_of_pass(self.plan, self.at, self.issued, self.training)

    def rest_of_pass(self, step: bool = False) -> list[int]:
        """The pass is over: the gathers that peers issue in it and this rank passed over.

        Args:
            step: so is the step, and what is held need not stay good.

        Raises:
            ScheduleError: a gather would write over a unit that was not released.
        """
        rest = list(range(self.issued, self.end))
        over = None if step else self.overwritten(rest, self.good())
        if over is not None:
            self.refuse(*over)
        rest = self.issue(rest)
        if self.at or self.agreed:
            self.next_pass()
        return rest

    def next_pass(self) -> None:
        if self.training and (self.reduced or self.early or not self.round_done):  # what did not come will not any more
            self.round_done = False
            self.pass_over(len(self.plan.uses))
        self.issued = self.at = 0
        for some in (self.used, self.awaited, self.seen):
            some.clear()
        self.training = self.round_done = False

    def close_if_over(self) -> None:
        """This rank left something out of this pass, and comes to nothing more in it: peers wait for that before they
        come to whatever follows."""
        if self.awaited or self.held or self.phase or not (self.training and self.at > self.plan.last_open):
            return  # or it is a program of several microbatches, and this was not the last
        if self.reduced or self.early or self.issued < self.end:
            self.close()

    def close(self) -> None:
        rest = self.rest_of_pass()
        self.in_order(rest, self.take_due())
