"""Buckets in the host's memory: their bytes, and updates of them in portions.

Memory of the host as a device's tensors: what lies there by `Placement.memory_kind`, and main gradients in it.

Main gradients that lie in the host's memory keep it from step to step.

Cuts of FlatBuffers: some elements in a row, as a FlatBuffer, for updates that go element by element.

cuts(numel, width, nbytes)      [start, stop) of each part
cut(buffer, local, start)       the part as a FlatBuffer

The update of what lies in the host's memory: part by part through two buffers on the device.

    fetch lane   ── 3 to buffer 0 ── 2 to buffer 1 ──          ── 1 to buffer 0 ──
    update       ─────────────────── update 3 ─────── update 2 ─────────────────── update 1 ──
    store lane                                ── 3 to the host ── 2 to the host ──          ── 1 to the host ──

A portion is some buckets, or parts of them: main weights, what the optimizer keeps for them, and their gradients where
those are in the host's memory, too. The optimizer sees tensors of the device. Compute copies are brought up to date
from these, so nothing is fetched twice. With `Schedule(overlap_update=True)` the middle row is a lane, too, and a
portion starts when its gradients are there; else it is compute, after the backward. On the CPU it is all in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._common.calls import provide
from .._common.device import in_host_memory, pin, unpin
from .._common.errors import SpecError
from .._common.record import Mark, Steps
from .._common.torch_names import pytree, storage_at, uses_of
from .._common.tree import register
from .._optim.optimizer import FILL, runs
from .._plan.layout import ALIGN, STAGED, Bucket, aligned
from .._plan.route import States
from .._runtime.given import Leaves
from .._runtime.runtime import Runtime
from .._storage import FlatBuffer, own_part
from .._verbs import in_place

if TYPE_CHECKING:
    from .._state.state import State

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
