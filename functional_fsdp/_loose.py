"""Loose: units gathered outside the arena, for uses that no plan names. Slower, never wrong.

Ranks first agree on the unit; then compute waits for its gather, into bytes that are this unit's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ._errors import ScheduleError
from ._layout import Bucket, Layout
from ._runtime import Runtime
from ._weights import Gathered, Lease

if TYPE_CHECKING:
    from ._state import State

__all__ = ["Loose"]


class Loose:
    """The units of one lineage that are, or were in this step, gathered outside its arena."""

    def __init__(self, run: Runtime, layout: Layout) -> None:
        self.run = run
        self.layout = layout
        self.names = tuple(layout.by_name)
        self.units: dict[str, Gathered] = {}
        self.warned: set[str] = set()

    def held(self, name: str) -> bool:
        """Whether a unit is handed out from here and not released."""
        return name in self.units and self.units[name].lease.held

    def lease(self, name: str) -> Lease:
        return self.units[name].lease

    def gather(self, state: State, name: str, warn: bool) -> None:
        if self.held(name):
            return
        self.agree(name, "unshard", warn)
        if name not in self.units:
            self.units[name] = Gathered(state, self.layout.by_name[name])
        self.units[name].gather(state)

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
                stacklevel=6,
            )

    def fill(self, name: str, parts: Iterable[tuple[Bucket, torch.Tensor]]) -> None:
        """The bytes of a unit that is gathered by the plan get the same: residuals of an earlier use lie here."""
        self.units[name].fill(parts)

    def release(self, name: str, debug: bool) -> None:
        self.units[name].release(debug)
        self.units[name].lease.held = False

    def clear(self) -> None:
        """Between steps nothing is held."""
        for gathered in self.units.values():
            gathered.lease.held = False
        self.units.clear()
