"""Gathers: how units that are asked for come to be there, and what their release sets free.

unshard ─▶ gathers to start now ─▶ the bytes' last release ─▶ gather lane ─▶ flying ─▶ compute waits ─▶ lent
release ─▶ a mark on compute ─▶ gathers that waited for the bytes
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from ._arena import Arena, Place
from ._copies import Copies
from ._cursor import Cursor
from ._errors import ScheduleError
from ._lanes import Mark
from ._layout import Layout
from ._order import Known, RecordedOrder
from ._plan import Plan
from ._positions import Move, Position
from ._runtime import Runtime
from ._staging import Staging
from ._symmetric import Windows
from ._unplanned import LANE, Unplanned
from ._weights import Lease, gather

if TYPE_CHECKING:
    from ._flat import FlatBuffer
    from ._state import State

__all__ = ["Gathers"]


class Gathers:
    """The part of an `Executor` through which weights go."""

    run: Runtime
    layout: Layout
    plan: Plan
    order: Known
    position: Position
    arena: Arena
    staging: Staging
    unplanned: Unplanned
    shared: Copies | Windows | None
    digests: list[int]
    grads: dict[str, FlatBuffer]
    fence: bool
    newest: Mark
    flying: dict[str, Place]
    released: dict[str, Mark]
    occupied: set[str]

    if TYPE_CHECKING:

        def move(self, kind: str, units: tuple[str, ...] = ()) -> Move: ...
        def carry_out(self, state: State, move: Move) -> None: ...
        def adopt(self, grads: object) -> None: ...
        def beside(self, state: State) -> AbstractContextManager[None]: ...

        @property
        def cursor(self) -> Cursor: ...

    def asked(self, names: tuple[str, ...], unplanned: bool) -> Move:
        """What follows where units are asked for. Changes nothing.

        Raises:
            ScheduleError: a gather would write over a unit that was not released.
        """
        if unplanned or isinstance(self.order, RecordedOrder):
            return self.position, tuple([("unplanned", name) for name in names])
        if self.unplanned.units:
            names = tuple([name for name in names if not self.unplanned.held(name)])
            if not names:
                return self.position, ()
        return self.move("unshard", names)

    def unshard(self, state: State, names: Sequence[str], move: Move) -> dict[str, dict[str, torch.Tensor]]:
        """The weights of units, once they are there; starts what the plan names next."""
        if self.shared and not self.shared.made:
            self.shared.prepare(self.plan)
        if self.run.cuda:
            self.staging.age()
        if isinstance(self.order, RecordedOrder):
            self.order = self.order.used(names)
        if state.grads is not self.grads and (state.grads or self.grads):
            self.adopt(state.grads)
        self.carry_out(state, move)
        lent = {}
        for name in names:
            lent[name] = dict(self._lend(state, name).weights)
        return lent

    def _lend(self, state: State, name: str) -> Lease:
        if self.unplanned.units and self.unplanned.held(name):
            return self.unplanned.lease(name)
        place = self.flying.pop(name, None)
        if place is not None:
            self.run.wait(place.ready(self.flying, self.newest) if self.run.cuda else place.gathered)
        else:
            place = self.arena.place(state, name)
        place.lease.held = True
        return place.lease

    def _gather(self, state: State, index: int) -> None:
        unit = self.plan.gathers[index].unit
        after = self._free(unit)
        fresh = self.arena.take(unit)
        place = self.arena.place(state, unit)
        if self.staging.reduced:
            self.staging.touched(self.layout.by_name[unit])
        self.digests[0] = zlib.crc32(place.key, self.digests[0])
        if fresh or self.fence:  # waits for all that compute has done: the bytes or the weights may be new
            self.fence = False
            after = self.run.mark()
        issued, job, single = place.fill(self.run, state, self.arena.reading)
        place.gathered = self.newest = self.run.submit("gather", issued, job, after, single, mark=place.gathered)
        self.flying[unit] = place

    def _gather_in_turn(self, state: State, unit: str, by_plan: bool) -> None:
        """A use on which ranks agree: at the unit's place, if that is wished, unless what is held lies there."""
        place = self.arena.places.get(unit)
        if self.unplanned.held(unit) or (by_plan and place and place.lease.held):
            return
        with self.beside(state):
            self.unplanned.take_turn(state, self.plan, unit, self.cursor.phase == "backward")
            self.staging.touched(self.layout.by_name[unit])
            if by_plan and not self._crowded(unit):
                self._free(unit)
                self.arena.take(unit)
                for part in self.arena.place(state, unit).parts:
                    gather(state, part.bucket, part.whole, LANE)
            else:
                self.unplanned.take(state, unit, LANE)
                self.unplanned.lease(unit).held = True

    def _crowded(self, unit: str) -> bool:
        """Whether something that is held lies where a unit would."""
        places = self.arena.places
        return any(name in places and places[name].lease.held for name in self.plan.sharing[unit])

    def _free(self, unit: str) -> Mark:
        """The point from which a unit's place may be written: the newest release of what lay there."""
        shares = self.plan.sharing[unit]
        if not shares.isdisjoint(self.occupied):
            raise ScheduleError(
                f"gathering {unit!r} would write over {', '.join(self.occupied)}, in whose backward it is."
            )
        if unit in self.flying or not shares.isdisjoint(self.flying):
            for name in [name for name in self.flying if name in shares or name == unit]:
                self.run.wait(self.flying.pop(name).gathered)  # skipped: nobody waited for it
        mark = None
        if self.released:
            for name in [name for name in self.released if name in shares or name == unit]:
                mark = self.released.pop(name)  # the dict is in order of release
        return mark

    def put_in_place(self, unit: str, weights: Mapping[str, torch.Tensor]) -> Callable[[], None] | None:
        """A unit that is gathered outside the plan is needed where it lay by the plan, as `weights`. Returns what ends
        that; None if it cannot be."""
        place, outside = self.arena.places.get(unit), self.unplanned.units.get(unit)
        if (
            not place
            or not outside
            or self.shared
            or self._crowded(unit)
            or any(place.lease.weights[key] is not w for key, w in weights.items())
        ):
            return None
        for name, other in self.flying.items():
            if name in self.plan.sharing[unit]:
                self.run.wait(other.gathered)
        undo = self.arena.put(unit, outside.whole)
        self.occupied.add(unit)

        def end() -> None:
            self.occupied.discard(unit)
            undo()
            self.fence = True  # what is gathered there next comes after this

        return end

    def also(self, unit: str) -> None:
        """A unit that is gathered by the plan is needed where it lay outside of it, too, until it is released."""
        self.unplanned.fill(unit, [(part.bucket, part.whole) for part in self.arena.places[unit].parts])

    def given_back(self, names: tuple[str, ...]) -> Move:
        """What follows where units are given back. Changes nothing.

        Raises:
            ScheduleError: one of them is not held.
        """
        if self.unplanned.units:
            names = tuple([name for name in names if not self.unplanned.held(name)])
            if not names:
                return self.position, ()
        if self.position.cursor.agreed:
            return self.position, tuple([("free", name) for name in names])
        return self.move("release", names)

    def release(self, state: State, names: Sequence[str], move: Move) -> None:
        """Units are given back: a mark on compute, and gathers that waited for their bytes."""
        debug = self.plan.schedule.debug
        mine = names
        if self.unplanned.units:
            mine = [name for name in names if not self.unplanned.held(name)]
            for name in names:
                if name in self.unplanned.units:  # held, or see `also`
                    self.unplanned.release(name, debug)
        for name in mine:
            self.arena.places[name].lease.held = False
        for kind, what in move[1] if debug else ():
            if kind == "free":
                self.arena.places[what].poison()
        if self.run.cuda and mine:
            place = self.arena.places[mine[-1]]
            place.released = self.run.mark(place.released)
            for name in mine:
                self.released.pop(name, None)
                self.released[name] = place.released
        if state.grads is not self.grads and (state.grads or self.grads):
            self.adopt(state.grads)
        self.carry_out(state, move)
