"""A state's gradients as flat shards, and sums over the ranks that hold them, each element counted once."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from functional_fsdp import State
from functional_fsdp._metrics import over_axes

__all__ = ["by_dtype", "shards", "total"]

Axes = tuple[str, ...]


def shards(state: State) -> dict[Axes, list[torch.Tensor]]:
    """{mesh axes along which they differ: flat local gradients}. The state's gradients are whole.

    They differ along the axes that shard them, and along those that they are not averaged over, where ranks have leaves
    of their own (experts).
    """
    found: dict[Axes, list[torch.Tensor]] = {}
    sizes = state.spec.axes
    for buffer in state.grads.values():
        own = [axis for axis in sizes if axis not in buffer.bucket.placement.data]
        axes = tuple(axis for axis in (*buffer.sharded(), *own) if sizes[axis] > 1)
        found.setdefault(axes, []).append(buffer.local)
    return found


def by_dtype(tensors: Iterable[torch.Tensor]) -> dict[torch.dtype, list[torch.Tensor]]:
    """Tensors apart by dtype, as one call for many takes them; empty ones left out."""
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            found.setdefault(tensor.dtype, []).append(tensor)
    return found


def total(state: State, values: dict[Axes, torch.Tensor]) -> torch.Tensor:
    """The sum over all shards of a tensor [] from each group of `shards`: one all-reduce an axis.

    Ranks that hold the same shard are counted once: a group is summed over the axes that shard it only.
    """
    left = dict(values)
    for axis in state.spec.axes:
        mine = [axes for axes in left if axis in axes]
        if mine:
            flat = over_axes(state, torch.stack([left[axes] for axes in mine]), (axis,), "sum", "total")
            left |= dict(zip(mine, flat.unbind(), strict=True))
    return torch.stack([*left.values()]).sum()
