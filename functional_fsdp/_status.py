"""Status: what a Comm shows of itself, in words."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._tree import bytes_text, table

if TYPE_CHECKING:
    from ._comm import Comm

__all__ = ["described", "snapshot", "status"]


def snapshot(comm: Comm, flying: Sequence[str], reducing: int) -> Comm:
    """A copy that does not change any more, with what the lanes are doing."""
    new = copy.copy(comm)
    new.live, new.held, new.waiting = dict(comm.live), set(comm.held), set(comm.waiting)
    new.used, new.owing, new.seen = set(comm.used), set(comm.owing), set(comm.seen)
    new.lapsed = list(comm.lapsed)
    new.flying, new.reducing = tuple(flying), reducing
    return new


def status(comm: Comm, unit: str) -> str:
    """What a unit is: resident, in flight, live, held or released."""
    if not comm.plan.by_name[unit].parts:
        return "resident, held" if unit in comm.held else "resident"
    if unit not in comm.live:
        return "held, overwritten" if unit in comm.held else "released"
    return ("in flight" if unit in comm.flying else "live") + (", held" if unit in comm.held else "")


def described(comm: Comm) -> str:
    """A table of the units, and where the step stands."""
    plan, count = comm.plan, len(comm.plan.uses)
    rows = []
    for unit in plan.units:
        lives = ", ".join(f"{a}–{b}" if a < b else str(a) for a, b in unit.lives)
        place = (bytes_text(unit.nbytes), f"{unit.address:,}", lives) if unit.parts else ("-", "-", "-")
        rows.append((unit.name, *place, unit.gathers or "-", status(comm, unit.name)))
    where = "between steps" if comm.idle else (
        f"use {comm.cursor} of {count} comes next"
        + (f" ({plan.uses[comm.cursor].unit})" if comm.cursor < count else " (the program is through)")
        + f", pass {comm.passes + 1}"
    )  # fmt: skip
    waits = f", {len(comm.waiting)} gradients wait for their turn" if comm.waiting else ""
    return (
        f"{table(('unit', 'bytes', 'address', 'gathered in uses', 'gathers', 'now'), rows)}\n"
        f"{where}; {comm.issued} of {len(plan.gathers)} gathers and {comm.reduced} of {len(plan.reductions)} "
        f"reductions of this pass issued, {comm.reducing} reductions in flight{waits}"
    )
