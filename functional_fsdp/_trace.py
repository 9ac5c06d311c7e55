"""Trace: the token of a state in the middle of a traced step, and what such a step may begin with.

It exists only while the step is traced. Where nothing is under way it is always the same, so that the rest of the step
may be another compiled function; an eager verb that is given one raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from ._errors import ScheduleError, StaleStateError
from ._given import ALL
from ._recipes import BucketRecipe, Recipes
from ._route import Route
from ._tracing import refuse

if TYPE_CHECKING:
    from ._state import State

__all__ = ["Pending", "Trace", "base_of", "coordinate_of", "given_in", "recipes_of", "then", "trace_of"]

FIELDS = ("base", "cursor", "issued", "flying", "ready", "held", "pending", "given")


class Pending(NamedTuple):
    """A bucket's reduction under way: what is left of it once its first collective is waited for."""

    recipe: BucketRecipe
    way: Route
    local: torch.Tensor


class Trace:
    """The token of a state in the middle of a traced step.

    base: the token that the step came with. cursor, issued: uses and gathers so far. flying: {unit: whole buckets, not
    waited for}. ready: {unit: (weights, the last use that they are good for)}. held: units handed out. pending:
    reductions under way. given: {unit: mask of the leaves that got a gradient} of the units that were reduced.
    """

    def __init__(
        self, base: Any, cursor: int, issued: int, flying: Any, ready: Any, held: tuple[str, ...],
        pending: tuple[Pending, ...], given: dict[str, int],
    ) -> None:  # fmt: skip
        self.base = base
        self.cursor = cursor
        self.issued = issued
        self.flying = flying
        self.ready = ready
        self.held = held
        self.pending = pending
        self.given = given

    def but(self, **changes: Any) -> Trace:
        """The same with some fields replaced."""
        return Trace(**{name: changes[name] if name in changes else getattr(self, name) for name in FIELDS})

    @property
    def ledger(self) -> NoReturn:
        raise ScheduleError(
            "this State is in the middle of a step that torch.compile runs, and was used eagerly: it was returned "
            "before step(), or the graph broke (fullgraph=True says where). Return it after step(), or go on from the "
            "state that went in."
        )


def recipes_of(state: State, verb: str) -> Recipes:
    """What the traced verbs go by; an error if the state cannot be used by them."""
    token: Any = state.token
    if not isinstance(token, Trace):
        _check(token, verb)
    ledger = trace_of(state).base.ledger
    kind, said = ledger.for_graphs()
    if said:
        refuse(kind, said, torch.compiler.is_dynamo_compiling())
    found: Recipes = ledger.recipes
    return found


def _check(token: Any, verb: str) -> None:
    """A traced step begins between steps. What is read here is guarded, and changes only by wrong use."""
    where = "inside torch.compile, or a step that it runs"
    if token.spent:
        raise StaleStateError(f"{verb} {where}: this State was consumed by a step(). Use the State that it returned.")
    if token.ledger.broken:
        raise StaleStateError(f"{verb} {where}: {token.ledger.broken}")
    if token.origin is not None or token.ledger.busy:
        raise ScheduleError(
            f"{verb} {where}: a step of this State is under way eagerly. A compiled step begins with a state between "
            "steps. Finish the step that is under way, or start over: state = fsdp.drop_gradients(state)."
        )


def trace_of(state: State) -> Trace:
    token: Any = state.token
    found: Trace = token if isinstance(token, Trace) else Trace(token, 0, 0, {}, {}, (), (), {})
    if len(found.given) == 0 and len(state.grads or ()) > 0:  # all leaves got theirs: see `then`
        return found.but(given=dict.fromkeys(found.base.ledger.recipes.trained, ALL))
    return found


def base_of(state: State) -> Any:
    """The token of the state that the step began with."""
    return trace_of(state).base


def given_in(state: State) -> dict[str, int]:
    """Masks of the leaves that got a gradient in this step, by unit."""
    return trace_of(state).given


def then(state: State, trace: Trace, **fields: Any) -> State:
    """The state after a verb. Where nothing is held, in flight or lacks a gradient its mark is always the same, so that
    the rest of the step may be another compiled function."""
    busy = len(trace.held) + len(trace.ready) + len(trace.flying) + len(trace.pending)
    if len(trace.given) > 0:
        units = recipes_of(state, "step").trained
        busy += len(trace.given) < len(units) or any(mask != ALL for mask in trace.given.values())
    token = trace if busy else Trace(trace.base, 0, 0, {}, {}, (), (), {})
    return state._evolve(token=token, **fields)


def coordinate_of(state: State) -> dict[str, int]:
    """This rank's place along each axis of the mesh, where a graph is made; also of ranks that are only thought of."""
    return recipes_of(state, "a transform").coordinate
