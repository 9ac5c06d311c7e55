"""Worker processes: a server that forks them, and calls on all of a set.

Server: a process that imports torch once, and forks a worker whenever the caller asks for one.

      caller                                  server                        rank r of nprocs
        |---- starts it, at the first call ---->|  imports torch
        |---- one byte and descriptors -------->|---------- fork -------------->|  `worker.live`
        |<--- its exit code, on a pipe ---------|<--------- ends ---------------|

The caller itself is never forked: it may have run a backward, used CUDA, or have threads, none of which survives a
fork. The server does none of this: it has one thread, computes nothing and never touches CUDA.

What the caller has imported of this library when the server starts, the server imports, too, once and not each worker
for itself.

Nothing stays behind, however the caller ends: the server ends when the caller's end of its socket is closed, and on
Linux the kernel then kills the workers. Elsewhere each worker ends when the caller's end of its own pipe is closed.

Pool: the worker processes of one set, and one call at a time on all of them.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from multiprocessing import connection
from types import MappingProxyType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .._common.calls import of_the_program
from .._common.errors import FsdpError
from .._io.background import started
from .._shared.device import forks_after_inductor
from .._shared.torch_names import inductor
from .transfer import Key, dumps, loads
from .worker import STORE, Call, Setup, live

LIBRARY = __name__.partition(".")[0]
PRELOAD: list[str] = []  # modules beside this library's that the server imports before it forks
PLAIN, COMPILING = b"f", b"c"  # requests: fork; import what compiles first, then fork
FORMAT = struct.Struct("i")


class Server:
    """The caller's end. One server serves all workers of a process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        ours = [name for name in tuple(sys.modules) if name.partition(".")[0] == LIBRARY]
        self.process, self.socket = started(__name__, [*ours, *PRELOAD])

    def alive(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def fork(self, *files: int) -> tuple[connection.Connection, int]:
        """Ask for a worker that is also given these open files. Returns at once, while the server may still import.

        Returns:
            The pipe to the worker, and a descriptor from which `exit_code` reads how it ended.
        """
        ours, theirs = connection.Pipe()
        ended, status = os.pipe()
        compiling = "torch._dynamo" in sys.modules and "torch._inductor" in sys.modules and forks_after_inductor()
        try:
            request = COMPILING if compiling else PLAIN
            socket.send_fds(self.socket, [request], [theirs.fileno(), status, *files])
        except OSError:  # it died just now: the worker's pipe says so
            pass
        finally:
            theirs.close()
            os.close(status)
        return ours, ended

    def end(self) -> None:
        """End the server, and with it what it forked."""
        self.socket.close()
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
        else:
            self.process.returncode = 0  # another process's child: nobody here waits for it


def exit_code(ended: int) -> int | None:
    """What a process's status descriptor says: its exit code, minus the signal's number; None if nobody knows."""
    data = os.read(ended, FORMAT.size)
    return FORMAT.unpack(data)[0] if len(data) == FORMAT.size else None


def serve(fd: int) -> NoReturn:
    """The life of the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    caller = socket.socket(fileno=fd)
    statuses: dict[int, int] = {}  # by process: where to say how it ended
    gc.collect()
    gc.freeze()  # workers share these pages for as long as nobody writes to them
    while True:
        ready, _, _ = select.select([caller.fileno(), woken], [], [])
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4096)
        _reap(statuses)
        if caller.fileno() not in ready:
            continue
        try:
            request, files, _, _ = socket.recv_fds(caller, 1, 8)
        except ConnectionError:
            os._exit(0)
        if not request:
            os._exit(0)  # the caller is gone
        if request == COMPILING:
            inductor()  # once, and not once a worker
            gc.freeze()
        pipe, status, *more = files
        me = os.getpid()
        pid = _fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (woken, wake, status, *statuses.values()):
                os.close(other)
            caller.close()
            live(connection.Connection(pipe), more, me)
        for file in (pipe, *more):
            os.close(file)
        if pid < 0:
            os.close(status)
        else:
            statuses[pid] = status


def _fork() -> int:
    """The new process's number, 0 in it, -1 where the system has no room for it."""
    try:
        return os.fork()
    except OSError as error:
        print(f"functional_fsdp: no worker could be forked: {error}", file=sys.stderr)
        return -1


def _reap(statuses: dict[int, Any]) -> None:
    """Tell the caller how the workers ended that have ended."""
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        end = statuses.pop(pid)
        with contextlib.suppress(OSError):  # nobody wants to know any more
            os.write(end, FORMAT.pack(os.waitstatus_to_exitcode(status)))
        os.close(end)


GRACE = 4.0  # seconds: for the other ranks to finish once one has failed
STOPPED = 10.0  # seconds: for ranks to come to an end once they were told to, before they are killed
TURN = 0.1  # seconds after which a wait looks whether Ctrl-C was pressed

_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_server: list[Server] = []  # one at most: this process's


class LaunchError(FsdpError, RuntimeError):
    """A rank that `launch` or `workers` started raised or died; or a handle is of workers that are gone.

    Attributes:
        rank: the first rank that failed.
        reports: what each failed rank says, first failure first: its traceback, or how it died.
    """

    def __init__(self, message: str, reports: Mapping[int, str] = MappingProxyType({})) -> None:
        super().__init__(message)
        self.rank = next(iter(reports), None)
        self.reports = dict(reports)


class Rank:
    """The caller's side of one worker."""

    def __init__(self, pipe: connection.Connection, ended: int) -> None:
        self.pipe, self.ended = pipe, ended
        self.pid = 0  # until it says so
        self.end: str | None = None  # how it ended

    def over(self, patience: float = 0.0) -> str | None:
        """How its process ended, in words; None if it runs."""
        if self.end is None and select.select([self.ended], [], [], patience)[0]:
            code = exit_code(self.ended)
            if code is None:
                self.end = "ended with the process that started it"
            else:
                self.end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return self.end

    def send(self, kind: str, content: Any) -> None:
        with contextlib.suppress(OSError):  # it died: the next look says so
            self.pipe.send_bytes(pickle.dumps((kind, content)))

    def receive(self) -> tuple[str, Any]:
        """The next message: its kind and content; "died" is a message too, "" is none."""
        over = self.over()  # before looking into the pipe, whose last messages come first
        with contextlib.suppress(EOFError, OSError):
            if self.pipe.poll():
                return self.pipe.recv()
            if over is None:
                return "", None
        return "died", (f"the process {self.over(GRACE) or 'closed its pipe'}", "")


class Pool:
    """`nprocs` workers and the pipes to them. They start while the caller goes on."""

    shares_heap = False  # whether one garbage collection is that of all ranks

    def __init__(self, nprocs: int) -> None:
        self.owner = os.getpid()
        self.idle = True  # no worker is inside a call
        self.drop: list[Key] = []  # values that no handle refers to any more
        self.why = ""  # how it ended
        self.ranks: list[Rank] = []
        self.file, self.folder, store = _meeting_place()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]  # for code that calls torch's init_process_group itself
        environ = os.environ | {
            "WORLD_SIZE": str(nprocs),
            "LOCAL_WORLD_SIZE": str(nprocs),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            STORE: store,
        }
        _pools.add(self)
        files = [self.file] if self.file >= 0 else []
        filters = [*_filters()]
        try:
            for rank in range(nprocs):
                self.ranks.append(Rank(*server_of_this_process().fork(*files)))
                setup = Setup(rank, nprocs, environ, sys.argv, torch.get_num_threads(), filters, self.folder)
                with contextlib.suppress(OSError):
                    self.ranks[-1].pipe.send_bytes(pickle.dumps(setup))
        except BaseException:
            self.kill()
            raise

    def alive(self) -> bool:
        if not self.why and self.owner != os.getpid():
            self.why = "they belong to the process that forked this one"
        if not self.why:
            over = {rank: how for rank, worker in enumerate(self.ranks) if (how := worker.over())}
            self.why = "; ".join(f"rank {rank} {how}" for rank, how in over.items())
        return not self.why

    def kill(self, why: str = "they were stopped") -> None:
        """End the workers, if this process has not done so."""
        if not self.alive() and not self.ranks:
            return
        self.why = self.why or why
        if self.owner == os.getpid():
            for worker in self.ranks:
                if worker.pid and worker.over() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker.pid, signal.SIGKILL)
            for worker in self.ranks:
                if worker.pid:
                    worker.over(GRACE)
            if self.folder:
                shutil.rmtree(self.folder, ignore_errors=True)
        self.let_go()

    def let_go(self) -> None:
        """Close what leads to the workers, who end when nobody has it open."""
        for worker in self.ranks:
            worker.pipe.close()
            os.close(worker.ended)
        self.ranks = []
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    pack: Any = staticmethod(lambda task, special: dumps(task, special=special))
    unpack: Any = staticmethod(loads)

    def run(self, call: Call, name: str, struck: list[int]) -> list[Any]:
        """One call on every rank: shows what they print, and waits until all are done or all is lost.

        Args:
            name: of the call, for errors.
            struck: grows while it runs, by an item for each Ctrl-C.

        Returns:
            What each rank sent, in rank order.
        """
        self.idle = False
        results: dict[int, Any] = {}
        reports: dict[int, tuple[str, str]] = {}  # what happened, and the traceback
        stopped: list[int] = []
        stop_at = kill_at = math.inf
        spoilt, count = False, len(self.ranks)
        for worker in self.ranks:
            worker.send("call", call)
        del self.drop[: len(call.drop)]  # told; what came since then is behind them
        while busy := [r for r in range(count) if r not in results and r not in reports]:
            now = time.monotonic()
            if now >= kill_at or len(struck) > 1:
                break
            if not stopped and (struck or now >= stop_at):
                stopped, kill_at = busy, now + STOPPED
                for rank in stopped:
                    self.ranks[rank].send("stop", call.number)
            connection.wait([self.ranks[rank].pipe for rank in busy], timeout=TURN)
            for rank in busy:
                kind, content = self.ranks[rank].receive()
                if kind == "done":
                    results[rank] = content
                elif kind in ("failed", "died"):
                    reports[rank] = content
                    if kind == "failed":
                        stop_at = min(stop_at, time.monotonic() + GRACE)
                    else:
                        kill_at = time.monotonic()
                elif kind == "ready":
                    self.ranks[rank].pid = content
                elif kind in ("stdout", "stderr"):
                    print(content, end="", file=getattr(sys, kind), flush=True)
                elif kind == "spoilt":
                    spoilt = True
        self.idle = not busy and not spoilt and self.alive()
        if struck:
            if self.idle:
                raise KeyboardInterrupt(f"{name}: all {count} ranks have stopped, and keep what they hold.")
            late = f"rank {', '.join(map(str, busy))} did not stop in time, so " if busy else ""
            raise KeyboardInterrupt(f"{name}: {late}the workers are gone with what they held.")
        if reports:
            raise self._error(name, reports, [*busy, *(r for r in stopped if r not in busy)])
        return [results[rank] for rank in range(count)]

    def _error(self, name: str, reports: dict[int, tuple[str, str]], stopped: list[int]) -> LaunchError:
        # A process that died comes first: what its peers raised is that it was gone.
        reports = dict(sorted(reports.items(), key=lambda report: (report[0] in stopped, bool(report[1][1]))))
        first, (reason, _) = next(iter(reports.items()))
        texts = {rank: (text or what).strip() for rank, (what, text) in reports.items()}
        parts = [f"{name}: rank {first} of {len(self.ranks)} failed: {reason}"]
        parts += [f"rank {rank}:\n{text}" for rank, text in texts.items()]
        if stopped:
            parts.append(f"Stopped while still running: rank {', '.join(map(str, sorted(stopped)))}.")
        if not self.idle:
            parts.append("The workers are gone with what they held; the next call starts new ones.")
        return LaunchError("\n\n".join(parts), texts)


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """Within, Ctrl-C adds to a list instead of raising, so that no message is cut in two. (A handler of the program's
    own stays; an error that it raises ends the workers.)"""
    struck: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    if not main or of_the_program() is not signal.default_int_handler:
        yield struck
        return
    before = signal.signal(signal.SIGINT, lambda *_: struck.append(1))
    try:
        yield struck
    finally:
        signal.signal(signal.SIGINT, before)


