"""Sets of ranks that are called again and again: processes, or ranks that take turns.

Workers: a set of ranks on this machine that keep what calls return, and the handles to it.

Simulated ranks: the calls of `workers` and `launch` on ranks that take turns in this process.
"""

from __future__ import annotations

import atexit
import copy
import gc
import itertools
import math
import os
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import _simulate
from .._common.objects import contents_of
from .._common.torch_names import FakeTensorMode, c10d
from .._io.checkpoint import settled
from .._runtime.runtime import any_failed
from .._simulate import (
    Fault,
    Medium,
    Own,
    Rank,
    Stream,
    Traffic,
    Turns,
    World,
    enter_torch,
    leave_torch,
    torch_world,
)
from . import meshes as local_meshes
from . import transfer
from .pool import LaunchError, Pool, end_all, forget_all, interrupts
from .transfer import Key, drop, held, keep, meshes, renew, same, short
from .worker import Call, Versions, report

GET, PRINT = "Handle.get()", "repr(Handle)"  # calls that handles make, by name
HANDLES = "handles"  # in a copy's memo: what comes in their place
TIMEOUT = 600.0  # seconds a collective may wait, unless the caller says otherwise
_versions = Versions()


class Handle:
    """What a call returned, on the workers: a value on each rank.

    Printing it shows each rank's value in a line. It may be given to the next call, also inside a list or a closure,
    and is that rank's value there. Once no handle refers to a value, the workers drop it.
    """

    def __init__(self, owner: WorkerGroup, pool: Pool, key: Key) -> None:
        self._owner, self._pool, self._key = owner, pool, key
        weakref.finalize(self, pool.drop.append, key).atexit = False

    def get(self) -> list[Any]:
        """Every rank's value, in rank order. CUDA tensors arrive on the CPU.

        Raises:
            LaunchError: the workers are gone; a value belongs to its process (a State, a mesh); or its class has been
                defined anew here.
        """
        return self._owner._run(same, (self,), {}, keep=False, name=GET)

    def __repr__(self) -> str:
        if not self._pool.alive():
            return f"Handle of workers that are gone: {self._pool.why}"
        if self._owner._serving:
            return f"Handle of workers that are busy with {self._owner._serving}"
        return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(self._show()))

    def _show(self) -> list[str]:
        try:
            return self._owner._run(short, (self,), {}, keep=False, name=PRINT)
        except LaunchError as error:
            return [f"cannot be printed: {error.reports.get(rank, error)}" for rank in range(self._owner.nprocs)]

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        return memo[HANDLES](self) if HANDLES in memo else self.__reduce__()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a handle is a value on workers: give it to a call of the same workers, or fetch the value with .get()"
        )


