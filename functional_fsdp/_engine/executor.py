"""Executor: carries out on the lanes what `advance` says. One for each lineage of states; owns arena and staging.

    unshard ─▶ actions: gathers to start now ─▶ gather lane      compute waits for the unit's own mark only
    release ─▶ a mark on compute; the gather that reuses the bytes waits for it
    reduce ──▶ actions: reductions whose turn it is ─▶ staging ─▶ reduce lane

A verb looks up what follows from its event (`move`, which changes nothing, and may refuse), and then carries it out.
Where no plan says what to do (an order that is being recorded in the first step, a unit that the order does not
name), ranks first agree on the unit, and compute waits for its gather: slower, never wrong.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from .._common.interrupts import whole
from .._distributed.lanes import Mark, Waiting
from .._plan.cursor import InFlight
from .._plan.layout import Layout
from .._plan.order import DefaultOrder, FixedOrder, GuessedOrder, Known, RecordedOrder, known
from .._plan.plan import SLOTS, Plan, make_plan
from .._plan.positions import Move, Positions
from .._plan.program import Program, combined
from .._plan.records import staging_slots
from .._runtime.given import Given
from .._runtime.runtime import Runtime
from .._spec.schedule import Order, Schedule
from .._spec.spec import Spec
from .._storage.place import Place
from .._storage.stored import Stored
from .._transports.carrier import Carrier
from .arena import Arena
from .arrival import Arrival
from .gathers import Gathers
from .reductions import Reductions
from .staging import Staging
from .unplanned import Unplanned

__all__ = ["Executor", "first_plan"]


def first_plan(layout: Layout, schedule: Schedule, slots: int = SLOTS) -> Plan:
    """What is followed until the order of use is known."""
    recorded = isinstance(known(schedule), RecordedOrder)
    return make_plan(layout, schedule.ordered(None) if recorded else schedule, slots=slots)


class Executor(Gathers, Reductions):
    """What one lineage has in flight. `grads` are the main gradients of the step so far."""

    def __init__(self, run: Runtime, layout: Layout, spec: Spec) -> None:
        self.run = run
        self.layout = layout
        self.spec = spec
        self.order: Known = known(spec.schedule)
        self.unplanned = Unplanned(run, layout, spec.schedule.debug)
        self.carrier = spec.transport.on(run, layout) if run.size > 1 else Carrier(run, layout)
        self.stays = spec.transport.stays and run.size > 1  # whether there is memory that ranks share
        self.start()
        self.begins, self.whole = 0, False  # forwards of this step; whether gradients are whole, see `_state.rounds`
        self.skipped: set[str] = set()  # units that were used in this step, and get no gradient on this rank
        self.digests = [0, 0, 0]  # of the gathers and the reductions issued in this step, and of how far these went
        self.arriving: tuple[str, ...] = ()  # buckets that the step which is captured will update on arrival
        self.arrivals: dict[str, Arrival] = {}  # the same, from its first gradient on
        self.arrive_in: tuple[Any, ...] = ()  # what they update: main weights, optimizer state, optimizer and count
        self.beside_backward: tuple[str, ...] = ()  # that the last eager step reduced once and updated on a lane
        self.given = Given(layout, run.sizes, run.coordinate)
        self.frozen = {unit.name for unit in layout.units if not unit.trained}
        self.renewed: set[str] = set()  # buckets whose compute copies this step's updates have renewed
        self.streamed: Any = None  # the buffers through which what lies in the host's memory is updated
        self.shares: tuple[str, int] | None = None  # the plan for which there is what ranks share, and since when
        self.slots = staging_slots(
            layout, run.position, spec.average, self.carrier.traits, self.stays and run.lanes.copies_on_lanes
        )
        self._follow(first_plan(layout, spec.schedule, self.slots))

    @whole
    def _follow(self, program: Plan) -> None:
        self.plan = program
        self.positions = Positions(program)
        self.position = self.positions.start
        self._fill()

    def _fill(self) -> None:
        """An arena and staging, in which there is nothing yet."""
        self.arena = Arena(self.run, self.plan, self.carrier)
        self.staging = Staging(self.run, self.plan, self.spec.average, self.carrier, self.digests, self.arrivals)
        self.fence = True  # the next gather waits for all that compute has done
        self.newest: Mark = None  # the end of the newest gather
        self.flying: dict[str, Place] = {}  # gathers that compute has not waited for
        self.released: dict[str, Mark] = {}  # the point from which a unit's bytes are free, in order
        self.written: list[str] = []  # units that are lent, and into whose weights an operation has written
        self.occupied: dict[str, Any] = {}  # units put in place, see `put_in_place`, and what ends that

    def share(self) -> None:
        """Have the memory that ranks share for this plan. Collective when the plan is new, and after a restart: a rank
        may have been stopped in it."""
        if self.stays and self.shares != (self.plan.hash, self.run.restarted):
            if self.carrier.prepare(self.plan) and self.arena.places:
                self._fill()
            self.shares = self.plan.hash, self.run.restarted

    # ---------------------------------------------------------------- where the program stands

    @property
    def in_flight(self) -> InFlight:
        """What the lanes have not done yet. Waits for nothing."""
        flying = [name for name, place in self.flying.items() if not self.run.lanes.passed(place.gathered)]
        return InFlight(tuple(flying), sum(not self.run.lanes.passed(stage.done) for stage in self.staging.busy))

    def carry_out(self, state: Stored, move: Move) -> None:
        """Do what follows from an event that is no gradient, in its order."""
        self.position, actions = move
        for kind, what in actions:
            if kind == "gather":
                self._gather(state, what)
            elif kind == "reduce":
                self._issue(what)
            elif kind != "free":
                self._gather_beside(state, what, kind == "agreed")

    def happen(self, state: Stored, kind: str) -> None:
        """An event, and what follows from it."""
        self.share()
        self.adopt(state.grads)
        self.carry_out(state, self.move(kind))

    # ---------------------------------------------------------------- the order of use

    def follow(self, order: Order) -> None:
        """Go by this order, the same on every rank, if the schedule left it open and nothing is under way."""
        if isinstance(self.order, DefaultOrder) and self.cursor.idle and not self.grads:
            self._reorder(order, len(Program(order[: len(order) // 2]).order))
            self.order = GuessedOrder()  # last: if it is interrupted, it comes again
            self.share()

    def begin(self, state: Stored) -> int:
        """A forward begins, to which everything belongs until `end`: nothing in it is taken for the next pass.

        Returns how many began before it in this step.
        """
        self.begins += 1
        self.staging.apart = False
        if not isinstance(self.order, RecordedOrder):
            # In the first step a guess may be wrong, on some ranks only: they agree on each use.
            agreed = isinstance(self.order, GuessedOrder) and not self.run.capturing
            self.happen(state, "begin agreed" if agreed else "begin")
        return self.begins - 1

    def turned(self, state: Stored, last: bool) -> None:
        """The forward is over, the backward begins, with this flag for its gradients: zeros may come before any."""
        self.last = last
        if isinstance(self.order, RecordedOrder):
            self.order = self.order.turned()
        else:
            self.happen(state, "turn")

    def differ(self, state: Stored, forward: Order, trained: tuple[str, ...]) -> None:
        """The backward of a pass in which ranks agree on each use has begun: these were used, and gradients of these
        will come.

        Streams wait for each other unheard. Where ranks do different things, a gather may wait for compute, which waits
        for staging, and so for a peer's reduction; and the peer for the gather. So compute waits for no staging there.
        """
        if not self.run.lanes.waits_on_host and self.run.size > 1:
            self.all_done(state, backward=False)
            seen = self.run.everyone((forward, trained), "what is used")
            self.staging.apart = any(one != seen[0] for one in seen)

    def all_done(self, state: Stored, backward: bool = True) -> None:
        """This rank has come to all that it uses in a forward, or in its backward. Others may need it where they agree
        on each use."""
        if self.cursor.agreed and self.plan.gathers:
            with self.beside(state):
                self.unplanned.all_done(state, self.plan, backward)

    def end(self, state: Stored, forward: Order, backward: Order) -> None:
        """The backward is over, and these were the orders of use. After the first step the plan follows what was seen.

        Starts what peers may still wait for. In the new order, what some ranks did not use goes where others used it,
        and what none used stays between its neighbours.
        """
        if not isinstance(self.order, RecordedOrder):
            self.fence |= self.cursor.agreed
            self.happen(state, "end")
            state.version.cursor = self.cursor  # it goes to the caller now
        if self.order == GuessedOrder():
            self.order = GuessedOrder((forward, backward, tuple(self.skipped)))

    def _reorder(self, order: Order, forward: int | None) -> None:
        """Follow this order, of which so many uses are the forward, if that is known."""
        schedule = self.spec.schedule.ordered(order)
        if schedule.order != self.plan.schedule.order or isinstance(self.order, RecordedOrder):
            self._follow(make_plan(self.layout, schedule, forward, self.slots))

    # ---------------------------------------------------------------- beside the plan

    @contextmanager
    def beside(self, state: Stored) -> Iterator[None]:
        """Something that no plan names, on every rank: a whole tree, metrics. Where a peer waits for what this rank has
        left out, and so would start later, it is started now."""
        before, self.run.lanes.behind = self.run.lanes.behind, partial(self._catch_up, state)
        try:
            yield
        finally:
            self.run.lanes.behind = before

    def _catch_up(self, state: Stored, awaited: Mapping[str, Waiting]) -> bool:
        """Peers wait for what this rank would start later. Whether it could start some of it now."""
        if isinstance(self.order, RecordedOrder):
            return False
        reduces = "reduce" in awaited and state.grads is self.grads
        kinds = ["peer gathers"] * ("gather" in awaited) + ["peer reduces"] * reduces
        moved = False
        for kind in kinds:
            move = self.move(kind)
            self.carry_out(state, move)
            moved |= bool(move[1])
        left = len(self.backlog)
        if left and reduces:
            self._go_on(relents=True)
            moved |= len(self.backlog) < left
        return moved

    # ---------------------------------------------------------------- the end of a step

    def finish(self, state: Stored, step: bool = True) -> None:
        """Start what the main gradients still lack: early gradients, zeros where none came, what is partial. And the
        gathers that peers started in this pass and this rank passed over."""
        recorded = isinstance(self.order, RecordedOrder)
        self.happen(state, "round" if recorded else "step" if step else "finish")
        self._issue((), relents=False)  # all gathers that peers may wait for are under way
        for name, bucket in self.layout.trainable.items():
            if name in self.grads:
                self.staging.complete(bucket, self.grads)
            else:  # of a unit that the plan does not name, and so no rank has a gradient
                self.staging.zeros(bucket, self.grads, self.spec.mesh)
        for unit in self.flying:
            self._read_still(self.layout.by_name[unit])

    def look(self, state: Stored) -> None:
        """For who looks at gradients in the middle of a step: all that are due are there, and compute has waited. (Not
        those of a state that has been given others: there they would be lost.)"""
        with self.beside(state):
            if state.grads is self.grads:
                self._issue((), relents=False)
            self.settle()

    def settle(self) -> None:
        """Compute waits for everything under way."""
        self.staging.settle()
        self.run.lanes.wait(self.newest)
        self.newest = None

    def drop(self) -> None:
        """What is under way was captured and will never run: no mark of it can be waited for."""
        self.newest, self.flying = None, {}
        self.staging.drop()

    @property
    def digest(self) -> int:
        """Of the collectives issued in this step, lane by lane."""
        return zlib.crc32(repr(self.digests).encode())

    @property
    def reduced(self) -> int:
        """Of the reductions issued in this step. Who changes gradients tells peers, since a reduction that comes after
        the change on one rank, and before it on another, gives them other sums."""
        return zlib.crc32(repr(self.digests[1:]).encode())

    def drop_arrivals(self) -> None:
        """The step is over, or is captured no more. Compute has waited for what they did."""
        self.arriving, self.arrive_in = (), ()
        self.arrivals.clear()

    def anew(self) -> None:
        """The step will begin anew.

        Raises:
            ScheduleError: it is captured, and has updated weights.
        """
        for one in self.arrivals.values():
            if one.used:
                one.refuse("the step was begun anew")

    def reset(self) -> None:
        """Back to the state between steps, whether the step was taken or abandoned."""
        self.settle()
        self.staging.apart = False
        self.staging.seen.clear()
        self.grads, self.digests[:] = {}, (0, 0, 0)
        self.last, self.whole = True, False
        self.given.begin()
        self.early.clear()
        self.backlog.clear()
        self.position = self.positions.start
        self.flying.clear()
        self.released.clear()
        self.occupied.clear()
        self.written.clear()
        for place in self.arena.places.values():
            place.loan.held = False
        self.unplanned.clear()
        self.arena.free()
        self.fence = True
        self.begins = 0
        self.skipped.clear()
        if isinstance(self.order, RecordedOrder | GuessedOrder):
            self.order = type(self.order)()

    def rest(self, state: Stored) -> None:
        """Weights were looked at, on every rank, and nothing more. Starts what peers started, and begins anew."""
        if not isinstance(self.order, RecordedOrder):
            self.happen(state, "look")
        self.reset()

    @property
    def undecided(self) -> bool:
        """Whether ranks compare at the end of a step in which order they have used the units."""
        return isinstance(self.order, RecordedOrder | GuessedOrder)

    def commit(self) -> None:
        """The step was taken: follow the order that was recorded, or seen."""
        order = self.order
        self.reset()
        self.drop_arrivals()
        for place in self.arena.places.values():
            # The next step gathers other numbers: autograd shall refuse residuals that are kept until then.
            torch.autograd.graph.increment_version(place.aliases)
        if isinstance(order, RecordedOrder) and order.calls:
            first: RecordedOrder = self.run.everyone(order, "the recorded order")[0]
            self._reorder(first.calls, first.forward)
            self.order = FixedOrder()
        elif isinstance(order, GuessedOrder) and order.seen is not None:
            self.order = FixedOrder()
            planned, seen = self.plan.schedule.order, self.run.everyone(order.seen, "the order of use")
            forward, backward = combined(seen, planned if isinstance(planned, tuple) else (), self.frozen)
            if not forward:  # they used the same units in different orders, and may again
                self.order = GuessedOrder()
            else:
                self._reorder(forward + backward, len(Program(forward).order))
        self.share()

    def __del__(self) -> None:
        if getattr(self, "staging", None) is not None:
            self.run.lanes.let_go([*self.staging.marks.values(), self.newest])
