"""Clipping: the exact norm of the gradients over all shards, and gradients cut down to a norm or a value."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from functional_fsdp import FlatBuffer, SpecError, State, finish_reductions
from functional_fsdp.extend import change, shards, torch_private, total

__all__ = ["clip_by_global_norm", "clip_by_value", "global_norm"]


@torch.no_grad()
def global_norm(state: State) -> tuple[State, torch.Tensor]:
    """The Euclidean norm of all gradients, a tensor [] (float32, or float64 if they are): shards -> one number.

    Each element is counted once, however it is sharded or replicated; tied leaves are one. It does not wait for the
    device.

    Raises:
        ScheduleError: the state has no gradients.

    Collective: what `finish_reductions` issues; one all-reduce of a few numbers for each axis that shards gradients.

    Example: `state, norm = T.global_norm(state)`.
    """
    state = finish_reductions(state)
    widest = torch.float32
    for buffer in state.grads.values():
        widest = torch.promote_types(widest, buffer.local.dtype)
    squares = {}
    for axes, buffers in shards(state).items():
        sums = []
        for some in _by_dtype(buffers).values():
            norms = torch_private.foreach_norm(some, 2, dtype=widest)
            sums.append(torch.stack(list(norms)).square().sum())
        if len(sums) != 1:
            sums = [torch.stack([torch.zeros((), dtype=widest, device=state.count.device), *sums]).sum()]
        squares[axes] = sums[0]
    return state, total(state, squares).sqrt()


@torch.no_grad()
def clip_by_global_norm(state: State, max_norm: float | torch.Tensor) -> tuple[State, torch.Tensor]:
    """Scale all gradients by min(1, max_norm / norm). Returns the norm before: `state, norm`, as a tensor [].

    The rule is torch.nn.utils.clip_grad_norm_'s (with its 1e-6 beside the norm), over all shards. The gradients are
    changed in place; use the returned state.

    Raises:
        SpecError: a negative `max_norm` (a tensor is not looked at). ScheduleError: the state has no gradients.

    Collective: as `global_norm`.

    Example: `state, norm = T.clip_by_global_norm(state, 1.0)`.
    """
    if not isinstance(max_norm, torch.Tensor) and not max_norm >= 0:
        raise SpecError(f"clip_by_global_norm({max_norm!r}): expected a norm of at least 0.")
    state, norm = global_norm(state)

    def scale() -> None:
        by = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for buffers in shards(state).values():
            for dtype, some in _by_dtype(buffers).items():
                torch_private.foreach_mul_(some, by.to(torch.promote_types(torch.float32, dtype)))

    return change(state, "clip_by_global_norm()", scale, max_norm), norm


@torch.no_grad()
def clip_by_value(state: State, max_value: float) -> State:
    """Clamp each element of the gradients to [-max_value, max_value], in place; use the returned state.

    Raises:
        SpecError: a negative `max_value`. ScheduleError: the state has no gradients.

    Collective: what `finish_reductions` issues.

    Example: `state = T.clip_by_value(state, 0.5)`.
    """
    if not max_value >= 0:
        raise SpecError(f"clip_by_value({max_value!r}): expected a value of at least 0.")
    state = finish_reductions(state)

    def clamp() -> None:
        for buffers in shards(state).values():
            for some in _by_dtype(buffers).values():
                torch_private.foreach_clamp_min_(some, -max_value)
                torch_private.foreach_clamp_max_(some, max_value)

    return change(state, "clip_by_value()", clamp, max_value)


def _by_dtype(buffers: Iterable[FlatBuffer]) -> dict[torch.dtype, list[torch.Tensor]]:
    """Local tensors apart by dtype, as one call for many takes them; empty ones left out."""
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in buffers:
        if buffer.local.numel():
            found.setdefault(buffer.local.dtype, []).append(buffer.local)
    return found
