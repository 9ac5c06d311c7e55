"""Cuts: which part of a whole leaf a rank has, along mesh axes of the model's own, and how a layout has it.

whole [12, m], two ranks along "tp", parts (4, 1, 1)          q q q q q q q q | k k | v v
rank 0    [6, m]                                              q q q q         | k   | v
rank 1    [6, m]                                                      q q q q |   k |   v
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch

from .._common.calls import provide
from .._common.errors import SpecError
from .._common.record import Collective
from .._plan.layout import LeafInfo, Lies
from .._runtime.runtime import runtime_of
from .._spec.placement import Placement
from .._spec.precision import Codec
from .._spec.spec import Spec
from .._storage import FlatBuffer, leaves_of
from .along import Along

__all__ = [
    "Cut", "Cuts", "boxes", "cut_of", "cuts_of", "join", "joined_leaves", "lie", "part_shape", "whole_shape",
]  # fmt: skip


class Cut(NamedTuple):
    """A leaf is cut along a mesh axis of so many ranks: of each part along `dim` a rank has a slice.

    sizes: elements of the parts along `dim`, before this cut.
    """

    axis: str
    ranks: int
    dim: int
    sizes: tuple[int, ...]

    def spans(self, rank: int) -> list[tuple[int, int]]:
        """(start, count) along `dim` of what a rank has of each part."""
        found, at = [], 0
        for size in self.sizes:
            found.append((at + rank * (size // self.ranks), size // self.ranks))
            at += size
        return found


Cuts = tuple[Cut, ...]


def cuts_of(
    path: str, shape: Sequence[int], alongs: Sequence[Along], sizes: Mapping[str, int]
) -> tuple[Cuts, list[int]]:
    """The cuts of a leaf, and the shape that a rank then has.

    Raises:
        SpecError: no such dim; parts that do not divide.
    """
    local, found = list(shape), []
    for one in alongs:
        if one.dim is None:
            continue
        if not -len(local) <= one.dim < len(local):
            raise SpecError(
                f"Spec(own): {path!r} is {list(shape)} and has no dim {one.dim}, along which {one!r} cuts it. Give one "
                f"of {len(local)} dims."
            )
        dim = one.dim % len(local)
        total, ranks, n = local[dim], sizes[one.axis], sum(one.shares)
        parts = tuple(total // n * share for share in one.shares)
        if total % n or any(part % ranks for part in parts):
            what = f"{list(parts)} elements of its parts" if len(parts) > 1 and not total % n else f"{total} elements"
            raise SpecError(
                f"Spec(own): {path!r} is {list(shape)}, and {one!r} cuts the {what} along dim {dim} for {ranks} ranks, "
                f"which does not divide{f' into parts {one.shares}' if total % n else ''}. Choose another dim or other "
                "parts, or pad the leaf."
            )
        found.append(Cut(one.axis, ranks, dim, parts))
        local[dim] = total // ranks
    return tuple(found), local


def part_shape(whole: Sequence[int], cuts: Cuts) -> tuple[int, ...]:
    """Of a rank's part, from the leaf."""
    shape = list(whole)
    for cut in cuts:
        shape[cut.dim] //= cut.ranks
    return tuple(shape)


def whole_shape(local: Sequence[int], cuts: Cuts) -> tuple[int, ...]:
    """Of the leaf, from a rank's part."""
    shape = list(local)
    for cut in cuts:
        shape[cut.dim] *= cut.ranks
    return tuple(shape)


def cut_of(whole: torch.Tensor, cuts: Cuts, coordinate: Mapping[str, int]) -> torch.Tensor:
    """A rank's part of a whole leaf: a view, where it is one."""
    for cut in cuts:
        spans = cut.spans(coordinate[cut.axis])
        parts = [whole.narrow(cut.dim, start, count) for start, count in spans]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)
    return whole


