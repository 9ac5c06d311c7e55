"""What a rank keeps of a bucket: flat buffers, the weights seen in them, and where gathered units lie.

    PackedWeight         a weight in few bytes
    FlatBuffer           a rank's part of a bucket, and its leaves
    of_unit, of_tree     gradients that users give, checked and put in order
    Stored, Loan         what gathers read; weights that are lent until their release
    Gathered             whole buckets, of units that are gathered beside the plan
    Place                where a planned unit lies in the arena
    refresh              compute copies after an update

`PackedWeight`: a weight that is a few bytes, and a tensor of the compute dtype to all who ask.

    bits [n] uint8, lent ── PackedWeight [n, m] bfloat16 ── an operation reads what the bytes stand for

What autograd keeps of such a weight are its bytes: a backward unpacks them again. `Float8Weight` is one whose bytes
linears of torchao take as they are.

`FlatBuffer`: one rank's part of a bucket, and the one operation on it, `redistribute`.

    FlatBuffer(local [n / ranks], bucket, (("data", Sharded),), mesh)
        .redistribute({"data": Replicated})         all-gather: local [n]

What a transition issues is a `Route` (see `route`), found once and kept; this file only follows it, on the side lane.
Gathers and reductions that a plan names are jobs on lanes of their own: see `_engine.gathers` and `_engine.reductions`.

Gradients: what users give to `reduce` is checked before anything is sent (`of_unit`, `of_tree`). They come in the order
of the backward. Once all are there, `State.grads` has them in the order of main weights.

Compute weights: where they come from, when a copy persists between steps, and where gathered units live.

    main [n / ranks of main] ──cast──▶ own place in a whole bucket ──all-gather──▶ whole bucket [n], leaves are views

Placements that replicate weights, or shard them less than main weights, keep a compute copy between steps
(`State.weights`); it is what gathers read, and `refresh` brings it up to date after an update. So do those that are
gathered in float8, whatever the placement: a gather then moves bytes and casts nothing.

`Stored` is the flat buffers of a State, which are all that gathers and reductions read of it.

`Place`: where a gathered unit lies in the arena, and the job that fills it.

    main shard ──cast──▶ own slice of the unit's place ──all-gather, in place──▶ the unit's weights, as views

`refresh`: compute copies that persist are brought up to date after main weights have changed.

    main [n / ranks of main] ──cast──▶ own part of the copy [n / ranks of weights] ──all-gather──▶ the copy

Those in float8 get a scale for each leaf first (`_float8`). Those that are gathered by a codec are packed from
main weights as they are, each rank its part, without a look at others.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch

from ._common.calls import provided, traced_as
from ._common.device import host_memory, in_host_memory, keeps_released, make_room, zeros_as
from ._common.errors import ScheduleError, SpecError, TreeError, expect
from ._common.record import Collective, Mark, Steps
from ._common.torch_names import disabled_torch_function, foreach_zero_, make_wrapper, pytree, unflatten_dense_tensors
from ._common.tree import flatten, register
from ._plan.layout import Bucket, Layout, Leaf, Unit, rows_of
from ._plan.route import Axis, How, Replicated, Sharded, States, route
from ._runtime.agreement import ALL
from ._runtime.runtime import runtime_of
from ._spec.precision import Form

aten = torch.ops.aten
SAME = frozenset((aten.detach.default, aten.alias.default))
VIEWS = SAME | {aten.t.default, aten.transpose.int}


class PackedWeight(torch.Tensor):
    """A matrix, or any tensor, that a codec has packed: bytes, and the dtype of compute to all who ask.

    Attributes:
        bits: uint8 [n], all planes of the codec; lent, as all gathered weights.
        form: the codec, the shape, the dtype, and where the planes lie: `weight.form.planes(weight.bits)`.

    An operation is done with `dequantized()`, which lives as long as it needs it. It cannot be changed in place.

    Example: `fsdp.full_params(state)["blocks.0.up.weight"].form.codec`.
    """

    bits: torch.Tensor
    form: Any
    flipped: bool
    _how: ClassVar[str] = "is packed by a codec"

    @staticmethod
    def __new__(cls, bits: torch.Tensor, form: Any, flipped: bool = False) -> PackedWeight:
        shape, strides = form.shape, form.strides
        if flipped:
            shape, strides = shape[::-1], strides[::-1]
        made: PackedWeight = make_wrapper(
            cls, shape, strides=strides, dtype=form.dtype, layout=torch.strided, device=bits.device
        )
        made.bits, made.form, made.flipped = bits, form, flipped
        return made

    def dequantized(self) -> torch.Tensor:
        """The weight in its dtype, as a new tensor."""
        whole: torch.Tensor = self.form.unpack(self.bits)
        return whole.t() if self.flipped else whole

    def _view(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """A detached, aliased or transposed view of it, of the same bytes."""
        if func in SAME:
            return PackedWeight(func(self.bits), self.form, self.flipped)
        dims = {dim % 2 for dim in (*args, *kwargs.values())} if self.dim() == 2 else {0}
        if self.dim() == 2 and (func is aten.t.default or len(dims) == 2):
            return PackedWeight(aten.alias.default(self.bits), self.form, not self.flipped)
        return func(self.dequantized(), *args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, codec={self.form.codec})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["bits"], (self.form, self.flipped)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], kept: Any, size: Any, stride: Any) -> PackedWeight:
        return PackedWeight(inner["bits"], *kept)

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in VIEWS:
            weight = args[0]
            if torch.is_inference_mode_enabled() and not weight.is_inference():
                with torch.inference_mode(False):  # a view is what its base is
                    return weight._view(func, args[1:], kwargs)
            return weight._view(func, args[1:], kwargs)
        if func._schema.is_mutable and any(isinstance(t, PackedWeight) for t in written_by(func, args, kwargs)):
            raise ScheduleError(
                f"{func} would write to a weight that {cls._how}. It is lent: compute with a changed copy, as "
                "weight.clone(); or change weights between steps: fsdp.replace_params(state, params)."
            )
        return func(*map(_unpacked, args), **{name: _unpacked(value) for name, value in kwargs.items()})


def aliased_by(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, bool]]:
    """What an operation changes, or gives a view of, when it is called with these, as its schema says; and whether it
    changes it."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None:
            value = args[i] if i < len(args) else kwargs.get(argument.name)  # by name: out=
            for one in value if isinstance(value, list | tuple) else (value,):
                yield one, argument.alias_info.is_write


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operation changes when it is called with these."""
    return [t for t, writes in aliased_by(func, args, kwargs) if writes and isinstance(t, torch.Tensor)]


def _unpacked(value: Any) -> Any:
    """What an operation is given, with unpacked weights: a tensor, another value, or a list of them."""
    if isinstance(value, PackedWeight):
        return value.dequantized()
    return [*map(_unpacked, value)] if isinstance(value, list | tuple) else value


summary = provided("look.summary")


@dataclass(frozen=True, eq=False, init=False, repr=False)
class FlatBuffer:
    """A bucket, or the part of it that this rank holds.

    Attributes:
        local: 1-D tensor, [bucket.numel / product of the sharding axes' sizes] elements.
        bucket: where the leaves lie in the whole.
        states: (axis, Sharded | Replicated | Partial) for each data axis.
        mesh: the device mesh that the axes belong to.

    A FlatBuffer is a pytree node with one child, so `tree_map` over a dict of them reaches the tensors.
    """

    local: torch.Tensor
    bucket: Bucket
    states: States
    mesh: Any

    def __init__(self, local: torch.Tensor, bucket: Bucket, states: States, mesh: Any) -> None:
        fields = self.__dict__  # the cheapest way, and one that compilers follow: a step makes one for each bucket
        fields["local"], fields["bucket"], fields["states"], fields["mesh"] = local, bucket, states, mesh

    def __repr__(self) -> str:
        """One line: a notebook shows a tree of them as a table. `tree_map` may have put something else in it."""
        local: Any = self.local
        if not isinstance(local, torch.Tensor):
            return f"FlatBuffer({self.bucket.name!r}, {local!r})"
        n, whole = local.numel(), self.bucket.numel
        part = f"{n:,}" if n == whole else f"{n:,} of {whole:,}"
        placed = ", ".join(f"{axis}: {state}" for axis, state in self.states)
        count, dtype = len(self.bucket.leaves), str(local.dtype).removeprefix("torch.")
        leaves = f"{count} leaves" if count != 1 else "1 leaf"
        return f"FlatBuffer({self.bucket.name!r}, {leaves}, {part} elements, {dtype}, {placed or 'on no axis'})"

    def but(self, local: torch.Tensor, states: States | None = None) -> FlatBuffer:
        """The same bucket with other numbers, and perhaps in other states."""
        return FlatBuffer(local, self.bucket, states or self.states, self.mesh)

    def sharded(self) -> tuple[str, ...]:
        return tuple(axis for axis, state in self.states if state is Sharded)

    def only(self, labels: Container[str]) -> FlatBuffer | None:
        """The same tensor as that of the leaves with these labels, which lie among the others; None if it has none of
        them. Example: `buffer.only({"matrix"})`."""
        bucket = self.bucket.only(labels)
        if bucket is None or bucket is self.bucket:
            return self if bucket else None
        return FlatBuffer(self.local, bucket, self.states, self.mesh)

    def span(self) -> tuple[int, int]:
        """The elements [start, stop) of the bucket that `local` holds."""
        return self.bucket.span(self.sharded(), coordinate_of(self.mesh))

    def by_label(self, given: Sequence[bool] | None = None) -> list[tuple[str, torch.Tensor]]:
        """(label, view) for each run of leaves of one label in `local`: what an optimizer updates with one setting.

        Args:
            given: for each leaf of the bucket, whether it got a gradient; runs are of those that did. None: all.
        """
        if given is None and len(self.bucket.labels) == 1 and not self.bucket.among:
            return [(self.bucket.labels[0][0], self.local)]
        start, stop = self.span()
        runs = self.bucket.labels if given is None else self.bucket.runs(given)
        cuts = ((label, max(a, start), min(b, stop)) for label, a, b in runs)
        return [(label, self.local[a - start : b - start]) for label, a, b in cuts if a < b]

    def by_leaf(self, given: Sequence[bool] | None = None) -> list[tuple[int, torch.Tensor]]:
        """(which leaf of the bucket, view) for each leaf of which `local` has a part, of those that `given` names."""
        start, stop = self.span()
        leaves = enumerate(self.bucket.leaves)
        cuts = ((i, *leaf.within(start, stop)) for i, leaf in leaves if given is None or given[i])
        return [(i, self.local[a - start : b - start]) for i, a, b in cuts if a < b]

    def gather(self, whole: torch.Tensor, lane: str = "side") -> torch.Tensor:
        """Cast `local` into its own place in `whole` [n] (of any dtype) and gather in place: no copy-out."""
        start, stop = self.span()
        own = self.but(whole[start:stop].copy_(self.local))
        own.redistribute(tuple((axis, Replicated) for axis, _ in self.states), whole, lane=lane)
        return whole

    def redistribute(
        self,
        target: Mapping[str, Axis] | States,
        out: torch.Tensor | None = None,
        *,
        average: str = "mean",
        lane: str = "side",
    ) -> FlatBuffer:
        """Move to other per-axis states, by the collectives in the table at the top of this file.

        Args:
            target: the state wanted for each axis; axes left out keep theirs.
            out: 1-D destination of the result's size and this buffer's dtype. A gather is in place when `self.local` is
                this rank's own slice of `out`.
            average: "mean" or "sum" for what was Partial.
            lane: whose communicator it goes by.

        Returns:
            the result; its `local` is `out` where that was given, a view of this one's where nothing had to move.

        Raises:
            SpecError: an unknown axis, a transition that is not in the table, or an `out` of the wrong size or dtype.

        Example, [n / ranks] -> [n]: `FlatBuffer(shard, bucket, (("data", Sharded),), mesh).redistribute({"data":
        Replicated})`
        """
        run = runtime_of(self.mesh)
        wanted = target if isinstance(target, tuple) else tuple(target.items())
        dtype = self.local.dtype
        way = route(self.bucket, self.states, wanted, run.position, How(dtype, dtype, (lane, lane), average))
        if out is not None and (out.shape != (way.numel,) or out.dtype != dtype):
            raise SpecError(
                f"redistribute({self.bucket.name!r}): out has shape {tuple(out.shape)} and dtype {out.dtype}; expected "
                f"({way.numel},) and {dtype}."
            )
        moves = bool(way.steps) or way.states == self.states or out is not None
        local = self.local.clone() if way.sums or not moves else self.local  # what is whole is nobody's shard
        for i, (kind, collectives, start, size) in enumerate(way.steps):
            if kind == "slice":
                local = local[start : start + size]
                continue
            (one,) = collectives
            part = local
            if kind == "gather":
                if i == 0:
                    whole = out if out is not None else local.new_empty(way.numel)
                part = whole[start : start + size]
            elif kind == "scatter":
                part = out if out is not None and size == way.numel else local.new_empty(size)
            run.now(one, part, local)
            local = part
        if out is not None and local is not out:
            local = out if local.data_ptr() == out.data_ptr() else out.copy_(local)
        return self.but(local, way.states)


register(
    FlatBuffer,
    lambda b: ((b.local,), (b.bucket, b.states, b.mesh)),
    ("local",),
    lambda context, children: FlatBuffer(children[0], *context),
)


def _places(mesh: Any) -> dict[str, int]:
    """As the mesh itself says it; of one that only plans, at the first place."""
    if isinstance(mesh, tuple):
        return {axis: 0 for axis, _ in mesh}
    return {axis: mesh.get_local_rank(axis) for axis in mesh.mesh_dim_names}


@traced_as(_places)  # compilers cannot look a runtime up
def coordinate_of(mesh: Any) -> dict[str, int]:
    """Where this rank stands on each axis."""
    return runtime_of(mesh).coordinate


def zeros(like: dict[str, FlatBuffer], trees: int = 1) -> list[dict[str, FlatBuffer]]:
    """So many trees of zeros: what an optimizer keeps beside main weights."""
    there = [buffer.local for buffer in like.values() if not in_host_memory(buffer.local)]
    for device in {local.device for local in there}:
        make_room([local.nbytes for local in there] * trees, device)
    return [{name: b.but(zeros_as(b.local)) for name, b in like.items()} for _ in range(trees)]


def at_home(tree: Any, weights: bool = False) -> Any:
    """A tree of main weights, or of what an optimizer keeps, with FlatBuffers in the memory that their placement names:
    those that an optimizer has made elsewhere, or that a file or a copy brings, are moved.

    weights: of compute copies.
    """

    def moved(x: Any) -> Any:
        if not isinstance(x, FlatBuffer) or x.bucket.by_leaf or x.local.device.type == "meta":
            return x
        if not (x.bucket.copy_on_host if weights else x.bucket.on_host) or in_host_memory(x.local):
            return x
        return x.but(host_memory(x.local.numel(), x.local.dtype, x.local.device).copy_(x.local))

    return pytree.tree_map(moved, tree, is_leaf=lambda x: isinstance(x, FlatBuffer))


def no_counts(like: FlatBuffer, dtype: torch.dtype = torch.int64) -> FlatBuffer:
    """Zeros [leaves of the bucket], the same on every rank that shares the leaves."""
    bucket = like.bucket.counts
    states = tuple((axis, Replicated) for axis, _ in like.states)
    return FlatBuffer(torch.zeros(bucket.numel, dtype=dtype, device=like.local.device), bucket, states, like.mesh)


@lru_cache(maxsize=65536)
def templates(bucket: Bucket) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(shape, device="meta") for shape in bucket.pieces)


def leaves_of(bucket: Bucket, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """The leaves by path, as views of the whole bucket [numel], each of its global shape; one call for all."""
    pieces = unflatten_dense_tensors(whole, templates(bucket))
    views = {leaf.path: pieces[i] for leaf, i in zip(bucket.leaves, bucket.leaf_pieces, strict=True)}
    for leaf in bucket.empty:  # the one call forgets their shapes
        views[leaf.path] = whole.new_empty(leaf.shape)
    return views


class LeafShard(NamedTuple):
    """This rank's elements of one leaf: those from `start` on of the leaf, flattened. `local` is a view, 1-D."""

    leaf: Leaf
    start: int
    local: torch.Tensor


def leaf_shards(buffer: FlatBuffer) -> list[LeafShard]:
    """The leaves of a buffer's bucket, in order, the same on every rank; each with the part that this rank holds.

    Returns:
        (leaf, start, local): a leaf has its global `shape`, its `path` and its `numel`; element i of `local` is element
        `start + i` of the leaf, flattened. Where other ranks hold all of it, `local` is empty and `start` 0.

    Collective: none.

    Example: `for leaf, start, local in extend.leaf_shards(buffer): ...`.
    """
    start, stop = buffer.span()
    found = []
    for leaf in buffer.bucket.leaves:
        a, b = leaf.within(start, stop)
        part = (a - leaf.offset, buffer.local[a - start : b - start]) if a < b else (0, buffer.local[:0])
        found.append(LeafShard(leaf, *part))
    return found


def padding(buffer: FlatBuffer) -> list[torch.Tensor]:
    """What this rank holds that is of no leaf, between leaves and after them: views, 1-D."""
    gaps = _gaps(buffer.bucket)
    start, stop = buffer.span() if gaps else (0, 0)
    cuts = ((max(a, start), min(b, stop)) for a, b in gaps)
    return [buffer.local[a - start : b - start] for a, b in cuts if a < b]


def _found_gaps(bucket: Bucket) -> list[tuple[int, int]]:
    leaves = bucket.leaves
    begins, ends = [0, *(one.offset + one.numel for one in leaves)], [*(one.offset for one in leaves), bucket.numel]
    return [(a, b) for a, b in zip(begins, ends, strict=True) if a < b]


_gaps = traced_as(_found_gaps)(lru_cache(maxsize=65536)(_found_gaps))  # `change` asks in each step


def clear_padding(buffers: Iterable[FlatBuffer]) -> None:
    """Put zeros where no leaf lies, at once."""
    if views := [view for buffer in buffers for view in padding(buffer)]:
        foreach_zero_(views)


T = TypeVar("T")
KIND = attrgetter("shape", "dtype", "layout")  # as `Unit.gradients`


def of_unit(unit: Unit, grads: Any) -> tuple[list[torch.Tensor | None], int]:
    """A unit's gradients as `Unit.paths`, checked, None for frozen leaves; empty if nothing of the unit trains. And
    which of them came: one bit each, or ALL."""
    if type(grads) is not dict:
        expect(f"reduce(state, grads, {unit.name!r}): grads", grads, Mapping, "{key: tensor}", TreeError)
    if (*grads,) == unit.keys:
        values = [*grads.values()]
        try:
            if [*map(KIND, values)] == unit.gradients:
                return values, ALL  # nearly always: tensors of the right shapes, and nothing is frozen
        except AttributeError:  # there is None among them
            pass
    else:
        found = _match(unit.keys, list(grads), list(grads.values()), f"reduce(state, grads, {unit.name!r})")
        values = [found[key] for key in unit.keys]
    trains = came = 0
    for i, (value, shape) in enumerate(zip(values, unit.trains, strict=True)):
        if shape is None:
            values[i] = None
            continue
        trains |= 1 << i
        if value is not None:
            came |= 1 << i
            values[i] = _plain(unit.paths[i], value, shape)
    return values if trains else [], ALL if came == trains else came


def _plain(name: str, value: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """A gradient as a tensor of numbers that can be added up."""
    if not isinstance(value, torch.Tensor) or value.shape != shape:
        got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise TreeError(
            f"reduce: the gradient of {name!r} has {got}; expected a tensor of the parameter's global shape "
            f"{shape} (or None where there is none)."
        )
    for wrong, what, remedy in (
        (value.is_quantized, f"is quantized ({value.dtype})", "Give value.dequantize()"),
        (value.is_complex(), f"is complex ({value.dtype}), and main gradients are real", "Give its real part, g.real"),
    ):
        if wrong:
            raise TreeError(f"reduce: the gradient of {name!r} {what}; expected a dense tensor of floats. {remedy}.")
    refuse_meta([(name, value)])
    if value.layout is not torch.strided:
        warnings.warn(
            f"reduce: the gradient of {name!r} has the layout {value.layout}. It is made dense, {tuple(shape)}, before "
            "it is reduced. To save the time and the bytes leave the module's sparse=True out.",
            stacklevel=5,
        )
        return value.to_dense()
    return value


def refuse_meta(values: Iterable[tuple[str, torch.Tensor | None]]) -> None:
    """Name a gradient that is on the meta device: some pass for tensors of numbers until they are copied."""
    for name, value in values:
        if value is not None and value.is_meta:
            raise TreeError(
                f"reduce: the gradient of {name!r} is on the meta device and has no numbers. Compute it on the weights "
                "that unshard gave."
            )


def of_tree(layout: Layout, grads: Any) -> dict[str, torch.Tensor]:
    """The gradients of a whole tree by the path that holds the leaf: those of tied leaves are added up. Leaves without
    one are left out."""
    paths, leaves, _ = flatten(grads)
    values = _match(layout.paths, paths, leaves, "reduce(state, grads)")
    shapes = {path: shape for unit in layout.units for path, shape in zip(unit.paths, unit.trains, strict=True)}
    total: dict[str, torch.Tensor] = {}
    for name, source in zip(layout.paths, layout.source, strict=True):
        shape, value = shapes[source], values[name]
        if shape is None or value is None:
            continue
        value = _plain(name, value, shape)
        total[source] = total[source] + value if source in total else value
    return total


def _match(wanted: Sequence[str], paths: Sequence[str], leaves: Sequence[Any], where: str) -> dict[str, Any]:
    values = dict(zip(paths, leaves, strict=True))
    if values.keys() != set(wanted):
        missing = [p for p in wanted if p not in values]
        extra = [p for p in paths if p not in set(wanted)]
        said = [f"{what} {names[0]!r}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
                for what, names in (("lacks", missing), ("has the unknown", extra)) if names]  # fmt: skip
        raise TreeError(
            f"{where}: the gradient tree has another structure than the parameters: it {' and '.join(said)} "
            f"({len(paths)} leaves, expected {len(wanted)}). Return a gradient, or None, for each."
        )
    return values


def in_order(layout: Layout, grads: dict[str, T]) -> dict[str, T]:
    """The same dict if it is in the order of main weights, or lacks a bucket; else one that is."""
    trainable = layout.trainable
    if len(grads) < len(trainable) or list(grads) == list(trainable):
        return grads
    return {name: grads[name] for name in trainable}


@dataclass(frozen=True, eq=False, repr=False)
class Stored:
    """Weights and gradients by bucket. `State` adds all else that training owns, and says what each is."""

    main: dict[str, FlatBuffer]
    weights: dict[str, FlatBuffer]
    scales: dict[str, torch.Tensor]
    grads: dict[str, FlatBuffer]


_float8_weight = provided("float8.Float8Weight")
VERSION = attrgetter("_version")

_LOANS: WeakValueDictionary[int, Loan] = WeakValueDictionary()


class LentStorage:
    """A storage on which tensors are lent: what their loans hold, so that it is known as long as one of them is."""


_STORAGES: WeakValueDictionary[int, LentStorage] = WeakValueDictionary()


class Loan:
    """The tensors of a unit, the same objects whenever it is gathered, and whether they may be used now.

    Attributes:
        unit: its name. weights: {key: tensor}. held: whether the unit is gathered, and not released. bases: tensors
            that have the version counters of the weights.
    """

    def __init__(self, unit: str, weights: dict[str, torch.Tensor], bases: Sequence[torch.Tensor] = ()) -> None:
        self.unit = unit
        self.weights = weights
        self.bases = bases
        self.versions: list[int] = []  # of the bases, when the weights were lent
        self.held = False
        self.storages: list[LentStorage] = []
        for tensor in weights.values():  # they live as long as the loan, so an id means one tensor
            _LOANS[id(tensor)] = self
            for part in _bytes_of(tensor):
                self.storages.append(_STORAGES.setdefault(part.untyped_storage()._cdata, LentStorage()))

    def lend(self) -> None:
        """From now on the unit is held."""
        if not self.held:
            self.versions, self.held = [*map(VERSION, self.bases)], True

    @property
    def unchanged(self) -> bool:
        """Whether no operation has written into the weights since they were lent."""
        return not self.held or [*map(VERSION, self.bases)] == self.versions


class LentTree:
    """The version counters of a whole tree that is lent, without its memory.

    Args:
        lent: by bucket, a tensor that was handed out, which shares the counter of the others.
    """

    def __init__(self, lent: Sequence[tuple[Bucket, torch.Tensor]]) -> None:
        self.counters: list[tuple[Bucket, torch.Tensor, int]] = []
        for bucket, tensor in lent:
            if not tensor.is_inference():
                probe = tensor.detach()
                probe.data = probe.new_empty(0)
                self.counters.append((bucket, probe, probe._version))

    @property
    def changed(self) -> list[Bucket]:
        """The buckets into which an operation has written."""
        return [bucket for bucket, probe, count in self.counters if probe._version != count]


def changed(paths: Iterable[str], how: str) -> ScheduleError:
    """The error for weights of which at least one was changed by a forward."""
    names = [*map(repr, paths)]
    more = f", ... ({len(names)} in all)" if len(names) > 3 else ""
    which = f"the weight {names[0]}" if len(names) == 1 else f"a weight (one of {', '.join(names[:3])}{more})"
    return ScheduleError(
        f"the forward changed {which} {how}. Weights come from the state: gathered ones are copies, and the change "
        "would be lost; replicated ones are the state's own, and it would stay. Compute with a changed copy, as "
        "weight.clamp(...); or change weights between steps: fsdp.replace_params(state, params)."
    )


def spoilt(where: str = "") -> str:
    """What is wrong with a state of whose own weights some were changed."""
    return (
        f"the forward changed weights in place{where and f', in {where}'}, and these are replicated: they were this "
        "State's own. Load the last checkpoint."
    )


def owned(values: Sequence[torch.Tensor | None], loan: Loan | None) -> list[torch.Tensor | None]:
    """The same values, to be read after the loan is released: of what was lent, and of views of it, copies."""
    parts = [part for tensor in loan.weights.values() for part in _bytes_of(tensor)] if loan else []
    lent = {part.data_ptr() for part in parts if part.numel()}
    return [v.clone() if v is not None and (v.data_ptr() in lent or loan_of(v) is not None) else v for v in values]


def loan_of(tensor: Any) -> Loan | None:
    """The loan of a tensor that `unshard(state, unit)` gave, None for every other tensor."""
    return _LOANS.get(id(tensor))


def is_lent(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies where weights are lent: it is one, a view of one, or what autograd made of one. Its bytes
    are somebody else's, and are there again when the unit is gathered again.

    Example: `extend.is_lent(weights["weight"].t())`.
    """
    return any(part.untyped_storage()._cdata in _STORAGES for part in _bytes_of(tensor))


def _bytes_of(tensor: Any) -> list[torch.Tensor]:
    """The tensors that hold its bytes: itself, or what a wrapper wraps, of which the scale is nobody's loan."""
    if isinstance(tensor, PackedWeight):
        return [tensor.bits]
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _bytes_of(getattr(tensor, name))]
    return [tensor] if tensor.layout is torch.strided else []


def lent_leaves(bucket: Bucket, whole: torch.Tensor, scales: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The leaves of a whole bucket by path, as compute sees them; see `leaves_of`."""
    bucket = bucket.gathered
    views = leaves_of(bucket, whole)
    if bucket.packed:
        return unpacked_leaves(bucket, views)
    if not bucket.in_float8:
        return views
    each = zip(bucket.leaves, scales[bucket.name].unbind(), strict=True)
    return {leaf.path: _float8_weight(views[leaf.path], scale, bucket.compute) for leaf, scale in each}


def unpacked_leaves(bucket: Bucket, views: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same leaves; those that are packed as a `PackedWeight` that has these bytes."""
    return views | {leaf.path: PackedWeight(views[leaf.path], leaf.form) for leaf in bucket.leaves if leaf.form}


def stored_as(value: torch.Tensor, form: Form | None) -> torch.Tensor:
    """A whole leaf as a bucket stores it: the bytes of one that has a form, whether it is packed already or not."""
    if isinstance(value, PackedWeight):
        if form is not None and value.form.codec == form.codec and not value.flipped:
            return value.bits
        value = value.dequantized()
    return value if form is None else form.pack(value)


def own_of(state: Stored, bucket: Bucket, debug: bool) -> torch.Tensor | None:
    """The state's own tensor, where that is what is lent as the whole bucket, see `Bucket.gathers`, else None."""
    return None if bucket.gathers(debug) else read(state, bucket).local


def gather(state: Stored, bucket: Bucket, whole: torch.Tensor | None = None, lane: str = "side") -> torch.Tensor:
    """Cast the shard into its own place in `whole` (by default a new tensor) and gather in place. All-gather."""
    kept = read(state, bucket)
    if whole is None:
        whole = kept.local.new_empty(bucket.gathered.numel, dtype=bucket.gather)
    return kept.gather(whole, lane)


def read(state: Stored, bucket: Bucket) -> FlatBuffer:
    """What a gather of this bucket reads: the compute copy where there is one, else main weights."""
    return state.weights[bucket.name] if bucket.name in state.weights else state.main[bucket.name]


def alias_of(whole: torch.Tensor) -> torch.Tensor:
    """The same bytes with a version counter of their own: what is written to `whole` is no change to autograd."""
    alias = torch.empty(0, dtype=whole.dtype, device=whole.device)
    return alias.set_(whole.untyped_storage(), whole.storage_offset(), whole.shape, (1,))


def lent_unit(state: Stored, unit: Unit, wholes: Sequence[torch.Tensor]) -> Loan:
    """The weights of a unit whose buckets lie in these bytes, each whole."""
    views: dict[str, torch.Tensor] = {}
    bases = [alias_of(whole) for whole in wholes]
    for bucket, base in zip(unit.buckets, bases, strict=True):
        views |= lent_leaves(bucket, base, state.scales)
    bases += [view for view in views.values() if isinstance(view, PackedWeight)]  # which have counters of their own
    return Loan(unit.name, {key: views[path] for key, path in zip(unit.keys, unit.paths, strict=True)}, bases)


class Gathered:
    """A unit's weights outside the arena. `release` gives their storage back, the next gather fills it again.

    For uses that no plan names: slower, since compute waits for the gather, but always possible. Residuals stay good,
    as they lie on the same storage. Buckets that need no gather are not in `whole`.
    """

    def __init__(self, state: Stored, unit: Unit, debug: bool) -> None:
        self.debug = debug
        self.buckets = {bucket.name: bucket for bucket in unit.buckets}
        self.whole: dict[str, torch.Tensor] = {}
        wholes = []
        for bucket in unit.buckets:
            whole = own_of(state, bucket, debug)
            if whole is None:
                local = state.main[bucket.name].local
                whole = self.whole[bucket.name] = local.new_empty(bucket.gathered.numel, dtype=bucket.gather)
            wholes.append(whole)
        self.loan = lent_unit(state, unit, wholes)

    def gather(self, state: Stored, lane: str = "side") -> None:
        self.allocate()
        for name, whole in self.whole.items():
            gather(state, self.buckets[name], whole, lane)

    def allocate(self) -> None:
        """Give the storages their bytes back, if they were released."""
        for whole in self.whole.values():
            storage = whole.untyped_storage()
            if not storage.size():
                storage.resize_(whole.numel() * whole.element_size())

    def release(self) -> None:
        """The bytes are given back; on the CPU they stay, so that a late reader does not crash."""
        for whole in self.whole.values():
            if self.debug:
                poison(whole)
            elif not keeps_released(whole.device):
                whole.untyped_storage().resize_(0)


def poison(whole: torch.Tensor) -> None:
    """Fill released bytes with NaN (integers: the largest number), so that a use past the release shows."""
    kind = whole.dtype
    if kind.is_floating_point and kind.itemsize == 1:
        whole.view(torch.uint8).fill_(0x7F)  # NaN of both kinds
        return
    whole.fill_(float("nan") if kind.is_floating_point else 1 if kind is torch.bool else torch.iinfo(kind).max)


Filling = tuple[tuple[Collective, ...], Steps, bool]  # what a job issues, the job, and whether all starts at once


class BucketPlace(NamedTuple):
    """A bucket's place: where this rank's slice goes, and the gathers that complete the whole, with where each one
    lands."""

    bucket: Bucket
    whole: torch.Tensor
    own: torch.Tensor
    steps: tuple[tuple[Collective, torch.Tensor], ...]


class Place:
    """A unit's place: its parts, and the tensors that are handed out."""

    def __init__(
        self,
        loan: Loan,
        parts: tuple[BucketPlace, ...],
        resident: tuple[tuple[Bucket, torch.Tensor], ...],
        scales: tuple[tuple[str, torch.Tensor], ...] = (),
    ) -> None:
        self.loan = loan
        self.parts = parts
        self.resident = resident
        self.scales = scales  # of buckets in float8: of the state that the weights are of
        self.issued = tuple(one for part in parts for one, _ in part.steps)
        self.key = loan.unit.encode()  # for the digest that ranks compare
        self.single = all(len(part.steps) <= 1 for part in parts) and all(o.kind != "all_reduce" for o in self.issued)
        self.spans = [span_of(part.whole) for part in parts]
        self.cast: Mark = None  # on GPUs: the point in its last gather from which on it only communicates
        self.gathered: Mark = None  # the end of its last gather
        self.released: Mark = None  # the point on compute where it was last given back

    def poison(self, spared: Iterable[range] = ()) -> None:
        """So that a use past the release shows; but for these bytes."""
        for part, span in zip(self.parts, self.spans, strict=True):
            size = part.whole.element_size()
            for free in without(span, spared):
                poison(part.whole[(free.start - span.start) // size : (free.stop - span.start) // size])

    def ready(self, behind: Mapping[str, Place], newest: Mark) -> Mark:
        """What compute waits for before it uses the unit: see the top of `_engine.gathers`.

        Args:
            behind: the other units that are being gathered.
            newest: the end of the gather that was started last.
        """
        if len(behind) == 1 and self.single:
            (other,) = behind.values()
            if other.single and other.cast is not None and other.gathered is newest:
                return other.cast
        return self.gathered


def without(span: range, holes: Iterable[range]) -> list[range]:
    """What is left of a span."""
    left = [span]
    for hole in holes:
        pieces = [(range(s.start, min(s.stop, hole.start)), range(max(s.start, hole.stop), s.stop)) for s in left]
        left = [piece for both in pieces for piece in both if piece]
    return left


def span_of(tensor: torch.Tensor) -> range:
    """The bytes of its storage on which a contiguous tensor lies."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return range(begin, begin + tensor.numel() * tensor.element_size())


Tree = Mapping[str, FlatBuffer]
_rescale, _cast_scaled = provided("float8.rescale"), provided("float8.cast_scaled")


def no_scales(bucket: Bucket, device: torch.device) -> torch.Tensor:
    """Room for the scales of a bucket: float32 [leaves]."""
    return torch.zeros(len(bucket.leaves), dtype=torch.float32, device=device)


def own_part(main: FlatBuffer, copy: FlatBuffer) -> torch.Tensor:
    """Where main weights, or a cut of them, lie in the compute copy of the same rank."""
    start = main.span()[0] - copy.span()[0]
    return copy.local[start : start + main.local.numel()]


def refresh(
    main: Tree,
    weights: Tree,
    scales: Mapping[str, torch.Tensor],
    trainable_only: bool = False,
    there: Container[str] = (),
) -> None:
    """Bring persistent compute copies up to date, and the scales of those in float8, all in place.

    Args:
        trainable_only: what is frozen has not changed.
        there: buckets whose main shard is in its place in the copy already.

    Collective: one all-reduce along each axis that shards a bucket in float8; an all-gather a bucket where weights are
    less sharded than main weights.
    """
    chosen = [name for name in weights if main[name].bucket.trainable or not trainable_only]
    if scales:
        _rescale([main[name] for name in chosen if name in scales], scales)
    for name in chosen:
        source, kept = main[name], weights[name]
        if (codec := source.bucket.gather_codec) is not None:
            part = FlatBuffer(kept.local, kept.bucket, source.states, source.mesh)
            start, stop = (at - kept.span()[0] for at in part.span())
            part = part.but(kept.local[start:stop])
            rows_of(codec).pack_into(source.local, part.local)
            part.redistribute(kept.states, out=kept.local)
            continue
        own = own_part(source, kept)
        if name in scales:
            _cast_scaled(source, own, scales[name])
        elif name not in there:
            own.copy_(source.local)
        source.but(own).redistribute(kept.states, out=kept.local)
