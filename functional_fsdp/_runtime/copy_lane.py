"""Copies between a device and the host's memory, on a lane of their own, and the host's buffers for them.

    compute   ... makes t ──┐                     ┌── waits, lets t go ...         ┌── waits, reads t ...
    lane                    └── t to the host ──┘   ...   ┌── t from the host ──┘

A lane belongs to a device, since no rank waits for what it does. On the CPU it is the host's present.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from typing import Any

import torch

from .._common.device import being_captured, pin, unpin
from .._common.errors import ScheduleError
from .._common.torch_names import disable_current_modes, dispatch_modes

__all__ = ["CopyLane", "HostBuffers", "copy_lane"]

Pair = tuple[torch.Tensor, torch.Tensor]  # where to, where from


class CopyLane:
    """The lane of one device. What it does begins when compute has come to where it was asked for.

    Attributes:
        device: whose.
        latest: weakly, what its users have moved last, for them to keep in order.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.latest: weakref.ref[Any] | None = None

    def copy(self, pairs: Iterable[Pair]) -> Any:
        """Begin these copies. Returns the mark at their end, for `wait`.

        Until it has passed, the tensors must live, and sources stay as they are.
        """
        with torch.no_grad(), disable_current_modes() if dispatch_modes() else nullcontext():
            if self.stream is None:
                for into, source in pairs:
                    into.copy_(source)
                return None
            home, done = torch.cuda.current_stream(self.device), torch.cuda.Event()
            self.stream.wait_stream(home)
            with torch.cuda.stream(self.stream):
                for into, source in pairs:
                    into.copy_(source, non_blocking=True)
                done.record()
            return done

    def wait(self, mark: Any) -> None:
        """Compute waits for a mark; the host does not."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def captured(self) -> bool:
        """Whether what is done now goes into a CUDA graph."""
        return being_captured(self.device)


_LANES: dict[torch.device, CopyLane] = {}


def copy_lane(device: torch.device) -> CopyLane:
    """The lane of a device, for copies between it and the host's memory.

    Example: `lane = extend.copy_lane(x.device)`; `mark = lane.copy([(host, x)])`; later `lane.wait(mark)`.
    """
    if device not in _LANES:
        _LANES[device] = CopyLane(device)
    return _LANES[device]


class HostBuffers:
    """Buffers in the host's memory, pinned where a GPU copies to them: made once, and used again.

    Copies of one lane follow each other, so a buffer may be given back when its last copy has begun.

    Attributes:
        made: how many there are; nbytes: their bytes together.
    """

    def __init__(self) -> None:
        self.made = self.nbytes = 0
        self.free: list[tuple[int, int, torch.Tensor]] = []  # bytes, number, buffer: the smallest first
        self.pinned: list[torch.Tensor] = []
        self.lane: Any = None  # that copies to those

    def take(self, nbytes: int, lane: CopyLane) -> tuple[int, int, torch.Tensor]:
        """A buffer [at least nbytes], uint8, with its size and its number: the smallest free one, or a new one.

        Raises:
            ScheduleError: a new one would be made while a CUDA graph is captured.
        """
        at = bisect_left(self.free, (nbytes,))
        if at < len(self.free):
            return self.free.pop(at)
        if lane.captured():
            raise ScheduleError(
                f"a step that is captured moves a tensor of {nbytes:,} bytes to the host's memory, for which the steps "
                "before have pinned no buffer. Have every step move the same, or warm up more: T.cuda_graph(warmup=)."
            )
        buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if lane.stream is not None and pin(buffer):  # else copies wait, and are as right
            self.pinned.append(buffer)
            self.lane = lane
        self.made += 1
        self.nbytes += nbytes
        return nbytes, self.made, buffer

    def give(self, taken: tuple[int, int, torch.Tensor]) -> None:
        """Give a buffer back."""
        insort(self.free, taken)

    def __deepcopy__(self, memo: Any) -> HostBuffers:
        """A copy of a model has buffers of its own."""
        return HostBuffers()

    def __del__(self) -> None:
        with suppress(Exception):  # where the process ends
            if self.pinned:
                self.lane.stream.synchronize()
            for buffer in self.pinned:
                unpin(buffer)
