"""Where leaves lie: `plan_layout` makes a `Layout` of leaves, by units, and of each unit's leaves its `Bucket`s.

Pure: shapes, a spec and axis sizes go in, offsets come out; no tensor, no ranks.

A bucket is the flat buffer of a unit's leaves of one precision, trainability and placement. Leaves lie end to end, each
aligned to 128 elements, so that every dtype's copy of the bucket shares offsets; the whole is padded to ranks × 128
elements and cut into equal contiguous slices, whatever the leaf boundaries. Leaves of one label lie together, so that
an update is a few fused calls. Two leaves, [3, 100] and [250], on 4 ranks:

    element  0        128       256  300 384       512     634  640       1024
             |         |         |   |   |         |        |   |          |
    leaves   [ weight [3, 100]       |...| bias [250]       |......pad.....|
    slices   [      rank 0     |     rank 1        |      rank 2       |  rank 3  ]

A unit's one bucket has its name; several are called `unit:0`, `unit:1`, ..., or `unit::0`, ... where something else has
such a name: names of units and buckets are keys everywhere, and no two of a layout are alike.

A slice of 256 elements is a view of one rank's shard; gathering the four slices in rank order lands every leaf ready to
use, without a copy-out. On two axes, `order[0]` cuts first and `order[1]` cuts its slices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm, prod
from typing import Any, NamedTuple

import torch

from .._common.calls import provided
from .._common.errors import SpecError
from .._common.tree import PathIndex, Paths, refuse_surrogates
from .._spec.placement import Placement
from .._spec.precision import Codec, Form, LeafPrecision, Precision
from .._spec.spec import Spec
from .._spec.units import find_units, in_order_of_use, relative_keys

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
        return _whole_shape(self.seen_shape, self.cuts) if self.cuts else self.seen_shape


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


_lie, _layout_table = provided("axes.lie"), provided("look.layout_table")
_refuse_gather, _refuse_wire = provided("codecs.refuse_gather"), provided("codecs.refuse_wire")


class LeafInfo(NamedTuple):
    """What the layout needs to know of a leaf: path, global shape, dtype, and whether it trains if nobody says."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool = True
    aliases: Paths = ()  # further paths of the same tensor (tied)
    form: Form | None = None  # of a leaf that is packed already

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Unit:
    """An ordered group of leaves that are gathered, released and reduced together.

    Attributes:
        name: as `state.units` has it.
        keys: names of its weights, in the tree's order: their paths from the unit on.
        paths: the whole paths, in the same order.
        buckets: one for each dtype, trainability and placement among the leaves.
    """

    name: str
    keys: Paths
    paths: Paths
    buckets: tuple[Bucket, ...]

    @cached_property
    def trains(self) -> tuple[tuple[int, ...] | None, ...]:
        """The shape of each leaf that trains, as `paths`; None for frozen ones."""
        shapes = {leaf.path: leaf.shape for bucket in self.buckets if bucket.trainable for leaf in bucket.leaves}
        return tuple(shapes.get(path) for path in self.paths)

    @property
    def trained(self) -> bool:
        """Whether a leaf of it trains."""
        return any(shape is not None for shape in self.trains)

    @cached_property
    def gradients(self) -> list[Any]:
        """What each gradient is, nearly always, as `paths`: shape, dtype and layout; None for frozen leaves."""
        dtypes = {leaf.path: b.seen_dtype(leaf) for b in self.buckets for leaf in b.leaves}
        kinds = zip(self.paths, self.trains, strict=True)
        # torch.Size, which tensors have, is compared with its like in half the time
        return [None if shape is None else (torch.Size(shape), dtypes[path], torch.strided) for path, shape in kinds]