def join(parts: Sequence[torch.Tensor], cut: Cut) -> torch.Tensor:
    """What ranks have along one cut, in their order, as it was before the cut."""
    dim, each = cut.dim, [size // cut.ranks for size in cut.sizes]
    by_part = [part.split(each, dim) for part in parts]
    return torch.cat([one[k] for k in range(len(each)) for one in by_part], dim)


Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def boxes(whole: Sequence[int], cuts: Cuts, coordinate: Mapping[str, int]) -> list[Box]:
    """What a rank has, as boxes: where each begins in the whole leaf, where in the rank's part, and its size. Of a leaf
    without elements the first rank has one, so that it is there."""
    zero = (0,) * len(whole)
    if 0 in whole:
        return [] if any(coordinate[cut.axis] for cut in cuts) else [(zero, zero, part_shape(whole, cuts))]
    found: list[Box] = [(zero, zero, tuple(whole))]
    for cut in cuts:
        dim, at, again = cut.dim, 0, []
        for start, count in cut.spans(coordinate[cut.axis]):
            for there, here, size in found:
                a, b = max(start, here[dim]), min(start + count, here[dim] + size[dim])
                if a < b:
                    again.append((
                        _put(there, dim, there[dim] + a - here[dim]), _put(here, dim, at + a - start),
                        _put(size, dim, b - a),
                    ))  # fmt: skip
            at += count
        found = again
    return found


def _put(numbers: tuple[int, ...], i: int, n: int) -> tuple[int, ...]:
    return (*numbers[:i], n, *numbers[i + 1 :])


def lie(
    leaf: LeafInfo, placement: Placement, some: Sequence[Along], packing: Codec | None, spec: Spec
) -> tuple[Placement, Lies, Cuts, tuple[int, ...]]:
    """The placement of a leaf with the axes along which its gradients are added up, how it lies, its cuts, and the
    shape of a rank's part.

    Args:
        some: its rules. packing: the codec in which it is stored, gathered or sent, if there is one.

    Raises:
        SpecError: its placement averages over an axis that a rule names; an axis of the model's own that no rule names;
            a codec.
    """
    if some and packing is not None:
        raise SpecError(
            f"Spec(own): {leaf.path!r} is {some[0]}, and its precision has the codec {packing}, which "
            "does not know of axes of the model's own. Leave one of the two out."
        )
    for one in some:
        if one.axis in placement.data:
            raise SpecError(
                f"Spec(own): {leaf.path!r} is {one}, and its placement, {placement}, averages over {one.axis!r}. Give "
                f"the placement the other axes, or leave the rule out: what is averaged over {one.axis!r} is equal "
                "along it."
            )
    named = {*placement.data, *(one.axis for one in some)}
    lacks = next((axis for axis in spec.own_axes if axis not in named), None)
    if lacks is not None:
        raise SpecError(
            f"Spec(own): nothing says how {leaf.path!r} lies along {lacks!r}, along which other leaves have rules. "
            f"Give it one, as {{'*': {lacks!r}}} at the end for leaves that are equal along it."
        )
    equal = [one for one in some if one.dim is None]
    summed = tuple(one.axis for one in equal if one.grads == "sum")
    if summed:
        placement = replace(placement, data=(*summed, *placement.data))
    lies = Lies(
        tuple(one.axis for one in some if one.dim is not None and spec.axes[one.axis] > 1),
        tuple(one.axis for one in equal if one.grads == "equal"),
        summed,
    )
    cuts, shape = cuts_of(leaf.path, leaf.shape, some, spec.axes)
    return placement, lies, cuts, tuple(shape)


def joined_leaves(buffer: FlatBuffer, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The leaves of a buffer by path, whole, those that are cut joined; see `whole_leaves`, which calls this."""
    bucket = buffer.bucket
    run = runtime_of(buffer.mesh)
    every = buffer.gather(buffer.local.new_empty(bucket.numel, dtype=dtype or buffer.local.dtype))
    for axis in reversed(bucket.cut):
        mine, every = every, every.new_empty(run.sizes[axis] * every.numel())
        run.now(Collective("all_gather", axis, every.numel(), every.dtype, "", "side", bucket.name), every, mine)
    ranks = prod(run.sizes[axis] for axis in bucket.cut)
    parts = [leaves_of(bucket, part) for part in every.view(ranks, bucket.numel)]
    found = {}
    for leaf in bucket.leaves:
        some = [part[leaf.path] for part in parts]
        for cut in reversed(leaf.cuts):
            some = [join(some[at : at + cut.ranks], cut) for at in range(0, len(some), cut.ranks)]
        found[leaf.path] = some[0]
    return found


provide("axes", cuts_of, cut_of, whole_shape, lie, joined_leaves)
