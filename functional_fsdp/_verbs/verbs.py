"""The verbs of a train step: unshard, release, reduce; `step` has a file of its own. State first in, state first out.

    state ── unshard ──▶ weights ── your loss, torch.func ──▶ gradients ── reduce ──▶ state.grads ── step ──▶ state

What each starts, and when, is the plan's to say (see `advance`, and `executor` for how); compute waits for what it
needs and nothing else. Which collective it is follows from the placement:

| verb    | zero3          | zero2          | zero1                | ddp                | hsdp                       |
|---------|----------------|----------------|----------------------|--------------------|----------------------------|
| unshard | all-gather     | -              | -                    | -                  | all-gather (shard)         |
| reduce  | reduce-scatter | reduce-scatter | reduce-scatter, last | all-reduce, last   | r.-s., then all-reduce     |
| step    | -              | all-gather     | all-gather           | -                  | -                          |

"last": once, on the last microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

import torch

from .._common.calls import provided, verb
from .._common.errors import ScheduleError
from .._runtime.given import ALL
from .._state.state import State
from .._storage import LentTree, gather, lent_leaves, of_tree, of_unit, refuse_zeros, whole_of
from .step import has_gradients

Weights = dict[str, torch.Tensor]
SEVERAL = (tuple, list, Iterable)  # to look at those two alone takes a third of the time


def no_unit(state: State, name: Any, verb: str) -> ScheduleError:
    return ScheduleError(f"{verb}: there is no unit {name!r}. The units are {', '.join(map(repr, state.units))}.")


# ---------------------------------------------------------------- unshard and release


@overload
def unshard(state: State) -> tuple[State, Any]: ...
@overload
def unshard(state: State, unit: str) -> tuple[State, Weights]: ...  # type: ignore[overload-overlap]
@overload
def unshard(state: State, unit: Sequence[str]) -> tuple[State, dict[str, Weights]]: ...
@verb(provided("graph.unshard"))
def unshard(state: State, unit: str | Sequence[str] | None = None) -> tuple[State, Any]:
    """Gather weights: shards [n / ranks] -> leaves of their global shapes, in the compute dtype. What is gathered in
    float8 is a `Float8Weight`.

    Args:
        state: the newest state of a step, or the state between steps.
        unit: None for the whole tree; the name of one unit; or several names.

    Returns:
        The new state and the weights. The whole tree has the structure that was sharded, its tensors are yours as long
        as you hold them (where weights are replicated they are views of the state's own copy, which `step`
        overwrites); a tied leaf is one tensor at each of its paths, for which torch.func gives a gradient each (`bind`
        and `tie` keep it one). A unit's weights are `{path relative to the unit: tensor}`, borrowed until
        `release`; several units give `{unit: weights}`. Gathering a unit that is already gathered costs nothing.

    Raises:
        StaleStateError: a consumed state. ScheduleError: an unknown unit, or inside a torch.func transform.

    Collective: one all-gather a bucket and axis where weights are sharded; none where they are replicated.

    Example: `state, params = fsdp.unshard(state)`; `state, w = fsdp.unshard(state, "blocks.0")`.
    """
    if unit is None:
        return _unshard_tree(state)
    lineage = state.version.lineage
    names = (unit,) if isinstance(unit, str) or not isinstance(unit, SEVERAL) else tuple(dict.fromkeys(unit))
    for name in names:
        if name not in state.layout.by_name:
            raise no_unit(state, name, "unshard")
    lineage.enter(state.version.serial, "unshard")
    executor = lineage.executor or state._executor
    move = executor.gathers.plan_unshard(names)
    with lineage:
        weights = executor.unshard(state, names, move)
        new = lineage.advance(state, ("unshard", names), executor.sink.grads or state.grads)
    return new, weights[unit] if isinstance(unit, str) else weights


def _unshard_tree(state: State) -> tuple[State, Any]:
    """The weights of a whole tree, which no plan names."""
    lineage = state.version.lineage
    lineage.enter(state.version.serial, "unshard")
    state = lineage.advance(state, "unshard()", busy=False)
    views: dict[str, torch.Tensor] = {}
    lineage.touched()
    with lineage.off_plan(state):
        own = {name: scale.clone() for name, scale in state.scales.items()}  # those of a state change with it
        lent = []
        for bucket in state.layout.buckets.values():
            whole = whole_of(state, bucket)
            if whole is None:
                whole = gather(state, bucket)
                views |= lent_leaves(bucket, whole, own)
            else:
                views |= lent_leaves(bucket, whole, state.scales)
            lent.append((bucket, whole))
    lineage.check_lent()
    lineage.lend(LentTree(lent))
    return state, state.treedef.unflatten([views[path] for path in state.layout.source])


@verb(provided("graph.release"))
def release(state: State, unit: str | Sequence[str]) -> State:
    """Give back a unit's gathered weights. They must not be used until the unit is gathered again, to the same tensors.

    Nothing waits: the gather that reuses the bytes waits, on its own lane, until compute has passed this point. A unit
    that the schedule keeps stays gathered. `Schedule(debug=True)` fills the bytes with NaN.

    Raises:
        ScheduleError: an unknown unit, or one that is not gathered.
    """
    names = (unit,) if isinstance(unit, str) or not isinstance(unit, SEVERAL) else tuple(dict.fromkeys(unit))
    for name in names:
        if name not in state.layout.by_name:
            raise no_unit(state, name, "release")
    lineage = state.version.lineage
    lineage.enter(state.version.serial, "release")
    executor = lineage.executor or state._executor
    move = executor.gathers.plan_release(names)
    if executor.gathers.written:
        lineage.check_lent()
    with lineage:
        executor.release(state, names, move)
        return lineage.advance(state, ("release", names))


# ---------------------------------------------------------------- reduce


@verb(provided("graph.reduce"))
def reduce(state: State, grads: Any, unit: str | None = None, *, last_microbatch: bool = True) -> State:
    """Average gradients over the data ranks (or sum, by `Spec`) and add them to `state.grads`.

    Args:
        grads: as the weights that `unshard` gave: the whole tree, or a unit's `{relative path: tensor}`, leaves of
            global shape. They belong to the reduction from here on: do not change them in place. None means that a
            leaf has none: it adds nothing, and a leaf that gets none in a step, on any rank, stays as it is (see
            `step`). Gradients of frozen leaves are ignored; those of tied leaves add up; sparse ones are made dense.
        unit: None for the whole tree, or the unit that `grads` belong to.
        last_microbatch: False says that more microbatches follow, so that a placement which keeps whole gradients
            (`ddp`, `zero1`, and the outer axis of `hsdp` and `hfsdp`) can add them up locally first. A wrong flag costs
            time only, if it is the same on every rank: `step` finishes whatever is still partial.

    Returns:
        The new state: leaves of global shape -> shards [n / ranks of grads] in `Precision.grads`. Calls add up.

    Raises:
        TreeError: another structure, shape or a non-tensor, a complex or quantized gradient, before anything is sent;
            one on the meta device. StaleStateError, ScheduleError: also under `torch.inference_mode` where
            torch.func gives zeros there (torch 2.11).

    Collective: reduce-scatter where gradients are sharded, and on the last call what the placement's
    table row says; in the compute dtype.
    """
    if unit is None:
        return _reduce_tree(state, of_tree(state.layout, grads), last_microbatch)
    lineage = state.version.lineage
    one = state.layout.by_name.get(unit) if isinstance(unit, str) else None
    if one is None:
        raise no_unit(state, unit, "reduce")
    values, came = of_unit(one, grads)
    if values and values[-1] is not None and values[-1].is_inference():
        refuse_zeros(values)
    lineage.enter(state.version.serial, "reduce")
    if lineage.lent:
        lineage.check_lent()
    executor = lineage.executor or state._executor
    reductions, sink = executor.reductions, executor.sink
    move = reductions.plan_reduce(unit) if values else None
    with lineage:
        if state.grads is not sink.grads:
            sink.set_gradients(state.grads)
        if sink.pending is not None:
            lineage.end_reads()
            sink.begin(state)
        before = len(sink.grads)
        if move is not None:
            if came == ALL:
                reductions.given.full.add(unit)
            else:
                reductions.given.note(unit, came)
            executor.reduce(state, unit, values, last_microbatch, move)
        if before < len(sink.grads) == len(state.layout.trainable):
            sink.put_in_order()
        return lineage.advance(state, ("reduce", unit), sink.grads)


def _reduce_tree(state: State, grads: dict[str, torch.Tensor], last_microbatch: bool) -> State:
    """The gradients of a whole tree, by path: a round of its own."""
    lineage = state.version.lineage
    if any(grad.is_inference() for grad in grads.values()):
        refuse_zeros(grads.values())
    lineage.enter(state.version.serial, "reduce")
    lineage.check_lent()
    executor = state._executor
    sink = executor.sink
    with lineage:
        sink.set_gradients(state.grads)
        if sink.pending is not None:
            lineage.end_reads()
            sink.begin(state)
        executor.reduce_tree(state, grads, last_microbatch)
        sink.put_in_order()
        return lineage.advance(state, "reduce()", sink.grads)


@verb(provided("graph.finish_reductions"))
def finish_reductions(state: State) -> State:
    """Make `state.grads` whole: every trainable bucket, each in its final placement. For whoever reads gradients.

    What was announced with `last_microbatch=False` is reduced now; a unit that got no gradient counts as zero, and is
    reduced like the others because its peers on other ranks may have got one. Called by `step`.

    Ranks vote in `step`, not here. Where they did different things in this step, so that `step` will refuse it, what
    this gives them may be other gradients on each rank.

    Raises:
        ScheduleError: there are no gradients at all.

    Collective: as `reduce`, for what was left over; none when nothing was.
    """
    has_gradients(state, "finish_reductions")
    state.version.lineage.enter(state.version.serial, "finish")
    executor = state._executor
    sink = executor.sink
    with state.version.lineage:
        sink.set_gradients(state.grads)
        complete = executor.reductions.complete
        if not complete:
            executor.finish(state, step=False)
        before = sink.grads
        sink.put_in_order()
        executor.settle()
        if not complete or sink.grads is not before:
            state = state.version.lineage.advance(state, "finish_reductions()", sink.grads)
    return state
