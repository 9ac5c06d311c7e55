"""Worker: the life of a process that is one rank of this machine, from its fork to the caller's end.

      caller                                       rank r of nprocs
        |---- Setup -------------------------------->|  RANK, WORLD_SIZE, ... as torchrun sets them
        |<--- "ready", its process's number ---------|
        |---- "call", Call ------------------------->|  fn(*args, **kwargs), on the main thread
        |<--- "stdout" | "stderr", what it prints ---|
        |---- "stop", number ----------------------->|  KeyboardInterrupt in that call, if it still runs
        |<--- "spoilt" ------------------------------|  a collective failed: end these workers after the call
        |<--- "done", result | "failed", report -----|

A second thread reads what the caller sends, so an interrupt arrives while a call runs, and the process ends when the
caller does. Results that stay here are in a table, under the numbers that the caller's handles have.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import pickle
import queue
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection
from typing import Any, NamedTuple, NoReturn

import torch

from .._checkpoint.pending import settled
from .._common.errors import FsdpError, StaleStateError
from .._common.torch_names import pytree
from .._runtime.restart import ALL
from .._runtime.runtime import any_failed, forget_runtime, runtimes
from .._state.state import State
from .._verbs.verbs import newest
from .reloads import Reloads
from .transfer import dumps, loads, namespaces

__all__ = ["STORE", "TIMEOUT", "Call", "Key", "Setup", "held", "live", "meshes", "renew", "same", "short"]

STORE = "FUNCTIONAL_FSDP_STORE"  # the file over which ranks of this machine meet; `local_mesh` reads this and the next
TIMEOUT = "FUNCTIONAL_FSDP_TIMEOUT"  # seconds a collective may wait for the other ranks
PR_SET_PDEATHSIG = 1  # of prctl
AGAIN = 0.01  # seconds until an interrupt that was lost comes again
WIDTH = 100  # characters of a value, where a handle is printed

Key = tuple[int, int | None]  # the number of a call, and a place in the tuple that it returned; None: all of it


class Setup(NamedTuple):
    """What a worker begins with, all of it the caller's: like a fork of it, but for what it has imported."""

    rank: int
    nprocs: int
    environ: dict[str, str]
    argv: list[str]
    threads: int  # of the caller
    filters: list[bytes]  # of warnings, each pickled
    folder: str  # where the ranks' store lies, if not in an open file


class Call(NamedTuple):
    """One call of a function.

    number: of the call. payload: (fn, args, kwargs). keep: whether the result stays here. drop: what no handle of the
    caller's refers to any more. reloads: which modules the caller has loaded anew, see `_launch.reloads`.
    """

    number: int
    payload: bytes
    keep: bool
    cwd: str
    path: list[str]
    timeout: float
    drop: list[Key]
    reloads: tuple[dict[str, int], bool]


# ---------------------------------------------------------------- results that stay here

_values: dict[Key, Any] = {}
_lengths: dict[int, int] = {}  # of results that are tuples, by call; their items lie one by one


def held(key: Key) -> Any:
    """The value of a handle."""
    number, place = key
    if place is None and number in _lengths:
        return tuple(_values[number, i] for i in range(_lengths[number]))
    return _values[key]


def _keep(number: int, result: Any) -> int | None:
    """Keep a call's result. Returns its length if it is a tuple that is not empty."""
    if type(result) is tuple and result:
        _lengths[number] = len(result)
        _values.update(((number, i), item) for i, item in enumerate(result))
        return len(result)
    _values[number, None] = result
    return None


def _drop(keys: Iterable[Key]) -> None:
    for number, place in keys:
        if place is None:
            for i in range(_lengths.pop(number, 0)):
                _values.pop((number, i), None)
        _values.pop((number, place), None)


def meshes() -> dict[str, int]:
    """After a call that failed or was stopped: the meshes on which this rank may have parted from others, each by a
    name that all of its ranks have for it, with the number of those."""
    gc.collect()  # states of the call that failed, which need not be compared
    return {name: run.size for name, run in runtimes().items()}


def renew(keys: list[Key], common: list[str]) -> None:
    """After a call that failed or was stopped: the ranks of every mesh meet, since some may have been stopped in a step
    and others after it. Each State that the call was given is the one after the last whole step.

    Args:
        keys: of the handles that the call was given.
        common: the meshes that all of their ranks have, in the order in which they meet.
    """
    here = runtimes()
    for name in here.keys() - {*common}:
        forget_runtime(here.pop(name), "A call was stopped while its ranks made their communicators.")
    places = [place for key in keys for place in _places(key)]
    given = _lineages(places)
    met = {id(run) for run, _ in given.values() if run.size == 1}
    for name in common:
        if name in here and _meet(here[name], given.get(id(here[name]), (None, []))[1]):
            met.add(id(here[name]))

    def later(state: State) -> State:
        lineage = state.version.lineage
        return _newest(state) if lineage.successor is None or id(lineage.runtime) in met else state

    seen: set[int] = set()
    for place in places:
        _values[place] = _replaced(_values[place], later, seen)


