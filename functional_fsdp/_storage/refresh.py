"""Refresh: compute copies that persist are brought up to date after main weights have changed.

    main [n / ranks of main] ──cast──▶ own part of the copy [n / ranks of weights] ──all-gather──▶ the copy

Those in float8 get a scale for each leaf first (`_float8.scales`). Those that are gathered by a codec are packed from
main weights as they are, each rank its part, without a look at others.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch

from .._common.provided import provided
from .._plan.layout import Bucket
from .._spec.rows import Rows
from .flat import FlatBuffer

__all__ = ["no_scales", "own_part", "refresh"]

Tree = Mapping[str, FlatBuffer]
_rescale, _cast_scaled = provided("float8.rescale"), provided("float8.cast_scaled")


def no_scales(bucket: Bucket, device: torch.device) -> torch.Tensor:
    """Room for the scales of a bucket: float32 [leaves]."""
    return torch.zeros(len(bucket.leaves), dtype=torch.float32, device=device)


def own_part(main: FlatBuffer, copy: FlatBuffer) -> torch.Tensor:
    """Where main weights, or a cut of them, lie in the compute copy of the same rank."""
    start = main.span()[0] - copy.span()[0]
    return copy.local[start : start + main.local.numel()]


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
        if (codec := source.bucket.gather_codec) is not None:
            part = FlatBuffer(kept.local, kept.bucket, source.states, source.mesh)
            start, stop = (at - kept.span()[0] for at in part.span())
            part = part.but(kept.local[start:stop])
            Rows(codec).pack_into(source.local, part.local)
            part.redistribute(kept.states, out=kept.local)
            continue
        own = own_part(source, kept)
        if name in scales:
            _cast_scaled(source, own, scales[name])
        elif name not in there:
            own.copy_(source.local)
        source.but(own).redistribute(kept.states, out=kept.local)