class WorkerGroup:
    """Processes that are the ranks of this machine; made by `workers`. Calling it runs a function on every rank."""

    def __init__(self, nprocs: int, timeout: float | None, what: str) -> None:
        no_rank(what)
        if nprocs < 1:
            raise ValueError(f"{what}: nprocs is {nprocs}; expected the number of ranks, at least 1")
        self.nprocs, self.timeout, self._what = nprocs, TIMEOUT if timeout is None else timeout, what
        self._lock = threading.RLock()  # held by the thread whose call is being served
        self._serving = ""  # that call's function, by name
        self._numbers = itertools.count(1)
        self._pool: Pool | None = None
        self._closed = False
        _sets.add(self)
        self._start()

    def __call__(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `fn(*args, **kwargs)` on every rank, and keep what it returns there.

        The function and what it refers to are sent as the caller has them now: code of a notebook or of `__main__` by
        value, code of modules by name. What ranks print is shown, other ranks than 0 with their number before it.

        Ctrl-C stops the call on every rank. After that, as after a call that raised, each State that was given by a
        handle is the one after the last whole step, so the same call may be made again. (Steps that torch.compile runs
        whole keep none.) A rank that does not stop in time is killed, and a second Ctrl-C kills at once: then all that
        the workers held is lost.

        Returns:
            A handle; a tuple of handles, one an item, if every rank returned a tuple of the same length.

        Raises:
            LaunchError: a rank raised, with its traceback, or died; or a handle is of workers that are gone.
            TypeError: `fn` or its arguments hold something that cannot be sent.
            KeyboardInterrupt: the call was stopped.

        Example: `state, loss = w(train, state, 100)`.
        """
        return self._run(fn, args, kwargs, keep=True)

    def close(self) -> None:
        """End the workers and all that they hold. Closing twice is fine."""
        self._closed = True
        if self._pool is not None:
            self._pool.kill("they were closed")

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        status = "closed" if self._closed else f"busy with {self._serving}" if self._serving else "idle"
        if not self._closed and self._pool is not None and not self._pool.alive():
            status = f"gone ({self._pool.why}); the next call starts new ones"
        return f"{self._what}: {status}"

    def _start(self) -> Pool:
        """The workers, new ones if some have died."""
        if self._pool is None or not self._pool.alive():
            if self._pool is not None:
                self._pool.kill()
            self._pool = self._make()
            weakref.finalize(self, self._pool.kill).atexit = False
        return self._pool

    def _make(self) -> Pool:
        return Pool(self.nprocs)

    def _run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        keep: bool,
        timeout: float | None = None,
        name: str = "",
    ) -> Any:
        """One call: what every rank returned, or handles to it where they keep it. name: the function's by default."""
        name = name or str(getattr(fn, "__qualname__", fn))
        if self._closed:
            raise RuntimeError(f"{self._what} was closed, so {name} cannot run. Start new ones: fsdp.{self._what}")
        no_rank(self._what)
        with self._lock:
            if self._serving:
                raise RuntimeError(
                    f"{self._named(name)}: this thread is inside {self._named(self._serving)}, which has not returned. "
                    "Call one after the other"
                )
            self._serving = name
            try:
                return self._serve(name, fn, tuple(args), dict(kwargs), keep, timeout or self.timeout)
            finally:
                self._serving = ""

    def _serve(
        self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], keep: bool, wait: float
    ) -> Any:
        given: list[Key] = []
        what = self._named(name)
        payload = self._dumps(what, (fn, args, kwargs), given)
        pool = self._start()
        drop = list(pool.drop)
        call = Call(next(self._numbers), payload, keep, os.getcwd(), list(sys.path), wait, drop, _versions.look())
        try:
            with interrupts() as struck:
                found = pool.run(call, what, struck)
                returned = self._handles(pool, call.number, found) if keep else found
            if struck:
                raise KeyboardInterrupt(f"{what}: it had ended when the interrupt came. What it returned is dropped.")
        except BaseException:
            with interrupts():
                self._give_up(pool, given, call)
            raise
        finally:
            if not pool.idle:
                pool.kill(f"the call {what} was cut short")
        return returned if keep else [_loads(pool, what, rank, result) for rank, result in enumerate(found)]

    def _handles(self, pool: Pool, number: int, lengths: list[int | None]) -> Any:
        """A handle; of tuples that are equally long on every rank, one for each item."""
        length = lengths[0] if len({*lengths}) == 1 else None
        if length is None:
            return Handle(self, pool, (number, None))
        return tuple(Handle(self, pool, (number, i)) for i in range(length))

    def _give_up(self, pool: Pool, given: list[Key], call: Call) -> None:
        """After a call whose result nobody gets: ranks that ended well drop it, those of every mesh meet, and the
        handles that it was given refer to the newest states."""

        def run(fn: Callable[..., Any], *args: Any) -> list[Any]:
            again = call._replace(number=next(self._numbers), payload=pool.pack((fn, args, {}), {}), keep=False)
            return [pool.unpack(data) for data in pool.run(again._replace(drop=list(pool.drop)), "renew", [])]

        pool.drop.append((call.number, None))
        if not pool.idle:
            return
        try:
            if pool.shares_heap:
                gc.collect()
            found = run(meshes, not pool.shares_heap)
            sizes = {name: size for one in found for name, size in one.items()}
            common = [name for name, size in sorted(sizes.items()) if sum(name in one for one in found) == size]
            if (sizes or given) and pool.idle:
                run(renew, given, common)
        except LaunchError as error:  # that of the call itself says more; handles say this one
            pool.kill(f"their ranks could not meet after a call that failed: {str(error).splitlines()[0]}")

    def _dumps(self, what: str, task: Any, given: list[Key]) -> Any:
        def reduced(handle: Handle) -> Any:
            if not handle._pool.alive():
                raise LaunchError(
                    f"{what} was given a handle of workers that are gone: {handle._pool.why}. What they held is lost. "
                    "Begin again: call what made it, or load a checkpoint; the next call starts new workers"
                )
            if handle._pool is not self._pool:
                raise ValueError(f"{what} was given a handle of other workers. Fetch its value there with .get()")
            given.append(handle._key)
            return held, (handle._key,)

        try:
            return self._start().pack(task, {Handle: reduced})
        except (LaunchError, ValueError):
            raise
        except Exception as error:
            raise TypeError(
                f"{what} cannot be sent to the workers: {error}. Create what belongs to one process (a lock, an open "
                "file, a mesh) inside the function, not in a global or an argument"
            ) from error

    def _named(self, name: str) -> str:
        if name in (GET, PRINT):
            return name
        return f"launch({name})" if self._what == "launch" else f"{self._what}({name})"

    def _forked(self) -> None:
        """In a child that the caller forked: the thread that holds the lock is not here."""
        self._lock, self._serving = threading.RLock(), ""


