"""Wrapped modules: those that another library has taken over, and that have to be given without it.

class of a part             from                        what it has done
FSDPModule                  fully_shard                 parameters are DTensors, sharded already, with hooks
FullyShardedDataParallel    FSDP                        parameters are views of a flat one
DistributedDataParallel     DDP                         averages gradients by itself
DDP                         replicate                   the same
AbstractGradSampleModule    opacus                      counts on attributes of parameters, which no state keeps
"""

from __future__ import annotations

import torch.nn as nn

from .._common.errors import TreeError

__all__ = ["refuse_wrapped"]

INSIDE = "Give the module that it was made from."
TAKEN: dict[tuple[str, str], tuple[str, str]] = {  # (package, class): by what a part was taken over, and what to do
    ("torch", "FSDPModule"): (
        "torch's fully_shard, which has sharded its parameters",
        "Leave fully_shard out: the spec says how to shard. Weights of such a model come from its state dict, or from "
        "its checkpoint.",
    ),
    ("torch", "FullyShardedDataParallel"): ("torch's FSDP, which has flattened its parameters", INSIDE),
    ("torch", "DistributedDataParallel"): ("torch's DDP, which averages gradients by itself", INSIDE),
    ("torch", "DDP"): (
        "torch's replicate, which averages gradients by itself",
        "Leave replicate out: fsdp.ddp() is a placement of the spec.",
    ),
    ("opacus", "AbstractGradSampleModule"): (
        "opacus, which keeps gradients of samples at the parameters",
        f"{INSIDE} What opacus does is T.clipped_gradients here, and T.per_sample_norms.",
    ),
}


def refuse_wrapped(path: str, part: nn.Module) -> None:
    """Raise the TreeError for a part, at this path, that a library has taken over."""
    for cls in type(part).__mro__:
        if taken := TAKEN.get((cls.__module__.partition(".")[0], cls.__name__)):
            where = f"the module {path!r}" if path else "the model"
            raise TreeError(f"{where}, a {type(part).__name__}, was taken over by {taken[0]}. {taken[1]}")
