"""Moves: what a call keeps for its backward, in the host's memory meanwhile.

    forward of call i     packed: (storage, version) ─▶ one copy a storage, however many views of it are kept
    end of call i + 1     compute waits for the copies of call i, and their memory on the device is free
    backward of call i    compute waits for what has come back; the lane brings what call i - 1 has moved

Calls may lie in each other. Each waits, at its end, for those that were over when it began to move.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from functional_fsdp import ScheduleError
from functional_fsdp.extend import CopyLane, HostBuffers, copy_lane, is_lent

from .storage_moves import StorageMove, StorageView, storage_of

__all__ = ["MoveGroup", "MovedTensor", "unchanged"]

SMALL = 1024  # bytes: a storage below stays


def unchanged(t: torch.Tensor | None) -> torch.Tensor:
    """A tensor that a backward asks for; an error if it was changed since it was kept."""
    if t is None:
        raise ScheduleError(
            "a tensor that the backward needs was changed in place after it was kept, which gradients cannot follow. "
            "Change a copy: .clone()."
        )
    return t


def weights_of(module: nn.Module) -> set[int]:
    """The storages of a module's parameters and buffers."""
    return {*map(storage_of, module.parameters()), *map(storage_of, module.buffers())}


class MoveOrder:
    """Of the calls of one device: which comes before which.

    Attributes:
        latest: the call that has begun to move last. over: how many were over so far. taken: of those whose memory on
            the device is still taken, the number and the call.
    """

    def __init__(self) -> None:
        self.latest: weakref.ref[MoveGroup] | None = None
        self.over = 0
        self.taken: list[tuple[int, weakref.ref[MoveGroup]]] = []

    def begin(self, group: MoveGroup) -> weakref.ref[MoveGroup] | None:
        """A call begins to move. Returns the one before it."""
        before, self.latest = self.latest, weakref.ref(group)
        return before

    def end(self, group: MoveGroup) -> None:
        """A call is over: those that were over when it began have no memory on the device any more."""
        left = []
        for number, ref in self.taken:
            other = ref()
            if other is None:
                continue
            if number < group.began and other.captured is group.captured:
                other.settle()
            else:
                left.append((number, ref))
        self.taken = [*left, (self.over, weakref.ref(group))]
        self.over += 1


_ORDERS: weakref.WeakKeyDictionary[CopyLane, MoveOrder] = weakref.WeakKeyDictionary()


class MovedTensor(NamedTuple):
    """A tensor that was moved: where it lies on a storage."""

    group: MoveGroup
    storage: StorageMove
    view: StorageView

    def value(self) -> torch.Tensor | None:
        """The tensor, on the device; None if somebody has written to it since it was packed."""
        self.group.arrive()
        memory = self.storage.read()
        return None if memory is None else self.view.on(memory)


class MoveGroup:
    """What one call moves.

    Args:
        buffers: in which host buffers.
        device: where the call computes: what lies elsewhere is not moved.
        stays: storages that others keep.
    """

    def __init__(self, buffers: HostBuffers, device: torch.device, stays: set[int]) -> None:
        self.buffers, self.device, self.stays = buffers, device, stays
        self.lane = copy_lane(device)
        self.captured = self.lane.captured()
        self.order = _ORDERS.setdefault(self.lane, MoveOrder())
        self.began = -1  # how many calls were over when this one began to move
        self.before: weakref.ref[MoveGroup] | None = None
        self.module: nn.Module | None = None  # whose call it is that runs
        self.known: dict[tuple[int, int], StorageMove] = {}  # of this call, by storage and version
        self.fresh: list[StorageMove] = []  # not sent yet
        self.moved: list[weakref.ref[StorageMove]] = []
        self.over = False  # whether the forward of the call is over
        self.brought = True  # whether the copies back of all that was sent have begun
        self.passed = False  # whether the backward has come here, and had the call before it bring its own

    # ---- forward

    @contextmanager
    def moving(self, module: nn.Module | None = None) -> Iterator[None]:
        """Inside, what is saved is packed here, but for weights of this module. At the end its copies have begun."""
        self.module = module
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, MoveGroup.unpack):
                yield
        finally:
            self.module = None
        self.send()

    def pack(self, t: torch.Tensor) -> Any:
        """A saved tensor, as saved_tensors_hooks have it."""
        return self.take(t) or (t.detach(), t._version)

    @staticmethod
    def unpack(packed: Any) -> torch.Tensor:
        """What `pack` gave, as a tensor again."""
        if type(packed) is MovedTensor:
            return unchanged(packed.value())
        t, version = packed
        return unchanged(t if t._version == version else None)

    def take(self, t: torch.Tensor) -> MovedTensor | None:
        """Have a tensor moved; None if it stays where it is."""
        if self._stays(t):
            return None
        key = storage_of(t), t._version
        if key not in self.known:
            self._begin()
            one = self.known[key] = StorageMove(self.lane, self.buffers, t)
            self.fresh.append(one)
            self.moved.append(weakref.ref(one))
            self.brought = False
        return MovedTensor(self, self.known[key], StorageView.of(t))

    def _stays(self, t: torch.Tensor) -> bool:
        where = storage_of(t)
        if not where or t.device != self.device or where in self.stays or t.is_inference():
            return True
        if t.untyped_storage().nbytes() < SMALL or t.is_conj() or t.is_neg() or is_lent(t):
            return True
        base = t._base if t._is_view() else t  # weights that were not lent are leaves, or views of one
        return base is not None and base.is_leaf and self.module is not None and where in weights_of(self.module)

    def _begin(self) -> None:
        if self.began < 0:
            self.began = self.order.over
            self.before = self.order.begin(self)

    def send(self) -> None:
        """Begin to copy what was packed since the last time."""
        fresh, self.fresh = [one for one in self.fresh if one.source is not None], []
        if fresh:
            pairs = [one.send() for one in fresh]
            mark = self.lane.copy(pairs, [one.stream for one in fresh])
            for one in fresh:
                one.mark = mark

    def end(self) -> None:
        """The forward of the call is over: what calls before it have moved is free on the device."""
        self.send()
        self.known = {}
        self.over = True
        if self.began >= 0:
            self.order.end(self)

    def settle(self) -> None:
        """Let the device's memory go, when what lies there was copied."""
        for one in self._living():
            one.settle()

    # ---- backward

    def arrive(self) -> None:
        """The backward has come to this call: it has what it moved, and the call before it begins to bring its own."""
        self.bring()
        if self.over and not self.passed:
            self.passed = True
            before = self.before() if self.before is not None else None
            if before is not None and before.over and before.captured is self.captured:
                before.bring()

    def bring(self) -> None:
        """Begin to copy back what has left the device."""
        if self.brought:
            return
        living = self._living()
        for one in living:
            one.stay()
        away = [(one, one.home.memory[: one.nbytes]) for one in living if one.home is not None]
        coming = [(torch.empty(one.nbytes, dtype=torch.uint8, device=self.device), home) for one, home in away]
        if coming:
            mark = self.lane.copy(coming)
            for (one, _), (memory, _) in zip(away, coming, strict=True):
                one.bring(memory, mark)
        self.brought = True

    def _living(self) -> list[StorageMove]:
        return [one for one in (ref() for ref in self.moved) if one is not None]
