"""Ranks that take turns in one process: what each has of its own, what they share, and how they reach each other.

    Own                                       what each has of its own
    Turns, Rank                               whose turn it is; deadlocks, faults
    Group, Meeting                            torch's ProcessGroup, in memory
    Traffic                                   what they have sent each other
    World, Lanes, Store, Watch, Vote, Medium  what they share, as the core asks for it
    torch_world, enter_torch                  how torch comes to know them

`Own`: what each rank has of its own that a process has once: it is put in place when the rank's turn comes, and taken
away when it ends. Everything else that is the process's (globals of modules, the working directory) ranks share.

`Turns`: ranks that are threads of this process, of which exactly one runs at a time. It passes the baton on where it
waits for another rank, or ends.

    rank 0   ──compute── waits │                            │ ──compute── ...
    rank 1                     │ ──compute── waits          │
    rank 2                     │                ──compute── │    the next one that can go on, in order of ranks

So a run is deterministic. Time is that of waits: where no rank can go on, the clock jumps to the first wait that has a
limit, which ends with "not yet", so that a rank looks around as between processes. Where that changes nothing either,
nothing ever will: the ranks are stopped, and what each waits for is said.

`Group`: torch's ProcessGroup, whose collectives meet in memory.

    rank 0   all_reduce ──▶ [ 0 ·  ·  · ]
    rank 2   all_reduce ──▶ [ 0 ·  2  · ]   the one that comes last does it for all of them, in order of ranks
    ...

Each rank has an object of its own for a group; the n-th collective of each is the same one.
"""

from __future__ import annotations

import contextvars
import ctypes
import io
import itertools
import os
import random
import re
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ._common.calls import bring_back, must_wait, put_away, users_line
from ._common.errors import FsdpError
from ._common.record import QUEUES, Collective, Mark
from ._common.torch_names import c10d
from ._distributed import HostVote, Levelled
from ._io import checkpoint
from ._runtime import runtime
from ._runtime.lanes import HostLanes
from ._shared.device import random_state, set_random_state
from ._shared.torch_names import (
    compile_id,
    dual_level_verbs,
    forward_ad,
    func_transforms,
    parametrize,
    python_dispatch,
    set_forward_enabled,
)


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

MODES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda on: torch.set_anomaly_enabled(*on),
    ),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
)  # torch's, of a process: a rank begins with those of the caller

WITHIN = [name for name in vars(python_dispatch) if name.startswith("_is_in_")]  # whether a mode of dispatch is active
tell_guards = getattr(python_dispatch, "set_is_in_mode_without_ignore_compile_internals", lambda within: None)


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
        return cls(
            {(module, name): getattr(module, name) for module, name in like.places},
            {name: os.environ.get(name) for name in like.environ},
        )

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
            **{(python_dispatch, name): False for name in WITHIN},
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
        tell_guards(vars(python_dispatch).get("_is_in_any_mode_without_ignore_compile_internals", False))
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
        self.park(lambda: False, "another rank", seconds)

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


_Base: Any = dist.ProcessGroup  # whose methods have several forms, of which `torch.distributed` calls one


class Meeting:
    """One collective, until all have come."""

    def __init__(self, what: str, rank: int, done: bool = False) -> None:
        self.what, self.first, self.done = what, rank, done
        self.came: dict[int, Any] = {}

    def over(self) -> bool:
        return self.done


class Work(dist.Work):
    """A collective under way, of one rank."""

    def __init__(self, world: Any, meeting: Meeting, result: Any = None) -> None:
        super().__init__()
        self.world, self.meeting, self.found = world, meeting, result

    def is_completed(self) -> bool:
        return self.meeting.done

    def is_success(self) -> bool:
        return self.meeting.done

    def result(self) -> Any:
        return self.found

    def wait(self, timeout: timedelta | None = None) -> bool:
        """RuntimeError: not within the timeout."""
        patience = timeout.total_seconds() if timeout else float("inf")
        if not self.meeting.done and not self.world.turns.park(self.meeting.over, self.meeting.what, patience):
            raise RuntimeError("not all ranks have come yet")
        return True


