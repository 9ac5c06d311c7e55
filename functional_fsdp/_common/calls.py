"""Entries: what a call that works on a State goes through first, beside its own checks.

    thread A   unshard ├──────┤   reduce ├──────┤        one after the other: fine, whoever comes
    thread B              ╳ refused         └ unshard    inside another thread's call: an error

Ranks issue collectives in one order, so the states of a mesh are used by one thread at a time. Who is inside is one
entry of a dict of the runtime, `users[0]`, put there by `dict.setdefault`: that looks and writes in one step of C,
which the interpreter's lock covers, and where there is none the lock that every dict has of its own. Of two threads one
sees itself in the dict, and the other sees the first. No thread waits for another's call.

An interrupt in the last lines of a call may leave its claim behind. It holds nobody up: to its own thread it looks like
a call around the next one, and a thread that finds it looks whether its owner is in a call, and takes it over if not.

What the package allocates and keeps is made outside torch.inference_mode: nothing could write to it afterwards.

Provided functions: what the core calls by name, and a satellite has.

    satellite   provide("graph", unshard, release, ...)     once, when the package is imported
    core        @verb(provided("graph.unshard"))            looked up when it is called

So the core imports no satellite: each name that it calls stands where it is called, with the folder that has it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial, wraps
from threading import get_ident
from types import CodeType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from .errors import CommError, FsdpError, ScheduleError
from .ranges import ranged, said
from .torch_names import CInterpreter, func_interpreter, profiler, pytree, set_grad_enabled
from .tracing import LOWERING, refuse, tracing

F = TypeVar("F", bound=Callable[..., Any])
INTERPRETER: Any = CInterpreter
TRANSFORM = (
    " was called inside a torch.func transform (grad, vjp, vmap, ...), which cannot see through a collective. Call "
    "unshard before the transform and reduce after it; inside, compute on the weights only."
)
_codes: set[CodeType] = set()  # of what claims, and lets go
_taking = threading.Lock()


def _busy(name: str, owner: int) -> ScheduleError:
    """What is said to a thread that comes while the thread `owner` is inside."""
    other = next((repr(t.name) for t in threading.enumerate() if t.ident == owner), "which has ended")
    return ScheduleError(
        f"{name} was called in the thread {threading.current_thread().name!r} while the thread {other} is in a call "
        "on this State, or on another State of its mesh. Ranks issue collectives in one order, so one thread at a time "
        "may use the states of a mesh. Nothing has changed: wait until the other thread has come back, then call again."
    )


def _taken_over(users: dict[int, int], owner: int, me: int) -> bool:
    """Whether this thread is let in after all: the claim that it found was left behind."""
    with _taking:
        if users.get(0) == owner and not _inside(owner):
            users[0] = me
            if _inside(owner):  # it has come just now, and held the claim for its own
                users[0] = owner
        return users.setdefault(0, me) == me


def _inside(thread: int) -> bool:
    """Whether a thread is in a call."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code not in _codes:
        frame = frame.f_back
    return frame is not None


def verb(traced: Callable[..., Any]) -> Callable[[F], F]:
    """A verb runs without autograd, in one thread at a time (see `calls`), outside torch.inference_mode, and not
    inside a torch.func transform (collectives cannot be differentiated).

    Args:
        traced: what it is inside torch.compile.
    """
    return lambda fn: _entered(fn, fn.__name__, 0, _in_graph(fn, traced), no_grad=True)


