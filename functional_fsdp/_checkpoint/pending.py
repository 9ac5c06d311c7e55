"""Pending: the save of a mesh that is being written beside the training, one at most."""

from __future__ import annotations

import os
import weakref
from concurrent.futures import Future
from pathlib import Path

from .._common.errors import CheckpointError
from .._runtime.runtime import Runtime

__all__ = ["Saving", "finish", "pending", "settled"]


class Saving(Future[Path]):
    """A save under way: a Future that knows whether the caller has seen how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = os.getpid()
        self.asked = False
        self.set_running_or_notify_cancel()  # it cannot be cancelled

    def result(self, timeout: float | None = None) -> Path:
        try:
            return super().result(timeout)
        finally:
            self.asked = self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        finally:
            self.asked = self.done()


_saving: weakref.WeakKeyDictionary[Runtime, Saving] = weakref.WeakKeyDictionary()


def pending(run: Runtime) -> Saving:
    """A new save of a mesh, after `finish`."""
    _saving[run] = saving = Saving()
    return saving


def finish(run: Runtime) -> None:
    """Wait for the save under way.

    Raises:
        CheckpointError: it has failed, and nobody has asked.
    """
    saving = _saving.get(run)
    if saving is None or saving.owner != os.getpid():
        return
    error = Future.exception(saving)  # an interrupt here changes nothing
    del _saving[run]
    if error is not None and not saving.asked:
        raise CheckpointError(f"the save before this one has failed: {type(error).__name__}: {error}") from error


def settled() -> None:
    """Wait for the saves of all meshes, however they end."""
    for run, saving in [*_saving.items()]:
        if saving.owner == os.getpid():
            run.medium.until_done(saving)