_sets: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()


def _loads(pool: Pool, what: str, rank: int, result: Any) -> Any:
    try:
        return pool.unpack(result)
    except Exception as error:
        said = f"{what}: what rank {rank} sent cannot be read here: {type(error).__name__}: {error}"
        raise LaunchError(said, {rank: said}) from error


def no_rank(what: str) -> None:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
        raise RuntimeError(f"{what}: this process already is rank {rank} of {world}. Call the function itself")


def call_of(name: str, axes: Mapping[str, int]) -> str:
    """A call with sizes of axes, as it is written."""
    return f"{name}({', '.join(f'{axis}={size}' for axis, size in axes.items())})"


def default_nprocs() -> int:
    return torch.cuda.device_count() or 2


def _in_child() -> None:
    forget_all()
    for one in list(_sets):
        one._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
atexit.register(end_all)


NONE: Mapping[int, Any] = types.MappingProxyType({})


def make_fakes_safe_in_threads() -> None:
    """Call this before short-lived threads enter modes of fake tensors, from a thread that outlives them.

    In a CUDA build without GPUs torch 2.11 keeps a device guard of the first thread that enters one. When that thread
    has ended, the next one to enter ends the process.
    """
    if torch.version.cuda and not torch.cuda.is_available():
        with FakeTensorMode():
            pass


