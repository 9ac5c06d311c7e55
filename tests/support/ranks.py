"""Ranks of tables: they take turns in this process, and for a sample, and with LAWS=full, they are processes."""

from __future__ import annotations

import functools
import importlib
import re
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from unittest import mock

import functional_fsdp as fsdp

from .tables import FULL

T = TypeVar("T")
EACH = 12  # calls, of which one is made on processes


_Patch: Any = mock._patch
_enter, _leave = _Patch.__enter__, _Patch.__exit__


def _entered(self: Any) -> Any:
    result = _enter(self)
    self._value_of_rank = getattr(self.target, self.attribute)
    return result


def _in_order(self: Any, *error: Any) -> Any:
    """Leave a patch. Of ranks that take turns the last to leave would put back what another rank had put in place."""
    now, mine = getattr(self.target, self.attribute), vars(self).get("_value_of_rank")
    alone = not threading.current_thread().name.startswith("rank ") or now is mine
    result = _leave(self, *error)
    assert alone, f"ranks that take turns patch {self.attribute!r}, which they share: processes=True"
    return result


_Patch.__enter__, _Patch.__exit__ = _entered, _in_order


def launch(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nprocs: int,
    timeout: float | None = None,
    processes: bool = False,
) -> list[T]:
    """As `fsdp.launch`; where, what is called decides. Only processes can wait for too long.

    Args:
        processes: always on processes: what compiles whole steps, or patches or counts in what ranks would share.
    """
    called = re.sub(r" at 0x\w+|/\S*/pytest-of-[^'\"]+", "", repr((fn.__name__, args, kwargs, nprocs)))
    drawn = nprocs > 1 and zlib.crc32(called.encode()) % EACH == 0  # a world of one sends nothing
    if FULL or processes or drawn:
        return fsdp.launch(fn, args, kwargs, nprocs=nprocs, timeout=timeout)
    return fsdp.launch(fn, args, kwargs, nprocs=nprocs, simulate=True)


def each_rank(
    nprocs: int | str, *, processes: bool = False, turns: bool = False, timeout: float | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test whose body, with its assertions, runs on each of so many ranks; a text names the argument that says it.

    Args:
        turns: never on processes: which rank comes first must be known.
    """

    def decorated(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**given: Any) -> None:
            count = given[nprocs] if isinstance(nprocs, str) else nprocs
            args = body.__module__, body.__name__, given
            if turns:
                fsdp.launch(_body_of, args, nprocs=count, timeout=timeout, simulate=True)
            else:
                launch(_body_of, args, nprocs=count, timeout=timeout, processes=processes)

        return test

    return decorated


def by_rank(handles: Any) -> list[Any]:
    """What simulated ranks returned, some handles each."""
    return [*zip(*(handle.get() for handle in handles), strict=True)]


def _body_of(module: str, name: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**given)
