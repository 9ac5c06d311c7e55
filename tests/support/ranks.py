"""Ranks of tables: they take turns in this process, and for a sample, and with LAWS=full, they are processes."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import functional_fsdp as fsdp

from .tables import FULL

T = TypeVar("T")
EACH = 12  # calls, of which one is made on processes


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
    called = re.sub(r" at 0x\w+", "", repr((fn.__name__, args, kwargs, nprocs)))
    drawn = nprocs > 1 and zlib.crc32(called.encode()) % EACH == 0  # a world of one sends nothing
    if FULL or processes or drawn:
        return fsdp.launch(fn, args, kwargs, nprocs=nprocs, timeout=timeout)
    return fsdp.launch(fn, args, kwargs, nprocs=nprocs, simulate=True)
