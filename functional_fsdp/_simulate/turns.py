"""Ranks that take turns, and what each has of its own.

Own: what each rank has of its own that a process has once: it is put in place when the rank's turn comes, and taken
away when it ends. Everything else that is the process's (globals of modules, the working directory) ranks share.

Turns: ranks that are threads of this process, of which exactly one runs at a time. It passes the baton on where it
waits for another rank, or ends.

    rank 0   ──compute── waits │                            │ ──compute── ...
    rank 1                     │ ──compute── waits          │
    rank 2                     │                ──compute── │    the next one that can go on, in order of ranks

So a run is deterministic. Time is that of waits: where no rank can go on, the clock jumps to the first wait that has a
limit, which ends with "not yet", so that a rank looks around as between processes. Where that changes nothing either,
nothing ever will: the ranks are stopped, and what each waits for is said.
"""

from __future__ import annotations

import contextvars
import ctypes
import io
import os
import random
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch

from .._common.calls import bring_back, must_wait, put_away, users_line
from .._common.device import random_state, set_random_state
from .._common.errors import FsdpError
from .._common.torch_names import (
    compile_id,
    dual_level_verbs,
    forward_ad,
    func_transforms,
    parametrize,
    set_forward_enabled,
)
from .._io import checkpoint
from .._runtime import runtime


class DualLevel:
    """Torch's level of dual numbers, of which a process has one: ranks that are in it share it, and tangents are there
    until the last one leaves. A rank that has left, which is a thread, does not see them, up to its next level."""

    def __init__(self) -> None:
        self.inside = 0
        self.verbs = [getattr(*place) for place in dual_level_verbs]

    def enter(self) -> int:
        level: int = 0 if self.inside and forward_ad._current_level < 0 else self.verbs[0]()
        self.inside += 1
        set_forward_enabled(True)
        return level

    def exit(self, *, level: int) -> None:
        self.inside -= 1
        if self.inside:
            set_forward_enabled(False)
        else:
            self.verbs[1](level=level)


DUAL = DualLevel()

Mode = tuple[Callable[[], Any], Callable[[Any], Any]]
MODES: tuple[Mode, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda on: torch.set_anomaly_enabled(*on),
    ),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
)  # torch's, of a process: a rank begins with those of the caller


class Own:
    """Attributes of modules, torchrun's variables, random generators, modes of torch, and where it prints.

    Args:
        places: {(module, attribute): value}, beside those that every rank has.
        environ: variables; None: there is none of that name.
    """

    def __init__(self, places: Mapping[tuple[Any, str], Any], environ: Mapping[str, str | None]) -> None:
        self.places = dict(places)
        self.environ = dict(environ)
        self.traced: Any = ([], [])
        self.modes = [get() for get, _ in MODES]
        self.drawn: Any = (torch.Generator().get_state(), None), random.Random(0).getstate(), None

    @classmethod
    def of_the_caller(cls, like: Own) -> Own:
        """What is in place now, where that of a rank will be."""
        found = cls(
            {(module, name): getattr(module, name) for module, name in like.places},
            {name: os.environ.get(name) for name in like.environ},
        )
        return found

    @staticmethod
    def fresh() -> dict[tuple[Any, str], Any]:
        """What a process that has made no mesh yet has of this package, and what torch keeps by module."""
        return {
            (runtime, "_RUNTIMES"): {},
            (runtime, "_unused"): [],
            (checkpoint, "_saving"): type(checkpoint._saving)(),
            (parametrize, "_cache_enabled"): 0,
            (parametrize, "_cache"): {},
            (forward_ad, "_current_level"): -1,
            (func_transforms, "JVP_NESTING"): 0,
            dual_level_verbs[0]: DUAL.enter,
            dual_level_verbs[1]: DUAL.exit,
        }

    def leave(self) -> None:
        for module, name in self.places:
            self.places[module, name] = getattr(module, name)
        self.traced = put_away()
        self.modes = [get() for get, _ in MODES]
        numpy = sys.modules.get("numpy")
        self.drawn = random_state(), random.getstate(), numpy and numpy.random.get_state()

    def enter(self) -> None:
        for (module, name), value in self.places.items():
            setattr(module, name, value)
        bring_back(self.traced)
        for (get, put), mode in zip(MODES, self.modes, strict=True):
            if get() != mode:
                put(mode)
        for name, said in self.environ.items():
            if said is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = said
        of_torch, of_python, of_numpy = self.drawn
        set_random_state(of_torch)
        random.setstate(of_python)
        if of_numpy is not None:
            sys.modules["numpy"].random.set_state(of_numpy)


class Stream(io.TextIOBase):
    """Where a rank prints: where the caller does, each line with the rank's number in front."""

    encoding = "utf-8"

    def __init__(self, to: Any, rank: int) -> None:
        self.to, self.prefix = to, f"[rank {rank}] "
        self.begun = False  # whether there is a part of a line

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self.to.write(line if self.begun else self.prefix + line)
            self.begun = not line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self.to.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        found: int = self.to.fileno()
        return found


