"""Layout: leaves -> buckets -> offsets. Pure: shapes, a spec and axis sizes go in, offsets come out; no tensor, no
ranks.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm, prod
from typing import Any, NamedTuple

import torch

from .._common.calls import provided
from .._common.errors import SpecError
from .._common.tree import PathIndex, Paths
from .._spec.codec import Codec, Form
from .._spec.placement import Placement
from .._spec.precision import LeafPrecision, Precision
from .._spec.spec import Spec
from .._spec.units import find_units, in_order_of_use, relative_keys
from .bucket import ALIGN, STAGED, Bucket, Leaf, aligned, rows_of

__all__ = ["ALIGN", "STAGED", "Bucket", "Layout", "Leaf", "LeafInfo", "Unit", "aligned", "plan_layout"]

_lie, _layout_table = provided("axes.lie"), provided("look.layout_table")
_refuse_gather, _refuse_wire = provided("codecs.refuse_gather"), provided("codecs.refuse_wire")


@dataclass(frozen=True)
class LeafInfo:
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