class SimulatedPool(Pool):
    """Ranks in the place of worker processes."""

    shares_heap = True

    def __init__(
        self, size: int, axes: Mapping[str, int], order: str = "ranks", seed: int = 0, slow: Mapping[int, int] = NONE,
        kill: Mapping[int, Fault] = NONE, only: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        make_fakes_safe_in_threads()
        self.owner, self.idle, self.why = os.getpid(), True, ""
        self.drop: list[Key] = []
        self.axes = dict(axes)
        self.ranks: Any = [Rank(number, self._own(number, size)) for number in (range(size) if only is None else only)]
        for rank in self.ranks:
            rank.fault = kill.get(rank.number)
        self.turns = Turns(self.ranks, order, seed, slow)
        self.world = World(size, self.turns)

    def _own(self, rank: int, size: int) -> Own:
        places: dict[tuple[Any, str], Any] = Own.fresh()
        places[c10d, "_world"] = None
        places[local_meshes, "made"] = {}
        places[local_meshes, "default_axes"] = self.axes or local_meshes.default_axes
        places[transfer, "_values"] = {}
        places[transfer, "_lengths"] = {}
        places[sys, "stdout"], places[sys, "stderr"] = None, None
        said = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        return Own(places, said)

    def alive(self) -> bool:
        if not self.why and self.owner != os.getpid():
            self.why = "they belong to the process that forked this one"
        if not self.why:
            self.why = "; ".join(f"rank {rank.number} {rank.gone}" for rank in self.ranks if rank.gone)
        return not self.why

    def kill(self, why: str = "they were stopped") -> None:
        self.why = self.why or why
        for rank in self.ranks:
            if rank.own.places.get((c10d, "_world")) is not None:
                leave_torch(rank.own.places[c10d, "_world"])
            rank.own.places.clear()  # with what it holds

    def let_go(self) -> None:
        pass

    def pack(self, task: Any, special: Mapping[type, Callable[[Any], Any]]) -> Any:
        """As it is now: what the caller changes later is not seen."""

        def noted(handle: Handle) -> Handle:
            special[Handle](handle)
            return handle

        return _copied(task, noted)

    @staticmethod
    def unpack(found: Any) -> Any:
        return found

    def run(self, call: Call, name: str, struck: list[int]) -> list[Any]:
        for rank in self.ranks:  # print where the caller does now, and warn as it does
            rank.own.places[warnings, "filters"] = [*warnings.filters]
            for place in ("showwarning", "_showwarnmsg_impl"):  # what `catch_warnings` changes
                rank.own.places[warnings, place] = getattr(warnings, place)
            for kind in ("stdout", "stderr"):
                to = getattr(sys, kind)
                rank.own.places[sys, kind] = Stream(to, rank.number) if rank.number else to
        self.idle = self.spoilt = False
        self.turns.run(lambda rank: self._serve(rank, call), struck, Own.of_the_caller(self.ranks[0].own))
        self.idle = self.alive() and not self.spoilt
        try:
            found = self._found(name, struck)
            del self.drop[: len(call.drop)]  # else a rank may have been stopped before it heard of them
            return found
        finally:
            for rank in self.ranks:
                rank.result = rank.error = None

    def _serve(self, rank: Rank, call: Call) -> Any:
        """One call on one rank, in its thread."""
        if c10d._world is None:
            c10d._world = torch_world(Medium(self.world, rank.number))
            enter_torch(self.world, rank.number)
        drop(call.drop)
        fn, args, kwargs = _copied(call.payload, lambda handle: held(handle._key))
        try:
            result = fn(*args, **kwargs)
        finally:
            settled()
            self.spoilt = self.spoilt or any_failed()
        return keep(call.number, result) if call.keep else result

    def _found(self, name: str, struck: list[int]) -> list[Any]:
        """What each rank returned; or the error for the caller."""
        count, failure = len(self.ranks), self.turns.failure
        stopped = [rank.number for rank in self.ranks if rank.stopped]
        if struck and stopped:
            raise KeyboardInterrupt(f"{name}: all {count} ranks have stopped, and keep what they hold.")
        reports = {rank.number: (rank.gone, "") for rank in self.ranks if rank.gone}
        failed = [rank for rank in self.turns.failed if not rank.stopped]
        reports.update(
            {rank.number: report(rank.error, __file__, _simulate.__file__) for rank in failed if rank.error is not None}
        )
        if reports:
            error = self._error(name, reports, stopped)
            if failure is not None:
                error.args = (f"{error}\n\n{failure}",)
            raise error from (failed[0].error if failed else None)
        if failure is not None:
            raise LaunchError(f"{name}: {failure}", {rank: failure.waits[rank] for rank in stopped}) from failure
        return [rank.result for rank in self.ranks]


def _copied(task: Any, replaced: Callable[[Handle], Any]) -> Any:
    """(fn, args, kwargs), each rank's own, with something in the place of handles: in arguments, and in what the
    function closes over."""
    fn, args, kwargs = task
    cells = [(cell, *contents_of(cell)) for cell in getattr(fn, "__closure__", None) or ()]
    if any(isinstance(value, Handle) for _, *held in cells for value in held):
        closed = tuple(
            types.CellType(replaced(*held)) if held and isinstance(held[0], Handle) else cell for cell, *held in cells
        )
        again = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, closed)
        again.__kwdefaults__ = fn.__kwdefaults__
        fn = again
    memo: dict[Any, Any] = {HANDLES: replaced}
    args, kwargs = copy.deepcopy((args, kwargs), memo)
    return fn, args, kwargs


