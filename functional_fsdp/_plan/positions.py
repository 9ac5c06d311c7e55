"""Positions: an automaton of a plan, so that a step looks up what `advance` has worked out once.

    Cursor ──("unshard", "a")──▶ Cursor ──("release", "a")──▶ Cursor ── ...       the nominal path: made with the plan
       └────("unshard", "c")──▶ Cursor ── ...                                     other paths: worked out when taken

A pass ends where it began, so a training of any length goes round in it. What other paths add is bounded: a program
that never does the same twice has it forgotten from time to time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress

from .._common.errors import ScheduleError
from .advance import Event, advance
from .cursor import Cursor
from .plan import Plan
from .walk import Action

__all__ = ["Move", "Position", "Positions", "nominal"]

OTHERS = 4096  # positions beside the nominal path that are remembered


class Position:
    """A cursor, and the moves from it that were worked out."""

    __slots__ = ("cursor", "moves")

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.moves: dict[Event, Move] = {}


Move = tuple[Position, tuple[Action, ...]]  # where an event leads, and what is to be done


class Positions:
    """The positions of a plan that are known. `start` is where a step begins."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.start = Position(Cursor(plan))
        self.remember()

    def remember(self) -> None:
        """The nominal path, and nothing else."""
        self.start.moves.clear()
        self.known = {self.start.cursor: self.start}
        self.most = sys.maxsize
        for bounded in (False, True):
            position = self.start
            with suppress(ScheduleError):  # an order that repeats units may be one that nobody follows use by use
                for event in nominal(self.plan, bounded):
                    position, _ = self.move(position, event)
        self.most = len(self.known) + OTHERS

    def move(self, position: Position, event: Event) -> Move:
        """Where an event leads from a position.

        Raises:
            ScheduleError: as `advance`.
        """
        found = position.moves.get(event)
        if found is None:
            cursor, actions = advance(self.plan, position.cursor, event)
            found = position.moves[event] = self.known.setdefault(cursor, Position(cursor)), actions
            if len(self.known) > self.most:
                self.remember()
        return found


def nominal(plan: Plan, bounded: bool) -> Iterator[Event]:
    """The events of a step that does what the plan says, use by use.

    Args:
        bounded: by a transform, which says where the pass begins, turns and ends; else by hand.
    """
    reduces: dict[int, list[str]] = {}
    for reduction in plan.reductions:
        reduces.setdefault(plan.uses[reduction.use].group[1], []).append(reduction.unit)
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
