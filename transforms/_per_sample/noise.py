"""Noise on gradients: one normal draw an element of a leaf, whatever the placement and however many ranks there are.

A leaf is cut into blocks, and a block's draws follow from (state.rng, step, path, block) alone. A rank draws the blocks
that its shard touches, so replicas draw the same, shards draw what is theirs, and padding stays zero.
"""

from __future__ import annotations

import torch

from functional_fsdp import State
from functional_fsdp.extend import leaf_shards, ranks_of, seeds

__all__ = ["BLOCK", "add_noise"]

BLOCK = 1 << 20  # elements


@torch.no_grad()
def add_noise(state: State, std: float | torch.Tensor) -> None:
    """Add normal draws of this standard deviation to the state's gradients, in place. They are whole.

    Where ranks have leaves of their own (experts), they draw their own. The caller's random numbers are left alone.
    """
    ranks, seed = ranks_of(state), seeds(state, "noise")
    generator = torch.Generator(device=ranks.device)
    for buffer in state.grads.values():
        own = [(axis, i) for axis, i in ranks.coordinate.items() if axis not in buffer.bucket.placement.data]
        wide = torch.float64 if buffer.local.dtype is torch.float64 else torch.float32
        for leaf, first, local in leaf_shards(buffer):
            last = first + local.numel()
            for at in range(first // BLOCK * BLOCK, last, BLOCK):
                end = min(at + BLOCK, leaf.numel)
                generator.manual_seed(seed(own, leaf.path, at))
                draws = torch.randn(end - at, generator=generator, dtype=wide, device=ranks.device).mul_(std)
                a, b = max(at, first), min(end, last)
                local[a - first : b - first].add_(draws[a - at : b - at])
