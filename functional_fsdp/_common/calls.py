"""What a call on a State goes through before it does anything, and how the core calls what it does not import.

    ranged                        a name in a profile
    guard, uninterruptible        where an interrupt has to wait
    tracing, traced_as            whether a graph is made, and which function then runs
    verb, alone                   entries: all of these, and that no other thread is inside
    provide, provided             what the core calls by name, and a satellite has

Ranges: names in a profile for what the package does, on the thread and the stream where it happens.

    with torch.profiler.profile() as found:         fsdp unshard blocks.3   a verb, as the user calls it
        state, loss = train_step(state, batch)      fsdp gather blocks.4    what is given to a lane meanwhile
                                                    fsdp forward blocks.3, fsdp backward blocks.3

They are `record_function`: `torch.autograd.profiler.emit_nvtx` has them for other profilers. Callers make a range
only while a profiler runs, by a look at `profiler._is_profiler_enabled`, which is no call.

Interrupts: where a SIGINT has to wait, and how it comes through after that.

    waiting for others, a user's code between verbs     at once: whoever is stopped there begins the step anew
    while a job's collectives are issued                a few microseconds later: peers pair all of them or none
    from the vote of `step` to its end                  when the new state is in the caller's hands

Which of these it is, the stack says when a signal comes, so that nothing is done beforehand but to put a handler in the
place of the program's, from the first verb of a step until none is under way. A thread then looks every few
milliseconds whether the main thread has left what must not be stopped, and sends the signal again; a second one after a
second gets through whatever runs. Handlers of the program's own are called as they would have been, only later. Python
runs handlers in the main thread only, so elsewhere there is nothing to do.

Tracing is by torch.compile, or by `lower`. A function that is done in another way in a graph names that way where it is
defined: `verb`, `alone` and `traced_as` choose between the two, and nothing below them asks again. Traced, a function
is plain tensor operations and functional collectives (in the satellite `_graph`), with no stream, no event and no state
in Python.

Entries: what a call that works on a State goes through first, beside its own checks.

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

import _signal  # type: ignore[import-not-found] # signal's functions without its wrappers, which take microseconds
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from . import errors
from .errors import FsdpError, ScheduleError
from .torch_names import CInterpreter, dynamo, func_interpreter, profiler, pytree, set_grad_enabled


def ranged(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that has this name in the profile."""

    def within(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"fsdp {name}"):
            return fn(*args, **kwargs)

    return within


def said(name: str, args: tuple[Any, ...]) -> str:
    """A call of a verb: its name, and the units that it is given."""
    units = [one for one in args[1:] for one in ((one,) if isinstance(one, str) else one if type(one) is tuple else ())]
    return " ".join([name, *(one for one in units if isinstance(one, str))])


F = TypeVar("F", bound=Callable[..., Any])
SOON, PATIENCE = 0.003, 1.0  # seconds
OURS = __name__.partition(".")[0]

_uninterruptible: set[CodeType] = set()  # of what runs to its end
_waiting: list[float] = []  # when the interrupt came that waits: one at most, and who takes it out delivers it
_places: list[tuple[FrameType, int]] = []  # the callers of a `step` that was taken, and the lines that they were at


def uninterruptible(fn: F) -> F:
    """A function that an interrupt does not stop. It waits for no other rank, or no longer than a message takes."""
    _uninterruptible.add(fn.__code__)
    return fn


def guard() -> None:
    """A step begins: from here on it depends where an interrupt strikes. One that still waits comes through now."""
    if threading.get_ident() != threading.main_thread().ident:
        return
    if _waiting:
        resume()
    handler = _signal.getsignal(signal.SIGINT)
    if type(handler) is not Held and callable(handler):  # else it is ignored, or none of Python's
        _signal.signal(signal.SIGINT, Held(handler))


def leave() -> None:
    """The program's own handler is back."""
    handler = _signal.getsignal(signal.SIGINT)
    if type(handler) is Held and threading.get_ident() == threading.main_thread().ident:
        _signal.signal(signal.SIGINT, handler.before)


