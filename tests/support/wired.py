"""A small net of blocks, its loss and its batches, for tests of gradients that travel packed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, d)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() - x.float().sin()).square().mean()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank))
