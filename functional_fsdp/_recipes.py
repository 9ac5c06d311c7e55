"""Recipes: what the traced verbs need of a layout, a plan and a mesh, worked out once, as tuples of plain values.

While torch.compile traces a step it runs Python slowly and guards what it reads; so nothing is planned there.

    layout + plan + mesh ──▶ Recipes ──▶ `_traced`'s verbs: which collectives, of which group, cut where
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from ._errors import FsdpError
from ._given import ALL, Seats
from ._layout import Bucket, Layout, Unit
from ._plan import plan
from ._route import Partial, Replicate, States, partial_states, route, states_of
from ._runtime import Runtime
from ._spec import Spec
from ._weights import keeps_copy

__all__ = ["BucketRecipe", "Exchange", "Move", "Recipes", "UnitRecipe", "recipes"]

Groups = Mapping[tuple[str, str], str]  # (lane, axis) -> the name of the group


class Exchange(NamedTuple):
    """One collective. kind: "gather", "scatter", "reduce", or "sum" for the exact sum."""

    kind: str
    ranks: int
    group: str
    dtype: torch.dtype
    whole: bool  # of an exact sum: whether every rank has all of it


class Move(NamedTuple):
    """How gradients get from where they are to `states`."""

    exchanges: tuple[Exchange, ...]
    states: States


class BucketRecipe(NamedTuple):
    """What happens to a bucket.

    copied: whether there is a compute copy between steps. gathers: from the stored shard to the whole.
    pieces: (elements, shape, which of the unit's leaves) in the order of the bucket; -1 is padding.
    empty: (which of the unit's leaves, shape) of leaves without elements.
    fresh: from a backward's gradients to their states, by `last`; rest: from partial main gradients to final ones.
    refresh: from the updated main shard to the compute copy. divisor: of a mean over ranks that this bucket is not
    reduced over.
    """

    bucket: Bucket
    copied: bool
    gathers: tuple[Exchange, ...]
    pieces: tuple[tuple[int, tuple[int, ...], int], ...]
    empty: tuple[tuple[int, tuple[int, ...]], ...]
    fresh: dict[bool, Move]
    rest: Move
    refresh: tuple[Exchange, ...]
    divisor: int


class UnitRecipe(NamedTuple):
    """A unit's buckets, and the names of its leaves: in the unit, and in the tree."""

    name: str
    keys: tuple[str, ...]
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, ...]  # of the leaves that train
    buckets: tuple[BucketRecipe, ...]


class Recipes:
    """All of it, and the program of gathers: uses, what is due at each, and how long a gather's bytes are good.

    Args:
        sizes, coordinate: of the mesh's axes, and this rank's place.
        groups: the communicators' names. Without (where nothing will run) they are called by lane and axis.
    """

    def __init__(
        self, layout: Layout, spec: Spec, sizes: Mapping[str, int], coordinate: Mapping[str, int], groups: Groups,
        run: Runtime | None = None,
    ) -> None:  # fmt: skip
        self.sizes, self.coordinate, self.groups = dict(sizes), dict(coordinate), dict(groups)
        self.seats, self.run, self.layout = Seats(layout, sizes, coordinate), run, layout.hash
        self.trained = tuple(self.seats.units)
        self.op = "avg" if spec.average == "mean" else "sum"
        _ = layout.trainable  # cached: Dynamo does not trace the first time
        schedule = spec.schedule if spec.schedule.order != "recorded" else spec.schedule.ordered(None)
        program = plan(layout, schedule)
        self.uses = tuple(use.unit for use in program.uses)
        self.due = program.due
        self.gathers = tuple((gather.unit, gather.first, gather.last) for gather in program.gathers)
        self.units = {unit.name: self._unit(unit) for unit in layout.units}

    def group(self, lane: str, axis: str) -> str:
        """The name of a lane's communicator on an axis."""
        return self.groups.get((lane, axis), f"{lane} {axis}")

    def lacking(self, masks: tuple[int, ...]) -> tuple[tuple[str, str], Any, tuple[str, ...]]:
        """The error to raise and its text, if any, and `Lacking`'s fields, of a step in which the leaves of `trained`
        got gradients by these masks; without any, all did.

        Called while a step is traced. Ranks that share a leaf must have gradients for it alike: their graphs cannot ask
        each other. They compare that when one of them first traces such a step.

        Collective, on the host: when masks are new to this layout.
        """
        noted = dict(zip(self.trained, masks or (ALL,) * len(self.trained), strict=True))
        mine = self.seats.row(noted)
        rows = [mine] if self.run is None else self.run.given_rows.get((self.layout, mine))
        if rows is None:
            assert self.run is not None
            try:
                rows = self.run.given_rows[self.layout, mine] = self.run.everyone(mine, "leaves with gradients")
            except FsdpError as error:  # Dynamo would wrap it
                return (type(error).__name__, str(error)), (), ()
        lacking, parted, amiss = self.seats.lacking(bytes(map(max, *rows, mine))), self.seats.parted(rows), ("", "")
        if parted:
            amiss = (
                "ScheduleError",
                f"in this compiled step the leaf {parted!r} gets a gradient on some ranks only, and graphs cannot ask "
                "each other. Give zeros in the place of None there, or None on every rank.",
            )
        return amiss, tuple(lacking.given.items()), lacking.anywhere

    lacking._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch._dynamo.assume_constant_result's mark

    def _unit(self, unit: Unit) -> UnitRecipe:
        buckets = tuple(self._bucket(unit, bucket) for bucket in unit.buckets)
        return UnitRecipe(unit.name, unit.keys, unit.paths, unit.trains, buckets)

    def _bucket(self, unit: Unit, bucket: Bucket) -> BucketRecipe:
        _ = bucket.labels, bucket.ranks, bucket.counts  # cached: Dynamo does not trace the first time
        copied = keeps_copy(bucket)
        stored = states_of(bucket, "weights" if copied else "main")
        whole = tuple((axis, Replicate) for axis, _ in stored)
        final, rest = states_of(bucket, "main"), states_of(bucket, "grads", Partial)
        leaf_at = dict(zip(bucket.leaf_pieces, bucket.leaves, strict=True))
        pieces = []
        for i, shape in enumerate(bucket.pieces):
            leaf = leaf_at.get(i)
            pieces.append((prod(shape), shape, -1 if leaf is None else unit.paths.index(leaf.path)))
        partial = partial_states(bucket)
        return BucketRecipe(
            bucket,
            copied,
            self._gathers(bucket, stored, whole, "gather"),
            tuple(pieces),
            tuple((unit.paths.index(leaf.path), leaf.shape) for leaf in bucket.empty),
            {last: self._move(bucket, partial, final if last else rest) for last in (True, False)},
            self._move(bucket, rest, final),
            self._gathers(bucket, states_of(bucket, "main"), states_of(bucket, "weights"), "side") if copied else (),
            bucket.share if self.op == "avg" else 1,
        )

    def _gathers(self, bucket: Bucket, states: States, target: States, lane: str) -> tuple[Exchange, ...]:
        way = route(bucket, states, target, tuple(self.coordinate.items()))
        return tuple(
            Exchange("gather", self.sizes[hop.axis], self.group(lane, hop.axis), bucket.compute, False)
            for hop in way.hops
            if self.sizes[hop.axis] > 1
        )

    def _move(self, bucket: Bucket, states: States, target: States) -> Move:
        way = route(bucket, states, target, tuple(self.coordinate.items()))
        hops = [hop for hop in way.hops if self.sizes[hop.axis] > 1]
        first = bucket.exact and states == partial_states(bucket)  # later hops carry float32
        found = []
        for i, hop in enumerate(hops):
            exact = first and not i
            dtype = torch.float32 if bucket.exact and not exact else bucket.wire
            group = self.group("outer" if i else "reduce", hop.axis)
            kind = "sum" if exact else hop.kind
            found.append(Exchange(kind, self.sizes[hop.axis], group, dtype, hop.kind == "reduce"))
        return Move(tuple(found), way.states)


def recipes(layout: Layout, spec: Spec, run: Runtime) -> Recipes:
    """The recipes of a state that runs."""
    lanes = tuple(run.groups)
    groups = {(lane, axis): run.group(lane if run.cuda else "traced", axis).group_name for lane, axis in lanes}
    return Recipes(layout, spec, run.sizes, run.coordinate, groups, run if isinstance(run, Runtime) else None)
