"""Whether the code that runs now is being traced: by torch.compile, or by `lower`.

Verbs, optimizers and transforms ask this; when traced they are plain tensor operations and functional collectives
(`_traced`), with no stream, no event and no state in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from . import _errors
from ._record import Collective
from ._torch import dynamo

__all__ = ["KEEPING", "LOWERING", "Tracing", "keeping", "lowering", "refuse", "tracing", "tracing_now"]


class Tracing:
    """One tracing of a function of a State, from its start to its end: what is noted for as long as it lasts.

    issued: the collectives, in order. driven: what each transform that drives a module has for this session, by
    transform. guards: functions of nothing; a graph holds while they return what they returned when it was made. order:
    in which order units were used, forward and then backward, by the first module that was driven. whole: whether a
    driven round is complete. functions: the names of the autograd.Functions that were used, in order.
    """

    def __init__(self) -> None:
        self.issued: list[Collective] = []
        self.driven: dict[Any, Any] = {}
        self.guards: list[Callable[[], Any]] = []
        self.order: tuple[Any, ...] | None = None
        self.whole = False
        self.functions: dict[str, None] = {}


LOWERING: list[Tracing] = []
KEEPING: list[bool] = []


def tracing() -> bool:
    """Whether torch.compile or `lower` is looking: then Python runs once, for all steps to come.

    Example: `if not extend.tracing(): log.info(...)`.
    """
    return torch.compiler.is_dynamo_compiling() or bool(LOWERING)


def tracing_now() -> Tracing | None:
    """What is noted of the graph that is being made of the running code; None where none is, or torch.compile does."""
    return LOWERING[-1] if LOWERING else None


def refuse(kind: str, text: str, compiling: bool) -> NoReturn:
    """Raise an error of `_errors`, so that it reaches the user as itself.

    Dynamo would wrap what is raised in the code that it traces ("Unsupported: Observed exception"), or run that code
    eagerly. So it runs this function for real, as one whose result is constant, and lets an exception of one kind of
    its own through, with or without fullgraph: ours is of that kind, too.

    Args:
        compiling: whether Dynamo is tracing the caller.
    """
    cls: Any = getattr(_errors, kind)
    if compiling:
        cls = type(kind, (cls, dynamo().exc.UncapturedHigherOrderOpError), {"__module__": cls.__module__})
    raise cls(text)


refuse._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch._dynamo.assume_constant_result


@contextmanager
def lowering() -> Iterator[Tracing]:
    """What runs inside is traced by `_graph`."""
    LOWERING.append(Tracing())
    try:
        yield LOWERING[-1]
    finally:
        LOWERING.pop()


@contextmanager
def keeping(residuals: bool) -> Iterator[None]:
    """Whether, inside, a traced `T.vjp` keeps residuals and leaves the weights to `_regather`; else it recomputes."""
    if residuals:
        KEEPING.append(True)
    try:
        yield
    finally:
        if residuals:
            KEEPING.pop()
