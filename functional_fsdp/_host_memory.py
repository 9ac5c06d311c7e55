"""Memory of the host: what lies there is updated in portions, what that costs, and copies to and from it.

    HostBytes, host_memory          the host's memory as a device's tensors, by `Placement.memory_kind`
    gradients_on_host               main gradients in it, which keep it from step to step
    Cut, cuts                       parts of FlatBuffers
    Portion, Streamed, stream       updates part by part, through the device
    CopyLane, HostBuffers           copies to and fro, on a lane of their own
    planned_transfer, host_transfer what it costs, in bytes and seconds

`cuts`: some elements in a row, as a FlatBuffer, for updates that go element by element.

cuts(numel, width, nbytes)      [start, stop) of each part
cut(buffer, local, start)       the part as a FlatBuffer

`stream`: the update of what lies in the host's memory, part by part through two buffers on the device.

    fetch lane   ── 3 to buffer 0 ── 2 to buffer 1 ──          ── 1 to buffer 0 ──
    update       ─────────────────── update 3 ─────── update 2 ─────────────────── update 1 ──
    store lane                                ── 3 to the host ── 2 to the host ──          ── 1 to the host ──

A portion is some buckets, or parts of them: main weights, what the optimizer keeps for them, and their gradients where
those are in the host's memory, too. The optimizer sees tensors of the device. Compute copies are brought up to date
from these, so nothing is fetched twice. With `Schedule(overlap_update=True)` the middle row is a lane, too, and a
portion starts when its gradients are there; else it is compute, after the backward. On the CPU it is all in a row.

`CopyLane`: copies between a device and the host's memory, and the host's buffers for them.

    compute   ... makes t ──┐                     ┌── waits, lets t go ...         ┌── waits, reads t ...
    lane                    └── t to the host ──┘   ...   ┌── t from the host ──┘

A lane belongs to a device, since no rank waits for what it does. On the CPU it is the host's present.

`host_transfer`: what it costs that a state lies in the host's memory, bytes each way and seconds at a bandwidth.

forward, backward   compute shards ──▶ device, for each gather     main gradients ──▶ host
step                main weights, what the optimizer keeps, main gradients ──▶ device
                    main weights, what the optimizer keeps, compute shards ──▶ host
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from ._common.calls import provide
from ._common.device import current_device, in_host_memory
from ._common.errors import ScheduleError, SpecError, expect
from ._common.record import Mark, Steps
from ._common.torch_names import pytree
from ._common.tree import bytes_text, register
from ._optim.optimizer import FILL, runs
from ._plan.layout import ALIGN, STAGED, Bucket, aligned
from ._plan.plan import first_plan
from ._plan.route import States
from ._runtime.agreement import Leaves
from ._runtime.runtime import Runtime
from ._shared.device import being_captured, device_of, pin, unpin
from ._shared.torch_names import disable_current_modes, dispatch_modes, storage_at, uses_of
from ._state.state import State
from ._storage import FlatBuffer, own_part
from ._verbs import in_place

ALONE = 2  # who knows a storage that is only kept: its tensor, and Python's name for it


class HostBytes:
    """Bytes of the host that a device's tensors lie in; it goes when their storage does."""

    def __init__(self, host: torch.Tensor, pinned: bool) -> None:
        self.host, self.pinned = host, pinned

    def __del__(self) -> None:
        if self.pinned:
            with suppress(Exception):  # the process may be ending
                _GONE.append(self.host)
                _let_go()


_GONE: list[torch.Tensor] = []  # pinned bytes that nobody uses any more


def _let_go() -> None:
    """Unpin what is gone. While a CUDA graph is captured that would end the capture, so it waits for the next time."""
    if _GONE and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()  # who is given these bytes next shall not meet a kernel that still reads them
        while _GONE:
            unpin(_GONE.pop())


