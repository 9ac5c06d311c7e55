"""Unplanned: units gathered outside the arena, for uses that no plan names. Slower, never wrong.

Ranks first agree on the unit; then compute waits for its gather, into bytes that are this unit's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from .._common.errors import ScheduleError
from .._plan.layout import Bucket, Layout
from .._plan.plan import Plan
from .._runtime.runtime import Runtime
from .._storage.stored import Stored
from .._storage.weights import Gathered, Loan

__all__ = ["LANE", "Unplanned"]

LANE = "gather"  # by which units go in a pass in which ranks agree on each: its communicator is there anyway


class Unplanned:
    """The units of one lineage that are, or were in this step, gathered outside its arena."""

    def __init__(self, run: Runtime, layout: Layout, debug: bool) -> None:
        self.run, self.debug = run, debug
        self.layout = layout
        self.names = tuple(layout.by_name)
        self.units: dict[str, Gathered] = {}
        self.warned: set[str] = set()

    def held(self, name: str) -> bool:
        """Whether a unit is handed out from here and not released."""
        return name in self.units and self.units[name].loan.held

    def loan(self, name: str) -> Loan:
        return self.units[name].loan

    def take_turn(self, state: Stored, plan: Plan, name: str, backward: bool) -> None:
        """Wait until all gather this unit, in a pass in which ranks may come to units in orders of their own, and to
        different ones. The caller then gathers it.

            rank 0   a          c   d        wants c: helps with b, then has c
            rank 1   a    b     c   d

        Every rank says what it wants next. Of that, all gather what comes first in the plan, which is a guess, until
        this rank has its own. The others wait meanwhile, or are done (`all_done`), and help.
        """
        if plan.by_name[name].parts:  # else it lies on every rank
            number = _number(plan.index[name], len(plan.units), backward)
            self._meet(state, plan, number, f"unshard {name!r}")

    def all_done(self, state: Stored, plan: Plan, backward: bool) -> None:
        """This rank wants nothing more in such a forward, or backward. Helps the others until that is so for all."""
        count = len(plan.units)
        self._meet(state, plan, 2 * count + 1 if backward else count, "the end of the pass" if backward else "the turn")

    def _meet(self, state: Stored, plan: Plan, number: int, what: str) -> None:
        """Gather what peers want until all are here."""
        while (found := self.run.next_of(number, self.names, what)) != number:
            name = plan.units[min(found, 2 * len(plan.units) - found)].name
            Gathered(state, self.layout.by_name[name], self.debug).gather(state, LANE)

    def gather(self, state: Stored, name: str, lane: str) -> None:
        """Gather a unit into its own bytes."""
        if name not in self.units:
            self.units[name] = Gathered(state, self.layout.by_name[name], self.debug)
        self.units[name].gather(state, lane)

    def agree(self, name: str, verb: str, warn: bool) -> None:
        """Every rank must come with this. One warning for each unit that a schedule does not expect.

        Raises:
            ScheduleError: in a step that is being captured: ranks cannot agree when it is replayed.
        """
        if self.run.capturing:
            raise ScheduleError(
                f"{verb}({name!r}) is not what the schedule expects here, and a captured step cannot stop for ranks to "
                "agree on it. Give the order of use, Schedule(order=[...]), with as many uses as the step has, or have "
                "it recorded: Schedule(order='recorded')."
            )
        self.run.agree(self.names.index(name), self.names, verb)
        if warn and name not in self.warned:
            self.warned.add(name)
            warnings.warn(
                f"{verb}({name!r}) is not what the schedule expects here: it works, but nothing is overlapped. Give "
                "the order of use, Schedule(order=[...]), or have it recorded: Schedule(order='recorded').",
                stacklevel=7 if verb == "unshard" else 5,  # where the verb was called
            )

    def fill(self, name: str, parts: Iterable[tuple[Bucket, torch.Tensor]]) -> None:
        """The bytes of a unit that is gathered by the plan get the same: residuals of an earlier use lie here."""
        self.units[name].fill(parts)

    def release(self, name: str) -> None:
        self.units[name].release()
        self.units[name].loan.held = False

    def clear(self) -> None:
        """Between steps nothing is held."""
        for gathered in self.units.values():
            gathered.loan.held = False
        self.units.clear()


def _number(unit: int, count: int, backward: bool) -> int:
    """Where a use comes in a forward, the turn, and its backward, of so many units.

    >>> _number(1, 3, False), _number(1, 3, True), _number(2, 3, True)
    (1, 5, 4)
    """
    return 2 * count - unit if backward else unit
