"""Gradients that are not finite: found on the device, on every rank alike, and steps that are skipped for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from functional_fsdp import State, finish, replace_extras
from functional_fsdp._runtime import runtime_of

from ._gradients import shards, total

__all__ = ["Nonfinite", "find_nonfinite", "nonfinite", "skip_nonfinite"]


@torch.no_grad()
def nonfinite(state: State) -> tuple[State, torch.Tensor]:
    """Whether any gradient of any rank is inf or NaN: a bool tensor [], the same on every rank. No host sync.

    Raises:
        ScheduleError: the state has no gradients.

    Collective: as `global_norm`.
    """
    state = finish(state)
    counts = {}
    for axes, tensors in shards(state).items():
        filled = [t for t in tensors if t.numel()]
        largest = torch._foreach_norm(filled, float("inf")) if filled else []
        flags = torch.stack([*largest, torch.zeros((), device=state.count.device)]).isfinite().logical_not()
        counts[axes] = flags.sum().float()
    return state, total(state, counts) > 0


def skip_nonfinite(step: Callable[..., State]) -> Callable[[State], State]:
    """A step that changes nothing when a gradient is not finite, on any rank: no weight, no moment, no count.

    Args:
        step: `fsdp.step`, or a function that takes `skip=` as it does.

    Returns:
        `f(state) -> state`. How many steps were skipped is counted in `state.extras["skipped"]`, an int64 tensor [].

    Nothing waits for the device: it decides there. What a forward made of the buffers stays, as under torch's
    GradScaler: a BatchNorm that has seen a NaN keeps it.

    Collective: as `nonfinite` and `step`.

    Example:
        >>> step = T.skip_nonfinite(fsdp.step)  # doctest: +SKIP
        >>> state = step(state)  # doctest: +SKIP
    """

    def stepped(state: State) -> State:
        state, bad = nonfinite(state)
        extras: Mapping[str, Any] = state.extras or {}
        before = extras.get("skipped")
        zero = torch.zeros((), dtype=torch.int64, device=state.count.device)
        with torch.no_grad():
            skipped = (zero if before is None else before) + bad
        return replace_extras(step(state, skip=bad), skipped=skipped)

    return stepped


class Nonfinite(NamedTuple):
    """Elements of a leaf's gradient that are not finite: how many of those that `rank` holds."""

    leaf: str
    unit: str
    rank: int
    elements: int


@torch.no_grad()
def find_nonfinite(state: State) -> tuple[State, list[Nonfinite]]:
    """Which gradients are inf or NaN: leaf, unit, and the rank whose shard it is. Waits for the device: for debugging.

    Raises:
        ScheduleError: the state has no gradients.

    Collective: what `finish` issues, and a gather of the findings, the same list on every rank.

    Example: `state, found = T.find_nonfinite(state)`.
    """
    state = finish(state)
    run = runtime_of(state.spec.mesh)
    mine = []
    for buffer in state.grads.values():
        start, stop = buffer.span()
        for leaf in buffer.bucket.leaves:
            a, b = max(leaf.offset, start), min(leaf.offset + leaf.numel, stop)
            count = int((~buffer.local[a - start : b - start].isfinite()).sum()) if a < b else 0
            if count:
                mine.append(Nonfinite(leaf.path, buffer.bucket.unit, run.ranks[run.rank], count))
    return state, [one for found in run.everyone(mine) for one in found]
