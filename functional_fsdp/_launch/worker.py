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
caller does. Results that stay here are in a table, see `_launch.transfer`.

Reloads: modules that the caller has loaded anew are loaded anew in its workers.

Functions and classes of a module travel by name, and each worker imports the module once. Whoever edits the module and
reloads it (`importlib.reload`, `%autoreload`) has other code under the same name than workers that imported it before:
the caller counts its reloads, and a worker that is behind reloads, in the same way.

A module that is not reloaded stays as it was imported, in the caller and in the workers, whatever becomes of its file.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import pickle
import queue
import shutil
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import connection
from typing import Any, NamedTuple, NoReturn

import torch

from .._io.checkpoint import settled
from .._runtime.runtime import any_failed
from .transfer import Key, drop, dumps, keep, loads, namespaces

AUTORELOAD = "IPython.extensions.autoreload"
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Versions:
    """The caller's side: how often it has loaded each module of the user's own anew."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[Any, int]] = {}  # by module: its spec and its file's time when it was loaded last
        self.files: dict[str, str] = {}
        self.versions: dict[str, int] = {}
        self.modules = 0

    def look(self) -> tuple[dict[str, int], bool]:
        """By module: how often it was loaded anew; and whether by %autoreload, which changes old objects in place."""
        automatic = AUTORELOAD in sys.modules
        if self.modules != len(sys.modules):
            self.modules = len(sys.modules)
            for name, module in list(sys.modules.items()):
                if name not in self.seen and (file := _own_file(name, module)):
                    self.files[name] = file
                    self.seen[name] = module.__spec__, _time(file)
        for name, (spec, then) in self.seen.items():
            now = getattr(sys.modules.get(name), "__spec__", spec)
            if now is spec and not automatic:
                continue
            written = _time(self.files[name])
            self.seen[name] = now, written
            if written != then:
                self.versions[name] = self.versions.get(name, 0) + 1
        return dict(self.versions), automatic


def _own_file(name: str, module: Any) -> str:
    """The source file of a module of the user's own; "" for those that are installed."""
    spec = getattr(module, "__spec__", None)
    file = getattr(spec, "origin", None) or ""
    own = isinstance(file, str) and file.endswith(".py") and name.partition(".")[0] != __name__.partition(".")[0]
    return file if own and not file.startswith(INSTALLED) and "site-packages" not in file else ""


def _time(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


class Reloads:
    """A worker's side."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}
        self.old_objects: dict[Any, Any] = {}

    def follow(self, versions: dict[str, int], automatic: bool) -> None:
        """Load anew what the caller has loaded anew since the last call. What is not imported yet, is new anyhow."""
        for name, version in versions.items():
            if self.done.get(name, 0) < version and (module := sys.modules.get(name)):
                self._reload(module, automatic)
            self.done[name] = version

    def _reload(self, module: Any, automatic: bool) -> None:
        importlib.invalidate_caches()
        if automatic:
            from IPython.extensions.autoreload import superreload

            superreload(module, importlib.reload, self.old_objects)
        else:
            importlib.reload(module)


STORE = "FUNCTIONAL_FSDP_STORE"  # the file over which ranks of this machine meet; `local_mesh` reads this and the next
TIMEOUT = "FUNCTIONAL_FSDP_TIMEOUT"  # seconds a collective may wait for the other ranks
PR_SET_PDEATHSIG = 1  # of prctl
AGAIN = 0.01  # seconds until an interrupt that was lost comes again


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
    caller's refers to any more. reloads: which modules the caller has loaded anew, see `Reloads`.
    """

    number: int
    payload: Any  # bytes, for a process
    keep: bool
    cwd: str
    path: list[str]
    timeout: float
    drop: list[Key]
    reloads: tuple[dict[str, int], bool]


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
        drop(call.drop)  # before an interrupt may stop the call: it is said once
        try:
            try:
                self.serving = call.number
                if self.stopping:  # before this thread took the call up
                    self._interrupted()
                return "done", self._run(call)
            finally:
                self.serving = 0
        except BaseException as error:
            return "failed", report(error, __file__)

    def _run(self, call: Call) -> Any:
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
            return keep(call.number, result)
        try:
            return dumps(result, home=True)
        except Exception as error:
            raise TypeError(f"what it returned cannot be sent back: {error}") from error


def report(error: BaseException, *files: str) -> tuple[str, str]:
    """What happened, without its notes, and the traceback from fn on, which lies behind frames of these files.

    (A frame of it that refers to it would keep fn's variables.)
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in files:
        trace = trace.tb_next
    lines = traceback.format_exception_only(error)  # of a SyntaxError first its place, in lines that begin with a space
    what = next(line for line in lines if not line.startswith(" ")).strip()
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
