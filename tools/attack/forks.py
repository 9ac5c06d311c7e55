"""Forks: processes of a player's own, with all imported that a case may need, so that a case does not import it.

A player has one thread, computes nothing and is in no process group. So what the package starts as a fresh process, the
server that its workers come from, a player forks: what is tried of it, its life and its end, is the same.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterable

from functional_fsdp._launch import pool

MODULES = (  # what a step imports at first use, torch.func in most of them
    "torch._dynamo.compiled_autograd",
    "torch.utils._device",
    "torch.distributed.nn.jit.instantiator",
    "torch.distributed.checkpoint",
    "torch.utils.serialization.config",
    "multiprocessing.synchronize",
)
used = False  # in this process


def prepare() -> None:
    """Import what cases will. Before players are forked."""
    for name in MODULES:
        importlib.import_module(name)


def use() -> None:
    """This process is a player."""
    global used
    used = True
    vars(pool)["started"] = started


def fork(work: Callable[[], None]) -> int:
    """A process that does this. Its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def wait(pid: int) -> int:
    """Its exit code, once it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Forked:
    """A forked process, as `subprocess.Popen` is one that was started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self, flags: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, flags)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int | None:
        return self.poll(0)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def started(module: str, preload: Iterable[str] = ()) -> tuple[Forked, socket.socket]:
    """As the package's own: a process that runs `serve(fd)` of a module, with nothing open but that; and our end."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        os.setsid()
        fd = os.dup2(theirs.fileno(), 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        importlib.import_module(module).serve(fd)

    with theirs:
        return Forked(fork(serve)), ours