class Group(_Base):  # type: ignore[misc]
    """This rank's part of a group.

    Args:
        ranks: all of them, in the order of the group. key: the same on each of them.
    """

    def __init__(self, world: Any, rank: int, ranks: Sequence[int], key: Any) -> None:
        super().__init__(ranks.index(rank), len(ranks))
        self.world, self.global_rank, self.ranks, self.key = world, rank, list(ranks), key
        self.place, self.n = self.ranks.index(rank), len(ranks)
        self.count = 0
        self.name = self.description = ""
        self.here = [i for i, other in enumerate(ranks) if other in world.ranks]

    # ---- meeting

    def meet(self, what: str, mine: Any, act: Callable[[list[Any]], None]) -> Work:
        """This rank comes to a collective.

        Args:
            what: the same on all ranks. act: does it, of what each rank brought.

        Raises:
            RuntimeError: another rank has come to something else.
        """
        world, key = self.world, (self.key, self.count)
        meeting = world.meetings.get(key)
        if meeting is None:
            meeting = world.meetings[key] = Meeting(what, self.global_rank)
        if meeting.what != what:
            raise RuntimeError(
                f"rank {self.global_rank} comes to {what}, where rank {meeting.first} came to {meeting.what}: the "
                f"collective number {self.count + 1} of the ranks {self.ranks}"
            )
        self.count += 1
        meeting.came[self.place] = mine
        world.turns.stir()
        if len(meeting.came) == len(self.here):
            del world.meetings[key]
            with torch.no_grad():
                act(self._all(meeting.came))
            meeting.done, meeting.came = True, {}
        return Work(world, meeting)

    def _all(self, came: dict[int, Any]) -> list[Any]:
        """By place. Those that are not there bring what the first does, and get nothing."""
        if len(came) == self.n:
            return [came[i] for i in range(self.n)]
        _, given = came[self.here[0]]
        return [came.get(i, (None, given)) for i in range(self.n)]

    def note(self, axis: str, kind: str, x: torch.Tensor) -> None:
        """A model's own code sends this."""
        hop = Collective(kind, axis, x.numel(), x.dtype, "", "compute", "(the model)")
        self.world.traffic.note(self.global_rank, hop, self.n)

    # ---- collectives of this package

    def all_gather(self, what: str, out: torch.Tensor, given: torch.Tensor) -> Work:
        return self.meet(what, (out, given), _gather)

    def reduce_to(self, what: str, op: str, out: torch.Tensor, given: torch.Tensor, scatter: bool) -> Work:
        def act(came: list[Any]) -> None:
            total = _reduced([given for _, given in came], op)
            parts = total.view(-1).chunk(len(came)) if scatter else [total] * len(came)
            for (out, _), part in zip(came, parts, strict=True):
                if out is not None:
                    out.copy_(part.view(out.shape))

        return self.meet(what, (out, given), act)

    def exchange(self, what: str, out: list[torch.Tensor], given: list[torch.Tensor]) -> Work:
        """To each rank what every rank has for it."""

        def act(came: list[Any]) -> None:
            copies = [[part.clone() for part in given] for _, given in came]
            for place, (outs, _) in enumerate(came):
                for out, parts in zip(outs or (), copies, strict=False):
                    out.copy_(parts[place].view(out.shape))

        return self.meet(what, (out, given), act)

    def exchange_even(self, what: str, out: torch.Tensor, given: torch.Tensor) -> Work:
        def act(came: list[Any]) -> None:
            n = len(came)
            every = torch.stack([given.reshape(n, -1) for _, given in came], 1)  # [to, from, n / ranks]
            for place, (out, _) in enumerate(came):
                if out is not None:
                    out.copy_(every[place].view(out.shape))

        return self.meet(what, (out, given), act)

    # ---- torch's names for them, as `torch.distributed` calls them

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        op = _op(getattr(opts, "reduceOp", dist.ReduceOp.SUM))
        works = [self.reduce_to(_said("all_reduce", t, op), op, t, t, False) for t in tensors]
        return works[-1]

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        root = opts.rootRank

        def act(came: list[Any]) -> None:
            for place, (out, _) in enumerate(came):
                if out is not None and place != root:
                    out.copy_(came[root][1])

        (t,) = tensors
        return self.meet(_said(f"broadcast from {self.ranks[root]}", t), (t, t), act)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        op, root = _op(opts.reduceOp), opts.rootRank

        def act(came: list[Any]) -> None:
            if came[root][0] is not None:
                came[root][0].copy_(_reduced([given for _, given in came], op))

        (t,) = tensors
        return self.meet(_said(f"reduce to {self.ranks[root]}", t, op), (t, t), act)

    def allgather(self, outs: list[list[torch.Tensor]], given: list[torch.Tensor], opts: Any = None) -> Work:
        def act(came: list[Any]) -> None:
            for every, _ in came:
                for out, (_, part) in zip(every or (), came, strict=False):
                    out.copy_(part.view(out.shape))

        return self.meet(_said("all_gather", given[0]), (outs[0], given[0].clone()), act)

    def all_gather_single(self, out: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather(_said("all_gather", given), out, given)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outs: list[torch.Tensor], given: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return [self.all_gather_single(out, one) for out, one in zip(outs, given, strict=True)][-1]

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outs: list[list[torch.Tensor]], given: list[torch.Tensor], opts: Any) -> Work:
        def act(came: list[Any]) -> None:
            for out, (_, part) in zip(came[opts.rootRank][0] or (), came, strict=False):
                out.copy_(part)

        mine = outs[0] if outs else None
        return self.meet(_said(f"gather to {self.ranks[opts.rootRank]}", given[0]), (mine, given[0].clone()), act)

    def scatter(self, outs: list[torch.Tensor], given: list[list[torch.Tensor]], opts: Any) -> Work:
        def act(came: list[Any]) -> None:
            for (out, _), part in zip(came, came[opts.rootRank][1], strict=True):
                if out is not None:
                    out.copy_(part)

        mine = [part.clone() for part in given[0]] if given else None
        return self.meet(_said(f"scatter from {self.ranks[opts.rootRank]}", outs[0]), (outs[0], mine), act)

    def reduce_scatter(self, outs: list[torch.Tensor], given: list[list[torch.Tensor]], opts: Any = None) -> Work:
        return self.reduce_scatter_single(outs[0], torch.cat([part.reshape(-1) for part in given[0]]), opts)

    def reduce_scatter_single(self, out: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        op = _op(getattr(opts, "reduceOp", dist.ReduceOp.SUM))
        return self.reduce_to(_said("reduce_scatter", given, op), op, out, given, True)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outs: list[torch.Tensor], given: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return [self.reduce_scatter_single(out, one, opts) for out, one in zip(outs, given, strict=True)][-1]

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, out: torch.Tensor, given: torch.Tensor, came: Any = None, sent: Any = None, opts: Any = None
    ) -> Work:
        outs = [*out.split(list(came))] if came else [*out.chunk(self.n)]
        parts = [*given.split(list(sent))] if sent else [*given.chunk(self.n)]
        return self.exchange(f"all_to_all {given.dtype}", outs, parts)

    alltoall_base = all_to_all_single

    def alltoall(self, outs: list[torch.Tensor], given: list[torch.Tensor], opts: Any = None) -> Work:
        return self.exchange(f"all_to_all {given[0].dtype}", outs, given)

    def barrier(self, opts: Any = None) -> Work:
        return self.meet("barrier", (None, None), lambda came: None)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Work:
        self.world.letters.setdefault((self.key, self.place, to, tag), []).append(tensors[0].clone())
        self.world.turns.stir()
        return Work(self.world, Meeting("send", self.global_rank, done=True))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Work:
        letters = self.world.letters.setdefault((self.key, source, self.place, tag), [])
        self.world.turns.park(lambda: bool(letters), f"a message from rank {self.ranks[source]}")
        tensors[0].copy_(letters.pop(0))
        return Work(self.world, Meeting("recv", self.global_rank, done=True))

    # ---- what torch asks

    @property
    def group_name(self) -> str:
        return self.name

    @property
    def group_desc(self) -> str:
        return self.description

    def _set_group_name(self, name: str) -> None:
        self.name = name

    def _set_group_desc(self, description: str) -> None:
        self.description = description

    def getBackendName(self) -> str:
        return "simulated"

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def supports_splitting(self) -> bool:
        return False


