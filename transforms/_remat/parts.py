"""Parts: modules and functions that are not run again where what is around them recomputes, and what runs now.

A part asks which call is the innermost of its thread: a forward notes its output, a recomputation gives it that output
again. Elsewhere only what is to be moved makes a difference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn

from functional_fsdp._seams import torch_private
from functional_fsdp.extend import HostBuffers, computes_on

from .._modules.outputs import each_leaf
from .given import code_of, storages_in
from .moves import MoveGroup

__all__ = ["Fate", "KeptPart", "Owner", "PartCall", "Running", "part_of", "running"]

Fate = Literal["save", "offload"]


class Owner:
    """What the calls of one transformed model, or function, have in common."""

    def __init__(self) -> None:
        self.buffers = HostBuffers()


class PartCall:
    """A call of a part: with what, and whose it is."""

    def __init__(
        self, part: KeptPart, fn: Callable[..., Any], args: Any, kwargs: Any, module: nn.Module | None
    ) -> None:
        self.part, self.fn, self.args, self.kwargs, self.module = part, fn, args, kwargs, module

    @property
    def who(self) -> Any:
        """The same in each recomputation: the module, or the function's code."""
        return self.module if self.module is not None else code_of(self.fn)

    def __call__(self) -> Any:
        return self.fn(*self.args, **self.kwargs)


class Running(Protocol):
    """A forward or a recomputation that is under way."""

    def called(self, call: PartCall) -> Any:
        """What a part returns that is called in it."""


class RunningStack(threading.local):
    """What runs on this thread, the innermost last; None within a part."""

    def __init__(self) -> None:
        self.calls: list[Running | None] = []


RUNNING = RunningStack()


@contextmanager
def running(call: Running | None) -> Iterator[None]:
    """Within, this is the innermost call."""
    RUNNING.calls.append(call)
    try:
        yield
    finally:
        RUNNING.calls.pop()


class KeptPart:
    """A module or a function that is not run again in a call that recomputes: what becomes of what it keeps."""

    def __init__(self, fate: Fate, owner: Owner) -> None:
        self.fate, self.owner = fate, owner
        self.copies = False  # others change its output in place, so a copy of it is kept

    def __call__(self, fn: Callable[..., Any], args: Any, kwargs: Any, module: nn.Module | None = None) -> Any:
        """`fn(*args, **kwargs)`.

        Args:
            module: whose call it is.
        """
        call = RUNNING.calls[-1] if RUNNING.calls else None
        if call is not None and torch_private.func_interpreter() is None:  # whose tensors are not for keeping
            return call.called(PartCall(self, fn, args, kwargs, module))
        if self.fate == "save" or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        stays = storages_in((args, kwargs), lambda t: not t.requires_grad)
        moves = MoveGroup(self.owner.buffers, computes_on(each_leaf((args, kwargs))), stays)
        with moves.moving(module):
            out = fn(*args, **kwargs)
        moves.end()
        return out


_OF_FUNCTIONS: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def of_function(fn: Any, name: str, make: Callable[[], Any]) -> Any:
    """What belongs to a function, and to all that have its code: stages are often wrapped in each call anew."""
    try:
        found = _OF_FUNCTIONS.setdefault(code_of(fn), {})
    except TypeError:  # there are no weak references to it
        return make()
    if name not in found:
        found[name] = make()
    return found[name]


def part_of(fn: Any, fate: Fate) -> KeptPart:
    """The part that a function is."""
    return of_function(fn, fate, lambda: KeptPart(fate, Owner()))
