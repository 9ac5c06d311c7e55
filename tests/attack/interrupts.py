"""interrupts: an exception or SIGINT at a random place of a random rank, then the same again: the same bits, or a
documented error.

    where    "line": a line of the package, counted by sys.settrace; "signal": a real SIGINT after a random time
    what     KeyboardInterrupt, RuntimeError, MemoryError, OSError (of a line; a signal is a KeyboardInterrupt)
    during   a step in one of three ways, an evaluation, save, shard, full_params, pmean
"""

from __future__ import annotations

import hashlib
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
import torch.nn as nn
import torch.nn.functional as F

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

from .verdict import PATIENCE, Ended, Verdict, Wrong, documented, judged

__all__ = ["PACKAGE", "Boom", "Net", "digest", "draw", "loss_fn", "make", "play", "smaller", "steps_of"]

Case = dict[str, Any]
PACKAGE = str(Path(fsdp.__file__).resolve().parent)
TRANSFORMS = str(Path(fsdp.__file__).resolve().parents[1] / "transforms")
WAYS = ("tree", "unit", "driven")
STEPS = 3
PRESETS = ("zero3", "zero3", "zero2", "zero1", "ddp", "hsdp", "hfsdp")


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


# ---------------------------------------------------------------- a small model, and a step in three ways


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, d: int = 8, n: int = 3) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(d) for _ in range(n)), nn.Linear(d, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def mesh_of(preset: str, world: int) -> tuple[Any, fsdp.Placement]:
    placement = getattr(fsdp, preset)
    if preset in ("hsdp", "hfsdp"):
        outer = 2 if world % 2 == 0 else 1
        return fsdp.local_mesh(replica=outer, shard=-1), placement("replica", "shard")
    return fsdp.local_mesh(), placement("data")


def make(case: Case) -> tuple[fsdp.State, Any]:
    """A state and a skeleton, the same on every rank and in every call."""
    mesh, placement = mesh_of(case["preset"], case["world"])
    torch.manual_seed(case.get("weights", 0))
    params, model = fsdp.functionalize(Net())
    schedule = fsdp.Schedule(transport=case["transport"], prefetch=case["prefetch"])
    precision = fsdp.Precision(compute=torch.bfloat16) if case.get("bfloat16") else None
    optimizer = fsdp.sgd(lr=1e-2, momentum=0.9) if case.get("sgd") else fsdp.adamw(lr=1e-2)
    return fsdp.shard(params, fsdp.Spec(mesh, placement, schedule=schedule, precision=precision), optimizer), model


def batch(case: Case, step: int, rank: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro + 100_000 * case.get("data", 0))
    x = torch.randn(4, 8, generator=generator)
    return x.bfloat16() if case.get("bfloat16") else x


def steps_of(case: Case, model: Any, rank: int) -> Callable[[fsdp.State, int], fsdp.State]:
    """The train step of this case: `f(state, number) -> state`."""
    way, micros, clip = case["way"], case["micros"], case.get("clip")
    driven = T.forward_backward(model, loss_fn) if way == "driven" else None

    def micro(state: fsdp.State, x: torch.Tensor, last: bool) -> fsdp.State:
        if driven is not None:
            return driven(state, x, last=last)[0]
        if way == "tree":
            state, params = fsdp.unshard(state)
            grads, _ = torch.func.grad_and_value(lambda p: loss_fn(fsdp.bind(model, p), x))(params)
            return fsdp.reduce(state, grads, last=last)
        return by_unit(state, model, x, last)

    def step(state: fsdp.State, number: int) -> fsdp.State:
        for k in range(micros):
            state = micro(state, batch(case, number, rank, k), k == micros - 1)
        if clip:
            state, _ = T.clip_by_global_norm(state, 0.5)
        return fsdp.step(state)

    return step


def by_unit(state: fsdp.State, model: Any, h: torch.Tensor, last: bool) -> fsdp.State:
    """The second way, by hand."""
    blocks = [unit for unit in state.units if unit.startswith("blocks.")]

    def block(i: int, w: Any, h: torch.Tensor) -> torch.Tensor:
        return fsdp.bind(model.blocks[i], w)(h)

    def head(w: Any, h: torch.Tensor) -> torch.Tensor:
        return fsdp.bind(model.head, w)(h).square().mean()

    stage = {unit: partial(block, i) for i, unit in enumerate(blocks)} | {"head": head}
    pullbacks: dict[str, Any] = {}
    for unit, fn in stage.items():
        state, w = fsdp.unshard(state, unit)
        h, pullbacks[unit] = T.vjp(fn, w, h)
        state = fsdp.release(state, unit)
    dh = torch.ones_like(h)
    for unit in reversed(stage):
        state, w = fsdp.unshard(state, unit)
        dw, dh = pullbacks.pop(unit)(w, dh)
        state = fsdp.reduce(state, dw, unit, last=last)
        state = fsdp.release(state, unit)
    return state


def digest(state: fsdp.State) -> str:
    """Of the bits of main weights, optimizer state and count that this rank holds."""
    found = hashlib.sha256()
    for leaf in torch.utils._pytree.tree_leaves((state.main, state.opt, state.count)):
        if isinstance(leaf, torch.Tensor):
            found.update(bytes(leaf.detach().contiguous().reshape(-1).view(torch.uint8).tolist()))
    return found.hexdigest()


# ---------------------------------------------------------------- cases


def draw(seed: int, index: int) -> Case:
    """The case of this seed and index."""
    rng = Random(f"interrupts:{seed}:{index}")
    world = rng.choice((1, 2, 2, 2, 4))
    case: Case = {
        "kind": "interrupts", "world": world, "preset": rng.choice(PRESETS), "way": rng.choice(WAYS),
        "transport": "copy_engine" if rng.random() < 0.3 else "collective", "prefetch": rng.choice((0, 1, 1, 2)),
        "micros": rng.choice((1, 1, 2)), "clip": rng.random() < 0.2, "sgd": rng.random() < 0.3,
        "during": rng.choice(("step",) * 12 + ("eval", "eval", "save", "full", "pmean", "shard", "load")),
        "where": rng.choice(("line", "line", "line", "signal")), "at": round(rng.random(), 4),
        "what": rng.choice(("KeyboardInterrupt",) * 4 + ("RuntimeError", "MemoryError", "OSError")),
        "who": sorted(rng.sample(range(world), rng.choice((1, 1, world)))),
        "number": rng.choice((0, 1, 1)), "patience": 25,
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
                    if not restart and not (caused and documented(error)):
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
        when it came, whose state is lost. Soon, where ranks meet: in time that nobody notices."""
        said, soon = str(error), time.monotonic() - self.began < 2.5
        met = isinstance(error, fsdp.CommError) and (self.case["during"] in ("shard", "save", "load") or "step" in said)
        return "half updated" in said or "consumed by step() number" in said or (met and soon)

    def _trap(self, seconds: float, lines: int) -> Any:
        error = ERRORS[self.case["what"]]
        if self.case["where"] == "line":
            return Counter(1 + int(self.case["at"] * lines), error, self.case["anywhere"])
        return Signal(self.case["at"] * seconds)

    def _train(self, around: Callable[[Callable[[], Any]], Any]) -> list[str]:
        case, during = self.case, self.case["during"]
        if during == "shard":
            made = around(lambda: make(case))
            state, model = made
        else:
            state, model = make(case)
        step = steps_of(case, model, self.rank)
        evaluate = T.apply(model)
        x = batch(case, 9, self.rank, 0)
        digests = []
        for number in range(STEPS):
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
            return around(lambda: fsdp.load(state, f"{self.folder}/saved"))  # type: ignore[no-any-return]
        return state


# ---------------------------------------------------------------- how it is interrupted


def issuing(names: list[str]) -> bool:
    """Whether a collective is being issued, from the names of functions, the innermost first: the one moment that the
    documentation says cannot be undone."""
    for name in names:
        if name in ("_finish", "drain"):
            return False  # in a wait
        if name in ("submit", "_advance"):
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
