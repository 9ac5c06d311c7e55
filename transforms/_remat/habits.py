"""Habits: what is known of a module or a function that recomputes, from its first calls in each mode."""

from __future__ import annotations

import torch
import torch.nn as nn

from .parts import Owner

__all__ = ["Habits"]


class Habits:
    """Of a module, or a function.

    Attributes:
        owner: of its host buffers.
        python: by whether it trains, whether it draws random numbers from Python or numpy.
    """

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.python: dict[bool, bool] = {}
        self.holders: dict[bool, list[tuple[nn.Module, str]]] = {}  # attributes that hold generators

    def generators(self, module: nn.Module) -> list[torch.Generator]:
        """Those that a module holds, or its parts do."""
        if module.training not in self.holders:
            self.holders[module.training] = [
                (part, name) for part in module.modules() for name, value in vars(part).items()
                if isinstance(value, torch.Generator)
            ]  # fmt: skip
        held = (vars(part).get(name) for part, name in self.holders[module.training])
        return [value for value in held if isinstance(value, torch.Generator)]
