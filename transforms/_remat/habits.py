"""Habits: what is known of a module or a function that recomputes, from its first calls in each mode."""

from __future__ import annotations

from typing import Any

import torch.nn as nn

from .draws import generators_in
from .parts import Owner

__all__ = ["Habits"]


class Habits:
    """Of a module, or a function.

    Attributes:
        owner: of its host buffers.
        keeps: the share of what it keeps, of what it would if it did not recompute, where that is known.
        python: by whether it trains, whether it draws random numbers from Python or numpy.
    """

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.keeps = 0.0
        self.python: dict[bool, bool] = {}
        self.holders: dict[bool, list[tuple[nn.Module, str]]] = {}  # attributes that hold generators

    def generators(self, module: nn.Module) -> list[Any]:
        """Those that a module holds, or its parts do."""
        if module.training not in self.holders:
            self.holders[module.training] = [
                (part, name) for part in module.modules() for name, value in vars(part).items()
                if any(generators_in(value))
            ]  # fmt: skip
        held = (vars(part).get(name) for part, name in self.holders[module.training])
        return [generator for value in held for generator in generators_in(value)]
