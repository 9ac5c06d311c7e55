"""FlatBuffer: one rank's part of a bucket, and the one operation on it, `redistribute`.

| from -> to             | collective                 | bytes a rank receives, n = the larger side |
|------------------------|----------------------------|--------------------------------------------|
| Shard -> Replicate     | all-gather                 | (r-1)/r · n                                 |
| Partial -> Replicate   | all-reduce                 | 2 · (r-1)/r · n                             |
| Partial -> Shard       | reduce-scatter             | (r-1)/r · n                                 |
| Replicate -> Shard     | none, a local slice        | 0                                           |

Anything else is an error. On two axes the steps follow the bucket's split order: gathers undo the last split first,
reductions do the first split first, and what stays whole is all-reduced last, when it is smallest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch._utils import _unflatten_dense_tensors

from ._comm import runtime_of
from ._errors import SpecError
from ._layout import Bucket
from ._tree import register

__all__ = ["Axis", "FlatBuffer", "Partial", "Replicate", "Shard", "leaves_of", "states_of", "write_leaves"]


class Axis(Enum):
    """How a buffer lies along one mesh axis."""

    SHARD = "Shard"  # each rank has its slice
    REPLICATE = "Replicate"  # each rank has all of it, the same
    PARTIAL = "Partial"  # each rank has a summand of all of it

    def __str__(self) -> str:
        return str(self.value)

    __repr__ = __str__


Shard, Replicate, Partial = Axis.SHARD, Axis.REPLICATE, Axis.PARTIAL
States = tuple[tuple[str, Axis], ...]


def states_of(bucket: Bucket, kind: str, rest: Axis = Replicate) -> States:
    """The per-axis states of "weights", "grads" or "main" of a bucket; axes that do not shard it are `rest`."""
    sharded = getattr(bucket.placement, kind)
    return tuple((axis, Shard if axis in sharded else rest) for axis in bucket.placement.data)


@dataclass(frozen=True, eq=False)
class FlatBuffer:
    """A bucket, or the part of it that this rank holds.

    Attributes:
        local: 1-D tensor, [bucket.numel / product of the sharding axes' sizes] elements.
        bucket: where the leaves lie in the whole.
        states: (axis, Shard | Replicate | Partial) for each data axis.
        mesh: the device mesh that the axes belong to.

    A FlatBuffer is a pytree node with one child, so `tree_map` over a dict of them reaches the tensors.
    """

    local: torch.Tensor
    bucket: Bucket
    states: States
    mesh: Any

    def but(self, local: torch.Tensor, states: States | None = None) -> FlatBuffer:
        """The same bucket with other numbers, and perhaps in other states."""
        return FlatBuffer(local, self.bucket, states or self.states, self.mesh)

    def sharded(self) -> tuple[str, ...]:
        return tuple(axis for axis, state in self.states if state is Shard)

    def span(self) -> tuple[int, int]:
        """The elements [start, stop) of the bucket that `local` holds."""
        return self.bucket.span(self.sharded(), runtime_of(self.mesh).coordinate)

    def by_label(self) -> list[tuple[str, torch.Tensor]]:
        """(label, view) for each run of leaves of one label in `local`: what an optimizer updates with one setting."""
        start, stop = self.span()
        if len(self.bucket.labels) == 1:
            return [(self.bucket.labels[0][0], self.local)]
        cuts = ((label, max(a, start), min(b, stop)) for label, a, b in self.bucket.labels)
        return [(label, self.local[a - start : b - start]) for label, a, b in cuts if a < b]

    def redistribute(
        self,
        target: Mapping[str, Axis] | States,
        out: torch.Tensor | None = None,
        *,
        average: str = "mean",
        lane: str | None = None,
        donate: bool = False,
    ) -> FlatBuffer:
        """Move to other per-axis states, by the collectives in the table at the top of this file.

        Args:
            target: the state wanted for each axis; axes left out keep theirs.
            out: 1-D destination of the result's size and this buffer's dtype. A gather is in place when `self.local` is
                this rank's own slice of `out`.
            average: "mean" or "sum" for what was Partial.
            lane: the lane to issue on; default "gather" or "reduce" by the collective.
            donate: a reduction may use `self.local` as scratch, and need not copy it.

        Returns:
            the result; its `local` is `out` where that was given, a view of this one's where nothing had to move.

        Raises:
            SpecError: an unknown axis, a transition that is not in the table, or an `out` of the wrong size or dtype.

        Example, [n / ranks] -> [n]: `FlatBuffer(shard, bucket, (("data", Shard),), mesh).redistribute({"data":
        Replicate})`
        """
        have, want = dict(self.states), dict(self.states) | dict(target)
        self._check(have, want)
        run = runtime_of(self.mesh)
        order = [a for a in self.bucket.placement.order if a in have]
        order += [a for a in have if a not in order]
        n = self.bucket.numel // prod(run.sizes[a] for a, state in want.items() if state is Shard)
        if out is not None and (out.shape != (n,) or out.dtype != self.local.dtype):
            raise SpecError(
                f"redistribute({self.bucket.name!r}): out has shape {tuple(out.shape)} and dtype {out.dtype}; expected "
                f"({n},) and {self.local.dtype}."
            )
        local = self.local
        gathers = [a for a in reversed(order) if have[a] is Shard and want[a] is Replicate]
        splits = [a for a in order if have[a] is not Shard and want[a] is Shard]
        whole_sums = [a for a in order if have[a] is Partial and want[a] is Replicate]
        # leading axes of the split order are sharded before and after, so there are gathers or splits, never both
        if gathers:
            whole = out if out is not None else local.new_empty(n)
            begin = self.bucket.span([a for a in order if want[a] is Shard], run.coordinate)[0]
            for i, axis in enumerate(gathers):
                still = [a for a in order if have[a] is Shard and a not in gathers[: i + 1]]
                start = self.bucket.span(still, run.coordinate)[0] - begin
                part = whole[start : start + local.numel() * run.sizes[axis]]
                run.all_gather(part, local, axis, lane or "gather", self.bucket.name)
                local = part
        if Partial in (have[axis] for axis in (*splits, *whole_sums)) and not donate:
            local = local.clone()
        for axis in splits:
            size = local.numel() // run.sizes[axis]
            if have[axis] is Replicate:
                local = local[run.coordinate[axis] * size : (run.coordinate[axis] + 1) * size]
            else:
                part = out if out is not None and axis is splits[-1] else local.new_empty(size)
                run.reduce_scatter(part, local, axis, average, lane or "reduce", self.bucket.name)
                local = part
        for axis in whole_sums:
            run.all_reduce(local, axis, average, lane or "reduce", self.bucket.name)
        if out is not None and local is not out:
            local = out if local.data_ptr() == out.data_ptr() else out.copy_(local)
        return self.but(local, tuple(want.items()))

    def _check(self, have: dict[str, Axis], want: dict[str, Axis]) -> None:
        where = f"redistribute({self.bucket.name!r})"
        for axis, state in want.items():
            if axis not in have:
                raise SpecError(f"{where}: unknown axis {axis!r}; this buffer lies on {', '.join(map(repr, have))}.")
            if (have[axis], state) not in _ALLOWED and have[axis] is not state:
                allowed = ", ".join(f"{a} -> {b}" for a, b in _ALLOWED)
                raise SpecError(
                    f"{where}: {have[axis]} -> {state} on the axis {axis!r} is not a transition. There are {allowed}."
                )
        order = self.bucket.placement.order
        for states in (have, want):
            sharded = {axis for axis, state in states.items() if state is Shard}
            if sharded != set(order[: len(sharded)]):
                raise SpecError(
                    f"{where}: sharded over {sorted(sharded)}, but this bucket is split in the order {order}; "
                    f"only leading axes of that order can be sharded."
                )


_ALLOWED = ((Shard, Replicate), (Partial, Replicate), (Partial, Shard), (Replicate, Shard))


register(
    FlatBuffer,
    lambda b: ((b.local,), (b.bucket, b.states, b.mesh)),
    ("local",),
    lambda context, children: FlatBuffer(children[0], *context),
)


@lru_cache(maxsize=65536)
def _templates(bucket: Bucket) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(shape, device="meta") for shape in bucket.pieces)


def leaves_of(bucket: Bucket, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """The leaves by path, as views of the whole bucket [numel], each of its global shape; one call for all."""
    pieces = _unflatten_dense_tensors(whole, _templates(bucket))
    views = {leaf.path: pieces[i] for leaf, i in zip(bucket.leaves, bucket.leaf_pieces, strict=True)}
    for leaf in bucket.empty:  # the one call forgets their shapes
        views[leaf.path] = whole.new_empty(leaf.shape)
    return views


def write_leaves(bucket: Bucket, whole: torch.Tensor, values: Mapping[str, torch.Tensor | None]) -> None:
    """Copy and cast `values` (by path; None means zeros) into the whole bucket, and zero its padding."""
    pieces = _unflatten_dense_tensors(whole, _templates(bucket))
    at = dict(zip(bucket.leaf_pieces, bucket.leaves, strict=True))
    given = {i: values[leaf.path] for i, leaf in at.items()}
    zero = [piece for i, piece in enumerate(pieces) if given.get(i) is None]
    pairs = [(pieces[i], value) for i, value in given.items() if value is not None and value.numel()]
    if zero:
        torch._foreach_zero_(zero)
    if pairs:
        torch._foreach_copy_([p for p, _ in pairs], [v for _, v in pairs])
