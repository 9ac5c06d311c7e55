"""Provided functions: what the core calls by name, and a satellite has.

    satellite   provide("graph", unshard, release, ...)     once, when the package is imported
    core        @verb(provided("graph.unshard"))            looked up when it is called

So the core imports no satellite: each name that it calls stands where it is called, with the folder that has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["provide", "provided"]

_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def provide(satellite: str, *functions: Callable[..., Any]) -> None:
    """A satellite has these functions, or classes, for the core."""
    _FUNCTIONS.update({f"{satellite}.{function.__name__}": function for function in functions})


def provided(name: str) -> Callable[..., Any]:
    """The function of a satellite, as "graph.unshard", which need not be there before it is called."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return _FUNCTIONS[name](*args, **kwargs)

    return function
