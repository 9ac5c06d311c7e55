"""Compute weights: where they come from, when a copy persists between steps, and where gathered units live.

    main [n / ranks of main] ──cast──▶ own place in a whole bucket ──all-gather──▶ whole bucket [n], leaves are views

Placements that replicate weights, or shard them less than main weights, keep a compute copy between steps
(`State.weights`); it is what gathers read, and `refresh` brings it up to date after an update. So do those that are
gathered in float8, whatever the placement: a gather then moves bytes and casts nothing.

`Stored` is the flat buffers of a State, which are all that gathers and reductions read of it.

Places: where a gathered unit lies in the arena, and the job that fills it.

main shard ──cast──▶ own slice of the unit's place ──all-gather, in place──▶ the unit's weights, as views

Refresh: compute copies that persist are brought up to date after main weights have changed.

    main [n / ranks of main] ──cast──▶ own part of the copy [n / ranks of weights] ──all-gather──▶ the copy

Those in float8 get a scale for each leaf first (`_float8.scales`). Those that are gathered by a codec are packed from
main weights as they are, each rank its part, without a look at others.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from .._common.calls import provided
from .._common.device import keeps_released
from .._common.record import Collective, Mark, Steps
from .._nn.packed_weight import PackedWeight
from .._plan.layout import Bucket, Unit, rows_of
from .._spec.codec import Form
from .flat import FlatBuffer, leaves_of


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


def whole_of(state: Stored, bucket: Bucket) -> torch.Tensor | None:
    """The whole bucket, in the dtype in which it is gathered, where the state has it (replicated), else None."""
    kept = read(state, bucket)
    return kept.local if not kept.sharded() and kept.local.dtype is bucket.gather else None


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
