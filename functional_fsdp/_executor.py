"""Executor: carries out on the lanes what `Comm` says. One for each lineage of states; owns the arena and the staging.

    unshard ─▶ Comm.use ─────▶ gathers to start now ─▶ gather lane      compute waits for the unit's own mark only
    release ─▶ Comm.release ─▶ a mark on compute; the gather that reuses the bytes waits for it
    reduce ──▶ Comm.reduce ──▶ reductions whose turn it is ─▶ staging ─▶ reduce lane

Where no plan says what to do (an order that is being recorded in the first step, a unit that the order does not
name), ranks first agree on the unit, and compute waits for its gather: slower, never wrong.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from ._arena import Arena, Place
from ._comm import Comm
from ._copies import Copies
from ._errors import ScheduleError
from ._given import Given
from ._interrupts import whole
from ._jobs import Waiting
from ._lanes import Mark
from ._layout import Layout
from ._loose import Loose
from ._plan import Plan, plan
from ._program import Seen, combined
from ._reductions import Reductions
from ._route import Partial, Replicate, states_of
from ._runtime import Runtime
from ._schedule import Order
from ._spec import Spec
from ._staging import Staging
from ._status import snapshot
from ._symmetric import Windows
from ._weights import Lease

if TYPE_CHECKING:
    from ._state import State

__all__ = ["Executor"]


class Executor(Reductions):
    """What one lineage has in flight. `grads` are the main gradients of the step so far."""

    def __init__(self, run: Runtime, layout: Layout, spec: Spec) -> None:
        self.run = run
        self.layout = layout
        self.spec = spec
        self.recording: list[tuple[str, ...]] | None = None
        self.loose = Loose(run, layout)
        transport = spec.schedule.transport if run.size > 1 else ""
        self.copies = Copies(run, layout) if transport == "copy_engine" else None
        self.windows = Windows(run, spec.schedule.zero_cta) if transport == "symmetric" else None
        self.shared = self.copies or self.windows
        self.start()
        kinds = (("grads", Partial), ("main", Replicate))
        self.eager = all(len({states_of(b, *kind) for kind in kinds}) == 1 for b in layout.trainable.values())
        self.observing = False
        self.begins, self.whole = 0, False  # forwards of this step; whether gradients are whole, see `_rounds`
        self.recorded_turn: int | None = None
        self.open = spec.schedule.order is None  # whether the order of use is anyone's to say
        self.observed: Seen | None = None
        self.waived: set[str] = set()  # units that were used in this step, and get no gradient on this rank
        self.digests = [0, 0]  # of the gathers and of the reductions issued in this step
        self.given = Given(layout, run.sizes, run.coordinate)
        if spec.schedule.order == "recorded":
            self.recording = []
            self._install(plan(layout, spec.schedule.ordered(None)))
        else:
            self._install(plan(layout, spec.schedule))

    def _install(self, program: Plan, turn: int | None = None) -> None:
        if self.shared and self.shared.made:
            self.shared.prepare(program)
        self._follow(program, turn)  # last: a rank that is stopped before comes here again, as its peers do

    @whole
    def _follow(self, program: Plan, turn: int | None) -> None:
        self.plan = program
        self.comm = Comm(program, turn)
        self.arena = Arena(self.run, program, self.copies, self.windows)
        self.staging = Staging(self.run, program, self.spec.average, self.copies, self.windows)
        self.fence = True  # the next gather waits for all that compute has done
        self.newest: Mark = None  # the end of the newest gather
        self.flying: dict[str, Place] = {}  # gathers that compute has not waited for
        self.released: dict[str, Mark] = {}  # the point from which a unit's bytes are free, in order

    # ---------------------------------------------------------------- the order of use

    def follow(self, order: Order) -> None:
        """Go by this order, the same on every rank, if the schedule left it open and nothing is under way."""
        if self.open and self.comm.idle and not self.grads:
            self._reorder(order, len(order) // 2)
            self.observing = True
            self.open = False  # last: if it is interrupted, it comes again

    def begin(self, state: State) -> int:
        """A forward begins, to which everything belongs until `end`: nothing in it is taken for the next pass.

        Returns how many began before it in this step.
        """
        self.begins += 1
        if self.recording is None:
            self._in_order(state, self.comm.begin(), self.comm.lapse())
        return self.begins - 1

    def turned(self) -> None:
        """The forward is over, the backward begins."""
        self.comm.turned()
        if self.recording is not None and self.recorded_turn is None:
            self.recorded_turn = sum(map(len, self.recording))

    def end(self, state: State, forward: Order, backward: Order) -> None:
        """The backward is over, and these were the orders of use. After the first step the plan follows what was seen.

        Starts what peers may still wait for. In the new order, what some ranks did not use goes where others used it,
        and what none used stays between its neighbours.
        """
        if self.recording is None:
            self._in_order(state, self.comm.finish(step=False), self.comm.lapse())
        self.comm.end()
        if self.observing and self.observed is None:
            self.observed = (forward, backward, tuple(self.waived))

    def _adopt(self, mine: Seen) -> None:
        planned, seen = self.plan.schedule.order, self.run.everyone(mine, "the order of use")
        forward, backward = combined(seen, planned if isinstance(planned, tuple) else ())
        if forward:
            self._reorder(forward + backward, len(forward))

    def _reorder(self, order: Order, forward: int) -> None:
        """Follow this order, of which so many calls are the forward."""
        schedule = self.spec.schedule.ordered(order)
        if schedule.order != self.plan.schedule.order:
            turn = sum(1 if isinstance(call, str) else len(call) for call in order[:forward])
            self._install(plan(self.layout, schedule), turn)

    # ---------------------------------------------------------------- beside the plan

    def close(self, state: State) -> None:
        """This rank comes to nothing more in this pass: what it left out is started, since peers wait for it before
        they come to whatever follows."""
        self._in_order(state, self.comm.finish(step=False), self.comm.lapse())

    @contextmanager
    def beside(self, state: State) -> Iterator[None]:
        """Something that no plan names, on every rank: a whole tree, metrics. Where a peer waits for what this rank has
        left out, and so would start later, it is started now."""
        before, self.run.behind = self.run.behind, partial(self._catch_up, state)
        try:
            yield
        finally:
            self.run.behind = before

    def _catch_up(self, state: State, awaited: Mapping[str, Waiting]) -> bool:
        """Peers wait for what this rank would start later. Whether it could start some of it now."""
        if self.recording is not None:
            return False
        moved = False
        if "gather" in awaited:
            index = self.comm.pass_by()
            if index is not None:
                self._gather(state, index)
                moved = True
        if "reduce" in awaited and state.grads is self.grads:
            due = self.comm.let_lapse()
            if due is not None:
                self._issue([due])
                moved = True
        return moved

    # ---------------------------------------------------------------- gathers

    def unshard(
        self, state: State, names: Sequence[str], outside_plan: bool = False
    ) -> dict[str, dict[str, torch.Tensor]]:
        """The weights of units, once they are there; starts what the plan names next."""
        if self.shared and not self.shared.made:
            self.shared.prepare(self.plan)
        if self.run.cuda:
            self.staging.age()
        if outside_plan and self.recording is None:
            outside = list(names)
        elif self.recording is None:
            wanted = [name for name in names if not self.loose.held(name)] if self.loose.units else names
            try:
                gathers, outside = self.comm.use(wanted)
            except ScheduleError:
                state.token.ledger.leave()  # nothing has changed
                raise
            if self.comm.jumped and (self.eager or self.comm.training):
                self.comm.skipped()
                self._in_order(state, gathers, self.comm.lapse())
            else:
                for i in gathers:
                    self._gather(state, i)
        else:
            self.recording.append(tuple(names))
            outside = list(names)
        for name in outside:
            with self.beside(state):
                self.loose.gather(state, name, self._planned)
            self.staging.touched(self.layout.by_name[name])
        lent = {}
        for name in names:
            lent[name] = dict(self._lend(state, name, name in outside).weights)
        return lent

    def _in_order(self, state: State, gathers: Sequence[int], due: Iterable[tuple[int, bool]]) -> None:
        """Gathers and reductions in the order in which peers come to them: on the CPU, where the host waits, ranks
        would else wait for each other on different lanes."""
        left = deque(due)
        if left:
            self.adopt(state.grads)
        before = -1
        for i in gathers:
            while left and (i < before or self.plan.reductions[left[0][0]].use < self.plan.gathers[i].start):
                self._issue([left.popleft()])
            self._gather(state, i)
            before = i
        self._issue(left)

    def _lend(self, state: State, name: str, outside: bool) -> Lease:
        if outside or (self.loose.units and self.loose.held(name)):
            lease = self.loose.lease(name)
        else:
            place = self.flying.pop(name, None)
            if place is not None:
                self.run.wait(place.ready(self.flying, self.newest) if self.run.cuda else place.gathered)
            else:
                place = self.arena.place(state, name)
            lease = place.lease
        lease.held = True
        return lease

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

    def _free(self, unit: str) -> Mark:
        """The point from which a unit's place may be written: the newest release of what lay there."""
        shares = self.comm.sharing[unit]
        if unit in self.flying or not shares.isdisjoint(self.flying):
            for name in [name for name in self.flying if name in shares or name == unit]:
                self.run.wait(self.flying.pop(name).gathered)  # skipped: nobody waited for it
        mark = None
        if self.released:
            for name in [name for name in self.released if name in shares or name == unit]:
                mark = self.released.pop(name)  # the dict is in order of release
        return mark

    def also(self, unit: str) -> None:
        """A unit that is gathered by the plan is needed where it lay outside of it, too, until it is released."""
        self.loose.fill(unit, [(part.bucket, part.whole) for part in self.arena.places[unit].parts])

    def release(self, state: State, names: Sequence[str]) -> None:
        """Units are given back: a mark on compute, and gathers that waited for their bytes.

        Raises:
            ScheduleError: one of them is not held. Nothing has changed then.
        """
        for name in names:
            if name not in self.comm.held and not self.loose.held(name):
                state.token.ledger.leave()
                raise ScheduleError(
                    f"release: the unit {name!r} is not gathered. Call state, w = unshard(state, {name!r}) first."
                )
        mine = []
        for name in names:
            if self.loose.units and self.loose.held(name):
                self.loose.release(name, self.plan.schedule.debug)
            else:
                mine.append(name)
                self.arena.places[name].lease.held = False
                if name in self.loose.units:  # see `also`
                    self.loose.release(name, self.plan.schedule.debug)
        if not mine:
            return
        gathers, free = self.comm.release(mine)
        if free and self.plan.schedule.debug:
            for name in free:
                self.arena.places[name].poison()
        if self.run.cuda:
            place = self.arena.places[mine[-1]]
            place.released = self.run.mark(place.released)
            for name in mine:
                self.released.pop(name, None)
                self.released[name] = place.released
        for i in gathers:
            self._gather(state, i)
        if not self.comm.owing and self.comm.over:
            self.close(state)

    # ---------------------------------------------------------------- the end of a step

    def finish(self, state: State, step: bool = True) -> None:
        """Start what the main gradients still lack: early gradients, zeros where none came, what is partial. And the
        gathers that peers started in this pass and this rank passed over."""
        gathers = self.comm.finish(step) if self.recording is None else []
        self._in_order(state, gathers, self.comm.close())
        self._issue((), relents=False)  # all gathers that peers may wait for are under way
        for name, bucket in self.layout.trainable.items():
            if name in self.grads:
                self.staging.complete(bucket, self.grads)
            else:  # of a unit that the plan does not name, and so no rank has a gradient
                self.staging.zeros(bucket, self.grads, self.spec.mesh)

    def settle(self) -> None:
        """Compute waits for everything under way."""
        self.staging.settle()
        self.run.wait(self.newest)
        self.newest = None

    def drop(self) -> None:
        """What is under way was captured and will never run: no mark of it can be waited for."""
        self.newest, self.flying = None, {}
        self.staging.drop()

    @property
    def digest(self) -> int:
        """Of the collectives issued in this step, lane by lane."""
        return zlib.crc32(repr(self.digests).encode())

    def reset(self) -> None:
        """Back to the state between steps, whether the step was taken or abandoned."""
        self.settle()
        self.grads, self.digests = {}, [0, 0]
        self.last, self.whole = True, False
        self.given.begin()
        self.early.clear()
        self.backlog.clear()
        self.comm.reset()
        self.flying.clear()
        self.released.clear()
        for place in self.arena.places.values():
            place.lease.held = False
        self.loose.clear()
        self.arena.free()
        self.fence = True
        self.comm.end()
        self.observed, self.recorded_turn, self.begins = None, None, 0
        self.waived.clear()
        if self.recording is not None:
            self.recording.clear()

    def rest(self, state: State) -> None:
        """Weights were looked at, on every rank, and nothing more. Starts what peers started, and begins anew."""
        self._in_order(state, self.comm.finish() if self.recording is None else [], [])
        self.reset()

    def commit(self) -> None:
        """The step was taken: install the order that it recorded."""
        order, observed, turn = tuple(self.recording or ()), self.observed, self.recorded_turn
        self.reset()
        for place in self.arena.places.values():
            # The next step gathers other numbers: autograd shall refuse residuals that are kept until then.
            torch.autograd.graph.increment_version(place.aliases)
        if order:
            self.recording = None
            order, turn = self.run.everyone((order, turn), "the recorded order")[0]
            self._install(plan(self.layout, self.spec.schedule.ordered(order)), turn)
        if self.observing and observed is not None:
            self.observing = False
            self._adopt(observed)

    def snapshot(self) -> Comm:
        """What `state.comm` shows."""
        flying = [name for name, place in self.flying.items() if not self.run.passed(place.gathered)]
        reducing = sum(not self.run.passed(mark) for mark in (stage.done for stage in self.staging.busy))
        return snapshot(self.comm, flying, reducing)

    def __del__(self) -> None:
        if getattr(self, "staging", None) is None:
            return
        if not self.run.cuda:  # jobs hold what they write: let go of those that are done
            for queue in self.run.queues.values():
                queue.reap()
            return
        for mark in (*self.staging.marks.values(), self.newest):  # what is freed now may still be in use
            if mark is not None and torch.cuda.is_initialized():
                self.run.wait(mark)
