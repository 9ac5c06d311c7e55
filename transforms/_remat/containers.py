"""Containers: what an attribute holds and a forward may change in place, compared and copied down to the leaves.

    [{"seen": 2}, deque([t])]     a list; in it a dict and a deque; leaves are 2 and t

Objects of other classes are leaves: nobody looks into them.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from operator import is_
from typing import Any, NamedTuple

import torch

from .._drive.watch import version

__all__ = ["Contents", "copied", "may_go_on"]

LISTS = frozenset((list, deque))
DICTS = frozenset((dict, OrderedDict, defaultdict, Counter))
KINDS = LISTS | DICTS | {set, tuple}
MOST = 64  # items of a container that is looked at in each call, whether it is known to change or not


class Contents(NamedTuple):
    """What a value is and has in it, by identity, and the versions of tensors."""

    objects: list[Any]
    versions: list[int]

    @classmethod
    def of(cls, value: Any) -> Contents:
        objects = [*_within(value, set())]
        return cls(objects, [version(x) for x in objects if isinstance(x, torch.Tensor)])

    def same(self, other: Contents) -> bool:
        return self._alike(other) and self.versions == other.versions

    def written(self, other: Contents) -> bool:
        """Whether tensors in it are the same, and have been changed in place."""
        return self._alike(other) and self.versions != other.versions

    def _alike(self, other: Contents) -> bool:
        return len(self.objects) == len(other.objects) and all(map(is_, self.objects, other.objects))


def _within(value: Any, seen: set[int]) -> Iterator[Any]:
    yield value
    if type(value) in KINDS and id(value) not in seen:
        seen.add(id(value))
        if type(value) in DICTS:
            for key, x in value.items():
                yield key
                yield from _within(x, seen)
        else:
            for x in value:
                yield from _within(x, seen)


def may_go_on(value: Any) -> bool:
    """Whether it may be changed in place, and is small enough to look at it in each call."""
    return isinstance(value, torch.Tensor) or (type(value) in KINDS and len(value) <= MOST)


def copied(value: Any, made: dict[int, Any] | None = None) -> Any:
    """A copy of a container and of those in it, each once; leaves, and anything else, as they are."""
    made = {} if made is None else made
    if type(value) not in KINDS or id(value) in made:
        return made.get(id(value), value)
    if type(value) is tuple:
        return tuple([copied(x, made) for x in value])
    new = made[id(value)] = copy.copy(value)
    if type(value) in DICTS:
        for key, x in value.items():
            new[key] = copied(x, made)
    elif type(value) in LISTS:
        for i, x in enumerate(value):
            new[i] = copied(x, made)
    return new
