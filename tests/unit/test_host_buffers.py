"""Buffers in the host's memory, and the lane that copies to them."""

from __future__ import annotations

import copy

import pytest
import torch

import functional_fsdp as fsdp
from functional_fsdp import _host_memory, extend

CPU = torch.device("cpu")


def test_buffers_are_used_again_the_smallest_that_is_large_enough() -> None:
    buffers, lane = extend.HostBuffers(), extend.copy_lane(CPU)
    taken = [buffers.take(n, lane) for n in (100, 300, 200)]
    assert [one.memory.nbytes for one in taken] == [100, 300, 200]
    for one in taken:
        buffers.give(one)
    assert buffers.take(150, lane).memory is taken[2].memory
    assert buffers.take(150, lane).memory is taken[1].memory
    assert buffers.made == 3
    assert copy.deepcopy(buffers).made == 0


def test_a_buffer_that_is_too_small_makes_room_for_a_larger_one() -> None:
    """Batches whose lengths differ would else leave buffers of every length behind."""
    buffers, lane = extend.HostBuffers(), extend.copy_lane(CPU)
    for nbytes in range(1000, 1010):
        taken = [buffers.take(nbytes, lane) for _ in range(2)]
        for one in taken:
            buffers.give(one)
    assert (buffers.made, buffers.nbytes) == (2, 2 * 1009)


def test_buffers_of_graphs_are_theirs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay writes to them whenever it comes, also while an eager backward is still to come."""
    buffers, lane = extend.HostBuffers(), extend.CopyLane(CPU)
    eager = buffers.take(100, lane)
    buffers.give(eager)
    monkeypatch.setattr(lane, "captured", lambda: True)
    captured = buffers.take(100, lane)
    assert captured.memory is eager.memory
    buffers.give(captured)
    assert buffers.take(100, lane).memory is eager.memory  # for the next graph, since graphs do not overlap
    buffers.give(captured)
    monkeypatch.setattr(lane, "captured", lambda: False)
    assert buffers.take(100, lane).memory is not eager.memory


def test_while_a_graph_is_captured_no_buffer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers, lane = extend.HostBuffers(), extend.CopyLane(CPU)
    buffers.give(buffers.take(100, lane))
    monkeypatch.setattr(lane, "captured", lambda: True)
    assert buffers.take(100, lane).nbytes == 100
    with pytest.raises(fsdp.ScheduleError, match=r"moves a tensor of 1,000 bytes .*warmup="):
        buffers.take(1000, lane)


def test_a_lane_belongs_to_a_device_and_copies_bytes() -> None:
    lane = extend.copy_lane(CPU)
    assert lane is extend.copy_lane(CPU)
    x, host = torch.randn(5), torch.empty(5)
    lane.wait(lane.copy([(host, x)]))
    assert torch.equal(x, host)


def test_what_lies_on_lent_storage_is_known() -> None:
    state = fsdp.shard({"a": {"w": torch.randn(4, 4)}}, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    state, w = fsdp.unshard(state, "a")
    assert extend.is_lent(w["w"])
    assert extend.is_lent(w["w"].detach().t()[1:])
    assert not extend.is_lent(w["w"].clone())
    assert not extend.is_lent(torch.zeros(3))


def test_bytes_that_go_while_a_graph_is_captured_are_unpinned_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, unpinned = [True], []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: unpinned.append("the host waits"))
    monkeypatch.setattr(_host_memory, "unpin", lambda host: unpinned.append(host.numel()))
    one, two = (_host_memory.HostBytes(torch.zeros(n), pinned=True) for n in (3, 4))
    del one  # in a capture neither may be asked for
    assert unpinned == []
    captured[0] = False
    del two
    assert unpinned == ["the host waits", 4, 3]
