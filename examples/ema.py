"""An exponential moving average of the weights: a pytree like the main weights, carried in the state's extras.

    state = ema.with_ema(state)                  once, after init or shard
    state = ema.update(fsdp.step(state))         in the train step
    state_of_average = ema.averaged(state)       to evaluate with the average, or to export it

It is sharded as the main weights are, and is saved and loaded with the state.
"""

from __future__ import annotations

import torch
import torch.utils._pytree as pytree

import functional_fsdp as fsdp
from functional_fsdp import State

__all__ = ["averaged", "update", "with_ema"]


def with_ema(state: State) -> State:
    """The average begins at the weights as they are, in float32 at least: a weight of bfloat16 would never move."""
    return fsdp.replace_extras(state, ema=pytree.tree_map(lambda w: w.to(wide(w.dtype), copy=True), state.main))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Integers and bytes of packed leaves stay what they are."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def update(state: State, decay: float = 0.999) -> State:
    """The average goes a little towards the weights, after a step."""

    def nearer(e: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.lerp(w.to(e.dtype), e, decay) if e.is_floating_point() else w.clone()

    return fsdp.replace_extras(state, ema=pytree.tree_map(nearer, state.extras["ema"], state.main))


def averaged(state: State) -> State:
    """A state with the average as its weights, to evaluate and to export: without an optimizer. The one that is trained
    stays. Every rank must call it."""
    average = pytree.tree_map(lambda e, w: e.to(w.dtype), state.extras["ema"], state.main)
    return fsdp.replace_params(state, average, optimizer=False)