NEVER = float("inf")
VERBS = {"unshard": "gather", "reduce": "reduce"}  # the lane of each
QUIET = 3.0  # seconds of the ranks' clock in which nothing changes: longer than any rank waits for news of another
LOOK = 0.05  # seconds after which the caller looks whether Ctrl-C was pressed
TICK = 0.001  # seconds, where what is waited for is none of the ranks'


class Deadlock(RuntimeError):
    """No rank can go on. waits: what each says."""

    def __init__(self, waits: dict[int, str]) -> None:
        super().__init__("no rank can go on:\n  " + "\n  ".join(waits.values()))
        self.waits = waits


class Killed(BaseException):
    """The end of a rank, as of a process that was killed."""


class Fault(NamedTuple):
    """Where a rank is killed: in which step, counted from 1; in which verb, and of which unit ("": in any)."""

    step: int
    verb: str
    unit: str

    @classmethod
    def of(cls, text: str) -> Fault:
        """ValueError: it is none."""
        found = re.fullmatch(r"step (\d+)(?:, in (unshard|reduce)(?: of (.+))?)?", text)
        if found is None:
            raise ValueError(f"{text!r} is no place in a run. Say 'step 5', or 'step 5, in reduce of blocks.2'")
        return cls(int(found[1]), found[2] or "", found[3] or "")

    def __str__(self) -> str:
        where = f", in {self.verb}{self.unit and f' of {self.unit}'}" if self.verb else ""
        return f"step {self.step}{where}"

    def here(self, step: int, lane: str, buckets: Iterable[str]) -> bool:
        return (
            step == self.step
            and (not self.verb or lane == VERBS[self.verb])
            and (not self.unit or any(one.partition(":")[0] == self.unit for one in buckets))
        )


class Rank:
    """A rank: its thread while a call runs, and what it has of its own."""

    def __init__(self, number: int, own: Own) -> None:
        self.number, self.own = number, own
        self.thread: threading.Thread | None = None
        self.baton = threading.Lock()  # who waits for it waits for its turn
        self.gone = ""  # how it was killed
        self.fault: Fault | None = None
        self.begin()

    def begin(self) -> None:
        """A call begins."""
        self.ready: Callable[[], bool] | None = None  # what it waits for; None: it can go on
        self.until = NEVER  # when it stops waiting
        self.real = False  # whether it waits for something outside
        self.what = ""
        self.over = self.stopped = False
        self.skipped = 0
        self.result: Any = None
        self.error: BaseException | None = None

    def frame(self) -> FrameType | None:
        return sys._current_frames().get(self.thread.ident or 0) if self.thread else None

    def said(self) -> str:
        """What it waits for, and where."""
        if self.over or self.gone:
            return f"rank {self.number} {self.gone or ('raised' if self.error is not None else 'has ended')}"
        return f"rank {self.number} waits for {self.what}, at {users_line(traceback.walk_stack(self.frame()))}"


