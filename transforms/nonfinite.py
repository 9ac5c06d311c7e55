"""Gradients that are not finite: found on the device, on every rank alike, and steps that are skipped for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from functional_fsdp import FsdpError, State, finish_reductions, replace_extras
from functional_fsdp._seams import expect, torch_private
from functional_fsdp.extend import by_unit, leaf_shards, ranks_of, shards, total

__all__ = ["Nonfinite", "NonfiniteError", "NonfiniteWatch", "any_nonfinite", "find_nonfinite", "skip_nonfinite"]


@torch.no_grad()
def any_nonfinite(state: State) -> tuple[State, torch.Tensor]:
    """Whether any gradient of any rank is inf or NaN: a bool tensor [], the same on every rank. No host sync.

    Ranks that train apart (along an axis that no placement names) have an answer of their own.

    Raises:
        ScheduleError: the state has no gradients.

    Collective: as `global_norm`, and of equal leaves along axes of the model's own, too.
    """
    state = finish_reductions(state)
    counts: dict[tuple[str, ...], torch.Tensor] = {}
    own = state.spec.own_axes  # along these ranks ask each other of equal leaves, too: a fault may be one rank's
    for axes, buffers in shards(state).items():
        filled = [buffer.local for buffer in buffers if buffer.local.numel()]
        largest = torch_private.foreach_norm(filled, float("inf")) if filled else []
        flags = torch.stack([*largest, torch.zeros((), device=state.count.device)]).isfinite().logical_not()
        axes = (*axes, *(axis for axis in own if axis not in axes))
        counts[axes] = counts.get(axes, 0.0) + flags.sum().float()
    return state, total(state, counts) > 0


def skip_nonfinite(step: Callable[..., State]) -> Callable[[State], State]:
    """A step that changes nothing when a gradient is not finite, on any rank: no weight, no moment, no count.

    Args:
        step: `fsdp.step`, or a function that takes `skip=` as it does.

    Returns:
        `f(state) -> state`. How many steps were skipped is counted in `state.extras["skipped"]`, an int64 tensor [].

    Nothing waits for the device: it decides there. Ranks that train apart skip steps of their own. What a forward made
    of the buffers stays, as under torch's GradScaler: a BatchNorm that has seen a NaN keeps it.

    Collective: as `any_nonfinite` and `step`.

    Example:
        >>> step = T.skip_nonfinite(fsdp.step)
        >>> state, loss = forward_backward(state, batch)
        >>> state = step(state)
    """

    expect("skip_nonfinite(step)", step, Callable, "a function, as fsdp.step")

    def stepped(state: State) -> State:
        state, bad = any_nonfinite(state)
        extras: Mapping[str, Any] = state.extras
        before = extras.get("skipped")
        zero = torch.zeros((), dtype=torch.int64, device=state.count.device)
        with torch.no_grad():
            skipped = (zero if before is None else before) + bad
        return replace_extras(step(state, skip=bad), skipped=skipped)

    return stepped


class Nonfinite(NamedTuple):
    """Elements of a leaf's gradient that are not finite, and how many: of what `rank` holds, or of what it gave."""

    leaf: str
    unit: str
    rank: int
    elements: int


class NonfiniteError(FsdpError, FloatingPointError):
    """A gradient that is inf or NaN, before it is reduced; or, where `what` says so, what was made of reduced ones.
    `found` says where: the same on every rank."""

    def __init__(self, found: list[Nonfinite], what: str = "") -> None:
        self.found, self.what = found, what
        some = "; ".join(f"rank {n.rank}, unit {n.unit!r}, leaf {n.leaf!r}: {n.elements:,} elements" for n in found[:5])
        if not found:
            some = "no element is, so the norm is too large for its dtype"
        where, first = f"{what}, of the rank that holds it", ""
        if not what:
            where = "before the reduction"
            first = (
                " The first named came first in that rank's backward; if its loss is not finite, look in the forward."
            )
        super().__init__(
            f"gradients are not finite {where}: {some}{' and more' if len(found) > 5 else ''}.{first} The state before "
            "the step is valid."
        )

    def __reduce__(self) -> Any:
        return NonfiniteError, (self.found, self.what)


@torch.no_grad()
def find_nonfinite(state: State, grads: Any = None, unit: str | None = None) -> tuple[State, list[Nonfinite]]:
    """Which gradients are inf or NaN: leaf, unit, and rank. Waits for the device: for debugging.

    Args:
        grads: what is going to be given to `reduce`, and `unit` as there: the rank is the one whose gradient is bad.
            None: the gradients that the state has, reduced; a bad one is bad wherever it went, so the rank is the one
            whose shard it is. In the third way: `T.forward_backward(..., find_nonfinite=True)`.

    Returns:
        the state, and the findings, the same list on every rank.

    Raises:
        ScheduleError: the state has no gradients, and none were given. TreeError: as `reduce`.

    Collective: a gather of the findings on the host, and without `grads` what `finish_reductions` issues.

    Example: `state, found = T.find_nonfinite(state)`.
    """
    if grads is not None:
        watch = NonfiniteWatch(state)
        for name, values in by_unit(state, "find_nonfinite", grads, unit).items():
            watch.look(name, values)
        return state, watch.found()
    state = finish_reductions(state)
    ranks = ranks_of(state)
    mine = []
    for buffer in state.grads.values():
        for leaf, _, local in leaf_shards(buffer):
            count = int(local.isfinite().logical_not().sum()) if local.numel() else 0
            if count:
                mine.append(Nonfinite(leaf.path, buffer.bucket.unit, ranks.rank, count))
    return state, [one for found in ranks.everyone(mine, "elements that are not finite") for one in found]


class NonfiniteWatch:
    """Gradients of this rank's backward, unit by unit: counts stay on the device until `found` asks for them."""

    def __init__(self, state: State) -> None:
        self.layout = state.layout
        self.ranks = ranks_of(state)
        self.counts: list[tuple[str, str, torch.Tensor]] = []  # unit, leaf, elements

    def look(self, unit: str, grads: Sequence[torch.Tensor | None]) -> None:
        """A unit's gradients, as `Unit.paths`, before they are reduced."""
        for path, grad in zip(self.layout.by_name[unit].paths, grads, strict=False):
            if grad is not None and grad.numel():
                self.counts.append((unit, path, grad.detach().isfinite().logical_not().sum()))

    def found(self) -> list[Nonfinite]:
        """What every rank has seen. Collective; waits for the device."""
        counts = [count for *_, count in self.counts]
        numbers = torch.stack([count.to(counts[0].device) for count in counts]).tolist() if counts else []
        rank = self.ranks.rank
        mine = [Nonfinite(leaf, unit, rank, n) for (unit, leaf, _), n in zip(self.counts, numbers, strict=True) if n]
        return [one for found in self.ranks.everyone(mine, "elements that are not finite") for one in found]
