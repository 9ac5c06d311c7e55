"""Passes by hand, unit by unit, of a model that is given in stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import functional_fsdp as fsdp
from functional_fsdp import transforms as T


def passes_by_hand(
    state: fsdp.State,
    stage: Callable[[str], Callable[..., torch.Tensor]],
    h: torch.Tensor,
    look: Callable[[dict[str, Any]], None] = lambda grads: None,
) -> tuple[fsdp.State, torch.Tensor]:
    """The state with gradients, and the loss. stage(unit)(weights, h) -> h, of the last unit the loss. look: at the
    gradients of each unit."""
    pullbacks = {}
    for unit in state.units:
        state, w = fsdp.unshard(state, unit)
        h, pullbacks[unit] = T.vjp(stage(unit), w, h)
        state = fsdp.release(state, unit)
    dh = torch.ones_like(h)
    for unit in reversed(state.units):
        state, w = fsdp.unshard(state, unit)
        dw, dh = pullbacks.pop(unit)(w, dh)
        look(dw)
        state = fsdp.reduce(state, dw, unit)
        state = fsdp.release(state, unit)
    return state, h


def step_by_hand(
    state: fsdp.State,
    stage: Callable[[str], Callable[..., torch.Tensor]],
    h: torch.Tensor,
    look: Callable[[dict[str, Any]], None] = lambda grads: None,
) -> tuple[fsdp.State, torch.Tensor]:
    """The state after a step."""
    state, loss = passes_by_hand(state, stage, h, look)
    return fsdp.step(state), loss
