"""What ranks compare, and where: ballots, the host's memory in which those on one host compare them, and who has ended.

HostVote: where ranks on one host compare numbers, a cell for each in shared memory. Takes microseconds.

    cells[ballot % 2][rank] = ballot number and value, in one word

A ballot is over when every cell of its row has its number. Nobody writes the next but one before all have read this
one, since for that they have to post the next. Ranks on several hosts, and processes that cannot see each other, use
gloo.

    cells[lane][job % RING][rank] = number of the job and a checksum of its collectives

On CPUs a rank also writes there what it is about to issue on a lane, and looks whether others have issued something
else in its place: collectives of other sizes would end the process.

ProcessWatch: which of the other ranks' processes have ended, as far as this one can see them: those on its host.

Nobody needs to ask them: the kernel says so (pidfds, Linux 5.3). Of ranks elsewhere one hears when a connection breaks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

from .._common.record import QUEUES

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

    def differs(self, lane: int, job: int, code: int) -> int | None:
        """Say that this rank is about to issue job number `job` on a lane. Returns one of the ranks that has issued, or
        is about to issue, something else as that; then this one must not. (Along any axis: what another rank issues in
        its place may go along an axis that this rank's does not.)"""
        row = self.ranks * (2 + lane * RING + job % RING)
        word = (job & 0x7FFFFFFF) << 32 | code
        cells = self.cells
        cells[row + self.rank] = word
        for other, there in enumerate(cells[row : row + self.ranks].tolist()):
            if there != word and there >> 32 == word >> 32:
                cells[row + self.rank] = 0
                return other
        return None

    def forget(self) -> None:
        """What this rank said of jobs is of no more use: ranks meet, and number them anew."""
        for row in range(2, len(self.cells) // self.ranks):
            self.cells[row * self.ranks + self.rank] = 0

    @classmethod
    def of(cls, run: Any) -> HostVote | None:
        """The host vote of a mesh; None where its ranks cannot share one. Collective."""
        fd, where, size = -1, "", 0
        with contextlib.suppress(OSError, AttributeError):  # no memfd: not Linux
            fd = os.memfd_create(NAME)
            size = cls.nbytes(run.size, len(QUEUES))
            os.ftruncate(fd, size)
            where = f"/proc/{os.getpid()}/fd/{fd}"
        try:
            told = run.everyone(where, "where memory is")
            watch, host_vote = run.watch, None
            if where and watch is not None and len(watch) == run.size - 1:
                with contextlib.suppress(OSError, ValueError):
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
            with contextlib.suppress(OSError, AttributeError):
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
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return (file.read(), os.readlink("/proc/self/ns/pid")), os.getpid()
    return None, os.getpid()


def _close(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)
