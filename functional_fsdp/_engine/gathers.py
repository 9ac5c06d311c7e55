"""Gathers: how units that are asked for come to be there, and what their release sets free.

unshard ─▶ gathers to start now ─▶ the bytes' last release ─▶ gather lane ─▶ flying ─▶ compute waits ─▶ lent
release ─▶ a mark on compute ─▶ gathers that waited for the bytes

Units that no plan names are gathered outside of the arena: slower, never wrong. Ranks first agree on the unit; then
compute waits for its gather, into bytes that are this unit's own.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from .._common.errors import ScheduleError
from .._common.ranges import ranged
from .._common.torch_names import profiler
from .._distributed.lanes import Mark
from .._plan.layout import Bucket, Layout
from .._plan.plan import Plan
from .._plan.positions import Move
from .._plan.walk import Action
from .._runtime.runtime import Runtime
from .._storage.place import Place
from .._storage.weights import Gathered, Loan, Stored, gather
from .arena import Arena
from .carrier import Carrier
from .progress import Progress
from .sink import GradientSink

__all__ = ["LANE", "Gathers", "Unplanned"]

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


class Gathers:
    """The weights of one lineage: units that are gathered in the arena by its plan, or beside it.

    Attributes:
        arena: where they lie by the plan; unplanned: those that are gathered outside it.
        flying: gathers that compute has not waited for; newest: the end of the newest one.
        released: the point from which a unit's bytes are free, in order of release.
        fence: whether the next gather waits for all that compute has done.
        copied: units that are copied to their planned place, and what ends that; see `copy_to_planned`.
        written: units that are lent, and into whose weights an operation has written.
        digest: of the gathers that this step has issued.
    """

    def __init__(self, run: Runtime, progress: Progress, carrier: Carrier, sink: GradientSink) -> None:
        self.run, self.progress, self.carrier, self.sink = run, progress, carrier, sink
        self.unplanned = Unplanned(run, progress.layout, progress.spec.schedule.debug)
        self.digest = 0
        self.prepare()

    def prepare(self) -> None:
        """An arena for the plan, in which there is nothing yet."""
        self.arena = Arena(self.run, self.progress.plan, self.carrier)
        self.fence = True
        self.newest: Mark = None
        self.flying: dict[str, Place] = {}
        self.released: dict[str, Mark] = {}
        self.written: list[str] = []
        self.copied: dict[str, Any] = {}

    # ---------------------------------------------------------------- unshard

    def plan_unshard(self, names: tuple[str, ...], off_plan: bool) -> Move:
        """What follows where units are asked for. Changes nothing.

        Raises:
            ScheduleError: a gather would write over a unit that was not released.
        """
        progress = self.progress
        if off_plan or progress.recording:
            return progress.position, tuple([("unplanned", name) for name in names])
        if self.unplanned.units:
            names = self._by_plan(names)
            if not names:
                return progress.position, ()
        if self.copied and any(map(self._lain_over, names)):
            return progress.position, tuple([("unplanned", name) for name in names])
        known = progress.position.moves.get(("unshard", names))  # nearly always: `Progress.move`, without a call
        return known or progress.move("unshard", names)

    def lend(self, state: Stored, names: Sequence[str]) -> dict[str, dict[str, torch.Tensor]]:
        """The weights of units whose gathers were started, once they are there."""
        lent = {}
        for name in names:
            if self.unplanned.units and self.unplanned.held(name):
                lent[name] = dict(self.unplanned.loan(name).weights)
                continue
            place = self.flying.pop(name, None)
            if place is not None:
                lanes = self.run.lanes
                lanes.wait(place.gathered if lanes.waits_on_host else place.ready(self.flying, self.newest))
            else:
                place = self.arena.place(state, name)
            loan = place.loan
            if not loan.held:  # `Loan.lend`, without a call
                loan.count, loan.held = 0, True
                for base in loan.bases:
                    loan.count += base._version
            lent[name] = dict(loan.weights)
        return lent

    def start(self, state: Stored, index: int) -> None:
        """Start gather number `index` of the plan."""
        unit = self.progress.plan.gathers[index].unit
        lying = self._make_way(unit) if self.copied else ()
        after = self._free(unit)
        fresh = self.arena.allocate(unit)
        place = self.arena.place(state, unit)
        if self.sink.untouched or self.sink.consumers:  # its lane reads main weights from here on
            self.sink.touched(self.progress.layout.by_name[unit])
        self.digest = zlib.crc32(place.key, self.digest)
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
            self.copy_to_planned(name)

    # ---------------------------------------------------------------- off the plan

    def is_lent(self, unit: str, by_plan: bool) -> bool:
        """Whether a unit is lent already: outside the arena, or, if that is wished, in it."""
        place = self.arena.places.get(unit)
        return self.unplanned.held(unit) or bool(by_plan and place and place.loan.held)

    def agree(self, state: Stored, unit: str) -> None:
        """Ranks agree on a use that no plan expects."""
        cursor = self.progress.cursor
        if cursor.agreed:
            self.unplanned.take_turn(state, self.progress.plan, unit, cursor.phase == "backward")
        else:
            self.unplanned.agree(unit, "unshard", self.progress.known)

    def gather_off_plan(self, state: Stored, unit: str, by_plan: bool) -> None:
        """Gather a unit on which ranks have agreed: at its place, if that is wished, unless what is lent lies there.
        Not in memory that ranks share: peers that only help have none there."""
        self.sink.touched(self.progress.layout.by_name[unit])
        if by_plan and not self.arena.stays and not self._crowded(unit):
            self._free(unit)
            self.arena.allocate(unit)
            for part in self.arena.place(state, unit).parts:
                gather(state, part.bucket, part.whole, LANE)
        else:
            self.unplanned.gather(state, unit, LANE if self.progress.cursor.agreed else "side")
            self.unplanned.loan(unit).lend()

    def copy_to_planned(self, unit: str) -> Callable[[], None] | None:
        """A unit that is gathered off the plan is needed where it lies by the plan, too. Returns what ends that; None
        if it cannot be."""
        if unit in self.copied:
            return lambda: None  # it lies there for a call around this one
        outside = self.unplanned.units.get(unit)
        if unit not in self.arena.places or not outside or self.carrier.read or self._crowded(unit):
            return None
        for name, other in self.flying.items():
            if self.progress.plan.overlap(unit, name):
                self.run.lanes.wait(other.gathered)
        self.copied[unit] = self.arena.overwrite(unit, outside.whole)
        return partial(self._put_away, unit)

    def copy_to_fallback(self, unit: str) -> None:
        """A unit that is gathered by the plan is needed where it lay off the plan, too, until it is released."""
        self.unplanned.fill(unit, [(part.bucket, part.whole) for part in self.arena.places[unit].parts])

    # ---------------------------------------------------------------- release

    def plan_release(self, names: tuple[str, ...]) -> Move:
        """What follows where units are released. Changes nothing.

        Raises:
            ScheduleError: one of them is not lent.
        """
        progress = self.progress
        if self.unplanned.units:
            self.written.extend([name for name in names if not self._unchanged(name)])
            names = self._by_plan(names)
            if not names:
                return progress.position, ()
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
        if progress.position.cursor.agreed:
            return progress.position, tuple([("free", name) for name in names])
        return progress.position.moves.get(("release", names)) or progress.move("release", names)

    def release(self, names: Sequence[str], actions: Sequence[Action]) -> None:
        """Units are released, with these actions: a mark on compute, behind which their bytes are free."""
        planned = names
        if self.unplanned.units:
            planned = self._by_plan(names)
            for name in names:
                if name in self.unplanned.units:  # lent, or see `copy_to_fallback`
                    self.unplanned.release(name)
        for name in planned:
            self.arena.places[name].loan.held = False
        for kind, what in actions if self.progress.plan.schedule.debug else ():
            if kind == "free":
                place = self.arena.places[what]
                place.poison(self.carrier.spared(place))
        if planned and not self.run.lanes.waits_on_host:
            place = self.arena.places[planned[-1]]
            place.released = self.run.lanes.mark(place.released)
            for name in planned:
                self.released.pop(name, None)
                self.released[name] = place.released

    def note_written(self) -> None:
        """Note in `written` the units that are lent and into whose weights an operation has written."""
        for here in (self.unplanned.units, self.arena.places):
            self.written.extend([name for name, it in here.items() if it.loan.held and not it.loan.unchanged])

    # ---------------------------------------------------------------- the end of a step

    def fence_off(self) -> None:
        """The next gather waits for all that compute has done."""
        self.fence = True

    def settle(self) -> None:
        """Compute waits for the newest gather, and so for all."""
        self.run.lanes.wait(self.newest)
        self.newest = None

    def drop(self) -> None:
        """What is under way was captured and will never run: no mark of it can be waited for."""
        self.newest, self.flying = None, {}

    def restart(self) -> None:
        """Back to the state between steps, in which nothing is lent. Compute has waited for all."""
        self.digest = 0
        self.flying.clear()
        self.released.clear()
        self.copied.clear()
        self.written.clear()
        for place in self.arena.places.values():
            place.loan.held = False
        self.unplanned.clear()
        self.arena.free()
        self.fence = True

    def invalidate(self) -> None:
        """The next step gathers other numbers: autograd shall refuse residuals that are kept until then."""
        for place in self.arena.places.values():
            torch.autograd.graph.increment_version(place.aliases)

    # ---------------------------------------------------------------- who lies where

    def _by_plan(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those that are not lent off the plan."""
        return tuple([name for name in names if not self.unplanned.held(name)])

    def _unchanged(self, name: str) -> bool:
        """Whether no operation has written into a unit's weights since they were lent, if they are."""
        places, outside = self.arena.places, self.unplanned.units
        return all(here[name].loan.unchanged for here in (outside, places) if name in here)

    def _crowded(self, unit: str) -> bool:
        """Whether something that is lent lies where a unit would."""
        plan = self.progress.plan
        places = self.arena.places.items() if unit in plan.crowded else ()
        return any(place.loan.held and plan.overlap(unit, name) for name, place in places) or self._lain_over(unit)

    def _lain_over(self, unit: str) -> bool:
        """Whether a unit that is copied to its planned place lies where this one would, see `copy_to_planned`."""
        plan = self.progress.plan
        return unit in plan.crowded and any(plan.overlap(unit, name) for name in self.copied)

    def _make_way(self, unit: str) -> list[str]:
        """A gather writes where units may be copied to: they are put away, and these are copied there again once it is
        done. Nothing if it is the unit itself: it now lies there by the plan."""
        lying = [name for name in self.copied if self.progress.plan.overlap(unit, name)]
        for name in lying:
            self._put_away(name)
        if unit in self.copied:
            self.copied[unit] = None
        return lying

    def _put_away(self, unit: str) -> None:
        """What the plan has where a unit was copied to lies there again."""
        undo = self.copied.pop(unit, None)
        if undo is not None:
            undo()
            self.fence = True  # what is gathered there next comes after this

    def _free(self, unit: str) -> Mark:
        """The point from which a unit's place may be written: the newest release of what lay there."""
        plan = self.progress.plan
        if unit not in plan.crowded:
            if (flying := self.flying.pop(unit, None)) is not None:
                self.run.lanes.wait(flying.gathered)
            return self.released.pop(unit, None)
        units = plan.by_name
        begin, end = units[unit].address, units[unit].address + units[unit].nbytes  # below: `Plan.share`, without calls
        for name in (*self.flying,):
            if units[name].address < end and begin < units[name].address + units[name].nbytes:
                self.run.lanes.wait(self.flying.pop(name).gathered)  # skipped: nobody waited for it
        mark = None
        for name in (*self.released,):  # in order of release
            if units[name].address < end and begin < units[name].address + units[name].nbytes:
                mark = self.released.pop(name)
        return mark
