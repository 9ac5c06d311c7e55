"""Sharpness-aware minimization (arXiv:2010.01412): the step from here, with the gradient from up the slope.

    forward_backward = sam.sharpness_aware(T.forward_backward(model, loss_fn), rho=0.05)
    state, loss = forward_backward(state, batch)
    state = fsdp.step(state)

The weights go a way of length `rho` along the gradient, over all shards. That is another state, without an optimizer;
the one that is trained stays where it is, and gets the gradients of the other. Both passes have the same dropout masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import functional_fsdp as fsdp
from functional_fsdp import State
from functional_fsdp import transforms as T

__all__ = ["sharpness_aware"]


def sharpness_aware(
    forward_backward: Callable[..., tuple[State, Any]], rho: float = 0.05
) -> Callable[..., tuple[State, Any]]:
    """The same function with the gradients of the weights up the slope; the loss is that of the weights themselves.

    It takes a whole batch: `sharpness_aware(T.accumulate(forward_backward, 4))` has microbatches. Eager.
    """

    def twice(state: State, *args: Any, **kwargs: Any) -> tuple[State, Any]:
        state, out = forward_backward(state, *args, **kwargs)
        state, norm = T.global_norm(state)
        up = {name: _along(buffer, state.grads.get(name), rho / (norm + 1e-12)) for name, buffer in state.main.items()}
        there, _ = forward_backward(fsdp.replace_params(state, up, optimizer=False), *args, **kwargs)
        return fsdp.replace_grads(state, fsdp.finish_reductions(there)), out

    return twice


def _along(weights: fsdp.FlatBuffer, grads: fsdp.FlatBuffer | None, far: torch.Tensor) -> fsdp.FlatBuffer:
    """Frozen weights have no gradients, and stay."""
    return weights if grads is None else weights.but(weights.local + (far * grads.local).to(weights.local.dtype))
