"""Functional collectives: a record as an operation of a graph, issued by `start` and waited for by `finished`.

They name their group by a string and need no process group while they are traced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._common.record import Collective
from .._common.torch_names import functional_collectives
from .._common.tracing import tracing_now
from .._plan.route import Route, Step
from .._state.graph_plan import GraphPlan

__all__ = ["finished", "run", "start", "through"]

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
