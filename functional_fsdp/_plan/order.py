"""Order: what a lineage knows of the order in which its units are used. One value, of four kinds.

    Schedule(order=[...])          fixed
    Schedule(order="recorded")     recorded ── the first step, without a plan ──▶ fixed: as the first rank used them
    nothing                        default ── a module says it better ──▶ guessed ── the first step ──▶ fixed

While an order is recorded, every use is one that no plan names. A guess is followed, and what ranks really did becomes
the order after the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .._spec.schedule import Order, Schedule
from .program import Program, Seen

__all__ = ["DefaultOrder", "FixedOrder", "GuessedOrder", "Known", "RecordedOrder", "known"]


@dataclass(frozen=True)
class FixedOrder:
    """The plan's order is that of the program."""


@dataclass(frozen=True)
class DefaultOrder:
    """That of the layout, until a module's structure says it better."""


@dataclass(frozen=True)
class GuessedOrder:
    """That of a module's structure. `seen`: what this rank did in the first step, once it is over."""

    seen: Seen | None = None


@dataclass(frozen=True)
class RecordedOrder:
    """It is being recorded: the calls of this step so far, and how many uses of them are the forward, once known."""

    calls: Order = ()
    forward: int | None = None

    def used(self, names: Sequence[str]) -> RecordedOrder:
        """One more call."""
        call = names[0] if len(names) == 1 else tuple(names)
        return replace(self, calls=(*self.calls, call))

    def turned(self) -> RecordedOrder:
        """The forward is over, if it was not before."""
        if self.forward is not None:
            return self
        return replace(self, forward=len(Program(self.calls).order))


Known = FixedOrder | DefaultOrder | GuessedOrder | RecordedOrder


def known(schedule: Schedule) -> Known:
    """What a schedule says before the first step."""
    if schedule.order == "recorded":
        return RecordedOrder()
    return DefaultOrder() if schedule.order is None else FixedOrder()
