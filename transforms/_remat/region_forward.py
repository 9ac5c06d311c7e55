"""The forward of a region: its parts are noted, and what they save is no matter of torch's checkpoint.

hooks    ... the checkpoint's, which count │ none, or those of moves │ the checkpoint's ...
         ─── between parts ────────────────┴───── in a part ─────────┴─── between parts ───

A recomputation of a region: its code runs again, and its parts return what they returned.

It finds inputs, the module's state and random numbers as the forward found them, and leaves the latter two as they are.
It may come before the forward is over, where a gradient is taken in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from functional_fsdp import ScheduleError
from functional_fsdp._seams import around_bound_calls, torch_private

from .._drive.buffers import version
from .._modules.containers import contents_by_id, written
from .._modules.unit_modules import each_leaf, map_tensors
from .._uses import USES
from .draws import DrawPoint
from .given import storages_in
from .module_state import ModuleState, StatePlace
from .moves import MoveGroup
from .parts import LOST, KeptOutput, PartCall, differentiable, running
from .products import KeepProducts, ReuseProducts
from .records import PartRecord, RegionRecord

__all__ = ["Recomputation", "RegionForward"]


class RegionForward:
    """The forward of a region.

    Attributes:
        packed: how many tensors were saved so far, to be computed again.
        draws: where random numbers stood when it began, or when the last part was over.
    """

    def __init__(self, region: RegionRecord) -> None:
        self.region = region
        self.packed = 0
        self.products: Any = KeepProducts(self, region, lambda: self.packed)
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
            region.given.end()
            self._end_draws()
            self._keep_outputs()
        except BaseException:
            region.forget()
            raise
        finally:
            self.hooks = self.around = self.products = None  # they hold this
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
        given = self.region.given

        def counted(t: torch.Tensor) -> Any:
            self.packed += 1
            return pack(t)

        def computed_again(kept: Any) -> Any:
            try:
                return unpack(kept)
            except RuntimeError as error:  # the recomputation's own, or the checkpoint's, which compares what it saves
                given.refuse_caches(error)
                raise

        self.hooks = counted, computed_again
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
        for product in region.products:
            if product.packed == self.packed:
                product.let_go()
        if region.moves is not None:
            region.moves.end()
        elif region.given.device in USES:
            USES[region.given.device].recomputes(region.habits.keeps)

    # ---- parts

    def called(self, call: PartCall) -> Any:
        """Run a part, and note what came of it."""
        region = self.region
        if self.draws is not None:
            self.draws.end()
        moves = region.moves_of(call.part)
        before = region.state.look(call.module) if region.state is not None else None
        given = [(t, version(t)) for t in each_leaf((call.args, call.kwargs)) if isinstance(t, torch.Tensor)]
        containers = contents_by_id(call.args, call.kwargs)
        states: list[ModuleState] = []
        bound = around_bound_calls(partial(self._bound, states))
        with running(None), self._outside(), bound, moves.moving(call.module) if moves is not None else nullcontext():
            out = call()
        places = [found.place for found in before.changed()] if before is not None else []
        record = self._note(call, out, places)
        record.writes = bool(written(containers)) or any(version(t) != then for t, then in given)
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


class Recomputation:
    """One recomputation of a region."""

    def __init__(self, region: RegionRecord) -> None:
        self.region = region
        self.at = 0  # which of the forward's calls of parts comes next
        self.products: Any = ReuseProducts(self, region)

    def run(self, args: Any, kwargs: Any) -> Any:
        region = self.region
        made = region.given.again()
        args, kwargs = made(args), made(kwargs)
        if region.moves is not None:
            region.moves.arrive()
        draws = region.start.resumed() if region.start is not None else nullcontext()
        state = region.state.resumed(made.of) if region.state is not None else nullcontext()
        with running(self), draws, state, self._bound(region.states), torch_private.parametrized_anew():
            try:
                return region.fn(*args, **kwargs)
            finally:
                self.products = None  # it holds this

    @staticmethod
    def _bound(states: list[ModuleState]) -> AbstractContextManager[Any]:
        """Within, calls of modules by `bind` find in them what the forward's calls found, one after the other."""
        left = iter(states)

        def found(module: nn.Module) -> AbstractContextManager[None]:
            state = next(left, None)
            if state is None:  # the forward has not come so far
                return nullcontext()
            if state.module is not module:
                raise ScheduleError(
                    f"remat: a {type(module).__name__} was called by bind when its function was computed again, and in "
                    f"the forward it was a {type(state.module).__name__}. Have the function do the same each time."
                )
            return state.resumed()

        return around_bound_calls(found)

    def called(self, call: PartCall) -> Any:
        """A part's output once more. If it is not there, the part is run again."""
        record = self._next(call)
        if record is None:  # the forward has not come so far
            return _run(call)
        again = record.output.again(call)
        if again is LOST:
            with self._bound(record.states):
                out = differentiable(_run(call), record.output.trains, call)
        else:
            out, values = again
            for place, value in zip(record.places, values, strict=True):
                place.put(value)
        if record.after is not None:
            record.after.go()
        return out

    def _next(self, call: PartCall) -> PartRecord | None:
        parts = self.region.parts
        if self.at == len(parts):
            if not self.region.over:
                return None
            raise ScheduleError(
                f"remat: a part was called for the {self.at + 1}th time when its module was computed again, and in the "
                f"forward there were {self.at} calls. Have the module do the same each time."
            )
        record = parts[self.at]
        self.at += 1
        if record.who is not call.who:
            raise ScheduleError(
                f"remat: when its module was computed again, the {self.at}th part that was called was "
                f"{_name(call.who)}, and in the forward it was {_name(record.who)}. Have the module do the same each "
                "time."
            )
        return record


def _run(call: PartCall) -> Any:
    """Run a part as its forward did, with gradients, since some kernels are others without. Its graph is let go."""
    with running(None), torch.autograd.graph.saved_tensors_hooks(_as_is, MoveGroup.unpack):
        out = call()
    return map_tensors(torch.Tensor.detach, out)


def _as_is(t: torch.Tensor) -> Any:
    return t.detach(), t._version


def _name(who: Any) -> str:
    return f"a {type(who).__name__}" if isinstance(who, torch.nn.Module) else getattr(who, "co_name", repr(who))
