"""Gradients and the layout's order: what users give to `reduce`, checked before anything is sent; and what they see.

They come in the order of the backward. Once all are there, `State.grads` has them in the order of main weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import torch

from .._common.errors import ScheduleError, TreeError, expect
from .._common.tree import flatten
from .._plan.layout import Layout, Unit
from .._runtime.given import ALL

T = TypeVar("T")
KIND = attrgetter("shape", "dtype", "layout")  # as `Unit.gradients`


def of_unit(unit: Unit, grads: Any) -> tuple[list[torch.Tensor | None], int]:
    """A unit's gradients as `Unit.paths`, checked, None for frozen leaves; empty if nothing of the unit trains. And
    which of them came: one bit each, or ALL."""
    if type(grads) is not dict:
        expect(f"reduce(state, grads, {unit.name!r}): grads", grads, Mapping, "{key: tensor}", TreeError)
    if (*grads,) == unit.keys:
        values = [*grads.values()]
        try:
            if [*map(KIND, values)] == unit.gradients:
                return values, ALL  # nearly always: tensors of the right shapes, and nothing is frozen
        except AttributeError:  # there is None among them
            pass
    else:
        found = _match(unit.keys, list(grads), list(grads.values()), f"reduce(state, grads, {unit.name!r})")
        values = [found[key] for key in unit.keys]
    trains = came = 0
    for i, (value, shape) in enumerate(zip(values, unit.trains, strict=True)):
        if shape is None:
            values[i] = None
            continue
        trains |= 1 << i
        if value is not None:
            came |= 1 << i
            values[i] = _plain(unit.paths[i], value, shape)
    return values if trains else [], ALL if came == trains else came


def _plain(name: str, value: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """A gradient as a tensor of numbers that can be added up."""
    if not isinstance(value, torch.Tensor) or value.shape != shape:
        got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise TreeError(
            f"reduce: the gradient of {name!r} has {got}; expected a tensor of the parameter's global shape "
            f"{shape} (or None where there is none)."
        )
    for wrong, what, remedy in (
        (value.is_quantized, f"is quantized ({value.dtype})", "Give value.dequantize()"),
        (value.is_complex(), f"is complex ({value.dtype}), and main gradients are real", "Give its real part, g.real"),
    ):
        if wrong:
            raise TreeError(f"reduce: the gradient of {name!r} {what}; expected a dense tensor of floats. {remedy}.")
    refuse_meta([(name, value)])
    if value.layout is not torch.strided:
        warnings.warn(
            f"reduce: the gradient of {name!r} has the layout {value.layout}. It is made dense, {tuple(shape)}, before "
            "it is reduced. To save the time and the bytes leave the module's sparse=True out.",
            stacklevel=5,
        )
        return value.to_dense()
    return value


def refuse_meta(values: Iterable[tuple[str, torch.Tensor | None]]) -> None:
    """Name a gradient that is on the meta device: some pass for tensors of numbers until they are copied."""
    for name, value in values:
        if value is not None and value.is_meta:
            raise TreeError(
                f"reduce: the gradient of {name!r} is on the meta device and has no numbers. Compute it on the weights "
                "that unshard gave."
            )


def of_tree(layout: Layout, grads: Any) -> dict[str, torch.Tensor]:
    """The gradients of a whole tree by the path that holds the leaf: those of tied leaves are added up. Leaves without
    one are left out."""
    paths, leaves, _ = flatten(grads)
    values = _match(layout.paths, paths, leaves, "reduce(state, grads)")
    shapes = {path: shape for unit in layout.units for path, shape in zip(unit.paths, unit.trains, strict=True)}
    total: dict[str, torch.Tensor] = {}
    for name, source in zip(layout.paths, layout.source, strict=True):
        shape, value = shapes[source], values[name]
        if shape is None or value is None:
            continue
        value = _plain(name, value, shape)
        total[source] = total[source] + value if source in total else value
    return total


def refuse_zeros(grads: Iterable[torch.Tensor | None]) -> None:
    """Refuse inference tensors of zeros where torch.func gives these under `torch.inference_mode`, as in torch 2.11.

    Raises:
        ScheduleError: it does.
    """
    if _inference_gives_zeros() and not any(grad.any() for grad in grads if grad is not None):
        raise ScheduleError(
            f"reduce under torch.inference_mode: torch.func.grad gives zeros there in torch {torch.__version__}, with "
            "no error. Take the step outside of it; for weights without gradients use torch.no_grad."
        )


@cache
def _inference_gives_zeros() -> bool:
    with torch.inference_mode():
        grad: torch.Tensor = torch.func.grad(torch.square)(torch.ones((), device="cpu"))
        return not bool(grad)


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


def in_order(layout: Layout, grads: dict[str, T]) -> dict[str, T]:
    """The same dict if it is in the order of main weights, or lacks a bucket; else one that is."""
    trainable = layout.trainable
    if len(grads) < len(trainable) or list(grads) == list(trainable):
        return grads
    return {name: grads[name] for name in trainable}
