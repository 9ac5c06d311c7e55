"""Rounds: gradients that a transform adds for the user are those of one step, once; and how to start over.

    forward_backward(last_microbatch=False)   forward_backward(last_microbatch=False)   forward_backward()   step
    └── adds ──────────────────────── adds ──────────────────────── whole ────────────┘
                                                                      └── once more: an error, they would count twice

`reduce` by hand knows no rounds: its calls add up.
"""

from __future__ import annotations

from typing import Any

from .._common.calls import alone
from .._common.errors import ScheduleError, StaleStateError
from .state import State

__all__ = ["begin_round", "drop_gradients", "end_round"]


@alone
def drop_gradients(state: State) -> State:
    """Start the step over: the state that it began with, without gradients. What was in flight is dropped.

    Args:
        state: any state of the step, also one that a verb has consumed, or that a `RestartError` left behind.

    Returns:
        the state before the step, as good as it was: weights, optimizer state, buffers, extras. A state between steps
        is returned as it is.

    As with every use of the state before the step: if all ranks call it, they meet, and go on; a rank that is elsewhere
    in the step hears of it by a `RestartError` from the call that it waits in, and calls it, too.

    Raises:
        StaleStateError: `step` has taken the gradients. CommError: a rank that never comes.

    Collective: a meeting of all ranks on the host, if the step was under way. No gradient travels.

    Example, a cell that was stopped after `forward_backward`: `state = fsdp.drop_gradients(state)`.
    """
    lineage = state.version.lineage
    state._valid("drop_gradients")
    base: Any = state.version.origin or state
    if base.version.serial != lineage.base:
        raise StaleStateError(
            "drop_gradients: this State is not of the step that is under way. Use the newest State, or the one that "
            "the last step() returned."
        )
    lineage.enter(base.version.serial, "drop_gradients")
    found: State = base
    return found


def begin_round(state: State, verb: str) -> None:
    """A transform is about to add gradients to the state, for a user who takes its call for the whole round.

    Args:
        verb: what users call the transform by, for errors.

    Raises:
        ScheduleError: those of a whole round are there, and no step was taken: they would count twice.
        StaleStateError: a consumed state.

    Collective: none.

    Example: `extend.begin_round(state, "my_backward")`, then the verbs, then
    `extend.end_round(state, last_microbatch)`.
    """
    lineage = state.version.lineage
    lineage.enter(state.version.serial, verb)
    if lineage.executor is not None and lineage.executor.round_complete:
        raise ScheduleError(
            f"{verb}: this State has the gradients of a whole round already (the call before had "
            "last_microbatch=True, the default), and no step has taken them: they would count twice. Take the step, or "
            "start over: state = fsdp.drop_gradients(state). Where microbatches add up, say last_microbatch=False in "
            "all calls but the last."
        )


def end_round(state: State, last_microbatch: bool) -> None:
    """A transform has added gradients; `last_microbatch`: no more follow before the step. See `begin_round`."""
    state._executor.end_round(last_microbatch)
