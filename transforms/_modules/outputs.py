"""Tensors in whatever a module may return: nested containers, named tuples, dataclasses, dict-like outputs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

__all__ = ["each_leaf", "map_tensors"]


PLAIN = (torch.Tensor, str, int, float, type(None))


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The value with `fn` applied to each tensor in it; the value itself where nothing changes.

    It looks into tuples, named tuples, lists, mappings and dataclasses; other objects (caches) stay what they are.
    Nothing is changed in place.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, tuple | list):
        items = [map_tensors(fn, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        changed = {}
        for key in list(value.keys()):
            old = value[key]
            new = map_tensors(fn, old)
            if new is not old:
                changed[key] = new
        if not changed:
            return value
        out = copy.copy(value)
        for key, new in changed.items():
            out[key] = new
        return out
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        before = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        after = {name: map_tensors(fn, old) for name, old in before.items()}
        if all(after[name] is before[name] for name in before):
            return value
        other: Any = copy.copy(value)
        for name, new in after.items():
            object.__setattr__(other, name, new)
        return other
    return value


def each_leaf(value: Any) -> Iterator[Any]:
    """What lies in the containers into which `map_tensors` looks, tensors and others."""
    if isinstance(value, PLAIN):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from each_leaf(item)
    elif isinstance(value, MutableMapping):
        for key in list(value.keys()):
            yield from each_leaf(value[key])
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from each_leaf(getattr(value, field.name, None))
    else:
        yield value
