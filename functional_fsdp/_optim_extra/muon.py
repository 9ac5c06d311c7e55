"""Leaves that whole ranks own (`Owners`), and `Muon`, which sees each matrix whole.

`Owners`: which rank computes with which whole matrix, and how shards travel there and back. Pure.

    shards, cut wherever bytes fall        whole matrices, one owner each
    rank 0  [ w0 w0 w0 w1 ]    ──▶         rank 0  w1  w2
    rank 1  [ w1 w1 w2 w2 ]    all-to-all  rank 1  w0
                               ◀──

Owners are balanced by their work, which for Muon is floating-point operations: the largest matrix goes first, each to
the rank that has least so far (Graham 1969, "Bounds on multiprocessing timing anomalies"), in each group of buckets
that is updated at once.
On two axes that shard there is a hop along each: first to the owner's place on the outer one.
`there` and `back` are the all-to-alls of such a plan.

What is kept for whole leaves need not travel: `homes` gives buckets in which each leaf lies whole in its owner's slice.

    slices of main weights    [ w0 w0 w0 w1 ] [ w1 w1 w2 w2 ]
    slices of what is kept    [ w1 w2       ] [ w0          ]

`Muon` (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"), in torch.optim.Muon's words.

    momentum    elementwise, on shards
    there       each matrix's update, in `ns_dtype`, to the rank that owns it: one all-to-all an axis
    owners      Newton-Schulz, equal shapes in one batch
    back        to the shards that it came from: one all-to-all an axis
    weights     w * (1 - lr * weight_decay) - lr * ratio * update, on shards

What is stored stays flat; who owns what is a plan. Replicas of a shard do the same,
each within its own row.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from einops import rearrange

from .._common.errors import SpecError, expect
from .._common.record import Collective
from .._common.torch_names import foreach_add_, foreach_copy_
from .._common.tree import register, table
from .._optim.optimizer import (
    Sender,
    Setting,
    Tree,
    UpdatesSome,
    at,
    check_settings,
    fixed,
    labels_in,
    labels_of,
    number,
    numbers,
    portions,
)
from .._plan.layout import ALIGN, Bucket, Leaf, aligned
from .._runtime.agreement import Leaves
from .._shared.torch_names import foreach_lerp, foreach_lerp_, foreach_mul_
from .._storage import summary, zeros


def cut(moves: Moves, tree: Tree) -> list[torch.Tensor]:
    """This rank's runs of a tree, views."""
    return [tree[name].local[a:b] for name, a, b, _, _ in moves.runs]


def there(moves: Moves, flat: torch.Tensor, sender: Sender, what: str) -> torch.Tensor:
    """What a rank has of all runs, one after the other, to the owners. Returns what came."""
    for hop in moves.hops:
        one = Collective("all_to_all", hop.axis, hop.most, flat.dtype, "", "side", what, hop.there)
        flat = sender.send(one, ordered(flat, hop.order), (hop.came, hop.sent))
    return flat


def back(moves: Moves, done: list[torch.Tensor], empty: torch.Tensor, sender: Sender, what: str) -> torch.Tensor:
    """The stacks that an owner has computed, flat, back to the runs. `empty`: what a rank that owns nothing sends."""
    flat = ordered(torch.cat(done), moves.held) if done else empty
    for hop in moves.hops[::-1]:
        one = Collective("all_to_all", hop.axis, hop.most, flat.dtype, "", "side", what, hop.back)
        flat = ordered(sender.send(one, flat, (hop.sent, hop.came)), hop.undone)
    return flat


def ordered(flat: torch.Tensor, order: Slices) -> torch.Tensor:
    """Slices of a flat tensor, one after the other."""
    if not order:
        return flat[:0]
    if all(order[i][1] == order[i + 1][0] for i in range(len(order) - 1)):
        return flat[order[0][0] : order[-1][1]]
    return torch.cat([flat[a:b] for a, b in order])


Slices = tuple[tuple[int, int], ...]  # elements [start, stop)
Pieces = list[tuple[int, int, int]]  # (which of `Owners.owned`, start, stop), in elements of the bucket
Pattern = tuple[str, tuple[tuple[str, int], ...]]  # einops', and sizes of its axes
Given = tuple[tuple[str, tuple[bool, ...]], ...]  # of buckets in which leaves got no gradient: which leaves got one


