"""Draws: where random numbers of a call stand, so that they come again in a recomputation.

    torch's default generators    of the host and of the device: `_seed.DrawPosition`
    other generators              that the call brings along: `generators`
    Python's and numpy's          of functions; of modules whose first call has drawn from them, since to ask takes long

Others are not known, as one in a global variable.

Generators of random numbers that a call brings along: torch's, numpy's and Python's, wherever they are at hand.

among what is given          arguments, also within containers
of a function                what is in its closure, its defaults and `partial`s, and what its method belongs to;
                             of functions in these, too
of a module                  its attributes, and its parts'
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch

from functional_fsdp._seams import objects

from .._seed import DrawPosition

__all__ = ["DrawPoint", "DrawSources", "generators_in", "generators_of", "set_state", "state_of"]

MOST, DEEP = 64, 3  # items and levels of containers that are looked into


def _is_generator(x: Any) -> bool:
    if isinstance(x, torch.Generator | random.Random):
        return not isinstance(x, random.SystemRandom)  # which has no state
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.random.Generator | numpy.random.RandomState)


def state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def generators_in(value: Any, deep: int = DEEP) -> Iterator[Any]:
    """A generator, or those in a small container."""
    if _is_generator(value):
        yield value
    elif deep and isinstance(value, list | tuple | dict) and len(value) <= MOST:
        for x in value.values() if isinstance(value, dict) else value:
            yield from generators_in(x, deep - 1)


def generators_of(fn: Any, leaves: Iterable[Any]) -> list[Any]:
    """The generators among these leaves, and those that a function brings along. Each once."""
    found = [x for x in leaves if _is_generator(x)]
    _of_function(fn, found, set())
    return [*{id(x): x for x in found}.values()]


def _of_function(fn: Any, found: list[Any], seen: set[int]) -> None:
    if id(fn) in seen:
        return
    seen.add(id(fn))
    if isinstance(fn, partial):
        held = [fn.func, fn.args, fn.keywords]
    elif isinstance(fn, MethodType):
        held = [fn.__func__, *getattr(fn.__self__, "__dict__", {}).values()]
    elif isinstance(fn, FunctionType):
        closed_over = [value for cell in fn.__closure__ or () for value in objects.contents_of(cell)]
        held = [fn.__defaults__, fn.__kwdefaults__, getattr(fn, "__wrapped__", None), *closed_over]
    else:  # an object that can be called
        held = [] if isinstance(fn, type | torch.nn.Module) else [*getattr(fn, "__dict__", {}).values()]
    for value in held:
        if callable(value) and not _is_generator(value):
            _of_function(value, found, seen)
        else:
            found += generators_in(value)


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
