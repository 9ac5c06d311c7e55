"""startup: what the time before the first fast steps goes to, part by part, and what is being waited for now.

    a thread looks at the main thread's Python stack, a hundred times a second
    the innermost frame whose file is in PARTS says which part the moment belongs to

Nothing is hooked and nothing is changed: whoever does not ask pays nothing. Where something is compiled or captured for
the first time, and standard error is a terminal, the line is there by itself: `waiting`.

Clock: how long calls of compiled modules take on the host, compiled or as Python runs them.

start_compilers: what compilers need before they can begin, on a thread, while something else is waited for.

start_compilers()        imports of Dynamo and Inductor   ┐ on the thread
ranks connect, init      Inductor's processes start       ┘
compile=True             waits for what is left of it

What is imported, recorded and traced stays, and Python's garbage collector would look at all objects two or three times
meanwhile: a quarter of a second each, in which no thread runs. `collect_later` puts that off.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from time import perf_counter
from types import FrameType
from typing import Any, TextIO

import torch.distributed as dist

from functional_fsdp._seams import torch_private

EVERY = 0.01  # seconds between two looks
PATIENCE = 5.0  # seconds that pass before a line says what is being waited for
LATER = 200  # the third number of `gc.set_threshold`: a start counts to 50 or 80, and Python sets 10
#: a part, and what stands in the path of a file of its code; the innermost frame that has one decides
PARTS = (
    ("imports", ("<frozen importlib", "importlib/")),
    ("Inductor: kernels", ("/torch/_inductor/", "/triton/")),
    ("AOTAutograd", ("/torch/_functorch/",)),
    ("Dynamo", ("/torch/_dynamo/", "/torch/fx/", "/torch/_guards", "/sympy/")),
    ("graph capture", ("/_cuda_graph/", "/_capture.py")),
    ("agreement of ranks", ("/_runtime/agree", "/_runtime/lanes", "/_runtime/restart", "/_distributed.py")),
    (
        "weights and layout",
        (
            "/_state/shard", "/_init.py", "/_nn/", "/_spec/", "/_plan/", "/_common/device", "/_shared/device",
            "/_io/load_weights",
        ),
    ),
    ("steps", ("functional_fsdp/", "/transforms/")),
)  # fmt: skip
OTHER = "elsewhere"  # the program's own code, or a wait for the device in it


class StartupReport:
    """What `startup` found. `print` shows a table.

    Attributes:
        seconds: by part, largest first, of the thread that entered `startup`.
        total: seconds since it was entered.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.total = 0.0

    def __str__(self) -> str:
        width = max(len(part) for part in (*self.seconds, "in all"))
        rows = [f"{part:{width}}  {took:7.2f} s  {took / self.total:4.0%}" for part, took in self.seconds.items()]
        return "\n".join([*rows, f"{'in all':{width}}  {self.total:7.2f} s"])


class Sampler(threading.Thread):
    """Looks at a thread's stack until `over` is set.

    Args:
        shows: where a line says what is being waited for, once `patience` seconds have passed. None: nowhere.
    """

    def __init__(self, report: StartupReport, patience: float, shows: TextIO | None) -> None:
        super().__init__(name="startup", daemon=True)
        self.report, self.patience, self.shows = report, patience, shows
        self.whose = threading.get_ident()
        self.over = threading.Event()
        self.known: dict[str, str | None] = {}  # by file: its part
        self.shown = ""  # the line that stands on the terminal

    def run(self) -> None:
        begin = last = self.now()
        seconds: dict[str, float] = {}
        while not self.wait():
            part, now = self.look(), self.now()
            seconds[part] = seconds.get(part, 0.0) + now - last
            last = now
            if now - begin > self.patience:
                self.say(f"{part}: {seconds[part]:.0f} s, {now - begin:.0f} s since the start")
        self.report.total = self.now() - begin
        self.report.seconds = dict(sorted(seconds.items(), key=lambda item: -item[1]))
        self.say("")

    def now(self) -> float:
        """Seconds, of a clock that only goes forward."""
        return perf_counter()

    def wait(self) -> bool:
        """Wait for the next look. Returns whether there is none."""
        return self.over.wait(EVERY)

    def look(self) -> str:
        """The part that the thread is in."""
        return self.part_of(sys._current_frames().get(self.whose))

    def part_of(self, frame: FrameType | None) -> str:
        """The part that a stack is in, from its innermost frame."""
        while frame is not None:
            part = self.part(frame.f_code.co_filename)
            if part is not None:
                return part
            frame = frame.f_back
        return OTHER

    def part(self, file: str) -> str | None:
        """Which part a file belongs to, if any."""
        if file not in self.known:
            path = file.replace(os.sep, "/")
            found = (part for part, marks in PARTS if any(mark in path for mark in marks))
            self.known[file] = next(found, None)
        return self.known[file]

    def say(self, line: str) -> None:
        """Show a line in the place of the one before."""
        if self.shows and line != self.shown:
            self.shows.write(f"\r{line:{len(self.shown)}}" + ("" if line else "\r"))
            self.shows.flush()
            self.shown = line


