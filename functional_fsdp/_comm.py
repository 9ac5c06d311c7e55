"""Comm: a plan and where a rank stands in it. Pure: unit names in, numbers of gathers and reductions out.

    plan     a    b    c  |  c    b    a        uses, forward and backward; `|` is the turn
    cursor             ^                        the use that is expected next

Every rank issues gathers in the plan's order, and reductions in the plan's order, whatever it uses itself. So a use is
matched with the program, and everything that the plan issues up to there is issued:

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
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from ._errors import ScheduleError
from ._plan import Plan
from ._status import described

__all__ = ["Comm"]


class Comm:
    """Where a step stands. `print(state.comm)` shows it.

    Attributes:
        plan: what is followed; cursor: the use expected next; issued: gathers issued in this pass.
        live: {unit: its gather}, whose bytes are good or under way; held: units handed out and not released.
        waiting: reductions whose gradient came early; reduced: reductions issued in this round.
        flying: units whose gather is under way; reducing: reductions under way (snapshots only).
    """

    def __init__(self, plan: Plan, turn: int | None = None) -> None:
        self.plan = plan
        self.known = turn is not None  # else the turn is a guess from the order
        self.turn = plan.turn if turn is None else turn
        self.opens = plan.opens(self.turn)
        self.sharing = {unit: frozenset(others) for unit, others in plan.sharing.items()}
        self.flying: tuple[str, ...] = ()
        self.reducing = 0
        trained = {reduction.unit for reduction in plan.reductions}
        #: last uses of units without gradients, which owe nothing from there on
        self.settling = frozenset(unit.uses[-1] for unit in plan.units if unit.name not in trained)
        self.bounded = False  # whether `begin` and `end` say where passes are
        self.limit = len(plan.uses)  # a use comes before it: in the forward of such a pass, before the turn
        self.reset()

    def reset(self) -> None:
        """Back to the state between steps."""
        self.cursor = self.issued = self.reduced = self.passes = 0
        self.jumped = False  # whether the last use was another than the one expected
        self.live: dict[str, int] = {}
        self.held: set[str] = set()
        self.lapsed: list[tuple[int, bool]] = []  # reductions that the end of a pass makes due
        self.used: set[str] = set()  # units, in this pass
        self.owing: set[str] = set()  # units used in this pass whose gradient, or last use, has not come
        self.seen: set[int] = set()  # uses, in this pass
        self.waiting: set[int] = set()  # reductions whose gradient came early
        self.training = False  # whether a gradient came in this pass
        self.through = False  # whether the last reduction of a round was issued in this pass

    @property
    def idle(self) -> bool:
        """Whether nothing has happened since the last step."""
        return not (self.cursor or self.live or self.held or self.reduced or self.waiting or self.passes)

    # ---------------------------------------------------------------- gathers

    def use(self, names: Sequence[str]) -> tuple[list[int], list[str]]:
        """Units are asked for, at once. Returns the gathers to issue now, in order, and units outside the plan.

        Raises:
            ScheduleError: a gather would write over a unit that was not released. Nothing has changed then.
        """
        plan, cursor = self.plan, self.cursor
        if (
            len(names) == 1
            and cursor < self.limit
            and plan.uses[cursor].unit == names[0]
            and (self.opens[cursor] or names[0] in self.owing)
        ):  # nearly always
            due = [*range(self.issued, plan.due[cursor])]
            if due and self.held:
                due = self._due(cursor, self.issued, cursor, dict.fromkeys(self.held, -1))
            if due:
                self._issue(due)
            self.cursor, self.jumped, name = cursor + 1, False, names[0]
            self.seen.add(cursor)
            self.used.add(name)
            self.held.add(name)
            if self.opens[cursor]:
                self.owing.add(name)
            if cursor in self.settling:
                self.owing.discard(name)
            return due, []
        outside: list[str] = []
        mine: dict[str, int] = {}  # what is handed out -> the gather since which it is good
        taken: list[int] = []
        last, wraps, issued = cursor - 1, False, self.issued
        for name in sorted(names, key=lambda name: (name not in self.held, self._ahead(name))):
            found = self._find(name, last + 1, names, may_wrap=not self.bounded and not wraps and last < cursor)
            wrapping = found is not None and 0 <= found <= last
            first = 0 if wrapping else issued
            if found is not None and found >= 0 and not plan.by_name[name].nbytes and (
                self._over(range(first, plan.due[found]), dict.fromkeys(self.held, -1)) is not None
            ):  # fmt: skip
                found = -1  # it is resident: good whatever is gathered
            if found is None or (found >= 0 and self._over(range(first, self._needed(first, found)), mine)):
                outside.append(name)  # not in the program, or the plan has it after others that are named at once
                continue
            if found >= 0:
                last, wraps, issued = found, wraps or wrapping, self._needed(first, found)
                taken.append(found)
            mine[name] = issued - 1 if found >= 0 else -1
        handed = [name for name in names if name not in outside]
        if not taken:
            self.held.update(handed)
            return [], outside
        closing = list(range(self.issued, self._end())) if wraps else []
        good = dict.fromkeys(self.held, -1) | mine
        over = self._over(closing, {name: since for name, since in good.items() if since < 0})
        if over is not None:
            self._refuse(*over)
        due = self._due(last, 0 if wraps else self.issued, last, good)
        if wraps:
            self._issue(closing)
            self._next_pass()
        self._issue(due)
        self.cursor = taken[-1] + 1
        self.seen.update(taken)
        self.used.update(handed)
        self.held.update(handed)
        self.owing.update([plan.uses[use].unit for use in taken if self.opens[use]])
        self.owing.difference_update([plan.uses[use].unit for use in taken if use in self.settling])
        self.jumped = True
        return closing + due, outside

    def _ahead(self, name: str) -> int:
        """The next use of a unit in this pass; after all others if there is none."""
        planned = self.plan.by_name.get(name)
        uses = planned.uses if planned else ()
        return next((k for k in uses if k >= self.cursor), len(self.plan.uses))

    def _needed(self, issued: int, use: int) -> int:
        """How many gathers are issued once a use has what it needs, of which `issued` are already."""
        for i in range(self.plan.due[use], issued, -1):
            if self.plan.gathers[i - 1].first <= use:
                return i
        return issued

    def _over(self, gathers: Iterable[int], good: Mapping[str, int]) -> tuple[int, str] | None:
        """The first of these gathers that would write over one of the units, and which. Gathers before a unit's own
        one, which come to `good[unit]`, do not matter."""
        for i in gathers if good else ():
            shares = self.sharing[self.plan.gathers[i].unit]
            for name in sorted(good):
                if i > good[name] and name in shares:
                    return i, name
        return None

    def _find(self, name: str, at: int, names: Sequence[str], may_wrap: bool) -> int | None:
        """Which use this is; -1 if none, since the bytes are good; None if it is outside the plan."""
        plan = self.plan
        planned = plan.by_name.get(name)
        if planned is None:
            return None
        if name in self.held:
            return -1
        ahead = next((k for k in planned.uses if at <= k < self.limit and (self.opens[k] or name in self.owing)), None)
        if ahead is not None and not any(self._owed(k, names) for k in range(at, ahead)):
            return ahead
        return planned.uses[0] if may_wrap else None

    def _owed(self, use: int, names: Sequence[str]) -> bool:
        """Whether this rank still has to come here, before `names`: not if it was at the unit in its backward."""
        unit = self.plan.uses[use].unit
        if not self.plan.uses[use].reduces or unit not in self.owing or unit in names:
            return False
        return not any(k in self.seen and not self.opens[k] for k in self.plan.by_name[unit].uses)

    def _due(self, use: int, issued: int, needed: int, good: Mapping[str, int]) -> list[int]:
        """The gathers that the plan issues at `use`, without those that have to wait and can: for uses past `needed`.

        Raises:
            ScheduleError: one has to wait, for a unit that must stay `good`, and cannot.
        """
        due = range(issued, self.plan.due[use])
        over = self._over(due, good)
        if over is None:
            return list(due)
        if any(self.plan.gathers[i].first <= needed for i in range(over[0], self.plan.due[use])):
            self._refuse(*over)
        return list(range(issued, over[0]))  # what is ahead of its use starts when the bytes are released

    def _refuse(self, gather: int, over: str) -> NoReturn:
        raise ScheduleError(
            f"gathering {self.plan.gathers[gather].unit!r} would write over {over!r}, which was not released "
            f"(they share bytes of the arena). Call state = release(state, {over!r}) first, or keep it: "
            f"Schedule(keep={{{over!r}}}), or name units that are used at once in one call and in Schedule(order=...)."
        )

    def _issue(self, gathers: Sequence[int]) -> None:
        for i in gathers:
            unit = self.plan.gathers[i].unit
            for other in self.live.keys() & self.sharing[unit]:
                del self.live[other]
            self.live[unit] = i
        self.issued += len(gathers)

    @property
    def ahead(self) -> bool:
        """Whether peers may wait for gathers of this pass that this rank has not come to."""
        return self.issued < self._end()

    def _end(self) -> int:
        """The gathers of this pass up to where it ends: after the forward, if it is an evaluation."""
        if not self.cursor:
            return self.issued
        last = len(self.plan.uses) if self.training or self.cursor > self.turn else self.turn
        return max(self.issued, self.plan.due[last - 1])

    @property
    def over(self) -> bool:
        """Whether this rank left something out of this pass, and comes to nothing more in it."""
        if self.owing or self.held or self.bounded or not (self.training and self.cursor):
            return False
        return bool(self.reduced or self.waiting) or self.ahead

    def pass_by(self) -> int | None:
        """The next gather, since a peer waits for it: uses before it are passed over. None if it cannot be issued."""
        at = self.issued
        if at == len(self.plan.gathers) or self._over((at,), dict.fromkeys(self.held, -1)) is not None:
            return None
        self._issue((at,))
        self.cursor = max(self.cursor, self.plan.gathers[at].start)
        return at

    def let_lapse(self) -> tuple[int, bool] | None:
        """The next reduction, issued because a peer waits for it. None if its gradient may still come."""
        if not self.lapsed and self.plan.reductions:
            self._lapse_next()
        return self.lapsed.pop(0) if self.lapsed else None

    def _next_pass(self) -> None:
        if self.training and (self.reduced or self.waiting or not self.through):  # what did not come will not any more
            self.through = False
            self._pass_over(len(self.plan.uses))
        self.issued = self.cursor = 0
        for some in (self.used, self.owing, self.seen):
            some.clear()
        self.training = self.through = False
        self.passes += 1

    def release(self, names: Sequence[str]) -> tuple[list[int], list[str]]:
        """Units are given back. Returns gathers that waited for their bytes, and the units whose bytes are free now."""
        free = []
        for name in names:
            self.held.discard(name)
            gather = self.live.get(name)
            if gather is not None and self.plan.gathers[gather].last < self.cursor:
                del self.live[name]
                free.append(name)
        if not self.cursor or self.issued >= self.plan.due[self.cursor - 1]:
            return [], free
        due = self._due(self.cursor - 1, self.issued, -1, dict.fromkeys(self.held, -1))
        self._issue(due)
        return due, free

    # ---------------------------------------------------------------- reductions

    def turn_of(self, unit: str) -> int | None:
        """Which reduction of this round a gradient of the unit is for, -1 if its turn is over; None: of no round."""
        reductions = self.plan.reductions
        if not reductions:
            return None
        if reductions[self.reduced].unit == unit:  # nearly always
            return self.reduced
        which = [i for i, reduction in enumerate(reductions) if reduction.unit == unit]
        if not which:
            return None
        return next((i for i in which if i >= self.reduced and i not in self.waiting), -1)

    def reduce(self, mine: int) -> list[tuple[int, bool]]:
        """A gradient came for reduction `mine`. Returns (reduction, whether its gradient came, else zeros) to issue."""
        self.training = True
        self.owing.discard(self.plan.reductions[mine].unit)
        done = self.lapse()
        if mine == self.reduced and not self.waiting:  # nearly always
            self._reduced()
            return [*done, (mine, True)]
        self.waiting.add(mine)
        while self.waiting:
            given = self.reduced in self.waiting
            if not given and not self._skipped(self.reduced):
                break
            done.append((self.reduced, given))
            self._reduced()
        return done

    def waive(self, unit: str) -> None:
        """This rank will have no gradient of a unit that it used in the forward, and need not come to it again."""
        self.owing.discard(unit)
        self.used.discard(unit)

    def skipped(self) -> None:
        """Let the reductions of units that this rank has passed over for good lapse, if it is their turn."""
        self._pass_over(self.cursor)

    def _pass_over(self, end: int) -> None:
        """Let the reductions before the use `end` lapse, up to the first whose gradient may still come."""
        reductions = self.plan.reductions
        while reductions and not self.through and reductions[self.reduced].use < end and self._lapse_next():
            pass

    def _lapse_next(self) -> bool:
        """Let the next reduction lapse, unless its gradient may still come."""
        given = self.reduced in self.waiting
        if not given and self.plan.reductions[self.reduced].unit in self.used:
            return False
        self.lapsed.append((self.reduced, given))
        self._reduced()
        return True

    def _reduced(self) -> None:
        """One more reduction of this round is issued."""
        self.waiting.discard(self.reduced)
        self.reduced += 1
        if self.reduced == len(self.plan.reductions):
            self.reduced, self.through = 0, True

    def lapse(self) -> list[tuple[int, bool]]:
        """Reductions that the end of a pass made due: what waited, and zeros for what did not come."""
        due, self.lapsed = self.lapsed, []
        return due

    def _skipped(self, reduction: int) -> bool:
        """Whether this rank has passed a reduction without having used its unit."""
        use, unit = self.plan.reductions[reduction].use, self.plan.reductions[reduction].unit
        if use >= self.cursor or unit in self.held:
            return False
        return use not in self.seen if self.plan.uses[use].unit == unit else unit not in self.used

    def close(self) -> list[tuple[int, bool]]:
        """End this round: everything that waits, and zeros for what did not come. Nothing if no round is under way."""
        rest = self.lapse()
        if not self.reduced and not self.waiting:
            return rest
        rest += [(i, i in self.waiting) for i in range(self.reduced, len(self.plan.reductions))]
        self.waiting.clear()
        self.reduced = 0
        return rest

    def begin(self) -> list[int]:
        """A pass begins that ends where `end` says. Returns the gathers that are left of the one before."""
        rest = self.finish(step=False)
        self.bounded, self.limit = True, self.turn if self.known else len(self.plan.uses)
        return rest

    def turned(self) -> None:
        """The forward of the pass that `begin` began is over."""
        self.limit = len(self.plan.uses)

    def end(self) -> None:
        """The pass that `begin` began is over; a use may begin the next one again."""
        self.bounded, self.limit = False, len(self.plan.uses)

    def finish(self, step: bool = True) -> list[int]:
        """The pass ends: the gathers that peers issue in it and this rank passed over.

        Args:
            step: so does the step, and what is held need not stay good.

        Raises:
            ScheduleError: a gather would write over a unit that was not released.
        """
        rest = list(range(self.issued, self._end()))
        over = None if step else self._over(rest, dict.fromkeys(self.held, -1))
        if over is not None:
            self._refuse(*over)
        self._issue(rest)
        if self.cursor:
            self._next_pass()
        return rest

    def __repr__(self) -> str:
        return described(self)
