"""Noise on gradients: one normal draw an element of a leaf, whatever the placement and however many ranks there are.

A leaf is cut into blocks, and a block's draws follow from (state.rng, step, path, block) alone. A rank draws the blocks
that its shard touches, so replicas draw the same, shards draw what is theirs, and padding stays zero.
"""

from __future__ import annotations

import hashlib

import torch

from functional_fsdp import State
from functional_fsdp._runtime import runtime_of

__all__ = ["BLOCK", "add_noise"]

BLOCK = 1 << 20  # elements


def add_noise(state: State, std: float | torch.Tensor) -> None:
    """Add normal draws of this standard deviation to the state's gradients, in place. They are whole.

    Where ranks have leaves of their own (experts), they draw their own. The caller's random numbers are left alone.
    """
    run = runtime_of(state.spec.mesh)
    generator = torch.Generator(device=run.device)
    where = f"noise {int(state.rng)} {state.steps}"
    for buffer in state.grads.values():
        own = [(axis, i) for axis, i in run.position if axis not in buffer.bucket.placement.data]
        start, stop = buffer.span()
        wide = torch.float64 if buffer.local.dtype is torch.float64 else torch.float32
        for leaf in buffer.bucket.leaves:
            first, last = max(leaf.offset, start) - leaf.offset, min(leaf.offset + leaf.numel, stop) - leaf.offset
            if first >= last:
                continue  # it is another rank's
            for at in range(first // BLOCK * BLOCK, last, BLOCK):
                end = min(at + BLOCK, leaf.numel)
                name = hashlib.sha256(f"{where} {own} {leaf.path} {at}".encode()).digest()
                generator.manual_seed(int.from_bytes(name[:7], "little"))
                draws = torch.randn(end - at, generator=generator, dtype=wide, device=run.device).mul_(std)
                a, b = max(at, first), min(end, last)
                buffer.local[leaf.offset + a - start : leaf.offset + b - start].add_(draws[a - at : b - at])
