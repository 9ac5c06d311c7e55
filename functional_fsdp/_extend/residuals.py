"""Residuals of an earlier use of a unit, where it is gathered elsewhere now.

A unit that driven modules use lies by the plan in one use, and off the plan in another one of the same step. What
autograd kept points at the bytes of the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from .._common.calls import provide
from .._engine.gathers import Arena, Gathers
from .._plan.plan import Plan


def copy_to_fallback(gathers: Gathers, unit: str) -> None:
    """A unit that is gathered by the plan lies where it lay off the plan, too."""
    there = gathers.unplanned[unit]
    there.allocate()
    for part in gathers.arena.places[unit].parts:
        there.whole[part.bucket.name].copy_(part.whole)


class PlannedCopies(dict[str, Any]):
    """Units that are gathered off the plan, and copied to their planned place: by name what ends that; None: the plan
    has come to the unit itself. Gathers have one, so it is given them."""

    def put(self, gathers: Gathers, unit: str) -> Callable[[], None] | None:
        """A unit that is gathered off the plan is needed where it lies by the plan, too. Returns what ends that; None
        if it cannot be."""
        if unit in self:
            return lambda: None  # it lies there for a call around this one
        outside = gathers.unplanned.get(unit)
        if unit not in gathers.arena.places or not outside or gathers.carrier.read or gathers.is_crowded(unit):
            return None
        for name, other in gathers.flying.items():
            if name == unit or gathers.progress.plan.overlap(unit, name):
                gathers.run.lanes.wait(other.gathered)
        self[unit] = overwrite(gathers.arena, unit, outside.whole)
        return partial(self._put_away, gathers, unit)

    def lie_over(self, plan: Plan, unit: str) -> bool:
        """Whether one of them lies where a unit would."""
        return unit in plan.crowded and any(plan.overlap(unit, name) for name in self)

    def make_way(self, gathers: Gathers, unit: str) -> list[str]:
        """A gather writes where they may lie: they are put away, and put there again once it is done. Nothing if it is
        the unit itself: it now lies there by the plan."""
        lying = [name for name in self if gathers.progress.plan.overlap(unit, name)]
        for name in lying:
            self._put_away(gathers, name)
        if unit in self:
            self[unit] = None
        return lying

    def _put_away(self, gathers: Gathers, unit: str) -> None:
        """What the plan has where a unit was copied to lies there again."""
        undo = self.pop(unit, None)
        if undo is not None:
            undo()
            gathers.fence_off()  # what is gathered there next comes after this


def overwrite(arena: Arena, unit: str, whole: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    """Have a unit lie in its place, from these buckets, for residuals that point there, although the plan may have
    something else there now. Returns what puts that back."""
    which, planned, _ = arena.where[unit]
    memory = arena.memory[which]
    size, parts = memory.nbytes(), arena.places[unit].parts
    there = [part.whole for part in parts]
    if size != planned:  # the bytes of another one, which may go
        there = [torch.empty(0, dtype=torch.uint8, device=arena.run.device).set_(memory)]
    kept = [some.clone() for some in there]
    arena.allocate(unit)
    for part in parts:
        part.whole.copy_(whole[part.bucket.name])

    def undo() -> None:
        if memory.nbytes() != size:
            memory.resize_(0)
            memory.resize_(size)
        for some, was in zip(there, kept, strict=True):
            some.copy_(was)

    return undo


provide("extend", PlannedCopies)
