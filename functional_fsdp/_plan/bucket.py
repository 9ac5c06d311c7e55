"""Bucket: the flat buffer of a unit's leaves of one kind, as a plan: which leaves, where, and how it is cut. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from .._common.calls import provided
from .._spec.codec import Codec, Form
from .._spec.placement import Placement

ALIGN = 128  # elements
STAGED = 512  # bytes: where what is staged begins


def aligned(n: int, to: int) -> int:
    """`n` rounded up to a multiple of `to`."""
    return -(-n // to) * to


rows_of, _whole_shape = provided("codecs.Rows"), provided("axes.whole_shape")


@dataclass(frozen=True)
class Leaf:
    """A leaf's place: `bucket[offset : offset + numel]` (elements) viewed as `shape`.

    Attributes:
        path: in the tree of parameters, as "blocks.0.up.weight".
        key: its name among its unit's weights, as "up.weight".
        shape: the global shape; of a packed leaf (bytes,); of a leaf that is cut along axes of the model's own, that of
            this rank's part.
        offset: elements from the bucket's beginning.
        label: what the spec calls it for optimizers; "default" where it says nothing.
        cuts: along which axes of the model's own it is cut, and how.
        form: of a packed leaf what its bytes are; else None.
    """

    path: str
    key: str
    shape: tuple[int, ...]
    offset: int
    label: str
    cuts: tuple[Any, ...] = field(default=(), repr=False)
    form: Form | None = field(default=None, repr=False)

    @property
    def seen_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part, of a packed leaf, too: as compute sees it."""
        return self.form.shape if self.form is not None else self.shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Which elements [a, b) of the bucket, of those in [start, stop), are its own; none where a >= b."""
        return max(self.offset, start), min(self.offset + self.numel, stop)

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of all ranks' parts together."""
        whole: tuple[int, ...] = _whole_shape(self.seen_shape, self.cuts) if self.cuts else self.seen_shape
        return whole


