"""Copies between a device and the host's memory, on a lane of their own, and the host's buffers for them.

    compute   ... makes t ──┐                     ┌── waits, lets t go ...         ┌── waits, reads t ...
    lane                    └── t to the host ──┘   ...   ┌── t from the host ──┘

A lane belongs to a device, since no rank waits for what it does. On the CPU it is the host's present.

What it costs that a state lies in the host's memory, by plan: bytes each way, and seconds at a bandwidth.

forward, backward   compute shards ──▶ device, for each gather     main gradients ──▶ host
step                main weights, what the optimizer keeps, main gradients ──▶ device
                    main weights, what the optimizer keeps, compute shards ──▶ host

host_transfer: what it costs that a state lies in the host's memory, in bytes and seconds.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .._common.device import being_captured, current_device, device_of, host_memory, pin, unpin
from .._common.errors import ScheduleError, SpecError, expect
from .._common.torch_names import disable_current_modes, dispatch_modes, pytree
from .._common.tree import bytes_text
from .._plan.plan import first_plan
from .._state.state import State
from .._storage import FlatBuffer

Pair = tuple[torch.Tensor, torch.Tensor]  # where to, where from
PROBE = 1 << 26  # bytes


def computes_on(leaves: Iterable[Any]) -> torch.device:
    """Where a call that is given these computes: on a GPU if one of them lies there; if none does, and the process has
    used one, on its own GPU, where the call's tensors may be made.

    Example: `extend.computes_on([lengths, x])`.
    """
    device = device_of(leaves)
    return current_device("cuda") if device.type == "cpu" and torch.cuda.is_initialized() else device


@lru_cache(maxsize=16)
def host_bandwidth(device: torch.device) -> float:
    """Bytes a second between host memory and this device, each way, both ways at once: measured, on the first call."""
    far = [host_memory(PROBE, torch.uint8, device) for _ in range(2)]
    near = [torch.empty(PROBE, dtype=torch.uint8, device=device) for _ in range(2)]
    if device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(2):
            near[0].copy_(far[0])
            far[1].copy_(near[1])
        return 2 * PROBE / (time.perf_counter() - begun)
    home, other = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for timed in (False, True):
        if timed:
            begin.record(home)
        other.wait_stream(home)
        for _ in range(4 if timed else 1):
            near[0].copy_(far[0], non_blocking=True)
            with torch.cuda.stream(other):
                far[1].copy_(near[1], non_blocking=True)
        home.wait_stream(other)
    end.record(home)
    end.synchronize()
    return 4 * PROBE / (begin.elapsed_time(end) / 1e3)


class CopyMark(NamedTuple):
    """The end of copies: an event, and whether it lies in a CUDA graph."""

    event: Any
    captured: bool


class CopyLane:
    """The lane of one device. What it does begins when compute has come to where it was asked for.

    Attributes:
        device: whose.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.retired: list[torch.Tensor] = []  # pinned memory that nobody uses, for the lane to let go

    def here(self) -> Any:
        """The stream that computes now, None on the CPU."""
        return None if self.stream is None else torch.cuda.current_stream(self.device)

    def copy(self, pairs: Iterable[Pair], made_on: Iterable[Any] = ()) -> Any:
        """Begin these copies. Returns the mark at their end, for `wait`.

        Until it has passed, the tensors must live, and sources stay as they are.

        Args:
            made_on: the streams, as `here` gives them, on which sources were made, beside the one that computes now.
        """
        with torch.no_grad(), disable_current_modes() if dispatch_modes() else nullcontext():
            if self.stream is None:
                for into, source in pairs:
                    into.copy_(source)
                return None
            for stream in {self.here(), *made_on}:
                self.stream.wait_stream(stream)
            done = torch.cuda.Event()
            with torch.cuda.stream(self.stream):
                for into, source in pairs:
                    into.copy_(source, non_blocking=True)
                done.record()
            return CopyMark(done, self.captured())

    def wait(self, mark: Any, stream: Any = None) -> None:
        """A stream, by default the one that computes now, waits for a mark; the host does not."""
        if mark is not None:
            (stream or self.here()).wait_event(mark.event)

    def lend(self, t: torch.Tensor) -> None:
        """A tensor is read on the stream that computes now, and was made for another: its memory goes to nobody before
        that is over."""
        if self.stream is not None:
            t.record_stream(torch.cuda.current_stream(self.device))

    def drop(self, t: torch.Tensor, mark: Any, stream: Any) -> None:
        """A tensor that was made for this stream is let go, while copies up to this mark may be under way: its memory
        goes to nobody before they are over. Where it is called from does not matter."""
        if mark is None or self.stream is None:
            return
        if mark.captured is self.captured():
            self.wait(mark, stream)
        elif not mark.captured:  # which a graph cannot wait for
            t.record_stream(self.stream)

    def captured(self) -> bool:
        """Whether what is done now goes into a CUDA graph."""
        return being_captured(self.device)

    def retire(self, pinned: Iterable[torch.Tensor]) -> None:
        """Unpin memory that nobody uses any more, when the copies that have begun are over."""
        self.retired += pinned
        if self.retired and self.stream is not None and not self.captured():
            with suppress(RuntimeError):  # where the process ends
                self.stream.synchronize()
            while self.retired:
                with suppress(RuntimeError):
                    unpin(self.retired[-1])
                self.retired.pop()


