"""Loops by hand over states with packed weights: whole trees and unit by unit, for scenarios."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from support.by_hand import passes_by_hand

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

Loop = Callable[[Any, fsdp.State, Any, bool], tuple[fsdp.State, torch.Tensor]]


def of_whole_trees(loss_fn: Callable[..., torch.Tensor], by: str, packed: Callable[[str], bool]) -> Loop:
    """Gradients of what trains, by torch.func, T.vjp or autograd. packed: whether a leaf is."""

    def loop(model: Any, state: fsdp.State, data: Any, last: bool) -> tuple[fsdp.State, torch.Tensor]:
        state, params = fsdp.unshard(state)
        assert all((type(w) is fsdp.PackedWeight) is packed(path) for path, w in params.items())
        paths = [leaf.path for bucket in state.layout.trainable.values() for leaf in bucket.leaves]
        trained = {path: params[path] for path in paths}

        def of(trained: Any) -> torch.Tensor:
            return loss_fn(fsdp.bind(model, {**params, **trained}), data)

        if by == "torch.func":
            grads, loss = torch.func.grad_and_value(of)(trained)
        elif by == "T.vjp":
            loss, pullback = T.vjp(of, trained)
            (grads,) = pullback(trained, torch.ones_like(loss))
        else:
            trained = {path: w.detach().requires_grad_() for path, w in trained.items()}
            loss = of(trained)
            grads = dict(zip(trained, torch.autograd.grad(loss, [*trained.values()]), strict=True))
        assert all(type(g) is torch.Tensor and g.dtype is params[path].dtype for path, g in grads.items())
        return fsdp.reduce(state, {**dict.fromkeys(params), **grads}, last_microbatch=last), loss.detach()

    return loop


def unit_by_unit(stage: Callable[..., Any]) -> Loop:
    """stage(model, data, unit) -> (weights, h) -> h. The first one is given the data."""

    def loop(model: Any, state: fsdp.State, data: Any, last: bool) -> tuple[fsdp.State, torch.Tensor]:
        h = data if data.is_floating_point() else torch.zeros((), dtype=torch.float64)
        return passes_by_hand(state, partial(stage, model, data), h)

    return loop