@dataclass(frozen=True, repr=False)
class Layout:
    """Where every leaf of a tree lives. Frozen, equal by value; printing it gives a table.

    Attributes:
        units: in order of use in a forward.
        paths: of the tree's leaves, in its own order.
        source: for each of these the path that holds it; tied leaves share one.

    Example: `fsdp.make_layout(params, fsdp.Spec({"data": 1024})).nbytes("main")`, bytes a rank.
    """

    units: tuple[Unit, ...]
    paths: Paths
    source: Paths

    def __post_init__(self) -> None:
        leaves = [leaf.path for unit in self.units for bucket in unit.buckets for leaf in bucket.leaves]
        buckets = [bucket.name for unit in self.units for bucket in unit.buckets]
        for names in (leaves, buckets, [unit.name for unit in self.units], self.paths):
            assert len(set(names)) == len(names), f"names of a layout must differ: {names}"
        assert set(leaves) == set(self.source), "every leaf lies in one bucket"

    @cached_property
    def buckets(self) -> dict[str, Bucket]:
        return {bucket.name: bucket for unit in self.units for bucket in unit.buckets}

    @cached_property
    def by_name(self) -> dict[str, Unit]:
        return {unit.name: unit for unit in self.units}

    @cached_property
    def trainable(self) -> dict[str, Bucket]:
        return {name: bucket for name, bucket in self.buckets.items() if bucket.trainable}

    @cached_property
    def leaves(self) -> dict[str, Leaf]:
        """By path."""
        return {leaf.path: leaf for bucket in self.buckets.values() for leaf in bucket.leaves}

    @cached_property
    def unit_of(self) -> dict[str, str]:
        """The unit of each of `leaves`."""
        return {path: unit.name for unit in self.units for path in unit.paths}

    @cached_property
    def hash(self) -> str:
        """A fingerprint (16 hex digits) of everything that decides which bytes lie where."""
        said: tuple[Any, ...] = (self.paths, self.source, self.units)
        forms = [(leaf.path, leaf.form) for leaf in self.leaves.values() if leaf.form is not None]
        wires = [_wire(name, b) for name, b in self.buckets.items() if b.codec is not None]
        said += (forms, wires) if forms or wires else ()
        gathers = [(name, b.gather_codec) for name, b in self.buckets.items() if b.gather_codec is not None]
        said += (gathers,) if gathers else ()
        cuts = [(leaf.path, leaf.cuts) for leaf in self.leaves.values() if leaf.cuts]
        own = [(name, b.cut, b.equal, b.summed) for name, b in self.buckets.items() if b.cut or b.equal or b.summed]
        said += (cuts, own) if cuts or own else ()
        return hashlib.sha256(repr(said).encode()).hexdigest()[:16]

    def nbytes(self, kind: str) -> int:
        """Bytes a rank of all shards of this kind ("weights", "grads" or "main"). Frozen buckets have no gradients."""
        chosen = self.trainable if kind == "grads" else self.buckets
        return sum(bucket.nbytes(kind) for bucket in chosen.values())

    def host_nbytes(self, kind: str) -> int:
        """Of `nbytes`, what lies in the host's memory (`Placement.memory_kind`). "weights" are compute copies."""
        chosen = self.trainable if kind == "grads" else self.buckets
        there = {"main": "on_host", "grads": "grads_on_host", "weights": "copy_on_host"}[kind]
        return sum(bucket.nbytes(kind) for bucket in chosen.values() if getattr(bucket, there))

    def padding(self) -> float:
        """The share of elements that are padding: 0.001 is 0.1 %."""
        total = sum(b.numel for b in self.buckets.values())
        return 1 - sum(leaf.numel for leaf in self.leaves.values()) / max(total, 1)

    def __repr__(self) -> str:
        return _layout_table(self)


