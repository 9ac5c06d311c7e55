"""Ranks of tables: they take turns in this process, and for a sample, and with LAWS=full, they are processes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import functional_fsdp as fsdp

from .tables import FULL

__all__ = ["launch"]

T = TypeVar("T")
EACH = 12  # calls, of which one is made on processes


def launch(
    fn: Callable[..., T], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, nprocs: int
) -> list[T]:
    """As `fsdp.launch`; where, what is called decides."""
    drawn = nprocs > 1 and zlib.crc32(repr((fn.__name__, args, kwargs, nprocs)).encode()) % EACH == 0
    processes = FULL or drawn  # a world of one sends nothing
    return fsdp.launch(fn, args, kwargs, nprocs=nprocs, simulate=not processes)
