"""Module state: what a call makes of its module's buffers and attributes is made once.

    forward          before ─▶ the module's code ─▶ after
    recomputation    before ─▶ the module's code ─▶ whatever; then they are again what they were when it began

Running statistics, the vectors of a power iteration and counters must not go on twice, and a recomputation must find
them as its forward did: also after a part that is not run again, and whoever has set them (a module around, say).

    each call    which object each attribute is; what small containers have in them; versions of tensors
    from its first call on, and since it changed once, what a large container has in it

What an attribute holds and a forward may change in place is compared and copied down to the leaves:

    [{"seen": 2}, deque([t])]     a list; in it a dict and a deque; leaves are 2 and t

Objects of other classes are leaves: nobody looks into them.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn

from functional_fsdp import ScheduleError

from .._drive.buffers import version

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


SMALL = 1 << 16  # bytes: a buffer that is always copied
MISSING: Any = object()  # in the place of an attribute that is not there
OWN = frozenset(vars(nn.Module())) - {"training"}  # attributes that are torch's

Key = tuple[int, str]


class Notes:
    """What is known of a module from its calls.

    Attributes:
        changed: names of buffers and attributes that they have changed.
        watched: names of attributes that may be changed in place.
        seen: of one that recomputes, whether it trained, in calls in which all attributes were looked into.
    """

    def __init__(self) -> None:
        self.changed: set[str] = set()
        self.watched: set[str] = set()
        self.seen: set[bool] = set()


_NOTES: WeakKeyDictionary[nn.Module, Notes] = WeakKeyDictionary()


def notes_of(module: nn.Module) -> Notes:
    notes = _NOTES.get(module)
    if notes is None:
        notes = _NOTES[module] = Notes()
    return notes


class StatePlace(NamedTuple):
    """Where a buffer or an attribute is held."""

    part: nn.Module
    held: dict[str, Any]
    name: str

    @property
    def buffer(self) -> bool:
        return self.held is self.part._buffers

    @property
    def key(self) -> Key:
        return id(self.held), self.name

    def get(self) -> Any:
        return self.held.get(self.name, MISSING)

    def put(self, value: Any) -> None:
        if value is MISSING:
            self.held.pop(self.name, None)
        else:
            self.held[self.name] = value

    def copy(self) -> Any:
        """What is there, to be put there again: of a buffer or a container a copy, since it may go on."""
        value = self.get()
        return value.clone() if self.buffer and isinstance(value, torch.Tensor) else copied(value)

    def silent(self, value: Any) -> bool:
        """Whether kernels may write to it without telling, as to running statistics."""
        return self.buffer and self.part.training and isinstance(value, torch.Tensor) and value.is_floating_point()


class Found(NamedTuple):
    """What was in a place, what it had in it, and a copy of a container."""

    place: StatePlace
    value: Any
    contents: Contents
    content: Any

    @classmethod
    def of(cls, place: StatePlace, value: Any) -> Found:
        return cls(place, value, Contents.of(value), copied(value))

    def written(self) -> bool:
        """Whether a tensor was changed in place: it, or one in it."""
        return self.contents.written(Contents.of(self.value))

    def same(self) -> bool:
        """Whether the same is there now, as far as can be known."""
        now = self.place.get()
        return self.contents.same(Contents.of(now)) and not self.place.silent(now)


class Look:
    """What modules have in their buffers and attributes now.

    Args:
        every: look into all attributes, not only into those that are known to change or may be changed in place.
    """

    def __init__(self, modules: Sequence[nn.Module], every: bool) -> None:
        self.modules = modules
        self.held = [vars(part).copy() for part in modules]
        self.found = [Found.of(place, place.get()) for place in _places(modules, every)]

    def others(self) -> list[Found]:
        """What was in attributes that nobody looked into, and where something else is now."""
        known = {found.place.key for found in self.found}
        others = []
        for part, then in zip(self.modules, self.held, strict=True):
            now = vars(part)
            if len(now) != len(then) or not all(map(is_, now.values(), then.values())):
                for name in {**then, **now}.keys() - OWN:
                    place = StatePlace(part, now, name)
                    if place.key not in known and place.get() is not then.get(name, MISSING):
                        others.append(Found.of(place, then.get(name, MISSING)))
        return others

    def changed(self) -> list[Found]:
        """What was in places whose content is, or may be, another one now."""
        return [found for found in self.found if not found.same()] + self.others()


def _places(modules: Sequence[nn.Module], every: bool) -> Iterator[StatePlace]:
    """The buffers of modules, and attributes to look into."""
    for part in modules:
        held, notes = vars(part), notes_of(part)
        for name in part._buffers.keys():  # noqa: SIM118 (what a script module has is no dict)
            yield StatePlace(part, part._buffers, name)
        if every:
            notes.watched = {name for name in held.keys() - OWN if may_go_on(held[name])}
        for name in held.keys() - OWN if every else notes.changed | notes.watched:
            if name not in part._buffers:
                yield StatePlace(part, held, name)


class ModuleState:
    """The state of one module, for one of its calls.

    Args:
        module: that recomputes.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.first = module.training not in notes_of(module).seen  # then all attributes are looked into
        self.before: Look = Look((), False)
        self.copies: dict[Key, torch.Tensor] = {}  # of buffers, as the forward found them

    def buffers(self) -> list[torch.Tensor]:
        return [*self.module.buffers()]

    # ---- forward

    def begin(self) -> None:
        """The forward begins: note what is there, and copy buffers that it may change."""
        self.before = self.look()
        for found in self.before.found:
            value = found.value
            if found.place.buffer and isinstance(value, torch.Tensor) and self._may_change(found):
                self.copies[found.place.key] = value.clone()

    def _may_change(self, found: Found) -> bool:
        known = found.place.name in notes_of(found.place.part).changed
        return self.first or known or found.value.nbytes <= SMALL or found.place.silent(found.value)

    def look(self, part: nn.Module | None = None) -> Look:
        """What is in the places of the module, or of a part of it."""
        return Look([*(self.module if part is None else part).modules()], self.first)

    def end(self) -> None:
        """The forward is over: note what it changed.

        Raises:
            ScheduleError: it has changed what was not copied.
        """
        self._note()
        notes_of(self.module).seen.add(self.module.training)

    def _note(self) -> None:
        """From now on look into what has changed."""
        others = self.before.others()
        for old in [found for found in self.before.found if not found.same()] + others:
            notes_of(old.place.part).changed.add(old.place.name)
            if old.place.key not in self.copies and old.written():
                raise self._late(old)
        self.before.found += others

    def _late(self, old: Found) -> ScheduleError:
        what = "buffer" if old.place.buffer else "attribute"
        remedy = "Call again: from now on a copy is kept." if old.place.buffer else "Make it a buffer."
        return ScheduleError(
            f"remat: the forward of a {type(self.module).__name__} changed its {what} {old.place.name!r} in place, and "
            f"has no copy of what it was, from which to compute again. {remedy}"
        )

    # ---- recomputation

    @contextmanager
    def resumed(self, given: Callable[[Any], Any] = lambda value: value) -> Iterator[None]:
        """Within, all is as the forward found it; afterwards as it is now.

        Args:
            given: gives what the recomputation has in the place of an argument, which an attribute may be, too.
        """
        self.before.found += self.before.others()  # others than the forward have changed them
        now = [found.place.get() for found in self.before.found]
        for found in self.before.found:
            kept = self.copies.get(found.place.key)
            if kept is not None:
                found.place.put(kept.clone())
            elif given(found.value) is not found.value:
                found.place.put(given(found.value))
            elif found.written():
                raise self._late(found)
            elif not found.same():
                found.place.put(copied(found.content))
        try:
            yield
        finally:
            for found, value in zip(self.before.found, now, strict=True):
                found.place.put(value)
