"""Compute weights: where they come from, when a copy persists between steps, and where gathered units live.

    main [n / ranks of main] ──cast──▶ own place in a whole bucket ──all-gather──▶ whole bucket [n], leaves are views

Placements that replicate weights, or shard them less than main weights, keep a compute copy between steps
(`State.weights`); it is what gathers read, and `refresh` brings it up to date after an update.
"""

from __future__ import annotations

import torch

from ._flat import FlatBuffer, leaves_of
from ._layout import Bucket, Unit
from ._state import State

__all__ = ["Gathered", "gather", "keeps_copy", "refresh", "whole_of"]


def keeps_copy(bucket: Bucket) -> bool:
    """Whether compute weights persist beside main weights: they are less sharded, or whole and of another dtype."""
    placement = bucket.placement
    sharded_alike = set(placement.weights) == set(placement.main)
    return not sharded_alike or (not placement.weights and bucket.compute is not bucket.main)


def whole_of(state: State, bucket: Bucket) -> torch.Tensor | None:
    """The whole bucket in the compute dtype where the state has it (weights are replicated), else None."""
    kept = _read(state, bucket)
    return kept.local if not kept.sharded() and kept.local.dtype is bucket.compute else None


def gather(state: State, bucket: Bucket, whole: torch.Tensor | None = None) -> torch.Tensor:
    """Cast the shard into its own place in `whole` (by default a new tensor) and gather in place. All-gather."""
    kept = _read(state, bucket)
    if whole is None:
        whole = kept.local.new_empty(bucket.numel, dtype=bucket.compute)
    return kept.gather(whole)


def _read(state: State, bucket: Bucket) -> FlatBuffer:
    return state.weights[bucket.name] if bucket.name in state.weights else state.main[bucket.name]


def refresh(main: FlatBuffer, kept: FlatBuffer) -> None:
    """Bring a persistent compute copy up to date: cast the main shard into its place, gather over the axes between."""
    start = main.span()[0] - kept.span()[0]
    own = kept.local[start : start + main.local.numel()].copy_(main.local)
    main.but(own).redistribute(kept.states, out=kept.local)


class Gathered:
    """A unit's weights while they are gathered. `release` gives their storage back, the next gather fills it again.

    `whole` is written to; the views handed out lie on the same bytes but have a version counter of their own, so that
    gathering again does not look like an in-place change to autograd. Buckets that need no gather are not in `whole`.
    """

    def __init__(self, state: State, unit: Unit) -> None:
        self.whole: dict[str, torch.Tensor] = {}
        self.held = False
        views: dict[str, torch.Tensor] = {}
        for bucket in unit.buckets:
            resident = whole_of(state, bucket)
            if resident is None:
                local = state.main[bucket.name].local
                resident = self.whole[bucket.name] = local.new_empty(bucket.numel, dtype=bucket.compute)
            alias = torch.empty(0, dtype=resident.dtype, device=resident.device)
            alias.set_(resident.untyped_storage(), resident.storage_offset(), resident.shape, (1,))
            views |= leaves_of(bucket, alias)
        self.weights = {key: views[path] for key, path in zip(unit.keys, unit.paths, strict=True)}

    def gather(self, state: State) -> None:
        for name, whole in self.whole.items():
            storage = whole.untyped_storage()
            if not storage.size():
                storage.resize_(whole.numel() * whole.element_size())
            gather(state, state.layout.buckets[name], whole)
        self.held = True

    def release(self) -> None:
        for whole in self.whole.values():
            whole.untyped_storage().resize_(0)
        self.held = False
