"""Bound calls: who looks after the modules that are called by `bind` on this thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch.nn as nn

from .._common.torch_names import func_interpreter

__all__ = ["around_bound", "around_bound_calls"]

Around = Callable[[nn.Module], AbstractContextManager[None]]


class _Here(threading.local):
    around: Around | None = None


_HERE = _Here()


@contextmanager
def around_bound_calls(around: Around | None) -> Iterator[Around | None]:
    """Within, on this thread, each call of a module by `bind` is made in `with around(module):`.

    Args:
        around: a function of the skeleton that is called; None for nothing.

    Returns:
        what was there before, for who wants to call it, too.

    Collective: none. Not so in compiled code, nor under torch.func, where a module must not change.

    Example: `with extend.around_bound_calls(note_buffers): stage(w, h)`.
    """
    before, _HERE.around = _HERE.around, around
    try:
        yield before
    finally:
        _HERE.around = before


def around_bound(module: nn.Module) -> AbstractContextManager[None] | None:
    """What a call of this module is to be made in, or None."""
    return None if _HERE.around is None or func_interpreter() is not None else _HERE.around(module)
