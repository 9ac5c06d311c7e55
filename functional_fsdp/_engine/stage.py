"""Stages: the staging of each reduction, with the places of its buckets and the ways that these go from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .._common.torch_names import foreach_copy_, foreach_zero_, unflatten_dense_tensors
from .._distributed.lanes import Mark, Steps
from .._plan.layout import Bucket
from .._plan.route import Route
from .._runtime.runtime import Runtime
from .._storage.flat import templates
from .._storage.gradients import refuse_meta

__all__ = ["LARGE", "Slot", "StagingPlace", "Values", "apart", "differ", "leaves_and_gaps"]

LARGE = 1 << 23  # bytes of a gradient that a kernel of its own copies faster than one for all of a unit

Tensors = list[torch.Tensor]
Values = Sequence[torch.Tensor | None]  # a unit's gradients, in the order of `Unit.paths`; None means zeros


class Slot(NamedTuple):
    """A bucket's staging in one reduction: the whole, in the wire's dtype, its leaves, which of a unit's gradients they
    are, and the gaps.

    ways: how it gets to the main gradients; True: to their final place, False: as far as it needs be now. parts:
    whether these differ in what they send.
    """

    bucket: Bucket
    whole: torch.Tensor
    spare: torch.Tensor  # bytes that an exact sum needs beside it
    leaves: list[torch.Tensor]
    which: tuple[int, ...]
    gaps: list[torch.Tensor]
    ways: dict[bool, Route]
    parts: bool
    large: bool  # whether there are large leaves, and they are copied beside compute

    def on(self, whole: torch.Tensor) -> Slot:
        """The same with other bytes of as many elements."""
        leaves, gaps = leaves_and_gaps(self.bucket, whole)
        return self._replace(whole=whole, leaves=leaves, gaps=gaps)

    def write(self, values: Values) -> None:
        """Copy and cast a unit's gradients; no values means zeros."""
        leaves, tensors = self.leaves, [value for i in self.which if (value := values[i]) is not None] if values else []
        if len(tensors) < len(leaves):
            leaves = [leaf for leaf, i in zip(leaves, self.which, strict=True) if values and values[i] is not None]
            self.whole.zero_()
        elif self.gaps:
            foreach_zero_(self.gaps)
        if self.large:
            leaves, tensors = apart(leaves, tensors)
        if leaves:
            try:
                foreach_copy_(leaves, tensors)
            except NotImplementedError:  # looking at each before would take time
                filled = (leaf.path for leaf in self.bucket.leaves if leaf.numel)
                refuse_meta(zip(filled, [values[i] for i in self.which], strict=True))
                raise


class StagingPlace:
    """The staging of one reduction: its bytes, the slots in them, and marks.

    Args:
        own: what comes and goes with each reduction: its bytes, if they are not `span`, and those beside it.
        span: the bytes of a peer memory or window, which stay.
    """

    def __init__(self, own: Sequence[torch.Tensor], slots: list[Slot], span: range | None = None) -> None:
        self.own = [(memory.untyped_storage(), memory.numel()) for memory in own]
        self.slots = slots
        self.single = len(slots) == 1
        self.span = span
        self.values: Values | None = None  # what is being copied here
        self.age = 0  # how many units were asked for since
        self.ready: Mark = None  # they are there
        self.staged: Mark = None  # they were copied
        self.done: Mark = None

    @property
    def short(self) -> bool:
        """Whether each of its reductions is one collective at most, so that none goes on beside the next one."""
        return all(len(way.collectives) <= 1 for slot in self.slots for way in slot.ways.values())

    def copied(self, run: Runtime, slots: Sequence[Slot], values: Values) -> Steps:
        """Copy and cast the values, on the lane that goes on with the reduction."""
        for slot in slots:
            slot.write(values)
        self.staged = run.lanes.mark(self.staged)
        yield from ()

    def allocate(self) -> None:
        """Have the bytes. Views made on them come back to life."""
        for storage, nbytes in self.own:
            if not storage.nbytes():
                storage.resize_(nbytes)

    def free(self) -> None:
        """Give the bytes back: compute has waited for `done`."""
        self.values = None
        for storage, _ in self.own:
            storage.resize_(0)

    def overlaps(self, other: StagingPlace) -> bool:
        """Whether both lie in a peer memory or window, on the same bytes."""
        a, b = self.span, other.span
        return a is not None and b is not None and a.start < b.stop and b.start < a.stop


def differ(ways: dict[bool, Route]) -> bool:
    """Whether it matters for peers how far a bucket's gradients go."""
    return ways[True].collectives != ways[False].collectives


def leaves_and_gaps(bucket: Bucket, whole: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Views of a whole bucket [numel]: its leaves that have elements, and what lies between leaves."""
    pieces, held = unflatten_dense_tensors(whole, templates(bucket)), set(bucket.leaf_pieces)
    leaves = [pieces[i] for i, leaf in zip(bucket.leaf_pieces, bucket.leaves, strict=True) if leaf.numel]
    return leaves, [piece for i, piece in enumerate(pieces) if i not in held]


def apart(leaves: Tensors, values: Tensors) -> tuple[Tensors, Tensors]:
    """Copy large gradients, each by a kernel of its own, and return what is left: beside matrix products that
    takes three quarters of the time of one kernel for all. (`copy_` would ask the copy engines, which may have gathers
    to do.)"""
    rest = []
    for leaf, value in zip(leaves, values, strict=True):
        if leaf.nbytes < LARGE or value.dtype is not leaf.dtype or value.device != leaf.device:
            rest.append((leaf, value))
        else:
            torch.mul(value, 1, out=leaf)
    return [leaf for leaf, _ in rest], [value for _, value in rest]
