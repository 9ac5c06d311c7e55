"""accumulate: the gradients of a batch from microbatches, one after another; divide: gradients by a tensor.

The second is for losses that are sums over tokens.

Splits: a batch cut into microbatches, as `T.accumulate` asks for it.

    (images, targets), split=(0, list)       images [8, ...]          targets [{...}, ... 8 of them]
    microbatch 0 of 2                        images[:4]               targets[:4]

By default tensors are cut along dim 0, which must be equally long in all of them: then it is the batch. Lists that are
just as long may be lists of samples, whose tensors must not be cut, so they are refused.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from numbers import Real
from typing import Any, TypeVar, overload

import torch

from functional_fsdp import SpecError, State, TreeError, finish_reductions
from functional_fsdp._seams import expect, torch_private
from functional_fsdp.extend import change, shards

from ._modules import map_tensors

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


@torch.no_grad()
def divide(state: State, divisor: float | torch.Tensor) -> State:
    """Divide all gradients, in place, by a number or a tensor [] that is the same on every rank; use the new state.

    Where ranks have different numbers of tokens, a mean over tokens is a sum of sums over their total:

        spec = fsdp.Spec(mesh, average="sum")
        state, loss = forward_backward(state, batch)         # loss_fn adds up over tokens
        state, n = fsdp.psum(state, tokens)                  # how many there are on all ranks
        state = fsdp.step(T.divide(state, n))

    Raises:
        TreeError: a tensor with more than one element. ScheduleError: the state has no gradients.

    Collective: what `finish_reductions` issues.
    """
    if isinstance(divisor, torch.Tensor) and divisor.numel() != 1:
        raise TreeError(f"divide: the divisor has shape {tuple(divisor.shape)}; expected a number or a tensor [].")
    expect("divide(divisor)", divisor, (torch.Tensor, Real), "a number or a tensor []", TreeError)
    state = finish_reductions(state)
    by = divisor.reshape(()).to(state.count.device) if isinstance(divisor, torch.Tensor) else divisor

    def divide_all() -> None:
        tensors = [buffer.local for buffers in shards(state).values() for buffer in buffers]
        if isinstance(by, torch.Tensor):
            torch_private.foreach_div_(tensors, by)
        else:
            torch_private.foreach_div_(tensors, float(by))

    return change(state, "divide()", divide_all, by, keeps_zeros=True)


Aux = TypeVar("Aux")


@overload
def accumulate(
    forward_backward: Callable[..., tuple[State, torch.Tensor]], n: int, *, split: Split | None = None
) -> Callable[..., tuple[State, torch.Tensor]]: ...
@overload
def accumulate(
    forward_backward: Callable[..., tuple[State, tuple[torch.Tensor, Aux]]], n: int, *, split: Split | None = None
) -> Callable[..., tuple[State, tuple[torch.Tensor, list[Aux]]]]: ...
def accumulate(
    forward_backward: Callable[..., tuple[State, Any]], n: int, *, split: Split | None = None
) -> Callable[..., tuple[State, Any]]:
    """The same function on batches that are cut into `n` microbatches.

    Args:
        forward_backward: `f(state, *args, last_microbatch=, scale=, **kwargs) -> state, loss`, as `T.forward_backward`
            makes it: `last_microbatch` says that no microbatch follows, `scale` multiplies the gradients.
        n: how many microbatches.
        split: what is cut, and how. By default every tensor along dim 0, and all must be of the same length there. Else

            a tuple    for each positional argument an int (its tensors are cut along this dim), `list` (a list or tuple
                       of samples: its items are dealt out), or None (as it is to each microbatch); for a part of a
                       batch a dict, list or tuple of these
            a dict     the same by name, for keyword arguments
            a function `split(args, kwargs, n) -> [(args, kwargs), ...]`, n of them

    Returns:
        `f(state, *args, **kwargs) -> state, loss`. What is no tensor goes to each microbatch, as do tensors without
        dims; the loss is the mean; of `(loss, aux)`, aux is a list with one entry each. The gradients are those of the
        mean of the microbatches' losses. With `Spec(average="sum")` the loss is the sum over the microbatches, and the
        gradients are those of the sum: microbatches add up as ranks do.

    Raises:
        TreeError: a tensor that cannot be cut into `n` equal parts, tensors of different lengths, or a list, a tuple or
            an array that is as long as the batch (it may be one of samples), before anything runs. SpecError: a `split`
            of another kind.

    Example:
        >>> forward_backward = T.accumulate(T.forward_backward(model, loss_fn), 4)
        >>> state, loss = forward_backward(state, batch)
        >>> detect = T.accumulate(forward_backward, 4, split=(0, list))  # images, a dict for each
    """
    expect("accumulate(forward_backward)", forward_backward, Callable, "a function, as T.forward_backward(...) gives")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise SpecError(f"accumulate(n={n!r}): expected a number of microbatches of at least 1.")
    if split is not None and not callable(split) and not isinstance(split, tuple | dict):
        raise SpecError(
            f"accumulate(split={split!r}): expected a tuple, as (0, None), with an entry for each argument; a dict by "
            "name of keyword arguments; or a function of (args, kwargs, n)."
        )

    def accumulated(
        state: State, *args: Any, last_microbatch: bool = True, scale: Any = 1.0, **kwargs: Any
    ) -> tuple[State, Any]:
        parts = cut(args, kwargs, n, split)
        share = 1 if state.spec.average == "sum" else n  # what sums and gradients of all microbatches are divided by
        total: Any = None
        auxes = []
        has_aux = False
        for i, (some, more) in enumerate(parts):
            state, out = forward_backward(
                state, *some, last_microbatch=last_microbatch and i == n - 1, scale=scale / share, **more
            )
            has_aux = isinstance(out, tuple)
            loss, aux = out if has_aux else (out, None)
            total = loss if total is None else total + loss
            auxes.append(aux)
        return state, (total / share, auxes) if has_aux else total / share

    return accumulated
