"""Boards: every rank's number, compared in shared memory."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import each_rank, launch

import functional_fsdp as fsdp
from functional_fsdp import _distributed as _board
from functional_fsdp import _distributed as _groups
from functional_fsdp._common.record import QUEUES, Collective
from functional_fsdp._distributed import RING, HostVote, ProcessWatch
from functional_fsdp._runtime.agreement import Log
from functional_fsdp._runtime.runtime import Runtime, runtime_of

boards: Any = _board
groups: Any = _groups


def ballots(count: int, numbers: int) -> list[tuple[int, int]]:
    """The largest and the smallest of each of many ballots, to which ranks come at different times."""
    before, boards.NUMBERS = boards.NUMBERS, numbers
    try:
        host_vote = HostVote.of(runtime_of(fsdp.local_mesh()))
        assert host_vote is not None
        found = []
        for i in range(count):
            if i % 7 == dist.get_rank():
                time.sleep(0.001)
            value = (i + 3) * (dist.get_rank() + 1) << 20
            ballot = torch.tensor([value, -value])
            for works in host_vote.largest(ballot):
                assert isinstance(works, list)
                works[0]().wait()
            found.append((int(ballot[0]) >> 20, -int(ballot[1]) >> 20))
        return found
    finally:
        boards.NUMBERS = before


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_ballot_has_the_largest_and_the_smallest_also_where_numbers_begin_again(ranks: int) -> None:
    assert (
        launch(ballots, (200, 6), nprocs=ranks, processes=True)
        == [[(ranks * (i + 3), i + 3) for i in range(200)]] * ranks
    )


@each_rank(2, processes=True)
def test_ranks_on_several_hosts_vote_by_gloo() -> None:
    with mock.patch.object(groups, "here", return_value=(f"host{fsdp.local_mesh().get_rank()}", os.getpid())):
        run = Runtime(fsdp.local_mesh())
    before = run.logs["control"].count
    run.compare(run.vote(0, 7))
    assert run.host_vote is None
    assert run.logs["control"].count == before + 1


def test_a_process_that_ended_is_told_from_one_that_is_late() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    host_vote = HostVote(mmap.mmap(-1, 32), 0, 2, ProcessWatch({1: pid}), timedelta(seconds=0.2))
    works = next(host_vote.largest(torch.tensor([1, -1])))
    assert isinstance(works, list)
    posted = works[0]()
    with pytest.raises(RuntimeError, match="not all ranks came within"):
        posted.wait(timedelta(seconds=0.05))
    with pytest.raises(RuntimeError, match=r"not all ranks came within 0\.2"):
        posted.wait()
    assert not posted.is_completed()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the process of a rank has ended"):
        posted.wait(timedelta(seconds=5))
    assert posted.is_completed()
    os.waitpid(pid, 0)


def test_of_each_lane_the_last_jobs_are_remembered_and_no_others() -> None:
    memory = mmap.mmap(-1, HostVote.nbytes(2, len(QUEUES)))
    votes = [HostVote(memory, rank, 2, ProcessWatch({}), timedelta(seconds=1)) for rank in range(2)]
    hops = [(Collective("all_gather", "data", numel, torch.float32, "", "gather", "b"),) for numel in (3, 4)]
    last = 1000 * RING + 7  # far beyond the memory, had each job bytes of its own

    def after(rank: int, lane: int, jobs: int) -> Log:
        """The log of a lane that has had so many jobs."""
        log = Log()
        log.extend([hops[0]] * jobs)
        log.compare(votes[rank].jobs(lane), rank, 2)
        return log

    for lane in range(len(QUEUES)):
        one = after(0, lane, last - RING)
        for _ in range(RING):
            assert one.append(hops[0]) is None
    for lane in range(len(QUEUES)):
        other = after(1, lane, last - RING)
        assert other.append(hops[1]) == 0  # another job, as long as it is remembered
        assert other.count == last - RING
        assert other.append(hops[0]) is None
        assert after(1, lane, last - RING - 1).append(hops[1]) is None  # forgotten
        captured = Log(behind=after(1, lane, last - 1))  # has the number of its eager twin
        assert (captured.append(hops[1]), captured.append(hops[0]), captured.append(hops[1])) == (0, None, None)


@each_rank(2, processes=True)
def test_boards_leave_no_descriptors_open() -> None:
    """As boards come and go, some of them refused."""
    run, counts = runtime_of(fsdp.local_mesh()), set()
    for i in range(6):
        with pytest.MonkeyPatch.context() as patch:
            if i % 2 and dist.get_rank() == 0:
                patch.setattr(boards, "_mapped", lambda where, size: mmap.mmap(-1, 0))
            host_vote = HostVote.of(run)
        assert (host_vote is None) == bool(i % 2)
        del host_vote
        gc.collect()
        counts.add(len(os.listdir("/proc/self/fd")))
    assert len(counts) == 1


def test_only_memory_of_boards_is_mapped(tmp_path: Any) -> None:
    (tmp_path / "file").write_bytes(bytes(64))
    with open(tmp_path / "file", "r+b") as file, pytest.raises(ValueError, match="fd"):
        boards._mapped(f"/proc/{os.getpid()}/fd/{file.fileno()}", 64)
