"""The CUDA driver, for the few things that torch has no function for. By ctypes, in the thread's current context."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

__all__ = ["call", "function"]


@cache
def function(name: str) -> Any:
    """A function of the driver's. It returns a CUresult, 0 for success; handles and addresses are `c_void_p` to it.

    Raises:
        OSError, AttributeError: there is no driver, or it is too old to have this.
    """
    return getattr(ctypes.CDLL("libcuda.so.1"), name)


def call(name: str, *args: Any) -> None:
    """Call one, or raise RuntimeError that names it and the CUresult."""
    error = function(name)(*args)
    if error:
        raise RuntimeError(f"the CUDA driver refused {name}: CUresult {error}")
