"""measure_compute: seconds of each use of a model's units on this device, measured once and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from .._common.device import best_device, device_name
from .._common.torch_names import pytree
from .._spec.spec import Spec
from .prediction import above, prepared

__all__ = ["measure_compute"]

_KEPT: dict[Any, tuple[float, ...]] = {}


def measure_compute(
    model: nn.Module, loss_fn: Callable[..., Any], batch: Any, spec: Spec, *, rounds: int = 3
) -> tuple[float, ...]:
    """Measure what each use of a unit computes, on this process's GPU, or on the CPU: for `fsdp.predict(compute=)`.

    Args:
        model, loss_fn, spec: as for `fsdp.predict`; the mesh is of no account. Weights are not used: units compute with
            random ones, those that are alike with the same.
        batch: a rank's, with values (tokens are looked up).
        rounds: passes that are measured, after two that are not; of each use the median counts.

    Returns:
        seconds of each use, forward and then backward. They are of eager kernels, each use begun on an idle device: of
        units so small that the host is the slower one, they are the host's. What was measured once in this process is
        given again for the same shapes.

    Memory: one unit of each kind, and what the whole model keeps for its backward.

    Collective: none.

    Raises:
        ScheduleError: nothing to differentiate.

    Example: `seconds = fsdp.measure_compute(model, loss_fn, batch, spec)`; `fsdp.predict(model, loss_fn, batch, spec,
    compute=seconds)`.
    """
    device = best_device()
    args = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), batch if isinstance(batch, tuple) else (batch,))
    forward_backward, state, args = prepared(model, loss_fn, args, spec, None)
    shapes = [(tuple(t.shape), t.dtype) for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
    key = device_name(), state.layout.hash, repr(model), str(shapes), rounds
    if key not in _KEPT:
        _KEPT[key] = above("_drive.clocked").clocked(forward_backward, state, args, {}, rounds)
    return _KEPT[key]
