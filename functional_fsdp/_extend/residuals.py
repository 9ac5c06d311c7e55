"""Residuals of an earlier use of a unit, where it is gathered elsewhere now.

A unit that driven modules use lies by the plan in one use, and off the plan in another one of the same step. What
autograd kept points at the bytes of the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .._common.calls import provide
from .._engine.gathers import Arena, Gathers


def copy_to_fallback(gathers: Gathers, unit: str) -> None:
    """A unit that is gathered by the plan lies where it lay off the plan, too."""
    there = gathers.unplanned[unit]
    there.allocate()
    for part in gathers.arena.places[unit].parts:
        there.whole[part.bucket.name].copy_(part.whole)


def overwrite(arena: Arena, unit: str, whole: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    """Have a unit lie in its place, from these buckets, for residuals that point there, although the plan may have
    something else there now. Returns what puts that back."""
    memory, _ = arena.bytes[unit]
    size, parts = memory.nbytes(), arena.places[unit].parts
    there = [part.whole for part in parts]
    if size != arena.sizes[unit]:  # the bytes of another one, which may go
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


provide("extend", overwrite)
