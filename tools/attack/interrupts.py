"""interrupts: an exception or SIGINT at a random place of a random rank, then the same again: the same bits, or a
documented error.

    where    "line": a line of the package, counted by sys.settrace; "signal": a real SIGINT after a random time
    what     KeyboardInterrupt, RuntimeError, MemoryError, OSError (of a line; a signal is a KeyboardInterrupt)
    during   a step in one of three ways, an evaluation, save, shard, full_params, pmean
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

from .trained import PRESETS, WAYS, batch, digest, make, steps_of
from .verdict import PATIENCE, Ended, Verdict, Wrong, documented, judged

Case = dict[str, Any]
PACKAGE = str(Path(fsdp.__file__).resolve().parent)
TRANSFORMS = str(Path(fsdp.__file__).resolve().parents[1] / "transforms")
MOMENTS = 6  # at which the same is interrupted
ISSUING = ("submit", "_advance", "add", "advance")  # functions in which collectives are issued, of older versions, too


class Boom(RuntimeError):
    """What is raised on purpose where it is no interrupt."""


class NoMemory(Boom, MemoryError):
    """The same as a failed allocation."""


class Broken(Boom, OSError):
    """The same as a failed system call."""


ERRORS: dict[str, type[BaseException]] = {
    "KeyboardInterrupt": KeyboardInterrupt,
    "RuntimeError": Boom,
    "MemoryError": NoMemory,
    "OSError": Broken,
}


# ---------------------------------------------------------------- cases


def draw(seed: int, index: int) -> Case:
    """The case of this seed and index. Several that follow each other interrupt the same at other moments."""
    rng = Random(f"interrupts:{seed}:{index // MOMENTS}")
    world = rng.choice((1, 2, 2, 2, 4))
    case: Case = {
        "kind": "interrupts", "world": world, "preset": rng.choice(PRESETS), "way": rng.choice(WAYS),
        "transport": "copy_engine" if rng.random() < 0.3 else "collective", "prefetch": rng.choice((0, 1, 1, 2)),
        "micros": rng.choice((1, 1, 2)), "clip": rng.random() < 0.2, "sgd": rng.random() < 0.3,
        "during": rng.choice(("step",) * 12 + ("eval", "eval", "save", "full", "pmean", "shard", "load")),
        "number": rng.choice((0, 1, 1)), "patience": 25,
    }  # fmt: skip
    rng = Random(f"interrupts:{seed}:{index}")
    case |= {
        "where": rng.choice(("line", "line", "line", "signal")), "at": round(rng.random(), 4),
        "what": rng.choice(("KeyboardInterrupt",) * 4 + ("RuntimeError", "MemoryError", "OSError")),
        "who": sorted(rng.sample(range(world), rng.choice((1, 1, world)))),
    }  # fmt: skip
    case["anywhere"] = rng.random() < 0.08  # also while a collective is being issued
    if case["where"] == "signal":
        case["what"] = "KeyboardInterrupt"
    return case


_undisturbed: dict[str, Any] = {}  # digests after each step, seconds and lines of what is interrupted


def play(case: Case, rank: int, folder: str) -> Verdict:
    """On one rank: undisturbed once (kept), then with the interrupt."""
    same = ("world", "preset", "way", "transport", "prefetch", "micros", "clip", "sgd", "during", "number")
    key = repr([case[name] for name in same])
    if key not in _undisturbed:
        _undisturbed[key] = Run(case, rank, f"{folder}/undisturbed").undisturbed()
    want, seconds, lines = _undisturbed[key]
    run = Run(case, rank, folder)
    try:
        got = run.disturbed(seconds, lines)
    except Wrong:
        raise
    except Exception as error:
        if run.issuing or (documented(error) and run.may_end(error)):
            raise Ended(error) from error
        said = judged(error, time.monotonic() - run.began, 0.7 * PATIENCE)
        return Verdict(said.column, said.text, {"met": run.met}, clean=False)
    if got != want:
        raise Wrong(f"after {run.met}: other bits from step {_first(got, want)} on")
    return Verdict("right", "", {"met": run.met}, clean=True)


def _first(got: list[str], want: list[str]) -> int:
    return next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)


class Run:
    """Three steps of one case, one of which (or what comes before it) is interrupted and tried again."""

    def __init__(self, case: Case, rank: int, folder: str) -> None:
        self.case, self.rank, self.folder = case, rank, folder
        self.met: list[str] = []
        self.tries = 0
        self.began = time.monotonic()
        self.issuing = False

    def undisturbed(self) -> tuple[list[str], float, int]:
        counter = Counter()
        spent: list[float] = []

        def around(do: Callable[[], Any]) -> Any:
            begun = time.perf_counter()
            do()  # once to warm up and to time
            spent.append(time.perf_counter() - begun)
            with counter:
                return do()

        def begun(do: Callable[[], Any]) -> Any:
            if self.case["during"] in ("step", "shard"):  # cannot be done twice
                before = time.perf_counter()
                with counter:
                    out = do()
                spent.append((time.perf_counter() - before) / 4)  # as it is without counting, about
                return out
            return around(do)

        return self._train(begun), spent[0], counter.count

    def disturbed(self, seconds: float, lines: int) -> list[str]:
        def again(do: Callable[[], Any]) -> Any:
            mine = self.rank in self.case["who"]
            while True:
                self.tries += 1
                try:
                    if mine and self.tries == 1:
                        with self._trap(seconds, lines):
                            return do()
                    return do()
                except (KeyboardInterrupt, Boom) as error:
                    self._note(error)
                except Exception as error:
                    self.met.append(type(error).__name__)
                    if mine and self.tries == 1:
                        self._note(error.__cause__ or error.__context__)
                    restart = isinstance(error, fsdp.RestartError)
                    caused = isinstance(error.__cause__ or error.__context__, (Boom, KeyboardInterrupt))
                    told = ": on purpose" in str(error)  # by the rank that met it
                    if not restart and not told and not (caused and documented(error)):
                        raise
                if self.tries > 6:
                    raise Wrong(f"tried {self.tries} times: {self.met}")

        return self._train(again)

    def _note(self, error: BaseException | None) -> None:
        """Where it was interrupted."""
        frames = traceback.extract_tb(error.__traceback__) if error is not None else []
        inside = [frame for frame in frames if frame.filename.startswith((PACKAGE, TRANSFORMS))]
        said = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(inside[-4:]))
        self.met.append(f"{type(error).__name__} at {said}")
        self.issuing = issuing([frame.name for frame in reversed(frames)])

    def may_end(self, error: BaseException) -> bool:
        """Whether the documentation lets an interrupt end like this: an update cut short, or a step that all had taken
        when it came, whose state is lost. Soon, where ranks meet: in time that nobody notices. A look or a constructor
        that the others had done with when the interrupt came is called again by one rank alone, which all are told."""
        said, soon = str(error), time.monotonic() - self.began < 2.5
        if isinstance(error, fsdp.ScheduleError) and self.case["during"] != "step":
            return soon
        if isinstance(error, fsdp.CheckpointError) and "names the folder" in said:
            return soon  # each try has another name, and a rank may try alone
        met = isinstance(error, fsdp.CommError) and (self.case["during"] in ("shard", "save", "load") or "step" in said)
        return "half updated" in said or "consumed by step() number" in said or (met and soon)

    def _trap(self, seconds: float, lines: int) -> Any:
        error = ERRORS[self.case["what"]]
        if self.case["where"] == "line":
            return Counter(1 + int(self.case["at"] * lines), error, self.case["anywhere"])
        return Signal(self.case["at"] * seconds)

    def _train(self, around: Callable[[Callable[[], Any]], Any]) -> list[str]:
        case, during = self.case, self.case["during"]
        kept = during != "shard" and case["number"] > 0  # else what first calls do is interrupted, too
        if during == "shard":
            made = around(lambda: make(case))
            state, model = made
        else:
            state, model = make(case, kept)
        step = steps_of(case, model, self.rank, kept)
        evaluate = T.apply(model) if during == "eval" else None
        x = batch(case, 9, self.rank, 0)
        digests = []
        for number in range(case["number"] + 2):
            if number == case["number"] and during not in ("step", "shard"):
                state = self._look(around, state, evaluate, x)
            if number == case["number"] and during == "step":
                state = around(partial(step, state, number))
            else:
                state = self._listening(around, partial(step, state, number))
            digests.append(digest(state))
        return digests

    def _listening(self, around: Any, do: Callable[[], Any]) -> Any:
        """A peer that was interrupted late may still ask for a restart."""
        try:
            return do()
        except fsdp.RestartError:
            self.met.append("RestartError")
            return do()

    def _look(self, around: Any, state: fsdp.State, evaluate: Any, x: torch.Tensor) -> fsdp.State:
        during = self.case["during"]
        if during == "eval":
            around(lambda: evaluate(state, x))
        elif during == "pmean":
            around(lambda: fsdp.pmean(state, x))
        elif during == "full":
            around(lambda: fsdp.full_params(state))
        elif during == "save":
            names = iter(range(100))
            around(lambda: fsdp.save(state, f"{self.folder}/saved{next(names)}"))
        elif during == "load":
            fsdp.save(state, f"{self.folder}/saved")
            return around(lambda: fsdp.load(f"{self.folder}/saved", like=state))
        return state


# ---------------------------------------------------------------- how it is interrupted


def issuing(names: list[str]) -> bool:
    """Whether a collective is being issued, from the names of functions, the innermost first: the one moment that the
    documentation says cannot be undone."""
    for name in names:
        if name in ("_finish", "drain"):
            return False  # in a wait
        if name in ISSUING:
            return True
    return False


def _names(frame: Any) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


class Counter:
    """Counts lines of the package that this thread runs, and raises `error` at the one numbered `at` (or the next at
    which no collective is being issued, unless `anywhere`)."""

    def __init__(self, at: int = -1, error: type[BaseException] | None = None, anywhere: bool = False) -> None:
        self.count, self.at, self.error, self.anywhere = 0, at, error, anywhere

    def __enter__(self) -> Counter:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: Any, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        return self._line if file.startswith((PACKAGE, TRANSFORMS)) else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.error is not None and self.count >= self.at and (self.anywhere or not issuing([*_names(frame)])):
                sys.settrace(None)
                raise self.error("on purpose")
        return self._line


class Signal:
    """A real SIGINT after some seconds, from another thread; none once the block is left."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.over = threading.Event()

    def __enter__(self) -> Signal:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.thread = threading.Thread(target=self._send, daemon=True)
        self.thread.start()
        return self

    def _send(self) -> None:
        if not self.over.wait(self.seconds):
            os.kill(os.getpid(), signal.SIGINT)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.over.set()
        self.thread.join()


def smaller(case: Case) -> list[Case]:
    """Simpler cases."""
    plain = {"transport": "collective", "prefetch": 1, "micros": 1, "clip": False, "sgd": True, "preset": "zero3"}
    return [{**case, key: value} for key, value in plain.items() if case[key] != value]