_watched = threading.Lock()  # held while a thread of this process is watched: there is one line


@contextmanager
def _watching(report: StartupReport, patience: float, shows: TextIO | None) -> Iterator[StartupReport]:
    alone = _watched.acquire(blocking=False)
    sampler = Sampler(report, patience, shows if alone else None)
    try:
        sampler.start()
        yield report
    finally:
        sampler.over.set()
        if sampler.ident is not None:
            sampler.join()
        if alone:
            _watched.release()


def _shows() -> bool:
    """Whether this process is the one that shows a line, and standard error a terminal."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    return rank == 0 and sys.stderr is not None and sys.stderr.isatty()


def waiting() -> AbstractContextManager[object]:
    """Around what compiles or captures: what takes longer than 5 s is named on a line, on rank 0's terminal. Elsewhere,
    and where this process shows such a line already, nothing happens."""
    if _watched.locked() or not _shows():
        return nullcontext()
    return _watching(StartupReport(), PATIENCE, sys.stderr)


def startup(patience: float = PATIENCE, progress: bool | None = None) -> AbstractContextManager[StartupReport]:
    """Within, find out what the time goes to: weights, imports, Dynamo, Inductor, graph capture, other ranks, steps.

    Args:
        patience: seconds. After them a line on standard error says what is being waited for, and for how long.
        progress: whether this process shows that line. None: rank 0 does, if standard error is a terminal.

    Gives a `StartupReport`, which is complete when the block ends.

    The thread that enters the block is looked at, a hundred times a second, by another one: a moment counts for the
    innermost frame of Python that says to whom it belongs. A wait for the device counts where it stands in the code.

    Without it the line is there where something is compiled or captured for the first time, on a terminal of rank 0.

    Example:
        >>> with T.startup() as report:
        ...     made = fsdp.shard({"w": torch.ones(3)}, fsdp.Spec(fsdp.local_mesh()))
        >>> report.total > 0
        True
    """
    shown = _shows() if progress is None else progress
    return _watching(StartupReport(), patience, sys.stderr if shown else None)


class Clock:
    """Takes the time of calls, for as long as a `Compiler` has it.

    Attributes:
        eager: whether modules run as Python does, though they are to be compiled.
        seconds: by class, of each of its calls: what the host took. None: not looked at, nothing is waited for.
        paths: by class, the modules that were called.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait  # for the device, whose queue may be full: then a launch takes as long as what is before it
        self.eager = False
        self.seconds: dict[type, list[float]] | None = None
        self.paths: dict[type, set[str]] = {}

    def call(self, cls: type, path: str, run: Callable[..., Any], *args: Any) -> Any:
        """`run(*args)`, timed."""
        if self.seconds is None:
            return run(*args)
        self.wait()
        since = perf_counter()
        out = run(*args)
        self.seconds.setdefault(cls, []).append(perf_counter() - since)
        self.paths.setdefault(cls, set()).add(path)
        return out


_started: list[threading.Thread] = []  # one, once it is asked for


def start_compilers() -> None:
    """Import Dynamo and Inductor, and start the processes in which Inductor compiles kernels, on a thread.

    The first compiled step waits seconds for them. Ranks that connect wait for the network, and `init` and `load` for
    the device and the disk: call it before, once the program's own imports are done. What is compiled later waits for
    what is left. The next garbage collection of all objects, a pause of all threads, comes after the start, of young
    ones as ever: until then the third number of `gc.get_threshold()` is 200. Nothing else changes; a second call does
    nothing, and `os.fork` waits until the thread is done.

    Example:
        >>> T.start_compilers()
        >>> mesh = fsdp.local_mesh()  # connects
    """
    if not _started:
        thread = threading.Thread(target=_start, name="start_compilers")
        _started.append(thread)
        os.register_at_fork(before=finish_start)  # a child would wait forever for what is being imported
        collect_later()
        thread.start()


def collect_later() -> None:
    """Put off the next garbage collection of all objects. After it they come as often as before."""
    first, second, before = gc.get_threshold()
    if 0 < before < LATER:
        gc.set_threshold(first, second, LATER)

        def collected(phase: str, info: dict[str, int]) -> None:
            nonlocal before
            first, second, now = gc.get_threshold()
            if phase == "stop" and info["generation"] == 2 and now == LATER:  # else somebody has set another one
                gc.set_threshold(first, second, before)
                before = LATER  # once
                if gc.callbacks[-1] is collected:  # else the one after it would miss this call
                    gc.callbacks.pop()

        gc.callbacks.append(collected)


def finish_start() -> None:
    """Wait for the thread, if there is one."""
    for thread in _started:
        if thread is not threading.current_thread():
            thread.join()


def _start() -> None:
    key = threading.Thread(target=torch_private.triton_key, name="start_compilers: key")
    key.start()  # it hashes files, and others can go on
    with suppress(Exception):  # whoever compiles imports it again, and sees why it fails
        torch_private.dynamo()
        torch_private.start_compilers()
        torch_private.inductor()
        torch_private.import_late()
    key.join()
