"""Walk: a cursor while an event is worked out, with sets in the place of bits; and what ends rounds and passes. Pure.

Cursor ──▶ Walk ── the rules of `_plan.advance` ──▶ Cursor, actions
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from .._common.errors import ScheduleError
from .cursor import Cursor, bits, end_of_pass, numbers
from .plan import Plan

__all__ = ["Action", "Collision", "Due", "Walk"]

Action = tuple[str, Any]
Due = tuple[int, bool]  # a reduction, and whether its gradient came


class Collision(ScheduleError):
    """A gather would write over a unit that was not released."""


class Walk:
    """Where a program stands, and what is to be done, so far."""

    def __init__(self, plan: Plan, cursor: Cursor) -> None:
        self.plan = plan
        self.at, self.issued, self.reduced = cursor.at, cursor.issued, cursor.reduced
        self.phase, self.agreed = cursor.phase, cursor.agreed
        self.live = cursor.live
        self.held, self.used, self.awaited = (
            {plan.units[i].name for i in numbers(some)}
            for some in (cursor.held_bits, cursor.used_bits, cursor.awaited_bits)
        )
        self.seen, self.early = set(numbers(cursor.seen_bits)), set(numbers(cursor.early_bits))
        self.due = [*cursor.due]
        self.training, self.round_done = cursor.training, cursor.round_done
        self.actions: list[Action] = []

    def cursor(self) -> Cursor:
        index = self.plan.index
        return Cursor(
            self.plan,
            at=self.at,
            issued=self.issued,
            reduced=self.reduced,
            phase=self.phase,
            agreed=self.agreed,
            live_bits=bits(self.live.values()),
            held_bits=bits([index[name] for name in self.held]),
            used_bits=bits([index[name] for name in self.used]),
            awaited_bits=bits([index[name] for name in self.awaited]),
            seen_bits=bits(self.seen),
            early_bits=bits(self.early),
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
        for i in gathers if good else ():
            shares = self.plan.sharing[self.plan.gathers[i].unit]
            for name in sorted(good):
                if i > good[name] and name in shares:
                    return i, name
        return None

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
            if unit not in self.live or unit not in self.plan.stays:
                start.append(i)
            for other in self.live.keys() & self.plan.sharing[unit]:
                del self.live[other]
            self.live[unit] = i
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
        over = None if step else self.overwritten(rest, dict.fromkeys(self.held, -1))
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
