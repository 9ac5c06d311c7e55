"""Server: a process that imports torch once, and forks a worker whenever the caller asks for one.

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
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys
from multiprocessing import connection
from typing import Any, NoReturn

from .._common.device import forks_after_inductor
from .._common.torch_names import inductor
from .._io.writer_process import started
from . import worker

__all__ = ["Server", "exit_code", "serve"]

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
            worker.live(connection.Connection(pipe), more, me)
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
