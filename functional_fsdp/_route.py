"""Routes: which collectives, on which axes and slices, lead from one placement of a bucket to another. Pure.

| from -> to             | collective                 | bytes a rank receives, n = the larger side |
|------------------------|----------------------------|--------------------------------------------|
| Shard -> Replicate     | all-gather                 | (r-1)/r · n                                 |
| Partial -> Replicate   | all-reduce                 | 2 · (r-1)/r · n                             |
| Partial -> Shard       | reduce-scatter             | (r-1)/r · n                                 |
| Replicate -> Shard     | none, a local slice        | 0                                           |

Anything else is an error. On two axes the hops follow the bucket's split order: gathers undo the last split first,
reductions do the first split first, and what stays whole is all-reduced last, when it is smallest.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from math import prod
from typing import NamedTuple

from ._errors import SpecError
from ._layout import Bucket

__all__ = ["Axis", "Hop", "Partial", "Replicate", "Route", "Shard", "States", "partial_states", "route", "states_of"]


class Axis(Enum):
    """How a buffer lies along one mesh axis."""

    SHARD = "Shard"  # each rank has its slice
    REPLICATE = "Replicate"  # each rank has all of it, the same
    PARTIAL = "Partial"  # each rank has a summand of all of it

    def __str__(self) -> str:
        return str(self.value)

    __repr__ = __str__


Shard, Replicate, Partial = Axis.SHARD, Axis.REPLICATE, Axis.PARTIAL
States = tuple[tuple[str, Axis], ...]
ALLOWED = ((Shard, Replicate), (Partial, Replicate), (Partial, Shard), (Replicate, Shard))


class Hop(NamedTuple):
    """One step of a route.

    kind: "gather", "slice", "scatter" or "reduce". size: elements afterwards. start: where a gathered part lies in the
    result, or where a slice begins in what there was.
    """

    kind: str
    axis: str
    start: int
    size: int


class Route(NamedTuple):
    """The hops, the states at the end, the elements that a rank then holds, and whether anything is summed."""

    hops: tuple[Hop, ...]
    states: States
    numel: int
    sums: bool


def states_of(bucket: Bucket, kind: str, rest: Axis = Replicate) -> States:
    """The per-axis states of "weights", "grads" or "main" of a bucket; axes that do not shard it are `rest`."""
    sharded = getattr(bucket.placement, kind)
    return tuple((axis, Shard if axis in sharded else rest) for axis in bucket.placement.data)


def partial_states(bucket: Bucket) -> States:
    """Of gradients fresh from a backward: each rank has a summand of the whole bucket."""
    return tuple((axis, Partial) for axis in bucket.placement.data)


@lru_cache(maxsize=1 << 16)
def route(bucket: Bucket, states: States, target: States, coordinate: tuple[tuple[str, int], ...]) -> Route:
    """The way from `states` to `target` (axes left out keep their state) for the rank at `coordinate`.

    Raises:
        SpecError: an unknown axis, a transition that is not in the table, axes sharded out of the split order.
    """
    have, want = dict(states), dict(states) | dict(target)
    _check(bucket, have, want)
    here, ranks = dict(coordinate), bucket.ranks
    order = [*(a for a in bucket.placement.order if a in have), *(a for a in have if a not in bucket.placement.order)]
    size = bucket.numel // prod(ranks[a] for a in order if have[a] is Shard)
    hops: list[Hop] = []
    # Leading axes of the split order are sharded before and after, so there are gathers or splits, never both.
    held = [a for a in order if have[a] is Shard]
    begin = bucket.span([a for a in order if want[a] is Shard], here)[0]
    for axis in reversed(order):
        if have[axis] is Shard and want[axis] is Replicate:
            held.remove(axis)
            size *= ranks[axis]
            hops.append(Hop("gather", axis, bucket.span(held, here)[0] - begin, size))
    for axis in order:
        if have[axis] is not Shard and want[axis] is Shard:
            size //= ranks[axis]
            hops.append(Hop("slice" if have[axis] is Replicate else "scatter", axis, here[axis] * size, size))
    hops += [Hop("reduce", a, 0, size) for a in order if have[a] is Partial and want[a] is Replicate]
    return Route(tuple(hops), tuple(want.items()), size, any(hop.kind in ("scatter", "reduce") for hop in hops))


def _check(bucket: Bucket, have: dict[str, Axis], want: dict[str, Axis]) -> None:
    where = f"redistribute({bucket.name!r})"
    for axis, state in want.items():
        if axis not in have:
            raise SpecError(f"{where}: unknown axis {axis!r}; this buffer lies on {', '.join(map(repr, have))}.")
        if (have[axis], state) not in ALLOWED and have[axis] is not state:
            allowed = ", ".join(f"{a} -> {b}" for a, b in ALLOWED)
            raise SpecError(
                f"{where}: {have[axis]} -> {state} on the axis {axis!r} is not a transition. There are {allowed}."
            )
    order = bucket.placement.order
    for states in (have, want):
        sharded = {axis for axis, state in states.items() if state is Shard}
        if sharded != set(order[: len(sharded)]):
            raise SpecError(
                f"{where}: sharded over {sorted(sharded)}, but this bucket is split in the order {order}; "
                f"only leading axes of that order can be sharded."
            )
