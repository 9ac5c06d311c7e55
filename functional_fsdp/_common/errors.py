"""The errors a user can meet. Each text says what was given, where, what was expected, and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterable
from numbers import Number
from pathlib import Path
from typing import Any, TypeVar


class FsdpError(Exception):
    """Base of every error that this package raises on purpose."""


class SpecError(FsdpError, ValueError):
    """A spec, placement, precision or unit rule that cannot be honoured."""


class TreeError(FsdpError, ValueError):
    """A pytree (parameters, gradients, weights) whose structure, shapes or dtypes do not fit the layout."""


class StaleStateError(FsdpError, RuntimeError):
    """A State that a later call has consumed, or that a restart has dropped."""


class ScheduleError(FsdpError, RuntimeError):
    """A verb called out of order: a unit used before it was gathered, a step without gradients, ranks out of order."""


class CheckpointError(FsdpError, ValueError):
    """A checkpoint that is damaged, or not the same for every rank."""


class CommError(FsdpError, RuntimeError):
    """A collective that could not complete: a rank died, hung, or issued something else. No state of this mesh can go
    on: restart the job from its last checkpoint."""


class RestartError(FsdpError, RuntimeError):
    """Another rank abandoned this step. Nothing is lost: go on from the state that the step started from."""


T = TypeVar("T")
PLAIN = (type(None), Number, str, bytes)


def expect(what: str, value: T, kinds: Any, said: str, error: type[Exception] = SpecError) -> T:
    """The value, which must be of these kinds. The error shows a number or a text, and of others their type."""
    if not isinstance(value, kinds):
        given = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
        raise error(f"{what}: expected {said}, and got {repr(value) if isinstance(value, PLAIN) else given}.")
    return value


def as_path(what: str, value: Any, said: str = "a path") -> Path:
    """What names a file or a folder."""
    return Path(os.fsdecode(expect(what, value, (str, bytes, os.PathLike), said)))


def as_names(what: str, value: Any) -> tuple[str, ...]:
    """One name, or several."""
    names = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    return tuple(expect(what, name, str, "a name or several") for name in names)
