"""Changes: what a transform does to a state in place, as a verb would: the state that went in is consumed.

change               gradients, in the middle of a step
change_weights       main weights, between steps; compute copies follow
separate_gradients   gradients of a call's own, beside those that the state has

`shards` gives this rank's elements of the gradients (or of other trees of FlatBuffers), and sums that count each once:

mesh 2 × 2, hsdp       replica 0        replica 1          shards          {("shard",): [...]}: differ along that
  shard 0              g[:n/2]          g[:n/2]            total           summed over "shard", and not over
  shard 1              g[n/2:]          g[n/2:]                            "replica", where it is the same again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from .._common.calls import arrive, guard, refuse, traced_as, uninterruptible
from .._common.errors import ScheduleError, TreeError
from .._common.record import over_each_axis
from .._graph.traced import change as traced_change
from .._graph.traced import change_weights as traced_change_weights
from .._state.lineage import Version
from .._state.state import State
from .._storage import FlatBuffer, clear_padding, of_tree, of_unit, refresh
from .._verbs import Op, axes_of, finish_reductions, has_gradients, no_unit, over_axes

Axes = tuple[str, ...]


def shards(state: State, tree: Mapping[str, FlatBuffer] | None = None) -> dict[Axes, list[FlatBuffer]]:
    """`{mesh axes along which they differ: FlatBuffers}`: what this rank holds, each bucket once.

    Args:
        tree: `{bucket: FlatBuffer}`, as `state.main`; compute waits for reductions under way, and updates for compute.
            None: the gradients of the state, which are whole after `finish_reductions`.

    Returns:
        buffers by the axes of more than one rank that shard them, along which their leaves are cut (`Spec(own=)`), or
        that are data of other leaves only, where ranks have leaves of their own (experts). Along other axes of data
        ranks hold the same. An axis that no placement names is in no key: ranks train apart along it, and each sums its
        own. The tensors are `.local`, flat [n_b / ranks of the axes]; padding is zero. To change them in place, see
        `change`.

    Collective: none.

    Example: `for axes, buffers in extend.shards(state).items(): ...`.
    """
    if tree is not None:
        _settle(state)
    found: dict[Axes, list[FlatBuffer]] = {}
    data, sizes = axes_of(state)
    for buffer in (state.grads if tree is None else tree).values():
        split = tuple(axis for axis in buffer.sharded() if sizes[axis] > 1)
        bucket = buffer.bucket
        own = (axis for axis in bucket.apart(sizes) if axis in data or axis in bucket.cut)
        axes = (*split, *own)
        found.setdefault(axes, []).append(buffer)
    return found


@traced_as(lambda state: None)
def _settle(state: State) -> None:
    """What is looked at may be gradients under way, which are there first, or what an update changes, after this."""
    state.version.lineage.touched()
    if state.grads:
        state._executor.look(state)


def over_shards(state: State, values: Mapping[Axes, torch.Tensor], op: Op = "sum") -> dict[Axes, torch.Tensor]:
    """A tensor [...] from each group of `shards`, added up (or its largest, "max") over the ranks whose shards differ.

    Args:
        values: `{axes: tensor}`, with the keys of `shards`, of one dtype; on every rank, of the same shapes.

    Returns:
        the same keys and shapes; each shard has counted once, and every rank of the data has the same.

    Raises:
        TreeError: a key that is no tuple of axes of the mesh.

    Collective: one all-reduce for each axis that shards something, of all tensors together. Nothing waits for the
    device.

    Example, the largest gradient of each bucket: `extend.over_shards(state, {axes: torch.stack([b.local.abs().amax()
    for b in buffers]) for axes, buffers in extend.shards(state).items()}, "max")`.
    """
    along, axes = [*values], axes_of(state)[1]
    for key in along:
        if not isinstance(key, tuple) or any(axis not in axes for axis in key):
            raise TreeError(
                f"over_shards: the key {key!r} is no tuple of axes of the mesh, which are {[*axes]}. Give the keys of "
                "extend.shards(state): {axes: ... for axes, buffers in extend.shards(state).items()}."
            )
    found = over_each_axis(
        [*values.values()], along, axes, lambda axis, flat: over_axes(state, flat, (axis,), op, "total")
    )
    return dict(zip(along, found, strict=True))


def total(state: State, values: Mapping[Axes, torch.Tensor]) -> torch.Tensor:
    """The sum, a tensor [], over all shards of a tensor [] from each group of `shards`: each element counts once.

    Args:
        values: `{axes: tensor []}`, with the keys of `shards`; on every rank.

    Raises:
        TreeError: as `over_shards`.

    Collective: as `over_shards`.

    Example, how many gradients are zero: `extend.total(state, {axes: sum((b.local == 0).sum() for b in buffers) for
    axes, buffers in extend.shards(state).items()})`, less the padding.
    """
    return torch.stack([*over_shards(state, values).values()]).sum()


def by_unit(state: State, what: str, grads: Any, unit: str | None = None) -> dict[str, list[torch.Tensor | None]]:
    """Gradients as `reduce` takes them, checked as it does: `{unit: a gradient or None for each of Unit.paths}`.

    Args:
        what: the transform's name, for errors.
        grads, unit: as for `reduce`. Those of tied leaves are added up; frozen leaves have None.

    Raises:
        TreeError: as `reduce`. ScheduleError: there is no such unit.

    Collective: none.

    Example: `extend.by_unit(state, "look", grads, "blocks.0")["blocks.0"]`.
    """
    if unit is None:
        values = of_tree(state.layout, grads)
        return {one.name: [values.get(path) for path in one.paths] for one in state.layout.units}
    if unit not in state.layout.by_name:
        raise no_unit(state, unit, what)
    one = state.layout.by_name[unit]
    return {unit: of_unit(one, grads)[0] or [None] * len(one.paths)}


R = TypeVar("R")


@traced_as(traced_change)
def change(
    state: State, what: str, work: Callable[[], None], by: Any = "", *, every_leaf: bool = False,
    keeps_zeros: bool = False,
) -> State:  # fmt: skip
    """The state after `work` has changed its gradients in place. Consumes `state`; if it is stopped in it, the step has
    to begin anew.

    Args:
        state: the newest state of a step, after `finish_reductions`: its gradients are whole. `work` begins when no
            reduction is under way.
        what: the transform's name, for errors and for the other ranks: the vote of `step` compares what ranks did.
        work: changes them, through `shards` or `leaf_shards`.
        by: a number that has to be the same on every rank; of a tensor only that it is one.
        every_leaf: every leaf has a gradient from here on (noise, say), and so is updated by `step`.
        keeps_zeros: zeros stay zeros, as in scaling; else what lies between leaves is set to zero again.

    Raises:
        StaleStateError: a consumed state. ScheduleError: the state has no gradients, or not all of them are whole.
        Whatever `work` raises.

    Collective: none but those of `work`. In a compiled step it is `work` alone.

    Example: `state = extend.change(fsdp.finish_reductions(state), "negate()", negate)`.
    """
    lineage, executor = state.version.lineage, state._executor
    lineage.enter(state.version.serial, what)
    has_gradients(state, what)
    executor.sink.set_gradients(state.grads)
    if not executor.reductions.complete:
        raise ScheduleError(f"{what}: not all gradients are whole. Call state = finish_reductions(state) first.")
    _remark(state, f"{what} after {executor.reduced}", by)
    with torch.no_grad(), lineage:
        executor.settle()  # what is under way would write over what `work` does
        work()
        if not keeps_zeros:
            clear_padding(state.grads.values())
        if every_leaf:
            executor.reductions.given.fill()
        return lineage.advance(state, what)


def _remark(state: State, what: str, by: Any) -> None:
    """The next vote compares this."""
    state.version.lineage.runtime.remark(f"{what} {'' if isinstance(by, torch.Tensor) else by}")


APART = "keeps gradients apart, which a compiled step cannot. Call it outside torch.compile."


@traced_as(lambda state, what, fn: refuse("ScheduleError", f"{what} {APART}"))
def separate_gradients(
    state: State, what: str, fn: Callable[[State], tuple[State, R]]
) -> tuple[State, R, dict[str, FlatBuffer]]:
    """Run `fn` on a state without gradients, and put those that the state had back: `state, out, grads`.

    Args:
        state: between steps, or in the middle of one.
        what: the transform's name, for errors.
        fn: `fn(state) -> state, out`. What it gives to `reduce` is its own.

    Returns:
        the state after it, with the gradients that it had before, finished; `out`; and the gradients that came in `fn`,
        `{bucket: FlatBuffer}`, whole, shards [n_b / ranks of grads].

    Raises:
        ScheduleError: nothing was reduced in `fn`; in a compiled step. StaleStateError: a consumed state.

    Collective: those of `fn`, and twice what `finish_reductions` issues.

    Example: `state, loss, grads = extend.separate_gradients(state, "penalty", penalty)`, where `penalty(state)` reduces
    gradients and returns `state, loss`.
    """
    state.version.lineage.enter(state.version.serial, what)
    executor = state._executor
    reductions = executor.reductions
    if state.grads or reductions.early:  # those whose turn has not come, too
        state = finish_reductions(state)
    grads, noted = state.grads, reductions.given.begin()
    round_complete = executor.end_round(False)
    executor.sink.set_gradients({})
    with reductions.feedback.aside():
        state, out = fn(state._evolve(grads={}))
        state = finish_reductions(state)
    found = dict(state.grads)
    executor.sink.set_gradients(grads)
    reductions.given.resume(noted)
    executor.end_round(round_complete)
    return state._evolve(grads=grads), out, found


@traced_as(traced_change_weights)
def change_weights(state: State, what: str, work: Callable[[], None], by: Any = "") -> State:
    """The state after `work` has changed its main weights in place, between steps. Consumes `state`.

    Args:
        state: between steps.
        what: the transform's name, for errors and for the other ranks: the next vote of `step` compares it.
        work: changes `state.main`, through `shards(state, state.main)` or `leaf_shards`; each rank what it holds.
            Replicas do the same.
        by: as for `change`.

    Returns:
        a state between steps, in the same buffers, whose compute copies are those of the new weights. Optimizer state
        and count stay.

    Raises:
        StaleStateError: a state in the middle of a step, or a consumed one. Whatever `work` raises: if it had changed
            something by then, the state is of no more use, and says so.

    Collective: an all-gather a bucket where weights are less sharded than main weights.

    Example: `state = extend.change_weights(fsdp.step(state), "clamp()", clamp)`.
    """
    state._resting(what)
    state.version.lineage.enter(state.version.serial, what)
    with torch.no_grad():
        return _changed(state, what, work, by)


@uninterruptible
def _changed(state: State, what: str, work: Callable[[], None], by: Any) -> State:
    """The change itself, which cannot be taken back. An interrupt waits (and one a second later does not)."""
    lineage = state.version.lineage
    guard()
    lineage.end_reads()
    owned = [buffer.local for buffer in state.main.values()]
    versions = [t._version for t in owned]
    try:
        with lineage.off_plan(state):
            work()
            clear_padding(state.main.values())
            refresh(state.main, state.weights, state.scales)
    except BaseException as error:
        if versions != [t._version for t in owned]:
            lineage.give_up(
                f"{what} was stopped by {type(error).__name__} while it changed the weights, so this State is half "
                "changed. Load the last checkpoint."
            )
        raise
    _remark(state, what, by)
    new = state._evolve(version=Version(lineage, lineage.latest + 1))
    lineage.renew(state.version, new, what)
    arrive(lineage.others_begun())
    return new
