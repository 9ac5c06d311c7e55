"""The CUDA driver, for the few things that torch has no function for: by `cuda.bindings`, which torch's CUDA builds
bring along. In the thread's current context."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

__all__ = ["call", "driver"]


@cache
def driver() -> Any:
    """The module `cuda.bindings.driver`, whose names are those of the driver's own documentation.

    Raises:
        ImportError: it is not installed.
    """
    return import_module("cuda.bindings.driver")


def call(name: str, *args: Any) -> Any:
    """Call one of its functions. Returns what that gives: nothing, a value, or several.

    Raises:
        ImportError, AttributeError: there is no such module, or none with this function.
        RuntimeError: there is no driver, or it refused; named with its CUresult.
    """
    error, *found = getattr(driver(), name)(*args)
    if error:
        raise RuntimeError(f"the CUDA driver refused {name}: {error!r}")
    return found[0] if len(found) == 1 else tuple(found) or None
