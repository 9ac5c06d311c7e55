"""Generators of random numbers that a call brings along: torch's, numpy's and Python's, wherever they are at hand.

among what is given          arguments, also within containers
of a function                what is in its closure, its defaults and `partial`s, and what its method belongs to;
                             of functions in these, too
of a module                  its attributes, and its parts'
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch

from functional_fsdp._seams import objects

MOST, DEEP = 64, 3  # items and levels of containers that are looked into

__all__ = ["generators_in", "generators_of", "set_state", "state_of"]


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