class Turns:
    """The ranks of one simulation, and whose turn it is.

    Args:
        order: "ranks", the next one that can go on; or "random", any of them, also after each collective.
        slow: by rank, how many turns of others pass before one of its own.

    Attributes:
        now: seconds, by the ranks' clock. moved: when a rank last did something that another may wait for.
        failure: why the ranks are stopped.
    """

    def __init__(self, ranks: Sequence[Rank], order: str, seed: int, slow: Mapping[int, int]) -> None:
        self.ranks, self.slow = ranks, slow
        self.random = random.Random(seed) if order == "random" else None
        self.now = self.moved = 0.0
        self.current: Rank | None = None
        self.stop: type[BaseException] | None = None
        self.failure: Deadlock | None = None
        self.failed: list[Rank] = []  # that raised, in this order
        self.heard: set[Any] = set()
        self.finished = threading.Event()

    # ---- the caller's side

    def run(self, work: Callable[[Rank], Any], struck: list[int], caller: Own) -> None:
        """`work` on every rank, to its end. Each keeps its result or error.

        Args:
            struck: grows by an item for each Ctrl-C.
        """
        ranks = [rank for rank in self.ranks if not rank.gone]
        if not ranks:
            return
        self.stop = self.failure = None
        self.failed = []
        self.finished.clear()
        self.moved = self.now
        for rank in ranks:
            rank.begin()
            rank.baton.acquire(blocking=False)
            context = contextvars.copy_context()
            rank.thread = threading.Thread(
                target=context.run, args=(self._live, rank, work), name=f"rank {rank.number}", daemon=True
            )
            rank.thread.start()
        caller.leave()
        try:
            self.current = self._choose()
            assert self.current is not None
            self.current.own.enter()
            self.current.baton.release()
            seen = 0
            while not self.finished.wait(LOOK):
                if len(struck) > seen:
                    self.stop, seen = KeyboardInterrupt, len(struck)
                    if seen > 1:  # a rank may never wait
                        self._strike()
        finally:
            caller.enter()
        for rank in ranks:
            assert rank.thread is not None
            rank.thread.join()
            rank.thread = None

    def _strike(self) -> None:
        """Stop the rank whose turn it is, wherever it is in Python."""
        rank = self.current
        if rank is not None and rank.thread is not None:
            rank.stopped = True
            struck = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(rank.thread.ident or 0), struck)

    def _live(self, rank: Rank, work: Callable[[Rank], Any]) -> None:
        """The life of a rank's thread."""
        rank.baton.acquire()
        try:
            with torch.autograd.set_multithreading_enabled(False):  # a backward runs here, too
                self._check(rank)
                rank.result = work(rank)
        except BaseException as error:
            if not rank.gone:
                rank.error = error
                self.failed.append(rank)
        rank.over = True
        self.moved = self.now
        self._pass_on(rank)

    # ---- a rank's side

    def issues(self, step: int, lane: str, buckets: Iterable[str]) -> None:
        """This rank is about to issue something: perhaps its last."""
        rank = self.current
        assert rank is not None
        if rank.fault is not None and rank.fault.here(step, lane, buckets):
            rank.gone, rank.fault = f"was killed in {rank.fault}", None
            self.stir()
        self._check(rank)

    def stir(self, news: Any = None) -> None:
        """This rank does something that another may wait for.

        Args:
            news: what it says while it waits, which changes something once.
        """
        if news is None:
            self.heard.clear()
        if news is None or news not in self.heard:
            self.moved = self.now
            self.heard.add(news)

    def offer(self) -> None:
        """A place where another rank may go on."""
        if self.random is not None and self.current is not None:
            self.park(None, "")

    def rest(self, seconds: float) -> None:
        self.park(_never, "another rank", seconds)

    def park(
        self, ready: Callable[[], bool] | None, what: str, patience: float = NEVER, real: bool = False
    ) -> bool:  # fmt: skip
        """Let others go on until it is `ready`, or for so long. Returns whether it is.

        Args:
            what: is waited for, for people. real: it is not for a rank to do.
        """
        rank = self.current
        assert rank is not None
        if ready is None or not ready():
            if compile_id() is not None:
                raise FsdpError(
                    "simulated ranks cannot wait for each other while torch.compile is at work, which does one "
                    "thing at a time in a process. Take the step eagerly or by T.cuda_graph, or compile units by "
                    "T.forward_backward(compile=...); or run it on processes."
                )
            rank.ready, rank.until, rank.what, rank.real = ready, self.now + patience, what, real
            self._pass_on(rank)
            rank.ready, rank.until, rank.real = None, NEVER, False
            self._check(rank)
        return ready is None or ready()

    def _check(self, rank: Rank) -> None:
        """Raise if this rank is to stop here."""
        if rank.gone:
            raise Killed(rank.gone)
        if self.stop is not None and not rank.stopped and not must_wait(sys._getframe(1)):
            rank.stopped = True
            raise self.stop

    def _pass_on(self, rank: Rank) -> None:
        """To whoever is next; returns when it is this rank's turn again."""
        following = self._choose()
        if following is rank:
            return
        rank.own.leave()
        self.current = following
        if following is None:
            self.finished.set()
            return
        following.own.enter()
        following.baton.release()
        if not rank.over:
            rank.baton.acquire()

    def _choose(self) -> Rank | None:
        """The next rank that goes on; None where all have ended."""
        while True:
            at = self.ranks.index(self.current) + 1 if self.current is not None else 0
            living = [rank for rank in (*self.ranks[at:], *self.ranks[:at]) if not (rank.over or rank.gone)]
            if not living:
                return None
            able = [rank for rank in living if rank.ready is None or self._stops(rank) or rank.ready()]
            if able:
                return self._of(able)
            if any(rank.real for rank in living):
                time.sleep(TICK)
                continue
            first = min(living, key=lambda rank: rank.until)
            if first.until - self.moved > QUIET:
                self._fail(living)
                continue
            self.now = max(self.now, first.until)
            return first

    def _stops(self, rank: Rank) -> bool:
        return self.stop is not None and not rank.stopped and not must_wait(rank.frame())

    def _of(self, able: list[Rank]) -> Rank:
        if self.random is not None:
            return self.random.choice(able)
        for rank in able:
            rank.skipped += 1
            if rank.skipped >= self.slow.get(rank.number, 1):
                rank.skipped = 0
                return rank
        return able[0]

    def _fail(self, living: list[Rank]) -> None:
        """No rank can go on."""
        if self.failure is None:
            self.failure = Deadlock({rank.number: rank.said() for rank in self.ranks})
            self.stop = KeyboardInterrupt
        else:  # those that must not be stopped wait for those that were
            for rank in living:
                rank.ready = None
        self.moved = self.now


def _never() -> bool:
    return False