_LANES: dict[torch.device, CopyLane] = {}


def copy_lane(device: torch.device) -> CopyLane:
    """The lane of a device, for copies between it and the host's memory.

    Example: `lane = extend.copy_lane(x.device)`; `mark = lane.copy([(host, x)])`; later `lane.wait(mark)`.
    """
    if device not in _LANES:
        _LANES[device] = CopyLane(device)
    return _LANES[device]


class HostBuffer(NamedTuple):
    """A buffer [nbytes], uint8. Those of CUDA graphs are theirs alone: a replay writes to them whenever it comes."""

    nbytes: int
    number: int
    memory: torch.Tensor
    of_graphs: bool = False


class HostBuffers:
    """Buffers in the host's memory, pinned where a GPU copies to them: made once, and used again.

    Copies of one lane follow each other, so a buffer may be given back when its last copy has begun.

    Attributes:
        made: how many there are; nbytes: their bytes together.
    """

    def __init__(self) -> None:
        self.made = self.nbytes = self.number = 0
        self.idle: list[HostBuffer] = []  # the smallest first
        self.of_graphs: list[HostBuffer] = []  # the same, for steps that are captured
        self.returned: list[HostBuffer] = []  # given back, not sorted in yet
        self.pinned: dict[int, torch.Tensor] = {}
        self.lane: Any = None  # that copies to those

    def take(self, nbytes: int, lane: CopyLane) -> HostBuffer:
        """A buffer of at least so many bytes: the smallest free one. A new one, if need be in the place of a free one
        that is too small.

        Raises:
            ScheduleError: a new one would be made while a CUDA graph is captured.
        """
        free = self.free
        if not lane.captured():
            return _smallest(free, nbytes) or self._make(nbytes, lane)
        found = _smallest(self.of_graphs, nbytes) or _smallest(free, nbytes)
        if found is None:
            raise ScheduleError(
                f"a step that is captured moves a tensor of {nbytes:,} bytes to the host's memory, for which the steps "
                "before have pinned no buffer. Have every step move the same, or warm up more: T.cuda_graph(warmup=)."
            )
        return found._replace(of_graphs=True)

    def give(self, taken: HostBuffer) -> None:
        """Give a buffer back. It may come from anywhere, as the garbage collector does."""
        self.returned.append(taken)

    @property
    def free(self) -> list[HostBuffer]:
        """Those that nobody has, but for those of graphs."""
        while self.returned:
            one = self.returned.pop()
            insort(self.of_graphs if one.of_graphs else self.idle, one)
        return self.idle

    def _make(self, nbytes: int, lane: CopyLane) -> HostBuffer:
        if self.idle:  # all are too small
            self._drop(self.idle.pop(), lane)
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.number += 1
        if lane.stream is not None and pin(memory):  # else copies wait, and are as right
            self.pinned[self.number] = memory
            self.lane = lane
        self.made += 1
        self.nbytes += nbytes
        return HostBuffer(nbytes, self.number, memory)

    def _drop(self, one: HostBuffer, lane: CopyLane) -> None:
        self.made -= 1
        self.nbytes -= one.nbytes
        pinned = self.pinned.pop(one.number, None)
        if pinned is not None:
            lane.retire([pinned])

    def __deepcopy__(self, memo: Any) -> HostBuffers:
        """A copy of a model has buffers of its own."""
        return HostBuffers()

    def __del__(self) -> None:
        with suppress(Exception):  # where the process ends
            if self.pinned:
                self.lane.retire(self.pinned.values())


