"""Influence functions (arXiv:1703.04730): how the loss of a test batch changes with each sample that was trained on.

    scores_of = influence.influence(model, losses_of, steps=20, damping=0.1)
    state, scores = scores_of(state, train, test)       [B], of this rank's samples

With the Hessian H of the training loss and the gradient g of the test loss, x = (H + damping)⁻¹ g by `T.hvp` and
conjugate gradients. A sample's score is -gₛ·x for its own gradient gₛ: one `T.jvp` along x has those of all samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from conjugate_gradients import Vector, solve

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

__all__ = ["influence"]

Scores = Callable[[fsdp.State, Any, Any], tuple[fsdp.State, torch.Tensor]]


def influence(model: Any, losses_of: Callable[..., torch.Tensor], steps: int, damping: float) -> Scores:
    """`losses_of(model, batch)` [B]."""
    mean = lambda model, batch: losses_of(model, batch).mean()  # noqa: E731
    gradient, hessian, along = T.pullback(model, mean), T.hvp(model, mean), T.jvp(model, losses_of)

    def scores(state: fsdp.State, train: Any, test: Any) -> tuple[fsdp.State, torch.Tensor]:
        def product(state: fsdp.State, v: Vector) -> tuple[fsdp.State, Vector]:
            state, (_, hv) = hessian(state, v, train)
            return state, hv

        state, (_, slope) = gradient(state, 1.0, test)
        state, x = solve(state, product, slope, steps, damping)
        state, (_, slopes) = along(state, x, train)
        return state, -slopes

    return scores
