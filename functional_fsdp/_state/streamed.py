"""The update of what lies in the host's memory: bucket by bucket through two buffers on the device.

    fetch lane   ── 3 to buffer 0 ── 2 to buffer 1 ──          ── 1 to buffer 0 ──
    update       ─────────────────── update 3 ─────── update 2 ─────────────────── update 1 ──
    store lane                                ── 3 to the host ── 2 to the host ──          ── 1 to the host ──

A portion is some buckets: main weights and what the optimizer keeps for them, which are as many bytes each way. The
optimizer sees tensors of the device. Compute copies are brought up to date from them, so nothing is fetched twice.
With `Schedule(overlap_update=True)` the middle row is a lane, too, and a portion starts when its gradients are there;
else it is compute, after the backward. On the CPU everything happens in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._common.device import host_bandwidth, in_host_memory
from .._common.torch_names import pytree
from .._common.tree import bytes_text
from .._distributed.lanes import Mark, Steps
from .._optim.optimizer import FILL, portions
from .._plan.bucket import STAGED, aligned
from .._storage.flat import FlatBuffer

if TYPE_CHECKING:
    from .state import State

__all__ = ["HostTransfer", "Streamed", "host_transfer"]

BUFFERS = 2
Update = Callable[[dict[str, FlatBuffer], Any], None]  # of main weights and optimizer state on the device


class Portion(NamedTuple):
    """Some buckets on the device. pairs: (of the device, of the host), what is copied in and back. own: (main weights,
    their place in the compute copy)."""

    main: dict[str, FlatBuffer]
    opt: Any
    pairs: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    own: tuple[tuple[torch.Tensor, torch.Tensor], ...]


def _is_buffer(x: Any) -> bool:
    return isinstance(x, FlatBuffer)


def _kept(opt: Any, name: str) -> list[torch.Tensor]:
    """What an optimizer keeps for a bucket in the host's memory."""
    nodes = pytree.tree_leaves(opt, is_leaf=_is_buffer)
    return [n.local for n in nodes if _is_buffer(n) and n.bucket.name == name and in_host_memory(n.local)]


class HostTransfer(NamedTuple):
    """What `step` moves between the host's memory and the device, on this rank.

    nbytes: to the device, and as many back. bandwidth: bytes a second each way, both ways at once.
    """

    nbytes: int
    bandwidth: float

    @property
    def seconds(self) -> float:
        """What a step takes longer, where nothing else hides it."""
        return self.nbytes / self.bandwidth

    def __repr__(self) -> str:
        rate = f"{self.bandwidth / 1e9:.1f} GB/s each way"
        return f"{bytes_text(self.nbytes)} to the device and back in a step, {self.seconds:.3f} s at {rate}"


def host_transfer(state: State) -> HostTransfer:
    """What it costs that main weights and optimizer state lie in the host's memory (`memory_kind="pinned_host"`).

    The bandwidth is measured, on the first call for a device: two copies of 64 MiB each way. Others that use the same
    bus at the same time are not counted.

    Example: `print(fsdp.host_transfer(state))` gives "13.8 GiB to the device and back in a step, 0.295 s at 50.4 GB/s
    each way".

    Collective: none.
    """
    some = [name for name in state.layout.trainable if state.layout.buckets[name].on_host]
    nodes = [n for n in pytree.tree_leaves(state.opt, is_leaf=_is_buffer) if _is_buffer(n) and in_host_memory(n.local)]
    moved = {t.data_ptr(): t.nbytes for t in (*(state.main[name].local for name in some), *(n.local for n in nodes))}
    return HostTransfer(sum(moved.values()), host_bandwidth(state.count.device))


