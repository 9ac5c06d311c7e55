"""Spread: whole leaves that one rank has, for every rank, a unit at a time.

    rank src    [leaf | leaf | leaf]  bytes of a unit          others    [0 | 0 | 0]
                └──────── all-reduce (max) along each axis of the mesh ────────┘
    every rank  [leaf | leaf | leaf]                                     the same bits

Zeros are the least of bytes, so the largest is what `src` has: any dtype, NaN and -0.0 included.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch

from .._common.errors import SpecError
from .._common.record import Collective
from .._plan.layout import Layout, aligned
from .._runtime.runtime import Runtime

__all__ = ["check_source", "spread"]

ALIGN = 16  # bytes: where a leaf begins


def check_source(where: str, src: int, run: Runtime, plan: Layout) -> None:
    """Refuse a rank that is not of the mesh, and leaves that ranks have of their own: one rank has not all of them."""
    if src not in run.ranks:
        raise SpecError(f"{where}(src={src!r}): the mesh has the ranks {run.ranks}. Give one of them.")
    for bucket in plan.buckets.values():
        own = [*bucket.placement.apart(run.sizes)]
        if own:
            raise SpecError(
                f"{where}(src={src}): ranks have {bucket.leaves[0].path!r} of their own along {own}, and rank {src} "
                "has not all of them. Give each rank its values, without src."
            )


def spread(run: Runtime, src: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that rank `src` has, on the mesh's device. Others give tensors of the same shapes and dtypes, which
    are not read and may be on the meta device.

    Memory: the bytes of all of them, once more. Collective: an all-reduce along each axis of the mesh.
    """
    sizes = [tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values()]
    places = [*itertools.accumulate((aligned(size, ALIGN) for size in sizes), initial=0)]
    whole = torch.zeros(places[-1], dtype=torch.uint8, device=run.device)
    found = {}
    for (path, tensor), at, size in zip(tensors.items(), places, sizes, strict=False):
        found[path] = whole[at : at + size].view(tensor.dtype).view(tensor.shape)
        if run.ranks[run.rank] == src and size:
            found[path].copy_(tensor.detach())
    for axis, size in run.sizes.items():
        if size > 1 and len(whole):
            run.now(Collective("all_reduce", axis, len(whole), whole.dtype, "max", "side", ""), whole, whole)
    return found
