"""Settings: what a model's modules say of themselves, beside the copy that a transform made of it.

The copy follows training and evaluation mode. Other settings (a dropout rate, a flag of a configuration, a hook, a
module in another's place, a tensor, an array) are the copy's own: one that is changed on the model later would be
ignored without a word, so it is refused. Looked at once a step, wherever they are: in attributes, containers, and
objects in these. Objects that are made anew are looked into, too: what counts is what they hold.

Persistent buffers are the state's. Others that are replaced are caches, most likely; a change in place is refused.
"""

from __future__ import annotations

import enum
import random
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from numbers import Number
from operator import attrgetter, itemgetter
from types import FunctionType, MappingProxyType
from typing import Any, cast

import torch
import torch.nn as nn

from functional_fsdp import SpecError
from functional_fsdp._seams import objects
from functional_fsdp.extend import Placeholder

from .buffers import version

PLAIN = (Number, str, bytes, range, enum.Enum, torch.dtype, torch.device, FunctionType, objects.Cache, type)
TABLES = ("_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TORCHS = frozenset(vars(nn.Module()))  # attributes of every module
OTHERS = (torch.Tensor, nn.Module, random.Random)  # what is no setting, or is looked at in other ways
CHUNK = 1 << 16  # bytes of an array that are looked at in a step
MOST = 10_000  # objects that are looked into


class Noted:
    """A module, or an object that one holds: the settings in it when it was noted. It is not kept alive.

    Args:
        within: where the object is found again: in the part of this number, by this name. A module is referred to.
        kept: ids of tensors that are the state's.
    """

    def __init__(self, path: str, owner: Any, within: tuple[int, str], kept: set[int]) -> None:
        self.path, self.within = path, within
        self.module = isinstance(owner, nn.Module)
        self.ref = weakref.ref(owner) if self.module else None
        self.kind = type(owner)
        held = self.held(owner)
        self.names = [
            name for name, value in held.items() if _plain(value) and not (self.module and name == "training")
        ]
        self.get: Callable[[Any], Any] = itemgetter(*self.names) if self.names else lambda held: None
        self.noted = _copied(self.get(held))
        self.size = len(held)
        self.known = {*held}
        self.tensors = {name: (weakref.ref(t), version(t)) for name, t in self._tensors(owner, kept)}
        self.parts = {name: weakref.ref(m) for name, m in held.items() if _is_a(m, nn.Module)}
        self.tables = self._tables(held) if self.module else ()

    def held(self, owner: Any) -> dict[str, Any]:
        """What is in it, by the name that follows its path."""
        return vars(owner) if self.module else dict(objects.parts(owner))

    def _tensors(self, owner: Any, kept: set[int]) -> list[tuple[str, torch.Tensor]]:
        """Tensors in attributes, and buffers that are not persistent."""
        buffers = {name: owner._buffers[name] for name in owner._non_persistent_buffers_set} if self.module else {}
        every = (*self.held(owner).items(), *buffers.items())
        return [
            (name, t) for name, t in every
            if _is_a(t, torch.Tensor) and not isinstance(t, Placeholder) and id(t) not in kept
        ]  # fmt: skip

    def _tables(self, held: dict[str, Any]) -> Any:
        return [tuple(held[name].values()) for name in TABLES] if any(map(held.get, TABLES)) else ()

    def changed(self, owner: Any, held: dict[str, Any]) -> str:
        """What is other than noted; "" if nothing is."""
        if type(owner) is not self.kind and not self.module:
            return f"{self.path!r} was a {self.kind.__name__} and is a {type(owner).__name__}"
        try:
            same = bool(self.get(held) == self.noted)
        except (KeyError, ValueError):
            same = False
        if not same:
            before = self.noted if len(self.names) > 1 else (self.noted,)
            for name, old in zip(self.names, cast(tuple[Any, ...], before), strict=True):
                if name not in held or not _equal(held[name], old):
                    return f"{self._at(name)} was {old!r} and is {held.get(name)!r}"
        if len(held) != self.size:
            for name, value in held.items():
                if name not in self.known and _plain(value) and not _private(self.path) and not _private(name):
                    return f"{self._at(name)} is new"
            self.size, self.known = len(held), {*held}
        for name, (ref, then) in self.tensors.items():
            cache = self.module and name in owner._buffers
            t = (owner._buffers if cache else held).get(name)
            if t is ref() and t is not None:
                if version(t) != then:
                    return f"the tensor {self._at(name)} was changed in place"
            elif not cache:
                return f"{self._at(name)} is another tensor"
        for name, part in self.parts.items():
            if held.get(name) is not part():
                return f"{self._at(name)} is another module"
        if self.module and self._tables(held) != self.tables:
            return f"the modules or hooks of {self.path!r}" if self.path else "its modules or hooks"
        return ""

    def _at(self, name: str) -> str:
        return repr(f"{self.path}.{name}" if self.module and self.path else f"{self.path}{name}")


class Array:
    """Numbers in memory: an array of numpy's or of Python's. Of a large one a part is looked at in each step."""

    def __init__(self, path: str, owner: Any, within: tuple[int, str]) -> None:
        self.path, self.within, self.module = path, within, False
        self.form = self._form(owner)
        self.hashes = [hash(x) for x in _chunks(memoryview(owner))]
        self.next = 0

    def _form(self, owner: Any) -> Any:
        view = memoryview(owner)
        return type(owner), view.format, view.shape, view.contiguous

    def turned(self, owner: Any) -> bool:
        """Whether the next part of it has changed."""
        changed = [hash(x) for x in _chunks(memoryview(owner), self.next)] != self.hashes[self.next : self.next + 1]
        self.next = self.next if changed else (self.next + 1) % len(self.hashes)
        return changed

    def held(self, owner: Any) -> dict[str, Any]:
        return {}

    def changed(self, owner: Any, held: Any) -> str:
        with suppress(TypeError):
            if self._form(owner) == self.form and [hash(x) for x in _chunks(memoryview(owner))] == self.hashes:
                return ""
        return f"the array {self.path!r} was changed"


class Settings:
    """The settings of a model when it was copied.

    Args:
        verb: the transform, for errors.
        model: the user's; copied: the transform's own.
        modes: whether the copy follows training and evaluation mode.
    """

    def __init__(self, verb: str, model: nn.Module, copied: nn.Module, modes: bool = True) -> None:
        self.verb = verb
        self.modes = modes
        self.copies = [*copied.modules()]
        self.training = [part.training for part in model.modules()]
        self.every: list[Noted | Array] = []
        owners = self._note(model)
        self.dicts: list[dict[Any, Any]] = []
        self.empty: list[dict[str, Any]] = []
        self.containers: list[Iterable[Any]] = []
        self.slots: list[Callable[[], Any]] = []
        self.tensors: list[torch.Tensor] = []
        self.arrays: list[tuple[Array, Any]] = []
        if all(type(p) is Placeholder for p in model.parameters()):  # else weights would be kept alive
            for part, owner in zip(self.every, owners, strict=True):
                if isinstance(part, Array):
                    self.arrays.append((part, owner))
                    continue
                self._watch(owner)
                for value in part.held(owner).values():
                    self.containers += _changeable(value)
                self.tensors += [t for ref, _ in part.tensors.values() if (t := ref()) is not None]
                if part.module:
                    tables = [vars(owner)[name] for name in TABLES]
                    self.dicts += [table for table in tables if table and isinstance(table, dict)]
                    self.slots += [t.values for t in tables if not isinstance(t, dict)]  # a script module's parts
                    self.empty += [table for table in tables if not table]
        self.before = self._values()

    def _note(self, model: nn.Module) -> list[Any]:
        """Find modules, and all objects that they hold, each once. Returns them."""
        named = [*model.named_modules()]
        seen = {id(part): part for _, part in named}
        kept = {id(t) for t in (*model.parameters(), *model.buffers())}
        kept -= {id(part._buffers[name]) for _, part in named for name in part._non_persistent_buffers_set}
        left = deque((path, part, (-1, "")) for path, part in named)
        owners = []
        while left:
            path, owner, within = left.popleft()
            if (found := _array(path, owner, within)) is not None:
                self.every.append(found)
                owners.append(owner)
                continue
            noted = Noted(path, owner, within, kept)
            self.every.append(noted)
            owners.append(owner)
            for name, value in noted.held(owner).items():
                if id(value) in seen or _plain(value) or (noted.module and (name in TORCHS or _marks(value))):
                    continue
                seen[id(value)] = value
                if not _skipped(value):
                    inner = f"{path}.{name}" if noted.module and path else f"{path}{name}"
                    left.append((inner, value, (len(owners) - 1, name)))
            if len(owners) > MOST + len(named):
                warnings.warn(
                    f"{self.verb}: the model holds more than {MOST} objects that are no modules, as {path!r}. From "
                    "there on changes in them are not seen, and the transform's copy goes on with what it has. Keep "
                    "data sets and the like outside of the model.",
                    stacklevel=4,
                )
                break
        return owners

    def _watch(self, owner: Any) -> None:
        """Have all that is in an object compared by identity in each step."""
        if isinstance(owner, dict):
            self.dicts.append(owner)
        elif isinstance(owner, list | deque | set | frozenset | tuple):
            self.containers.append(owner)
        if isinstance(held := getattr(owner, "__dict__", None), dict):
            self.dicts.append(held)
        names = [*objects.slots_in(owner)]
        if names:
            get = attrgetter(*names)
            self.slots.append(lambda: get(owner) if len(names) > 1 else (get(owner),))
        if objects.is_array(owner) or isinstance(owner, MappingProxyType):
            self.slots.append(lambda: [value for _, value in objects.parts(owner)])

    def _values(self) -> list[Any]:
        """All values, of settings or not, and the versions of tensors: compared by identity, in C, they say in a moment
        that nothing changed."""
        values = [*chain.from_iterable(map(dict.values, self.dicts)), *chain.from_iterable(self.containers)]
        for slots in self.slots:
            values += slots()
        return [*values, *map(version, self.tensors)]

    def follow(self) -> None:
        """Take over the model's modes.

        Raises:
            SpecError: another setting was changed.
        """
        if self.dicts:
            with suppress(Exception):  # tensors were compared
                same = not any(self.empty) and self._values() == self.before
                if same and not any(array.turned(owner) for array, owner in self.arrays):
                    return
        self._look()
        self.before = self._values()

    def _look(self) -> None:
        now = []
        held: list[dict[str, Any]] = []
        for part in self.every:
            if isinstance(part, Noted) and part.ref is not None:
                owner = part.ref()
                if owner is None:  # the model is gone, and nobody can change it any more
                    return
            else:
                number, name = part.within
                owner = held[number].get(name)
            held.append(part.held(owner))
            said = part.changed(owner, held[-1])
            if said:
                raise SpecError(
                    f"{self.verb}: the model was changed after the transform was made of it, which has a copy: {said}. "
                    "Make the transform again, after the change (a model that is changed by running it needs a copy "
                    "for that: copy.deepcopy(model))."
                )
            if isinstance(owner, nn.Module) and part.module:
                now.append(owner.training)
        if now == self.training or not self.modes:
            return
        for mine, new, old in zip(self.copies, now, self.training, strict=True):
            if new is not old:
                mine.training = new
        self.training = now


def _is_a(value: Any, kind: type) -> bool:
    """Whether a value is of a class itself; a proxy says that it is, too."""
    return isinstance(value, kind) and type(value) not in objects.PROXIES


def _plain(value: Any) -> bool:
    """Whether a value is compared as a whole."""
    if isinstance(value, tuple | list | set | frozenset):
        return type(value) in (tuple, list, set, frozenset) and len(value) < 100 and all(map(_plain, value))
    return value is None or isinstance(value, PLAIN)


def _private(name: str) -> bool:
    """Whether a name, or a part of a path, begins with an underscore: there caches may grow."""
    return name.lstrip(".['")[:1] == "_" or "._" in name


def _changeable(value: Any) -> Iterator[Any]:
    """The lists and sets in a plain value."""
    if isinstance(value, list | set):
        yield value
    if isinstance(value, list | tuple) and _plain(value):
        for x in value:
            yield from _changeable(x)


def _copied(value: Any) -> Any:
    """A plain value that nobody changes."""
    if type(value) is list or type(value) is tuple:
        return type(value)(map(_copied, value))
    return {*value} if type(value) is set else value


def _equal(new: Any, old: Any) -> bool:
    try:
        return type(new) is type(old) and bool(new == old)
    except ValueError:
        return False


def _skipped(value: Any) -> bool:
    """Whether an object holds no settings: tensors are looked at apart, nobody can look into a lock or a file, and what
    torch.compile leaves in a module notes its own progress."""
    if isinstance(value, OTHERS) or objects.is_weak(value) or isinstance(value, objects.ATOMS):
        return True
    return objects.is_opaque(value) or type(value).__module__.startswith("torch._dynamo.")


def _marks(value: Any) -> bool:
    """Whether a value is what a transform of this package left in a module."""
    return type(value).__module__.partition(".")[0] == "functional_fsdp"


def _array(path: str, value: Any, within: tuple[int, str]) -> Array | None:
    return None if isinstance(value, nn.Module) or objects.buffer_of(value) is None else Array(path, value, within)


def _chunks(view: memoryview, number: int | None = None) -> Iterable[bytes]:
    """The bytes of an array in pieces; or one of them."""
    if not view.c_contiguous or not view.nbytes:
        return [view.tobytes()]
    flat = view.cast("B")
    starts = range(0, view.nbytes, CHUNK) if number is None else [CHUNK * number]
    return (bytes(flat[start : start + CHUNK]) for start in starts)