def _gather(came: list[Any]) -> None:
    whole = torch.cat([given.reshape(-1) for _, given in came])
    for out, _ in came:
        if out is not None:
            out.copy_(whole.view(out.shape))


def _reduced(every: list[torch.Tensor], op: str) -> torch.Tensor:
    """In order of ranks."""
    total = every[0].clone()
    for one in every[1:]:
        if op in ("sum", "mean"):
            total += one
        else:
            total = _BINARY[op](total, one)
    return total.div_(len(every)) if op == "mean" else total


_BINARY: dict[str, Any] = {
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_OPS = {
    "SUM": "sum", "AVG": "mean", "MAX": "max", "MIN": "min", "PRODUCT": "product", "BAND": "band", "BOR": "bor",
    "BXOR": "bxor",
}  # fmt: skip


def _op(op: Any) -> str:
    found = next((name for kind, name in _OPS.items() if op == getattr(dist.ReduceOp, kind)), None)
    if found is None:
        raise RuntimeError(f"simulated ranks cannot reduce by {op}")
    return found


def _said(kind: str, t: torch.Tensor, op: str = "") -> str:
    return f"{kind}{op and f' ({op})'} of {str(t.dtype).removeprefix('torch.')} {list(t.shape)}"


BY = ("axis", "lane", "unit", "kind")


class Traffic:
    """The collectives of this package that simulated ranks issued, and the bytes that each rank received. Those of
    `T.collectives` in a model are on the lane "compute".

    Printing it shows a table by axis, lane, unit and kind, of all ranks together.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.clear()

    def clear(self) -> None:
        """Count from here on."""
        self.found: Counter[tuple[int, str, str, str, str]] = Counter()
        self.received: Counter[tuple[int, str, str, str, str]] = Counter()

    def note(self, rank: int, hop: Collective, ranks: int) -> None:
        key = rank, hop.axis or "(all)", hop.lane, hop.bucket, hop.kind
        self.found[key] += 1
        self.received[key] += hop.received(ranks)

    def bytes(self, **only: Any) -> int:
        """Received, by all ranks together or by those that are asked for.

        Args:
            **only: of rank, axis, lane, unit and kind, those that count.

        Example: `w.traffic.bytes(axis="shard", lane="gather", rank=0)`.
        """
        return _sum(self.received, only)

    def collectives(self, **only: Any) -> int:
        """How many were issued, each counted by every rank; otherwise as `bytes`."""
        return _sum(self.found, only)

    def __repr__(self) -> str:
        rows: dict[tuple[str, ...], list[int]] = {}
        for key, count in self.found.items():
            row = rows.setdefault(key[1:], [0, 0])
            row[0] += count
            row[1] += self.received[key]
        lines: list[tuple[str, ...]] = [(*BY, "collectives", "bytes received")]
        lines += [(*key, f"{count:,}", f"{nbytes:,}") for key, (count, nbytes) in sorted(rows.items())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        sides = ("<",) * len(BY) + (">", ">")
        return "\n".join(
            "  ".join(f"{text:{side}{width}}" for text, side, width in zip(line, sides, widths, strict=True))
            for line in lines
        )


def _sum(counted: Counter[tuple[int, str, str, str, str]], only: dict[str, Any]) -> int:
    names = ("rank", *BY)
    if unknown := only.keys() - {*names}:
        raise TypeError(f"traffic: {sorted(unknown)[0]!r} is unknown; expected some of {', '.join(names)}")
    chosen = [(names.index(name), value) for name, value in only.items()]
    return sum(n for key, n in counted.items() if all(key[i] == value for i, value in chosen))


BACKEND = "simulated"
WHOLE_STEP = (
    "simulated ranks cannot compile a whole step: torch.compile does one thing at a time in a process, and finds the "
    "communicators of one rank only. Take the step eagerly or by T.cuda_graph, or compile units by "
    "T.forward_backward(compile=...); or run it on processes."
)
NAMES = 1 << 20  # of groups, for each rank
_starts = itertools.count(1)


class World:
    """What the ranks of one simulation share.

    Attributes:
        ranks: those that there are; others bring what the first one brings.
        said: the ranks' store. cells: of votes, by the place of a mesh in it.
    """

    def __init__(self, size: int, turns: Turns) -> None:
        self.size, self.turns = size, turns
        self.ranks = {rank.number: rank for rank in turns.ranks}
        self.meetings: dict[Any, Meeting] = {}
        self.letters: dict[Any, list[torch.Tensor]] = {}
        self.said: dict[str, bytes] = {}
        self.cells: dict[str, bytearray] = {}
        self.traffic = Traffic(size)
        self.store: Any = dist.HashStore()  # type: ignore[attr-defined]


def simulated(hop: Collective, out: torch.Tensor, given: torch.Tensor, group: Group) -> Iterator[list[Any] | str]:
    """One collective, as `gloo` in `_runtime.lanes`: the same, as one meeting."""
    yield [partial(_issue, hop, out, given, group)]


def _issue(hop: Collective, out: torch.Tensor, given: torch.Tensor, group: Group) -> Work:
    what = f"{hop.kind} of {hop.bucket!r} ({hop.lane} lane, {hop.numel} {str(hop.dtype).removeprefix('torch.')})"
    world = group.world
    world.traffic.note(group.global_rank, hop, group.n)
    world.turns.offer()
    if hop.kind == "barrier":
        return group.meet(what, (None, None), lambda came: None)
    if hop.kind == "all_gather":
        return group.all_gather(what, out, given)
    if hop.kind == "all_to_all" and hop.splits:
        came, sent = hop.splits
        return group.exchange(what, [*out.split(list(came))], [*given.split(list(sent))])
    if hop.kind == "all_to_all":
        return group.exchange_even(what, out, given)
    return group.reduce_to(what, hop.op, out, given if hop.kind == "reduce_scatter" else out, hop.kind != "all_reduce")


class Lanes(HostLanes):
    """The host's queues, whose collectives are meetings."""

    backend = BACKEND
    collective = exchange = staticmethod(simulated)

    def traced(self, lane: str) -> str:
        raise FsdpError(WHOLE_STEP)

    def submit(self, lane: str, hops: tuple[Collective, ...], *args: Any, **kwargs: Any) -> Mark:
        self.run.medium.world.turns.issues(self.run.votes + 1, lane, [hop.bucket for hop in hops])
        return super().submit(lane, hops, *args, **kwargs)


class Store:
    """The ranks' store, of one mesh. What ranks say that are not there is what the first one says."""

    def __init__(self, world: World, ranks: list[int], place: str) -> None:
        self.world, self.place = world, place
        here = [i for i, rank in enumerate(ranks) if rank in world.ranks]
        self.instead = {str(i): str(here[0]) for i in range(len(ranks)) if i not in here}

    def _key(self, key: str) -> str:
        what, _, rank = key.rpartition("/")
        told = what.startswith(("status", "log")) and rank in self.instead
        return f"{self.place}/{what}/{self.instead[rank]}" if told else f"{self.place}/{key}"

    def check(self, keys: list[str]) -> bool:
        return all(self._key(key) in self.world.said for key in keys)

    def get(self, key: str) -> bytes:
        return self.world.said[self._key(key)]

    def set(self, key: str, value: str | bytes) -> None:
        key, data = f"{self.place}/{key}", value.encode() if isinstance(value, str) else value
        self.world.said[key] = data
        self.world.turns.stir((key, data))

    def delete_key(self, key: str) -> bool:
        return self.world.said.pop(f"{self.place}/{key}", None) is not None


class Watch:
    """Which ranks are gone, by place among those of a mesh."""

    def __init__(self, world: World, ranks: Mapping[int, int]) -> None:
        self.seen = {place: world.ranks[rank] for place, rank in ranks.items() if rank in world.ranks}
        self.size = len(ranks)

    def ended(self) -> list[int]:
        return [place for place, rank in self.seen.items() if rank.gone]

    def __len__(self) -> int:
        return self.size


class Vote(HostVote):
    """Numbers of a ballot meet as others do; what is issued is compared in cells."""

    def __init__(self, run: Any, memory: Any) -> None:
        super().__init__(memory, run.rank, run.size, run.watch, run.timeout)
        self.group = run.control

    def largest(self, ballot: Any) -> Iterator[list[Any] | str]:
        def act(came: list[Any]) -> None:
            most, least = (max(given[i] for _, given in came) for i in range(2))
            for out, _ in came:
                if out is not None:
                    out[0], out[1] = most, least

        yield [lambda: self.group.meet("a vote", (ballot, [int(n) for n in ballot]), act)]


class Medium:
    """By what a simulated rank reaches the others, see `_distributed`."""

    lanes = Lanes

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.met: Counter[Any] = Counter()

    def level(self, ranks: list[int], timeout: timedelta, offers: Any = ()) -> Levelled:
        self.met[tuple(ranks)] += 1
        place = f"{'.'.join(map(str, ranks))}/{self.met[tuple(ranks)]}"
        return Levelled(place, [], {i: rank for i, rank in enumerate(ranks) if rank != self.rank})

    def forget(self, place: str, ranks: list[int]) -> None:
        pass

    def store(self, place: str) -> Store:
        return Store(self.world, [*map(int, place.partition("/")[0].split("."))], place)

    def group(
        self, ranks: list[int], what: str, timeout: Any, backend: str, options: Any = None, gone: Any = None
    ) -> Group:
        key = tuple(ranks), what, self.met[tuple(ranks), what]
        self.met[tuple(ranks), what] += 1
        return Group(self.world, self.rank, ranks, key)

    def watch(self, ranks: Mapping[int, int]) -> Watch:
        return Watch(self.world, ranks)

    def vote(self, run: Any) -> Vote:
        size = Vote.nbytes(run.size, len(QUEUES))
        return Vote(run, self.world.cells.setdefault(run.place, bytearray(size)))

    def now(self) -> float:
        return self.world.turns.now

    def rest(self, seconds: float) -> None:
        self.world.turns.rest(seconds)

    def elsewhere(self) -> str:
        current = self.world.turns.current
        if current is not None and current.number == self.rank:
            return ""
        return (
            f"this state is of simulated rank {self.rank}, and ranks communicate within a call only. "
            "Give their handle to a function: ranks(fn, state)."
        )

    def until_done(self, future: Any) -> None:
        if self.world.turns.current is None:  # the caller asks, when all have ended
            Future.exception(future)
        else:
            self.world.turns.park(future.done, "what this process does beside it", real=True)


def torch_world(medium: Medium) -> Any:
    """What `torch.distributed` knows of groups, of one rank: nothing yet. Groups have names, which C++ has one space
    for: so each rank counts from another number on."""
    return SimpleNamespace(
        default_pg=None, pg_map={}, pg_names={}, pg_group_ranks={}, pg_backend_config={}, tags_to_pg={}, pg_to_tag={},
        pg_coalesce_state={}, comms=[], pg_config_info=[], group_count=next(_starts) * NAMES, medium=medium,
    )  # fmt: skip


def enter_torch(world: World, rank: int) -> None:
    """Have `torch.distributed` know this rank, in whose turn this is."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _made, extended_api=True, devices=["cpu", "cuda"])
    hook = sys.excepthook
    dist.init_process_group(BACKEND, store=world.store, rank=rank, world_size=world.size)
    sys.excepthook = hook
    group: Any = dist.group.WORLD
    group.medium = c10d._world.medium


def leave_torch(known: Any) -> None:
    """Nobody looks for these groups any more."""
    for name in known.pg_names.values():
        c10d._unregister_process_group(name)


def _made(options: Any, _: Any) -> Group:
    """A group of torch's, for the rank whose turn it is."""
    medium: Medium = c10d._world.medium
    return medium.group(list(options.global_ranks_in_group) or [*range(options.group_size)], "torch", None, BACKEND)
