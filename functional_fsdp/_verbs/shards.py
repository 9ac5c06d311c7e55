"""Shards: this rank's elements of the gradients (or of other trees of FlatBuffers), and sums that count each once.

mesh 2 × 2, hsdp       replica 0        replica 1          shards          {("shard",): [...]}: differ along that
  shard 0              g[:n/2]          g[:n/2]            total           summed over "shard", and not over
  shard 1              g[n/2:]          g[n/2:]                            "replica", where it is the same again
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._common.errors import TreeError
from .._common.record import over_each_axis
from .._state.state import State
from .._storage.flat import FlatBuffer
from .._storage.gradients import of_tree, of_unit
from .metrics import Op, axes_of, over_axes
from .verbs import no_unit

__all__ = ["Axes", "by_unit", "over_shards", "shards", "total"]

Axes = tuple[str, ...]


def shards(state: State, tree: Mapping[str, FlatBuffer] | None = None) -> dict[Axes, list[FlatBuffer]]:
    """`{mesh axes along which they differ: FlatBuffers}`: what this rank holds, each bucket once.

    Args:
        tree: `{bucket: FlatBuffer}`, as `state.main`. None: the gradients of the state, which are whole after
            `finish_reductions`.

    Returns:
        buffers by the axes of more than one rank that shard them, or that are data of other leaves only, where ranks
        have leaves of their own (experts). Along other axes of data ranks hold the same. An axis that no placement
        names is in no key: ranks train apart along it, and each sums its own. The tensors are `.local`, flat
        [n_b / ranks of the axes]; padding is zero. To change them in place, see `change`.

    Collective: none.

    Example: `for axes, buffers in extend.shards(state).items(): ...`.
    """
    found: dict[Axes, list[FlatBuffer]] = {}
    data, sizes = axes_of(state)
    for buffer in (state.grads if tree is None else tree).values():
        split = tuple(axis for axis in buffer.sharded() if sizes[axis] > 1)
        axes = (*split, *(axis for axis in buffer.bucket.placement.apart(sizes) if axis in data))
        found.setdefault(axes, []).append(buffer)
    return found


def over_shards(state: State, values: Mapping[Axes, torch.Tensor], op: Op = "sum") -> dict[Axes, torch.Tensor]:
    """A tensor [...] from each group of `shards`, added up (or its largest, "max") over the ranks whose shards differ.

    Args:
        values: `{axes: tensor}`, with the keys of `shards`, of one dtype; on every rank, of the same shapes.

    Returns:
        the same keys and shapes; each shard has counted once, and every rank of the data has the same.

    Raises:
        TreeError: a key that is no tuple of axes of the mesh.

    Collective: one all-reduce for each axis that shards something, of all tensors together. Nothing waits for the
    device.

    Example, the largest gradient of each bucket: `extend.over_shards(state, {axes: torch.stack([b.local.abs().amax()
    for b in buffers]) for axes, buffers in extend.shards(state).items()}, "max")`.
    """
    along, axes = [*values], axes_of(state)[1]
    for key in along:
        if not isinstance(key, tuple) or any(axis not in axes for axis in key):
            raise TreeError(
                f"over_shards: the key {key!r} is no tuple of axes of the mesh, which are {[*axes]}. Give the keys of "
                "extend.shards(state): {axes: ... for axes, buffers in extend.shards(state).items()}."
            )
    found = over_each_axis(
        [*values.values()], along, axes, lambda axis, flat: over_axes(state, flat, (axis,), op, "total")
    )
    return dict(zip(along, found, strict=True))


def total(state: State, values: Mapping[Axes, torch.Tensor]) -> torch.Tensor:
    """The sum, a tensor [], over all shards of a tensor [] from each group of `shards`: each element counts once.

    Args:
        values: `{axes: tensor []}`, with the keys of `shards`; on every rank.

    Raises:
        TreeError: as `over_shards`.

    Collective: as `over_shards`.

    Example, how many gradients are zero: `extend.total(state, {axes: sum((b.local == 0).sum() for b in buffers) for
    axes, buffers in extend.shards(state).items()})`, less the padding.
    """
    return torch.stack([*over_shards(state, values).values()]).sum()


def by_unit(state: State, what: str, grads: Any, unit: str | None = None) -> dict[str, list[torch.Tensor | None]]:
    """Gradients as `reduce` takes them, checked as it does: `{unit: a gradient or None for each of Unit.paths}`.

    Args:
        what: the transform's name, for errors.
        grads, unit: as for `reduce`. Those of tied leaves are added up; frozen leaves have None.

    Raises:
        TreeError: as `reduce`. ScheduleError: there is no such unit.

    Collective: none.

    Example: `extend.by_unit(state, "look", grads, "blocks.0")["blocks.0"]`.
    """
    if unit is None:
        values = of_tree(state.layout, grads)
        return {one.name: [values.get(path) for path in one.paths] for one in state.layout.units}
    if unit not in state.layout.by_name:
        raise no_unit(state, unit, what)
    one = state.layout.by_name[unit]
    return {unit: of_unit(one, grads)[0] or [None] * len(one.paths)}
