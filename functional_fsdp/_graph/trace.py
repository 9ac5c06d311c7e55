"""Trace: the version of a state in the middle of a traced step, and what such a step may begin with.

It exists only while the step is traced. Where nothing is under way it is always the same, so that the rest of the step
may be another compiled function; an eager verb that is given one raises.

A collective's record is an operation of the graph, issued by `start` and waited for by `finished`. Those name their
group by a string and need no process group while they are traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from .._common.errors import ScheduleError, StaleStateError
from .._common.record import Collective
from .._common.torch_names import functional_collectives
from .._common.tracing import refuse, tracing_now
from .._plan.route import Route, Step
from .._runtime.given import ALL
from .graph_plan import BucketPlan, GraphPlan

if TYPE_CHECKING:
    from .._state.state import State

__all__ = [
    "Pending", "Trace", "base_of", "changing", "coordinate_of", "finished", "given_in", "graph_plan_of", "run",
    "start", "then", "through", "trace_of",
]  # fmt: skip

OPS = {"mean": "avg", "sum": "sum", "max": "max"}


def start(
    graph_plan: GraphPlan,
    one: Collective,
    local: torch.Tensor,
    splits: tuple[Sequence[int], Sequence[int]] | None = None,
) -> torch.Tensor:
    """Issue one collective; its result must be waited for. `splits`: what the record's are for this rank."""
    if graph := tracing_now():
        graph.issued.append(one)
    ops, ranks, group = functional_collectives, graph_plan.sizes[one.axis], graph_plan.group(one.lane, one.axis)
    if one.kind == "all_gather":
        return ops.all_gather_into_tensor(local, ranks, group)
    if one.kind == "reduce_scatter":
        return ops.reduce_scatter_tensor(local, OPS[one.op], ranks, group)
    if one.kind == "all_to_all":
        cuts = [local.numel() // ranks] * ranks
        came, sent = (cuts, cuts) if splits is None else splits
        return ops.all_to_all_single(local, list(came), list(sent), group)
    return ops.all_reduce(local, OPS[one.op], group)


def finished(graph_plan: GraphPlan, step: Step, local: torch.Tensor) -> torch.Tensor:
    """Wait for what `start` has issued of a step, and do the rest of it."""
    done: torch.Tensor = functional_collectives.wait_tensor(local)
    one = step.collectives[0]
    if one.kind != "all_to_all":
        return done
    ranks = graph_plan.sizes[one.axis]
    parts = done.view(ranks, -1)
    total = parts[0].float()
    for rank in range(1, ranks):  # in the order of ranks: ((r0 + r1) + r2) + ...
        total = total + parts[rank]
    if one.op == "mean":
        total = total / ranks
    for gather in step.collectives[1:]:
        total = run(graph_plan, gather, total)
    return total


def run(
    graph_plan: GraphPlan,
    one: Collective,
    local: torch.Tensor,
    splits: tuple[Sequence[int], Sequence[int]] | None = None,
) -> torch.Tensor:
    """One collective, and its result."""
    done: torch.Tensor = functional_collectives.wait_tensor(start(graph_plan, one, local, splits))
    return done


def through(graph_plan: GraphPlan, way: Route, local: torch.Tensor, begin: int = 0) -> torch.Tensor:
    """A route from its step `begin` on, up to the division at its end."""
    for step in way.steps[begin:]:
        first = step.collectives[0]
        local = finished(graph_plan, step, start(graph_plan, first, local.to(first.dtype)))
    return local / way.divisor if way.divisor > 1 else local


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
