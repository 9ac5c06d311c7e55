"""Owners: which rank computes with which whole matrix, and how shards travel there and back. Pure.

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
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import torch

from .._common.record import Collective
from .._common.tree import table
from .._optim.optimizer import Sender, Tree
from .._plan.layout import ALIGN, Bucket, Leaf, aligned


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
