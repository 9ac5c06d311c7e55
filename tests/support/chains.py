"""The plainest models and losses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn


class Chain(nn.Module):
    """Blocks in turn, each added to what it is given; and a module before them, if there is one."""

    def __init__(self, inp: nn.Module | None, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        if inp is not None:
            self.inp = inp
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "inp"):
            x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def mean_square(model: Any, x: Any) -> torch.Tensor:
    found: torch.Tensor = model(x).square().mean()
    return found
