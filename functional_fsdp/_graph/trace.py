"""Trace: the version of a state in the middle of a traced step, and what such a step may begin with.

It exists only while the step is traced. Where nothing is under way it is always the same, so that the rest of the step
may be another compiled function; an eager verb that is given one raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from .._common.errors import ScheduleError, StaleStateError
from .._common.tracing import refuse, tracing_now
from .._plan.route import Route
from .._runtime.given import ALL
from .._state.graph_plan import BucketPlan, GraphPlan

if TYPE_CHECKING:
    from .._state.state import State

__all__ = ["Pending", "Trace", "base_of", "changing", "coordinate_of", "given_in", "graph_plan_of", "then", "trace_of"]

FIELDS = ("base", "cursor", "issued", "flying", "ready", "held", "pending", "given")


class Pending(NamedTuple):
    """A bucket's reduction under way: what is left of it once its first collective is waited for."""

    bucket_plan: BucketPlan
    way: Route
    local: torch.Tensor


class Trace:
    """The version of a state in the middle of a traced step.

    base: the version that the step came with. cursor, issued: uses and gathers so far. flying: {unit: whole buckets,
    not waited for}. ready: {unit: (weights, the last use that they are good for)}. held: units handed out. pending:
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
    def lineage(self) -> NoReturn:
        raise ScheduleError(
            "this State is in the middle of a step that torch.compile runs, and was used eagerly: it was returned "
            "before step(), or the graph broke (fullgraph=True says where). Return it after step(), or go on from the "
            "state that went in."
        )


def graph_plan_of(state: State, verb: str) -> GraphPlan:
    """What the traced verbs go by; an error if the state cannot be used by them."""
    version: Any = state.version
    if not isinstance(version, Trace):
        _check(version, verb)
    lineage = trace_of(state).base.lineage
    kind, said = lineage.for_graphs()
    if said:
        refuse(kind, said)
    found: GraphPlan = lineage.graph_plan
    return found


def _check(version: Any, verb: str) -> None:
    """A traced step begins between steps. What is read here is guarded, and changes only by wrong use."""
    where = "inside torch.compile, or a step that it runs"
    if version.spent:
        raise StaleStateError(f"{verb} {where}: this State was consumed by a step(). Use the State that it returned.")
    if version.lineage.broken:
        raise StaleStateError(f"{verb} {where}: {version.lineage.broken}")
    if version.origin is not None or version.lineage.busy:
        raise ScheduleError(
            f"{verb} {where}: a step of this State is under way eagerly. A compiled step begins with a state between "
            "steps. Finish the step that is under way, or start over: state = fsdp.drop_gradients(state)."
        )


def trace_of(state: State) -> Trace:
    version: Any = state.version
    found: Trace = version if isinstance(version, Trace) else Trace(version, 0, 0, {}, {}, (), (), {})
    if len(found.given) == 0 and len(state.grads) > 0:  # all leaves got theirs: see `then`
        return found.but(given=dict.fromkeys(found.base.lineage.graph_plan.trained, ALL))
    return found


def base_of(state: State) -> Any:
    """The version of the state that the step began with."""
    return trace_of(state).base


def given_in(state: State) -> dict[str, int]:
    """Masks of the leaves that got a gradient in this step, by unit."""
    return trace_of(state).given


def then(state: State, trace: Trace, **fields: Any) -> State:
    """The state after a verb. Where nothing is held, in flight or lacks a gradient its mark is always the same, so that
    the rest of the step may be another compiled function."""
    busy = len(trace.held) + len(trace.ready) + len(trace.flying) + len(trace.pending)
    if len(trace.given) > 0:
        units = graph_plan_of(state, "step").trained
        busy += len(trace.given) < len(units) or any(mask != ALL for mask in trace.given.values())
    version = trace if busy else Trace(trace.base, 0, 0, {}, {}, (), (), {})
    return state._evolve(version=version, **fields)


def changing(state: State, verb: str) -> None:
    """Raise a ScheduleError if a graph is made that is to change this state and cannot: it is no argument of it."""
    graph = tracing_now()
    if graph is not None and not any(base_of(state).lineage is lineage for lineage in graph.lineages):
        refuse(
            "ScheduleError",
            f"{verb}: this State is not among the arguments of the step that a graph is made of, so the step would "
            "change it once, and never again. Give it to the step as an argument, and return the new one.",
        )


def coordinate_of(state: State) -> dict[str, int]:
    """This rank's place along each axis of the mesh, where a graph is made; also of ranks that are only thought of."""
    return graph_plan_of(state, "a transform").coordinate
