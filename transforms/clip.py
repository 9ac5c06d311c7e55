"""Clipping: gradients cut down to a norm, exact over all shards, or to a value."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any, NoReturn

import torch

from functional_fsdp import FlatBuffer, State, finish_reductions, pmax
from functional_fsdp._seams import torch_private
from functional_fsdp.extend import change, refuse, shards, traced_as

from .nonfinite import NonfiniteError, find_nonfinite
from .norms import global_norm

__all__ = ["clip_by_global_norm", "clip_by_value"]


@torch.no_grad()
def clip_by_global_norm(
    state: State, max_norm: float | torch.Tensor, ord: float = 2, *, error_if_nonfinite: bool = False
) -> tuple[State, torch.Tensor]:
    """Scale all gradients by min(1, max_norm / norm). Returns the norm before: `state, norm`, as a tensor [].

    The rule is torch.nn.utils.clip_grad_norm_'s (with its 1e-6 beside the norm), over all shards. The gradients are
    changed in place; use the returned state.

    Args:
        ord: 2, 1 or inf, as for `global_norm`.
        error_if_nonfinite: raise `NonfiniteError` on every rank, naming leaves, if the norm is inf or NaN; nothing is
            scaled then, and the state before the step is as good as before. The host reads the norm: it waits for the
            device, at each call. `T.skip_nonfinite` decides on the device.

    Raises:
        SpecError: a `max_norm` that is no number of at least 0 (the value of a tensor [] is not looked at); another
        `ord`. ScheduleError: the state has no gradients; `error_if_nonfinite` in a compiled step. NonfiniteError: see
        there.

    Collective: as `global_norm`.

    Example: `state, norm = T.clip_by_global_norm(state, 1.0)`.
    """
    _limit("clip_by_global_norm", "a norm", max_norm)
    state, norm = global_norm(state, ord)
    if error_if_nonfinite:
        state = _finite(state, norm)

    def scale() -> None:
        by = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for buffers in shards(state).values():
            for dtype, some in _by_dtype(buffers).items():
                torch_private.foreach_mul_(some, by.to(torch.promote_types(torch.float32, dtype)))

    return change(state, "clip_by_global_norm()", scale, max_norm, keeps_zeros=True), norm


def _limit(verb: str, what: str, given: Any) -> None:
    good = not given.dim() if isinstance(given, torch.Tensor) else isinstance(given, Real) and float(given) >= 0
    if not good:
        refuse("SpecError", f"{verb}({given!r}): expected {what} of at least 0.")


def _waits(state: State, norm: torch.Tensor) -> NoReturn:
    refuse(
        "ScheduleError",
        "clip_by_global_norm(error_if_nonfinite=True) reads the norm on the host, which a compiled step cannot. Leave "
        "it out; T.skip_nonfinite(fsdp.step) decides on the device.",
    )


@traced_as(_waits)
def _finite(state: State, norm: torch.Tensor) -> State:
    """Raise NonfiniteError on every rank if this norm of the gradients is inf or NaN on any of them."""
    if alone := [axis for axis in state.spec.axes if axis not in state.spec.data]:  # norms of their own
        state, norm = pmax(state, norm, alone)
    if not norm.isfinite():
        state, found = find_nonfinite(state)
        raise NonfiniteError(found, f"(clip_by_global_norm: their norm is {norm.item()})")
    return state


@torch.no_grad()
def clip_by_value(state: State, max_value: float) -> State:
    """Clamp each element of the gradients to [-max_value, max_value], in place; use the returned state.

    Raises:
        SpecError: a `max_value` that is no number of at least 0. ScheduleError: the state has no gradients.

    Collective: what `finish_reductions` issues.

    Example: `state = T.clip_by_value(state, 0.5)`.
    """
    _limit("clip_by_value", "a value", max_value)
    state = finish_reductions(state)

    def clamp() -> None:
        for buffers in shards(state).values():
            for some in _by_dtype(buffers).values():
                torch_private.foreach_clamp_min_(some, -max_value)
                torch_private.foreach_clamp_max_(some, max_value)

    return change(state, "clip_by_value()", clamp, max_value, keeps_zeros=True)


def _by_dtype(buffers: Iterable[FlatBuffer]) -> dict[torch.dtype, list[torch.Tensor]]:
    """Local tensors apart by dtype, as one call for many takes them; empty ones left out."""
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in buffers:
        if buffer.local.numel():
            found.setdefault(buffer.local.dtype, []).append(buffer.local)
    return found
