"""Steps on GPUs beside the plain module's, compared where they ran: a parent that has run a backward cannot fork."""

from __future__ import annotations

from typing import Any

import torch
from support.problems import reference, sharded
from support.traced import STEPS, trained


def gradients_differ(ranks: int, preset: str, loop: str, transport: Any) -> dict[torch.dtype, float]:
    """The largest difference of any gradient, beside 1 + its size, in three steps of two microbatches."""
    found = {}
    for dtype in (torch.float64, torch.float32):
        seen = sharded(preset, loop, 3, 2, dtype, transport=transport)
        found[dtype] = max(
            float(((mine[path] - grad).abs() / (1 + grad.abs())).max())
            for (_, mine, _), (_, grads, _) in zip(seen, reference(ranks, 3, 2, dtype), strict=True)
            for path, grad in grads.items()
            if grad.numel()
        )
    return found


def weights_differ(ranks: int, preset: str, loop: str, way: str) -> tuple[float, Any]:
    """The largest difference of any weight after a few steps one way (`traced.trained`), and its count."""
    seen, count = trained(preset, loop, way)
    return max(
        float((weights[path] - weight).abs().max())
        for (_, weights), (_, _, expected) in zip(seen, reference(ranks, STEPS, 2), strict=True)
        for path, weight in expected.items()
        if weight.numel()
    ), count
