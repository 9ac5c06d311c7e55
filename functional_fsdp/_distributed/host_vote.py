"""HostVote: where ranks on one host compare numbers, a cell for each in shared memory. Takes microseconds.

    cells[ballot % 2][rank] = ballot number and value, in one word

A ballot is over when every cell of its row has its number. Nobody writes the next but one before all have read this
one, since for that they have to post the next. Ranks on several hosts, and processes that cannot see each other, use
gloo.

    cells[lane][job % RING][rank] = number of the job and a checksum of its collectives

On CPUs a rank also writes there what it is about to issue on a lane, and looks whether others have issued something
else in its place: collectives of other sizes would end the process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .watch import ProcessWatch

from .lanes import QUEUES
from .peers import Peers

__all__ = ["HostVote"]

VALUE = 48  # bits
NUMBERS = (1 << 15) - 2  # from 1 to an even one, so that odd and even take turns
NAME = "functional_fsdp"
BUSY = 2e-4  # seconds of looking again and again, before it sleeps in between
RING = 64  # jobs of a lane that are remembered
SHORT, LONG = 5e-5, 2e-3  # seconds of sleep: a fiftieth of the wait so far, so that who is late has the cores


class HostVote:
    """The cells of all ranks of a mesh, and whether their processes are alive."""

    def __init__(self, memory: mmap.mmap, rank: int, ranks: int, watch: ProcessWatch, limit: timedelta) -> None:
        self.memory = memory  # kept: the cells are a view of it
        self.cells = memoryview(memory).cast("q")
        self.rank, self.ranks = rank, ranks
        self.watch = watch
        self.limit = limit
        self.number = 0

    @staticmethod
    def nbytes(ranks: int, lanes: int) -> int:
        return 8 * ranks * (2 + lanes * RING)

    def differs(self, lane: int, job: int, code: int, ranks: Iterable[int]) -> int | None:
        """Say that this rank is about to issue job number `job` on a lane. Returns one of the ranks that has issued, or
        is about to issue, something else as that; then this one must not."""
        row = self.ranks * (2 + lane * RING + job % RING)
        word = (job & 0x7FFFFFFF) << 32 | code
        cells = self.cells
        cells[row + self.rank] = word
        for other in ranks:
            there = cells[row + other]
            if there != word and there >> 32 == word >> 32:
                cells[row + self.rank] = 0
                return other
        return None

    def forget(self) -> None:
        """What this rank said of jobs is of no more use: ranks meet, and number them anew."""
        for row in range(2, len(self.cells) // self.ranks):
            self.cells[row * self.ranks + self.rank] = 0

    @classmethod
    def of(cls, run: Peers) -> HostVote | None:
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
        """`ballot` [value, -value] -> [the largest, minus the smallest] of all ranks' values. One work, as gloo's."""
        posted = Posted(self, int(ballot[0]))
        yield [posted.post]
        values = posted.values()
        ballot[0], ballot[1] = max(values), -min(values)


def _mapped(where: str, size: int) -> mmap.mmap:
    """The memory that another process told of. ValueError if it is something else by now."""
    if NAME not in os.readlink(where):
        raise ValueError(where)
    fd = os.open(where, os.O_RDWR)
    try:
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


class Posted:
    """A ballot under way: a `Work`, as torch.distributed has them."""

    def __init__(self, host_vote: HostVote, value: int) -> None:
        self.host_vote, self.value = host_vote, value
        self.number = self.row = 0
        self.gone = False

    def post(self) -> Posted:
        host_vote = self.host_vote
        host_vote.number = host_vote.number % NUMBERS + 1
        self.number = host_vote.number
        self.row = self.number % 2 * host_vote.ranks
        host_vote.cells[self.row + host_vote.rank] = self.number << VALUE | self.value
        return self

    def _cells(self) -> list[int]:
        return self.host_vote.cells[self.row : self.row + self.host_vote.ranks].tolist()

    def values(self) -> list[int]:
        return [cell & ((1 << VALUE) - 1) for cell in self._cells()]

    def _all_posted(self) -> bool:
        number = self.number
        return all(cell >> VALUE == number for cell in self._cells())

    def is_completed(self) -> bool:
        """All have posted, or one never will."""
        return self.gone or self._all_posted()

    def wait(self, patience: timedelta | None = None) -> bool:
        """Until all have posted. RuntimeError after `patience`, or when the process of a rank has ended."""
        begun, limit = time.monotonic(), (patience or self.host_vote.limit).total_seconds()
        while not self._all_posted():
            spent = time.monotonic() - begun
            if spent < BUSY:
                os.sched_yield()
                continue
            if self.host_vote.watch.ended() and not self._all_posted():
                self.gone = True
                raise RuntimeError("the process of a rank has ended")
            if spent > limit:
                raise RuntimeError(f"not all ranks came within {spent:.1f} s")
            time.sleep(min(max(SHORT, spent / 50), LONG))
        return True