class Part(NamedTuple):
    """What is owned as a whole: a matrix, or a leaf whose matrices do not lie apart.

    shape: of what is owned. pattern: how to get [..., rows, columns] from it; None: it is a matrix. start: where it
    begins in the leaf, in elements. matrix: (rows, columns). work: what it costs, in one unit.
    """

    shape: tuple[int, ...]
    pattern: Pattern | None
    start: int
    matrix: tuple[int, int]
    work: int


class Owned(NamedTuple):
    """A part of a leaf and its owner, by number among the ranks that shard the bucket. start: where the part begins in
    the bucket, in elements. leaf: which of the bucket's leaves. times, step: of a leaf that is cut along an axis of the
    model's own, as many ranks have a bucket each with their slice, one after the other in what is counted here."""

    bucket: str
    leaf: int
    path: str
    label: str
    start: int
    part: Part
    owner: int = 0
    times: int = 1
    step: int = 0

    def spans(self) -> list[tuple[int, int]]:
        """The elements [start, stop) that it is made of, in order."""
        each = prod(self.part.shape) // self.times
        return [(self.start + k * self.step, self.start + k * self.step + each) for k in range(self.times)]


@dataclass(frozen=True, repr=False)
class Splits:
    """What an all-to-all of matrices takes on each rank: see `Collective.splits`."""

    owners: Owners
    names: tuple[str, ...]
    given: Given
    hop: int
    back: bool

    def __repr__(self) -> str:
        return f"Splits({self.owners.digest}, {self.names}, {self.given}, {self.hop}, {self.back})"

    def at(self, coordinate: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(elements that come, elements that go) by rank along the axis, for the rank there."""
        hop = self.owners.moves(self.names, self.given, tuple(coordinate.items())).hops[self.hop]
        return (hop.sent, hop.came) if self.back else (hop.came, hop.sent)


class Hop(NamedTuple):
    """One all-to-all.

    order: slices of what a rank holds, in the order in which it sends them. undone: slices of what it sends, in the
    order in which it held them. sent, came: elements to and from each rank along the axis. most: of the larger side, on
    any rank. there, back: what its records have.
    """

    axis: str
    order: Slices
    undone: Slices
    sent: tuple[int, ...]
    came: tuple[int, ...]
    most: int
    there: Splits
    back: Splits


class Moves(NamedTuple):
    """What a rank does with the matrices of some buckets.

    runs: (bucket, start, stop, label, (rows, columns)) of its shards, in elements of its local buffer. hops: there;
    back they are the other way round. stacks: (shape, pattern, (slices of what came of each, in order)), of matrices
    that are computed with together. held: the slices of the stacks, one after the other, in the order in which they
    came. members: which of `Owners.owned` each stack has, in order. some: whether there is anything to do, on any rank.
    """

    runs: tuple[tuple[str, int, int, str, tuple[int, int]], ...]
    hops: tuple[Hop, ...]
    stacks: tuple[tuple[tuple[int, ...], Pattern | None, Slices], ...]
    held: Slices
    members: tuple[tuple[int, ...], ...]
    some: bool


@dataclass(frozen=True, repr=False)
class Owners:
    """Who owns what, of all buckets that are cut along the same axes. Printing it gives a table.

    Attributes:
        axes: (axis, ranks) of those that shard, the outer one first; without any each rank has everything.
        owned: in the order of the buckets.
    """

    axes: tuple[tuple[str, int], ...]
    buckets: tuple[Bucket, ...]
    owned: tuple[Owned, ...]

    def __hash__(self) -> int:
        return hash((self.axes, len(self.owned)))

    @property
    def ranks(self) -> int:
        return prod(n for _, n in self.axes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Elements of each bucket that a rank has."""
        return {bucket.name: bucket.numel // bucket.slices("main") for bucket in self.buckets}

    @cached_property
    def digest(self) -> str:
        """Of everything that decides who has what (8 hex digits)."""
        return f"{zlib.crc32(repr((self.axes, self.owned)).encode()):08x}"

    def loads(self) -> list[int]:
        """The work of each rank: of Muon, floating-point operations."""
        found = [0] * self.ranks
        for one in self.owned:
            found[one.owner] += one.part.work
        return found

    def __repr__(self) -> str:
        loads = self.loads()
        even = sum(loads) / len(loads) or 1
        rows = []
        for rank, load in enumerate(loads):
            mine = [one for one in self.owned if one.owner == rank]
            elements = sum(prod(one.part.shape) for one in mine)
            rows.append((rank, len(mine), f"{elements:,}", f"{load:.3g}", f"{load / even:.3f}"))
        axes = " × ".join(f"{axis} {n}" for axis, n in self.axes) or "no axis"
        head = f"owners of {len(self.owned)} matrices along {axes}\n"
        return head + table(("rank", "matrices", "elements", "work", "of the mean"), rows)

    def moves(self, names: tuple[str, ...], given: Given, here: tuple[tuple[str, int], ...]) -> Moves:
        """What the rank at `here` does with the matrices of these buckets, of leaves that got a gradient."""
        return _moves(self, names, given, here)

    moves._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch._dynamo.assume_constant_result's mark

    def plan(self, names: tuple[str, ...], given: Given, here: tuple[tuple[str, int], ...]) -> Moves:
        """The same, worked out anew."""
        some, chosen, at = dict(given), set(names), dict(here)
        which = [
            i
            for i, one in enumerate(self.owned)
            if one.bucket in chosen and (one.bucket not in some or some[one.bucket][one.leaf])
        ]
        me = 0
        for axis, n in self.axes:
            me = me * n + at[axis]
        held = [self._runs(rank, which) for rank in range(self.ranks)]
        runs = held[me]
        hops = []
        for k, (axis, _) in enumerate(self.axes):
            splits = [Splits(self, names, given, k, back) for back in (False, True)]
            (order, sent, came, most), held = self._hop(k, held, me)
            hops.append(Hop(axis, order, _undone(order), sent, came, most, *splits))
        stacks, back, members = self._stacks(held[me])
        local = tuple(
            (one.bucket, a - me * self.sizes[one.bucket], b - me * self.sizes[one.bucket], one.label, one.part.matrix)
            for i, a, b in runs
            for one in (self.owned[i],)
        )
        return Moves(local, tuple(hops), stacks, back, members, bool(which))

    def _runs(self, rank: int, which: Sequence[int]) -> Pieces:
        """(which of `owned`, start, stop) of what a rank has, in elements of the bucket."""
        found = []
        for i in which:
            one = self.owned[i]
            size = self.sizes[one.bucket]
            for start, stop in one.spans():
                a, b = max(start, rank * size), min(stop, (rank + 1) * size)
                if a < b:
                    found.append((i, a, b))
        return found

    def _place(self, rank: int, k: int) -> int:
        """A rank's place on the k-th axis."""
        return rank // prod(n for _, n in self.axes[k + 1 :]) % self.axes[k][1]

    def _hop(
        self, k: int, held: list[Pieces], me: int
    ) -> tuple[tuple[Slices, tuple[int, ...], tuple[int, ...], int], list[Pieces]]:
        """One hop of this rank (order, sent, came, most), and what every rank holds after it."""
        n, stride = self.axes[k][1], prod(n for _, n in self.axes[k + 1 :])
        parts: list[list[list[int]]] = []  # which of what a rank holds, by the place on the axis that it goes to
        for some in held:
            parts.append([[] for _ in range(n)])
            for j, (i, _, _) in enumerate(some):
                parts[-1][self._place(self.owned[i].owner, k)].append(j)
        sizes = [
            [sum(held[rank][j][2] - held[rank][j][1] for j in to) for to in parts[rank]] for rank in range(len(held))
        ]
        after, came = [], []
        for rank in range(self.ranks):
            place = self._place(rank, k)
            row = [rank + (s - place) * stride for s in range(n)]
            after.append([held[s][j] for s in row for j in parts[s][place]])
            came.append(tuple(sizes[s][place] for s in row))
        slices = _laid(b - a for _, a, b in held[me])
        most = max(max(sum(s), sum(c)) for s, c in zip(sizes, came, strict=True))
        return (tuple(slices[j] for to in parts[me] for j in to), tuple(sizes[me]), came[me], most), after

    def _stacks(
        self, held: Pieces
    ) -> tuple[tuple[tuple[tuple[int, ...], Pattern | None, Slices], ...], Slices, tuple[tuple[int, ...], ...]]:
        slices = _laid(b - a for _, a, b in held)
        of: dict[int, list[int]] = {}
        for j, (i, _, _) in enumerate(held):
            of.setdefault(i, []).append(j)
        kinds: dict[tuple[tuple[int, ...], Pattern | None], list[int]] = {}
        for i in sorted(of):
            kinds.setdefault(self.owned[i].part[:2], []).append(i)
        stacks, order = [], []
        for (shape, pattern), members in kinds.items():
            chosen = [j for i in members for j in sorted(of[i], key=lambda j: held[j][1])]
            stacks.append((shape, pattern, tuple(slices[j] for j in chosen)))
            order += chosen
        return tuple(stacks), _undone(tuple(slices[j] for j in order)), tuple(map(tuple, kinds.values()))


@lru_cache(maxsize=4096)
def _moves(owners: Owners, names: tuple[str, ...], given: Given, here: tuple[tuple[str, int], ...]) -> Moves:
    return owners.plan(names, given, here)


def _undone(order: Slices) -> Slices:
    """Where each slice lies once they stand in this order, by where it lay before."""
    lies = dict(zip(order, _laid(b - a for a, b in order), strict=True))
    return tuple(lies[one] for one in sorted(order))


def _laid(sizes: Iterable[int]) -> Slices:
    """Where pieces of these sizes lie, one after the other."""
    return tuple(pairwise((0, *accumulate(sizes))))


def at_once(buckets: Iterable[Bucket], fill: int) -> list[list[str]]:
    """Buckets that are updated at once, by name, of so many bytes of main weights: the last ones first, as their
    gradients come."""
    sizes = {bucket.name: bucket.nbytes("main") for bucket in buckets}
    return portions(dict(reversed(sizes.items())), fill)


def find_owners(
    buckets: Sequence[Bucket], cut: Callable[[Bucket, Leaf], Iterable[Part]], together: Sequence[Sequence[str]]
) -> tuple[Owners, ...]:
    """Owners for the leaves of these buckets, for each set of axes along which some of them are cut.

    Args:
        cut: what is owned as a whole of a leaf of a bucket.
        together: names of buckets that are updated at once.
    """
    groups: dict[tuple[tuple[str, int], ...], list[Bucket]] = {}
    for bucket in buckets:
        sharding = [axis for axis in bucket.placement.order if axis in bucket.placement.main]
        axes = tuple((axis, bucket.ranks[axis]) for axis in sharding if bucket.ranks[axis] > 1)
        own = tuple((one.axis, one.ranks) for one in bucket.leaves[0].cuts if one.ranks > 1)
        groups.setdefault((*own, *axes), []).append(bucket)
    found = []
    for axes, some in groups.items():
        owned = [
            Owned(bucket.name, i, leaf.path, leaf.label, leaf.offset + one.start, one, 0, _times(leaf), bucket.numel)
            for bucket in some
            for i, leaf in enumerate(bucket.leaves)
            for one in cut(bucket, leaf)
        ]
        found.append(Owners(axes, tuple(some), _balanced(owned, prod(n for _, n in axes), together)))
    return tuple(found)


def _times(leaf: Leaf) -> int:
    """By how many ranks along axes of the model's own a leaf is cut."""
    return prod(cut.ranks for cut in leaf.cuts)


def _balanced(owned: Sequence[Owned], ranks: int, together: Sequence[Iterable[str]]) -> tuple[Owned, ...]:
    """With their owners. Ranks wait for each other in each group of buckets, so each is balanced for itself, and what
    it leaves uneven by the next ones."""
    load, owner = [0] * ranks, dict[int, int]()
    group_of = {bucket: k for k, some in enumerate(together) for bucket in some}
    for k in range(len(together)):
        here, of_bucket = [0] * ranks, dict[tuple[str, int], int]()
        mine = [i for i, one in enumerate(owned) if group_of[one.bucket] == k]
        for i in sorted(mine, key=lambda i: -owned[i].part.work):
            bucket, work = owned[i].bucket, owned[i].part.work
            rank = min(range(ranks), key=lambda r: (here[r], load[r], of_bucket.get((bucket, r), 0), r))
            owner[i] = rank
            here[rank], load[rank] = here[rank] + work, load[rank] + work
            of_bucket[bucket, rank] = of_bucket.get((bucket, rank), 0) + work
    return tuple(one._replace(owner=owner[i]) for i, one in enumerate(owned))


Kinds = Mapping[tuple[str, torch.dtype], tuple[int, ...]]  # (name, dtype) of what is kept for a leaf, and its shape
Homes = dict[str, dict[str, tuple[Bucket, torch.dtype]]]  # by name, and by the name of the bucket


def homes(owners: Iterable[Owners], kinds: Callable[[Bucket, Leaf], Kinds]) -> Homes:
    """Buckets for what is kept for leaves that are owned whole: each lies in the slice of the rank that owns the leaf.

    Slices are of one size, that of the fullest one. A bucket has leaves of all buckets of main weights that are placed
    alike. Numbers, one a leaf, lie close together.
    """
    found: dict[tuple[str, torch.dtype, Bucket], list[tuple[int, Leaf]]] = {}
    for plan in owners:
        buckets = {bucket.name: bucket for bucket in plan.buckets}
        alike = {name: replace(one, name="", unit="", leaves=(), numel=0, among=False) for name, one in buckets.items()}
        for one in plan.owned:
            leaf = buckets[one.bucket].leaves[one.leaf]
            for (what, dtype), shape in kinds(buckets[one.bucket], leaf).items():
                some = found.setdefault((what, dtype, alike[one.bucket]), [])
                some.append((one.owner, replace(leaf, shape=shape, form=None)))
    made: Homes = {}
    for (what, dtype, like), some in found.items():
        here = made.setdefault(what, {})
        name = f"at owners:{len(here)}"  # as no unit is called
        here[name] = replace(like, name=name, unit="owners", **_slices(like, some)), dtype
    return made


def _slices(like: Bucket, some: Sequence[tuple[int, Leaf]]) -> dict[str, Any]:
    """The leaves, each at its place in its owner's slice; and the elements of all slices."""
    ranks, align = like.slices("main"), ALIGN if any(leaf.numel > 1 for _, leaf in some) else 1
    filled, placed = [0] * ranks, []
    for owner, leaf in some:
        placed.append((owner, filled[owner], leaf))
        filled[owner] += aligned(leaf.numel, align)
    size = aligned(max(filled), ALIGN)
    placed.sort(key=lambda one: one[:2])
    return {
        "leaves": tuple([replace(leaf, offset=owner * size + at) for owner, at, leaf in placed]),
        "numel": ranks * size,
    }


Tensors = list[torch.Tensor]
Rates = dict[str, tuple[Any, Any]]  # of each label: learning rate and weight decay
ADJUST = (None, "original", "match_rms_adamw")


@dataclass(frozen=True)
class MuonState:
    """momentum: as main weights. owners: which rank computes with which matrix. groups: names of buckets that are
    updated at once. The last two are no tensors, so they are not saved."""

    momentum: Tree
    owners: tuple[Owners, ...]
    groups: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        return "\n".join(("MuonState", summary({"momentum": self.momentum}), *map(repr, self.owners)))


register(
    MuonState,
    lambda state: ((state.momentum,), (state.owners, state.groups)),
    ("momentum",),
    lambda plan, children: MuonState(children[0], *plan),
)


@dataclass(frozen=True)
class Muon(UpdatesSome):
    """See `muon`."""

    lr: Any
    weight_decay: Any
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None
    ns_dtype: torch.dtype
    matrices: Mapping[str, Pattern]
    by_bucket: ClassVar[bool] = True
    communicates: ClassVar[bool] = True
    fill: ClassVar[int] = 1 << 29  # bytes of main weights that are updated at once: enough for every owner to have some

    def __hash__(self) -> int:
        return hash((type(self), self.momentum, self.ns_steps))

    def named_labels(self) -> Iterator[tuple[str, Sequence[str]]]:
        return labels_in("muon", vars(self))

    def for_step(self, count: torch.Tensor, labels: Sequence[str]) -> Muon:
        """The same for the step of this count, with what it computes of it."""
        return fixed(self, ("lr", "weight_decay"), count, labels)

    # ---- the plan

    def owners(self, buckets: Iterable[Bucket]) -> tuple[Owners, ...]:
        """Which rank computes with which matrix of these buckets, for each set of axes along which some are cut.

        Raises:
            SpecError: a leaf is no matrix.

        Example: `print(*muon().owners(fsdp.make_layout(params, spec).trainable.values()))`.
        """
        some = [*buckets]
        return find_owners(some, self._parts, at_once(some, self.fill))

    def _parts(self, bucket: Bucket, leaf: Leaf) -> Iterator[Part]:
        """A leaf's matrices, each for itself where they lie one after the other; else the leaf."""
        pattern = self.matrices.get(leaf.label, self.matrices.get("default"))
        *batch, m, n = self._shape(leaf, pattern)
        if not leaf.numel:
            return
        small, large, count = min(m, n), max(m, n), prod(batch)
        flops = self.ns_steps * (4 * small * small * large + 2 * small**3)
        if (times := _times(leaf)) > 1:
            yield Part((times, *leaf.shape), self._joins(leaf, pattern), 0, (m, n), count * flops)
        elif pattern is None or _keeps_order(pattern[0]):
            for k in range(count):
                yield Part((m, n), None, k * m * n, (m, n), flops)
        else:
            yield Part(leaf.shape, pattern, 0, (m, n), count * flops)

    def _joins(self, leaf: Leaf, pattern: Pattern | None) -> Pattern:
        """From the parts [ranks, ...] of a leaf that is cut along an axis of the model's own to its matrices."""
        own = [one for one in leaf.cuts if one.ranks > 1]
        if len(own) > 1 or len({*own[0].sizes}) > 1 or pattern is not None:
            why = "has parts of several sizes" if pattern is None else "has a pattern of matrices"
            why = why if len(own) == 1 else "that is more than one axis"
            raise SpecError(
                f"muon: the leaf {leaf.path!r} is cut along {', '.join(repr(one.axis) for one in own)}, and {why}. "
                "Muon joins matrices that are cut along one axis, in parts of one size: give it to another optimizer "
                "by its label (fsdp.partition), or cut it so."
            )
        (one,) = own
        names = [f"d{i}" for i in range(len(leaf.shape))]
        left, right = list(names), list(names)
        left[one.dim], right[one.dim] = f"(parts d{one.dim})", f"(parts ranks d{one.dim})"
        return f"ranks {' '.join(left)} -> {' '.join(right)}", (("parts", len(one.sizes)), ("ranks", one.ranks))

    def _shape(self, leaf: Leaf, pattern: Pattern | None) -> tuple[int, ...]:
        """[..., rows, columns]."""
        shape = leaf.whole
        if pattern is not None:
            try:
                shape = rearrange(torch.empty(shape, device="meta"), pattern[0], **dict(pattern[1])).shape
            except Exception as error:
                raise SpecError(
                    f"muon(matrices=...): {pattern[0]!r} does not fit the leaf {leaf.path!r} of shape "
                    f"{list(shape)}: {str(error).strip().splitlines()[-1]}"
                ) from error
        if len(shape) < 2 or (pattern is None and len(shape) > 2):
            raise SpecError(
                f"muon: the leaf {leaf.path!r} has shape {list(shape)}; expected a matrix [rows, columns]. Give "
                "it to another optimizer by its label (fsdp.partition), or say how it is made of matrices: "
                f"muon(matrices={{{leaf.label!r}: 'e i o -> e i o'}}), where the last two are rows and columns."
            )
        return tuple(shape)

    # ---- a step

    def init(self, main: Tree) -> MuonState:
        check_settings(main, lr=self.lr, weight_decay=self.weight_decay)
        return self.placed(MuonState(zeros(main)[0], (), ()))

    def placed(self, opt: MuonState) -> MuonState:
        buckets = [buffer.bucket for buffer in opt.momentum.values()]
        return MuonState(opt.momentum, self.owners(buckets), tuple(map(tuple, at_once(buckets, self.fill))))

    def at_once(self, opt: MuonState) -> tuple[tuple[str, ...], ...]:
        """Matrices of equal shapes are one batch, and have the same bits wherever they lie if that is the same one."""
        return opt.groups

    def update_some(
        self, given: Leaves, skip: torch.Tensor | None, grads: Tree, opt: MuonState, main: Tree, count: torch.Tensor,
        sender: Sender,
    ) -> tuple[Tree, MuonState]:  # fmt: skip
        lacking: Given = tuple([(name, tuple(some)) for name, some in given.items()])
        rates = {  # before anything is written: a function may raise
            label: (at("lr", self.lr, label, count), at("weight_decay", self.weight_decay, label, count))
            for label in labels_of(buffer.bucket for buffer in main.values())
        }
        for group in opt.groups:
            names = tuple([name for name in group if name in main])
            for owners in opt.owners if names else ():
                moves = owners.moves(names, lacking, sender.coordinate)
                if moves.some:
                    weights, slopes, kept = (cut(moves, tree) for tree in (main, grads, opt.momentum))
                    self._update(moves, skip, weights, slopes, kept, main[names[0]].local, rates, sender)
        return main, opt

    def _update(
        self, moves: Moves, skip: torch.Tensor | None, weights: Tensors, grads: Tensors, kept: Tensors,
        like: torch.Tensor, rates: Rates, sender: Sender,
    ) -> None:  # fmt: skip
        change = self._moved(skip, grads, kept) if grads else like.new_empty(0, dtype=self.ns_dtype)
        change = there(moves, change, sender, "matrices")
        done = [self._orthogonal(change, *stack) for stack in moves.stacks]
        change = back(moves, done, change, sender, "matrices")
        if weights:
            self._apply(moves, skip, weights, change, rates)

    def _moved(self, skip: torch.Tensor | None, grads: Tensors, kept: Tensors) -> torch.Tensor:
        """Move the momentum on. Returns what is orthogonalized next, one run after the other, in `ns_dtype`."""
        by = 1 - self.momentum
        if skip is None:
            foreach_lerp_(kept, grads, by)
            new = kept
        else:
            new = list(foreach_lerp(kept, grads, by))
            foreach_copy_(kept, [torch.where(skip, old, one) for old, one in zip(kept, new, strict=True)])
        change = foreach_lerp(grads, new, self.momentum) if self.nesterov else new
        return torch.cat(list(change)).to(self.ns_dtype)

    def _orthogonal(
        self, change: torch.Tensor, shape: tuple[int, ...], pattern: Pattern | None, slices: Slices
    ) -> torch.Tensor:
        """Matrices of one shape, flat as they came."""
        stack = ordered(change, slices).view(-1, *shape)
        if pattern is None:
            return orthogonalized(stack, self.ns_coefficients, self.ns_steps, self.eps).reshape(-1)
        left, right = pattern[0].split("->")
        matrices = rearrange(stack, f"stacked {left} -> stacked {right}", **dict(pattern[1]))
        done = orthogonalized(matrices.reshape(-1, *matrices.shape[-2:]), self.ns_coefficients, self.ns_steps, self.eps)
        turned = f"stacked {right} -> stacked {left}"
        return rearrange(done.view(matrices.shape), turned, **dict(pattern[1])).reshape(-1)

    def _apply(
        self, moves: Moves, skip: torch.Tensor | None, weights: Tensors, change: torch.Tensor, rates: Rates
    ) -> None:
        """Weight decay and the change [of all runs], on shards."""
        dtypes = {one.dtype for one in weights}
        if len(dtypes) == 1:
            change = change.to(weights[0].dtype)
        changes: Sequence[torch.Tensor] = change.split([one.numel() for one in weights])
        if len(dtypes) > 1:
            changes = [one.to(weight.dtype) for one, weight in zip(changes, weights, strict=True)]
        groups: dict[tuple[str, float], list[int]] = {}
        for i, (_, _, _, label, matrix) in enumerate(moves.runs):
            groups.setdefault((label, self._ratio(*matrix)), []).append(i)
        for (label, ratio), which in groups.items():
            lr, decay = rates[label]
            old, by = [weights[i] for i in which], [changes[i] for i in which]
            keep, step = 1 - lr * decay, -lr * ratio
            if skip is not None:
                for w, u in zip(old, by, strict=True):
                    w.copy_(torch.where(skip, w, w * keep + u * step))
            else:
                foreach_mul_(old, keep)
                foreach_mul_(by, step)
                foreach_add_(old, by)

    def _ratio(self, rows: int, columns: int) -> float:
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))


