"""Stored: what gathers and reductions read of a State, which knows of neither."""

from __future__ import annotations

from typing import Any, Protocol

from .._plan.layout import Layout
from .flat import FlatBuffer

__all__ = ["Stored"]


class Stored(Protocol):
    """A State, as far as the engine is concerned; see there what each is."""

    @property
    def main(self) -> dict[str, FlatBuffer]: ...
    @property
    def weights(self) -> Any: ...
    @property
    def scales(self) -> Any: ...
    @property
    def grads(self) -> Any: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def version(self) -> Any: ...
    def _evolve(self, **changes: Any) -> Any: ...
