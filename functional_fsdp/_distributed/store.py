"""PatientStore: the ranks' store, where whoever keeps it is on another host, and may be cut off.

torch's client waits for an answer without end, and not even an interrupt comes through. So a thread asks; if it is kept
waiting longer than a collective would be, the store counts as lost, and each later call says so at once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

__all__ = ["PatientStore"]

Call = tuple[Callable[[], Any], "Future[Any]"]


class PatientStore:
    """The part of a store that ranks use while they wait for each other.

    A call raises what the store does, and DistStoreError if it is lost.
    """

    def __init__(self, store: Any, limit: timedelta) -> None:
        self.store, self.limit = store, limit.total_seconds()
        self.lost = ""
        self.calls: SimpleQueue[Call | None] = SimpleQueue()
        # a daemon: one that is never answered must not keep the process
        threading.Thread(target=_ask, args=(self.calls,), name="functional_fsdp store", daemon=True).start()
        weakref.finalize(self, self.calls.put, None)

    def check(self, keys: list[str]) -> bool:
        return bool(self._asked(partial(self.store.check, keys)))

    def get(self, key: str) -> Any:
        return self._asked(partial(self.store.get, key))

    def set(self, key: str, value: str | bytes) -> None:
        self._asked(partial(self.store.set, key, value))

    def delete_key(self, key: str) -> bool:
        return bool(self._asked(partial(self.store.delete_key, key)))

    def _asked(self, call: Callable[[], Any]) -> Any:
        if not self.lost:
            future: Future[Any] = Future()
            self.calls.put((call, future))
            try:
                return future.result(self.limit)
            except Late:
                self.lost = f"whoever keeps it did not answer within {self.limit:g} s"
        raise dist.DistStoreError(self.lost)


def _ask(calls: SimpleQueue[Call | None]) -> None:
    """Carry out one call after another."""
    while (asked := calls.get()) is not None:
        call, future = asked
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del asked, call, future  # which hold the store until the next one
