"""Moves: what a call keeps for its backward, in the host's memory meanwhile.

    forward of call i     packed: (storage, version) ─▶ one copy a storage, however many views of it are kept
    end of call i + 1     compute waits for the copies of call i, and their memory on the device is free
    backward of call i    compute waits for what has come back; the lane brings what call i - 1 has moved

Calls may lie in each other. Each waits, at its end, for those that were over when it began to move.

A driver says where it is in a pass, by uses of units. From the second one on it is known how many there are, and of how
many what is kept stays. So what was moved has to be away only where others need its room:

    forward     uses of which all stays, until its end      compute waits for the oldest copies once what is there
                ├──── there ────┤├──── to come ────┤        comes to more than those that are still to come
    backward    as many calls are brought back as have room in what uses before them have freed, less the main gradients
                that these leave

A use that recomputes keeps, and frees, a share of that: the one that its region says, or nothing.

Storage moves: the bytes of one storage on their way to the host's memory and back.

    packed     they are on the device, and stay there until the part that has made them is over
    sent       the lane copies them to a host buffer
    settled    compute has waited for that, and lets the device's memory go
    brought    the lane copies them to new memory of the device, and the host buffer is given back; or they never left
    ready      compute, on the stream that reads, has waited for that

Version counters say whether somebody has written to the bytes: that of the tensor that was packed, until it is settled,
and that of the memory where they are read again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from functional_fsdp import ScheduleError
from functional_fsdp._seams import HostBuffer, torch_private
from functional_fsdp.extend import CopyLane, HostBuffers, copy_lane, is_lent

from .._drive.unit_uses import USES

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


SMALL = 1024  # bytes: a storage below stays
SOON = 3  # uses before the backward comes to it a call is brought back as soon as it raises no peak


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


class Progress(NamedTuple):
    """How far a forward is: uses of units, calls that moved something, and the share that the other uses have let go,
    since they recompute, in uses."""

    uses: int
    calls: int
    lighter: float

    @property
    def stay(self) -> float:
        """Uses of which all stays."""
        return self.uses - self.calls - self.lighter


class MoveOrder:
    """Of the calls of one device: which comes before which.

    Attributes:
        latest: the call that has begun to move last. over: how many were over so far. taken: of those whose memory on
            the device is still taken, the number and the call.
        wholes: by driver, the last forward that has come to its end, if something was moved in it. whole: that of the
            one that runs. uses: how far this one is. moved: its calls that moved something, with the use in which they
            were over. lighter: by use that recomputes, and moves nothing, the share of what it lets go.
    """

    def __init__(self) -> None:
        self.latest: weakref.ref[MoveGroup] | None = None
        self.over = 0
        self.taken: list[tuple[int, weakref.ref[MoveGroup]]] = []
        self.wholes: weakref.WeakKeyDictionary[Any, Progress] = weakref.WeakKeyDictionary()
        self.whole: Progress | None = None
        self.uses = 0
        self.moved: list[tuple[int, weakref.ref[MoveGroup]]] = []
        self.lighter: dict[int, float] = {}
        self.differentiating = False
        self.driver: weakref.ref[Any] | None = None  # whose pass it is
        self.fresh = True  # nobody has driven yet: the pass in which something is moved first has begun before this

    def begin(self, group: MoveGroup) -> weakref.ref[MoveGroup] | None:
        """A call begins to move. Returns the one before it."""
        before, self.latest = self.latest, weakref.ref(group)
        return before

    def end(self, group: MoveGroup) -> None:
        """A call is over: those that were over when it began have no memory on the device any more, unless there is
        room for it."""
        if not self.differentiating:
            if not self.uses:  # nobody has said where a pass begins
                self.moved = [one for one in self.moved if one[1]() is not None]
            self.moved.append((self.uses, weakref.ref(group)))
            group.at = self.uses
            self.lighter.pop(self.uses, None)
        room = max(1, self._room())
        self._settle([one for one in self._taken() if one[0] < group.began], room - 1, group.captured)
        self.taken.append((self.over, weakref.ref(group)))
        self.over += 1

    def used(self, driver: Any, forward: int, backward: int, gradients: int) -> None:
        """A unit is used in a driven pass, the so many-th one in its forward and in its backward; (0, 0) ends it.

        Args:
            gradients: bytes of main gradients that the backward of a use leaves on the device.
        """
        fresh, self.fresh = self.fresh, False
        if fresh and forward > 1:
            self.driver = weakref.ref(driver)
            self.lighter = dict.fromkeys(range(1, forward - 1), 1.0)  # perhaps: they came before the first move
        elif forward <= 1 and not backward:
            self.driver = weakref.ref(driver) if forward else None
            self.uses, self.moved, self.lighter = 0, [], {}
            self.whole = self.wholes.get(driver) if forward else None
        elif self.driver is None or self.driver() is not driver:  # another pass came in between
            self.driver, self.whole = None, None
            return
        self.differentiating = backward > 0
        if backward:
            if backward == 1:
                self.whole = None
                if self.moved:
                    self.whole = self.wholes[driver] = self._progress(self.uses)
            self._bring(forward - backward + 1, gradients)
            return
        self.uses = forward
        if self.whole is not None and self.taken:
            some = [one for one in self._taken() if one[1].at < forward - 1]  # else copies have only just begun
            captured = some[0][1].lane.captured() if some else False
            self._settle(some, max(0, self._room()), captured)

    def recomputes(self, keeps: float) -> None:
        """The use that runs keeps only this share of what moved ones would; if it moves nothing itself."""
        if not self.differentiating and not (self.moved and self.moved[-1][0] == self.uses):
            self.lighter[self.uses] = max(1 - keeps, self.lighter.get(self.uses, 0.0))

    def _progress(self, use: int) -> Progress:
        """How far the forward is, or was, at this use."""
        lighter = sum(share for at, share in self.lighter.items() if at <= use)
        return Progress(use, sum(at <= use for at, _ in self.moved), lighter)

    def _room(self) -> int:
        """Of how many calls there is room for what they have moved: of as many as there are uses to come of which all
        stays."""
        if self.whole is None:
            return 0
        return int(self.whole.stay - self._progress(self.uses).stay)

    def _taken(self) -> list[tuple[int, MoveGroup]]:
        """Of the calls whose memory is taken, those that live, the oldest first."""
        found = [(number, ref, ref()) for number, ref in self.taken]
        self.taken = [(number, ref) for number, ref, group in found if group is not None]
        return [(number, group) for number, _, group in found if group is not None]

    def _settle(self, some: list[tuple[int, MoveGroup]], room: int, captured: bool) -> None:
        """Settle the oldest of these, until there is room for what is taken."""
        for number, group in some:
            if len(self.taken) <= room:
                break
            if group.captured is captured:
                group.settle()
                self.taken = [one for one in self.taken if one[0] != number]

    def _bring(self, use: int, gradients: int) -> None:
        """The backward has come to this use of the forward: bring back what there is room for again."""
        there = [(at, group) for at, ref in self.moved if (group := ref()) is not None]
        if self.whole is None or not there:
            return
        still = self._progress(use)
        over = (self.whole.uses - self.whole.calls) - (still.uses - still.calls)  # uses that have moved nothing
        each = sum(group.nbytes for _, group in there) // len(there)
        freed = max(0, int(each * (self.whole.stay - still.stay)) - over * gradients)
        room = freed // each - 1  # one for gradients that are on their way
        coming = sum(group.brought and not group.passed for _, group in there)
        last = each <= gradients  # the peak is where the backward ends
        if over and not coming and use - there[-1][0] <= SOON and (room == 0 or last):
            room = 1
        room -= coming
        for _, group in reversed(there):
            if room <= 0:
                break
            if not group.brought and group.over and group.captured is group.lane.captured():
                group.bring()
                room -= 1


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
        USES[device] = self.order
        self.began = -1  # how many calls were over when this one began to move
        self.at = 0  # the use of a driven forward in which it was over
        self.before: weakref.ref[MoveGroup] | None = None
        self.module: nn.Module | None = None  # whose call it is that runs
        self.known: dict[tuple[int, int], StorageMove] = {}  # of this call, by storage and version
        self.fresh: list[StorageMove] = []  # not sent yet
        self.moved: list[weakref.ref[StorageMove]] = []
        self.nbytes = 0  # of these
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
            self.nbytes += one.nbytes
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
            if before is not None and before.over and before.captured is self.captured and self._follows(before):
                before.bring()

    def _follows(self, before: MoveGroup) -> bool:
        """Whether this call comes soon after that one; if not it is brought back when there is room."""
        return self.order.whole is None or self.at - before.at <= SOON

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
