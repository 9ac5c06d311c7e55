"""Driven: what the parts of a driven module know of its driver, which knows all of them.

driver ──▶ unit calls ──▶ calls       each of them, and placeholders, is given its driver as a `Driven`
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, Protocol

import torch

from .._modules.unit_modules import Leaf

__all__ = ["Driven", "Gradients", "Opened"]

Gradients = list[torch.Tensor | None]


class Opened(Protocol):
    """A unit call, as its uses know it: where its module is, its units and leaves, and weights into it and out."""

    unit_module: Any
    units: tuple[str, ...]
    leaves: list[Leaf]

    def put(self, tensors: Sequence[torch.Tensor]) -> None: ...

    def take(self) -> None: ...


class Driven(Protocol):
    """A driver, as its parts know it. What is what is said in `Driver`, which has all of it."""

    state: Any
    session: Any
    debug: bool
    device: torch.device
    precisions: Any
    keys: Any
    places: Any
    weights: dict[str, dict[str, torch.Tensor]]
    besides: set[str]
    alone: set[Leaf]
    stack: list[Any]
    calls: list[Any]
    active: list[Any]
    inner: list[Any]
    backward: bool
    gathering: bool

    @property
    def busy(self) -> Any: ...

    def begin(self) -> None: ...

    def close(self, keep: Sequence[Any] = ()) -> None: ...

    def collect(self, unit: str, grads: Gradients) -> None: ...

    def end_others(self, parents: Any) -> None: ...

    def gather(self, units: tuple[str, ...], keep: Any, outside: Set[str] | None = None) -> Set[str]: ...

    def had_again(self, units: Sequence[str], outside: Set[str]) -> None: ...

    def leaf(self, leaf: Leaf) -> torch.Tensor: ...

    def note(self, path: str, copied: torch.Tensor) -> None: ...

    def refuse_levels(self) -> None: ...

    def refuse_tracer(self) -> None: ...

    def regathered(self, call: Any, grads: Gradients) -> Gradients: ...

    def spoilt(self, units: Sequence[str], where: str) -> None: ...

    def tensors(self, leaves: Sequence[Leaf]) -> list[torch.Tensor]: ...

    def trains(self, leaf: Leaf) -> bool: ...

    def visited(self, visit: Any) -> None: ...
