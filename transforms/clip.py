"""Clipping: the exact norm of the gradients over all shards, and gradients cut down to a norm or a value."""

from __future__ import annotations

import torch

from functional_fsdp import SpecError, State, finish
from functional_fsdp._verbs import changed, changing

from ._gradients import shards, total

__all__ = ["clip_by_global_norm", "clip_by_value", "global_norm"]


@torch.no_grad()
def global_norm(state: State) -> tuple[State, torch.Tensor]:
    """The Euclidean norm of all gradients, a tensor [] (float32, or float64 if they are): shards -> one number.

    Each element is counted once, however it is sharded or replicated; tied leaves are one. It does not wait for the
    device.

    Raises:
        ScheduleError: the state has no gradients.

    Collective: what `finish` issues; one all-reduce of a few numbers for each axis that shards gradients.

    Example: `state, norm = T.global_norm(state)`.
    """
    state = finish(state)
    squares = {}
    for axes, tensors in shards(state).items():
        wide = torch.float64 if tensors[0].dtype is torch.float64 else torch.float32
        filled = [t for t in tensors if t.numel()]
        norms = (
            torch._foreach_norm(filled, 2, dtype=wide)
            if filled
            else [torch.zeros((), dtype=wide, device=state.count.device)]
        )
        squares[axes] = torch.stack(list(norms)).square().sum()
    widest = torch.float64 if any(s.dtype is torch.float64 for s in squares.values()) else torch.float32
    return state, total(state, {axes: s.to(widest) for axes, s in squares.items()}).sqrt()


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
    changing(state, "clip_by_global_norm()")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for tensors in shards(state).values():
        torch._foreach_mul_(tensors, scale)
    return changed(state, "clip_by_global_norm()"), norm


@torch.no_grad()
def clip_by_value(state: State, max_value: float) -> State:
    """Clamp each element of the gradients to [-max_value, max_value], in place; use the returned state.

    Raises:
        SpecError: a negative `max_value`. ScheduleError: the state has no gradients.

    Collective: what `finish` issues.

    Example: `state = T.clip_by_value(state, 0.5)`.
    """
    if not max_value >= 0:
        raise SpecError(f"clip_by_value({max_value!r}): expected a value of at least 0.")
    state = finish(state)
    changing(state, "clip_by_value()")
    for tensors in shards(state).values():
        torch._foreach_clamp_min_(tensors, -max_value)
        torch._foreach_clamp_max_(tensors, max_value)
    return changed(state, "clip_by_value()")
