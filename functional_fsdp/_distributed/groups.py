"""The process groups that lanes have: how they are made, beside whatever other groups there are.

torch names a group that only its own ranks make by those ranks and by how many groups the process is in. Where a
program has made a group of some ranks, as `dist.new_group([0])` on all of them does, ranks would call ours by different
names and wait for each other; so `level` counts first. For the same reason groups are not destroyed, which would have
names come twice: those of a mesh that nobody holds any more go to the next one of the same ranks.

PatientStore: the ranks' store, where whoever keeps it is on another host, and may be cut off.

torch's client waits for an answer without end, and not even an interrupt comes through. So a thread asks; if it is kept
waiting longer than a collective would be, the store counts as lost, and each later call says so at once.

Medium: by what the ranks of a mesh reach each other before they have communicators, and how they wait. Processes
have this one; a process group that is something else brings its own, as an attribute `medium`.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch.distributed as dist

from .._common.errors import CommError
from .._common.torch_names import default_store
from .ballots import HostVote, ProcessWatch, here

POLL, GRACE = 0.1, 2.0  # seconds: how often to look whether a rank has died, and what those get that go on without it
_levelled: Counter[str] = Counter()  # how often, by ranks


def new_group(
    ranks: list[int],
    what: str,
    timeout: timedelta,
    backend: str,
    options: Any = None,
    gone: Callable[[], list[int]] | None = None,
) -> dist.ProcessGroup:
    """A group of these ranks, which alone call this; `level` has been called before. Collective.

    Args:
        gone: the ranks that are known to have ended. Groups on CPUs do not wait for those.

    Raises:
        CommError: a rank is gone, or cannot be reached.
    """
    make = partial(
        dist.new_group,
        ranks,
        timeout=timeout,
        backend=backend,
        pg_options=options,
        use_local_synchronization=True,
        group_desc=f"functional_fsdp {what}",
    )
    try:
        return make() if gone is None or backend == "nccl" else _unless(lambda: set(gone()) & set(ranks), make)
    except RuntimeError as error:
        raise CommError(
            f"communicators for the ranks {ranks}: the one for {what} could not be made: a rank died, or cannot be "
            "reached over the network. Restart the job; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network "
            f"interface. The backend says: {str(error)[:300]}"
        ) from error


def _unless(dead: Callable[[], set[int]], make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
    """What is made, in a thread: torch waits for a rank that has died until the timeout."""
    made: Future[dist.ProcessGroup] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    thread = threading.Thread(target=run, name="functional_fsdp new_group", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(POLL)
            if thread.is_alive() and (found := dead()):
                thread.join(GRACE)
                if thread.is_alive():
                    raise RuntimeError(f"ranks {sorted(found)} have ended")
    except KeyboardInterrupt:
        thread.join(GRACE)  # what it makes counts, as torch names groups
        raise
    return made.result()


class Levelled(NamedTuple):
    """What ranks know of each other before they communicate.

    Attributes:
        place: a name in the store that these ranks have to themselves, each time another one. What is said in `level`
            lies there until they `forget` it.
        again: the names that all offer, sorted.
        processes: of the other ranks on this host, by place among the ranks.
    """

    place: str
    again: list[str]
    processes: dict[int, int]


def level(ranks: list[int], timeout: timedelta, offers: Iterable[str] = ()) -> Levelled:
    """Bring these ranks, which alone call this, to the same number of groups: a rank with fewer makes some of its own.

    Collective, through the store only: no communicator is made for it.

    Args:
        offers: names of what this rank could use again, if all can.

    Raises:
        CommError: a rank has not come within the timeout.
    """
    world: Any = dist.distributed_c10d
    name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    key = f"functional_fsdp/groups/{name}/{_levelled[name]}"
    store: Any = dist.PrefixStore(key, world._get_default_store())  # type: ignore[attr-defined]
    me, mine = dist.get_rank(), len(world._world.pg_names)
    try:
        store.set(str(me), json.dumps((mine, sorted(offers), *here())))
        if me == ranks[0]:
            store.wait([str(rank) for rank in ranks], timeout)
            counts, offered, machines, numbers = zip(*(json.loads(store.get(str(rank))) for rank in ranks), strict=True)
            shared = set.intersection(*map(set, offered))
            store.set("most", json.dumps((max(counts), sorted(shared), machines, numbers)))
        store.wait(["most"], timeout)
        most, again, machines, numbers = json.loads(store.get("most"))
    except RuntimeError as error:
        try:
            missing = [rank for rank in ranks if not store.check([str(rank)])] or ranks[:1]
            store.delete_key(str(me))  # nobody is to think that this rank is here
        except RuntimeError:
            raise CommError(
                f"communicators for the ranks {ranks}: the ranks' store cannot be reached: the process that keeps it, "
                f"rank 0's or the launcher's, is gone. Restart the job. It says: {str(error)[:300]}"
            ) from error
        raise CommError(
            f"communicators for the ranks {ranks}: after {timeout.total_seconds():g} s ranks {missing} have not come "
            "to make them. Every rank of a mesh makes the same states on it, in the same order."
        ) from error
    for _ in range(mine, most):
        new_group([me], "nothing", timeout, "gloo")
    _levelled[name] += 1
    near = machines[ranks.index(me)]
    others = enumerate(zip(ranks, machines, numbers, strict=True))
    return Levelled(key, again, {i: n for i, (rank, where, n) in others if rank != me and where == near is not None})


def forget(place: str, ranks: list[int]) -> None:
    """Take out of the store what this rank said in `level`: all have read it."""
    store: Any = dist.PrefixStore(place, default_store())  # type: ignore[attr-defined]
    with suppress(RuntimeError):  # whoever keeps the store may be gone
        store.delete_key(str(dist.get_rank()))
        if dist.get_rank() == ranks[0]:
            store.delete_key("most")


Call = tuple[Callable[[], Any], "Future[Any]"]


class PatientStore:
    """The part of a store that ranks use while they wait for each other.

    A call raises what the store does, and DistStoreError if it is lost.
    """

    def __init__(self, store: Any, limit: timedelta) -> None:
        self.store, self.limit = store, limit.total_seconds()
        self.lost = ""
        self.calls: SimpleQueue[Call | None] = SimpleQueue()
        # a daemon: one that is never answered must not keep the process
        threading.Thread(target=_ask, args=(self.calls,), name="functional_fsdp store", daemon=True).start()
        weakref.finalize(self, self.calls.put, None)

    def check(self, keys: list[str]) -> bool:
        return bool(self._asked(partial(self.store.check, keys)))

    def get(self, key: str) -> Any:
        return self._asked(partial(self.store.get, key))

    def set(self, key: str, value: str | bytes) -> None:
        self._asked(partial(self.store.set, key, value))

    def delete_key(self, key: str) -> bool:
        return bool(self._asked(partial(self.store.delete_key, key)))

    def _asked(self, call: Callable[[], Any]) -> Any:
        if not self.lost:
            future: Future[Any] = Future()
            self.calls.put((call, future))
            try:
                return future.result(self.limit)
            except Late:
                self.lost = f"whoever keeps it did not answer within {self.limit:g} s"
        raise dist.DistStoreError(self.lost)


def _ask(calls: SimpleQueue[Call | None]) -> None:
    """Carry out one call after another."""
    while (asked := calls.get()) is not None:
        call, future = asked
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del asked, call, future  # which hold the store until the next one


class Processes:
    """Ranks that are processes.

    Attributes:
        lanes: the class of lanes, of a Runtime; None: as the device has them.
        level, forget: before ranks communicate, and after, see `level` and `forget` above.
        group: makes a communicator. watch: which of {place: process} have ended. vote: for ranks on one host.
        now: seconds. rest: waits for so many.
        elsewhere: what to do where this thread is not the rank that it belongs to; "" where it is.
    """

    lanes: Any = None
    level = staticmethod(level)
    forget = staticmethod(forget)
    group = staticmethod(new_group)
    watch: Any = staticmethod(ProcessWatch)
    vote: Any = staticmethod(HostVote.of)
    now = staticmethod(time.monotonic)
    rest = staticmethod(time.sleep)
    elsewhere = staticmethod(str)

    def store(self, place: str) -> Any:
        """What ranks tell each other lies there."""
        return dist.PrefixStore(f"{place}/run", default_store())  # type: ignore[attr-defined]

    def until_done(self, future: Any) -> None:
        """Wait for what this rank's own process does beside it."""
        Future.exception(future)


_PROCESSES = Processes()


def medium_of(world: Any) -> Any:
    """That of all ranks' group."""
    return getattr(world, "medium", _PROCESSES)
