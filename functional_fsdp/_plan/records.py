"""Records: what each verb does with a bucket, as routes of collectives. Pure; worked out once a bucket.

| verb    | from               | to                     | as                                   |
|---------|--------------------|------------------------|--------------------------------------|
| unshard | what is stored     | whole                  | `unshard`; `beside` on the side lane |
| reduce  | fresh gradients    | main gradients         | `reduce[True]`                       |
| reduce  | fresh gradients    | as far as it needs be  | `reduce[False]`, `last_microbatch=False`        |
| finish  | as far as that was | main gradients         | `finish_reductions`                             |
| step    | main weights       | compute copies         | `step`                               |

The engine (`_engine/gathers.py`, `_engine/staging.py`) carries them out on lanes, a traced step (`_graph/traced.py`) as
operations of a graph.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from .._spec.spec import Traits
from .layout import Bucket, Layout
from .plan import REDUCTIONS_AT_ONCE
from .route import Coordinate, How, Partial, Replicated, Route, States, all_axes, route, states_of


class Records(NamedTuple):
    """Of one bucket, see the table at the top of this file."""

    unshard: Route
    beside: Route
    reduce: dict[bool, Route]
    finish: Route
    step: Route


def keeps_copy(bucket: Bucket) -> bool:
    """Whether compute weights persist beside main weights: they are less sharded, or whole and of another dtype, or
    `Precision(gather=)` asks for them; or main weights are in the host's memory, from which a gather would have to
    fetch them twice a step."""
    if bucket.on_host or bucket.copy:
        return True
    return not _sharded_alike(bucket) or (not bucket.placement.weights and bucket.compute is not bucket.main)


def copied_alike(bucket: Bucket) -> bool:
    """Whether each rank's part of a compute copy is that of main weights, so that an update alone can renew it."""
    if bucket.in_float8 or bucket.gather_codec is not None or bucket.on_host or bucket.by_leaf:
        return False
    return keeps_copy(bucket) and _sharded_alike(bucket)


def _sharded_alike(bucket: Bucket) -> bool:
    """Whether weights are sharded along the axes of main weights."""
    return set(bucket.placement.weights) == set(bucket.placement.main)


def gathering(bucket: Bucket, states: States, target: States, here: Coordinate, lane: str) -> Route:
    """Weights, in the dtype in which they are gathered."""
    return route(bucket.gathered, states, target, here, How(bucket.gather, bucket.gather, (lane, lane)))


def reducing(
    bucket: Bucket, states: States, target: States, here: Coordinate, average: str, traits: Traits, share: int = 1
) -> Route:
    """Gradients, in the wire's dtype; where sums are exact in float32 from the first one on. The first axis is reduced
    on the reduce lane, a second one on the outer lane."""
    fresh = states == all_axes(bucket, Partial)
    exact = bucket.exact and fresh  # what has been added up once carries float32
    then = torch.float32 if bucket.exact else bucket.wire
    packs = bucket.codec is not None and (fresh or bool(bucket.codec_axis))
    wire = bucket.wire if fresh else then
    how = How(wire, then, ("reduce", "outer"), average, exact, traits.averages, share, packs)
    return route(bucket, states, target, here, how)


@lru_cache(maxsize=1 << 16)
def records(bucket: Bucket, here: Coordinate, average: str, traits: Traits) -> Records:
    """Of the rank at `here`. `average`: "mean" or "sum"."""
    stored = states_of(bucket, "weights" if keeps_copy(bucket) else "main")  # what a gather reads
    whole, final = all_axes(bucket, Replicated), states_of(bucket, "main")
    fresh, rest = all_axes(bucket, Partial), states_of(bucket, "grads", Partial)
    ends = {True: final, False: rest}
    return Records(
        gathering(bucket, stored, whole, here, traits.gathers),
        gathering(bucket, stored, whole, here, "side"),
        {last: reducing(bucket, fresh, ends[last], here, average, traits, bucket.share) for last in ends},
        reducing(bucket, rest, final, here, average, traits),
        gathering(bucket, final, stored, here, "side"),
    )


def staging_slots(layout: Layout, here: Coordinate, average: str, traits: Traits, kept: bool) -> int:
    """How many reductions in a row have staging of their own. Where the transport keeps the staging (on lanes that copy
    it there) and one lane reduces in order, each lies where the last one lay."""
    ways = [records(bucket, here, average, traits).reduce for bucket in layout.trainable.values()] if kept else []
    return 1 if kept and all(way.ends == "reduce" for both in ways for way in both.values()) else REDUCTIONS_AT_ONCE
