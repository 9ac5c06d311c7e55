"""Refresh: compute copies that persist are brought up to date after main weights have changed.

    main [n / ranks of main] ──cast──▶ own part of the copy [n / ranks of weights] ──all-gather──▶ the copy

Those in float8 get a scale for each leaf first. It follows from the largest number of the whole leaf, and all leaves of
all buckets ask the other ranks for it at once:

    main ── largest of each 128 ── of each leaf ── all-reduce, max ── scale ──▶ main · scale, cast
            as compute would see it

Leaves begin at multiples of 128 elements, and so do slices: 128 elements in a row are of one leaf. The numbers are
those of torchao's dynamic scaling of a whole tensor: gathered in float8, or gathered in the compute dtype and cast at
use, a weight has the same bits.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import lru_cache

import torch

from .._common.record import Collective, over_each_axis
from .._plan.layout import ALIGN, Bucket
from .._runtime.runtime import runtime_of
from .flat import FlatBuffer

__all__ = ["no_scales", "refresh"]

Tree = Mapping[str, FlatBuffer]
LEAST = 1e-12  # of the largest number of a leaf: torchao's, so that a leaf of zeros has a scale
ROWS = 1 << 17  # rows of 128 elements that are cast at once: what is between is 16 Mi elements


def no_scales(bucket: Bucket, device: torch.device) -> torch.Tensor:
    """Room for the scales of a bucket: float32 [leaves]."""
    return torch.zeros(len(bucket.leaves), dtype=torch.float32, device=device)


def refresh(
    main: Tree,
    weights: Tree,
    scales: Mapping[str, torch.Tensor],
    trainable_only: bool = False,
    there: Container[str] = (),
) -> None:
    """Bring persistent compute copies up to date, and the scales of those in float8, all in place.

    Args:
        trainable_only: what is frozen has not changed.
        there: buckets whose main shard is in its place in the copy already.

    Collective: one all-reduce along each axis that shards a bucket in float8; an all-gather a bucket where weights are
    less sharded than main weights.
    """
    chosen = [name for name in weights if main[name].bucket.trainable or not trainable_only]
    if scales:
        _rescale([main[name] for name in chosen if name in scales], scales)
    for name in chosen:
        source, kept = main[name], weights[name]
        start = source.span()[0] - kept.span()[0]
        own = kept.local[start : start + source.local.numel()]
        if name in scales:
            _cast(source, own, scales[name])
        elif name not in there:
            own.copy_(source.local)
        source.but(own).redistribute(kept.states, out=kept.local)


def _rescale(buffers: list[FlatBuffer], scales: Mapping[str, torch.Tensor]) -> None:
    """The scales of all leaves of these buckets, from their main weights."""
    if not buffers:
        return
    run = runtime_of(buffers[0].mesh)

    def reduced(axis: str, flat: torch.Tensor) -> torch.Tensor:
        run.now(Collective("all_reduce", axis, flat.numel(), flat.dtype, "max", "side", ""), flat, flat)
        return flat

    axes = [axis for axis, ranks in run.sizes.items() if ranks > 1]
    largest = over_each_axis([*map(_largest, buffers)], [b.sharded() for b in buffers], axes, reduced)
    for buffer, most in zip(buffers, largest, strict=True):
        bucket = buffer.bucket
        seen = most.to(bucket.compute).to(torch.float64)  # as torchao: float32 differs between compilers
        scales[bucket.name].copy_(torch.finfo(bucket.gather).max / seen.clamp(min=LEAST))


def _largest(buffer: FlatBuffer) -> torch.Tensor:
    """float32 [leaves]: the largest absolute value in this rank's part of each leaf; 0 where it has none.

    Rounding to the compute dtype keeps the order, so it may come after.
    """
    found = no_scales(buffer.bucket, buffer.local.device)
    for index, rows, _ in _rows(buffer, buffer.local):
        most = torch.linalg.vector_norm(rows, float("inf"), dim=1)
        found.scatter_reduce_(0, index, most.to(torch.float32), "amax")
    return found


def _cast(buffer: FlatBuffer, own: torch.Tensor, scale: torch.Tensor) -> None:
    """Main weights, as compute would see them, times their leaf's scale, into the own part of the copy."""
    most = torch.finfo(own.dtype).max
    for index, rows, out in _rows(buffer, own):
        seen = rows.to(buffer.bucket.compute).to(torch.float32)
        out.copy_((seen * scale.index_select(0, index)[:, None]).clamp_(-most, most))


def _rows(buffer: FlatBuffer, beside: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(which leaf [k], main weights [k, 128], the same of `beside`), some rows at a time."""
    local = buffer.local
    begin, starts = buffer.span()[0] // ALIGN, _starts(buffer.bucket, local.device)
    for at in range(0, local.numel() // ALIGN, ROWS):
        stop = min(at + ROWS, local.numel() // ALIGN)
        row = torch.arange(begin + at, begin + stop, device=local.device)
        cut = slice(at * ALIGN, stop * ALIGN)
        yield torch.bucketize(row, starts, right=True) - 1, local[cut].view(-1, ALIGN), beside[cut].view(-1, ALIGN)


@lru_cache(maxsize=1 << 16)
def _starts(bucket: Bucket, device: torch.device) -> torch.Tensor:
    """int64 [leaves]: the rows where leaves begin."""
    return torch.tensor([leaf.offset // ALIGN for leaf in bucket.leaves], dtype=torch.int64, device=device)
