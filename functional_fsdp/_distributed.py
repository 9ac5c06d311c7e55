"""Other ranks: their processes, their memory, and groups with them.

    Case, Ballot               what ranks compare, as a number
    HostVote                   where those on one host compare it: shared memory
    ProcessWatch               who has ended
    new_group, level, forget   the process groups of lanes
    PatientStore               a store that may be cut off
    Processes                  all of this for ranks that are processes; simulated ranks have a medium of their own

`HostVote`: where ranks on one host compare numbers, a cell for each in shared memory. Takes microseconds.

    cells[ballot % 2][rank] = ballot number and value, in one word

A ballot is over when every cell of its row has its number. Nobody writes the next but one before all have read this
one, since for that they have to post the next. Ranks on several hosts, and processes that cannot see each other, use
gloo.

Behind those rows lie what ranks on CPUs say of the jobs of each lane: see `Log` in `_runtime/agreement.py`.

`ProcessWatch`: which of the other ranks' processes have ended, as far as this one can see them: those on its host.

Nobody needs to ask them: the kernel says so (pidfds, Linux 5.3). Of ranks elsewhere one hears when a connection breaks.

Process groups: torch names a group that only its own ranks make by those ranks and by how many groups the process is
in. Where a program has made a group of some ranks, as `dist.new_group([0])` on all of them does, ranks would call ours
by different names and wait for each other; so `level` counts first. For the same reason groups are not destroyed, which
would have names come twice: those of a mesh that nobody holds any more go to the next one of the same ranks.

`PatientStore`: the ranks' store, where whoever keeps it is on another host, and may be cut off.

torch's client waits for an answer without end, and not even an interrupt comes through. So a thread asks; if it is kept
waiting longer than a collective would be, the store counts as lost, and each later call says so at once.

A medium is by what the ranks of a mesh reach each other before they have communicators, and how they wait. Processes
have `Processes`; a process group that is something else brings its own, as an attribute `medium`.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import select
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch.distributed as dist

from ._common.errors import CommError
from ._common.record import QUEUES
from ._common.torch_names import default_store

NAME = "functional_fsdp"
BUSY = 2e-4  # seconds of looking again and again, before it sleeps in between
RING = 64  # jobs of a lane that are remembered
SHORT, LONG = 5e-5, 2e-3  # seconds of sleep: a fiftieth of the wait so far, so that who is late has the cores
VALUE = 48  # bits of a cell for a ballot's word; case and number
NUMBER = 44  # bits of these for the number
NUMBERS = (1 << 15) - 2  # from 1 to an even one, so that odd and even take turns


class Case(IntEnum):
    """What ranks come to a ballot for. Each case has numbers of its own, so a ballot also tells whether all came for
    the same."""

    STEP = 0  # the vote before `step` commits, and its confirmation
    NUMBER = 1  # a number that the caller compares: what is rare
    USE = 2  # a unit that is used outside the plan
    EXCHANGE = 3  # what an exchange is for
    METRICS = 4  # the structure of metrics
    TURN = 5  # what a rank wants next, where ranks agree on each use
    APART = 6  # nothing: this rank cannot come, see `_runtime.lanes`


CASES = tuple(Case)


class Ballot(NamedTuple):
    """A number for a case; of two the one of the later case is the larger."""

    case: Case
    number: int

    @classmethod
    def of(cls, word: int) -> Ballot:
        """What a word says, which is `case << NUMBER | number`."""
        return cls(CASES[word >> NUMBER], word & ((1 << NUMBER) - 1))


class HostVote:
    """The cells of all ranks of a mesh, and whether their processes are alive."""

    def __init__(self, memory: mmap.mmap, rank: int, ranks: int, watch: ProcessWatch, limit: timedelta) -> None:
        self.memory = memory  # kept: the cells are a view of it
        self.cells = memoryview(memory).cast("q")
        self.rank, self.ranks = rank, ranks
        self.watch = watch
        self.limit = limit
        self.number, self.gone = 0, False  # of the newest ballot; whether it never ends, as a process has ended

    @staticmethod
    def nbytes(ranks: int, lanes: int) -> int:
        return 8 * ranks * (2 + lanes * RING)

    def jobs(self, lane: int) -> memoryview:
        """The cells for jobs of a lane: [job % RING, rank], in a row."""
        row = 2 + lane * RING
        return self.cells[row * self.ranks : (row + RING) * self.ranks]

    def forget(self) -> None:
        """What this rank said of jobs is of no more use: ranks meet, and number them anew."""
        for row in range(2, len(self.cells) // self.ranks):
            self.cells[row * self.ranks + self.rank] = 0

    @classmethod
    def of(cls, run: Any) -> HostVote | None:
        """The host vote of a mesh; None where its ranks cannot share one. Collective."""
        fd, where, size = -1, "", 0
        with suppress(OSError, AttributeError):  # no memfd: not Linux
            fd = os.memfd_create(NAME)
            size = cls.nbytes(run.size, len(QUEUES))
            os.ftruncate(fd, size)
            where = f"/proc/{os.getpid()}/fd/{fd}"
        try:
            told = run.everyone(where, "where memory is")
            watch, host_vote = run.watch, None
            if where and watch is not None and len(watch) == run.size - 1:
                with suppress(OSError, ValueError):
                    host_vote = cls(_mapped(told[0], size), run.rank, run.size, watch, run.timeout)
            shared = all(run.everyone(host_vote is not None, "a host vote"))
        finally:
            if fd >= 0:
                os.close(fd)
        return host_vote if shared else None

    def largest(self, ballot: Any) -> Iterator[list[Any] | str]:
        """`ballot` [value, -value] -> [the largest, minus the smallest] of all ranks' values. Its one work, as gloo's,
        is this host vote: on the control lane a ballot begins when that before it is over."""
        yield [partial(self.post, int(ballot[0]))]
        values = [cell & ((1 << VALUE) - 1) for cell in self._posted()]
        ballot[0], ballot[1] = max(values), -min(values)

    def post(self, value: int) -> HostVote:
        """Begin the next ballot with this rank's value."""
        self.number, self.gone = self.number % NUMBERS + 1, False
        self.cells[self.number % 2 * self.ranks + self.rank] = self.number << VALUE | value
        return self

    def _posted(self) -> list[int]:
        row = self.number % 2 * self.ranks
        return self.cells[row : row + self.ranks].tolist()

    def _all_posted(self) -> bool:
        return all(cell >> VALUE == self.number for cell in self._posted())

    def is_completed(self) -> bool:
        """Whether all have posted, or one never will."""
        return self.gone or self._all_posted()

    def wait(self, patience: timedelta | None = None) -> bool:
        """Until all have posted. RuntimeError after `patience`, or when the process of a rank has ended."""
        begun, limit = time.monotonic(), (patience or self.limit).total_seconds()
        while not self._all_posted():
            spent = time.monotonic() - begun
            if spent < BUSY:
                os.sched_yield()
                continue
            if self.watch.ended() and not self._all_posted():
                self.gone = True
                raise RuntimeError("the process of a rank has ended")
            if spent > limit:
                raise RuntimeError(f"not all ranks came within {spent:.1f} s")
            time.sleep(min(max(SHORT, spent / 50), LONG))
        return True


