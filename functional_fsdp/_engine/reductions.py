"""Reductions: how gradients that come in any order are reduced in the plan's.

    reduce ─▶ its turn has not come: early, kept as it is
         └──▶ due, in the plan's order ─▶ backlog ─▶ staging ─▶ reduce lane

Nearly always the backlog is empty again at once. A reduction stays in it where all staging is taken by reductions that
a peer has not come to yet, and that peer waits for a gather that this rank issues later: then this rank goes on.
"""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .._common.ranges import ranged
from .._common.torch_names import profiler
from .._plan.layout import Unit
from .._plan.order import RecordedOrder
from .._plan.positions import Move
from .._plan.route import states_of
from .._storage.flat import FlatBuffer
from .._storage.stored import Stored
from .._storage.weights import owned
from .engine import Engine
from .stage import Values

__all__ = ["Reductions"]


class Reductions(Engine):
    """The part of an `Executor` through which gradients go."""

    def start(self) -> None:
        """Nothing has come yet."""
        trained = {unit.name: [b for b in unit.buckets if b.trainable] for unit in self.layout.units}
        self.hollow = {name: some for name, some in trained.items() if not any(bucket.numel for bucket in some)}
        self.grads: dict[str, FlatBuffer] = {}
        self.early: dict[int, Values] = {}  # gradients whose turn has not come
        self.backlog: deque[tuple[int, Values, bool]] = deque()  # due reductions, their gradients and `last`
        self.last = True  # as the newest gradient came with: zeros in a unit's stead follow it

    def adopt(self, grads: Any) -> None:
        """Go on from these main gradients: a transform may have put others in the state's place."""
        if grads is not self.grads and (grads or self.grads):
            self.grads = dict(grads or {})
            self.staging.touched()

    def came(self, unit: str, of: str = "") -> Move:
        """What follows where a gradient of this unit came, perhaps of a " tree". Changes nothing."""
        return self.move(("empty" if unit in self.hollow else "reduce") + of, (unit,))

    def reduce(
        self, state: Stored, unit: str, values: Values, last: bool, move: Move, whole_tree: bool = False
    ) -> None:
        """A unit's gradients, as `Unit.paths`, on their way into `grads`: now, or when their turn comes."""
        if self.stays:
            self.share()
        self.position, actions = move
        mine, later = None, self.run.lanes.copies_on_lanes
        for kind, what in actions:
            if kind == "reduce":
                self._issue(what)
            elif kind == "keep":
                mine, self.last = what, last
                self.early[mine] = owned(values, self.arena.loan(unit)) if later else values
            elif kind == "gather":
                self._gather(state, what)
            else:
                if not whole_tree:
                    self.unplanned.agree(unit, "reduce", self._planned)
                self.staging.outside(self.layout.by_name[unit], values, self.grads, last, self.spec.mesh)
                self._read_still(self.layout.by_name[unit])
        if unit in self.hollow:
            self.last = last
            for bucket in self.hollow[unit]:
                if bucket.name not in self.grads:
                    self.staging.zeros(bucket, self.grads, self.spec.mesh)
        elif (self.early or self.backlog) and not later:  # what was borrowed may be released meanwhile
            if mine in self.early:
                self.early[mine] = owned(values, self.arena.loan(unit))
            for i, (index, waiting, flag) in enumerate(self.backlog):
                if waiting is values:
                    self.backlog[i] = index, owned(values, self.arena.loan(unit)), flag

    def reduce_tree(self, state: Stored, total: Mapping[str, torch.Tensor], last: bool) -> None:
        """The gradients of a whole tree, by path: a round of its own, in the same order on every rank."""
        self.carry_out(state, self.move("round"))
        in_turn = dict.fromkeys(reduction.unit for reduction in self.plan.reductions)
        for name in [*in_turn, *(unit.name for unit in reversed(self.layout.units) if unit.name not in in_turn)]:
            unit = self.layout.by_name[name]
            if unit.trained:
                self.given.note(name, sum(1 << i for i, path in enumerate(unit.paths) if path in total))
                values = [total.get(path) for path in unit.paths]
                self.reduce(state, name, values, last, self.came(name, " tree"), whole_tree=True)
        self.carry_out(state, self.move("round"))

    def skip(self, unit: str) -> bool:
        """On this rank no gradient of this unit will come in this pass. False: there is no plan, say so by `reduce`."""
        self.skipped.add(unit)
        if isinstance(self.order, RecordedOrder):
            return False
        self.position, _ = self.move("skip", (unit,))
        return True

    def expect(self, unit: str) -> None:
        """In this backward a gradient of this unit will come, though the forward may not have used it."""
        if not isinstance(self.order, RecordedOrder):
            self.position, _ = self.move("await", (unit,))

    def _issue(self, due: Iterable[tuple[int, bool]], relents: bool = True) -> None:
        """Reduce what is due, in order; with `relents` what finds no staging is left, if a peer needs this rank to go
        on before it can come to what holds the staging."""
        for index, given in due:
            self.backlog.append((index, self.early.pop(index) if given else (), self.last))
        left = self.run.left
        if left and (other := left[0]()) is not self:  # ranks that did not leave it have issued it before this
            left.clear()
            if other is not None:
                other._go_on(relents=False)
        self._go_on(relents)

    def _go_on(self, relents: bool) -> None:
        while self.backlog:
            index, values, last = self.backlog[0]
            unit = self.layout.by_name[self.plan.reductions[index].unit]
            reduce = self.staging.reduce
            if profiler._is_profiler_enabled:
                reduce = ranged(reduce, f"reduce gradients of {unit.name}")
            if not reduce(index, unit, values, self.grads, last, self.spec.mesh, relents):
                if not self.run.left:
                    self.run.left.append(weakref.ref(self))
                return
            if unit.name in self.flying:  # a gather for which compute has not waited may read main weights after this
                self.staging.touched(unit)
            self.digests[1] = zlib.crc32(unit.name.encode(), self.digests[1])
            self.backlog.popleft()
        self.run.left.clear()

    def _read_still(self, unit: Unit) -> None:
        """A gather for which compute has not waited when the gradient came may read main weights after that."""
        if unit.name in self.flying:
            self.staging.touched(unit)

    @property
    def waiting(self) -> bool:
        """Whether there are gradients that are not on their way yet."""
        return bool(self.early or self.backlog)

    @property
    def complete(self) -> bool:
        """Whether every main gradient is there and whole."""
        cursor = self.cursor
        if self.waiting or cursor.reduced or cursor.due or cursor.ahead:
            return False
        grads, trainable = self.grads, self.layout.trainable
        return all(n in grads and grads[n].states == states_of(b, "main") for n, b in trainable.items())
