"""Exchanges: bytes of every rank for every rank, on the host, and errors as the other ranks hear of them.

    head [512]   length, first bytes      one collective: most are that small
    rest [n]     what is left             one more, if there is any, of as many bytes as the longest

Each is a job on the control lane like a vote, so a rank that does not come to one is missed, and met, as there.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import TYPE_CHECKING, Any

import torch

from ._errors import FsdpError, RestartError
from ._lanes import Issued

if TYPE_CHECKING:
    from ._agreement import Agreement

__all__ = ["exchanged", "heard_of", "said_of"]

HEAD = 512  # bytes
LENGTH = 8  # bytes


def exchanged(run: Agreement, data: bytes, what: str) -> list[bytes]:
    """Every rank's bytes: a head of a fixed length, which says how many there are; then what did not fit."""
    mine = len(data).to_bytes(LENGTH, "little") + data
    heads = _gathered(run, mine[:HEAD], HEAD, what)
    lengths = [LENGTH + int.from_bytes(head[:LENGTH], "little") for head in heads]
    rest = max(lengths) - HEAD
    tails = _gathered(run, mine[HEAD:], rest, what) if rest > 0 else [b""] * run.size
    return [(head + tail)[LENGTH:n] for head, tail, n in zip(heads, tails, lengths, strict=True)]


def _gathered(run: Agreement, data: bytes, size: int, what: str) -> list[bytes]:
    """So many bytes of every rank's. (By the address, since torch takes numpy to make bytes of a tensor.)"""
    out = torch.zeros(run.size * size, dtype=torch.uint8)
    given = out[run.rank * size : (run.rank + 1) * size]
    ctypes.memmove(given.data_ptr(), data, len(data))
    hop = Issued("control", "", "all_gather", out.numel(), out.dtype, "", what)
    run.wait(run.submit("control", (hop,), run.collective(hop, out, given)))
    every = ctypes.string_at(out.data_ptr(), out.numel())
    return [every[i : i + size] for i in range(0, len(every), size)]


def said_of(error: BaseException) -> tuple[str, Any]:
    """An error as the other ranks hear of it: in words, and the error itself if it can be sent."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if not isinstance(error, Exception):
        return text, BaseException
    try:
        same = pickle.loads(pickle.dumps(error))
        return text, error if type(same) is type(error) else None
    except Exception:
        return text, None


def heard_of(said: tuple[str, Any], rank: int, what: str) -> Exception:
    """The error of another rank, on this one."""
    text, error = said
    if error is BaseException:
        return RestartError(
            f"{what}: rank {rank} was stopped by {text}. Nothing is lost: make the same call again on every rank."
        )
    return error if isinstance(error, Exception) else FsdpError(f"{what}: on rank {rank} {text}")
