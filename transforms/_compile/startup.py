"""startup: what the time before the first fast steps goes to, part by part, and what is being waited for now.

    a thread looks at the main thread's Python stack, a hundred times a second
    the innermost frame whose file is in PARTS says which part the moment belongs to

Nothing is hooked and nothing is changed: whoever does not ask pays nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from types import FrameType
from typing import TextIO

__all__ = ["StartupReport", "startup"]

EVERY = 0.01  # seconds between two looks
#: a part, and what stands in the path of a file of its code; the innermost frame that has one decides
PARTS = (
    ("imports", ("<frozen importlib", "importlib/")),
    ("Inductor: kernels", ("/torch/_inductor/", "/triton/")),
    ("AOTAutograd", ("/torch/_functorch/",)),
    ("Dynamo", ("/torch/_dynamo/", "/torch/fx/", "/torch/_guards", "/sympy/")),
    ("graph capture", ("/_cuda_graph/", "/_capture/")),
    ("agreement of ranks", ("/_runtime/agree", "/_runtime/joint", "/_runtime/restart", "/_distributed/store",
                            "/_distributed/groups")),
    ("weights and layout", ("/_state/init", "/_state/shard", "/_nn/", "/_spec/", "/_plan/", "/_common/checksum",
                            "/_io/sources")),
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
    """Looks at a thread's stack until `over` is set."""

    def __init__(self, report: StartupReport, patience: float, shows: TextIO | None) -> None:
        super().__init__(name="startup", daemon=True)
        self.report, self.patience, self.shows = report, patience, shows
        self.whose = threading.get_ident()
        self.over = threading.Event()
        self.known: dict[str, str | None] = {}  # by file: its part
        self.shown = 0  # characters of the line that stands on the terminal

    def run(self) -> None:
        begin = last = changed = perf_counter()
        before = ""
        seconds: dict[str, float] = {}
        while not self.over.wait(EVERY):
            part, now = self.look(), perf_counter()
            seconds[part] = seconds.get(part, 0.0) + now - last
            last = now
            if part != before:
                before, changed = part, now
            if self.shows and now - changed > self.patience:
                self.say(f"{part}: {now - changed:.0f} s, {now - begin:.0f} s since the start")
        self.report.total = perf_counter() - begin
        self.report.seconds = dict(sorted(seconds.items(), key=lambda item: -item[1]))
        self.say("")

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
        if self.shows and (line or self.shown):
            self.shows.write(f"\r{line:{self.shown}}" + ("" if line else "\r"))
            self.shows.flush()
            self.shown = len(line)


@contextmanager
def startup(patience: float = 5.0, progress: bool | None = None) -> Iterator[StartupReport]:
    """Within, find out what the time goes to: weights, imports, Dynamo, Inductor, graph capture, other ranks, steps.

    Args:
        patience: seconds. What takes longer is named on a line of its own, which is renewed, on standard error.
        progress: whether this process shows that line. None: rank 0 does, if standard error is a terminal.

    Gives a `StartupReport`, which is complete when the block ends.

    The thread that enters the block is looked at, a hundred times a second, by another one: a moment counts for the
    innermost frame of Python that says to whom it belongs. A wait for the device counts where it stands in the code.

    Example:
        >>> with T.startup() as report:
        ...     made = fsdp.shard({"w": torch.ones(3)}, fsdp.Spec(fsdp.local_mesh()))
        >>> report.total > 0
        True
    """
    report = StartupReport()
    shown = sys.stderr.isatty() and os.environ.get("RANK", "0") == "0" if progress is None else progress
    sampler = Sampler(report, patience, sys.stderr if shown else None)
    sampler.start()
    try:
        yield report
    finally:
        sampler.over.set()
        sampler.join()
