"""Entries: what a call that works on a State goes through first, beside its own checks.

    thread A   unshard ├──────┤   reduce ├──────┤        one after the other: fine, whoever comes
    thread B              ╳ refused         └ unshard    inside another thread's call: an error

Ranks issue collectives in one order, so the states of a mesh are used by one thread at a time. Who is inside is one
entry of a dict of the runtime, `users[0]`, put there by `dict.setdefault`: that looks and writes in one step of C,
which the interpreter's lock covers, and where there is none the lock that every dict has of its own. Of two threads one
sees itself in the dict, and the other sees the first. No thread waits.

What the package allocates and keeps is made outside torch.inference_mode: nothing could write to it afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import Any, TypeVar, cast

import torch
import torch.utils._pytree as pytree

from ._errors import ScheduleError
from ._tracing import tracing

__all__ = ["alone", "busy", "ordinary", "outside_inference"]

F = TypeVar("F", bound=Callable[..., Any])


def busy(name: str, owner: int) -> ScheduleError:
    """What is said to a thread that comes while the thread `owner` is inside."""
    other = next((repr(t.name) for t in threading.enumerate() if t.ident == owner), "which has ended")
    return ScheduleError(
        f"{name} was called in the thread {threading.current_thread().name!r} while the thread {other} is in a call "
        "on this State, or on another State of its mesh. Ranks issue collectives in one order, so one thread at a time "
        "may use the states of a mesh. Nothing has changed: wait until the other thread has come back, then call again."
    )


def alone(fn: F, name: str = "", at: int = 0) -> F:
    """For functions of a State that are no verbs: one thread at a time, outside torch.inference_mode.

    Args:
        name: what users call it by.
        at: which argument the State is.
    """

    @wraps(fn)
    def entered(*args: Any, **kwargs: Any) -> Any:
        if tracing():
            return fn(*args, **kwargs)
        state = args[at] if len(args) > at else kwargs.get("state")
        token = getattr(state, "token", None)
        if token is None:
            raise TypeError(
                f"{name or fn.__name__}(state, ...): the first argument is a State, not {type(state).__name__}."
            )
        me = owner = get_ident()
        users = token.ledger.runtime.users
        if users.get(0) == me:  # within another call of this thread
            return _outside(fn, args, kwargs)
        try:
            owner = users.setdefault(0, me)
            if owner == me:
                return _outside(fn, args, kwargs)
        finally:
            if owner == me:
                users.pop(0, None)
        raise busy(name or fn.__name__, owner)

    return cast(F, entered)


def _outside(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if not torch.is_inference_mode_enabled():
        return fn(*args, **kwargs)
    with torch.inference_mode(False), torch.no_grad():
        return fn(*args, **kwargs)


def outside_inference(fn: F) -> F:
    """For functions that make what is kept: under torch.inference_mode they run as under torch.no_grad."""

    @wraps(fn)
    def outside(*args: Any, **kwargs: Any) -> Any:
        return _outside(fn, args, kwargs)

    return cast(F, outside)


def ordinary(tree: Any) -> Any:
    """The same tree, with copies in the place of tensors that were made under torch.inference_mode."""

    def copied(t: torch.Tensor) -> torch.Tensor:
        return t.clone() if t.is_inference() else t

    with torch.inference_mode(False), torch.no_grad():
        return pytree.tree_map_only(torch.Tensor, copied, tree)
