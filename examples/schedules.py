"""Learning rates as functions of the count of steps, a tensor: nothing waits for the device, and a graph can have them.

    fsdp.adamw(lr=schedules.WarmupCosine(peak=3e-4, warmup=100, total=10_000))
    fsdp.adamw(lr=schedules.WarmupStableDecay(peak=3e-4, warmup=100, total=10_000, decay=2_000))

The count is 0 in the first step, which takes `peak / warmup`; the step number `warmup` takes the peak. They are values:
they compare by their numbers, print, and are pickled with a State. A schedule of your own may as well be a function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["WarmupCosine", "WarmupStableDecay"]


@dataclass(frozen=True)
class WarmupCosine:
    """Up in a line, and down to `floor` by half a cosine (arXiv:1608.03983), where it stays from step `total` on."""

    peak: float
    warmup: int
    total: int
    floor: float = 0.0

    def __call__(self, count: torch.Tensor) -> torch.Tensor:
        done = _ramp(count - self.warmup, self.total - self.warmup)
        down = self.floor + (self.peak - self.floor) * (1 + torch.cos(math.pi * done)) / 2
        return torch.where(count < self.warmup, self.peak * _ramp(count + 1, self.warmup), down)


@dataclass(frozen=True)
class WarmupStableDecay:
    """Up in a line, level, and down to `floor` in the last `decay` steps (arXiv:2404.06395): in a line, or by
    1 - sqrt (arXiv:2405.18392). A run goes on from any step of the level part."""

    peak: float
    warmup: int
    total: int
    decay: int
    floor: float = 0.0
    sqrt: bool = False

    def __call__(self, count: torch.Tensor) -> torch.Tensor:
        done = _ramp(count - (self.total - self.decay), self.decay)
        down = self.peak - (self.peak - self.floor) * (done.sqrt() if self.sqrt else done)
        return torch.where(count < self.warmup, self.peak * _ramp(count + 1, self.warmup), down)


def _ramp(count: torch.Tensor, steps: int) -> torch.Tensor:
    """From 0 to 1 in so many steps."""
    return (count / max(steps, 1)).clamp(0, 1)
