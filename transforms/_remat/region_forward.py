"""The forward of a region: its parts are noted, and what they save is no matter of torch's checkpoint.

hooks    ... the checkpoint's, which count │ none, or those of moves │ the checkpoint's ...
         ─── between parts ────────────────┴───── in a part ─────────┴─── between parts ───
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from functional_fsdp._seams import around_bound_calls, torch_private

from .._drive.watch import version
from .._modules.outputs import each_leaf
from .draws import DrawPoint
from .given import storages_in
from .kept_outputs import KeptOutput
from .module_state import ModuleState, StatePlace
from .parts import PartCall, running
from .records import PartRecord, RegionRecord

__all__ = ["RegionForward"]


class RegionForward:
    """The forward of a region.

    Attributes:
        packed: how many tensors were saved so far, to be computed again.
        draws: where random numbers stood when it began, or when the last part was over.
    """

    def __init__(self, region: RegionRecord) -> None:
        self.region = region
        self.packed = 0
        self.draws: DrawPoint | None = None
        self.hooks: Any = None
        self.taken: set[int] = set()  # storages of inputs, buffers and earlier outputs
        self.around: Any = None  # what was around bound calls before

    def run(self, args: Any, kwargs: Any) -> Any:
        region = self.region
        self._count()
        region.start = self.draws = region.draws()
        try:
            if region.state is not None:
                region.state.begin()
            bound = around_bound_calls(partial(self._bound, region.states))
            with torch_private.parametrized_anew(), running(self), bound as self.around:
                out = region.fn(*args, **kwargs)
            if region.state is not None:
                region.state.end()
            self._end_draws()
            self._keep_outputs()
        except BaseException:
            region.forget()
            raise
        finally:
            self.hooks = self.around = None  # they hold this
        return out

    @contextmanager
    def _bound(self, states: list[ModuleState], module: nn.Module) -> Iterator[None]:
        """A call of a module by `bind`: note in `states` what it finds in it, and what it changes."""
        with self.around(module) if self.around is not None else nullcontext():
            state = ModuleState(module)
            states.append(state)
            state.begin()
            yield
            state.end()

    def _count(self) -> None:
        """Have the checkpoint's hooks count what they are given."""
        found = torch_private.top_saved_hooks()
        assert found is not None
        pack, unpack = found

        def counted(t: torch.Tensor) -> Any:
            self.packed += 1
            return pack(t)

        self.hooks = counted, unpack
        torch_private.pop_saved_hooks()
        torch_private.push_saved_hooks(*self.hooks)

    def _end_draws(self) -> None:
        region = self.region
        if self.draws is not None and region.start is not None:
            self.draws.end()
            if region.trains not in region.habits.python:
                region.habits.python[region.trains] = region.start.python_moved()

    def _keep_outputs(self) -> None:
        """Of the outputs of parts keep what a recomputation will need."""
        region = self.region
        for record in region.parts:
            if record.packed == self.packed:  # it stops before
                record.output.let_go()
            elif record.writes or record.output.changed():
                record.run_again()
            else:
                record.output.keep(region.moves_of(record.part))
        if region.moves is not None:
            region.moves.end()

    # ---- parts

    def called(self, call: PartCall) -> Any:
        """Run a part, and note what came of it."""
        region = self.region
        if self.draws is not None:
            self.draws.end()
        moves = region.moves_of(call.part)
        before = region.state.look(call.module) if region.state is not None else None
        given = [(t, version(t)) for t in each_leaf((call.args, call.kwargs)) if isinstance(t, torch.Tensor)]
        states: list[ModuleState] = []
        bound = around_bound_calls(partial(self._bound, states))
        with running(None), self._outside(), bound, moves.moving(call.module) if moves is not None else nullcontext():
            out = call()
        places = [found.place for found in before.changed()] if before is not None else []
        record = self._note(call, out, places)
        record.writes = any(version(t) != then for t, then in given)
        record.states = states
        return out

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """Inside, the checkpoint's hooks are not there. If others are on top of them, those have what is saved."""
        top = torch_private.top_saved_hooks()
        if top is None or top[0] is not self.hooks[0]:
            yield
            return
        torch_private.pop_saved_hooks()
        try:
            yield
        finally:
            torch_private.push_saved_hooks(*self.hooks)

    def _note(self, call: PartCall, out: Any, places: list[StatePlace]) -> PartRecord:
        if not self.region.parts:
            self.taken = self.region.taken()
        storages = storages_in(out)
        fresh = not storages & (self.taken | storages_in((call.args, call.kwargs)))
        self.taken |= storages
        output = KeptOutput((out, [place.copy() for place in places]), copies=call.part.copies and fresh)
        before, self.draws = self.draws, self.region.draws()
        record = PartRecord(call, output, places, fresh, self.packed, before, self.draws)
        self.region.parts.append(record)
        return record
