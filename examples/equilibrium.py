"""A deep equilibrium model (arXiv:1909.01377): z = cell(z, x), differentiated where it holds, not step by step.

    forward_backward = T.forward_backward(model, equilibrium.loss_fn(steps=30))

With the cell f and the loss L at the fixed point z, by the implicit function theorem

    dL/dw = ∂L/∂w + uᵀ ∂f/∂w,      u = ∂L/∂z + (∂f/∂z)ᵀ u

Both fixed points are found by iteration: z by calls of the cell, u by one pullback through it, called as often.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import grad, vjp

__all__ = ["loss_fn"]


def loss_fn(steps: int) -> Callable[[Any, Any], torch.Tensor]:
    """Of a `model` with `model.cell(z, x)` and `model.head(z)`, and of a batch: inputs [B, D] and targets [B, K]."""

    def of(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch

        def loss_at(z: torch.Tensor) -> torch.Tensor:
            return (model.head(z) - y).square().mean()

        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(steps):
                z = model.cell(z, x)
            slope = u = grad(loss_at)(z)
            _, pull = vjp(lambda z: model.cell(z, x), z)  # type: ignore[misc]
            for _ in range(steps):
                u = slope + pull(u)[0]
        through = (u * model.cell(z, x)).sum()  # its gradient by weights is uᵀ ∂f/∂w
        return loss_at(z) + through - through.detach()

    return of
