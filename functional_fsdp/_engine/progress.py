"""Progress: the plan that a lineage follows, where the program stands in it, and what is known of the order of use.

what follows from an event   move ──▶ (position, actions)       changes nothing, and may refuse
the event happens            make ──▶ actions                   for the executor to carry out
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .._plan.advance import Action, Move, Position, Positions
from .._plan.cursor import Cursor
from .._plan.layout import Layout
from .._plan.plan import REDUCTIONS_AT_ONCE, Plan, make_plan
from .._plan.program import FixedOrder, KnownOrder, RecordedOrder, known
from .._runtime.runtime import Runtime
from .._spec.schedule import Order, Schedule
from .._spec.spec import Spec


def first_plan(layout: Layout, schedule: Schedule, slots: int = REDUCTIONS_AT_ONCE) -> Plan:
    """What is followed until the order of use is known."""
    recorded = isinstance(known(schedule), RecordedOrder)
    return make_plan(layout, schedule.ordered(None) if recorded else schedule, slots=slots)


class Progress:
    """Where the program of one lineage stands.

    Attributes:
        plan: the one that is followed; positions: its automaton; position: where the program stands in it.
        order: what is known of the order of use; recording: whether it is being recorded, and nothing is planned.
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

    def move(self, kind: str, units: tuple[str, ...] = ()) -> Move:
        """What follows from an event. Changes nothing.

        Raises:
            ScheduleError: as `advance`.
        """
        found = self.position.moves.get((kind, units))  # nearly always
        return self.positions.move(self.position, (kind, units)) if found is None else found

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
        self.recording = isinstance(order, RecordedOrder)

    def record(self, names: Sequence[str]) -> None:
        """One more call, of an order that is being recorded."""
        if isinstance(self.order, RecordedOrder):
            self.know(self.order.used(names))

    def record_turn(self) -> None:
        """The forward is over, in an order that is being recorded."""
        if isinstance(self.order, RecordedOrder):
            self.know(self.order.turned())

    def plan_for(self, order: Order, forward: int | None) -> Plan | None:
        """The plan for this order, of which so many uses are the forward, if that is known; None: it is followed."""
        schedule = self.spec.schedule.ordered(order)
        if schedule.order == self.plan.schedule.order and not self.recording:
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
