"""Optax-style pairs as optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .._common.torch_names import pytree

__all__ = ["Updates", "from_updates"]


@dataclass(frozen=True)
class Updates:
    """An optax-style pair as an optimizer. A class, so that a State that has one can be pickled."""

    pair: Any

    def init(self, main: Any) -> Any:
        return self.pair.init(main)

    def update(self, grads: Any, opt: Any, main: Any, count: torch.Tensor) -> tuple[Any, Any]:
        updates, opt = self.pair.update(grads, opt, params=main)
        return pytree.tree_map(lambda p, u: p.add_(u), main, updates), opt


def from_updates(pair: Any) -> Updates:
    """Adapt an optax-style pair (TorchOpt's too): its `update(grads, opt, params=)` returns what is to be added.

    Args:
        pair: an object with `init(params) -> opt` and `update(grads, opt, params=) -> updates, opt`.

    What of its state `save` writes: moments that it makes by tree_map over the parameters are FlatBuffers, saved as the
    main weights are. Moments that it keeps as plain tensors (TorchOpt's ready-made optimizers do: lists of tensors) are
    saved only where all ranks hold the same, as with ddp or on one rank; else `save` raises TreeError, since one rank's
    would be given to all.
    """
    return Updates(pair)
