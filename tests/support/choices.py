"""What the library logs: anything, and what `auto` chooses, on any device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from functional_fsdp._transports import auto


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """What this logger says from INFO on; afterwards it is as it was."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    log, handler = logging.getLogger(name), Handler()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield said
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@contextmanager
def choices() -> Iterator[list[str]]:
    """What is logged of `Spec(transport="auto")`, and afterwards all is as it was."""
    before = auto.LARGE
    try:
        with logged("functional_fsdp._transports.auto") as said:
            yield said
    finally:
        auto.LARGE = before
