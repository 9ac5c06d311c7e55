"""Gathers: how units that are asked for come to be there, and what their release sets free.

unshard ─▶ gathers to start now ─▶ the bytes' last release ─▶ gather lane ─▶ flying ─▶ compute waits ─▶ lent
release ─▶ a mark on compute ─▶ gathers that waited for the bytes
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial

import torch

from .._common.ranges import ranged
from .._common.torch_names import profiler
from .._distributed.lanes import Mark
from .._plan.order import RecordedOrder
from .._plan.positions import Move
from .._storage.stored import Stored
from .._storage.weights import Loan, gather
from .engine import Engine
from .unplanned import LANE

__all__ = ["Gathers"]


class Gathers(Engine):
    """The part of an `Executor` through which weights go."""

    def _by_plan(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those that are not held outside the plan."""
        return tuple([name for name in names if not self.unplanned.held(name)])

    def asked(self, names: tuple[str, ...], unplanned: bool) -> Move:
        """What follows where units are asked for. Changes nothing.

        Raises:
            ScheduleError: a gather would write over a unit that was not released.
        """
        if unplanned or isinstance(self.order, RecordedOrder):
            return self.position, tuple([("unplanned", name) for name in names])
        if self.unplanned.units:
            names = self._by_plan(names)
            if not names:
                return self.position, ()
        if self.occupied and any(map(self._lain_over, names)):
            return self.position, tuple([("unplanned", name) for name in names])
        return self.move("unshard", names)

    def unshard(self, state: Stored, names: Sequence[str], move: Move) -> dict[str, dict[str, torch.Tensor]]:
        """The weights of units, once they are there; starts what the plan names next."""
        if self.stays:
            self.share()
        if self.run.lanes.copies_on_lanes:
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

    def _lend(self, state: Stored, name: str) -> Loan:
        if self.unplanned.units and self.unplanned.held(name):
            return self.unplanned.loan(name)
        place = self.flying.pop(name, None)
        if place is not None:
            lanes = self.run.lanes
            lanes.wait(place.gathered if lanes.waits_on_host else place.ready(self.flying, self.newest))
        else:
            place = self.arena.place(state, name)
        loan = place.loan
        if not loan.held:  # `lend`, without a call
            loan.count, loan.held = 0, True
            for base in loan.bases:
                loan.count += base._version
        return loan

    def _gather(self, state: Stored, index: int) -> None:
        unit = self.plan.gathers[index].unit
        lying = self._make_way(unit) if self.occupied else ()
        after = self._free(unit)
        fresh = self.arena.take(unit)
        place = self.arena.place(state, unit)
        if self.staging.reduced or self.arrivals:
            self.staging.touched(self.layout.by_name[unit])
        self.digests[0] = zlib.crc32(place.key, self.digests[0])
        if fresh or self.fence:  # waits for all that compute has done: the bytes or the weights may be new
            self.fence = False
            after = self.run.lanes.mark()
        issued, job, single = self.carrier.fill(place, state)
        submit = self.run.lanes.submit
        if profiler._is_profiler_enabled:
            submit = ranged(submit, f"gather {unit}")
        place.gathered = self.newest = submit("gather", issued, job, after, single, mark=place.gathered)
        self.flying[unit] = place
        for name in lying:
            self.put_in_place(name)

    def _gather_beside(self, state: Stored, unit: str, by_plan: bool) -> None:
        """A use on which ranks agree first: at the unit's place, if that is wished, unless what is held lies there. Not
        in memory that ranks share: peers that only help have none there."""
        place, cursor = self.arena.places.get(unit), self.cursor
        if self.unplanned.held(unit) or (by_plan and place and place.loan.held):
            return
        with self.beside(state):
            if cursor.agreed:
                self.unplanned.take_turn(state, self.plan, unit, cursor.phase == "backward")
            else:
                self.unplanned.agree(unit, "unshard", self._planned)
            self.staging.touched(self.layout.by_name[unit])
            if by_plan and not self.arena.stays and not self._crowded(unit):
                self._free(unit)
                self.arena.take(unit)
                for part in self.arena.place(state, unit).parts:
                    gather(state, part.bucket, part.whole, LANE)
            else:
                self.unplanned.take(state, unit, LANE if cursor.agreed else "side")
                self.unplanned.loan(unit).lend()

    def _crowded(self, unit: str) -> bool:
        """Whether something that is held lies where a unit would."""
        some = self.arena.places.items() if unit in self.plan.crowded else ()
        return any(place.loan.held and self.plan.share(unit, name) for name, place in some) or self._lain_over(unit)

    def _lain_over(self, unit: str) -> bool:
        """Whether a unit that is put in place lies where this one would, see `put_in_place`."""
        return unit in self.plan.crowded and any(self.plan.share(unit, name) for name in self.occupied)

    def _make_way(self, unit: str) -> list[str]:
        """A gather writes where units may be put in place: they are put away, and these are put there again once it is
        done. Nothing if it is the unit itself: it now lies there by the plan."""
        lying = [name for name in self.occupied if self.plan.share(unit, name)]
        for name in lying:
            self._put_away(name)
        if unit in self.occupied:
            self.occupied[unit] = None
        return lying

    def _put_away(self, unit: str) -> None:
        """What the plan has where a unit was put in place lies there again."""
        undo = self.occupied.pop(unit, None)
        if undo is not None:
            undo()
            self.fence = True  # what is gathered there next comes after this

    def _free(self, unit: str) -> Mark:
        """The point from which a unit's place may be written: the newest release of what lay there."""
        if unit not in self.plan.crowded:
            if (flying := self.flying.pop(unit, None)) is not None:
                self.run.lanes.wait(flying.gathered)
            return self.released.pop(unit, None)
        units = self.plan.by_name
        begin, end = units[unit].address, units[unit].address + units[unit].nbytes  # below: `Plan.share`, without calls
        if self.flying:
            for name in [
                n for n in self.flying if units[n].address < end and begin < units[n].address + units[n].nbytes
            ]:
                self.run.lanes.wait(self.flying.pop(name).gathered)  # skipped: nobody waited for it
        mark = None
        if self.released:
            for name in [
                n for n in self.released if units[n].address < end and begin < units[n].address + units[n].nbytes
            ]:
                mark = self.released.pop(name)  # the dict is in order of release
        return mark

    def put_in_place(self, unit: str) -> Callable[[], None] | None:
        """A unit that is gathered outside the plan is needed where it lies by the plan, too. Returns what ends that;
        None if it cannot be."""
        if unit in self.occupied:
            return lambda: None  # it lies there for a call around this one
        outside = self.unplanned.units.get(unit)
        if unit not in self.arena.places or not outside or self.carrier.read or self._crowded(unit):
            return None
        for name, other in self.flying.items():
            if self.plan.share(unit, name):
                self.run.lanes.wait(other.gathered)
        self.occupied[unit] = self.arena.put(unit, outside.whole)
        return partial(self._put_away, unit)

    def also(self, unit: str) -> None:
        """A unit that is gathered by the plan is needed where it lay outside of it, too, until it is released."""
        self.unplanned.fill(unit, [(part.bucket, part.whole) for part in self.arena.places[unit].parts])

    def given_back(self, names: tuple[str, ...]) -> Move:
        """What follows where units are given back. Changes nothing.

        Raises:
            ScheduleError: one of them is not held.
        """
        if self.unplanned.units:
            self.written.extend([name for name in names if not self._unchanged(name)])
            names = self._by_plan(names)
            if not names:
                return self.position, ()
        else:
            places = self.arena.places
            for name in names:
                if name in places and places[name].loan.held:  # `Loan.unchanged`, without a call
                    loan = places[name].loan
                    count = loan.count
                    for base in loan.bases:
                        count -= base._version
                    if count:
                        self.written.append(name)
        if self.position.cursor.agreed:
            return self.position, tuple([("free", name) for name in names])
        return self.move("release", names)

    def _unchanged(self, name: str) -> bool:
        """Whether no operation has written into a unit's weights since they were lent, if they are."""
        places, outside = self.arena.places, self.unplanned.units
        return all(here[name].loan.unchanged for here in (outside, places) if name in here)

    def note_written(self) -> None:
        """Note in `written` the units that are held and into whose weights an operation has written."""
        for here in (self.unplanned.units, self.arena.places):
            self.written.extend([name for name, it in here.items() if it.loan.held and not it.loan.unchanged])

    def release(self, state: Stored, names: Sequence[str], move: Move) -> None:
        """Units are given back: a mark on compute, and gathers that waited for their bytes."""
        debug = self.plan.schedule.debug
        mine = names
        if self.unplanned.units:
            mine = self._by_plan(names)
            for name in names:
                if name in self.unplanned.units:  # held, or see `also`
                    self.unplanned.release(name)
        for name in mine:
            self.arena.places[name].loan.held = False
        for kind, what in move[1] if debug else ():
            if kind == "free":
                place = self.arena.places[what]
                place.poison(self.carrier.spared(place))
        if mine and not self.run.lanes.waits_on_host:
            place = self.arena.places[mine[-1]]
            place.released = self.run.lanes.mark(place.released)
            for name in mine:
                self.released.pop(name, None)
                self.released[name] = place.released
        if state.grads is not self.grads and (state.grads or self.grads):
            self.adopt(state.grads)
        self.carry_out(state, move)
