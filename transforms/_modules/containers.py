"""Lists, mappings and dataclasses among a module's arguments, to which its code may write: outputs by layer, a cache.

Tensors in them are found as `map_tensors` finds them. What a container has is its `contents`, by place:

    list         [item, ...]
    mapping      {key: item}
    dataclass    {field: item}
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

import torch

from .unit_modules import PLAIN

__all__ = ["Remake", "contents_by_id", "on_copies", "written"]

Contents = dict[Any, Any]  # by index, key or field
Before = Mapping[int, tuple[Any, Contents]]  # by id: a container, and what it had then


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


def contents_by_id(*values: Any) -> dict[int, tuple[Any, Contents]]:
    """The containers in these that can be written to, and what each has now."""
    found: dict[int, tuple[Any, Contents]] = {}
    left = [*values]
    while left:
        value = left.pop()
        if id(value) not in found and (has := contents(value)) is not None:
            if not isinstance(value, tuple):
                found[id(value)] = value, has
            left += has.values()
    return found


def written(before: Before) -> set[int]:
    """The ids of containers that have other things than then."""
    return {key for key, (value, had) in before.items() if not _same(contents(value), had)}


class Remake:
    """Makes values with other things in their containers. What is there twice is made once.

    Args:
        new: what comes in the place of something that is no container.
        before: what containers are to have: what they had then.
        anew: the ids of containers of which copies are made in any case; of others where something in them is other.
    """

    def __init__(
        self, new: Callable[[Any], Any] = lambda item: item, before: Before | None = None, anew: Collection[int] = ()
    ) -> None:
        self.new, self.before, self.anew = new, before or {}, anew
        self.made: dict[int, tuple[Any, Any]] = {}  # by id: what was given, and what was made of it

    def __call__(self, value: Any) -> Any:
        """What is made of this."""
        if isinstance(value, PLAIN) and not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self.made:
            has = contents(value)
            self.made[id(value)] = value, self.new(value) if has is None else self._container(value, has)
        return self.made[id(value)][1]

    def of(self, value: Any) -> Any:
        """What was made of this, if it was; else it itself."""
        return self.made.get(id(value), (value, value))[1]

    def _container(self, value: Any, has: Contents) -> Any:
        _, had = self.before.get(id(value), (value, has))
        wanted = {key: self(item) for key, item in had.items()}
        if id(value) not in self.anew and _same(wanted, has):
            return value
        if isinstance(value, tuple):
            return type(value)(*wanted.values()) if hasattr(value, "_fields") else type(value)(wanted.values())
        made = copy.copy(value)
        _write(made, wanted)
        return made


def on_copies(
    run: Callable[[Any, Any], Any], fn: Callable[[torch.Tensor], torch.Tensor], args: Any, kwargs: Any
) -> Any:
    """`run(args, kwargs)` with `fn` applied to each tensor in these. Containers of such tensors are copies, and what
    `run` writes to them is carried over to the caller's own."""
    copies = Remake(lambda item: fn(item) if isinstance(item, torch.Tensor) else item)
    given = [copies(item) for item in args], {key: copies(item) for key, item in kwargs.items()}
    made = [*copies.made.values()]
    before = {id(new): (new, has) for old, new in made if new is not old and (has := contents(new)) is not None}
    out = run(*given)
    if before:
        own = Remake()
        own.made.update({id(new): (new, old) for old, new in made})
        for key in written(before):
            new, old = own.made[key]
            _write(old, {place: own(item) for place, item in (contents(new) or {}).items()})
    return out


def _same(some: Contents | None, others: Contents | None) -> bool:
    return some is not None and others is not None and [*some] == [*others] and all(
        item is others[key] or (isinstance(item, PLAIN[1:]) and (type(item), item) == (type(others[key]), others[key]))
        for key, item in some.items()
    )  # fmt: skip


def _write(value: Any, items: Contents) -> None:
    """Have a container have this, in this order."""
    if isinstance(value, list):
        value[:] = items.values()
        return
    now = contents(value) or {}
    if not isinstance(value, MutableMapping):
        for name, item in items.items():
            if item is not now[name]:
                object.__setattr__(value, name, item)
        return
    if [*now] != [*items][: len(now)]:  # it has others, or in another order
        value.clear()
        fields = getattr(value, "__dataclass_fields__", {})  # of transformers: a key that is not there is None
        for name in (now.keys() - items.keys()) & fields.keys():
            setattr(value, name, None)
        now = {}
    for key, item in items.items():
        if key not in now or now[key] is not item:
            value[key] = item
