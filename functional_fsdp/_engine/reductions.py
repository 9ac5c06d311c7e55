"""Reductions: how gradients that come in any order are reduced in the plan's.

reduce ─▶ its turn has not come: early, kept as it is
     └──▶ due, in the plan's order ─▶ staging ─▶ reduce lane
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .._common.calls import provided
from .._common.ranges import ranged
from .._common.torch_names import profiler
from .._plan.cursor import Move
from .._plan.route import states_of
from .._runtime.given import GradientMask
from .._runtime.runtime import Runtime
from .._storage import FlatBuffer, owned
from .gathers import Carrier, Gathers
from .sink import GradientSink
from .staging import Staging, Values

if TYPE_CHECKING:
    from .executor import Progress

_equal_check, _error_feedback = provided("look.equal_check"), provided("codecs.ErrorFeedback")


class Reductions:
    """The gradients of one lineage on their way: those that have come, and those that are being reduced into the sink.

    Attributes:
        given: which leaves got one. final: how main gradients lie in the end.
        early: gradients whose turn has not come, by reduction.
        last: what the newest gradient came with: zeros in a unit's stead follow it.
        hollow: by unit, the buckets of those in which no trained leaf has elements.
        skipped: units that were used in this step, and get no gradient on this rank.
        digest: of the reductions that this step has issued.
    """

    def __init__(
        self, run: Runtime, progress: Progress, carrier: Carrier, gathers: Gathers, sink: GradientSink,
        residual: Mapping[str, FlatBuffer] | None = None,
    ) -> None:  # fmt: skip
        self.run, self.progress, self.carrier, self.gathers = run, progress, carrier, gathers
        self.sink, self.feedback = sink, _error_feedback(residual or {})
        self.layout = progress.layout
        trained = {unit.name: [b for b in unit.buckets if b.trainable] for unit in self.layout.units}
        self.hollow = {name: some for name, some in trained.items() if not any(bucket.numel for bucket in some)}
        self.final = {name: states_of(bucket, "main") for name, bucket in self.layout.trainable.items()}
        self.given = GradientMask(self.layout, run.sizes, run.coordinate)
        self.early: dict[int, Values] = {}
        self.last = True
        self.skipped: set[str] = set()
        self.digest = 0
        self.check: Any = _equal_check(self.layout, run) if progress.spec.schedule.debug else None
        self.prepare()

    def prepare(self, depth: int = 0) -> None:
        """Staging for the plan, in which there is nothing yet. `depth`: the digest of how far reductions went."""
        spec, plan = self.progress.spec, self.progress.plan
        self.sink.drop()
        self.staging = Staging(self.run, plan, spec, self.carrier, self.sink, depth, self.feedback)

    @property
    def complete(self) -> bool:
        """Whether every main gradient is there and whole."""
        cursor = self.progress.cursor
        if self.early or cursor.reduced or cursor.due or cursor.ahead:
            return False
        grads = self.sink.grads
        return all(name in grads and grads[name].states == final for name, final in self.final.items())

    def awaits(self, buffer: FlatBuffer) -> bool:
        """Whether these are gradients of the step that are partial, or that compute has not waited for."""
        found = self.sink.grads.get(buffer.bucket.name)
        if found is None or found.local is not buffer.local:
            return False
        return found.states != self.final[buffer.bucket.name] or len(self.staging.marks) > 0

    # ---------------------------------------------------------------- gradients that come

    def plan_reduce(self, unit: str, of: str = "") -> Move:
        """What follows where a gradient of this unit comes, perhaps of a " tree". Changes nothing."""
        return self.progress.position[("empty" if unit in self.hollow else "reduce") + of, (unit,)]

    def compare_equal(self) -> None:
        """In debug mode, at the first step: gradients that are to be equal along axes of the model's own are.

        Collective, where there are any.
        """
        if self.check is not None:
            self.check.compare()
            self.check = None

    def keep(self, index: int, unit: str, values: Values, last: bool) -> None:
        """The gradients of reduction number `index` of the plan have come, whose turn may come later."""
        self.last = last
        if self.check is not None:
            self.check.note(unit, values)
        self.early[index] = owned(values, self.gathers.arena.loan(unit)) if self.run.lanes.copies_on_lanes else values

    def set_last(self, last: bool) -> None:
        """Gradients that are to come have this flag: zeros may come before any."""
        self.last = last

    def keep_hollow(self, unit: str, last: bool) -> None:
        """Gradients without elements have come: nothing is sent."""
        self.last = last
        for bucket in self.hollow[unit]:
            if bucket.name not in self.sink.grads:
                self.staging.zeros(bucket)

    def own(self, index: int | None, unit: str, values: Values) -> None:
        """What of a unit's gradients still waits must not be borrowed: it may be released meanwhile."""
        if index in self.early:
            self.early[index] = owned(values, self.gathers.arena.loan(unit))

    def reduce_off_plan(self, unit: str, values: Values, last: bool, agreed: bool) -> None:
        """Reduce gradients that no plan expects. Compute waits for them. `agreed`: ranks come to them alike."""
        if not agreed:
            self.gathers.agree_off_plan(unit, "reduce")
        if self.check is not None:
            self.check.note(unit, values)
        self.staging.outside(self.layout.by_name[unit], values, last)
        self.read_while_gathered(unit)

    # ---------------------------------------------------------------- reductions that are due

    def issue(self, due: Iterable[tuple[int, bool]]) -> None:
        """Reduce what is due, in order: gradients that have come, or zeros."""
        for index, came in due:
            values = self.early.pop(index) if came else ()
            unit = self.layout.by_name[self.progress.plan.reductions[index].unit]
            reduce = self.staging.reduce
            if profiler._is_profiler_enabled:
                reduce = ranged(reduce, f"reduce gradients of {unit.name}")
            reduce(index, unit, values, self.last)
            if unit.name in self.gathers.flying:  # `read_while_gathered`, without a call
                self.sink.touched(unit)
            self.digest = zlib.crc32(unit.name.encode(), self.digest)

    def read_while_gathered(self, unit: str) -> None:
        """A gather for which compute has not waited when the gradient came may read main weights after that."""
        if unit in self.gathers.flying:
            self.sink.touched(self.layout.by_name[unit])

    # ---------------------------------------------------------------- the end of a step

    def finish(self) -> None:
        """Start what the main gradients still lack: what is partial, zeros where no plan names a unit."""
        for name, bucket in self.layout.trainable.items():
            if name in self.sink.grads:
                if self.sink.grads[name].states != self.final[name]:
                    self.staging.complete(bucket)
            else:  # of a unit that the plan does not name, and so no rank has a gradient
                self.staging.zeros(bucket)
        for unit in self.gathers.flying:
            self.read_while_gathered(unit)

    def restart(self) -> None:
        """Back to the state between steps. Compute has waited for all."""
        self.staging.restart()
        if self.feedback.errors:
            self.feedback.clear()
        self.digest = 0
        self.last = True
        if self.check is not None:
            self.check.found.clear()
        self.given.begin()
        self.early.clear()
        self.skipped.clear()
