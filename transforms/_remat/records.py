"""Records: what a region keeps of its forward for its recomputations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn as nn

from .draws import DrawPoint, DrawSources
from .given import GivenInputs
from .habits import Habits
from .module_state import ModuleState, StatePlace
from .moves import MoveGroup, storage_of
from .parts import KeptOutput, KeptPart, PartCall
from .products import Product

__all__ = ["PartRecord", "RegionRecord"]


class PartRecord:
    """One call of a part.

    Args:
        output: what it returned, and what it made of `places`, the module's state.
        fresh: whether the output lies where nothing else does.
        packed: how many tensors had been saved when it was over, to be computed again.
        before, after: from where random numbers were drawn before it, and are after it.
    """

    def __init__(
        self, call: PartCall, output: KeptOutput, places: list[StatePlace], fresh: bool, packed: int,
        before: DrawPoint | None, after: DrawPoint | None,
    ) -> None:  # fmt: skip
        self.part, self.who = call.part, call.who
        self.output, self.places, self.fresh, self.packed = output, places, fresh, packed
        self.before, self.after = before, after
        self.writes = False  # it changes what it is given in place
        self.states: list[ModuleState] = []  # of modules that it called by `bind`

    def run_again(self) -> None:
        """It changes its input in place, or others have changed its output: recomputations have to run it."""
        self.output.let_go()
        self.part.copies = self.fresh  # from the next call on
        if self.before is not None:
            self.before.keep()


class RegionRecord:
    """One call of `fn`.

    Args:
        module: whose code `fn` is.
        generators: from which it draws, beside the default ones; None if random numbers do not come again.

    Attributes:
        state: of the module. trains: whether it is in training mode. start: where random numbers stood. parts: the
            calls of parts, in their order. products: those that are kept, in their order. moves: what moves what parts
            keep. over: whether the forward is.
    """

    def __init__(
        self, fn: Callable[..., Any], module: nn.Module | None, habits: Habits,
        generators: list[Any] | None, given: GivenInputs,
    ) -> None:  # fmt: skip
        self.fn, self.habits, self.generators, self.given = fn, habits, generators, given
        self.state = ModuleState(module) if module is not None else None
        self.states: list[ModuleState] = []  # of modules that were called by `bind`, outside of parts
        self.trains = module is None or module.training
        self.start: DrawPoint | None = None
        self.parts: list[PartRecord] = []
        self.products: list[Product] = []
        self.moves: MoveGroup | None = None
        self.over = False

    def draws(self) -> DrawPoint | None:
        """Where random numbers stand now, if they come again."""
        if self.generators is None:
            return None
        python = self.state is None or self.habits.python.get(self.trains, True)  # a function may be another each time
        return DrawPoint(DrawSources(self.given.device, self.generators, python))

    def taken(self) -> set[int]:
        """The storages of inputs and buffers, which others keep."""
        buffers = self.state.buffers() if self.state is not None else ()
        return self.given.storages.union(map(storage_of, buffers))

    def moves_of(self, part: KeptPart) -> MoveGroup | None:
        """What moves what a part keeps, if that is its fate."""
        if part.fate != "offload":
            return None
        if self.moves is None:
            self.moves = MoveGroup(self.habits.owner.buffers, self.given.device, self.taken())
        return self.moves

    def forget(self) -> None:
        """The forward has failed: let go what its graph holds."""
        self.parts, self.products, self.states, self.moves, self.start = [], [], [], None, None
