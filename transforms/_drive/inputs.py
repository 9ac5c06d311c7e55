"""Inputs of unit modules: their dtype beside that of the weights.

`Precision(inputs=True)` casts floating inputs to the dtype that the unit module computes in. Without it they are left
alone, and where torch then refuses to compute, the error says which module, which dtypes and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn

from functional_fsdp import FsdpError, SpecError, State

from .._modules.outputs import map_tensors
from .._modules.unit_modules import UnitModule

__all__ = ["cast_inputs", "check_dtypes", "dtypes_of", "precisions", "refuse_buffers", "refuse_dtypes"]

Precisions = dict[str, tuple[torch.dtype, bool]]


def precisions(state: State) -> Precisions:
    """By path, tied ones included: the dtype in which a leaf computes, and whether inputs are cast to it."""
    compute = {leaf.path: b.seen_dtype(leaf) for b in state.layout.buckets.values() for leaf in b.leaves}
    names: dict[str, list[str]] = {}
    for path, source in zip(state.layout.paths, state.layout.source, strict=True):
        names.setdefault(source, [source]).append(path)
    inputs = {source: state.spec.precision_of(*dict.fromkeys(paths)).inputs for source, paths in names.items()}
    return {p: (compute[s], inputs[s]) for p, s in zip(state.layout.paths, state.layout.source, strict=True)}


def dtypes_of(unit_module: UnitModule, precisions: Precisions) -> tuple[tuple[torch.dtype, ...], torch.dtype | None]:
    """The floating dtypes that a unit module computes in, and the one to which its inputs are cast.

    Raises:
        SpecError: they would have to be cast to two.
    """
    found = [precisions[path] for path, _ in unit_module.leaves if precisions[path][0].is_floating_point]
    cast = [*dict.fromkeys(dtype for dtype, inputs in found if inputs)]
    if len(cast) > 1:
        raise SpecError(
            f"Precision(inputs=True): the module {unit_module.path!r} has weights that compute in {cast[0]} and in "
            f"{cast[1]}, so its inputs cannot be cast to both. Say inputs=True in one of the rules only."
        )
    return tuple(dict.fromkeys(dtype for dtype, _ in found)), cast[0] if cast else None


def cast_inputs(args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """The same with floating tensors of the dtype."""

    def cast(t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t

    return map_tensors(cast, args), map_tensors(cast, kwargs)


def refuse_dtypes(error: RuntimeError, given: Iterable[Any], dtypes: tuple[torch.dtype, ...], where: str) -> None:
    """Raise what a RuntimeError means if it comes from inputs of another floating dtype than the weights have."""
    if isinstance(error, FsdpError) or not any(word in str(error) for word in SAID) or not dtypes:
        return
    others: list[torch.dtype] = []

    def look(t: torch.Tensor) -> torch.Tensor:
        if t.is_floating_point() and t.dtype not in dtypes:
            others.append(t.dtype)
        return t

    for one in given:
        map_tensors(look, one)
    if others:
        raise SpecError(
            f"{where} computes in {' and '.join(map(_name, dtypes))} and was given {_name(others[0])}. Cast the batch, "
            f"as x.to({dtypes[0]}); or have the floating inputs of modules cast: Precision(compute={dtypes[0]}, "
            "inputs=True)."
        ) from error


def note_module(error: Exception, path: str, given: Iterable[Any]) -> None:
    """Have an error of a module's own code say in which unit it was raised, and what that was called with.

    The innermost unit is named. Errors of this package say by themselves where they are; Python 3.10 has no notes.
    """
    if isinstance(error, FsdpError) or getattr(error, "__notes__", None) or not hasattr(error, "add_note"):
        return
    tensors: list[str] = []

    def look(t: torch.Tensor) -> torch.Tensor:
        tensors.append(f"{_name(t.dtype)} {[*t.shape]}")
        return t

    for one in given:
        map_tensors(look, one)
    where = f"the module {path!r}" if path else "the model itself"
    error.add_note(f"In {where}, called with {', '.join(tensors) or 'no tensors'}.")


def refuse_buffers(error: RuntimeError, module: nn.Module, dtypes: tuple[torch.dtype, ...], path: str) -> None:
    """Raise what a RuntimeError means if it comes from a buffer of another floating dtype than the weights have.

    Raises:
        SpecError: it does.
    """
    if isinstance(error, FsdpError) or not any(word in str(error) for word in SAID) or not dtypes:
        return
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and buffer.dtype not in dtypes:
            part = ".".join(filter(None, (path, name.rpartition(".")[0], "*")))
            raise SpecError(
                f"the module {path!r} computes in {' and '.join(map(_name, dtypes))} and has the buffer {name!r} in "
                f"{_name(buffer.dtype)}: buffers keep their dtype. Have the leaves that meet it compute in "
                f"{_name(buffer.dtype)}, by a rule before the others: Spec(precision={{{part!r}: Precision(), "
                f"'*': Precision(compute={dtypes[0]})}}), which takes inputs in {_name(buffer.dtype)}; or cast it in "
                f"the forward. torch says: {str(error).splitlines()[0]}"
            ) from error


def check_dtypes(func: Any, args: Any) -> None:
    """Raise torch's RuntimeError for a product of tensors of several dtypes, which fake tensors let pass."""
    if func in PRODUCTS:
        found = [*dict.fromkeys(t.dtype for t in args if isinstance(t, torch.Tensor))]
        if len(found) > 1:
            raise RuntimeError(f"{func}: tensors must have the same dtype, but got {' and '.join(map(_name, found))}")


PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.mv.default,
            torch.ops.aten.addmv.default}  # fmt: skip
SAID = ("dtype", "scalar type", "Input type", "data type")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
