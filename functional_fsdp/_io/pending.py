"""Pending: the save of a mesh that is being written beside the training, one at most."""

from __future__ import annotations

import os
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from .._common.errors import CheckpointError
from .._runtime.runtime import Runtime

__all__ = ["Saving", "finish", "pending", "settled"]


class Saving(Future[Path]):
    """A save under way: a Future that knows whether the caller has seen how it ended, and how its rank waits."""

    def __init__(self, medium: Any) -> None:
        super().__init__()
        self.medium = medium
        self.owner = os.getpid()
        self.asked = False
        self.set_running_or_notify_cancel()  # it cannot be cancelled

    def result(self, timeout: float | None = None) -> Path:
        try:
            if timeout is None:
                self.medium.until_done(self)
            return super().result(timeout)
        finally:
            self.asked = self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            if timeout is None:
                self.medium.until_done(self)
            return super().exception(timeout)
        finally:
            self.asked = self.done()


_saving: weakref.WeakKeyDictionary[Runtime, Saving] = weakref.WeakKeyDictionary()


def pending(run: Runtime) -> Saving:
    """A new save of a mesh, after `finish`."""
    _saving[run] = saving = Saving(run.medium)
    return saving


def finish(run: Runtime) -> None:
    """Wait for the save under way.

    Raises:
        CheckpointError: it has failed, and nobody has asked.
    """
    saving = _saving.get(run)
    if saving is None or saving.owner != os.getpid():
        return
    run.medium.until_done(saving)
    error = Future.exception(saving)  # an interrupt here changes nothing
    del _saving[run]
    if error is not None and not saving.asked:
        raise CheckpointError(f"the save before this one has failed: {type(error).__name__}: {error}") from error


def settled() -> None:
    """Wait for the saves of all meshes, however they end."""
    for saving in [*_saving.values()]:
        if saving.owner == os.getpid():
            saving.medium.until_done(saving)