class Simulation(WorkerGroup):
    """Ranks that take turns in this process; made by `simulate`, or by `workers` with `simulate=True`. Calling it runs
    a function on every rank, as `WorkerGroup` does on processes.

    Attributes:
        traffic: what ranks have sent each other so far, see `Traffic`.
    """

    def __init__(self, size: int, axes: Mapping[str, int], what: str, **settings: Any) -> None:
        self._axes, self._settings = axes, settings
        super().__init__(size, None, what)

    def __enter__(self) -> Simulation:
        return self

    def _make(self) -> Pool:
        pool = SimulatedPool(self.nprocs, self._axes, **self._settings)
        self._settings.pop("kill", None)  # once: those that come after are others
        return pool

    @property
    def traffic(self) -> Traffic:
        pool: Any = self._start()
        found: Traffic = pool.world.traffic
        return found


def simulate(
    *, order: str = "ranks", seed: int = 0, kill: Mapping[int, str] = NONE, slow: Mapping[int, int] = NONE,
    only: Sequence[int] | None = None, **axes: int,
) -> Simulation:  # fmt: skip
    """Ranks of one process, on a mesh of these axes: what runs on processes and GPUs runs here unchanged.

    They take turns, one thread each: who waits for another rank lets the next one go on, in order of ranks. So a run is
    the same every time, `breakpoint()` stops one rank with the others standing still, and a deadlock is known at once.
    Sums are taken in order of ranks. Each rank has its own rank for this package and for `torch.distributed`, its own
    random generators, and its own copy of the arguments; globals of modules are one for all.

    Args:
        order: "ranks"; or "random", where any rank that can goes on, also in between: what is right in one order must
            be right in all. seed: of these.
        kill: by rank, where it ends as a process that is killed does: "step 5", "step 5, in reduce of blocks.2". Steps
            count from 1.
        slow: by rank, for how many turns in which it could go on it does not.
        only: the ranks that there are. The others give what the first of these gives, in every collective, and have no
            results: layouts, agreement and memory are those of all, numbers are not (but for a first rank's).
        **axes: of the mesh that `local_mesh()` gives there, sizes by name.

    Returns:
        what `workers` returns: calls give handles, and `with` ends it.

    Raises:
        ValueError: no axis, or one of no size; `order`, `kill` or a rank is none that there is.
        LaunchError: (a call) as `workers`, from the rank's own error; or no rank could go on, with what each of them
            waits for, and where.

    >>> with simulate(replica=2, shard=2) as ranks:
    ...     ranks(lambda: fsdp.local_mesh()["shard"].get_local_rank()).get()
    [0, 1, 0, 1]
    """
    call = call_of("simulate", axes)
    bad = [name for name, size in axes.items() if not isinstance(size, int) or size < 1]
    if not axes or bad:
        raise ValueError(f"{call}: {f'{bad[0]}={axes[bad[0]]} is no size' if bad else 'no axis'}. Give sizes from 1 on")
    size = math.prod(axes.values())
    if order not in ("ranks", "random"):
        raise ValueError(f"{call}: order is {order!r}; expected 'ranks' or 'random'")
    chosen = None if only is None else sorted({*only})
    absent = [rank for rank in (*(chosen or ()), *kill, *slow) if rank not in range(size)]
    if absent or chosen == []:
        raise ValueError(
            f"{call}: {f'there is no rank {absent[0]}' if absent else 'only=[] is nobody'} of 0 to {size - 1}"
        )
    faults = {rank: Fault.of(text) for rank, text in kill.items()}
    return Simulation(size, axes, call, order=order, seed=seed, slow=slow, kill=faults, only=chosen)