def _places(key: Key) -> list[Key]:
    """Where in the table the values of a handle lie."""
    number, place = key
    return [(number, i) for i in range(_lengths[number])] if place is None and number in _lengths else [key]


def _lineages(places: list[Key]) -> dict[int, tuple[Any, list[Any]]]:
    """The lineages of all States there, by the id of their runtime."""
    found: dict[int, tuple[Any, list[Any]]] = {}
    for state in _states([_values[place] for place in places], set()):
        lineage = state.version.lineage
        found.setdefault(id(lineage.runtime), (lineage.runtime, []))[1].append(lineage)
    return found


def _states(value: Any, seen: set[int]) -> Iterator[State]:
    """The States in a pytree, and in attributes of the user's objects there."""
    for leaf in pytree.tree_leaves(value, is_leaf=_is_state):
        if isinstance(leaf, State):
            yield leaf
        for attribute in _attributes(leaf, seen).values():
            yield from _states(attribute, seen)


def _replaced(value: Any, later: Callable[[State], State], seen: set[int]) -> Any:
    """`value` with each such State replaced by what `later` says. Objects stay the ones they are."""

    def at(leaf: Any) -> Any:
        if isinstance(leaf, State):
            return later(leaf)
        for name, attribute in [*_attributes(leaf, seen).items()]:
            own = [one for one in pytree.tree_leaves(attribute, is_leaf=_is_state) if isinstance(one, State)]
            found = _replaced(attribute, later, seen)
            if any(later(one) is not one for one in own):
                vars(leaf)[name] = found
        return leaf

    return pytree.tree_map(at, value, is_leaf=_is_state)


def _attributes(x: Any, seen: set[int]) -> dict[str, Any]:
    """Those of an object of a class of the user's own, once."""
    package = type(x).__module__.partition(".")[0]
    if package in ("builtins", "torch", __name__.partition(".")[0]) or isinstance(x, type | torch.nn.Module):
        return {}
    if id(x) in seen:
        return {}
    seen.add(id(x))
    return getattr(x, "__dict__", {})


def _meet(run: Any, lineages: list[Any]) -> bool:
    """The ranks of a runtime meet. Returns whether these states went equally far on all of them: where one was stopped
    while a verb moved a state, and others after it, nobody has it whole."""
    try:
        run.restart(lineages[-1].number if lineages else ALL)
        told = run.everyone(([len(lineage.successors) for lineage in lineages], run.lineage_count), "renew")
    except FsdpError:  # a state of it says so itself where it is used
        return False
    run.lineage_count = max(count for _, count in told)  # a rank was stopped before it made its last ones
    return all(gone == told[0][0] for gone, _ in told)


def _is_state(x: Any) -> bool:
    return isinstance(x, State)


def _newest(state: State) -> State:
    try:
        state._valid("a handle")
    except StaleStateError:
        with contextlib.suppress(StaleStateError):  # it says so itself where it is used
            return newest(state)
    return state


def same(value: Any) -> Any:
    """The value of a handle, sent to the caller."""
    return value


def short(value: Any) -> str:
    """A value in one line."""
    text = repr(value)
    text = " ".join(text.partition("\n")[0].split() if isinstance(value, State) else text.split())
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"


# ---------------------------------------------------------------- its life


def live(pipe: connection.Connection, files: list[int], server: int) -> NoReturn:
    """The life of a worker: set up as a rank, then serve calls until the caller is gone."""
    folder = ""
    try:
        _end_with(server)
        setup: Setup = pickle.loads(pipe.recv_bytes())
        folder = setup.folder
        _become(setup, files)
        worker = _Worker(pipe, setup)
        worker.send("ready", os.getpid())
        worker.work()
    except (EOFError, OSError):
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(1)