def host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros [numel] in pinned memory of the host, as a tensor of `device`: kernels and copies reach the bytes over the
    bus, in the order of streams, as if they were the device's own (CUDA programming guide, "mapped memory"). What is
    computed from it lies on the device. On a CPU it is a tensor like any other, but `in_host_memory` knows it."""
    host = torch.zeros(numel * dtype.itemsize, dtype=torch.uint8, device="cpu")
    if device.type == "cuda":
        torch.cuda.init()
        _let_go()
        pinned = numel > 0 and pin(host)
        if numel > 0 and not pinned:
            raise SpecError(
                f"memory_kind='pinned_host': {host.nbytes:,} bytes of the host's memory could not be pinned. See the "
                "system's limit (ulimit -l) and its free memory, or give fewer leaves such a placement."
            )
        storage = storage_at(host.data_ptr(), device, host.nbytes) if numel else torch.UntypedStorage(0, device=device)
        made = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,))
    else:
        made, pinned = host.view(dtype), False
        host = host.new_empty(0)  # not itself: nobody could free it
    kept: Any = made.untyped_storage()  # which lives, with its attributes, as long as any view of it
    kept.host_bytes = HostBytes(host, pinned)
    return made


#: memory of eager steps, and of those that graphs replay, by elements and dtype
Pool = dict[tuple[int, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]]


def gradients_on_host(pool: Pool, run: Runtime, bucket: Bucket, numel: int) -> torch.Tensor:
    """Memory for main gradients: what nobody holds any more of the steps before. What a captured step has is its
    graph's from then on: a replay writes there, unasked."""
    eager, graphs = pool.setdefault((numel, bucket.grads), ([], []))
    mine, also = (graphs, eager) if run.capturing else (eager, [])
    for kept in (mine, also):
        for i, memory in enumerate(kept):
            if uses_of(memory.untyped_storage()) == ALONE:
                if kept is also:
                    mine.append(kept.pop(i))
                return memory.detach()
    mine.append(host_memory(numel, bucket.grads, run.device))
    return mine[-1].detach()


provide("host_memory", host_memory, gradients_on_host)


class Cut(FlatBuffer):
    """The elements from `first` on of what a rank holds of a bucket."""

    first: int

    def __init__(self, local: torch.Tensor, like: FlatBuffer, first: int) -> None:
        super().__init__(local, like.bucket, like.states, like.mesh)
        self.__dict__["first"] = first

    def but(self, local: torch.Tensor, states: States | None = None) -> Cut:
        return Cut(local, self, self.first)

    def only(self, labels: Container[str]) -> FlatBuffer | None:
        found = super().only(labels)
        return found if found is None or found is self else Cut(self.local, found, self.first)

    def span(self) -> tuple[int, int]:
        start = super().span()[0] + self.first
        return start, start + self.local.numel()


register(
    Cut,
    lambda b: ((b.local,), (b.bucket, b.states, b.mesh, b.first)),
    ("local",),
    lambda context, children: Cut(children[0], FlatBuffer(children[0], *context[:3]), context[3]),
)


def cut(buffer: FlatBuffer, local: torch.Tensor, first: int) -> FlatBuffer:
    """The buffer with `local` in the place of its elements from `first` on, which may be all of them."""
    return Cut(local, buffer, first) if local.numel() < buffer.local.numel() else buffer.but(local)


