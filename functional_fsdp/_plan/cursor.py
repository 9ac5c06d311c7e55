"""Where a program of uses stands, and what follows from each verb there.

    Cursor                where it stands, as a value
    advance               the rules: (plan, cursor, event) -> (cursor, actions)
    Positions, nominal    the same, looked up

All is pure, and the same on every rank. `Cursor`: where a program stands. Names and integers only: it keeps
no tensor, no event and no bytes alive.

    plan     a    b    c  |  c    b    a        uses, forward and backward; `|` is the turn
    at                 ^                        the use that is expected next

Every State carries the cursor that it was returned with: `print(state.cursor)`. What follows from it is said by
`advance(plan, cursor, event)`; what has come of that so far is asked of the lanes, see `in_flight`.

`advance`: what follows from where a program stands. Every rank issues gathers in the plan's order, and reductions in
the plan's order, whatever it uses itself. So a use is matched with the program, and everything that the plan issues up
to there is issued:

| a unit that is asked for                           | is taken for                                                 |
|----------------------------------------------------|--------------------------------------------------------------|
| is the one expected                                | that use                                                     |
| comes later, past units that this rank passes over | that use; what lies between is issued all the same           |
| is held                                            | no use: it is handed out, the cursor stays                   |
| anything else in the program                       | the next pass: evaluation, another microbatch; or, between   |
|                                                    | `begin` and `end`, which say where a pass is: not in it      |
| is not in the program                              | a use outside the plan: every rank must come with the same   |

A rank must come to the backward of what it used in the forward, until its gradient came, and to no other.

Gradients come in any order. One that is early waits until those before it came, or until this rank has passed their
uses without using the unit: then zeros are reduced in their stead, since peers may have something to add. A gradient
for a unit whose turn is over begins the next round.

| event                | says                                                                                       |
|----------------------|--------------------------------------------------------------------------------------------|
| "unshard", units     | they are asked for, at once                                                                |
| "release", units     | they are given back                                                                        |
| "reduce", unit       | its gradient came                                                                          |
| "empty", unit        | its gradient came, and has no elements                                                     |
| "reduce tree", unit  | as "reduce", of a whole tree's gradient: these come between two "round", and in no pass    |
| "empty tree", unit   | as "empty", of a whole tree's gradient                                                     |
| "skip", unit         | it was used in the forward, and no gradient of it will come                                |
| "await", unit        | its gradient will come in this backward, whether or not the forward used it                |
| "begin"              | a pass begins, which ends where "end" says                                                 |
| "begin agreed"       | and in which ranks agree on each use                                                       |
| "turn"               | its forward is over                                                                        |
| "end"                | it is over; a use may begin the next one again                                             |
| "close"              | this rank comes to nothing more in this pass                                               |
| "round"              | no more gradients come in this round                                                       |
| "finish", "step"     | both; with "step" what is held need not stay good                                          |
| "look"               | weights were only looked at: as "step", but what no gradient came for is not reduced       |
| "peer gathers"       | a peer waits for the next gather                                                           |
| "peer reduces"       | a peer waits for the next reduction                                                        |

| action               | is                                                                                         |
|----------------------|--------------------------------------------------------------------------------------------|
| "gather", i          | start gather i                                                                             |
| "keep", i            | the gradient that came is that of reduction i                                              |
| "reduce", (i, came)s | start these reductions, with the gradients that came or with zeros; and what was put off   |
| "unplanned", unit    | no plan names this: ranks agree on it first                                                |
| "agreed", unit       | ranks agree on what comes next until it is this                                            |
| "free", unit         | its bytes are good no more                                                                 |

`Positions`: an automaton of a plan, so that a step looks up what `advance` has worked out once.

    Cursor ──("unshard", "a")──▶ Cursor ──("release", "a")──▶ Cursor ── ...       the nominal path: made with the plan
       └────("unshard", "c")──▶ Cursor ── ...                                     other paths: worked out when taken

A pass ends where it began, so a training of any length goes round in it. What other paths add is bounded: a program
that never does the same twice has it forgotten from time to time.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from .._common.calls import provided
from .._common.errors import ScheduleError
from .._common.tree import grouped
from .plan import Plan

_cursor_table = provided("look.cursor_table")
Bits = int  # a set of small numbers, one bit each: 0b101 is {0, 2}


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
        return _cursor_table(self)


Action = tuple[str, Any]
Due = tuple[int, bool]  # a reduction, and whether its gradient came
Event = tuple[str, tuple[str, ...]]


class Collision(ScheduleError):
    """A gather would write over a unit that was not released."""


def advance(plan: Plan, cursor: Cursor, event: Event) -> tuple[Cursor, tuple[Action, ...]]:
    """What an event makes of a cursor, and what is to be done, in this order. See the tables above.

    Raises:
        ScheduleError: a gather would write over a unit that was not released, or a unit that is released is not held.

    >>> p = fsdp.make_plan(fsdp.make_layout({f"{name}.w": torch.ones(1024) for name in "abc"}, fsdp.Spec({"data": 4})))
    >>> cursor, actions = advance(p, Cursor(p), ("unshard", ("a",)))
    >>> cursor.at, actions
    (1, (('gather', 0), ('gather', 1)))
    """
    kind, units = event
    walk = Walk(plan, cursor)
    _EVENTS[kind](walk, *((units,) if kind in ("unshard", "release") else units))
    return walk.cursor(), tuple(walk.actions)


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
    """A cursor while an event is worked out, with names in the place of bits; a method for each event, and what these
    have in common: what ends rounds and passes. Pure.

    An event costs what it changes, however many units there are: sets stay bits, which are looked at one by one only
    where they are few (what is held or live in bytes that others share).

    Attributes:
        actions: what is to be done, so far.
    """

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
            self.plan, at=self.at, issued=self.issued, reduced=self.reduced, phase=self.phase, agreed=self.agreed,
            live_bits=self.live, held_bits=self.held.bits, used_bits=self.used.bits, awaited_bits=self.awaited.bits,
            seen_bits=self.seen.bits, early_bits=self.early.bits, due=tuple(self.due), training=self.training,
            round_done=self.round_done,
        )  # fmt: skip

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

    def unshard(self, names: Sequence[str]) -> None:
        """Units are asked for, at once."""
        if self.agreed:
            self.used.update(names)
            self.actions += [("agreed", name) for name in names]
        elif self.is_expected(names):  # nearly always
            self.go_on(names)
        else:
            self.match(names)

    def is_expected(self, names: Sequence[str]) -> bool:
        """Whether one unit is asked for, and it is that of the use that is expected."""
        plan, at = self.plan, self.at
        expected = len(names) == 1 and at < self.limit and plan.uses[at].unit == names[0]
        return expected and (plan.opens[at] or names[0] in self.awaited)

    def go_on(self, names: Sequence[str]) -> None:
        """The use that is expected."""
        at = self.at
        due = [*range(self.issued, self.plan.due[at])]
        if due and self.held:
            due = self.startable(at, self.issued, at, self.good())
        due = self.issue(due)
        self.take([at], names)
        self.gather(due)

    def match(self, names: Sequence[str]) -> None:
        """Find which uses these are, of this pass or the next one: those that nothing forbids, each after the one
        before. The others are outside the plan."""
        plan, at = self.plan, self.at
        outside: list[str] = []
        mine: dict[str, int] = {}  # what is handed out -> the gather since which it is good
        taken: list[int] = []
        start = self.call_of(names)
        last, wraps, issued = start - 1, False, self.issued
        for name in sorted(names, key=lambda name: (name not in self.held, self.next_use(name, start))):
            may_wrap = not self.phase and not wraps and last < at
            found = self.find(name, last + 1, names, may_wrap)
            wrapping = found is not None and 0 <= found <= last
            first = 0 if wrapping else issued
            if found is not None and found >= 0 and not plan.by_name[name].nbytes and (
                self.overwritten(range(first, plan.due[found]), self.good()) is not None
            ):  # fmt: skip
                found = -1  # it is resident: good whatever is gathered
            if found is None or (found >= 0 and self.overwritten(range(first, self.needed(first, found)), mine)):
                outside.append(name)  # not in the program, or the plan has it after others that are named at once
                continue
            if found >= 0:
                last, wraps, issued = found, wraps or wrapping, self.needed(first, found)
                taken.append(found)
            mine[name] = issued - 1 if found >= 0 else -1
        handed = [name for name in names if name not in outside]
        if taken:
            self.jump(taken, handed, mine, wraps)
        else:
            self.held.update(handed)
        self.actions += [("unplanned", name) for name in outside]

    def jump(self, taken: Sequence[int], handed: Sequence[str], mine: dict[str, int], wraps: bool) -> None:
        """These uses come next, and not the one expected."""
        closing = list(range(self.issued, self.end)) if wraps else []
        good = self.good() | mine
        over = self.overwritten(closing, {name: since for name, since in good.items() if since < 0})
        if over is not None:
            self.refuse(*over)
        due = self.startable(taken[-1], 0 if wraps else self.issued, taken[-1], good)
        if wraps:
            closing = self.issue(closing)
            self.next_pass()
        due = self.issue(due)
        self.take(taken, handed)
        if self.plan.at_once or self.training:  # by hand a look is no other than a pass before its first gradient
            self.pass_over(self.at)
            self.in_order(closing + due, self.take_due())
        else:
            self.gather(closing + due)

    def take(self, uses: Sequence[int], handed: Sequence[str]) -> None:
        """Uses that this rank has come to, and the units that it is given."""
        units = [self.plan.uses[use].unit for use in uses]
        self.at = uses[-1] + 1
        self.seen.update(uses)
        self.used.update(handed)
        self.held.update(handed)
        self.awaited.update([unit for unit, use in zip(units, uses, strict=True) if self.plan.opens[use]])
        for unit, use in zip(units, uses, strict=True):
            if use in self.plan.settles:
                self.awaited.discard(unit)

    def next_use(self, name: str, start: int) -> int:
        """The next use of a unit in this pass, from `start` on; after all others if there is none."""
        planned = self.plan.by_name.get(name)
        uses = planned.uses if planned else ()
        return next(iter(uses[bisect_left(uses, start) :]), len(self.plan.uses))

    def call_of(self, names: Sequence[str]) -> int:
        """The next use at which the plan has just these units at once, as one of them may have uses of its own before,
        which this rank leaves out; where there is none, the use that is expected."""
        wanted = {name for name in names if name not in self.held}
        groups = self.plan.groups
        for first, last in groups[bisect_left(groups, (self.at, 0)) :] if len(wanted) > 1 else ():
            uses = range(first, last + 1)
            if (
                last < self.limit
                and wanted == {self.plan.uses[k].unit for k in uses}
                and all(self.plan.opens[k] or self.plan.uses[k].unit in self.awaited for k in uses)
                and not any(self.must_come(k, names) for k in range(self.at, first))
            ):
                return first
        return self.at

    def needed(self, issued: int, use: int) -> int:
        """How many gathers are issued once a use has what it needs, of which `issued` are already."""
        for i in range(self.plan.due[use], issued, -1):
            if self.plan.gathers[i - 1].first <= use:
                return i
        return issued

    def find(self, name: str, start: int, names: Sequence[str], may_wrap: bool) -> int | None:
        """Which use this is, from `start` on; -1 if none, since the bytes are good; None if it is outside the plan."""
        plan = self.plan
        planned = plan.by_name.get(name)
        if planned is None:
            return None
        if name in self.held:
            return -1
        ahead_of = planned.uses[bisect_left(planned.uses, start) :]
        may = (k for k in ahead_of if k < self.limit and (plan.opens[k] or name in self.awaited))
        ahead = next(may, None)
        if ahead is not None and not any(self.must_come(k, names) for k in range(start, ahead)):
            return ahead
        return planned.uses[0] if may_wrap else None

    def must_come(self, use: int, names: Sequence[str]) -> bool:
        """Whether this rank still has to come here, before `names`: not to a forward, which it may leave out, nor if
        it was at the unit in its backward."""
        unit = self.plan.uses[use].unit
        if use < self.plan.turn or not self.plan.uses[use].reduces or unit not in self.awaited or unit in names:
            return False
        first, last = self.plan.uses[use].group
        if not all(self.plan.uses[k].unit in self.used for k in range(first, last + 1)):
            return False  # it was used elsewhere, and not in this call
        seen = [k for k in self.plan.by_name[unit].uses if k in self.seen]  # none: only its gradient comes, see "await"
        return bool(seen) and all(self.plan.opens[k] for k in seen)

    def startable(self, use: int, issued: int, needed: int, good: Mapping[str, int]) -> list[int]:
        """The gathers that the plan issues at `use`, without those that have to wait and can: for uses past `needed`.

        Raises:
            ScheduleError: one has to wait, for a unit that must stay `good`, and cannot.
        """
        due = range(issued, self.plan.due[use])
        over = self.overwritten(due, good)
        if over is None:
            return list(due)
        if any(self.plan.gathers[i].first <= needed for i in range(over[0], self.plan.due[use])):
            self.refuse(*over)
        return list(range(issued, over[0]))  # what is ahead of its use starts when the bytes are released

    def release(self, names: Sequence[str]) -> None:
        """Units are given back: gathers start that waited for their bytes."""
        if self.agreed:
            return
        for name in names:
            if name not in self.held:
                raise ScheduleError(
                    f"release: the unit {name!r} is not gathered. Call state, w = unshard(state, {name!r}) first."
                )
        for name in names:
            self.held.discard(name)
            there = self.live & self.plan.gathers_of[name]
            if there and self.plan.gathers[there.bit_length() - 1].last < self.at and name not in self.plan.stays:
                self.live &= ~there
                self.actions.append(("free", name))
        if self.at and self.issued < self.plan.due[self.at - 1]:
            due = self.startable(self.at - 1, self.issued, -1, self.good())
            self.gather(self.issue(due))
        self.close_if_over()

    def peer_gathers(self) -> None:
        """The next gather, since a peer waits for it: uses before it are passed over. Not if it cannot be issued."""
        start: list[int] = []
        while not (start or self.agreed or self.issued == len(self.plan.gathers)):
            i = self.issued
            if self.overwritten((i,), self.good()) is not None:
                return
            start = self.issue((i,))
            self.at = max(self.at, self.plan.gathers[i].start)
            self.gather(start)

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

    def reduction_of(self, unit: str) -> int | None:
        """Which reduction of this round a gradient of the unit is for, -1 if its turn is over; None: of no round."""
        reductions = self.plan.reductions
        if reductions and reductions[self.reduced].unit == unit:  # nearly always
            return self.reduced
        which = self.plan.reductions_of.get(unit, [])
        left = which[bisect_left(which, self.reduced) :]
        return next((i for i in left if i not in self.early), -1) if which else None

    def gradient(self, unit: str) -> None:
        """A gradient came."""
        mine = self.reduction_of(unit)
        if mine is None:
            self.reduce(())
            self.actions.append(("unplanned", unit))
        else:
            if mine < 0:
                self.round()
                mine = self.reduction_of(unit)
                assert mine is not None
            elif self.due:
                self.reduce(self.take_due())
            self.actions.append(("keep", mine))
            self.reduce(self.due_at(mine))

    def empty(self, unit: str) -> None:
        """A gradient without elements came: nothing to send, so that no peer need come here."""
        self.reduce(self.take_due())
        self.awaited.discard(unit)
        self.training = True

    def skip(self, unit: str) -> None:
        """No gradient of this unit will come, and this rank need not come to it again."""
        self.awaited.discard(unit)
        self.used.discard(unit)

    def expect(self, unit: str) -> None:
        """A gradient of this unit will come in this pass, and nothing stands for it until then."""
        if unit in self.plan.index:
            self.used.add(unit)
            self.awaited.add(unit)

    def round(self) -> None:
        """This round is over."""
        self.reduce(self.rest_of_round())

    def closed_round(self) -> None:
        """So it is for the pass, if one is under way: no more gradients come in it that peers may be waiting for."""
        due = self.rest_of_round()
        if self.training and not self.round_done:
            due = due or [(i, False) for i in range(len(self.plan.reductions))]
            self.round_done = True
        self.reduce(due)

    def tree_gradient(self, unit: str) -> None:
        """A gradient of a whole tree came, which is of no pass."""
        before = self.training, self.round_done
        self.gradient(unit)
        self.training, self.round_done = before

    def tree_empty(self, unit: str) -> None:
        """The same, of one without elements."""
        self.reduce(self.take_due())

    def peer_reduces(self) -> None:
        """The next reduction, since a peer waits for it. None if its gradient may still come."""
        over = self.phase == "forward" or (self.phase and self.round_done)  # a driven pass has one round
        if not self.due and self.plan.reductions and not over:
            self.zero_next()
        if self.due:
            self.reduce((self.due.pop(0),))

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

    def begin(self, agreed: bool = False) -> None:
        self.close()
        self.phase, self.agreed = "forward", agreed

    def turn(self) -> None:
        self.phase = "backward" if self.phase else ""

    def over(self) -> None:
        """The pass is over. It trains on every rank, and goes to its end even where this one used nothing in it."""
        if self.phase:
            self.training = True
            self.at = self.at if self.agreed else len(self.plan.uses)
        self.close()
        self.phase, self.agreed = "", False

    def finish(self, step: bool = False) -> None:
        rest = self.rest_of_pass(step)
        self.in_order(rest, self.rest_of_round())

    def look(self) -> None:
        self.in_order(self.rest_of_pass(step=True), ())

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


_EVENTS: dict[str, Any] = {
    "unshard": Walk.unshard,
    "release": Walk.release,
    "reduce": lambda walk, unit: (walk.gradient(unit), walk.close_if_over()),
    "reduce tree": Walk.tree_gradient,
    "empty": lambda walk, unit: (walk.empty(unit), walk.close_if_over()),
    "empty tree": Walk.tree_empty,
    "skip": Walk.skip,
    "await": Walk.expect,
    "begin": Walk.begin,
    "begin agreed": lambda walk: walk.begin(agreed=True),
    "turn": Walk.turn,
    "end": Walk.over,
    "close": Walk.close,
    "round": Walk.closed_round,
    "finish": Walk.finish,
    "step": lambda walk: walk.finish(step=True),
    "look": Walk.look,
    "peer gathers": Walk.peer_gathers,
    "peer reduces": Walk.peer_reduces,
}


OTHERS = 4096  # positions beside the nominal path that are remembered


Move = tuple["Position", tuple[Action, ...]]  # where an event leads, and what is to be done


class Position(dict[Event, Move]):
    """Where a program stands: a cursor, and by event the move from it, which is worked out when it is first asked for.

    `position["release", ("a",)]` changes nothing: who makes the move goes on from the position that it leads to.

    Raises:
        ScheduleError: as `advance`.
    """

    __slots__ = ("cursor", "positions")
    __eq__, __repr__ = object.__eq__, object.__repr__  # a dict's go through all that its moves reach

    def __init__(self, cursor: Cursor, positions: Positions) -> None:
        self.cursor, self.positions = cursor, positions

    def __missing__(self, event: Event) -> Move:
        cursor, actions = advance(self.positions.plan, self.cursor, event)
        self[event] = move = self.positions.at(cursor), actions
        return move


class Positions:
    """The positions of a plan that are known. `start` is where a step begins."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.start = Position(Cursor(plan), self)
        self.remember()

    def remember(self) -> None:
        """The nominal path, and nothing else."""
        self.start.clear()
        self.known = {self.start.cursor: self.start}
        self.most = sys.maxsize
        for bounded in (False, True):
            position = self.start
            with suppress(ScheduleError):  # an order that repeats units may be one that nobody follows use by use
                for event in nominal(self.plan, bounded):
                    position, _ = position[event]
        self.most = len(self.known) + OTHERS

    def at(self, cursor: Cursor) -> Position:
        """The position with this cursor."""
        found = self.known.setdefault(cursor, Position(cursor, self))
        if len(self.known) > self.most:
            self.remember()
        return found


def nominal(plan: Plan, bounded: bool) -> Iterator[Event]:
    """The events of a step that does what the plan says, use by use.

    Args:
        bounded: by a transform, which says where the pass begins, turns and ends; else by hand.
    """
    reduces = grouped((plan.uses[reduction.use].group[1], reduction.unit) for reduction in plan.reductions)
    if bounded:
        yield "begin", ()
    for first, last in plan.groups:
        if bounded and first == plan.turn:
            yield "turn", ()
        names = tuple(use.unit for use in plan.uses[first : last + 1])
        yield "unshard", names
        for unit in reduces.get(last, ()):
            yield "reduce", (unit,)
        yield "release", names
    if bounded:
        yield "end", ()
    yield "step", ()
