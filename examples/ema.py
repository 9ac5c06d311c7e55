"""An exponential moving average of the weights: a pytree like the main weights, carried in the state's extras.

    state = ema.with_ema(state)                  once, after init or shard
    state = ema.update(fsdp.step(state))         in the train step
    fsdp.full_params(ema.averaged(state))        to export the average

It is sharded as the main weights are, and is saved and loaded with the state.
"""

from __future__ import annotations

import torch
import torch.utils._pytree as pytree

from functional_fsdp import State

__all__ = ["averaged", "update", "with_ema"]


def with_ema(state: State) -> State:
    """The average begins at the weights as they are."""
    return state._evolve(extras={**dict(state.extras), "ema": pytree.tree_map(torch.clone, state.main)})


def update(state: State, decay: float = 0.999) -> State:
    """The average goes a little towards the weights, after a step."""
    ema = pytree.tree_map(lambda e, w: torch.lerp(w, e, decay), state.extras["ema"], state.main)
    return state._evolve(extras={**state.extras, "ema": ema})


def averaged(state: State) -> State:
    """The state with the average in the place of the main weights, for `full_params` and `state_dict`."""
    return state._evolve(main=state.extras["ema"])
