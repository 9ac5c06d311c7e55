"""Changes: what a transform does to a state in place, as a verb would: the state that went in is consumed.

change               gradients, in the middle of a step
change_weights       main weights, between steps; compute copies follow
separate_gradients   gradients of a call's own, beside those that the state has
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .._common.errors import ScheduleError
from .._common.interrupts import arrive, guard, whole
from .._common.tracing import refuse, traced_as
from .._graph import traced_step
from .._state.state import State, Version
from .._storage.flat import FlatBuffer
from .._storage.refresh import refresh
from .verbs import finish_reductions, has_gradients

__all__ = ["change", "change_weights", "separate_gradients"]

R = TypeVar("R")


@traced_as(traced_step.change)
def change(state: State, what: str, work: Callable[[], None], by: Any = "", *, every_leaf: bool = False) -> State:
    """The state after `work` has changed its gradients in place. Consumes `state`; if it is stopped in it, the step has
    to begin anew.

    Args:
        state: the newest state of a step, after `finish_reductions`: its gradients are whole. `work` begins when no
            reduction is under way.
        what: the transform's name, for errors and for the other ranks: the vote of `step` compares what ranks did.
        work: changes them, through `shards` or `leaf_shards`.
        by: a number that has to be the same on every rank; of a tensor only that it is one.
        every_leaf: every leaf has a gradient from here on (noise, say), and so is updated by `step`.

    Raises:
        StaleStateError: a consumed state. ScheduleError: the state has no gradients, or not all of them are whole.
        Whatever `work` raises.

    Collective: none but those of `work`. In a compiled step it is `work` alone.

    Example: `state = extend.change(fsdp.finish_reductions(state), "negate()", negate)`.
    """
    lineage, executor = state.version.lineage, state._executor
    lineage.enter(state.version.serial, what)
    has_gradients(state, what)
    executor.reductions.set_gradients(state.grads)
    if not executor.reductions.complete:
        raise ScheduleError(f"{what}: not all gradients are whole. Call state = finish_reductions(state) first.")
    _remark(state, f"{what} after {executor.reduced}", by)
    with torch.no_grad(), lineage.call:
        executor.settle()  # what is under way would write over what `work` does
        work()
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
    if state.grads or reductions.waiting:  # those whose turn has not come, too
        state = finish_reductions(state)
    grads, noted = state.grads, reductions.given.begin()
    round_complete = executor.end_round(False)
    reductions.set_gradients({})
    state, out = fn(state._evolve(grads={}))
    state = finish_reductions(state)
    found = dict(state.grads)
    reductions.set_gradients(grads)
    reductions.given.resume(noted)
    executor.end_round(round_complete)
    return state._evolve(grads=grads), out, found


@traced_as(traced_step.change_weights)
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


@whole
def _changed(state: State, what: str, work: Callable[[], None], by: Any) -> State:
    """The change itself, which cannot be taken back. An interrupt waits (and one a second later does not)."""
    lineage = state.version.lineage
    guard()
    owned = [buffer.local for buffer in state.main.values()]
    versions = [t._version for t in owned]
    try:
        with lineage.off_plan(state):
            work()
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
