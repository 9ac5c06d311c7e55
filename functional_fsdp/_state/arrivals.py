"""Updates on arrival: what a captured step does with gradients that the eager step before it updated beside the rest.

    eager      ── reduce 3 ─▶ main gradients ─┬─ reduce 2 ─▶ main gradients ─┬── ...    step: ranks vote, then update
                                              └─ (update 3)                  └─ (update 2)
    captured   ── reduce 3 ─▶ update 3 ── reduce 2 ─▶ update 2 ── ...                   replay: ranks vote, then all

An eager step votes before anything changes, so its main gradients wait. A captured one changes nothing: its replay
comes after a vote. So there each bucket is updated where its gradients arrive (see `_engine.arrival`), with the same
bits, if the eager step before it has shown that nothing looks at gradients and weights in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._common.torch_names import pytree
from .._engine.arrival import Arrival, Rooms
from .._plan.bucket import ALIGN, aligned
from .._runtime.given import Leaves, NewCounts
from .._storage.cut import Cut
from .._storage.flat import FlatBuffer
from .update import in_place

if TYPE_CHECKING:
    from .state import State

__all__ = ["arrivals", "check_arrivals"]

LEAST = 1 << 20  # bytes of main gradients: smaller buckets share updates at the end of a step
PIECE = 1 << 25  # bytes: what the caches of GPUs hold beside other things, and not so few that launches take the time


def arrivals(state: State, names: Sequence[str]) -> dict[str, Arrival]:
    """Of these buckets, which the last eager step reduced once and updated beside the rest of its backward, those that
    a captured one can update on arrival."""
    optimizer = state.optimizer
    if getattr(optimizer, "communicates", False) or not getattr(optimizer, "elementwise", False):
        return {}
    nodes = pytree.tree_leaves(state.opt, is_leaf=lambda x: isinstance(x, FlatBuffer))
    by_leaf = {x.bucket.name for x in nodes if isinstance(x, FlatBuffer) and x.bucket.by_leaf}
    if names and hasattr(optimizer, "for_step"):  # before lanes begin
        state = state._evolve(optimizer=optimizer.for_step(state.count))
    rooms = Rooms(state._executor.run.device)
    found = {}
    for name in names:
        bucket, main = state.layout.buckets[name], state.main[name]
        n, width = main.local.numel(), bucket.grads.itemsize
        most = aligned(PIECE // width, ALIGN)
        pieces = [(start, min(start + most, n)) for start in range(0, n, most)]
        if n * width < LEAST or bucket.on_host or bucket.grads_on_host:
            continue
        if name in by_leaf and len(pieces) > 1:  # each piece would count a step
            continue
        found[name] = Arrival(name, bucket.grads, pieces, rooms, _update(state, name))
    return found


def _update(state: State, name: str) -> Any:
    def update(start: int, stop: int, grad: torch.Tensor) -> None:
        main = state.main[name]

        def part(buffer: FlatBuffer, local: torch.Tensor) -> FlatBuffer:
            return Cut(local, buffer, start) if stop - start < main.local.numel() else buffer.but(local)

        def mine(x: Any) -> Any:
            here = isinstance(x, FlatBuffer) and x.bucket.name == name and not x.bucket.by_leaf
            return part(x, x.local[start:stop]) if here else x

        opt = pytree.tree_map(mine, state.opt, is_leaf=lambda x: isinstance(x, FlatBuffer))
        in_place(state._evolve(opt=opt), {name: mine(main)}, grads={name: part(main, grad)})

    return update


def check_arrivals(state: State, skip: Any, given: Leaves = {}) -> None:  # noqa: B006
    """Refuse to end a captured step that would have kept what it has updated already.

    Raises:
        ScheduleError: it is skipped, perhaps. NewCounts: leaves got no gradient, which have one as a rule.
    """
    used = [one for one in state._executor.arrivals.values() if one.used]
    if skip is not None and used:
        used[0].refuse("step(skip=) was called")
    for one in used:
        if one.name in given:
            raise NewCounts(
                f"cuda_graph: leaves of {one.name!r} that got a gradient in the step before got none in the step that "
                "is captured, which has updated them."
            )
