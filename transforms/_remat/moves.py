"""Moves: what a call keeps for its backward, in the host's memory meanwhile.

forward of call i     packed: (storage, version) ─▶ one copy a storage, however many views of it are kept
end of call i + 1     compute waits for the copies of call i, and their memory on the device is free
backward of call i    compute waits for what has come back; the lane brings what call i - 1 has moved
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from functional_fsdp import ScheduleError
from functional_fsdp.extend import CopyLane, HostBuffers, copy_lane, is_lent, torch_private

__all__ = ["MoveGroup", "Moved", "storage_of", "unchanged"]

SMALL = 1024  # bytes: a storage below stays
PLAIN = (torch.Tensor, torch.nn.Parameter, torch_private.FakeTensor)  # the last where a step is only planned


def storage_of(t: torch.Tensor) -> int:
    """Which storage a tensor lies on, 0 for one that has none of its own."""
    return t.untyped_storage()._cdata if type(t) in PLAIN and t.layout is torch.strided else 0


class StorageMove:
    """The bytes of one storage: `source` on the device until they are in `home`; `back` when they are brought again."""

    def __init__(self, group: MoveGroup, t: torch.Tensor) -> None:
        storage = t.untyped_storage()
        self.group = group
        self.nbytes = storage.nbytes()
        self.source: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
        self.probe: torch.Tensor | None = t.detach()  # has the version counter of what was packed
        self.version = t._version
        self.home: Any = None  # a host buffer
        self.out: Any = None  # the mark at the end of the copy there
        self.back: torch.Tensor | None = None
        self.spoilt = False  # it was changed in place before its copy had ended

    def look(self) -> None:
        """Whether the bytes are still those that were packed."""
        if self.probe is not None and self.probe._version != self.version:
            self.spoilt = True

    def settle(self) -> None:
        """Compute waits for the copy, and the device's memory is free."""
        if self.home is not None and self.source is not None:
            self.group.lane.wait(self.out)
            self.look()
            self.source = self.probe = None

    def bring(self) -> bool:
        """Have its bytes on the device. Returns whether they have to be copied."""
        if self.back is not None:
            return False
        if self.source is not None:  # they have never left
            self.group.lane.wait(self.out)
            self.look()
            self.back, self.source, self.probe = self.source, None, None
            self._give()
            return False
        self.back = torch.empty(self.nbytes, dtype=torch.uint8, device=self.group.lane.device)
        return True

    def _give(self) -> None:
        if self.home is not None:
            self.group.buffers.give(self.home)
            self.home = None

    def __del__(self) -> None:
        """Dropped: what the lane still reads or writes is free when compute has waited for it."""
        if self.source is not None:
            self.group.lane.wait(self.out)
        elif self.back is not None and not self.group.here:
            self.group.lane.wait(self.group.mark)
        self._give()


class Moved(NamedTuple):
    """A tensor that was moved: where it lies on a storage."""

    storage: StorageMove
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def value(self) -> torch.Tensor | None:
        """The tensor, on the device; None if it was changed in place before it was moved."""
        storage = self.storage
        storage.group.arrive()
        if storage.spoilt:
            return None
        assert storage.back is not None
        made = torch.empty(0, dtype=self.dtype, device=storage.back.device)
        return made.set_(storage.back.untyped_storage(), self.offset, self.shape, self.stride)


def unchanged(t: torch.Tensor | None) -> torch.Tensor:
    """A tensor that a backward asks for; an error if it was changed since it was kept."""
    if t is None:
        raise ScheduleError(
            "a tensor that the backward needs was changed in place after it was kept, which gradients cannot follow. "
            "Change a copy: .clone()."
        )
    return t


class MoveGroup:
    """What one call moves.

    Args:
        buffers: whose.
        stays: storages that others keep, or are small: not moved.
    """

    def __init__(self, buffers: HostBuffers, stays: set[int]) -> None:
        self.buffers, self.stays = buffers, stays
        self.known: dict[tuple[int, int], StorageMove] = {}  # of this call, by storage and version
        self.fresh: list[StorageMove] = []  # not copied yet
        self.moved: list[weakref.ref[StorageMove]] = []
        self.before: weakref.ref[MoveGroup] | None = None
        self.device: torch.device | None = None
        self.lane: CopyLane
        self.mark: Any = None  # at the end of what was brought
        self.brought = self.here = False  # whether the copies back have begun, and compute has waited for them

    # ---- forward

    def pack(self, t: torch.Tensor) -> Any:
        """A saved tensor, as saved_tensors_hooks have it."""
        return self.take(t) or (t.detach(), t._version)

    def take(self, t: torch.Tensor) -> Moved | None:
        """Have a tensor moved; None if it stays where it is."""
        where = storage_of(t)
        if not where or where in self.stays or is_lent(t) or t.is_conj() or t.is_neg():
            return None
        key = where, t._version
        found = self.known.get(key)
        if found is None:
            if self.device is None:
                self._begin(t.device)
            if t.untyped_storage().nbytes() < SMALL or t.device != self.device:
                return None
            found = self.known[key] = StorageMove(self, t)
            self.fresh.append(found)
            self.moved.append(weakref.ref(found))
        return Moved(found, t.dtype, t.shape, t.stride(), int(t.storage_offset()))

    def _begin(self, device: torch.device) -> None:
        self.device, self.lane = device, copy_lane(device)
        self.captured = self.lane.captured()
        before = self.lane.latest() if self.lane.latest is not None else None
        if before is not None and before.captured is self.captured:
            self.before = weakref.ref(before)
        self.lane.latest = weakref.ref(self)

    def send(self) -> None:
        """Begin to copy what was packed since the last time."""
        if not self.fresh:
            return
        pairs = []
        for one in self.fresh:
            assert one.source is not None
            one.look()
            one.home = self.buffers.take(one.nbytes, self.lane)
            pairs.append((one.home[2][: one.nbytes], one.source))
        mark = self.lane.copy(pairs)
        for one in self.fresh:
            one.out = mark
        self.fresh = []

    def end(self) -> None:
        """The forward of the call is over: what the call before it has moved is free on the device."""
        self.send()
        self.known = {}
        before = self.before() if self.before is not None else None
        if before is not None:
            before.settle()

    def settle(self) -> None:
        for ref in self.moved:
            one = ref()
            if one is not None:
                one.settle()

    # ---- backward

    def arrive(self) -> None:
        """The backward has come to this call: it has what it moved, and the call before it begins to bring its own."""
        if self.here or self.device is None:
            return
        self.send()  # a backward inside the call
        self.bring()
        before = self.before() if self.before is not None else None
        if before is not None:
            before.bring()
        self.lane.wait(self.mark)
        self.here = True

    def bring(self) -> None:
        """Begin to copy back what has left the device."""
        if self.brought:
            return
        self.brought = True
        coming = [one for one in (ref() for ref in self.moved) if one is not None and one.bring()]
        if coming:
            self.mark = self.lane.copy([(one.back, one.home[2][: one.nbytes]) for one in coming])  # type: ignore[misc]
            for one in coming:
                one._give()

    @staticmethod
    def unpack(packed: Any) -> torch.Tensor:
        """What `pack` gave, as a tensor again."""
        if type(packed) is Moved:
            return unchanged(packed.value())
        t, version = packed
        return unchanged(t if t._version == version else None)

    def hooks(self) -> Any:
        """A context: what is saved inside is packed here."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, MoveGroup.unpack)