def cuts(numel: int, width: int, nbytes: int) -> list[tuple[int, int]]:
    """[start, stop) of parts in a row, of so many bytes each but for the last one: `numel` elements of `width` bytes.

    >>> cuts(700, 4, 1024)
    [(0, 256), (256, 512), (512, 700)]
    """
    most = aligned(max(1, nbytes // width), ALIGN)
    return [(start, min(start + most, numel)) for start in range(0, max(1, numel), most)]


BUFFERS = 2
ORDERS = 8  # of buckets, for which portions are kept
Tree = dict[str, FlatBuffer]
Update = Callable[[Tree, Any, Tree], None]  # of main weights and optimizer state on the device, by these gradients
Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # (of the device, of the host)


class BucketPart(NamedTuple):
    """The elements [start, stop) of what a rank holds of a bucket; whether they are its last ones."""

    name: str
    start: int
    stop: int
    last: bool


class Portion(NamedTuple):
    """What is on the device at once. both: copied in and back. fetched: copied in only. cast: (main weights, where they
    go in the compute dtype). stored: copied back only. grads: by bucket, room for gradients, if they are fetched."""

    parts: tuple[BucketPart, ...]
    main: Tree
    opt: Any
    both: Pairs
    fetched: Pairs
    cast: Pairs
    stored: Pairs
    grads: dict[str, torch.Tensor]


def _is_buffer(x: Any) -> bool:
    return isinstance(x, FlatBuffer)


def _kept(opt: Any, name: str) -> list[FlatBuffer]:
    """What an optimizer keeps for a bucket in the host's memory."""
    nodes = pytree.tree_leaves(opt, is_leaf=_is_buffer)
    return [n for n in nodes if _is_buffer(n) and n.bucket.name == name and in_host_memory(n.local)]


class Streamed:
    """What an executor keeps of it between steps: two buffers, and who lies where in them."""

    def __init__(self, device: torch.device) -> None:
        self.buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self.fresh = False  # whether compute may still do something in the buffers' memory
        self.done: set[str] = set()  # whose update, in this step, has brought its compute copy along
        self.trees: tuple[Any, ...] = ()  # for which the portions are: main weights, compute copies, what is kept
        self.found: dict[tuple[str, ...], tuple[Portion, ...]] = {}

    @property
    def nbytes(self) -> int:
        """Of the device, while a step updates; where updates go beside the backward, always."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def allocate(self) -> None:
        """Have memory for the buffers. Where it is new, compute may still do something there."""
        for buffer in self.buffers:
            storage = buffer.untyped_storage()
            if not storage.size():
                storage.resize_(buffer.nbytes)
                self.fresh = True

    def free(self) -> None:
        """Compute has waited for all that was done in the buffers: give their memory back."""
        for buffer in self.buffers:
            buffer.untyped_storage().resize_(0)

    def along(self, put_back: Sequence[Any]) -> set[str]:
        """The buckets of which the update has brought compute copies along, once. None where some of main weights were
        put back as they were."""
        done, self.done = self.done, set()
        return set() if put_back else done

    # ---------------------------------------------------------------- who lies where

    def portions(self, state: State, names: Sequence[str]) -> tuple[Portion, ...]:
        """Those of these buckets, in this order: the same ones in every step that finds the same tensors. The buffers
        have memory from here on."""
        trees = state.main, state.weights, state.opt
        key = tuple(names)
        others = any(a is not b for a, b in zip(trees, self.trees or (None,) * 3, strict=True))
        if others or (len(self.found) >= ORDERS and key not in self.found):
            self.trees, self.found = trees, {}
        groups = [] if key in self.found else _groups(state, names)
        self._make_room(max((sum(_nbytes(state, part) for part in some) for some in groups), default=0))
        self.allocate()
        if key not in self.found:
            self.found[key] = tuple(self._portion(state, some, i % BUFFERS) for i, some in enumerate(groups))
        return self.found[key]

    def _make_room(self, nbytes: int) -> None:
        if self.buffers[0].nbytes < nbytes:
            device, self.found = self.buffers[0].device, {}
            self.buffers.clear()
            self.buffers += [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
            self.fresh = True

    def _portion(self, state: State, parts: Sequence[BucketPart], which: int) -> Portion:
        at = 0
        seen: dict[tuple[int, int], torch.Tensor] = {}
        both, fetched, cast, stored = ([] for _ in range(4))
        by_name = {part.name: part for part in parts}

        def room(numel: int, dtype: torch.dtype) -> torch.Tensor:
            nonlocal at
            begin, at = at, at + aligned(numel * dtype.itemsize, STAGED)
            return self.buffers[which][begin : begin + numel * dtype.itemsize].view(dtype)

        def there(buffer: FlatBuffer, part: BucketPart) -> FlatBuffer:
            """This part of a buffer on the device; of one with a number a leaf, a copy for all updates but the last."""
            if buffer.bucket.by_leaf:
                if part.last or not buffer.local.numel():
                    return buffer
                fetched.append((room(buffer.local.numel(), buffer.local.dtype), buffer.local))
                return buffer.but(fetched[-1][0])
            far = buffer.local[part.start : part.stop]
            key = (far.data_ptr(), far.numel())
            if key not in seen or not far.numel():
                seen[key] = room(far.numel(), far.dtype)
                both.append((seen[key], far))
            return cut(buffer, seen[key], part.start)

        def moved(x: Any) -> Any:
            mine = _is_buffer(x) and x.bucket.name in by_name and (x.bucket.by_leaf or in_host_memory(x.local))
            return there(x, by_name[x.bucket.name]) if mine else x

        main = {part.name: there(state.main[part.name], part) for part in parts}
        opt = pytree.tree_map(moved, state.opt, is_leaf=_is_buffer)
        grads = {}
        for part in parts:
            bucket, copy, size = state.layout.buckets[part.name], state.weights[part.name], part.stop - part.start
            own = own_part(state.main[part.name], copy)[part.start : part.stop]
            if in_host_memory(own):
                stored.append((room(size, bucket.compute), own))
                own = stored[-1][0]
            cast.append((main[part.name].local, own))
            if bucket.grads_on_host:
                grads[part.name] = room(size, bucket.grads)
        return Portion(tuple(parts), main, opt, both, fetched, cast, stored, grads)

    # ---------------------------------------------------------------- a step

    def run(
        self, lanes: Any, some: Sequence[Portion], grads: Tree, update: Update, marks: Mapping[str, Mark] | None
    ) -> Mark:
        """Carry portions out.

        Args:
            grads: main gradients.
            update: the optimizer's, of what a portion has.
            marks: by bucket, when its gradients are there, in their order: the update goes beside compute. None: they
                are there, and compute updates.

        Returns:
            the mark at the end of the store lane.
        """
        stored: list[Mark] = [None] * BUFFERS
        here = lanes.mark() if marks is None or self.fresh else None
        self.fresh = False
        last: Mark = None
        for i, portion in enumerate(some):
            before = some[max(i - 1, 0)].parts[0].name
            ready = [] if marks is None else [marks[part.name] for part in portion.parts]
            begun = [stored[i % BUFFERS], here, None if marks is None else marks[before]]
            slopes, came = _gradients(portion, grads)
            fetched = lanes.enqueue("fetch", _copies(lanes, begun, [*portion.both, *portion.fetched], 0))
            if came:  # what they wait for, updates would wait for anyhow
                fetched = lanes.enqueue("fetch", _copies(lanes, ready, came, 0))
            taken = _taken(lanes, [fetched, *ready], portion, slopes, update)
            if marks is None:
                for _ in taken:
                    pass
                updated = lanes.mark()
            else:
                updated = lanes.enqueue("update", taken)
            back = _copies(lanes, [updated], [*portion.both, *portion.stored], 1)
            last = stored[i % BUFFERS] = lanes.enqueue("store", back)
            self.done.update(part.name for part in portion.parts if part.last)
        return last


def stream(state: State, names: Sequence[str], skip: torch.Tensor | None, given: Leaves, beside: bool = False) -> None:
    """Update what lies in the host's memory. `beside`: on lanes, as gradients come."""
    executor = state._executor
    lanes, sink = executor.run.lanes, executor.sink
    streamed = sink.stream_by(Streamed)
    now = partial(_on_device, state, skip, given)
    marks = {name: sink.untouched[name] for name in names} if beside else None
    stored = streamed.run(lanes, streamed.portions(state, names), sink.grads, now, marks)
    executor.reductions.staging.ends("store", stored)
    if not beside:
        lanes.wait(stored)
        if not state.spec.schedule.overlap_update:
            streamed.free()


def _on_device(
    state: State,
    skip: torch.Tensor | None,
    given: Leaves,
    main: dict[str, FlatBuffer],
    opt: Any,
    grads: dict[str, FlatBuffer],
) -> None:
    in_place(state._evolve(opt=opt), main, skip, given, grads)


def _groups(state: State, names: Sequence[str]) -> list[list[BucketPart]]:
    """Parts in a row, in groups of so many bytes of main weights as an update has at least."""
    sizes = {name: state.main[name].local.numel() for name in names}
    if not getattr(state.optimizer, "elementwise", False):
        together = runs(state.optimizer, state.opt, {name: state.main[name].local.nbytes for name in names})
        return [[BucketPart(name, 0, sizes[name], True) for name in some] for some in together]
    fill = getattr(state.optimizer, "fill", FILL)
    found: list[list[BucketPart]] = []
    left = 0
    for name, size in sizes.items():
        width = state.main[name].local.element_size()
        for start, stop in cuts(size, width, fill):
            if left <= 0 or any(part.name == name for part in found[-1]):  # one part of a bucket at a time
                found.append([])
                left = fill
            found[-1].append(BucketPart(name, start, stop, stop == size))
            left -= (stop - start) * width
    return found


def _nbytes(state: State, part: BucketPart) -> int:
    """Bytes that a part takes in a buffer."""
    size = part.stop - part.start
    bucket: Bucket = state.layout.buckets[part.name]
    dtypes = [buffer.local.dtype for buffer in (state.main[part.name], *_kept(state.opt, part.name))]
    dtypes += [bucket.compute] * bucket.copy_on_host + [bucket.grads] * bucket.grads_on_host
    nodes = pytree.tree_leaves(state.opt, is_leaf=_is_buffer)
    counts = [n.local.nbytes for n in nodes if _is_buffer(n) and n.bucket.by_leaf and n.bucket.name == part.name]
    return sum(aligned(size * dtype.itemsize, STAGED) for dtype in dtypes) + sum(aligned(n, STAGED) for n in counts)


def _gradients(portion: Portion, grads: Tree) -> tuple[Tree, Pairs]:
    """A portion's gradients, and how those come to the device that lie in the host's memory."""
    found: Tree = {}
    pairs: Pairs = []
    for name, start, stop, _ in portion.parts:
        buffer = grads[name]
        local = buffer.local[start:stop]
        if name in portion.grads and in_host_memory(local):
            pairs.append((portion.grads[name], local))
            local = portion.grads[name]
        found[name] = cut(buffer, local, start)
    return found, pairs


def _copies(lanes: Any, after: Sequence[Mark], pairs: Pairs, back: int) -> Steps:
    """To the device, or back. No kernel runs: these are copies of equal dtype, which the copy engines make."""
    for mark in after:
        lanes.wait(mark)
    for pair in pairs:
        pair[back].copy_(pair[1 - back], non_blocking=True)
    yield from ()


def _taken(lanes: Any, after: Sequence[Mark], portion: Portion, grads: Tree, update: Update) -> Steps:
    for mark in after:
        lanes.wait(mark)
    update(portion.main, portion.opt, grads)
    for main, own in portion.cast:
        own.copy_(main)
    yield from ()


provide("host_memory", stream)


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
