"""Rehearsal: a forward and a backward of a driven model with tensors that have no memory, to see how much they keep.

Torch's fake tensors stand for weights, inputs and everything that is computed. The driver is the one that trains, so
activations live as long as in a step: what is recomputed or moved to the host is so here. Nothing is gathered, reduced
or drawn.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from functional_fsdp import Layout, PackedWeight, State
from functional_fsdp._seams import HostBuffer, torch_private
from functional_fsdp.extend import CopyLane, HostBuffers, Loan

from .driver import Driver
from .unit_uses import Gradients

__all__ = ["Alive", "Lap", "Rehearsal", "moves", "weights_of"]

BLOCK = 512  # bytes: what GPUs' allocators round up to


class Alive(torch_private.TorchDispatchMode):
    """Counts the bytes of tensors that operations make, while they live: `now`, and the most since `lap`."""

    def __init__(self, device: torch.device, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.kind = device.type
        self.now = self.most = 0
        self.known = {t.untyped_storage()._cdata for t in known}  # which are not counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in torch_private.pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.device.type == self.kind and t.layout is torch.strided:
                storage = t.untyped_storage()
                if storage._cdata not in self.known:
                    size = -(-storage.nbytes() // BLOCK) * BLOCK
                    self.known.add(storage._cdata)
                    self.now += size
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, storage._cdata, size)
        return out

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size

    def lap(self) -> int:
        """The most bytes alive since the last lap."""
        most, self.most = self.most, self.now
        return most


class ImaginedBuffers(HostBuffers):
    """Buffers in the host's memory that have no memory."""

    def take(self, nbytes: int, lane: CopyLane) -> HostBuffer:
        self.nbytes += nbytes
        with torch_private.disable_current_modes():
            return HostBuffer(nbytes, 0, torch.empty(nbytes, dtype=torch.uint8, device="meta"))

    def give(self, taken: HostBuffer) -> None:
        pass


@contextmanager
def imagined_buffers(model: nn.Module) -> Iterator[ImaginedBuffers]:
    """Within, what parts of the model move to the host goes to `ImaginedBuffers`, whose `nbytes` says how much."""
    imagined = ImaginedBuffers()
    parts = [vars(module).get("_part") for module in model.modules()]
    owners = {id(part.owner): part.owner for part in parts if part is not None}
    before = {key: owner.buffers for key, owner in owners.items()}
    try:
        for owner in owners.values():
            owner.buffers = imagined
        yield imagined
    finally:
        for key, owner in owners.items():
            owner.buffers = before[key]


def moves(model: nn.Module) -> bool:
    """Whether parts of a model move something to the host's memory."""
    parts = [vars(module).get("_part") for module in model.modules()]
    return any(part is not None and part.fate == "offload" for part in parts)


class Lap(NamedTuple):
    """What the model did from one gather to the next: the units of the gather, what the counter gives, and the bytes
    that were alive at its end."""

    units: tuple[str, ...]
    work: Any
    alive: int


class Unconcerned:
    """What a driver's session is where no schedule is followed."""

    watcher = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: ()

    def skip(self, unit: str) -> bool:
        return True


class Rehearsal(Driver):
    """A driver of weights that are all there: `note(unit)` is called where the gradients of a unit are complete."""

    def __init__(
        self, model: nn.Module, device: torch.device, weights: dict[str, dict[str, torch.Tensor]], holds: bool
    ) -> None:
        super().__init__(model)
        self.place, self.made, self.holds = device, weights, holds
        self.loans = [Loan(unit, lent) for unit, lent in weights.items()]  # so that nobody takes them for activations
        self.moved = 0  # bytes of activations that went to the host's memory
        self.held: Gradients = []  # of the unit before: on GPUs they live until they were copied
        self.completed: Callable[[str], None] = lambda unit: None
        self.counter: Any = None  # has `lap()`, which gives what was done since the last one
        self.laps: list[Lap] = []
        self.alive: Any = None  # an `Alive`
        self.gathered: tuple[str, ...] = ()
        self.spare(())

    @contextmanager
    def running(self, state: State, verb: str, trains: bool = False) -> Iterator[int]:
        self._stop()
        self.attach(state)
        self.device = self.place
        self.debug = False
        try:
            self.state, self.session = state, Unconcerned()
            with imagined_buffers(self.model) as buffers:
                yield 0
                self.moved = buffers.nbytes
        finally:
            self.held = []
            self._stop()

    def spare(self, nbytes: Sequence[int]) -> None:
        """What uses of the forward keep more than is seen, until their backward."""
        self.spared = nbytes
        self.kept_more: dict[tuple[str, ...], list[int]] = {}

    def fetch(self, units: tuple[str, ...], by_plan: tuple[str, ...], others: tuple[str, ...]) -> None:
        if self.gathered:
            self.lap()
        self.gathered = units
        if self.differentiating and self.kept_more.get(units):
            self.alive.now -= self.kept_more[units].pop()
        super().fetch(units, by_plan, others)

    def lap(self) -> None:
        """The use of the units that were gathered last is over."""
        if self.counter is not None:
            if not self.differentiating and len(self.laps) < len(self.spared):
                more = self.spared[len(self.laps)]
                self.alive.now += more
                self.kept_more.setdefault(self.gathered, []).append(more)
            self.laps.append(Lap(self.gathered, self.counter.lap(), self.alive.now if self.alive else 0))

    def _unshard(self, units: tuple[str, ...], outside: bool) -> None:
        self.weights.update({unit: self.made[unit] for unit in units})

    def release(self, units: tuple[str, ...] | None = None) -> None:
        for unit in tuple(self.weights) if units is None else units:
            del self.weights[unit]

    def _reduce(self, unit: str, grads: Gradients) -> None:
        self.completed(unit)
        self.held = grads if self.holds else []


def weights_of(layout: Layout, device: torch.device) -> dict[str, dict[str, torch.Tensor]]:
    """Whole weights of every unit in the compute dtype, by name in the unit. Made where fake tensors are."""
    made: dict[str, dict[str, torch.Tensor]] = {}
    for unit in layout.units:
        leaves: dict[str, torch.Tensor] = {}
        for b in unit.buckets:
            for leaf in b.gathered.leaves:
                whole = torch.empty(leaf.shape, dtype=b.gathered.compute, device=device)
                leaves[leaf.path] = whole if leaf.form is None else PackedWeight(whole, leaf.form)
        made[unit.name] = {key: leaves[path] for key, path in zip(unit.keys, unit.paths, strict=True)}
    return made