def of_the_program() -> Any:
    """The program's own handler of SIGINT, also while a step is under way."""
    handler = _signal.getsignal(signal.SIGINT)
    return handler.before if type(handler) is Held else handler


def arrive(others: bool) -> None:
    """The end of `step`: an interrupt that waits goes on waiting until the callers have the new state.

    Args:
        others: whether steps of other states are under way.
    """
    if _waiting and threading.get_ident() == threading.main_thread().ident:
        _places[:] = [(f, f.f_lineno) for f in frames_from(sys._getframe()) if _package(f) != OURS]
    if not others:
        leave()


def resume() -> None:
    """What waits comes through here and now, by the program's own handler."""
    leave()
    if _taken_out():
        signal.raise_signal(signal.SIGINT)


def _taken_out() -> bool:
    _places.clear()
    try:
        _waiting.pop()
    except IndexError:
        return False
    return True


class Held:
    """The handler in the place of the program's, which it knows: a program may save this one and put it back later, or
    call it from a handler of its own."""

    __slots__ = ("before",)

    def __init__(self, before: Any) -> None:
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if must_wait(frame):
            since = _waiting[:1]
            if not since:
                _waiting.append(now)
                threading.Thread(target=_carry, name="interrupt", daemon=True).start()
            if not since or now - since[0] < PATIENCE:
                return
        _taken_out()
        try:
            self.before(number, frame)
        except BaseException:
            leave()  # what is under way is given up
            raise


def _carry() -> None:
    """Sends the signal again as soon as the main thread may be stopped."""
    main = threading.main_thread().ident
    assert main is not None
    while _waiting:
        time.sleep(SOON)
        frame = sys._current_frames().get(main)
        if not must_wait(frame) and not _in_transit(frame):
            if _taken_out():
                signal.pthread_kill(main, signal.SIGINT)
            return


def must_wait(frame: FrameType | None) -> bool:
    """Whether what runs there is not to be stopped."""
    return any(f.f_code in _uninterruptible for f in frames_from(frame))


def _in_transit(frame: FrameType | None) -> bool:
    """Whether the state that `step` returned may not be in a caller's hands yet: the innermost of its callers that is
    still there has not come to another line."""
    running = {id(f) for f in frames_from(frame)}
    return next((caller.f_lineno == line for caller, line in [*_places] if id(caller) in running), False)


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _package(frame: FrameType) -> str:
    """The package whose code runs in a frame."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


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


def users_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The first line that is neither torch's nor this package's, as "file:line"; the innermost frame comes first."""
    for frame, line in frames:
        if _package(frame) not in ("torch", OURS, "contextlib") and "<" not in frame.f_code.co_filename:
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
    return any(frame.f_code in _codes for frame in frames_from(sys._current_frames().get(thread)))


def verb(traced: Callable[..., Any]) -> Callable[[F], F]:
    """A verb runs without autograd, in one thread at a time (see the top), outside torch.inference_mode, and not
    inside a torch.func transform (collectives cannot be differentiated).

    Args:
        traced: what it is inside torch.compile.
    """
    return lambda fn: _entered(fn, fn.__name__, 0, _in_graph(fn, traced), no_grad=True)


def _in_graph(fn: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    """What a verb is where a graph is made."""

    def in_graph(*args: Any, **kwargs: Any) -> Any:
        if isinstance(func_interpreter(), CInterpreter):  # what the compiler can tell
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
        except dist.DistError as error:  # torch's own: whoever keeps the ranks' store is gone, say
            raise run.fail(f"{name}: the other ranks, or their store, cannot be reached", error) from error
        finally:
            if no_grad:
                set_grad_enabled(before)
            if outermost and owner == me:
                users.pop(0, None)
        raise _busy(name, owner)

    _codes.add(cast(Any, entered).__code__)
    return cast(F, entered)


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
