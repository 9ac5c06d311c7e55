"""Peers: the ranks of a mesh as votes, exchanges and shared memory see them, which know of no runtime.

`exchanged` gives bytes of every rank to every rank, on the host:

    head [512]   length, first bytes      one collective: most are that small
    rest [n]     what is left             one more, if there is any, of as many bytes as the longest

Each is a job on the control lane like a vote, so a rank that does not come to one is missed, and met, as there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch

from .._common.record import Collective
from .lanes import Lanes

__all__ = ["Peers", "exchanged", "uneven"]

K = TypeVar("K")

HEAD = 512  # bytes
LENGTH = 8  # bytes


def exchanged(run: Peers, data: bytes, what: str) -> list[bytes]:
    """Every rank's bytes: a head of a fixed length, which says how many there are; then what did not fit."""
    mine = len(data).to_bytes(LENGTH, "little") + data
    heads = _gathered(run, mine[:HEAD], HEAD, what)
    lengths = [LENGTH + int.from_bytes(head[:LENGTH], "little") for head in heads]
    rest = max(lengths) - HEAD
    tails = _gathered(run, mine[HEAD:], rest, what) if rest > 0 else [b""] * run.size
    return [(head + tail)[LENGTH:n] for head, tail, n in zip(heads, tails, lengths, strict=True)]


def uneven(run: Peers, have: Mapping[K, Any], what: str) -> list[K]:
    """The keys of what this rank has and not every rank has, with the same value. Host; waits for all."""
    every = run.everyone(have, what)
    return [key for key, value in have.items() if any(other.get(key) != value for other in every)]


def _gathered(run: Peers, data: bytes, size: int, what: str) -> list[bytes]:
    """So many bytes of every rank's. (By the address, since torch takes numpy to make bytes of a tensor.)"""
    out = torch.zeros(run.size * size, dtype=torch.uint8, device="cpu")
    given = out[run.rank * size : (run.rank + 1) * size]
    ctypes.memmove(given.data_ptr(), data, len(data))
    hop = Collective("all_gather", "", out.numel(), out.dtype, "", "control", what)
    run.lanes.wait(run.lanes.submit("control", (hop,), run.collective(hop, out, given)))
    every = ctypes.string_at(out.data_ptr(), out.numel())
    return [every[i : i + size] for i in range(0, len(every), size)]


class Peers(Protocol):
    """A Runtime, as far as they are concerned; see there what each is."""

    size: int
    rank: int
    ranks: list[int]
    sizes: dict[str, int]
    coordinate: dict[str, int]
    rows: dict[str, list[int]]
    seats: dict[str, list[int]]
    groups: dict[tuple[str, str], Any]
    lanes: Lanes
    timeout: timedelta
    device: torch.device
    watch: Any

    def everyone(self, value: Any, what: str) -> list[Any]: ...
    def complaint(self, text: str) -> str | None: ...
    def most(self, what: str, number: int) -> int: ...
    def alike(self, what: str, number: int = 0) -> bool: ...
    def along(self, axes: frozenset[str], rank: int | None = None) -> list[int]: ...
    def collective(self, hop: Any, out: Any, given: Any) -> Any: ...
