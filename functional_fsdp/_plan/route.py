"""Routes: which collectives, on which axes and slices, lead from one placement of a bucket to another. Pure.

| from -> to            | collective          | bytes a rank receives, n = the larger side |
|-----------------------|---------------------|--------------------------------------------|
| Sharded -> Replicated | all-gather          | (r-1)/r · n                                |
| Partial -> Replicated | all-reduce          | 2 · (r-1)/r · n                            |
| Partial -> Sharded    | reduce-scatter      | (r-1)/r · n                                |
| Replicated -> Sharded | none, a local slice | 0                                          |

Anything else is an error. On two axes the steps follow the bucket's split order: gathers undo the last split first,
reductions do the first split first, and what stays whole is all-reduced last, when it is smallest.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from .._common.errors import SpecError
from .._common.record import Collective
from .._spec.precision import Codec
from .layout import Bucket


class Axis(Enum):
    """How a buffer lies along one mesh axis."""

    SHARD = "Sharded"  # each rank has its slice
    REPLICATE = "Replicated"  # each rank has all of it, the same
    PARTIAL = "Partial"  # each rank has a summand of all of it

    def __str__(self) -> str:
        return str(self.value)

    __repr__ = __str__


Sharded = Axis.SHARD
"""Along this mesh axis each rank has its slice."""
Replicated = Axis.REPLICATE
"""Along this mesh axis each rank has all of it, the same."""
Partial = Axis.PARTIAL
"""Along this mesh axis each rank has a summand of all of it."""
States = tuple[tuple[str, Axis], ...]
Coordinate = tuple[tuple[str, int], ...]  # a rank's place on each axis
ALLOWED = ((Sharded, Replicated), (Partial, Replicated), (Partial, Sharded), (Replicated, Sharded))


class How(NamedTuple):
    """What a route's collectives are like, beside where they lead.

    dtype: of what travels first, and `then` of what follows it. lanes: that of the first, and that of all others.
    op: "mean" or "sum" of what is partial. exact: it is added up in float32, in the order of the ranks. averages:
    whether collectives can average; else they add up, and the result is divided. share: what a mean is divided by,
    too: how many ranks there are for each that it is taken over. packs: whether what a bucket's codec is for travels
    packed.
    """

    dtype: torch.dtype
    then: torch.dtype
    lanes: tuple[str, str]
    op: str = ""
    exact: bool = False
    averages: bool = True
    share: int = 1
    packs: bool = False


class Step(NamedTuple):
    """One step of a route.

    collectives: none for a slice; two for an exact sum that every rank has whole, of which the second one gathers.
    start, size: elements: where what there was lies in what is gathered, or what is sliced or scattered lies in what
    there was; and how many there are afterwards.
    """

    kind: str  # "gather", "slice", "scatter" or "reduce"
    collectives: tuple[Collective, ...]
    start: int
    size: int


class Route(NamedTuple):
    """The steps, all their collectives in a row, the states at the end, and the elements that a rank then holds.

    sums: whether anything is summed. exact: whether the first step adds up in float32. codec: of what travels packed,
    in the step number `packed` (-1: in none), with bytes beside the staging from `room` on. divisor: by what the
    result has to be divided, as its steps add up only, and a mean is wanted.
    """

    steps: tuple[Step, ...]
    collectives: tuple[Collective, ...]
    states: States
    numel: int
    sums: bool
    exact: bool
    divisor: int
    single: bool
    ends: str
    codec: Codec | None = None
    packed: int = -1
    room: int = 0

    @property
    def alone(self) -> bool:
        """Whether an exact sum is all that it is: each rank is sent summands of its part, and adds them up."""
        plain = self.exact and self.codec is None and self.divisor == 1
        return plain and len(self.steps) == 1 and self.steps[0].kind == "scatter"


def states_of(bucket: Bucket, kind: str, rest: Axis = Replicated) -> States:
    """The per-axis states of "weights", "grads" or "main" of a bucket; axes that do not shard it are `rest`."""
    sharded = getattr(bucket.placement, kind)
    return tuple((axis, Sharded if axis in sharded else rest) for axis in bucket.placement.data)


def residual_states(bucket: Bucket) -> States:
    """Of gradients when they are packed: each rank has a summand along the axes that are still to be reduced."""
    done, main = bucket.before_packing, bucket.placement.main
    kinds = {axis: Sharded if axis in main else Replicated for axis in done}
    return tuple((axis, kinds.get(axis, Partial)) for axis in bucket.placement.data)


def all_axes(bucket: Bucket, state: Axis) -> States:
    """The same along all axes: Replicated, where every rank has the bucket whole; or Partial, of gradients fresh from a
    backward, of which each rank has a summand of the whole."""
    return tuple((axis, state) for axis in bucket.placement.data)


@lru_cache(maxsize=1 << 16)
def route(bucket: Bucket, states: States, target: States, here: Coordinate, how: How) -> Route:
    """The way from `states` to `target` (axes left out keep their state) for the rank at `here`. Along an axis of one
    rank nothing moves.

    Raises:
        SpecError: an unknown axis, a transition that is not in the table, axes sharded out of the split order.
    """
    have, want = dict(states), dict(states) | dict(target)
    _check(bucket, have, want)
    at, ranks = dict(here), bucket.ranks
    order = [*(a for a in bucket.placement.order if a in have), *(a for a in have if a not in bucket.placement.order)]
    size = bucket.numel // prod(ranks[a] for a in order if have[a] is Sharded)
    steps: list[Step] = []

    def add(kind: str, axis: str, start: int) -> None:
        if ranks[axis] > 1:
            steps.append(Step(kind, _collectives(kind, axis, size, bucket, how, not steps), start, size))

    # Leading axes of the split order are sharded before and after, so there are gathers or splits, never both.
    held = [a for a in order if have[a] is Sharded]
    begin = bucket.span([a for a in order if want[a] is Sharded], at)[0]
    for axis in reversed(order):
        if have[axis] is Sharded and want[axis] is Replicated:
            held.remove(axis)
            size *= ranks[axis]
            add("gather", axis, bucket.span(held, at)[0] - begin)
    for axis in order:
        if have[axis] is not Sharded and want[axis] is Sharded:
            size //= ranks[axis]
            add("slice" if have[axis] is Replicated else "scatter", axis, at[axis] * size)
    for axis in order:
        if have[axis] is Partial and want[axis] is Replicated:
            add("reduce", axis, 0)
    return _route(steps, tuple(want.items()), size, bucket, how)


def _route(steps: list[Step], states: States, size: int, bucket: Bucket, how: How) -> Route:
    every = tuple(one for step in steps for one in step.collectives)
    summed = [step for step in steps if step.kind in ("scatter", "reduce")]
    exact = how.exact and bool(summed)
    means = [one for one in every if one.op == "sum" and one.axis not in bucket.summed]
    added = [] if how.averages or how.op != "mean" else [one.axis for one in means]
    divisor = prod(bucket.ranks[axis] for axis in added) * (how.share if how.op == "mean" else 1)
    single = len(every) <= 1 and all(one.kind != "all_reduce" for one in every)
    ends = every[-1].lane if every else how.lanes[0]
    packs = [_packs(one.collectives[0].axis, bucket, how, i == 0) for i, one in enumerate(steps) if one.collectives]
    packed = packs.index(True) if True in packs else -1
    codec, room = (bucket.codec, bucket.summed_bytes) if packed >= 0 else (None, 0)
    return Route(tuple(steps), every, states, size, bool(summed), exact, divisor, single, ends, codec, packed, room)


def _packs(axis: str, bucket: Bucket, how: How, first: bool) -> bool:
    """Whether a step along this axis moves packed gradients."""
    return how.packs and bucket.codec is not None and (axis == bucket.codec_axis if bucket.codec_axis else first)


def _collectives(kind: str, axis: str, size: int, bucket: Bucket, how: How, first: bool) -> tuple[Collective, ...]:
    """What a step issues that leaves `size` elements."""
    dtype, lane = (how.dtype, how.lanes[0]) if first else (how.then, how.lanes[1])
    wanted = "sum" if axis in bucket.summed and how.op == "mean" else how.op
    larger = size * bucket.ranks[axis] if kind == "scatter" else size
    if kind == "slice":
        return ()
    if kind == "gather":
        return (Collective("all_gather", axis, size, dtype, "", lane, bucket.name),)
    packs = _packs(axis, bucket, how, first)
    if packs or (how.exact and first):  # each rank adds up its part; a sum that stays whole is gathered after that
        then = how.then
        if packs:
            larger, size = bucket.wire_bytes(larger), bucket.wire_bytes(size)
            dtype = then = torch.uint8
        sent = Collective("all_to_all", axis, larger, dtype, wanted, lane, bucket.name)
        whole = Collective("all_gather", axis, size, then, "", lane, bucket.name)
        return (sent,) if kind == "scatter" else (sent, whole)
    name, op = "reduce_scatter" if kind == "scatter" else "all_reduce", wanted if how.averages else "sum"
    return (Collective(name, axis, larger, dtype, op, lane, bucket.name),)


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
        sharded = {axis for axis, state in states.items() if state is Sharded}
        if sharded != set(order[: len(sharded)]):
            raise SpecError(
                f"{where}: sharded over {sorted(sharded)}, but this bucket is split in the order {order}; "
                f"only leading axes of that order can be sharded."
            )
