"""The update of what lies in the host's memory: part by part through two buffers on the device.

    fetch lane   ── 3 to buffer 0 ── 2 to buffer 1 ──          ── 1 to buffer 0 ──
    update       ─────────────────── update 3 ─────── update 2 ─────────────────── update 1 ──
    store lane                                ── 3 to the host ── 2 to the host ──          ── 1 to the host ──

A portion is some buckets, or parts of them: main weights, what the optimizer keeps for them, and their gradients where
those are in the host's memory, too. The optimizer sees tensors of the device. Compute copies are brought up to date
from these, so nothing is fetched twice. With `Schedule(overlap_update=True)` the middle row is a lane, too, and a
portion starts when its gradients are there; else it is compute, after the backward. On the CPU it is all in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._common.device import host_bandwidth, in_host_memory
from .._common.torch_names import pytree
from .._common.tree import bytes_text
from .._distributed.lanes import Mark, Steps
from .._optim.optimizer import FILL
from .._plan.bucket import ALIGN, STAGED, Bucket, aligned
from .._storage.cut import Cut
from .._storage.flat import FlatBuffer

if TYPE_CHECKING:
    from .state import State

__all__ = ["HostTransfer", "Streamed", "host_transfer"]

BUFFERS = 2
Tree = dict[str, FlatBuffer]
Update = Callable[[Tree, Any, Tree], None]  # of main weights and optimizer state on the device, by these gradients
Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # (of the device, of the host)


class Part(NamedTuple):
    """The elements [start, stop) of what a rank holds of a bucket; whether they are its last ones."""

    name: str
    start: int
    stop: int
    last: bool


class Portion(NamedTuple):
    """What is on the device at once. both: copied in and back. fetched: copied in only. cast: (main weights, where they
    go in the compute dtype). stored: copied back only. grads: by bucket, room for gradients, if they are fetched."""

    parts: tuple[Part, ...]
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


class HostTransfer(NamedTuple):
    """What a step moves between the host's memory and the device, on this rank, in bytes.

    update: by `step`, to the device; nearly as many go back. beside: in the forward and the backward, to the device,
    for gathers. gradients: in the backward, to the host. bandwidth: bytes a second each way, both ways at once.
    """

    update: int
    beside: int
    gradients: int
    bandwidth: float

    @property
    def seconds(self) -> float:
        """What a step takes longer at most, where nothing is hidden by compute."""
        return (self.update + self.beside + self.gradients) / self.bandwidth

    def __repr__(self) -> str:
        sizes = [f"{bytes_text(n)} {what}" for what, n in zip(self._fields[:3], self[:3], strict=True) if n]
        rate = f"{self.bandwidth / 1e9:.1f} GB/s each way"
        return f"a step moves {', '.join(sizes) or 'nothing'}: at most {self.seconds:.3f} s at {rate}"


def host_transfer(state: State) -> HostTransfer:
    """What it costs that a state lies in the host's memory (`memory_kind="pinned_host"`), by plan.

    The bandwidth is measured, on the first call for a device: four copies of 64 MiB each way. Others that use the same
    bus at the same time are not counted.

    Collective: none.

    Example: `print(fsdp.host_transfer(state))` gives "a step moves 13.8 GiB update, 4.6 GiB beside: at most 0.396 s at
    50.4 GB/s each way".
    """
    far = {name: bucket for name, bucket in state.layout.trainable.items() if bucket.on_host}
    sizes = {name: state.main[name].local.numel() for name in far}
    kept = {t.local.data_ptr(): t.local.nbytes for name in far for t in (state.main[name], *_kept(state.opt, name))}
    gradients = sum(sizes[name] * bucket.grads.itemsize for name, bucket in far.items() if bucket.grads_on_host)
    gathers: dict[str, int] = {}
    for gather in state.cursor.plan.gathers:
        gathers[gather.unit] = gathers.get(gather.unit, 0) + 1
    beside = sum(
        buffer.local.nbytes * gathers.get(buffer.bucket.unit, 0)
        for buffer in state.weights.values()
        if buffer.bucket.copy_on_host
    )
    return HostTransfer(sum(kept.values()) + gradients, beside, gradients, host_bandwidth(state.count.device))


class Streamed:
    """What an executor keeps of it between steps: two buffers, and who lies where in them."""

    def __init__(self, device: torch.device) -> None:
        self.buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self.fresh = False  # whether compute may still do something in the buffers' memory
        self.done: set[str] = set()  # whose update, in this step, has brought its compute copy along
        self.opt: Any = None  # for which the portions are
        self.found: dict[tuple[str, ...], tuple[Portion, ...]] = {}

    @property
    def nbytes(self) -> int:
        """Of the device."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def take(self, put_back: Sequence[Any]) -> set[str]:
        """The buckets of which the update has brought compute copies along, once. None where some of main weights were
        put back as they were."""
        done, self.done = self.done, set()
        return set() if put_back else done

    # ---------------------------------------------------------------- who lies where

    def portions(self, state: State, names: Sequence[str]) -> tuple[Portion, ...]:
        """Those of these buckets, in this order: the same ones in every step of the same optimizer state."""
        if self.opt is not state.opt:
            self.opt, self.found = state.opt, {}
        key = tuple(names)
        if key not in self.found:
            groups = _groups(state, names)
            self._make_room(max((sum(_nbytes(state, part) for part in some) for some in groups), default=0))
            self.found[key] = tuple(self._portion(state, some, i % BUFFERS) for i, some in enumerate(groups))
        return self.found[key]

    def _make_room(self, nbytes: int) -> None:
        if self.buffers[0].nbytes < nbytes:
            device, self.found = self.buffers[0].device, {}
            self.buffers.clear()
            self.buffers += [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
            self.fresh = True

    def _portion(self, state: State, parts: Sequence[Part], which: int) -> Portion:
        at = 0
        seen: dict[tuple[int, int], torch.Tensor] = {}
        both, fetched, cast, stored = ([] for _ in range(4))
        by_name = {part.name: part for part in parts}

        def room(numel: int, dtype: torch.dtype) -> torch.Tensor:
            nonlocal at
            begin, at = at, at + aligned(numel * dtype.itemsize, STAGED)
            return self.buffers[which][begin : begin + numel * dtype.itemsize].view(dtype)

        def there(buffer: FlatBuffer, part: Part) -> FlatBuffer:
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
            return Cut(seen[key], buffer, part.start) if far.numel() < buffer.local.numel() else buffer.but(seen[key])

        def moved(x: Any) -> Any:
            mine = _is_buffer(x) and x.bucket.name in by_name and (x.bucket.by_leaf or in_host_memory(x.local))
            return there(x, by_name[x.bucket.name]) if mine else x

        main = {part.name: there(state.main[part.name], part) for part in parts}
        opt = pytree.tree_map(moved, state.opt, is_leaf=_is_buffer)
        grads = {}
        for part in parts:
            bucket, copy, size = state.layout.buckets[part.name], state.weights[part.name], part.stop - part.start
            first = state.main[part.name].span()[0] - copy.span()[0] + part.start
            own = copy.local[first : first + size]
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
            fetched = lanes.beside("fetch", _copies(lanes, begun, [*portion.both, *portion.fetched], 0))
            if came:  # what they wait for, updates would wait for anyhow
                fetched = lanes.beside("fetch", _copies(lanes, ready, came, 0))
            taken = _taken(lanes, [fetched, *ready], portion, slopes, update)
            if marks is None:
                for _ in taken:
                    pass
                updated = lanes.mark()
            else:
                updated = lanes.beside("update", taken)
            back = _copies(lanes, [updated], [*portion.both, *portion.stored], 1)
            last = stored[i % BUFFERS] = lanes.beside("store", back)
            self.done.update(part.name for part in portion.parts if part.last)
        return last


def _groups(state: State, names: Sequence[str]) -> list[list[Part]]:
    """Parts in a row, in groups of so many bytes of main weights as an update has at least."""
    fill = getattr(state.optimizer, "fill", FILL)
    found: list[list[Part]] = []
    left = 0
    for name in names:
        local = state.main[name].local
        most = aligned(max(1, fill // local.element_size()), ALIGN) if _cuts(state) else max(1, local.numel())
        for start in range(0, max(1, local.numel()), most):
            stop = min(start + most, local.numel())
            if left <= 0:
                found.append([])
                left = fill
            if any(part.name == name for part in found[-1]):  # one part of a bucket at a time
                found.append([])
                left = fill
            found[-1].append(Part(name, start, stop, stop == local.numel()))
            left -= (stop - start) * local.element_size()
    return found


def _cuts(state: State) -> bool:
    return bool(getattr(state.optimizer, "elementwise", False))


def _nbytes(state: State, part: Part) -> int:
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
        found[name] = Cut(local, buffer, start) if local.numel() < buffer.local.numel() else buffer.but(local)
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
