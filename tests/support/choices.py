"""What `auto` chooses, on any device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from functional_fsdp._transports import auto


@contextmanager
def choices() -> Iterator[list[str]]:
    """What is logged of `Spec(transport="auto")`, and afterwards all is as it was."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    log, handler = logging.getLogger("functional_fsdp._transports.auto"), Handler()
    before = log.level, auto.LARGE
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield said
    finally:
        log.removeHandler(handler)
        log.level, auto.LARGE = before
