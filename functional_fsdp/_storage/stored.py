"""Stored: the flat buffers of a State, which are all that gathers and reductions read of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .flat import FlatBuffer

__all__ = ["Stored"]


@dataclass(frozen=True, eq=False, repr=False)
class Stored:
    """Weights and gradients by bucket. `State` adds all else that training owns, and says what each is."""

    main: dict[str, FlatBuffer]
    weights: dict[str, FlatBuffer]
    scales: dict[str, torch.Tensor]
    grads: dict[str, FlatBuffer]
