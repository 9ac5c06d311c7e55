"""Interrupts: where a SIGINT has to wait, and how it comes through after that.

    waiting for others, a user's code between verbs     at once: whoever is stopped there begins the step anew
    while a job's collectives are issued                a few microseconds later: peers pair all of them or none
    from the vote of `step` to its end                  when the new state is in the caller's hands

Which of these it is, the stack says when a signal comes, so that nothing is done beforehand but to put a handler in the
place of the program's, from the first verb of a step until none is under way. A thread then looks every few
milliseconds whether the main thread has left what must not be stopped, and sends the signal again; a second one after a
second gets through whatever runs. Handlers of the program's own are called as they would have been, only later. Python
runs handlers in the main thread only, so elsewhere there is nothing to do.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # signal's functions without its wrappers, which take microseconds
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
SOON, PATIENCE = 0.003, 1.0  # seconds
OURS = __name__.partition(".")[0]

_codes: set[CodeType] = set()  # of what runs to its end
_waiting: list[float] = []  # when the interrupt came that waits: one at most, and who takes it out delivers it
_places: list[tuple[FrameType, int]] = []  # the callers of a `step` that was taken, and the lines that they were at


def uninterruptible(fn: F) -> F:
    """A function that an interrupt does not stop. It waits for no other rank, or no longer than a message takes."""
    _codes.add(fn.__code__)
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
        _places[:] = [(f, f.f_lineno) for f in _stack(sys._getframe()) if not _is_ours(f)]
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
    return any(f.f_code in _codes for f in _stack(frame))


def _in_transit(frame: FrameType | None) -> bool:
    """Whether the state that `step` returned may not be in a caller's hands yet: the innermost of its callers that is
    still there has not come to another line."""
    running = {id(f) for f in _stack(frame)}
    return next((caller.f_lineno == line for caller, line in [*_places] if id(caller) in running), False)


def _stack(frame: FrameType | None) -> Any:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == OURS