def plan_layout(leaves: Sequence[LeafInfo], spec: Spec, order: Sequence[str] | None = None) -> Layout:
    """Group leaves into units and buckets and give each an offset.

    Args:
        leaves: in the tree's order, tied ones once, with their further paths as `aliases`.
        spec: only its axis sizes are used of the mesh, so `Spec({"data": 16384})` will do.
        order: every path in the tree's order, where that is not each leaf followed by its aliases.

    Raises:
        SpecError: a pattern that matches nothing, a leaf in two units or without a placement, a leaf that cannot train.
        TreeError: a name that is no Unicode text.

    >>> leaves = [LeafInfo("w", (300,), torch.float32), LeafInfo("b", (250,), torch.float32)]
    >>> layout = plan_layout(leaves, Spec({"data": 4}))
    >>> [(b.name, b.numel) for b in layout.buckets.values()]
    [('w', 512), ('b', 512)]
    """
    paths = [leaf.path for leaf in leaves]
    every_path = [*paths, *(alias for leaf in leaves for alias in leaf.aliases)]
    index = PathIndex(every_path)
    for what, rules in (
        ("labels", spec.labels),
        ("trainable", spec.trainable),
        ("placement", spec.placements),
        ("precision", spec.precisions),
        ("own", spec.own),
    ):
        for pattern, _ in rules:
            if every_path and pattern != "*" and not index.any(pattern):
                raise SpecError(
                    f"Spec({what}): the pattern {pattern!r} matches nothing. Paths look like "
                    f"{', '.join(every_path[:4])}, ..."
                )
    tied = [leaf.path for leaf in leaves if leaf.aliases]
    nbytes = [leaf.numel * leaf.dtype.itemsize for leaf in leaves]
    dims = [len(leaf.shape) for leaf in leaves]
    groups = find_units(paths, nbytes, tied, spec.units, dims, index=index)
    refuse_surrogates("a leaf", every_path)
    refuse_surrogates("a unit", (group.name for group in groups))
    kinds_of = _kinds(leaves, spec, index)

    order = tuple(order or (path for leaf in leaves for path in (leaf.path, *leaf.aliases)))
    used = {order[i]: at for at, i in enumerate(in_order_of_use(order))}
    groups.sort(key=lambda group: min(used[paths[i]] for i in group.members))
    axes, data, own_axes = spec.axes, spec.data, spec.own_axes
    units = []
    taken = {group.name for group in groups}
    for name, inside, members in groups:
        keys = relative_keys(inside, [paths[i] for i in members])
        kinds: dict[tuple[Any, ...], list[Leaf]] = {}
        for i, key in zip(members, keys, strict=True):
            placement, dtypes, trainable, label, some = kinds_of[i]
            if dtypes.gather is not dtypes.compute:
                _refuse_gather(leaves[i], placement, dtypes)
            if dtypes.codec is not None and not trainable:
                dtypes = dtypes._replace(codec=None, feedback=False, codec_axis="")
            if dtypes.codec is not None:
                _refuse_wire(leaves[i], placement, dtypes, spec)
            form = None
            if dtypes.packed is not None:  # bytes of all codecs may lie together
                form = Form(dtypes.packed, leaves[i].shape, dtypes.seen or leaves[i].dtype)
                dtypes = dtypes._replace(packed=None, seen=None)
            lies, cuts, shape = NOWHERE, (), leaves[i].shape
            if own_axes:
                packing = form.codec if form is not None else dtypes.codec or dtypes.gather_codec
                placement, lies, cuts, shape = _lie(leaves[i], placement, some, packing, spec)
            leaf = Leaf(leaves[i].path, key, shape if form is None else (form.nbytes,), 0, label, cuts, form)
            kinds.setdefault((placement, dtypes, trainable, lies), []).append(leaf)
        names = _bucket_names(name, len(kinds), taken)
        taken |= set(names)
        buckets = []
        for bucket_name, ((placement, dtypes, trainable, lies), chosen) in zip(names, kinds.items(), strict=True):
            buckets.append(_bucket(bucket_name, name, chosen, placement, dtypes, trainable, lies, axes, data))
        units.append(Unit(name, tuple(keys), tuple(paths[i] for i in members), tuple(buckets)))
    source = {path: leaf.path for leaf in leaves for path in (leaf.path, *leaf.aliases)}
    return Layout(tuple(units), order, tuple(source[path] for path in order))


Kind = tuple[Placement, LeafPrecision, bool, str, tuple[Any, ...]]


def _kinds(leaves: Sequence[LeafInfo], spec: Spec, index: PathIndex) -> list[Kind]:
    """Placement, dtypes, whether it trains, label, and how it lies along the model's own axes, of each leaf, by the
    rules of the spec.

    Args:
        index: of the leaves' paths, and of their aliases after them.
    """
    rules = (spec.placements, spec.precisions, spec.trainable, spec.labels, spec.own)
    first = [index.first_rules(some) for some in rules]
    dtypes: dict[Any, LeafPrecision] = {}
    found = []
    alias = len(leaves)
    for i, leaf in enumerate(leaves):
        mine = (i, *range(alias, alias + len(leaf.aliases)))
        alias += len(leaf.aliases)
        numbers = [min([n for k in mine if (n := some[k]) is not None], default=None) for some in first]
        placement, precision, trainable, label, own = (
            None if n is None else some[n][1] for some, n in zip(rules, numbers, strict=True)
        )
        kind = (numbers[1], leaf.dtype, leaf.form and leaf.form.codec)
        if kind not in dtypes:
            dtypes[kind] = _resolved(leaf, precision or Precision(), spec.transport.exact)
        trains = _trains(leaf, trainable, dtypes[kind].packed)
        placement = placement or spec.placement_of(leaf.path, *leaf.aliases)  # which says what there is
        found.append((placement, dtypes[kind], trains, str(label or "default"), own or ()))
    return found


