"""CapturedStep: a graph, the memory that goes with it, and its replay.

The state keeps its tensors: a captured step writes what a step makes anew (buffers, extras) into them at its end.

Also here: which calls are captured alike, and what those are told who ask whether the stream is captured.

A library that asks goes another way in a graph: transformers then makes masks, which cost the fused attention. So while
a step warms up or is captured, callers outside torch and this library are told what is true in warm-up, "no". torch is
told the truth: its SyncBatchNorm goes by it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from functional_fsdp import State, TreeError
from functional_fsdp._seams import Capture, torch_private

from .capturing import KEPT, GraphBuffers
from .guarding import Guard
from .lines import root_of

__all__ = ["CapturedStep", "Kind", "answered_as_in_warm_up", "signature", "structure"]

NAME = "is_current_stream_capturing"
PLACES = torch.cuda, torch.cuda.graphs
truth = torch.cuda.is_current_stream_capturing
_lock = threading.Lock()
_within = 0  # how many steps are under way, of all threads
_before: list[Any] = []  # what stood there


def _answer() -> bool:
    """In the place of torch.cuda.is_current_stream_capturing: one object, so that nothing is compiled twice for it."""
    caller = sys._getframe(1)
    name = caller.f_globals.get("__name__") or ""
    if root_of(caller) not in ("torch", "functional_fsdp") or name.startswith("torch._dynamo"):
        return False
    return truth()


_answer._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch._dynamo.assume_constant_result's mark


@contextmanager
def answered_as_in_warm_up() -> Iterator[None]:
    """Within, on all threads, callers outside torch and this library hear that no stream is captured."""
    global _within
    with _lock:
        if not _within:
            _before[:] = [getattr(place, NAME) for place in PLACES]
            for place in PLACES:
                setattr(place, NAME, _answer)
        _within += 1
    try:
        yield
    finally:
        with _lock:
            _within -= 1
            if not _within:
                for place, found in zip(PLACES, _before, strict=True):
                    setattr(place, NAME, found)


pytree = torch_private.pytree


class Kind:
    """What a captured step takes for granted of a state: equal by spec, layout, optimizer, and which buffers are each
    rank's own."""

    __slots__ = ("key",)

    def __init__(self, state: State) -> None:
        self.key = (state.spec, state.layout, state.optimizer, state.local_buffers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kind) and all(a is b or a == b for a, b in zip(self.key, other.key, strict=True))

    def __hash__(self) -> int:
        return hash(self.key[1].hash)


def structure(state: State) -> Any:
    """Equal for states whose tensors can be copied into each other's."""
    trees = [getattr(state, name) for name in KEPT]
    return Kind(state), pytree.tree_structure(trees)


def signature(state: State, leaves: list[Any], treedef: Any) -> Any:
    """Equal for calls that are captured alike: shapes and dtypes of tensors, and everything else as it is; and the
    buckets of which the optimizer counts steps by leaf.

    Raises:
        TreeError: a State, or something without a hash (an array, say), which cannot be told from another.
    """
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append((tuple(leaf.shape), leaf.dtype))
        elif isinstance(leaf, State):
            raise TreeError("cuda_graph: a State among the batch; a captured step has one state, its first argument.")
        elif isinstance(leaf, float):
            found.append(leaf.hex())
        else:
            try:
                hash(leaf)
            except TypeError:
                raise TreeError(
                    f"cuda_graph: the batch has a {type(leaf).__name__}, which a captured step would take for the one "
                    "it saw first. Pass it as a tensor."
                ) from None
            found.append((type(leaf), leaf))
    counted = getattr(state.optimizer, "counted", None)  # what it counts steps of may become more
    return treedef, tuple(found), Kind(state), counted and counted(state.opt)


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
