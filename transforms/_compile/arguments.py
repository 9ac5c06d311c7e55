"""Arguments of a driven step: what a program goes by, and what none can go by.

Python runs when a program is made, and not again. So what a step reads of its arguments is a tensor, or is compared by
value before the program is used again. What may change without being another value is refused.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import pathlib
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch

from functional_fsdp import SpecError, State
from functional_fsdp._seams import torch_private
from functional_fsdp.extend import evolve

__all__ = ["StepCall", "flat_state", "is_state", "kind_of", "named", "refuse_mutable", "refuse_sparse", "resolved"]

STRIDED = (torch.strided, torch.jagged)
FIXED = (
    type(None), type(Ellipsis), int, float, complex, str, bytes, range, enum.Enum, type, types.FunctionType,
    types.BuiltinFunctionType, types.ModuleType, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo,
    decimal.Decimal, fractions.Fraction, pathlib.PurePath, re.Pattern, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.finfo, torch.iinfo, torch_private.OpOverload, torch_private.OpOverloadPacket,
)  # fmt: skip


def kind_of(leaf: Any) -> Any:
    """What has to be equal of a leaf."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, leaf.layout
    return type(leaf), leaf


class StepCall:
    """A call of a step.

    Attributes:
        states: those among its arguments, in order.
        leaves: of all of them, as `resolved`.
        structure: of all of them; it keeps no State alive.
    """

    def __init__(self, *arguments: Any) -> None:
        found, structure = torch_private.pytree.tree_flatten(arguments, is_leaf=is_state)
        self.states: list[State] = []
        self.leaves: list[Any] = []
        structures: list[Any] = [structure]
        for leaf in found:
            if isinstance(leaf, State):
                parts, structure = flat_state(leaf)
                self.states.append(leaf)
                self.leaves += parts
                structures += [structure, leaf.local_buffers]
            else:
                self.leaves.append(resolved(leaf))
        self.structure = tuple(structures)


def resolved(leaf: Any) -> Any:
    """A leaf with the values that it stands for: a graph does not see that a tensor is to be read negated or conjugated
    (`z.conj().imag`)."""
    if isinstance(leaf, torch.Tensor) and (leaf.is_neg() or leaf.is_conj()):
        return leaf.resolve_neg().resolve_conj()
    return leaf


def is_state(node: Any) -> bool:
    return isinstance(node, State)


def flat_state(state: State) -> tuple[list[Any], Any]:
    """A State's leaves, and its structure without its version, which would keep its lineage alive."""
    found: tuple[list[Any], Any] = torch_private.pytree.tree_flatten(evolve(state, version=None))
    return found


def named(state: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a call, in order, each with its name."""
    for tree, of in (((state, *args), "(state, *args)"), (kwargs, "the keyword arguments")):
        for path, leaf in torch_private.pytree.tree_flatten_with_path(tree)[0]:
            yield f"{torch_private.pytree.keystr(path)} of {of}", leaf


def refuse_sparse(state: Any, args: Any, kwargs: Any) -> None:
    """Raise a SpecError if a leaf is a tensor without strides."""
    for name, leaf in named(state, args, kwargs):
        if isinstance(leaf, torch.Tensor) and leaf.layout not in STRIDED:
            layout = str(leaf.layout).removeprefix("torch.")
            raise SpecError(
                f"compile: {name} is a tensor of the layout {layout}, which torch does not compile. Give its parts as "
                "tensors, as x.indices() and x.values(), or x.to_dense(); or run this step eagerly."
            )


def refuse_mutable(state: Any, args: Any, kwargs: Any) -> None:
    """Raise a SpecError if a leaf is neither a tensor nor something that never changes."""
    for name, leaf in named(state, args, kwargs):
        if not isinstance(leaf, torch.Tensor) and not _fixed(leaf):
            raise SpecError(
                f"compile: {name} is a {type(leaf).__name__}, whose contents may change. The step's Python runs once, "
                "so a graph would keep what is in it now. Give tensors in tuples, lists or dicts, and numbers or "
                "strings; let the step itself hold what never changes, as a model."
            )


def _fixed(value: Any) -> bool:
    """Whether a value never changes."""
    if isinstance(value, tuple | frozenset):
        return all(map(_fixed, value))
    if isinstance(value, types.MethodType):
        return _fixed(value.__self__)
    if isinstance(value, partial):
        return all(map(_fixed, (value.func, *value.args, *value.keywords.values())))
    if is_dataclass(value) and not isinstance(value, type) and type(value).__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return all(_fixed(getattr(value, field.name)) for field in fields(value))
    numpy: Any = sys.modules.get("numpy")
    return isinstance(value, FIXED) or (numpy is not None and isinstance(value, numpy.generic))
