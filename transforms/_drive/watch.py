"""WriteWatch: weights that a forward changes in place, found at the operation or after the call.

    how they are changed                     seen
    an operation (clamp_, max_norm, out=)    after each call: lent weights share a version counter with their bucket
    through .data                            in a module's first call, and with Schedule(debug=True) in every one
    assignment (self.weight = Parameter())   after each call: something else is in the weight's slot

Gathered weights are borrowed, replicated ones are the state's own: a change would be lost, or stay, by strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn

from functional_fsdp import PackedWeight
from functional_fsdp._seams import changed, spoilt, torch_private

__all__ = ["WriteWatch", "changed", "clear", "place", "spoilt", "version", "written"]


def clear(module: nn.Module, held: dict[str, Any], name: str) -> None:
    """Take away what a module's code put in the place of the parameter that `held` had."""
    for part in module.modules():
        if held is part._parameters:
            for place in (vars(part), part._buffers, part._modules):
                place.pop(name, None)


def version(t: torch.Tensor) -> int:
    """How often a tensor was changed in place, as far as torch counts."""
    return 0 if t.is_inference() else t._version


def place(t: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's bytes begin, also of one that has none, as where a graph is made."""
    t = t.bits if isinstance(t, PackedWeight) else t
    return t.untyped_storage()._cdata, int(t.storage_offset())


class WriteWatch(torch_private.TorchDispatchMode):
    """Refuses operations that write into these weights, before they do. For one call: each operation costs more.

    Args:
        weights: {path: tensor}, contiguous.
        ours: whether the package itself is at work: a unit that is held may be gathered again where it lies.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, weights: Mapping[str, torch.Tensor], ours: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.ours = ours
        self.spans: dict[int, list[tuple[int, int, str]]] = {}
        for path, t in weights.items():
            if t.numel():
                spans = self.spans.setdefault(t.untyped_storage()._cdata, [])
                spans.append((*_bytes(t), path))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in () if self.ours() else written(func, args, kwargs):
            spans = self.spans.get(value.untyped_storage()._cdata)
            if spans:
                start, stop = _bytes(value)
                paths = [path for a, b, path in spans if a < stop and start < b]
                if paths:
                    raise changed(paths, f"in place, by {func}")
        return func(*args, **kwargs)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes to, when it is called with these."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable or schema.name == "aten::set_":  # which writes no bytes
        return []
    found: list[Any] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, list | tuple) else [value]
    return [t for t in found if isinstance(t, torch.Tensor) and t.layout is torch.strided and t.numel()]


def _bytes(t: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage between a tensor's first element and its last."""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    start = int(t.storage_offset())
    return start * t.element_size(), (start + last + 1) * t.element_size()
