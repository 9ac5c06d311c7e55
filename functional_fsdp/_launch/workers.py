"""Workers: a set of ranks on this machine that keep what calls return, and the handles to it."""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .pool import LaunchError, Pool, end_all, forget_all, interrupts
from .transfer import Key, held, meshes, renew, same, short
from .worker import Call, Versions

__all__ = ["HANDLES", "Handle", "WorkerGroup", "default_nprocs"]

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


def default_nprocs() -> int:
    return torch.cuda.device_count() or 2


def _in_child() -> None:
    forget_all()
    for one in list(_sets):
        one._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
atexit.register(end_all)
