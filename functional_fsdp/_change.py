"""Changes: what a transform does to a state in place, as a verb would: the state that went in is consumed.

change           gradients, in the middle of a step
change_weights   main weights, between steps; compute copies follow
apart            gradients of a call's own, beside those that the state has
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ._flat import FlatBuffer
from ._functional import through
from ._given import ALL
from ._interrupts import arrive, guard, whole
from ._state import State, Token
from ._trace import base_of, recipes_of, then, trace_of
from ._tracing import refuse, tracing
from ._verbs import finish
from ._weights import refresh

__all__ = ["apart", "change", "change_weights"]

R = TypeVar("R")


def change(state: State, what: str, work: Callable[[], None], by: Any = "", *, every_leaf: bool = False) -> State:
    """The state after `work` has changed its gradients in place. Consumes `state`; if it is stopped in it, the step has
    to begin anew.

    Args:
        state: the newest state of a step, after `finish`: its gradients are whole.
        what: the transform's name, for errors and for the other ranks: the vote of `step` compares what ranks did.
        work: changes them, through `shards` or `leaf_shards`.
        by: a number that has to be the same on every rank; of a tensor only that it is one.
        every_leaf: every leaf has a gradient from here on (noise, say), and so is updated by `step`.

    Raises:
        StaleStateError: a consumed state. Whatever `work` raises.

    Collective: none but those of `work`. In a compiled step it is `work` alone.

    Example: `state = extend.change(fsdp.finish(state), "negate()", negate)`.
    """
    if tracing():
        with torch.no_grad():
            work()
        if every_leaf:
            given = dict.fromkeys(recipes_of(state, what).trained, ALL)
            state = then(state, trace_of(state).but(given=given))
        return state
    ledger = state.token.ledger
    ledger.enter(state.token.serial, what)
    _remark(state, what, by)
    with torch.no_grad(), ledger.call:
        work()
        if every_leaf:
            state.executor.given.fill()
        return ledger.advance(state, what)


def _remark(state: State, what: str, by: Any) -> None:
    """The next vote compares this."""
    state.token.ledger.runtime.remark(f"{what} {'' if isinstance(by, torch.Tensor) else by}")


def apart(state: State, what: str, fn: Callable[[State], tuple[State, R]]) -> tuple[State, R, dict[str, FlatBuffer]]:
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

    Collective: those of `fn`, and twice what `finish` issues.

    Example: `state, loss, grads = extend.apart(state, "penalty", lambda state: forward_backward(state, batch))`.
    """
    if tracing():
        text = f"{what} keeps gradients apart, which a compiled step cannot. Call it outside torch.compile."
        refuse("ScheduleError", text, torch.compiler.is_dynamo_compiling())
    state.token.ledger.enter(state.token.serial, what)
    executor = state.executor
    if state.grads or executor.waiting:  # those whose turn has not come, too
        state = finish(state)
    grads, noted = state.grads, executor.given.begin()
    round_done, executor.whole = executor.whole, False
    executor.adopt({})
    state, out = fn(state._evolve(grads=()))
    state = finish(state)
    found = dict(state.grads)
    executor.adopt(grads)
    executor.given.resume(noted)
    executor.whole = round_done
    return state._evolve(grads=grads), out, found


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
    if tracing():
        if base_of(state) is not state.token:
            text = f"{what} changes weights, and this State is in the middle of a step. Call it before or after one."
            refuse("ScheduleError", text, torch.compiler.is_dynamo_compiling())
        with torch.no_grad():
            work()
            _refresh(state, what)
        return state.token.ledger.stepped(state)
    state.resting(what)
    state.token.ledger.enter(state.token.serial, what)
    with torch.no_grad():
        return _changed(state, what, work, by)


@whole
def _changed(state: State, what: str, work: Callable[[], None], by: Any) -> State:
    """The change itself, which cannot be taken back. An interrupt waits (and one a second later does not)."""
    ledger = state.token.ledger
    guard()
    owned = [buffer.local for buffer in state.main.values()]
    versions = [t._version for t in owned]
    try:
        with ledger.beside(state):
            work()
            for name, kept in (state.weights or {}).items():
                refresh(state.main[name], kept)
    except BaseException as error:
        if versions != [t._version for t in owned]:
            ledger.broken = (
                f"{what} was stopped by {type(error).__name__} while it changed the weights, so this State is half "
                "changed. Load the last checkpoint."
            )
        raise
    _remark(state, what, by)
    state.token.spent, ledger.consumed[state.token.serial] = True, what
    ledger.latest += 1
    ledger.base = ledger.head = ledger.latest
    new = state._evolve(token=Token(ledger, ledger.base))
    ledger.taken = {**new.__dict__}
    del ledger.taken["token"]  # it holds this ledger
    arrive(ledger.others_begun())
    return new


def _refresh(state: State, what: str) -> None:
    """In a graph: compute copies are those of the main weights."""
    recipes = recipes_of(state, what)
    for unit in recipes.units.values():
        for one in unit.buckets:
            if one.copied:
                local = state.main[one.bucket.name].local.to(one.bucket.compute)
                state.weights[one.bucket.name].local.copy_(through(recipes, one.records.step, local))
