"""Updates on arrival: what a captured step does with gradients that the eager step before it updated beside the rest.

    eager      ── reduce 3 ─▶ main gradients ─┬─ reduce 2 ─▶ main gradients ─┬── ...    step: ranks vote, then update
                                              └─ (update 3)                  └─ (update 2)
    captured   ── reduce 3 ─▶ update 3 ── reduce 2 ─▶ update 2 ── ...                   replay: ranks vote, then all

An eager step votes before anything changes, so its main gradients wait. A captured one changes nothing: its replay
comes after a vote. So there each bucket is updated where its gradients arrive (see `_capture.arrival`), with the same
bits, if the eager step before it has shown that nothing looks at gradients and weights in between.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._common.torch_names import pytree
from .._engine.sink import BucketConsumer, StepConsumer
from .._runtime.given import NewCounts
from .._state.update import in_place, renew
from .._storage.cut import cut, cuts
from .._storage.flat import FlatBuffer
from .arrival import Arrival, Rooms

if TYPE_CHECKING:
    from .._state.state import State

__all__ = ["UpdatesOnArrival"]

LEAST = 1 << 20  # bytes of main gradients: smaller buckets share updates at the end of a step
PIECE = 1 << 25  # bytes: what the caches of GPUs hold beside other things, and not so few that launches take the time


class UpdatesOnArrival(StepConsumer):
    """Takes part in a step that is captured: these buckets are updated where their gradients arrive, as far as they
    can be."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.changes: tuple[Any, ...] = ()  # what updates change

    def begin(self, state: Any) -> dict[str, BucketConsumer]:
        """What a rate is computed from is read now, by compute."""
        self.changes = _changing(state)
        return _arrivals(state, self.names)

    def check(self, state: Any, used: Sequence[BucketConsumer], skip: Any, lacking: Collection[str]) -> None:
        """Refuse to end a captured step that would have kept what it has updated already.

        Raises:
            ScheduleError: it may be taken back, or has another state than when its first gradients came. NewCounts:
                leaves got no gradient, which have one as a rule.
        """
        if skip is not None:
            used[0].refuse("step(skip=) was called")
        if state.version.lineage.runtime.gate is not None:
            used[0].refuse("ranks were asked whether they take the step")
        if any(a is not b for a, b in zip(_changing(state), self.changes, strict=True)):
            used[0].refuse("main weights, optimizer state, the optimizer or the count were replaced")
        for one in used:
            if one.name in lacking:
                raise NewCounts(
                    f"cuda_graph: leaves of {one.name!r} that got a gradient in the step before got none in the step "
                    "that is captured, which has updated them."
                )


def _changing(state: State) -> tuple[Any, ...]:
    return state.main, state.opt, state.optimizer, state.count


def _arrivals(state: State, names: Sequence[str]) -> dict[str, BucketConsumer]:
    """Of these buckets, which the last eager step reduced once and updated beside the rest of its backward, those that
    a captured one can update on arrival."""
    optimizer = state.optimizer
    if getattr(optimizer, "communicates", False) or not getattr(optimizer, "elementwise", False):
        return {}
    buckets = [state.layout.buckets[name] for name in names]
    labels = [*dict.fromkeys(label for bucket in buckets for label, *_ in bucket.labels)]
    fixed = optimizer.for_step(state.count, labels) if hasattr(optimizer, "for_step") else None
    if fixed is None:
        return {}
    nodes = pytree.tree_leaves(state.opt, is_leaf=lambda x: isinstance(x, FlatBuffer))
    by_leaf = {x.bucket.name for x in nodes if isinstance(x, FlatBuffer) and x.bucket.by_leaf}
    rooms = Rooms(state._executor.run.device)
    found: dict[str, BucketConsumer] = {}
    for bucket in buckets:
        n, width = state.main[bucket.name].local.numel(), bucket.grads.itemsize
        if n * width < LEAST or bucket.on_host or bucket.grads_on_host:
            continue
        pieces = cuts(n, width, PIECE)
        if bucket.name in by_leaf and len(pieces) > 1:  # each piece would count a step
            continue
        update = _update(state._evolve(optimizer=fixed), bucket.name)
        found[bucket.name] = Arrival(bucket.name, bucket.grads, pieces, rooms, update)
    return found


def _update(state: State, name: str) -> Any:
    def update(start: int, stop: int, grad: torch.Tensor) -> None:
        def mine(x: Any) -> Any:
            here = isinstance(x, FlatBuffer) and x.bucket.name == name and not x.bucket.by_leaf
            return cut(x, x.local[start:stop], start) if here else x

        opt = pytree.tree_map(mine, state.opt, is_leaf=lambda x: isinstance(x, FlatBuffer))
        main = state.main[name]
        part = mine(main)
        in_place(state._evolve(opt=opt), {name: part}, grads={name: cut(main, grad, start)})
        renew(state, part)  # while the cache has it

    return update
