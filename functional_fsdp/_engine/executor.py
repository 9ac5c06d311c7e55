"""Executor: carries out on the lanes what `advance` says. One for each lineage of states.

    unshard ─▶ actions: gathers to start now ─▶ gather lane      compute waits for the unit's own mark only
    release ─▶ a mark on compute; the gather that reuses the bytes waits for it
    reduce ──▶ actions: reductions whose turn it is ─▶ staging ─▶ reduce lane

It has four parts, and each of them its own fields: `progress` says where the program stands, `gathers` has the weights,
`reductions` the gradients on their way, and `sink` what becomes of these. A verb asks a part what follows from its
event (`plan_unshard`, `plan_reduce`, `plan_release`, which change nothing, and may refuse), and has the executor carry
that out. Where no plan says what to do (an order that is being recorded in the first step, a unit that the order does
not name), ranks first agree on the unit, and compute waits for its gather: slower, never wrong.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from .._common.calls import uninterruptible
from .._common.torch_names import without_func_levels
from .._plan.cursor import Action, Cursor, InFlight, Move, Position, Positions
from .._plan.layout import Layout
from .._plan.plan import FixedOrder, KnownOrder, Plan, first_plan, known, make_plan, staging_slots
from .._runtime.lanes import Waiting
from .._runtime.runtime import Runtime
from .._spec.spec import Order, Spec
from .._storage import FlatBuffer, Stored
from .gathers import Carrier, Gathers
from .reductions import Reductions, Values
from .sink import GradientSink


class Progress:
    """Where the program of one lineage stands: the plan that it follows, the position in it, and what is known of the
    order of use. `position[event]` says what follows from an event, and changes nothing; with `make` the event happens.

    Attributes:
        plan: the one that is followed; positions: its automaton; position: where the program stands in it.
        order: what is known of the order of use.
        activations: of every plan, see `Plan`.
    """

    activations: tuple[tuple[str, str], ...] = ()

    def __init__(self, layout: Layout, spec: Spec, slots: int) -> None:
        self.layout, self.spec, self.slots = layout, spec, slots
        self.frozen = {unit.name for unit in layout.units if not unit.trained}
        self.know(known(spec.schedule))
        self.follow(first_plan(layout, spec.schedule, slots))

    def follow(self, plan: Plan) -> None:
        """Go by this plan, from its start."""
        self.plan = plan
        self.positions = Positions(plan)
        self.position: Position = self.positions.start

    # ---------------------------------------------------------------- events

    @property
    def cursor(self) -> Cursor:
        return self.position.cursor

    def make(self, move: Move) -> tuple[Action, ...]:
        """The event happens. Returns what is to be done, in order."""
        self.position, actions = move
        return actions

    def restart(self) -> None:
        """Back to the start of a step. An order that is being recorded, or seen, begins with nothing."""
        self.position = self.positions.start
        if self.order.open:
            self.know(type(self.order)())

    # ---------------------------------------------------------------- the order of use

    def know(self, order: KnownOrder) -> None:
        """This is known of the order of use from here on."""
        self.order = order

    def plan_for(self, order: Order, forward: int | None) -> Plan | None:
        """The plan for this order, of which so many uses are the forward, if that is known; None: it is followed."""
        schedule = self.spec.schedule.ordered(order)
        if schedule.order == self.plan.schedule.order and not self.order.recording:
            return None
        return replace(make_plan(self.layout, schedule, forward, self.slots), activations=self.activations)

    def noting(self, activations: tuple[tuple[str, str], ...]) -> Plan | None:
        """The plan with these activations; None: it is followed."""
        if self.plan.activations == activations:
            return None
        self.activations = activations
        return replace(self.plan, activations=activations)

    def decide(self, order: KnownOrder, run: Runtime) -> Plan | None:
        """A step was taken that has recorded, or seen, this order: ranks agree on it. Returns the plan to go on by;
        None: the one that is followed.

        Collective, where the order was open.
        """
        if not order.open or order.said is None:
            return None
        planned = self.plan.schedule.order
        everyone = run.everyone(order.said, order.what)
        decided = order.decided(everyone, planned if isinstance(planned, tuple) else (), self.frozen)
        if decided is None:
            return None
        plan = self.plan_for(*decided)
        self.know(FixedOrder())
        return plan


class Executor:
    """What one lineage has in flight.

    Attributes:
        stays: whether there is memory that ranks share; shares: the plan for which there is, and since which restart.
        begins: forwards of this step.
        round_complete: whether gradients are those of a whole round, see `_extend`.
    """

    def __init__(
        self, run: Runtime, layout: Layout, spec: Spec, residual: Mapping[str, FlatBuffer] | None = None
    ) -> None:
        self.run = run
        self.carrier = spec.transport.on(run, layout) if run.size > 1 else Carrier(run, layout)
        self.stays = spec.transport.stays and run.size > 1
        self.shares: tuple[str, int] | None = None
        self.begins, self.round_complete = 0, False
        beside = self.stays and run.lanes.copies_on_lanes
        slots = staging_slots(layout, run.position, spec.average, self.carrier.traits, beside)
        self.progress = Progress(layout, spec, slots)
        self.sink = GradientSink(run, layout, spec.mesh)
        self.gathers = Gathers(run, self.progress, self.carrier, self.sink)
        self.reductions = Reductions(run, self.progress, self.carrier, self.gathers, self.sink, residual)

    @uninterruptible
    def follow(self, plan: Plan | None) -> None:
        """Go by another plan, if there is one."""
        if plan is not None:
            self.progress.follow(plan)
            self._prepare()

    def _prepare(self) -> None:
        """An arena and staging, in which there is nothing yet."""
        self.gathers.prepare()
        self.reductions.prepare(self.reductions.staging.digest)

    def share(self) -> None:
        """Have the memory that ranks share for this plan. Collective when the plan is new, and after a restart: a rank
        may have been stopped in it."""
        plan = self.progress.plan
        if self.stays and self.shares != (plan.hash, self.run.restarted):
            if self.carrier.prepare(plan) and self.gathers.arena.places:
                self._prepare()
            self.shares = plan.hash, self.run.restarted

    # ---------------------------------------------------------------- what follows from events

    def unshard(self, state: Stored, names: Sequence[str], move: Move) -> dict[str, dict[str, torch.Tensor]]:
        """The weights of units, once they are there; starts what the plan names next."""
        if self.stays:
            self.share()
        progress, sink = self.progress, self.sink
        if self.run.lanes.copies_on_lanes:
            self.reductions.staging.age()
        if progress.order.recording:
            progress.know(progress.order.used(names))
        if state.grads is not sink.grads and (state.grads or sink.grads):
            sink.set_gradients(state.grads)
        if actions := progress.make(move):
            self._carry_out(state, actions)
        return self.gathers.lend(state, names)

    def reduce(self, state: Stored, unit: str, values: Values, last: bool, move: Move, agreed: bool = False) -> None:
        """A unit's gradients, as `Unit.paths`, on their way into main gradients: now, or when their turn comes.
        `agreed`: no rank need be asked whether it has come, too."""
        if self.stays:
            self.share()
        reductions, index = self.reductions, None
        for kind, what in self.progress.make(move):
            if kind == "reduce":
                reductions.issue(what)
            elif kind == "keep":
                index = what
                reductions.keep(index, unit, values, last)
            elif kind == "gather":
                self.gathers.start(state, what)
            else:
                reductions.reduce_off_plan(unit, values, last, agreed)
        if unit in reductions.hollow:
            reductions.keep_hollow(unit, last)
        elif reductions.early and not self.run.lanes.copies_on_lanes:
            reductions.own(index, unit, values)

    def reduce_tree(self, state: Stored, total: Mapping[str, torch.Tensor], last: bool) -> None:
        """The gradients of a whole tree, by path: a round of its own, in the same order on every rank."""
        layout, reductions = self.progress.layout, self.reductions
        self._carry_out(state, self.progress.make(self.progress.position["round", ()]))
        in_turn = dict.fromkeys(reduction.unit for reduction in self.progress.plan.reductions)
        for name in [*in_turn, *(unit.name for unit in reversed(layout.units) if unit.name not in in_turn)]:
            unit = layout.by_name[name]
            if unit.trained:
                reductions.given.note(name, sum(1 << i for i, path in enumerate(unit.paths) if path in total))
                values = [total.get(path) for path in unit.paths]
                self.reduce(state, name, values, last, reductions.plan_reduce(name, " tree"), agreed=True)
        self._carry_out(state, self.progress.make(self.progress.position["round", ()]))

    def release(self, state: Stored, names: Sequence[str], move: Move) -> None:
        """Units are released: a mark on compute, and gathers that waited for their bytes."""
        sink = self.sink
        self.gathers.release(names, move[1])
        if state.grads is not sink.grads and (state.grads or sink.grads):
            sink.set_gradients(state.grads)
        actions = self.progress.make(move)
        if actions and actions[-1][0] != "free":  # those come first, and are done
            self._carry_out(state, actions)

    def happen(self, state: Stored, kind: str) -> None:
        """An event of a pass or a step, and what follows from it."""
        if self.stays:
            self.share()
        if state.grads is not self.sink.grads:
            self.sink.set_gradients(state.grads)
        if actions := self.progress.make(self.progress.position[kind, ()]):
            self._carry_out(state, actions)

    def _carry_out(self, state: Stored, actions: Sequence[Action]) -> None:
        """Do what follows from an event that is no gradient, in its order."""
        for kind, what in actions:
            if kind == "gather":
                self.gathers.start(state, what)
            elif kind == "reduce":
                self.reductions.issue(what)
            elif kind != "free":
                self._gather_off_plan(state, what, kind == "agreed")

    def _gather_off_plan(self, state: Stored, unit: str, by_plan: bool) -> None:
        """A use on which ranks agree first; `by_plan`: at the unit's place, if it can be."""
        if not self.gathers.is_lent(unit, by_plan):
            with self.off_plan(state):
                self.gathers.agree(state, unit)
                self.gathers.gather_off_plan(state, unit, by_plan)

    @property
    def in_flight(self) -> InFlight:
        """What the lanes have not done yet. Waits for nothing."""
        passed = self.run.lanes.passed
        flying = [name for name, place in self.gathers.flying.items() if not passed(place.gathered)]
        return InFlight(tuple(flying), sum(not passed(stage.done) for stage in self.reductions.staging.busy))

    # ---------------------------------------------------------------- a pass

    def note_activations(self, ways: tuple[tuple[str, str], ...]) -> bool:
        """Have the plan say what becomes of what modules save. Returns whether it does: not within a step."""
        if not self.progress.cursor.idle or self.sink.grads:
            return False
        self.follow(self.progress.noting(ways))
        return True

    def count_forward(self) -> None:
        """A forward begins: one more of the step."""
        self.begins += 1

    # ---------------------------------------------------------------- off the plan

    @contextmanager
    def off_plan(self, state: Stored) -> Iterator[None]:
        """Something that no plan names, on every rank: a whole tree, metrics. Where a peer waits for what this rank has
        left out, and so would start later, it is started now."""
        before, self.run.lanes.behind = self.run.lanes.behind, partial(self._catch_up, state)
        try:
            yield
        finally:
            self.run.lanes.behind = before

    def _catch_up(self, state: Stored, awaited: Mapping[str, Waiting]) -> bool:
        """Peers wait for what this rank would start later. Whether it could start some of it now."""
        if self.progress.order.recording:
            return False
        reduces = "reduce" in awaited and state.grads is self.sink.grads
        kinds = ["peer gathers"] * ("gather" in awaited) + ["peer reduces"] * reduces
        moved = False
        for kind in kinds:
            actions = self.progress.make(self.progress.position[kind, ()])
            self._carry_out(state, actions)
            moved |= bool(actions)
        return moved

    def look(self, state: Stored) -> None:
        """For who looks at gradients in the middle of a step: all that are due are there, and compute has waited. (Not
        those of a state that has been given others: there they would be lost.)"""
        with self.off_plan(state):
            self.settle()

    # ---------------------------------------------------------------- the end of a step

    def end_round(self, complete: bool) -> bool:
        """Gradients are those of a whole round, or of a part of one. Returns what was so before."""
        before, self.round_complete = self.round_complete, complete
        return before

    def finish(self, state: Stored, step: bool = True) -> None:
        """Start what the main gradients still lack: early gradients, zeros where none came, what is partial. And the
        gathers that peers started in this pass and this rank passed over."""
        recorded = self.progress.order.recording
        self.happen(state, "round" if recorded else "step" if step else "finish")
        self.reductions.finish()

    def settle(self) -> None:
        """Compute waits for everything under way."""
        self.reductions.staging.settle()
        if self.gathers.newest is not None:
            self.gathers.settle()

    def drop(self) -> None:
        """What is under way was captured and will never run: no mark of it can be waited for."""
        self.gathers.drop()
        self.reductions.staging.drop()

    @property
    def digest(self) -> int:
        """Of the collectives issued in this step, lane by lane."""
        return zlib.crc32(f"{self.gathers.digest} {self.reduced}".encode())

    @property
    def reduced(self) -> int:
        """Of the reductions issued in this step. Who changes gradients tells peers, since a reduction that comes after
        the change on one rank, and before it on another, gives them other sums."""
        return zlib.crc32(f"{self.reductions.digest} {self.reductions.staging.digest}".encode())

    def reset(self) -> None:
        """Back to the state between steps, whether the step was taken or abandoned."""
        self.settle()
        self.reductions.restart()
        self.sink.restart()
        self.gathers.restart()
        self.progress.restart()
        self.begins, self.round_complete = 0, False

    def commit(self) -> None:
        """The step was taken: follow the order that was recorded, or seen."""
        order = self.progress.order
        self.reset()
        if self.sink.consumers or self.sink.pending is not None:
            self.sink.end_step()
        self.gathers.invalidate()
        self.follow(self.progress.decide(order, self.run))
        self.share()

    def __del__(self) -> None:
        if getattr(self, "reductions", None) is not None:
            with without_func_levels():  # it may be collected in the middle of somebody's transform
                self.run.lanes.let_go([*self.reductions.staging.marks.values(), self.gathers.newest])
