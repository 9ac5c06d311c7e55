"""A recomputation of a region: its code runs again, and its parts return what they returned.

It finds inputs, the module's state and random numbers as the forward found them, and leaves the latter two as they are.
It may come before the forward is over, where a gradient is taken in it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn as nn

from functional_fsdp import ScheduleError
from functional_fsdp._seams import around_bound_calls, torch_private

from .._modules.outputs import map_tensors
from .kept_outputs import LOST, differentiable
from .module_state import ModuleState
from .moves import MoveGroup
from .parts import PartCall, running
from .records import PartRecord, RegionRecord

__all__ = ["Recomputation"]


class Recomputation:
    """One recomputation of a region."""

    def __init__(self, region: RegionRecord) -> None:
        self.region = region
        self.at = 0  # which of the forward's calls of parts comes next

    def run(self, args: Any, kwargs: Any) -> Any:
        region = self.region
        region.given.check()
        if region.moves is not None:
            region.moves.arrive()
        draws = region.start.resumed() if region.start is not None else nullcontext()
        state = region.state.resumed() if region.state is not None else nullcontext()
        with running(self), draws, state, self._bound(region.states), torch_private.parametrized_anew():
            try:
                return region.fn(*args, **kwargs)
            except RuntimeError as error:
                region.given.refuse_caches(error)
                raise

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
