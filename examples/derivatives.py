"""Losses with derivatives of the model by its inputs, for `T.forward_backward(model, loss_fn)`: plain torch.func.

    physics        PINN: the residual of Poisson's equation, Laplacian(model) + source = 0 (arXiv:1711.10561)
    mean_flow      MeanFlow: an average velocity, whose target is a jvp (arXiv:2505.13447)
    critic         WGAN-GP: the critic's gradient has norm 1 between real and made samples (arXiv:1704.00028)
    score          sliced score matching: the divergence of the score, along directions, by jvp (arXiv:1905.07088)

Each unit is gathered as its call, or an inner backward through it, comes; never all at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import grad, hessian, jvp, vmap

__all__ = ["critic", "mean_flow", "physics", "score"]

Model = Callable[..., torch.Tensor]
Batch = tuple[torch.Tensor, ...]


def physics(model: Model, batch: Batch) -> torch.Tensor:
    """Points [B, D], and the source there [B]."""
    points, source = batch

    def laplacian(x: torch.Tensor) -> torch.Tensor:
        return hessian(lambda x: model(x).sum())(x).diagonal().sum()

    return (vmap(laplacian)(points) + source).square().mean()


def mean_flow(model: Any, batch: Batch) -> torch.Tensor:
    """`model(z, r, t)` of data [B, D], noise [B, D] and times r <= t [B, 1]."""
    data, noise, r, t = batch
    z, velocity = (1 - t) * data + t * noise, noise - data
    moves = velocity, torch.zeros_like(r), torch.ones_like(t)
    mean, along = jvp(model, (z, r, t), moves)  # type: ignore[misc]
    return (mean - (velocity - (t - r) * along).detach()).square().mean()


def critic(model: Model, batch: Batch) -> torch.Tensor:
    """Real samples [B, D], made ones [B, D] and where between them to look [B, 1]."""
    real, made, where = batch
    slope = grad(lambda x: model(x).sum())(where * real + (1 - where) * made)
    return model(made).mean() - model(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def score(model: Any, batch: Batch) -> torch.Tensor:
    """Samples [B, D], and directions [B, D] of mean 0 and variance 1. In the model no layer_norm or training batch_norm
    of torch 2.13, whose gradient of a jvp is wrong: see findings/layer-norm-after-jvp.sh."""
    x, directions = batch
    at, along = jvp(model, (x,), (directions,))  # type: ignore[misc]
    return ((directions * along).sum(1) + 0.5 * at.square().sum(1)).mean()
