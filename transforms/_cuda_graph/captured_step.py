"""CapturedStep: a graph, the memory that goes with it, and its replay.

The state keeps its tensors: a captured step writes what a step makes anew (buffers, extras) into them at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from functional_fsdp import State
from functional_fsdp._verbs.seams import Capture, torch_private

from .capturing import GraphBuffers
from .guarding import Guard

__all__ = ["CapturedStep"]

pytree = torch_private.pytree


class CapturedStep:
    """A graph and the memory that goes with it."""

    def __init__(self, graph: Any, capture: Capture, home: GraphBuffers, guard: Guard | None) -> None:
        self.graph, self.capture, self.home, self.guard = graph, capture, home, guard
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[Any] = []  # what the step returns beside the state, and its structure
        self.structure: Any = None
        self.constants: Any = None  # what the step copies from the host
        self.kind: type = State  # of what the step returns
        self.again: dict[tuple[int, int], torch.Generator] = {}  # what recomputations draw from
        self.draws: dict[tuple[int, int], int] = {}  # and from which offsets on
        self.peak = 0  # bytes that a replay uses at most, beside the state and the batch
        self.reserved = 0  # bytes that stay reserved for it

    def launch(self, state: State, launched: Callable[[], None] = lambda: None) -> None:
        """Replay it from this state's values.

        Args:
            launched: is called when it has been put in motion.

        Raises:
            Vetoed: the host has read something else than before, on some rank.
        """
        self.home.enter(state)
        lanes: Any = self.capture.run.lanes
        if self.guard is not None:
            self.guard.before()
        with lanes.joined():
            self.graph.replay()
        self.home.changed()
        launched()
        if self.guard is not None:
            self.guard.after()

    def results(self, state: State) -> Any:
        """What the step returns, after a replay that has left this state."""
        if self.kind is State:
            return state
        outputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in self.outputs]
        copies = pytree.tree_unflatten(outputs, self.structure)
        named = hasattr(self.kind, "_fields")
        return self.kind(state, *copies) if named else (state, *copies)
