"""MAML (arXiv:1703.03400): weights from which a few gradient steps lead to a good model of each task.

    meta_gradients = maml.meta_gradients(model, loss_fn, lr=0.1, steps=3)     once
    state, loss = meta_gradients(state, (support, query))                     of the outer loss, reduced
    state = fsdp.step(state)
    weights = maml.adapted(loss, weights, support, lr=0.1, steps=3)           the inner steps alone, for a new task

Support and query are batches as `loss_fn(model, batch)` takes them, tensors stacked by task. The inner steps are
torch.func on whole weights, so the outer gradient goes through them; all tasks of a rank go at once, by vmap. They move
frozen weights, too; the outer step does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn

import functional_fsdp as fsdp

__all__ = ["adapted", "meta_gradients"]

Weights = dict[str, torch.Tensor]
Loss = Callable[[Weights, Any], torch.Tensor]


def adapted(loss: Loss, weights: Weights, support: Any, lr: float, steps: int, first_order: bool = False) -> Weights:
    """The weights after some steps of gradient descent. `first_order`: as if the gradients were constants."""
    for _ in range(steps):
        grads = torch.func.grad(loss)(weights, support)
        weights = {k: w - lr * (grads[k].detach() if first_order else grads[k]) for k, w in weights.items()}
    return weights


def meta_gradients(
    model: nn.Module, loss_fn: Callable[..., torch.Tensor], lr: float, steps: int, first_order: bool = False
) -> Callable[[fsdp.State, Any], tuple[fsdp.State, torch.Tensor]]:
    """A function that adds the gradients of the mean of all tasks' losses, each after its inner steps."""

    def loss(weights: Weights, batch: Any) -> torch.Tensor:
        return loss_fn(fsdp.bind(model, weights), batch)

    def of_task(weights: Weights, support: Any, query: Any) -> torch.Tensor:
        return loss(adapted(loss, weights, support, lr, steps, first_order), query)

    def outer(weights: Weights, support: Any, query: Any) -> torch.Tensor:
        return torch.func.vmap(partial(of_task, weights), randomness="different")(support, query).mean()

    def of_batch(state: fsdp.State, batch: Any) -> tuple[fsdp.State, torch.Tensor]:
        state, weights = fsdp.unshard(state)
        grads, value = torch.func.grad_and_value(outer)(weights, *batch)
        return fsdp.reduce(state, grads), value

    return of_batch
