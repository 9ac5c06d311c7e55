"""What is moved to the host's memory, with copies that come late: each wait that is missing shows in the bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.move_program import MoveProgram

from functional_fsdp import extend
from functional_fsdp.transforms._remat import moves
from functional_fsdp.transforms._remat.moves import MoveGroup

LATE = 2_000_000  # cycles: about a millisecond


class SlowLane(extend.CopyLane):
    """Begins each copy late."""

    def copy(self, pairs: Any, made_on: Any = ()) -> Any:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(LATE)
        return super().copy(pairs, made_on)


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> SlowLane:
    found = SlowLane(torch.device("cuda", torch.cuda.current_device()))
    monkeypatch.setattr(moves, "copy_lane", lambda device: found)
    return found


@pytest.mark.parametrize("block", range(4))
def test_random_programs(block: int, lane: SlowLane) -> None:
    for seed in range(10 * block, 10 * block + 10):
        assert MoveProgram(seed, lane.device, rows=256, width=1024).run(), seed


def test_two_streams_make_and_read_it(lane: SlowLane) -> None:
    """The stream that made it gets the memory back after the copy; each stream that reads it waits for itself."""
    buffers, side = extend.HostBuffers(), torch.cuda.Stream()
    right: list[torch.Tensor] = []
    for _ in range(5):
        first, second = (MoveGroup(buffers, lane.device, set()) for _ in range(2))
        with torch.cuda.stream(side):
            torch.cuda._sleep(LATE)
            t = torch.randn(512, 1024, device=lane.device)
            value = t.clone()
            packed = first.pack(t)
            del t
        first.end()
        other = second.pack(torch.randn(512, 1024, device=lane.device))
        second.end()
        with torch.cuda.stream(side):
            torch.empty(512, 1024, device=lane.device).fill_(-1.0)
        torch.cuda.current_stream().wait_stream(side)
        right.append((MoveGroup.unpack(packed) == value).all())
        side.wait_stream(torch.cuda.current_stream())
        MoveGroup.unpack(other)
        with torch.cuda.stream(side):
            back = MoveGroup.unpack(packed)
            torch.cuda._sleep(LATE)
            right.append((back == value).all())
            del back
        del packed
        torch.empty(512, 1024, device=lane.device).fill_(-1.0)
    assert all(map(bool, right))
