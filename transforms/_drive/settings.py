"""Settings: what a model's modules say of themselves, beside the copy that a transform made of it.

The copy follows training and evaluation mode. Other settings (a dropout rate, a flag of a configuration, a hook, a
module in another's place, a tensor) are the copy's own: one that is changed on the model later would be ignored without
a word, so it is refused. Looked at once a step.

Persistent buffers are the state's. Others that are replaced are caches, most likely; a change in place is refused.
"""

from __future__ import annotations

import copy
import enum
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import itemgetter
from types import FunctionType, MethodType
from typing import Any, cast

import torch
import torch.nn as nn

from functional_fsdp import SpecError
from functional_fsdp.extend import Placeholder

from .watch import version

__all__ = ["Settings"]

PLAIN = (bool, int, float, complex, str, enum.Enum, torch.dtype, torch.device, FunctionType, MethodType, partial, type)
TABLES = ("_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
DEPTH = 3  # how far into objects that modules hold, as configurations


class Noted:
    """A module, or an object that one holds: the settings in it when it was noted. It is not kept alive."""

    def __init__(self, path: str, owner: Any) -> None:
        self.path = path
        self.owner = weakref.ref(owner) if not isinstance(owner, dict) else partial(_itself, owner)
        self.module = isinstance(owner, nn.Module)
        held = self.held(owner)
        self.names = [name for name, value in held.items() if name != "training" and _plain(value)]
        self.get: Callable[[Any], Any] = itemgetter(*self.names) if self.names else len
        self.noted = (
            copy.deepcopy(self.get(held))
            if any(isinstance(held[n], list | set) for n in self.names)
            else self.get(held)
        )
        self.size = len(held)
        self.known = {*held}
        self.tensors = {name: (weakref.ref(t), version(t)) for name, t in self._tensors(owner)}
        self.tables = self._tables(held) if self.module else ()

    def held(self, owner: Any) -> dict[str, Any]:
        found: dict[str, Any] = owner if isinstance(owner, dict) else vars(owner)
        return found

    def _tensors(self, owner: Any) -> list[tuple[str, torch.Tensor]]:
        """Tensors in attributes, and buffers that are not persistent."""
        buffers = {name: owner._buffers[name] for name in owner._non_persistent_buffers_set} if self.module else {}
        every = (*self.held(owner).items(), *buffers.items())
        return [(name, t) for name, t in every if isinstance(t, torch.Tensor) and not isinstance(t, Placeholder)]

    def _tables(self, held: dict[str, Any]) -> Any:
        return [*map(tuple, map(dict.values, itemgetter(*TABLES)(held)))] if any(map(held.get, TABLES)) else ()

    def changed(self, owner: Any) -> str:
        """What is other than noted; "" if nothing is."""
        held = self.held(owner)
        try:
            same = self.get(held) == self.noted
        except KeyError:
            same = False
        if not same:
            before = self.noted if len(self.names) > 1 else (self.noted,)
            for name, old in zip(self.names, cast(tuple[Any, ...], before), strict=True):
                if name not in held or held[name] != old:
                    return f"{self._at(name)} was {old!r} and is {held.get(name)!r}"
        if len(held) != self.size:
            for name, value in held.items():
                if name not in self.known and not name.startswith("_") and _plain(value):
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
        if self.module and self._tables(held) != self.tables:
            return f"the modules or hooks of {self.path!r}" if self.path else "its modules or hooks"
        return ""

    def _at(self, name: str) -> str:
        return repr(f"{self.path}.{name}" if self.path else name)


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
        named = [*model.named_modules()]
        self.modules = [Noted(path, part) for path, part in named]
        self.others = [*_others(named)]
        self.dicts: list[dict[str, Any]] = []
        self.empty: list[dict[str, Any]] = []
        self.containers: list[Iterable[Any]] = []
        self.tensors: list[torch.Tensor] = []
        if all(type(p) is Placeholder for p in model.parameters()):  # else weights would be kept alive
            every = (*self.modules, *self.others)
            own = [part.held(part.owner()) for part in every]
            tables = [d[name] for d in own[: len(named)] for name in TABLES]
            self.dicts, self.empty = [*own, *filter(None, tables)], [table for table in tables if not table]
            self.containers = [value for d in own for value in d.values() if type(value) in (list, set)]
            self.tensors = [t for part in every for ref, _ in part.tensors.values() if (t := ref()) is not None]
        self.before = self._values()

    def _values(self) -> list[Any]:
        """All values, of settings or not, and the versions of tensors: compared by identity, in C, they say in a moment
        that nothing changed."""
        values = [*chain.from_iterable(map(dict.values, self.dicts)), *chain.from_iterable(self.containers)]
        return [*values, *map(version, self.tensors)]

    def follow(self) -> None:
        """Take over the model's modes.

        Raises:
            SpecError: another setting was changed.
        """
        if self.dicts:
            with suppress(Exception):  # tensors were compared
                if not any(self.empty) and self._values() == self.before:
                    return
        self._look()
        self.before = self._values()

    def _look(self) -> None:
        now = []
        for part in (*self.modules, *self.others):
            owner = part.owner()
            if owner is None:  # the model is gone, and nobody can change it any more
                return
            said = part.changed(owner)
            if said:
                raise SpecError(
                    f"{self.verb}: the model was changed after the transform was made of it, which has a copy: {said}. "
                    "Make the transform again, after the change (a model that is changed by running it needs a copy "
                    "for that: copy.deepcopy(model))."
                )
            if part.module:
                now.append(owner.training)
        if now == self.training or not self.modes:
            return
        for mine, new, old in zip(self.copies, now, self.training, strict=True):
            if new is not old:
                mine.training = new
        self.training = now


def _itself(owner: Any) -> Any:
    return owner


def _plain(value: Any) -> bool:
    if isinstance(value, tuple | list | set | frozenset):
        return len(value) < 100 and all(map(_plain, value))
    return value is None or isinstance(value, PLAIN)


def _others(named: list[tuple[str, nn.Module]]) -> Iterator[Noted]:
    """Objects and dicts in attributes, each once."""
    seen: set[int] = set()
    left = [(path, part, 0) for path, part in named]
    while left:
        path, owner, depth = left.pop(0)
        for name, value in (owner if isinstance(owner, dict) else vars(owner)).items():
            if id(value) in seen or isinstance(value, (nn.Module, torch.Tensor, *PLAIN)) or not isinstance(name, str):
                continue
            if isinstance(owner, nn.Module) and name.startswith("_"):
                continue
            inner = f"{path}.{name}" if path else name
            kept = type(value) is dict and all(map(_plain, value.values()))
            if kept or (hasattr(value, "__dict__") and hasattr(value, "__weakref__")):
                seen.add(id(value))
                yield Noted(inner, value)
                if depth < DEPTH:
                    left.append((inner, value, depth + 1))