@dataclass(frozen=True)
class Bucket:
    """One flat buffer of a unit: leaves of one precision, trainability and placement.

    Attributes:
        name: the unit's, or "unit:0", "unit:1", ... where the unit has several.
        unit: the unit's name.
        leaves: in order of their offsets.
        numel: elements, padding included; it divides by ranks × 128.
        placement: which axes shard its weights, gradients and main weights.
        sizes: (axis, ranks) of the data axes, outermost first.
        main, compute, grads, wire, gather: dtypes, as of `Precision`.
        exact: whether gradients are summed in float32, in the order of the ranks.
        share: of a mean over all data ranks: how many ranks there are for each one that this bucket's axes have.
        trainable: whether its leaves train.
        copy: whether shards are kept in the dtype `gather`, beside main weights, wherever these are sharded.
        by_leaf: whether it has one number for each leaf, and not the leaf's elements.
        among: whether leaves that are not in `leaves` lie between these.
        codec: in which gradients travel, which are staged in `wire`. feedback: whether what it loses is kept.
        gather_codec: in which weights are gathered, see `gathered`.
        every: for how many elements of a leaf in a row it has one number, see `blocks`.
        codec_axis: along which axis gradients travel in `codec`; "": along the first, from what is staged.
        cut: axes of the model's own along which its leaves are cut: each rank has other elements.
        equal: axes of the model's own along which ranks have the same, and come to the same gradients.
        summed: those of the data axes over which gradients are added up, whatever the others do: axes of the model's
            own along which ranks have the same, and each a summand of the gradient.
    """

    name: str
    unit: str
    leaves: tuple[Leaf, ...]
    numel: int
    placement: Placement
    sizes: tuple[tuple[str, int], ...]
    main: torch.dtype
    compute: torch.dtype
    grads: torch.dtype
    wire: torch.dtype
    exact: bool
    share: int
    trainable: bool
    gather: torch.dtype
    copy: bool = False
    by_leaf: bool = False
    among: bool = False
    cut: tuple[str, ...] = field(default=(), repr=False)
    equal: tuple[str, ...] = field(default=(), repr=False)
    summed: tuple[str, ...] = field(default=(), repr=False)
    codec: Codec | None = field(default=None, repr=False)
    feedback: bool = field(default=False, repr=False)
    gather_codec: Codec | None = field(default=None, repr=False)
    codec_axis: str = field(default="", repr=False)
    every: int = field(default=1, repr=False)

    def apart(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """The axes of a mesh along which ranks have leaves, or parts of them, of their own."""
        return tuple(axis for axis in self.placement.apart(sizes) if axis not in self.equal)

    def unlike(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Those of them along which these are other leaves, not parts of the same: experts that are given apart,
        replicas that train apart."""
        return tuple(axis for axis in self.apart(sizes) if axis not in self.cut)

    def __hash__(self) -> int:  # buckets are keys of caches in every verb: leave the leaves out
        return hash((self.name, self.numel, self.placement, self.compute))

    @cached_property
    def ranks(self) -> dict[str, int]:
        return dict(self.sizes)

    def slices(self, kind: str) -> int:
        """Into how many slices this kind ("weights", "grads" or "main") of the bucket is cut."""
        return prod(self.ranks[axis] for axis in getattr(self.placement, kind))

    def nbytes(self, kind: str) -> int:
        """Bytes a rank of the bucket's shard of this kind."""
        if kind == "weights":
            return self.gathered.numel // self.slices(kind) * self.gather.itemsize
        return self.numel // self.slices(kind) * int(getattr(self, kind).itemsize)

    @cached_property
    def gathered(self) -> Bucket:
        """The bucket as its weights are gathered: itself; with a codec for that, one of bytes that is cut alike."""
        if self.gather_codec is None:
            return self
        rows = rows_of(self.gather_codec)
        leaves = []
        for leaf in self.leaves:
            form = Form(rows, leaf.shape, self.compute)
            leaves.append(replace(leaf, shape=(form.nbytes,), offset=rows.bytes_of(leaf.offset), form=form))
        bits = self.gather
        return replace(
            self, leaves=tuple(leaves), numel=rows.bytes_of(self.numel), main=bits, compute=bits, grads=bits,
            wire=bits, exact=False, codec=None, feedback=False, gather_codec=None,
        )  # fmt: skip

    @cached_property
    def in_float8(self) -> bool:
        """Whether what is gathered are bytes and a scale for each leaf, beside the dtype that compute sees."""
        return self.gather is not self.compute and self.gather_codec is None

    def seen_dtype(self, leaf: Leaf) -> torch.dtype:
        """The dtype that compute sees of one of its leaves."""
        return self.compute if leaf.form is None else leaf.form.dtype

    @cached_property
    def packed(self) -> bool:
        """Whether leaves of it are packed."""
        return any(leaf.form is not None for leaf in self.leaves)

    @cached_property
    def on_host(self) -> bool:
        """Whether main weights, and what an optimizer keeps for them, lie in the host's memory."""
        return "main" in self.placement.on_host

    @cached_property
    def copy_on_host(self) -> bool:
        """Whether the compute copy does, which gathers read."""
        return self.placement.copy_on_host

    @cached_property
    def grads_on_host(self) -> bool:
        """Whether main gradients do."""
        return "grads" in self.placement.on_host

    @cached_property
    def lent_as_stored(self) -> bool:
        """Whether weights are sharded along axes of one rank only, in the dtype that compute wants: a gather would be a
        copy of main weights."""
        alone = bool(self.placement.weights) and self.slices("main") == 1
        return alone and self.gather is self.main and not self.on_host

    def gathers(self, debug: bool) -> bool:
        """Whether weights are gathered, or copied, for a use; else the state's own are lent. In debug mode what is
        released is poisoned, so what would be lent as it is stored is copied."""
        return bool(self.placement.weights) and (debug or not self.lent_as_stored)

    @property
    def nbytes_gathered(self) -> int:
        """Bytes of the whole bucket in the dtype in which it is gathered."""
        return self.gathered.numel * self.gather.itemsize

    @property
    def staged(self) -> int:
        """Bytes of staging: what is sent."""
        return aligned(self.numel * self.wire.itemsize, STAGED)

    @property
    def received(self) -> int:
        """Bytes that sums take beside the staging: those of `summed_bytes`, and after them those of a packed sum."""
        return self.summed_bytes + self.packed_bytes

    @property
    def summed_bytes(self) -> int:
        """Bytes that an exact sum of what is staged takes: what comes in, and the sum if it stays whole."""
        if not self.exact or prod(self.ranks.values()) == 1 or (self.codec is not None and not self.codec_axis):
            return 0
        return self.staged + (0 if self.slices("main") > 1 else aligned(self.numel * 4, STAGED))

    @property
    def packed_bytes(self) -> int:
        """Bytes that a packed sum takes: what is sent, what comes, and the sum if it stays whole."""
        ranks = self.ranks[self.codec_axis] if self.codec_axis else prod(self.ranks.values())
        if self.codec is None or ranks == 1:
            return 0
        stays = self.codec_axis not in self.placement.main if self.codec_axis else self.slices("main") == 1
        whole = aligned(self.owed * 4, STAGED) if stays else 0
        return 2 * aligned(self.wire_bytes(self.owed), STAGED) + whole

    @cached_property
    def before_packing(self) -> tuple[str, ...]:
        """The axes along which gradients have been reduced when they are packed."""
        hops = self.placement.hops
        return hops[: hops.index(self.codec_axis)] if self.codec_axis else ()

    @property
    def owed(self) -> int:
        """Elements that a rank packs, and of which it keeps what packing loses."""
        return self.numel // prod(self.ranks[axis] for axis in self.before_packing if axis in self.placement.main)

    def wire_bytes(self, numel: int) -> int:
        """Bytes in which so many elements of gradients travel, whole blocks of its codec."""
        if self.codec is None:
            return numel * self.wire.itemsize
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.codec.planes((numel,)).values())

    def span(self, axes: Sequence[str], coordinate: dict[str, int]) -> tuple[int, int]:
        """The elements [start, stop) that a rank at `coordinate` holds if sharded over `axes` (a prefix of `order`)."""
        index, parts = 0, 1
        for axis in self.placement.order:
            if axis in axes:
                index, parts = index * self.ranks[axis] + coordinate[axis], parts * self.ranks[axis]
        size = self.numel // parts
        return index * size, (index + 1) * size

    @cached_property
    def labels(self) -> tuple[tuple[str, int, int], ...]:
        """(label, start, stop) in elements: runs of leaves of one label, padding included, that cover the bucket; among
        others, those leaves only."""
        runs = self.runs([True] * len(self.leaves))
        if runs and not self.among:  # what lies before the first leaf is of its run, too
            runs[0] = (runs[0][0], 0, runs[0][2])
        return tuple(runs)

    def runs(self, given: Sequence[bool]) -> list[tuple[str, int, int]]:
        """(label, start, stop) in elements: runs of leaves of one label that are `given`, padding after them
        included."""
        stops = [leaf.offset for leaf in self.leaves[1:]] + [self.numel]
        if self.among:
            step = 1 if self.by_leaf else ALIGN // self.every
            stops = [leaf.offset + aligned(leaf.numel, step) for leaf in self.leaves]
        runs: list[tuple[str, int, int]] = []
        for leaf, stop, on in zip(self.leaves, stops, given, strict=True):
            if on and runs and runs[-1][0] == leaf.label and runs[-1][2] == leaf.offset:
                runs[-1] = (leaf.label, runs[-1][1], stop)
            elif on:
                runs.append((leaf.label, leaf.offset, stop))
        return runs

    @cached_property
    def pieces(self) -> tuple[tuple[int, ...], ...]:
        """Shapes that tile the bucket in order: leaves and the gaps after them (a gap is one-dimensional)."""
        shapes: list[tuple[int, ...]] = []
        at = 0
        for leaf in (*self.leaves, None):
            start = leaf.offset if leaf else self.numel
            if start > at:
                shapes.append((start - at,))
            if leaf:
                shapes.append(leaf.shape)
                at = start + leaf.numel
        return tuple(shapes)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Where leaves begin, in rows of 128 elements. A row is of one leaf, and lies in one slice."""
        return tuple(leaf.offset // ALIGN for leaf in self.leaves)

    @cached_property
    def empty(self) -> tuple[Leaf, ...]:
        """Leaves without elements."""
        return tuple(leaf for leaf in self.leaves if not leaf.numel)

    @cached_property
    def leaf_pieces(self) -> tuple[int, ...]:
        """Which of `pieces` are leaves, in leaf order."""
        which, at, i = [], 0, 0
        for leaf in self.leaves:
            if leaf.offset > at:
                i += 1
            which.append(i)
            i, at = i + 1, leaf.offset + leaf.numel
        return tuple(which)

    @cached_property
    def counts(self) -> Bucket:
        """A bucket with one integer for each leaf of this one, the same on every rank that shares the leaves."""
        leaves = tuple(Leaf(leaf.path, leaf.key, (), i, leaf.label) for i, leaf in enumerate(self.leaves))
        whole, number = Placement(data=self.placement.data), torch.int64
        return Bucket(
            self.name, self.unit, leaves, len(leaves), whole, self.sizes, number, number, number, number, False,
            self.share, False, number, by_leaf=True, cut=self.cut, equal=self.equal,
        )  # fmt: skip

    def blocks(self, every: int) -> Bucket:
        """A bucket with one number for so many elements of a leaf, which divide 128; cut as this one."""
        if every == self.every:
            return self
        if every not in self._blocks:
            leaves = [replace(o, shape=(-(-o.numel // every),), offset=o.offset // every) for o in self.leaves]
            self._blocks[every] = one = replace(self, leaves=tuple(leaves), numel=self.numel // every, every=every)
            _ = one.labels, one.ranks, one.counts  # cached: Dynamo does not trace the first time
        return self._blocks[every]

    @cached_property
    def _blocks(self) -> dict[int, Bucket]:
        return {}

    def only(self, labels: Container[str]) -> Bucket | None:
        """The bucket with the leaves of these labels alone, each where it is; itself if it has no others, None if it
        has none of them."""
        own = tuple([label for label in self._labels if label in labels])
        if not own or len(own) == len(self._labels):
            return self if own else None
        if own not in self._only:
            leaves = tuple([leaf for leaf in self.leaves if leaf.label in own])
            self._only[own] = one = replace(self, leaves=leaves, among=True)
            _ = one.labels, one.ranks, one.counts  # cached: Dynamo does not trace the first time
        return self._only[own]

    @cached_property
    def _labels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([leaf.label for leaf in self.leaves]))

    @cached_property
    def _only(self) -> dict[tuple[str, ...], Bucket]:
        return {}
