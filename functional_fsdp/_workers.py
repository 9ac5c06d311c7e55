"""Pool: the workers of `launch`, processes that are the ranks of this machine and outlive one call.

They are forked, so they have everything that the caller has imported and start at once.

      caller                                       rank r of nproc
        |----------------- fork --------------------->|  RANK, WORLD_SIZE, ... as torchrun sets them
        |---- fn, args (by value: _byvalue.py) ------->|  fn(*args); its process group and globals stay
        |<--- "stdout" | "stderr", what it prints ----|
        |<--- "spoilt" -------------------------------|  a collective failed: end these workers after the call
        |<--- "done", result | "failed", traceback ---|

The fork happens in a thread of its own. OpenMP keeps a pool for each thread that computed in parallel; the child of
such a thread would wait for a pool that was not copied, the child of a new thread makes its own. Inductor keeps a pool
of threads that compile, of which the child has the object and no thread: it forgets it.

Nothing stays behind, however the caller ends. On Linux the kernel kills the workers when the thread that forked them
is gone, so that one lives as long as they do, and the ranks meet in a file without a name (a memfd). Elsewhere workers
end when the caller's end of their pipe does, and remove the folder of the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import math
import multiprocessing.process
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from multiprocessing import connection, get_context
from types import MappingProxyType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from . import _byvalue
from ._errors import FsdpError
from ._runtime import any_failed
from ._torch import groups_of_the_process

__all__ = ["CUDA", "STORE", "TIMEOUT", "LaunchError", "Pool"]

STORE = "FUNCTIONAL_FSDP_STORE"  # the file over which ranks of this machine meet; `local_mesh` reads this and the next
TIMEOUT = "FUNCTIONAL_FSDP_TIMEOUT"  # seconds a collective may wait for the other ranks
PR_SET_PDEATHSIG = 1  # of prctl
GRACE = 5.0  # seconds that the other ranks have to finish once one has failed
CUDA = (
    "launch(): CUDA was initialised in this process before launch(), and a forked worker cannot use it then. "
    "Restart the notebook kernel and call launch() before anything touches CUDA (torch.cuda.is_available() does, "
    "unless PYTORCH_NVML_BASED_CUDA_CHECK=1 is set; so does a backward pass, even on the CPU), or use torchrun"
)
FORKED = "in combination with fork"  # torch's error says so, where a build with CUDA finds no GPU
REMEDY = (
    "The caller ran a backward (of a compiled function, say) before launch() forked its workers, and this build of "
    "torch cannot be forked after that. Call launch() before (launch(int, nproc) starts workers), or use torchrun"
)

_inherited: list[Any] = []  # process groups that came through a fork


class LaunchError(FsdpError, RuntimeError):
    """A rank that `launch` started raised or died.

    Attributes:
        rank: the first rank that failed.
        reports: what each failed rank says, first failure first: its traceback, or how it died.
    """

    def __init__(self, message: str, reports: Mapping[int, str] = MappingProxyType({})) -> None:
        super().__init__(message)
        self.rank = next(iter(reports), None)
        self.reports = dict(reports)


class Pool:
    """`nproc` workers and the pipes to them."""

    def __init__(self, nproc: int) -> None:
        if torch.cuda.is_initialized():
            raise RuntimeError(CUDA)
        self.idle = True  # no worker is inside a call
        self.file, self.folder, store = _meeting_place()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]  # for code that calls torch's init_process_group itself
        self.environment = {
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            STORE: store,
        }
        self.pipes: list[connection.Connection] = []
        self.processes: list[Any] = []
        self.failure: BaseException | None = None
        self.forked, self.gone = threading.Event(), threading.Event()
        threading.Thread(target=self._parent, args=(nproc,), daemon=True).start()
        try:
            self.forked.wait()
        except BaseException:
            self.forked.wait()
            self.kill()
            raise
        failure: BaseException | None = self.failure
        if failure is not None:
            self.kill()
            raise failure

    def _parent(self, nproc: int) -> None:
        """The life of the thread that forks the workers: it ends after them."""
        try:
            for rank in range(nproc):
                self._fork(rank, nproc)
        except BaseException as error:
            self.failure = error
        finally:
            self.forked.set()
        self.gone.wait()

    def _fork(self, rank: int, nproc: int) -> None:
        here, there = connection.Pipe()
        theirs = [*self.pipes, here]
        process = get_context("fork").Process(
            target=_work, args=(there, theirs, rank, nproc, self.environment, os.getpid(), self.folder)
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)  # of threads: see the top of this file
            process.start()
        there.close()
        self.pipes.append(here)
        self.processes.append(process)

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        self.gone.set()
        self._close()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def let_go(self) -> None:
        """In a process that the caller forked: the workers are to notice when the caller is gone."""
        self._close()
        children: Any = getattr(multiprocessing.process, "_children", None)
        for process in self.processes:
            if children is not None:
                children.discard(process)  # else this process waits for them at its exit

    def _close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def run(self, task: bytes, name: str) -> list[Any]:
        """Sends the task to every rank, shows what they print, and waits until all are done or all is lost."""
        self.idle = False
        results: dict[int, bytes] = {}
        reports: dict[int, tuple[str, str]] = {}  # what happened, and the traceback
        deadline, spoilt = math.inf, False
        for pipe in self.pipes:
            with contextlib.suppress(ConnectionError):
                pipe.send_bytes(task)
        while (busy := [r for r in range(len(self.pipes)) if r not in results and r not in reports]) and (
            time.monotonic() < deadline
        ):
            connection.wait([self.pipes[rank] for rank in busy], timeout=0.2)
            for rank in busy:
                kind, content = self._receive(rank)
                if kind == "done":
                    results[rank] = content
                elif kind in ("failed", "died"):
                    reports[rank] = content
                    deadline = min(deadline, time.monotonic() + (GRACE if kind == "failed" else 0))
                elif kind in ("stdout", "stderr"):
                    print(content, end="", file=getattr(sys, kind), flush=True)
                elif kind == "spoilt":
                    spoilt = True
        self.idle = not busy and not spoilt and self.alive()
        if reports:
            raise _error(name, len(self.pipes), reports, busy, self.idle)
        return [_byvalue.loads(results[rank]) for rank in sorted(results)]

    def _receive(self, rank: int) -> tuple[str, Any]:
        """The next message of a rank: its kind and content; "died" is a message too, "" is none."""
        code = self.processes[rank].exitcode  # before looking into the pipe, whose last messages come first
        with contextlib.suppress(EOFError, OSError):
            if self.pipes[rank].poll():
                return self.pipes[rank].recv()
            if code is None:
                return "", None
        self.processes[rank].join(GRACE)
        code = self.processes[rank].exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with code {code}"
        return "died", (f"the process {how}", "")


def _error(name: str, nproc: int, reports: dict[int, tuple[str, str]], busy: list[int], kept: bool) -> LaunchError:
    # A process that died comes first: what its peers raised is that it was gone.
    reports = dict(sorted(reports.items(), key=lambda report: bool(report[1][1])))
    first, (reason, _) = next(iter(reports.items()))
    texts = {rank: (text or what).strip() for rank, (what, text) in reports.items()}
    parts = [f"launch({name}): rank {first} of {nproc} failed: {reason}"]
    parts += [f"rank {rank}:\n{text}" for rank, text in texts.items()]
    if busy:
        parts.append(f"Stopped while still running: rank {', '.join(map(str, busy))}.")
    if not kept:
        parts.append("The workers are gone with what they held; the next launch() starts new ones.")
    return LaunchError("\n\n".join(parts), texts)


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


def _work(
    pipe: connection.Connection,
    theirs: list[connection.Connection],
    rank: int,
    nproc: int,
    env: dict[str, str],
    caller: int,
    folder: str,
) -> NoReturn:
    """The life of a worker: set up as a rank, then serve calls until the caller is gone."""
    try:
        _end_with(caller)
        for end in theirs:
            end.close()  # so that the workers notice when the caller is gone
        _become(rank, nproc, env)
        lock = threading.Lock()

        def send(kind: str, content: Any) -> None:
            with lock:
                pipe.send((kind, content))

        out, err = _Stream(send, "stdout", rank), _Stream(send, "stderr", rank)
        sys.stdout, sys.stderr = out, err
        while True:
            message = _serve(pipe.recv_bytes())
            out.finish()
            err.finish()
            if any_failed():
                send("spoilt", "")
            send(*message)
    except (EOFError, OSError):
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(1)


def _end_with(caller: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends, also in a collective."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != caller:  # it was gone before that
        os._exit(0)


def _become(rank: int, nproc: int, env: dict[str, str]) -> None:
    """Makes a forked process a rank: the environment of torchrun, no groups of the caller's, its part of the cores."""
    gc.freeze()  # what came through the fork is the caller's to clean up
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides what an interrupt means
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    for name in ("lo", "lo0"):  # all ranks are here, so no host name needs to be resolved
        if name in (interface for _, interface in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if dist.is_initialized():
        _inherited.extend(groups_of_the_process())  # their threads did not come along: never join them
        dist.destroy_process_group()
    torch.set_num_threads(max(1, torch.get_num_threads() // nproc))
    if inductor := sys.modules.get("torch._inductor.async_compile"):
        inductor.AsyncCompile.pool.cache_clear()


def _serve(task: bytes) -> tuple[str, Any]:
    """One call: ("done", result) or ("failed", (what, traceback))."""
    try:
        cwd, path, timeout, fn, args, kwargs = _byvalue.loads(task)
        os.chdir(cwd)
        sys.path[:] = path
        os.environ[TIMEOUT] = str(timeout)
        result = fn(*args, **kwargs)
        try:
            return "done", _byvalue.dumps(result, home=True)
        except Exception as error:
            raise TypeError(f"what it returned cannot be sent back: {error}") from error
    except BaseException as error:
        trace = error.__traceback__ and error.__traceback__.tb_next  # from fn on
        what = traceback.format_exception_only(error)[-1].strip()
        if FORKED in what:
            what += f". {REMEDY}"
        return "failed", (what, "".join(traceback.format_exception(type(error), error, trace)))


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
