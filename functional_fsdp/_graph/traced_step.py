"""`step` as torch.compile sees it: the optimizer's update in plain operations, written into the state's own buffers;
and other changes in place, of gradients and of weights (`_verbs.change`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .._common.errors import TreeError
from .._common.torch_names import pytree
from .._common.tracing import refuse
from .._optim.optimizer import Sender, check
from .._runtime.given import ALL, Lacking
from .._state.graph_plan import GraphPlan
from .._state.update import counting, keep, may_step, put_back, update
from .functional import run, through
from .trace import base_of, changing, given_in, graph_plan_of, then, trace_of
from .traced import finish_reductions

if TYPE_CHECKING:
    from .._state.state import State

__all__ = ["change", "change_weights", "step"]


def step(state: State, *, skip: torch.Tensor | bool | None = None) -> State:
    graph_plan = graph_plan_of(state, "step")
    changing(state, "step")
    skip = may_step(state, skip)
    base, noted = base_of(state), given_in(state)
    state = finish_reductions(state, "step")
    (kind, said), given, anywhere = graph_plan.lacking(
        tuple([noted.get(unit, 0) for unit in graph_plan.trained if noted])
    )
    if said:
        refuse(kind, said)
    lacking = Lacking(dict(given), anywhere)
    main, opt = {name: state.main[name] for name in state.layout.trainable}, counting(state, lacking)
    state = state._evolve(opt=opt)
    before = keep(state, lacking.given)
    sender = Sender(tuple(graph_plan.coordinate.items()), graph_plan.sizes, partial(run, graph_plan))
    new_main, new_opt = update(state, state.grads, main, skip, lacking.given, sender)
    check(main, new_main, "main")
    check(opt, new_opt, "opt")
    _write((main, opt), (new_main, new_opt))
    put_back(before)
    _refresh_copies(state, graph_plan, frozen=False)
    state.count.add_(1 if skip is None else ~skip)
    lineage = base.lineage
    if skip is not None and lineage.offset is not None:
        lineage.offset.add_(skip)
    return state._evolve(grads={}, version=lineage.stepped(base))


def change(state: State, what: str, work: Callable[[], None], by: Any = "", *, every_leaf: bool = False) -> State:
    with torch.no_grad():
        work()
    if every_leaf:
        given = dict.fromkeys(graph_plan_of(state, what).trained, ALL)
        state = then(state, trace_of(state).but(given=given))
    return state


def change_weights(state: State, what: str, work: Callable[[], None], by: Any = "") -> State:
    if base_of(state) is not state.version:
        text = f"{what} changes weights, and this State is in the middle of a step. Call it before or after one."
        refuse("ScheduleError", text)
    changing(state, what)
    with torch.no_grad():
        work()
        _refresh_copies(state, graph_plan_of(state, what))
    return state._evolve(version=state.version.lineage.stepped(state.version))


def _refresh_copies(state: State, graph_plan: GraphPlan, frozen: bool = True) -> None:
    """Bring the compute copies up to date with main weights; those of frozen leaves, too, or not."""
    for unit in graph_plan.units.values():
        for one in unit.buckets:
            if one.copied and (frozen or one.bucket.trainable):
                local = state.main[one.bucket.name].local.to(one.bucket.compute)
                state.weights[one.bucket.name].local.copy_(through(graph_plan, one.records.step, local))


def _write(old: Any, new: Any) -> None:
    """Put the optimizer's results into the state's own buffers, where they are not there already."""
    have, values = pytree.tree_leaves(old), pytree.tree_leaves(new)
    found = []
    for buffer, value in zip(have, values, strict=True):
        if not isinstance(buffer, torch.Tensor):
            raise TreeError(
                f"step: the optimizer's state has a {type(buffer).__name__}; in a compiled step all of it must be "
                "tensors. Make it one: torch.tensor(...)."
            )
        moved = value is not buffer and any(value is other for other in have)  # one buffer's values in another's place
        found.append(value.clone() if moved else value)
    for buffer, value in zip(have, found, strict=True):
        if buffer is not value:
            buffer.copy_(value)
