"""Draws: where random numbers of a call stand, so that they come again in a recomputation.

    torch's default generators    of the host and of the device: `_seed.DrawPosition`
    other generators              that the call brings along: `generators`
    Python's and numpy's          of functions; of modules whose first call has drawn from them, since to ask takes long

Others are not known, as one in a global variable.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._seed import DrawPosition
from .generators import set_state, state_of

__all__ = ["DrawPoint", "DrawSources"]


class DrawSources:
    """From where a call may draw.

    Args:
        python: whether from Python's or numpy's generators.
    """

    def __init__(self, device: torch.device, generators: list[Any], python: bool) -> None:
        self.device, self.generators, self.python = device, generators, python

    def states(self) -> list[Any]:
        """Of all but the default generators."""
        return [*map(state_of, self.generators), *(_python_states() if self.python else ())]

    def set(self, states: list[Any]) -> None:
        for generator, state in zip(self.generators, states, strict=False):
            set_state(generator, state)
        if self.python:
            _set_python(states[len(self.generators) :])


class DrawPoint:
    """Where the random numbers of a call stand now."""

    def __init__(self, sources: DrawSources) -> None:
        self.sources = sources
        self.default = DrawPosition(sources.device)
        self.states = sources.states()

    def end(self) -> None:
        """Numbers that are drawn from now on do not count."""
        self.default.end()

    def keep(self) -> None:
        """Numbers may be drawn from here again, whether some were so far or not."""
        self.default.keep()

    def go(self) -> None:
        """Draw from here again. On a device within `resumed`."""
        self.default.go()
        self.sources.set(self.states)

    def python_moved(self) -> bool:
        """Whether Python's or numpy's generators stand elsewhere now."""
        then = self.states[len(self.sources.generators) :]
        return pickle.dumps(then) != pickle.dumps(_python_states())

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Within, numbers come from here on; afterwards generators go on where they were."""
        before = self.sources.states()
        with self.default.resumed():
            self.sources.set(self.states)
            try:
                yield
            finally:
                self.sources.set(before)


def _python_states() -> list[Any]:
    numpy = sys.modules.get("numpy")
    return [random.getstate(), numpy and numpy.random.get_state(legacy=False)]


def _set_python(states: list[Any]) -> None:
    random.setstate(states[0])
    if states[1]:
        sys.modules["numpy"].random.set_state(states[1])