class Streamed:
    """What an executor keeps of it between steps: two buffers, and who lies where in them."""

    def __init__(self, device: torch.device) -> None:
        self.buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
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

    def portions(self, state: State, names: Sequence[str]) -> tuple[Portion, ...]:
        """Those of these buckets, in this order: the same ones in every step of the same optimizer state."""
        if self.opt is not state.opt:
            self.opt, self.found = state.opt, {}
        key = tuple(names)
        if key not in self.found:
            sizes = {name: state.main[name].local.nbytes for name in names}
            groups = portions(sizes, getattr(state.optimizer, "fill", FILL))
            self._make_room(max((self._bytes(state, some) for some in groups), default=0))
            self.found[key] = tuple(self._portion(state, some, i % BUFFERS) for i, some in enumerate(groups))
        return self.found[key]

    @staticmethod
    def _bytes(state: State, names: Sequence[str]) -> int:
        kept = (t for name in names for t in (state.main[name].local, *_kept(state.opt, name)))
        return sum(aligned(t.nbytes, STAGED) for t in kept)

    def _make_room(self, nbytes: int) -> None:
        if self.buffers[0].nbytes < nbytes:
            device, self.found = self.buffers[0].device, {}
            self.buffers.clear()
            self.buffers += [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]

    def _portion(self, state: State, names: Sequence[str], which: int) -> Portion:
        at, seen, pairs = 0, dict[int, torch.Tensor](), []

        def there(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal at
            if tensor.data_ptr() not in seen or not tensor.numel():
                view = self.buffers[which][at : at + tensor.nbytes].view(tensor.dtype)
                at += aligned(tensor.nbytes, STAGED)
                seen[tensor.data_ptr()] = view
                pairs.append((view, tensor))
            return seen[tensor.data_ptr()]

        main = {name: state.main[name].but(there(state.main[name].local)) for name in names}

        def moved(x: Any) -> Any:
            mine = _is_buffer(x) and x.bucket.name in main and in_host_memory(x.local)
            return x.but(there(x.local)) if mine else x

        opt = pytree.tree_map(moved, state.opt, is_leaf=_is_buffer)
        own = []
        for name, buffer in main.items():
            copy = state.weights[name]
            start = buffer.span()[0] - copy.span()[0]
            own.append((buffer.local, copy.local[start : start + buffer.local.numel()]))
        return Portion(main, opt, tuple(pairs), tuple(own))

    def run(self, lanes: Any, some: Sequence[Portion], update: Update, marks: Mapping[str, Mark] | None) -> Mark:
        """Carry portions out.

        Args:
            update: the optimizer's, of the buckets that a portion has.
            marks: by bucket, when its gradients are there, in their order: the update goes beside compute. None: they
                are there, and compute updates.

        Returns:
            the mark at the end of the store lane.
        """
        stored: list[Mark] = [None] * BUFFERS
        here = lanes.mark() if marks is None else None
        last: Mark = None
        for i, portion in enumerate(some):
            ready = [] if marks is None else [marks[name] for name in portion.main]
            free, begun = stored[i % BUFFERS], here if marks is None else marks[next(iter(some[max(i - 1, 0)].main))]
            fetched = lanes.beside("fetch", _copies(lanes, [free, begun], portion, 0))
            taken = _taken(lanes, [fetched, *ready], portion, update)
            if marks is None:
                for _ in taken:
                    pass
                updated = lanes.mark()
            else:
                updated = lanes.beside("update", taken)
            last = stored[i % BUFFERS] = lanes.beside("store", _copies(lanes, [updated], portion, 1))
            self.done.update(portion.main)
        return last


def _copies(lanes: Any, after: Sequence[Mark], portion: Portion, back: int) -> Steps:
    """To the device, or back. No kernel runs: these are copies of equal dtype, which the copy engines make."""
    for mark in after:
        lanes.wait(mark)
    for pair in portion.pairs:
        pair[back].copy_(pair[1 - back], non_blocking=True)
    yield from ()


def _taken(lanes: Any, after: Sequence[Mark], portion: Portion, update: Update) -> Steps:
    for mark in after:
        lanes.wait(mark)
    update(portion.main, portion.opt)
    for main, own in portion.own:
        own.copy_(main)
    yield from ()
