"""Questions: what those are told who ask whether the stream is captured.

A library that asks goes another way in a graph: transformers then makes masks, which cost the fused attention. So while
a step warms up or is captured, callers outside torch and this library are told what is true in warm-up, "no". torch is
told the truth: its SyncBatchNorm goes by it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .lines import root_of

__all__ = ["answered_as_in_warm_up"]

NAME = "is_current_stream_capturing"
PLACES = torch.cuda, torch.cuda.graphs
truth = torch.cuda.is_current_stream_capturing
_lock = threading.Lock()
_within = 0  # how many steps are under way, of all threads
_before: list[Any] = []  # what stood there


def _answer() -> bool:
    """In the place of torch.cuda.is_current_stream_capturing: one object, so that nothing is compiled twice for it."""
    caller = sys._getframe(1)
    name = caller.f_globals.get("__name__") or ""
    if root_of(caller) not in ("torch", "functional_fsdp") or name.startswith("torch._dynamo"):
        return False
    return truth()


_answer._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch._dynamo.assume_constant_result's mark


@contextmanager
def answered_as_in_warm_up() -> Iterator[None]:
    """Within, on all threads, callers outside torch and this library hear that no stream is captured."""
    global _within
    with _lock:
        if not _within:
            _before[:] = [getattr(place, NAME) for place in PLACES]
            for place in PLACES:
                setattr(place, NAME, _answer)
        _within += 1
    try:
        yield
    finally:
        with _lock:
            _within -= 1
            if not _within:
                for place, found in zip(PLACES, _before, strict=True):
                    setattr(place, NAME, found)
