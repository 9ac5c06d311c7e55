"""Simulated ranks: the calls of `workers` and `launch` on ranks that take turns in this process."""

from __future__ import annotations

import copy
import math
import os
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._common.device import make_fakes_safe_in_threads
from .._common.objects import contents_of
from .._common.torch_names import c10d
from .._io.pending import settled
from .._runtime.runtime import any_failed
from .._simulate import turns
from .._simulate.own import Own, Stream
from .._simulate.turns import Fault, Rank, Turns
from .._simulate.world import Medium, Traffic, World, enter_torch, leave_torch, torch_world
from . import meshes, transfer
from .pool import LaunchError, Pool
from .transfer import Key, drop, held, keep
from .worker import Call, report
from .workers import HANDLES, Handle, WorkerGroup

__all__ = ["Simulation", "simulate"]


NONE: Mapping[int, Any] = types.MappingProxyType({})


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
        places[meshes, "made"] = {}
        places[meshes, "default_axes"] = self.axes or meshes.default_axes
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
        del self.drop[: len(call.drop)]
        self.turns.run(lambda rank: self._serve(rank, call), struck, Own.of_the_caller(self.ranks[0].own))
        self.idle = self.alive() and not self.spoilt
        try:
            return self._found(name, struck)
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
            {rank.number: report(rank.error, __file__, turns.__file__) for rank in failed if rank.error is not None}
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
    call = f"simulate({', '.join(f'{name}={size}' for name, size in axes.items())})"
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
