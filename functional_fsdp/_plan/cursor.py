"""Cursor: where a program stands, as a value. Names and integers only: it keeps no tensor, no event and no bytes alive.

    plan     a    b    c  |  c    b    a        uses, forward and backward; `|` is the turn
    at                 ^                        the use that is expected next

Every State carries the cursor that it was returned with: `print(state.cursor)`. What follows from it is said by
`advance(plan, cursor, event)`, see `advance`; what has come of that so far is asked of the lanes, see `in_flight`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .._common.calls import provided
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