def _wire(name: str, bucket: Bucket) -> tuple[Any, ...]:
    """How gradients of a bucket travel packed, for the layout's hash."""
    along = (bucket.codec_axis,) if bucket.codec_axis else ()
    return name, bucket.codec, bucket.feedback, *along


def _resolved(leaf: LeafInfo, precision: Precision, exact: bool) -> LeafPrecision:
    """The dtypes of a leaf. One that is packed stays so where nothing else is said of its main weights."""
    if leaf.form is None or isinstance(precision.main, torch.dtype):
        return precision.resolve(leaf.dtype, exact)
    if precision.main is not None and precision.main != leaf.form.codec:
        raise SpecError(
            f"Precision(main={precision.main}): the leaf {leaf.path!r} is packed already, by {leaf.form.codec}. Leave "
            f"main out, and it stays so; or unpack it first, by a spec with Precision(main={leaf.dtype})."
        )
    return precision.stored(leaf.form.codec, leaf.dtype)


class Lies(NamedTuple):
    """How leaves of a bucket lie along axes of the model's own: see `Bucket`."""

    cut: tuple[str, ...] = ()
    equal: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()


NOWHERE = Lies()  # where a model has no axes of its own


def _bucket_names(unit: str, count: int, taken: set[str]) -> list[str]:
    """Names for a unit's buckets that nothing has yet, but the unit itself its own one's."""
    if count == 1 and unit:
        return [unit]
    colons = ":"
    while any(f"{unit}{colons}{k}" in taken for k in range(count)):
        colons += ":"
    return [f"{unit}{colons}{k}" for k in range(count)]


def _trains(leaf: LeafInfo, said: bool | None, packed: Codec | None) -> bool:
    if packed is not None:
        if said:
            raise SpecError(
                f"Spec(trainable): the leaf {leaf.path!r} is marked trainable, and it is packed by {packed}, of which "
                f"nothing can be trained. Put {{{leaf.path!r}: False}} before that rule; or unpack the leaf, by a spec "
                f"with {{{leaf.path!r}: Precision(main={leaf.dtype})}}."
            )
        return False
    if said and not leaf.dtype.is_floating_point:
        raise SpecError(
            f"Spec(trainable): the leaf {leaf.path!r} is marked trainable, but its dtype is {leaf.dtype} and only "
            f"floating dtypes have gradients. Put {{{leaf.path!r}: False}} before that rule."
        )
    return (leaf.trainable and leaf.dtype.is_floating_point) if said is None else said


def _bucket(
    name: str,
    unit: str,
    chosen: list[Leaf],
    placement: Placement,
    dtypes: LeafPrecision,
    trainable: bool,
    lies: Lies,
    axes: Mapping[str, int],
    data: Sequence[str],
) -> Bucket:
    """
    Args:
        axes: of the mesh, and their sizes; `data`: those over which any leaf's gradients are averaged.
    """
    sizes = tuple((axis, size) for axis, size in axes.items() if axis in placement.data)
    first: dict[str, int] = {}
    for leaf in chosen:
        first.setdefault(leaf.label, len(first))
    cut = ALIGN if dtypes.codec is None else lcm(ALIGN, dtypes.codec.block)  # no block is of two leaves, or two slices
    cut = cut if dtypes.gather_codec is None else lcm(cut, rows_of(dtypes.gather_codec).width)  # and no row
    placed, at = [], 0
    for leaf in sorted(chosen, key=lambda leaf: first[leaf.label]):
        placed.append(replace(leaf, offset=at))
        at += aligned(leaf.numel, cut)
    numel = aligned(at, prod(size for _, size in sizes) * cut)
    share = prod(axes[axis] for axis in data if axis not in placement.data)
    return Bucket(
        name, unit, tuple(placed), numel, placement, sizes,
        dtypes.main, dtypes.compute, dtypes.grads, dtypes.wire, dtypes.sum == "fp32", share, trainable,
        dtypes.gather, dtypes.copy, False, False, *lies, codec=dtypes.codec, feedback=dtypes.feedback,
        gather_codec=dtypes.gather_codec, codec_axis=dtypes.codec_axis,
    )  # fmt: skip