def server_of_this_process() -> Server:
    if _server and not _server[0].alive():
        _server.pop().end()
    if not _server:
        _server.append(Server())
    return _server[0]


def end_all() -> None:
    """End every worker of this process, and what starts them."""
    for pool in list(_pools):
        pool.kill()
    while _server:
        _server.pop().end()


def forget_all() -> None:
    """In a child that the caller forked: the workers are not its own, and are to notice when the caller is gone."""
    for pool in list(_pools):
        pool.alive()
        pool.let_go()
    while _server:
        _server.pop().end()


def _filters() -> Iterator[bytes]:
    """The filters of warnings, each pickled, but for those that cannot be."""
    for item in warnings.filters:
        with contextlib.suppress(Exception):
            yield pickle.dumps(item)


def _meeting_place() -> tuple[int, str, str]:
    """Where the ranks' store lies: (descriptor or -1, folder or "", path)."""
    if sys.platform == "linux":
        file = -1
        try:
            file = os.memfd_create("functional_fsdp_store")
            path = f"/proc/self/fd/{file}"
            dist.FileStore(path).set("is", "here")  # type: ignore[attr-defined]
            return file, "", path
        except (OSError, RuntimeError):  # no /proc, say
            if file >= 0:
                os.close(file)
    folder = tempfile.mkdtemp(prefix="functional-fsdp-")
    return -1, folder, os.path.join(folder, "store")
