"""Gradients and the layout's order: what users give to `reduce`, checked before anything is sent; and what they see.

They come in the order of the backward. Once all are there, `State.grads` has them in the order of main weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ._errors import TreeError
from ._flat import FlatBuffer
from ._layout import Layout, Unit
from ._tree import flatten

__all__ = ["in_order", "of_tree", "of_unit"]


def of_unit(unit: Unit, grads: Any) -> list[torch.Tensor | None]:
    """A unit's gradients as `Unit.paths`, checked; None for frozen leaves. Empty if nothing of the unit trains."""
    if not isinstance(grads, Mapping):
        raise TreeError(
            f"reduce(state, grads, {unit.name!r}): grads is a {type(grads).__name__}; expected {{key: tensor}}."
        )
    if tuple(grads) == unit.keys:
        values = list(grads.values())
        if set(map(type, values)) == {torch.Tensor} and [value.shape for value in values] == list(unit.trains):
            return values  # nearly always: tensors of the right shapes, and nothing is frozen
    else:
        found = _match(unit.keys, list(grads), list(grads.values()), f"reduce(state, grads, {unit.name!r})")
        values = [found[key] for key in unit.keys]
    trains = False
    for i, (value, shape) in enumerate(zip(values, unit.trains, strict=True)):
        if shape is None:
            values[i] = None
            continue
        trains = True
        if value is not None and not (isinstance(value, torch.Tensor) and value.shape == shape):
            raise _wrong(unit.keys[i], value, shape)
    return values if trains else []


def _wrong(name: str, value: Any, shape: tuple[int, ...]) -> TreeError:
    got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    return TreeError(
        f"reduce: the gradient of {name!r} has {got}; expected a tensor of the parameter's global shape "
        f"{shape} (or None for zero)."
    )


def of_tree(layout: Layout, grads: Any) -> dict[str, torch.Tensor | None]:
    """The gradients of a whole tree by the path that holds the leaf: those of tied leaves are added up."""
    paths, leaves, _ = flatten(grads)
    values = _match(layout.paths, paths, leaves, "reduce(state, grads)")
    shapes = {path: shape for unit in layout.units for path, shape in zip(unit.paths, unit.trains, strict=True)}
    total: dict[str, torch.Tensor | None] = {}
    for name, source in zip(layout.paths, layout.source, strict=True):
        shape, value = shapes[source], values[name]
        if shape is None or value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.shape != shape:
            raise _wrong(name, value, shape)
        before = total.get(source)
        total[source] = value if before is None else before + value
    return total


def _match(wanted: Sequence[str], paths: Sequence[str], leaves: Sequence[Any], where: str) -> dict[str, Any]:
    values = dict(zip(paths, leaves, strict=True))
    if values.keys() != set(wanted):
        missing = [p for p in wanted if p not in values]
        extra = [p for p in paths if p not in set(wanted)]
        said = [f"{what} {names[0]!r}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
                for what, names in (("lacks", missing), ("has the unknown", extra)) if names]  # fmt: skip
        raise TreeError(
            f"{where}: the gradient tree has another structure than the parameters: it {' and '.join(said)} "
            f"({len(paths)} leaves, expected {len(wanted)}). Return a gradient, or None, for each."
        )
    return values


def in_order(layout: Layout, grads: dict[str, FlatBuffer]) -> dict[str, FlatBuffer]:
    """The same dict if it is in the order of main weights, or lacks a bucket; else one that is."""
    trainable = layout.trainable
    if len(grads) < len(trainable) or list(grads) == list(trainable):
        return grads
    return {name: grads[name] for name in trainable}
