"""The gradient noise scale (arXiv:1812.06162): how many examples a batch may have before more help little.

    state = noise_scale.begin(state)                                                          once
    forward_backward = T.forward_backward(model, loss_fn, reduce=noise_scale.reduce)          or call it by yourself
    state, loss = forward_backward(state, batch)
    state, scale = noise_scale.measured(state, examples=len(batch))                           before clipping
    state = fsdp.step(state)

It compares the gradients of small batches, each rank's, with their mean over all ranks. Both are there anyway, so it
costs one norm of each and two all-reduces of a number. The averages are in the state's extras, and saved with it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

import functional_fsdp as fsdp
from functional_fsdp import State, extend
from functional_fsdp import transforms as T

__all__ = ["begin", "measured", "reduce"]


def begin(state: State) -> State:
    zeros = {name: torch.zeros((), device=state.count.device) for name in ("squares", "signal", "noise")}
    return fsdp.replace_extras(state, noise_scale=zeros)


@torch.no_grad()
def reduce(state: State, grads: Any, unit: str | None = None, *, last_microbatch: bool = True) -> State:
    """`fsdp.reduce`, which notes the squared norm of this rank's gradients."""
    kept = state.extras["noise_scale"]
    found = extend.by_unit(state, "noise_scale.reduce", grads, unit).values()
    values = [g.float() if g.dtype.itemsize < 4 else g for some in found for g in some if g is not None]
    squares = torch.stack([kept["squares"], *(torch.linalg.vector_norm(g).square().float() for g in values)]).sum()
    state = fsdp.replace_extras(state, noise_scale={**kept, "squares": squares})
    return fsdp.reduce(state, grads, unit, last_microbatch=last_microbatch)


@torch.no_grad()
def measured(state: State, examples: int, microbatches: int = 1, decay: float = 0.99) -> tuple[State, torch.Tensor]:
    """The noise scale, a tensor [], from running means with this decay. The state's gradients are the mean of all.

    examples: in each microbatch of a rank. microbatches: how many, by `T.accumulate` say; ranks times these are 2 or
    more. It may be negative or inf in the first steps.
    """
    kept, parts = state.extras["noise_scale"], microbatches * math.prod(state.spec.axes[a] for a in state.spec.data)
    state, norm = T.global_norm(state)
    state, small = fsdp.pmean(state, kept["squares"] * microbatches)  # each was divided by their number
    large = norm.square().float()
    signal = kept["signal"].lerp((parts * large - small) / (parts - 1), 1 - decay)
    noise = kept["noise"].lerp(examples * (small - large) * parts / (parts - 1), 1 - decay)
    kept = {"squares": torch.zeros_like(small), "signal": signal, "noise": noise}
    return fsdp.replace_extras(state, noise_scale=kept), noise / signal