def _keeps_order(pattern: str) -> bool:
    """Whether the matrices of a pattern lie one after the other."""
    left, right = (side.replace("(", " ").replace(")", " ").split() for side in pattern.split("->"))
    return left == right


def orthogonalized(
    stack: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Matrices [k, rows, columns], each as near to an orthogonal one as a few steps of Newton-Schulz's iteration bring
    it, in the dtype of what is given."""
    a, b, c = coefficients
    tall = stack.shape[-2] > stack.shape[-1]
    x = stack.mT if tall else stack
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def muon(
    lr: Setting = 1e-3,
    weight_decay: Setting = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    ns_dtype: torch.dtype = torch.bfloat16,
    matrices: str | tuple[str, Mapping[str, int]] | Mapping[str, Any] | None = None,
) -> Muon:
    """Muon: the momentum of each matrix, orthogonalized, as torch.optim.Muon computes it.

    Every trainable leaf must be a matrix: give embeddings, biases and norms to another optimizer by `partition`.
    Weights and momentum stay sharded; each matrix travels to the one rank that computes with it, and its update back.

    Args:
        lr, weight_decay: numbers, functions of the count, or either by label, as for `adamw`.
        momentum, nesterov, ns_coefficients, eps, ns_steps: as torch.optim.Muon's.
        adjust_lr_fn: "original" (None is the same), by which lr is multiplied by sqrt(max(1, rows / columns)); or
            "match_rms_adamw", 0.2 * sqrt(max(rows, columns)).
        ns_dtype: of what travels, and of the iteration. torch's is bfloat16.
        matrices: how a leaf is made of matrices, where it is none: an einops pattern whose last two axes are rows and
            columns, or the pattern and the sizes that it needs, or either by label. Fused projections:
            `("(three rows) columns -> three rows columns", {"three": 3})`; stacked experts: "e rows columns -> e rows
            columns". By default a leaf is one matrix.

    Returns:
        an `(init, update)` pair. Its `owners(buckets)` is the plan, which prints.

    Raises:
        SpecError: a number out of its range. By `shard` and `init`: a leaf that is no matrix, a pattern that does not
            fit, a label without a number.

    Collective: in `step`, two all-to-alls for each axis that shards, for each part of the update.

    Memory: what a rank owns of a part, in `ns_dtype`, about six times, while it computes.

    Example: `fsdp.partition({"matrix": fsdp.muon(lr=0.02), "default": fsdp.adamw(lr=3e-4)})`.
    """
    numbers("muon: lr", lr)
    numbers("muon: weight_decay", weight_decay)
    number("muon: momentum", momentum, 1)
    number("muon: eps", eps)
    ns_coefficients = (*expect("muon(ns_coefficients)", ns_coefficients, Iterable, "three numbers"),)
    if len(ns_coefficients) != 3 or not all(isinstance(one, int | float) for one in ns_coefficients):
        raise SpecError(f"muon: ns_coefficients is {ns_coefficients!r}; expected three numbers.")
    if isinstance(ns_steps, bool) or not isinstance(ns_steps, int) or not 0 < ns_steps < 100:
        raise SpecError(f"muon: ns_steps is {ns_steps!r}; expected a whole number from 1 to 99.")
    if adjust_lr_fn not in ADJUST:
        raise SpecError(f"muon: adjust_lr_fn is {adjust_lr_fn!r}; expected one of {', '.join(map(repr, ADJUST))}.")
    if not isinstance(ns_dtype, torch.dtype) or not ns_dtype.is_floating_point:
        raise SpecError(f"muon: ns_dtype is {ns_dtype!r}; expected a floating dtype, as torch.bfloat16.")
    a, b, c = map(float, ns_coefficients)
    return Muon(
        lr, weight_decay, momentum, nesterov, (a, b, c), eps, ns_steps, adjust_lr_fn, ns_dtype, _patterns(matrices)
    )


def _patterns(matrices: Any) -> dict[str, Pattern]:
    if matrices is None:
        return {}
    named = matrices if isinstance(matrices, Mapping) else {"default": matrices}
    found = {}
    for label, one in named.items():
        pattern, sizes = one if isinstance(one, tuple | list) and len(one) == 2 else (one, {})
        plain = isinstance(pattern, str) and pattern.count("->") == 1 and "(" not in pattern.split("->")[1]
        if not plain or not isinstance(sizes, Mapping):
            raise SpecError(
                f"muon: matrices is {one!r} for the label {label!r}; expected an einops pattern without parentheses on "
                "its right, as 'e i o -> e i o', or a pattern and its sizes, as ('(k i) o -> k i o', {'k': 3})."
            )
        found[str(label)] = (pattern, tuple((str(axis), int(n)) for axis, n in sizes.items()))
    return found