def _in_graph(fn: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    """What a verb is where a graph is made."""

    def in_graph(*args: Any, **kwargs: Any) -> Any:
        if isinstance(func_interpreter(), INTERPRETER):  # what the compiler can tell
            refuse("ScheduleError", fn.__name__ + TRANSFORM)
        try:
            with torch.no_grad():
                return traced(*args, **kwargs)
        except FsdpError as error:
            refuse(type(error).__name__, error.args[0])

    return in_graph


def alone(fn: F, name: str = "", at: int = 0, traced: Callable[..., Any] | None = None) -> F:
    """For functions of a State that are no verbs: one thread at a time, outside torch.inference_mode.

    Args:
        name: what users call it by.
        at: which argument the State is.
        traced: what it is where a graph is made of the step, of the same arguments; by default the function itself.

    Returns:
        the function. It raises ScheduleError where another thread is in a call on a State of the same mesh, TypeError
        where it is given no State, CommError where the ranks' store is gone.

    Example: `@extend.alone` above `def my_transform(state, ...)`.
    """
    in_graph = traced or fn
    if tracing():  # made inside a compiled step, which cannot look at functions
        return cast(F, in_graph)
    return _entered(fn, name or fn.__name__, at, in_graph, no_grad=False)


def _entered(fn: F, name: str, at: int, traced: Callable[..., Any], no_grad: bool) -> F:
    """A function that claims the states of a mesh for its thread while it runs. `no_grad`: it is a verb."""

    @wraps(fn)
    def entered(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or LOWERING:  # `tracing()`, without a call
            return traced(*args, **kwargs)
        if no_grad and func_interpreter() is not None:
            raise ScheduleError(name + TRANSFORM)
        state: Any = args[at] if len(args) > at else kwargs.get("state")
        try:
            run = state.version.lineage.runtime
        except AttributeError:
            no_state = f"{name}(state, ...): the first argument is a State, not {type(state).__name__}."
            raise TypeError(no_state) from None
        users = run.users
        call: Callable[..., Any] = fn
        if no_grad and run.watcher is not None:
            call = partial(run.watcher, name, fn)
        if profiler._is_profiler_enabled:
            call = ranged(call, said(name, args) if no_grad else name)
        before = torch.is_grad_enabled()
        me = get_ident()
        outermost = not users or users.get(0) != me  # else within another call of this thread
        owner = 0 if outermost else me
        try:
            if outermost:
                owner = users.setdefault(0, me)
                if owner != me and _taken_over(users, owner, me):
                    owner = me
            if owner == me:
                if torch.is_inference_mode_enabled():
                    with torch.inference_mode(False), torch.no_grad():
                        return call(*args, **kwargs)
                if no_grad:
                    set_grad_enabled(False)
                return call(*args, **kwargs)
        except dist.DistError as error:
            raise _unreachable(name, state, error) from error
        finally:
            if no_grad:
                set_grad_enabled(before)
            if outermost and owner == me:
                users.pop(0, None)
        raise _busy(name, owner)

    _codes.add(cast(Any, entered).__code__)
    return cast(F, entered)


def _unreachable(name: str, state: Any, error: Exception) -> CommError:
    """What is said where torch's own error comes through: whoever keeps the ranks' store is gone, say."""
    failed: CommError = state.version.lineage.runtime.fail(
        f"{name}: the other ranks, or their store, cannot be reached", error
    )
    return failed


def outside_inference(fn: F) -> F:
    """For functions that make what is kept: under torch.inference_mode they run as under torch.no_grad."""

    @wraps(fn)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return fn(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return fn(*args, **kwargs)

    return cast(F, outside)


def ordinary(tree: Any) -> Any:
    """The same tree, with copies in the place of tensors that were made under torch.inference_mode."""

    def copied(t: torch.Tensor) -> torch.Tensor:
        return t.clone() if t.is_inference() else t

    with torch.inference_mode(False), torch.no_grad():
        return pytree.tree_map_only(torch.Tensor, copied, tree)


_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def provide(satellite: str, *functions: Callable[..., Any]) -> None:
    """A satellite has these functions, or classes, for the core."""
    _FUNCTIONS.update({f"{satellite}.{function.__name__}": function for function in functions})


def provided(name: str) -> Callable[..., Any]:
    """The function of a satellite, as "graph.unshard", which need not be there before it is called."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return _FUNCTIONS[name](*args, **kwargs)

    return function