def _mapped(where: str, size: int) -> mmap.mmap:
    """The memory that another process told of. ValueError if it is something else by now."""
    if NAME not in os.readlink(where):
        raise ValueError(where)
    fd = os.open(where, os.O_RDWR)
    try:
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


class ProcessWatch:
    """The processes {place: number}; those that it cannot see are left out."""

    def __init__(self, processes: dict[int, int]) -> None:
        self.places: dict[int, int] = {}  # by descriptor
        self.poll = select.poll()
        opened: list[int] = []
        weakref.finalize(self, _close, opened)
        for place, pid in processes.items():
            with suppress(OSError, AttributeError):
                fd = os.pidfd_open(pid)  # readable when the process has ended
                opened.append(fd)
                self.places[fd] = place
                self.poll.register(fd, select.POLLIN)

    def ended(self) -> list[int]:
        """The places of the processes that have ended."""
        return sorted(self.places[fd] for fd, _ in self.poll.poll(0)) if self.places else []

    def __len__(self) -> int:
        return len(self.places)


def here() -> tuple[Any, int]:
    """Where this process is, the same for processes that can see each other, and its number: the kernel that runs, and
    its names for them."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return (file.read(), os.readlink("/proc/self/ns/pid")), os.getpid()
    return None, os.getpid()


def _close(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)


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
        timeout: for which a rank waits. gloo counts from the issue on, and has to stand two such waits: for what was
            issued, and, if a rank abandons the step meanwhile, for all to come to the meeting where it is drained.
        gone: the ranks that are known to have ended. Groups on CPUs do not wait for those.

    Raises:
        CommError: a rank is gone, or cannot be reached.
    """
    make = partial(
        dist.new_group,
        ranks,
        timeout=2 * timeout if backend == "gloo" else timeout,
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


PROCESSES = Processes()
