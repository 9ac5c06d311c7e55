"""Lists, mappings and dataclasses among a module's arguments, to which its code may write: outputs by layer, a cache.

Tensors in them are found as `map_tensors` finds them. What a container has is its `contents`, by place:

    list         [item, ...]
    mapping      {key: item}
    dataclass    {field: item}
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from functional_fsdp import ScheduleError

from .unit_modules import PLAIN, map_tensors

__all__ = ["as_before", "contents_by_id", "on_copies", "written"]

Contents = dict[Any, Any]  # by index, key or field


def contents(value: Any) -> Contents | None:
    """What a container has, a tuple too; None of anything else."""
    if isinstance(value, PLAIN):
        return None
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, MutableMapping):
        return {key: value[key] for key in list(value.keys())}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return None


def contents_by_id(value: Any) -> dict[int, tuple[Any, Contents]]:
    """The containers in this that can be written to, and what each has now."""
    has = contents(value)
    if has is None:
        return {}
    found = {} if isinstance(value, tuple) else {id(value): (value, has)}
    for item in has.values():
        found |= contents_by_id(item)
    return found


def written(before: Mapping[int, tuple[Any, Contents]]) -> bool:
    """Whether a container has other things than then."""
    return any(not _same(contents(value), had) for value, had in before.values())


def as_before(value: Any, before: Mapping[int, tuple[Any, Contents]]) -> Any:
    """The value with what its containers had then: copies of those that have been written to since."""
    now = contents(value)
    if now is None:
        return value
    had = before[id(value)][1] if id(value) in before else now
    wanted = {key: as_before(item, before) for key, item in had.items()}
    if _same(wanted, now):
        return value
    if isinstance(value, tuple):
        return type(value)(*wanted.values()) if hasattr(value, "_fields") else type(value)(wanted.values())
    made = copy.copy(value)
    _write(made, wanted)
    return made


def on_copies(
    run: Callable[[Any, Any], Any], fn: Callable[[torch.Tensor], torch.Tensor], args: Any, kwargs: Any, refuse: str = ""
) -> Any:
    """`run(args, kwargs)` with `fn` applied to each tensor in the arguments. Containers of such tensors are copies.

    What `run` writes to these is carried over to the caller's own, or is an error that begins with `refuse`.

    Raises:
        ScheduleError: see `refuse`.
    """
    theirs: dict[int, tuple[Any, Any]] = {}  # for what `run` is given, that, and what the caller has

    def made(t: torch.Tensor) -> torch.Tensor:
        new = fn(t)
        if new is not t:
            theirs[id(new)] = new, t
        return new

    given = map_tensors(made, args), map_tensors(made, kwargs)
    copies = [
        (old, new, contents(new)) for old, new in _pairs((args, *kwargs.values()), (given[0], *given[1].values()))
    ]
    out = run(*given)
    theirs.update((id(new), (new, old)) for old, new, _ in copies)

    def own(item: Any) -> Any:
        return theirs[id(item)][1] if id(item) in theirs else map_tensors(own, item) if contents(item) else item

    for old, new, before in copies:
        now = contents(new)
        assert now is not None
        if _same(now, before):
            continue
        if refuse:
            raise ScheduleError(
                f"{refuse} writes to a {type(old).__name__} that it was given, of which it has a copy there. Have it "
                "return what it writes."
            )
        _write(old, {key: own(item) for key, item in now.items()})
    return out


def _pairs(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """Containers, and what `map_tensors` made of them, where that is another one."""
    has = contents(old)
    if new is old or has is None:
        return
    if not isinstance(old, tuple):
        yield old, new
    others = contents(new)
    assert others is not None
    for key, item in has.items():
        yield from _pairs(item, others[key])


def _same(some: Contents | None, others: Contents | None) -> bool:
    return some is not None and others is not None and [*some] == [*others] and all(
        item is others[key] for key, item in some.items()
    )  # fmt: skip


def _write(value: Any, items: Contents) -> None:
    """Have a container have this."""
    if isinstance(value, list):
        value[:] = items.values()
    elif isinstance(value, MutableMapping):
        for key in list(value.keys()):
            if key not in items:
                del value[key]
        for key, item in items.items():
            value[key] = item
    else:
        for name, item in items.items():
            object.__setattr__(value, name, item)
