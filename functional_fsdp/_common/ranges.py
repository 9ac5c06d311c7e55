"""Ranges: names in a profile for what the package does, on the thread and the stream where it happens.

    with torch.profiler.profile() as found:         fsdp unshard blocks.3   a verb, as the user calls it
        state, loss = train_step(state, batch)      fsdp gather blocks.4    what is given to a lane meanwhile
                                                    fsdp forward blocks.3, fsdp backward blocks.3

They are `record_function`: `torch.autograd.profiler.emit_nvtx` has them for other profilers. Callers make a range
only while a profiler runs, by a look at `profiler._is_profiler_enabled`, which is no call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd.profiler import record_function


def ranged(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that has this name in the profile."""

    def within(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"fsdp {name}"):
            return fn(*args, **kwargs)

    return within


def opened(name: str) -> Callable[[], None]:
    """Begin a range that does not end where it began. Returns what ends it, once."""
    held = [record_function(f"fsdp {name}")]
    held[0].__enter__()

    def close() -> None:
        while held:
            held.pop().__exit__(None, None, None)

    return close


def said(name: str, args: tuple[Any, ...]) -> str:
    """A call of a verb: its name, and the units that it is given."""
    units = [one for one in args[1:] for one in ((one,) if isinstance(one, str) else one if type(one) is tuple else ())]
    return " ".join([name, *(one for one in units if isinstance(one, str))])
