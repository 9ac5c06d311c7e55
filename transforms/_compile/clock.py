"""Clock: how long calls of compiled modules take on the host, compiled or as Python runs them."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

__all__ = ["Clock"]


class Clock:
    """Takes the time of calls, for as long as a `Compiler` has it.

    Attributes:
        eager: whether modules run as Python does, though they are to be compiled.
        seconds: by class, of each of its calls: what the host took. None: not looked at, nothing is waited for.
        paths: by class, the modules that were called.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait  # for the device, whose queue may be full: then a launch takes as long as what is before it
        self.eager = False
        self.seconds: dict[type, list[float]] | None = None
        self.paths: dict[type, set[str]] = {}

    def call(self, cls: type, path: str, run: Callable[..., Any], *args: Any) -> Any:
        """`run(*args)`, timed."""
        if self.seconds is None:
            return run(*args)
        self.wait()
        since = perf_counter()
        out = run(*args)
        self.seconds.setdefault(cls, []).append(perf_counter() - since)
        self.paths.setdefault(cls, set()).add(path)
        return out
