"""Peers: the ranks of a mesh as votes, exchanges and shared memory see them, which know of no runtime."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch

__all__ = ["Peers"]


class Peers(Protocol):
    """A Runtime, as far as they are concerned; see there what each is."""

    size: int
    rank: int
    ranks: list[int]
    rows: dict[str, list[int]]
    groups: dict[tuple[str, str], Any]
    queues: dict[str, Any]
    timeout: timedelta
    device: torch.device
    cuda: bool
    watch: Any

    @property
    def sizes(self) -> Mapping[str, int]: ...
    @property
    def coordinate(self) -> Mapping[str, int]: ...
    def everyone(self, value: Any, what: str) -> list[Any]: ...
    def complaint(self, text: str) -> str | None: ...
    def most(self, what: str, number: int) -> int: ...
    def alike(self, what: str, number: int = 0) -> bool: ...
    def submit(self, lane: str, hops: Any, job: Any) -> Any: ...
    def wait(self, mark: Any) -> Any: ...
    def collective(self, hop: Any, out: Any, given: Any) -> Any: ...
