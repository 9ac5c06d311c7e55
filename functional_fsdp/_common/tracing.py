"""Whether the code that runs now is being traced: by torch.compile, or by `lower`; and what a function is then.

A function that is done in another way in a graph names that way where it is defined: `verb`, `alone` (see `calls`) and
`traced_as` choose between the two, and nothing below them asks again. Traced, a function is plain tensor operations and
functional collectives (in the satellite `_graph`), with no stream, no event and no state in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast

import torch

from . import errors
from .torch_names import PROXY, dispatch_mode_of, dispatch_modes, dynamo, jit_traces, pre_dispatch_mode_of

F = TypeVar("F", bound=Callable[..., Any])
G = TypeVar("G")  # what is noted of one graph


LOWERING: list[Any] = []  # graphs that are being made, innermost last: what the satellite `_graph` notes of each
KEEPING: list[bool] = []  # whether a traced pullback keeps residuals, see `keep_residuals` there


def tracing() -> bool:
    """Whether torch.compile or `lower` is looking: then Python runs once, for all steps to come.

    Example: `if not tracing(): log.info(...)`.
    """
    return torch.compiler.is_dynamo_compiling() or bool(LOWERING)


def traced_as(traced: Callable[..., Any]) -> Callable[[F], F]:
    """The function below it in eager code, and `traced`, which takes the same arguments, where a graph is made.

    Example: `@extend.traced_as(in_plain_operations)` above `def by_a_kernel_of_mine(tensor): ...`.
    """

    def paired(eager: F) -> F:
        @wraps(eager)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() or LOWERING:  # `tracing()`, without a call
                return traced(*args, **kwargs)
            return eager(*args, **kwargs)

        return cast(F, chosen)

    return paired


def tracing_now() -> Any:
    """What is noted of the graph that is being made of the running code; None where none is, or torch.compile does."""
    return LOWERING[-1] if LOWERING else None


def foreign_tracer() -> str:
    """Which of torch's tools traces the code that runs now, in this thread; "" where none does.

    What traces steps in this package uses a proxy mode, too: this is for code that it does not run.
    """
    if torch.compiler.is_dynamo_compiling():
        return "torch.export" if _exporting() else "torch.compile"
    if jit_traces():
        return "torch.jit.trace"
    if (dispatch_modes() and dispatch_mode_of(PROXY) is not None) or pre_dispatch_mode_of(0) is not None:
        return "torch.export" if _exporting() else "make_fx (or torch.func.linearize, which calls it)"
    return ""


def _exporting() -> bool:
    """Whether torch.export traces. Dynamo calls this for real: in torch 2.11 it takes `is_exporting` to be true."""
    return torch.compiler.is_exporting()


_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch._dynamo.assume_constant_result


def users_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The first line that is neither torch's nor this package's, as "file:line"; the innermost frame comes first."""
    for frame, line in frames:
        owner = str(frame.f_globals.get("__name__", "")).split(".")[0]
        if owner not in ("torch", "functional_fsdp", "contextlib") and "<" not in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename}:{line}"
    return "an unknown line"


def refuse(kind: str, text: str) -> NoReturn:
    """Raise an error of `_common.errors`, so that it reaches the user as itself, traced or not.

    Dynamo would wrap what is raised in the code that it traces ("Unsupported: Observed exception"), or run that code
    eagerly. So it runs `_raise` for real, as a function whose result is constant, and lets an exception of one kind of
    its own through, with or without fullgraph: ours is of that kind, too.
    """
    _raise(kind, text, torch.compiler.is_dynamo_compiling())


def _raise(kind: str, text: str, compiling: bool) -> NoReturn:
    """`compiling`: whether Dynamo is tracing the caller."""
    cls: Any = getattr(errors, kind)
    if compiling:
        cls = type(kind, (cls, dynamo().exc.UncapturedHigherOrderOpError), {"__module__": cls.__module__})
    raise cls(text)


_raise._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch._dynamo.assume_constant_result


@contextmanager
def lowering(graph: G) -> Iterator[G]:
    """What runs inside is traced by `_graph.graph`, which notes here what it has to know."""
    LOWERING.append(graph)
    try:
        yield graph
    finally:
        LOWERING.pop()


def put_away() -> tuple[list[Any], list[bool]]:
    """What is under way here, for `bring_back`: other code runs in between, of which none of it is true."""
    found = LOWERING[:], KEEPING[:]
    LOWERING.clear()
    KEEPING.clear()
    return found


def bring_back(found: tuple[list[Any], list[bool]]) -> None:
    LOWERING[:], KEEPING[:] = found
