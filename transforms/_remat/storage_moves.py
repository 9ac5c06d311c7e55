"""Storage moves: the bytes of one storage on their way to the host's memory and back.

    packed     they are on the device, and stay there until the part that has made them is over
    sent       the lane copies them to a host buffer
    settled    compute has waited for that, and lets the device's memory go
    brought    the lane copies them to new memory of the device, and the host buffer is given back; or they never left
    ready      compute, on the stream that reads, has waited for that

Version counters say whether somebody has written to the bytes: that of the tensor that was packed, until it is settled,
and that of the memory where they are read again.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import torch

from functional_fsdp._seams import HostBuffer, torch_private
from functional_fsdp.extend import CopyLane, HostBuffers

__all__ = ["StorageMove", "StorageView", "copied", "memory_of", "storage_of"]

PLAIN = (torch.Tensor, torch.nn.Parameter, torch_private.FakeTensor)  # the last where a step is only planned


def storage_of(t: torch.Tensor) -> int:
    """Which storage a tensor lies on, 0 for one that has none of its own."""
    return t.untyped_storage()._cdata if type(t) in PLAIN and t.layout is torch.strided else 0


def memory_of(t: torch.Tensor) -> torch.Tensor:
    """The storage of a tensor as bytes, with a version counter of their own."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


class StorageView(NamedTuple):
    """Where a tensor lies on its storage. Strides and offset are part of it: kernels add up in an order by them."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, t: torch.Tensor) -> StorageView:
        return cls(t.dtype, t.shape, t.stride(), int(t.storage_offset()))

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, on these bytes, with their version counter."""
        whole = memory[: memory.numel() // self.dtype.itemsize * self.dtype.itemsize]
        return whole.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


def copied(t: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    """A copy of a tensor, with its strides; tensors that share a storage share one there, too.

    Args:
        copies: those that there are, by storage.
    """
    where = storage_of(t)
    if not where or t.is_conj() or t.is_neg():
        return t.detach().clone()
    if where not in copies:
        copies[where] = memory_of(t).clone()
    return StorageView.of(t).on(copies[where])


class StorageMove:
    """The way of one storage.

    Attributes:
        source: its bytes before they are settled. home: a host buffer, from sent to brought. back: its bytes again.
        spoilt: whether somebody has written to them on the way.
    """

    def __init__(self, lane: CopyLane, buffers: HostBuffers, t: torch.Tensor) -> None:
        self.lane, self.buffers = lane, buffers
        self.nbytes = t.untyped_storage().nbytes()
        self.source: torch.Tensor | None = memory_of(t)
        self.probe: torch.Tensor | None = t.detach()  # has the version counter that is looked at
        self.version = t._version
        self.spoilt = False
        self.stream = lane.here()  # for which the memory was made
        self.home: HostBuffer | None = None
        self.mark: Any = None  # at the end of the lane's last copy
        self.back: torch.Tensor | None = None
        self.back_version = 0
        self.readers: list[Any] = []  # streams that have waited for `back`

    def look(self) -> None:
        """Whether the bytes are still those that were packed."""
        if self.probe is not None and self.probe._version != self.version:
            self.spoilt = True
        if self.back is not None and self.back._version != self.back_version:
            self.spoilt = True

    # ---- there

    def send(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a host buffer. Returns what is to be copied: where to, where from."""
        assert self.source is not None
        self.look()
        self.home = self.buffers.take(self.nbytes, self.lane)
        return self.home.memory[: self.nbytes], self.source

    def settle(self) -> None:
        """The stream that has the memory waits for the copy, and lets it go."""
        if self.home is not None and self.source is not None:
            self.lane.wait(self.mark, self.stream)
            self.look()
            self.source = self.probe = None

    # ---- back

    def stay(self) -> None:
        """They have not left: the device's memory is used again."""
        if self.source is not None:
            self.back, self.source = self.source, None
            self.back_version = self.back._version
            self._give()

    def bring(self, memory: torch.Tensor, mark: Any) -> None:
        """The lane copies them to this memory, until this mark."""
        self.back, self.mark, self.stream = memory, mark, self.lane.here()
        self.back_version = memory._version
        self._give()

    def read(self) -> torch.Tensor | None:
        """The bytes on the device, for the stream that computes now; None if somebody has written to them."""
        assert self.back is not None
        self.look()
        if self.spoilt:
            return None
        here = self.lane.here()
        if here not in self.readers:
            self.lane.wait(self.mark)
            self.readers.append(here)
            if here != self.stream:
                self.lane.lend(self.back)
        return self.back

    def _give(self) -> None:
        if self.home is not None:
            self.buffers.give(self.home)
            self.home = None

    def __del__(self) -> None:
        """Dropped: what the lane still reads or writes is free when that is over."""
        memory = self.source if self.home is not None else self.back if not self.readers else None
        if memory is not None:
            with suppress(RuntimeError):  # where the process ends
                self.lane.drop(memory, self.mark, self.stream)
        self._give()
