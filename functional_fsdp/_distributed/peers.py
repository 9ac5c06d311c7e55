"""Peers: the ranks of a mesh as votes, exchanges and shared memory see them, which know of no runtime."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch

from .lanes import Lanes

__all__ = ["Peers"]


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
    def along(self, axes: frozenset[str]) -> list[int]: ...
    def collective(self, hop: Any, out: Any, given: Any) -> Any: ...
