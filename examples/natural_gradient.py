"""The natural gradient (arXiv:1412.1193): the gradient, multiplied with the inverse of the Gauss-Newton matrix.

    gradients = natural_gradient.natural_gradient(model, outputs_of, loss_of, steps=20, damping=0.1)
    state, loss = gradients(state, batch)       in the place of forward_backward
    state = fsdp.step(state)

With the derivative J of the outputs by the weights, and the Hessian B of the loss by the outputs, the matrix is Jᵀ B J:
J v by `T.jvp`, B by torch.func on the outputs, Jᵀ by `T.pullback`, and the inverse by conjugate gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from conjugate_gradients import Vector, solve
from torch.func import grad, jvp

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

__all__ = ["natural_gradient"]

Gradients = Callable[[fsdp.State, Any], tuple[fsdp.State, torch.Tensor]]


def natural_gradient(model: Any, outputs_of: Any, loss_of: Any, steps: int, damping: float) -> Gradients:
    """`outputs_of(model, batch)`, and `loss_of(outputs, batch)`, convex in the outputs."""
    forward_backward = T.forward_backward(model, lambda model, batch: loss_of(outputs_of(model, batch), batch))
    along, pullback = T.jvp(model, outputs_of), T.pullback(model, outputs_of)

    def gradients(state: fsdp.State, batch: Any) -> tuple[fsdp.State, torch.Tensor]:
        def product(state: fsdp.State, v: Vector) -> tuple[fsdp.State, Vector]:
            state, (out, moved) = along(state, v, batch)
            bent = jvp(grad(partial(loss_of, batch=batch)), (out,), (moved,))[1]
            state, (_, gv) = pullback(state, bent, batch)
            return state, gv

        state, loss = forward_backward(state, batch)
        state = fsdp.finish_reductions(state)
        state, x = solve(state, product, dict(state.grads), steps, damping)
        return fsdp.replace_grads(state, x), loss

    return gradients
