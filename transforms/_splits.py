"""Splits: a batch cut into microbatches, as `T.accumulate` asks for it.

    (images, targets), split=(0, list)       images [8, ...]          targets [{...}, ... 8 of them]
    microbatch 0 of 2                        images[:4]               targets[:4]

By default tensors are cut along dim 0, which must be equally long in all of them: then it is the batch. Lists that are
just as long may be lists of samples, whose tensors must not be cut, so they are refused.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from functional_fsdp import SpecError, TreeError
from functional_fsdp._seams import torch_private

from ._modules.outputs import map_tensors

__all__ = ["Split", "cut"]

pytree = torch_private.pytree

Call = tuple[tuple[Any, ...], dict[str, Any]]
Split = tuple[Any, ...] | dict[str, Any] | Callable[[tuple[Any, ...], dict[str, Any], int], Any]

HELP = (
    "Say what is batch, and what is not: accumulate(..., split=(0, None)), with an entry for each argument (a dim, "
    "list for a list of samples, None for what goes to each microbatch)."
)


def cut(args: tuple[Any, ...], kwargs: dict[str, Any], n: int, split: Split | None) -> list[Call]:
    """The arguments of each microbatch.

    Raises:
        TreeError: what cannot be cut into `n` equal parts, or not without being told how.
        SpecError: a split that does not fit the arguments.
    """
    if callable(split):
        return _called(split, args, kwargs, n)
    if n == 1:
        return [(args, kwargs)]
    said_args = split if isinstance(split, tuple) else None
    said_kwargs = split if isinstance(split, dict) else {}
    if said_args is not None and len(said_args) != len(args):
        raise SpecError(
            f"accumulate: split has {len(said_args)} entries for {len(args)} positional arguments. Give one each (for "
            "keyword arguments a dict by name)."
        )
    for name in said_kwargs:
        if name not in kwargs:
            raise SpecError(f"accumulate: split names {name!r}, which is no keyword argument of this call.")
    default = {} if said_args is not None else {f"argument {i}": value for i, value in enumerate(args)}
    default |= {f"argument {name!r}": value for name, value in kwargs.items() if name not in said_kwargs}
    _one_batch(default)

    def part(i: int) -> Call:
        says = said_args if said_args is not None else (DEFAULT,) * len(args)
        some = tuple(
            _part(value, how, n, i, f"argument {k}") for k, (value, how) in enumerate(zip(args, says, strict=True))
        )
        more = {
            name: _part(value, said_kwargs.get(name, DEFAULT), n, i, f"argument {name!r}")
            for name, value in kwargs.items()
        }
        return some, more

    return [part(i) for i in range(n)]


DEFAULT = 0


def _called(split: Callable[..., Any], args: Any, kwargs: Any, n: int) -> list[Call]:
    parts = [*split(args, kwargs, n)]
    good = all(isinstance(part, tuple | list) and len(part) == 2 and isinstance(part[1], Mapping) for part in parts)
    if len(parts) != n or not good:
        raise SpecError(
            f"accumulate: split(args, kwargs, n) gave {len(parts)} parts{'' if good else ' of another kind'}; expected "
            f"{n}, each (args, kwargs)."
        )
    return [(tuple(some), dict(more)) for some, more in parts]


# ---------------------------------------------------------------- by default


def _one_batch(arguments: dict[str, Any]) -> None:
    """Raise unless the tensors in these arguments have one length, and no list may be a list of samples."""
    lengths: dict[int, str] = {}
    for where, value in arguments.items():
        for path, leaf in _tensors(value, where):
            if leaf.dim():
                lengths.setdefault(leaf.shape[0], f"{path} has shape {tuple(leaf.shape)}")
    if len(lengths) > 1:
        first, second, *_ = lengths.values()
        raise TreeError(f"accumulate: tensors of different lengths along dim 0: {first}, {second}. {HELP}")
    for length in lengths:
        for where, value in arguments.items():
            for path, kind in _sequences(value, where, length):
                raise TreeError(
                    f"accumulate: {path} is a {kind} of {length}, and tensors have {length} rows: it may be one of "
                    f"samples, or what is to be cut as they are. {HELP}"
                )


def _children(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", value[key]) for key in value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f"{path}.{name}", getattr(value, name)) for name in value._fields)
    elif isinstance(value, tuple | list):
        yield from ((f"{path}[{i}]", one) for i, one in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f"{path}.{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value))
    elif not pytree.tree_is_leaf(value):
        yield from ((f"{path}<{i}>", one) for i, one in enumerate(pytree.tree_leaves(value)))


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    else:
        for inner, one in _children(value, path):
            yield from _tensors(one, inner)


def _sequences(value: Any, path: str, length: int) -> Iterator[tuple[str, str]]:
    """Lists, tuples and arrays of this length."""
    listed = isinstance(value, tuple | list) and not hasattr(value, "_fields")
    array = hasattr(value, "__array_interface__") and not isinstance(value, torch.Tensor)  # NumPy's, say
    rows = len(value) if listed else value.shape[0] if array and value.shape else 0
    if rows == length > 1:
        yield path, type(value).__name__
    if not isinstance(value, torch.Tensor):
        for inner, one in _children(value, path):
            yield from _sequences(one, inner, length)


# ---------------------------------------------------------------- one part


def _part(value: Any, how: Any, n: int, i: int, path: str) -> Any:
    """What microbatch `i` gets of a value."""
    if how is None:
        return value
    if how is list:
        if not isinstance(value, list | tuple):
            raise SpecError(f"accumulate: split says list of {path}, which is a {type(value).__name__}.")
        size = _divided(len(value), n, f"{path}, a {type(value).__name__} of {len(value)}")
        return type(value)(value[i * size : (i + 1) * size])
    if isinstance(how, int) and not isinstance(how, bool):
        if isinstance(value, torch.Tensor) or pytree.tree_is_leaf(value):
            return map_tensors(lambda t: _rows(t, how, n, i, path), value)
        leaves, treedef = pytree.tree_flatten(value)
        return treedef.unflatten([_part(leaf, how, n, i, path) for leaf in leaves])
    return _parts(value, how, n, i, path)


def _parts(value: Any, how: Any, n: int, i: int, path: str) -> Any:
    """A container, part by part. What a dict of splits does not name is cut by default."""
    if isinstance(how, Mapping) and isinstance(value, MutableMapping):
        unknown = [key for key in how if key not in value]
        if unknown:
            raise SpecError(f"accumulate: split names {unknown[0]!r}, which {path} does not have.")
        rest = {f"{path}[{key!r}]": one for key, one in value.items() if key not in how}
        _one_batch(rest)
        out = copy.copy(value)
        for key in list(value):
            out[key] = _part(value[key], how.get(key, DEFAULT), n, i, f"{path}[{key!r}]")
        return out
    if isinstance(how, list | tuple) and isinstance(value, list | tuple) and len(how) == len(value):
        pairs = zip(value, how, strict=True)
        items = [_part(one, says, n, i, f"{path}[{k}]") for k, (one, says) in enumerate(pairs)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    raise SpecError(
        f"accumulate: split says {how!r} of {path}, which is a {type(value).__name__}. Give a dim, list, None, or a "
        "container of these with its structure."
    )


def _rows(t: torch.Tensor, dim: int, n: int, i: int, path: str) -> torch.Tensor:
    if not t.dim():
        return t
    if not -t.dim() <= dim < t.dim():
        raise SpecError(f"accumulate: split says dim {dim} of {path}, which has shape {tuple(t.shape)}.")
    size = _divided(t.shape[dim], n, f"a tensor of shape {tuple(t.shape)}, along dim {dim},")
    return t.narrow(dim, i * size, size)


def _divided(length: int, n: int, what: str) -> int:
    if length % n:
        raise TreeError(
            f"accumulate: {what} cannot be cut into {n} equal microbatches. Give {length // n * n or n} rows, or "
            "another n."
        )
    return length // n