def _end_with(server: int) -> None:
    """Have the kernel kill this process when the server that forked it ends, also in a collective."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != server:  # it was gone before that
        os._exit(0)


def _become(setup: Setup, files: list[int]) -> None:
    """Makes this process a rank: the caller's environment and settings, torchrun's variables, its part of the cores."""
    os.environ.clear()
    os.environ.update(setup.environ, RANK=str(setup.rank), LOCAL_RANK=str(setup.rank))
    if files:  # the ranks meet in a file without a name
        os.environ[STORE] = f"/proc/self/fd/{files[0]}"
    for name in ("lo", "lo0"):  # all ranks are here, so no host name needs to be resolved
        if name in (interface for _, interface in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    sys.argv[:] = setup.argv
    warnings.resetwarnings()
    for item in setup.filters:
        with contextlib.suppress(Exception):  # a category that cannot be imported here
            warnings.filters.append(pickle.loads(item))  # type: ignore[attr-defined]
    torch.set_num_threads(max(1, setup.threads // setup.nprocs))


class _Worker:
    """Serves calls on the main thread, and reads what the caller sends on another."""

    def __init__(self, pipe: connection.Connection, setup: Setup) -> None:
        self.pipe, self.folder = pipe, setup.folder
        self.lock = threading.Lock()
        self.calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self.reloads = Reloads()
        self.serving = 0  # the number of the call that runs
        self.stopping = 0  # the number of the call that is to be stopped
        self.sending = False  # whether the main thread is in the middle of a message
        self.reporting = False  # or in `_swallowed`
        self.out, self.err = _Stream(self.send, "stdout", setup.rank), _Stream(self.send, "stderr", setup.rank)
        sys.stdout, sys.stderr = self.out, self.err

    def work(self) -> NoReturn:
        signal.signal(signal.SIGINT, self._interrupted)
        sys.unraisablehook = self._swallowed
        threading.Thread(target=self._read, name="caller", daemon=True).start()
        while True:
            message = self._serve(self.calls.get())
            namespaces.leave()
            self.out.finish()
            self.err.finish()
            if any_failed():
                self.send("spoilt", "")
            self.send(*message)
            del message  # which may be large

    def _read(self) -> None:
        try:
            while True:
                kind, content = pickle.loads(self.pipe.recv_bytes())
                if kind == "call":
                    self.calls.put(content)
                else:
                    self.stopping = content
                    self._strike()
        except (EOFError, OSError):
            if self.folder:
                shutil.rmtree(self.folder, ignore_errors=True)
            os._exit(0)

    def _strike(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)

    def _swallowed(self, what: Any) -> None:
        """An error in a finalizer, which Python reports and forgets. An interrupt that struck there comes again."""
        if what.exc_type is not KeyboardInterrupt or not self.serving:
            sys.__unraisablehook__(what)
            return
        self.reporting = True  # none may strike here, where it would be dropped, too
        self.stopping = self.serving
        threading.Thread(target=self._strike_again, daemon=True).start()
        self.reporting = False

    def _strike_again(self) -> None:
        time.sleep(AGAIN)
        while self.reporting:
            time.sleep(AGAIN)
        self._strike()

    def _interrupted(self, *_: Any) -> None:
        """The handler of SIGINT: it counts once, and only in the call that it is meant for."""
        if self.stopping and self.stopping == self.serving and not (self.sending or self.reporting):
            self.stopping = 0
            raise KeyboardInterrupt

    def send(self, kind: str, content: Any) -> None:
        data = pickle.dumps((kind, content))
        main = threading.current_thread() is threading.main_thread()
        self.sending = main or self.sending
        try:
            with self.lock:
                self.pipe.send_bytes(data)
        finally:
            if main:
                self.sending = False
        if main and self.stopping:  # an interrupt came in the middle of it
            self._interrupted()

    def _serve(self, call: Call) -> tuple[str, Any]:
        """One call: ("done", result) or ("failed", (what, traceback))."""
        try:
            try:
                self.serving = call.number
                if self.stopping:  # before this thread took the call up
                    self._interrupted()
                return "done", self._run(call)
            finally:
                self.serving = 0
        except BaseException as error:
            return "failed", _report(error)

    def _run(self, call: Call) -> Any:
        _drop(call.drop)
        os.chdir(call.cwd)
        sys.path[:] = call.path
        os.environ[TIMEOUT] = str(call.timeout)
        self.reloads.follow(*call.reloads)
        namespaces.enter()
        fn, args, kwargs = loads(call.payload)
        try:
            result = fn(*args, **kwargs)
        finally:
            settled()  # as Python does at the end of a program
        if call.keep:
            return _keep(call.number, result)
        try:
            return dumps(result, home=True)
        except Exception as error:
            raise TypeError(f"what it returned cannot be sent back: {error}") from error


def _report(error: BaseException) -> tuple[str, str]:
    """What happened, and the traceback from fn on. (A frame of it that refers to it would keep fn's variables.)"""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    what = traceback.format_exception_only(error)[-1].strip()
    return what, "".join(traceback.format_exception(type(error), error, trace))


class _Stream(io.TextIOBase):
    """A rank's stdout or stderr: whole lines go to the caller, which shows them where the user looks, a notebook cell
    say. Rank 0 may also flush a part of a line (a progress bar); the others' lines have their number in front."""

    encoding = "utf-8"

    def __init__(self, send: Callable[[str, Any], None], kind: str, rank: int) -> None:
        self.send, self.kind = send, kind
        self.prefix = f"[rank {rank}] " if rank else ""
        self.rest = ""  # an unfinished line

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + text).split("\n")
        if lines:
            self.send(self.kind, "".join(f"{self.prefix}{line}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        if self.rest and not self.prefix:
            self.send(self.kind, self.rest)
            self.rest = ""

    def finish(self) -> None:
        """Ends a line that the call left unfinished."""
        if self.rest:
            self.write("\n")

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return {"stdout": 1, "stderr": 2}[self.kind]
