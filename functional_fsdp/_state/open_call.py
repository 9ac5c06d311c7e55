"""Open call: whether a call that works on a lineage has ended, or was stopped within."""

from __future__ import annotations

from typing import Any

__all__ = ["OpenCall"]


class OpenCall:
    """A call that works on a lineage, as a context. One that is stopped within it leaves `depth` behind."""

    __slots__ = ("depth", "kept")

    def __init__(self) -> None:
        self.depth = 0
        self.kept = False

    def unchanged(self) -> None:
        """The call is about to raise, and nothing has changed by it."""
        self.kept = True

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None or self.kept:
            if self.depth:  # else it has ended with the step
                self.depth -= 1
            self.kept = False