def _smallest(free: list[HostBuffer], nbytes: int) -> HostBuffer | None:
    """Take out the smallest with so many bytes."""
    at = bisect_left(free, nbytes, key=lambda one: one.nbytes)
    return free.pop(at) if at < len(free) else None


class HostTransfer(NamedTuple):
    """What a step with one microbatch moves between the host's memory and the device, on this rank, in bytes.

    update: by `step`, to the device. stored: by `step`, back. beside: in the forward and the backward, to the device,
    for gathers. gradients: in the backward, to the host. bandwidth: bytes a second each way, both ways at once; NaN
    where nobody has measured it.
    """

    update: int
    stored: int
    beside: int
    gradients: int
    bandwidth: float = math.nan

    @property
    def to_device(self) -> int:
        """Bytes to the device."""
        return self.update + self.beside

    @property
    def to_host(self) -> int:
        """Bytes to the host's memory."""
        return self.stored + self.gradients

    @property
    def seconds(self) -> float:
        """What a step takes longer at most, where nothing is hidden by compute."""
        return (max(self.update, self.stored) + self.beside + self.gradients) / self.bandwidth

    def __repr__(self) -> str:
        if not any(self[:4]):
            return "a step moves nothing between the host's memory and the device"
        ways = f"{bytes_text(self.to_device)} to the device and {bytes_text(self.to_host)} to the host"
        within = (
            f"in step {bytes_text(self.update)} and {bytes_text(self.stored)}, "
            f"beside compute {bytes_text(self.beside)} and {bytes_text(self.gradients)}"
        )
        rate = f": at most {self.seconds:.3f} s at {self.bandwidth / 1e9:.1f} GB/s each way"
        return f"a step moves {ways} ({within}){'' if math.isnan(self.bandwidth) else rate}"


def planned_transfer(state: State) -> HostTransfer:
    """What a step of a state moves, by its plan. Nothing is measured."""
    layout, executor = state.layout, state.version.lineage.executor
    plan = first_plan(layout, state.spec.schedule) if executor is None else executor.progress.plan
    main, opt = state.main, state.opt
    far = {name: bucket for name, bucket in layout.trainable.items() if bucket.on_host}
    nodes = pytree.tree_leaves(opt, is_leaf=lambda x: isinstance(x, FlatBuffer))
    kept = [n for n in nodes if isinstance(n, FlatBuffer) and n.bucket.name in far and not n.bucket.by_leaf]
    once = {b.local.data_ptr() or id(b.local): b.local.nbytes for b in [*map(main.__getitem__, far), *kept]}
    moved = sum(once.values())
    gradients = sum(b.nbytes("main") // b.main.itemsize * b.grads.itemsize for b in far.values() if b.grads_on_host)
    sizes = {name: b.nbytes("weights") for name, b in layout.buckets.items() if b.copy_on_host}
    copies = sum(sizes.get(name, 0) for name in far)
    of_unit = {unit.name: sum(sizes.get(b.name, 0) for b in unit.buckets) for unit in layout.units}
    beside = sum(of_unit[gather.unit] for gather in plan.gathers)
    return HostTransfer(moved + gradients, moved + copies, beside, gradients)


def host_transfer(state: State, bandwidth: float | None = None) -> HostTransfer:
    """What it costs that a state lies in the host's memory (`memory_kind="pinned_host"`), by plan.

    Args:
        state: between steps or not; or an `abstract_state`, of which nothing is measured.
        bandwidth: bytes a second each way. None: measured, on the first call for a device, by four copies of 64 MiB
            each way at once. Others that use the same bus at the same time are not counted.

    Raises:
        SpecError: a bandwidth that is no positive number.

    Collective: none.

    Example: `print(fsdp.host_transfer(state))` gives "a step moves 18.4 GiB to the device and 13.8 GiB to the host (in
    step 13.8 GiB and 11.5 GiB, beside compute 4.6 GiB and 2.3 GiB): at most 0.441 s at 50.4 GB/s each way".
    """
    expect("host_transfer(state)", state, State, "a State", TypeError)
    if bandwidth is not None and not (isinstance(bandwidth, int | float) and 0 < bandwidth < math.inf):
        raise SpecError(f"host_transfer(bandwidth={bandwidth!r}): expected bytes a second, as 50e9, or None.")
    if bandwidth is None:
        abstract = any(buffer.local.is_meta for buffer in state.main.values())
        bandwidth = math.nan if abstract else host_bandwidth(state.count.device)
    return planned_transfer(state)._replace(bandwidth=float(bandwidth))
