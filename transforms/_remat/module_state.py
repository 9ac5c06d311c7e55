"""Module state: what a call makes of its module's buffers and attributes is made once.

    forward          before ─▶ the module's code ─▶ after
    recomputation    before ─▶ the module's code ─▶ whatever; then they are again what they were when it began

Running statistics, the vectors of a power iteration and counters must not go on twice, and a recomputation must find
them as its forward did: also after a part that is not run again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from functional_fsdp import ScheduleError

from .._drive.watch import version

__all__ = ["ModuleState", "StatePlace", "keeps_state"]

SMALL = 1 << 16  # bytes: a buffer that is always copied
MISSING: Any = object()  # in the place of an attribute that is not there
NOTES = "_remat_changes"  # in each module: names of buffers and attributes that its calls have changed
SEEN = "_remat_seen"  # in a module that recomputes: whether it trained, in calls in which all attributes were looked at

OWN = frozenset({*vars(nn.Module()), NOTES, SEEN})  # attributes that are torch's, or ours

Key = tuple[int, str]


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
        return value.clone() if self.buffer and isinstance(value, torch.Tensor) else _content(value)

    def silent(self, value: Any) -> bool:
        """Whether kernels may write to it without telling, as to running statistics."""
        return self.buffer and self.part.training and isinstance(value, torch.Tensor) and value.is_floating_point()


def _content(value: Any) -> Any:
    """A copy of a container, anything else as it is."""
    return copy.copy(value) if type(value) in (list, dict, set) else value


def _parts(value: Any) -> list[int]:
    """What a container has in it, by identity."""
    if type(value) is dict:
        return [id(x) for pair in value.items() for x in pair]
    return [*map(id, value)] if type(value) in (list, set) else []


class Found(NamedTuple):
    """What was in a place, the version of a tensor, and a copy of a container."""

    place: StatePlace
    value: Any
    version: int = 0
    content: Any = None

    @classmethod
    def now(cls, place: StatePlace) -> Found:
        value = place.get()
        return cls(place, value, version(value) if isinstance(value, torch.Tensor) else 0, _content(value))

    def written(self) -> bool:
        """Whether it is a tensor that was changed in place."""
        return isinstance(self.value, torch.Tensor) and version(self.value) != self.version

    def same(self) -> bool:
        """Whether the same is there now, as far as can be known."""
        now = Found.now(self.place)
        same = now.value is self.value and now.version == self.version and _parts(now.content) == _parts(self.content)
        return same and not self.place.silent(now.value)


def keeps_state(module: nn.Module) -> bool:
    """Whether there is something to look after: buffers, attributes that calls have changed, or nobody knows yet."""
    return _first(module) or any(part._buffers or vars(part).get(NOTES) for part in module.modules())


def _first(module: nn.Module) -> bool:
    return module.training not in vars(module).get(SEEN, ())


def _places(modules: Iterable[nn.Module], every: bool) -> Iterator[StatePlace]:
    """The buffers of modules and those attributes that are known to change, or all."""
    for part in modules:
        held = vars(part)
        for name in part._buffers:
            yield StatePlace(part, part._buffers, name)
        for name in [*held] if every else held.get(NOTES, ()):
            if name not in part._buffers and name not in OWN:
                yield StatePlace(part, held, name)


class ModuleState:
    """The state of one module, for one of its calls.

    Args:
        module: that recomputes.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.first = _first(module)  # then all attributes are looked at
        self.before: list[Found] = []
        self.copies: dict[Key, torch.Tensor] = {}  # of buffers, as the forward found them

    def buffers(self) -> list[torch.Tensor]:
        return [*self.module.buffers()]

    # ---- forward

    def begin(self) -> None:
        """The forward begins: note what is there, and copy buffers that it may change."""
        self.before = self.look()
        for found in self.before:
            value = found.value
            if found.place.buffer and isinstance(value, torch.Tensor) and self._may_change(found):
                self.copies[found.place.key] = value.clone()

    def _may_change(self, found: Found) -> bool:
        known = found.place.name in vars(found.place.part).get(NOTES, ())
        return self.first or known or found.value.nbytes <= SMALL or found.place.silent(found.value)

    def look(self, part: nn.Module | None = None) -> list[Found]:
        """What is in the places of the module, or of a part of it."""
        return [Found.now(place) for place in self._places(part)]

    def changed(self, before: list[Found], part: nn.Module | None = None) -> list[StatePlace]:
        """Places whose content is, or may be, another one than before."""
        known = {found.place.key for found in before}
        new = [place for place in self._places(part) if place.key not in known]
        return [found.place for found in before if not found.same()] + new

    def _places(self, part: nn.Module | None) -> Iterator[StatePlace]:
        return _places((self.module if part is None else part).modules(), self.first)

    def end(self) -> None:
        """The forward is over: note what it changed.

        Raises:
            ScheduleError: it has changed what was not copied.
        """
        found = {one.place.key: one for one in self.before}
        for place in self.changed(self.before):
            vars(place.part).setdefault(NOTES, set()).add(place.name)
            old = found.get(place.key)
            if old is None:
                self.before.append(Found(place, MISSING, content=MISSING))
            elif place.key not in self.copies and old.written():
                raise self._late(old)
        vars(self.module).setdefault(SEEN, set()).add(self.module.training)

    def _late(self, old: Found) -> ScheduleError:
        what = "buffer" if old.place.buffer else "attribute"
        remedy = "Call again: from now on a copy is kept." if old.place.buffer else "Make it a buffer."
        return ScheduleError(
            f"remat: the forward of a {type(self.module).__name__} changed its {what} {old.place.name!r} in place, and "
            f"has no copy of what it was, from which to compute again. {remedy}"
        )

    # ---- recomputation

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Within, all is as the forward found it; afterwards as it is now."""
        now = [found.place.get() for found in self.before]
        for found in self.before:
            kept = self.copies.get(found.place.key)
            if kept is not None:
                found.place.put(kept.clone())
            elif found.written():
                raise self._late(found)
            elif not found.same():
                found.place.put(_content(found.content))
        try:
            yield
        finally:
            for found, value in zip(self.before, now, strict=True):
                found.place.put(value)
