"""The verbs as torch.compile sees them: plain tensor operations and functional collectives, in one graph.

    unshard   cast the shard, all-gather; gathers that the plan has next are issued before this one is waited for
    release   the weights are forgotten: in a graph bytes are free when nothing uses them any more
    reduce    the gradients in one flat tensor, reduce-scatter, waited for when the next one comes
    step      the update as plain operations, written into the state's own buffers

What the verbs of a step know of each other (the cursor, what is in flight) travels in the state's version, a `Trace`.
Nothing in Python changes from one run to the next, so nothing recompiles; nothing votes either, since every rank runs
the same graph. Which leaves get no gradient is a part of that graph: ranks compare it once, when they trace
(`GraphPlan.lacking`).

`step` as torch.compile sees it: the optimizer's update in plain operations, written into the state's own buffers;
and other changes in place, of gradients and of weights (`_verbs.change`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .._common.errors import ScheduleError, TreeError
from .._common.provided import provide
from .._common.record import Collective
from .._common.torch_names import pytree
from .._common.tracing import refuse
from .._optim.optimizer import Sender, check
from .._plan.route import Route, States
from .._runtime.given import ALL, Lacking
from .._state.update import counting, keep, may_step, put_back, update
from .._storage.flat import FlatBuffer
from .._storage.gradients import like
from .graph_plan import BucketPlan, GraphPlan, UnitRecipe
from .trace import Pending, base_of, changing, finished, given_in, graph_plan_of, run, start, then, through, trace_of

if TYPE_CHECKING:
    from .._state.state import State

__all__ = [
    "axes_of", "change", "change_weights", "finish_reductions", "over_axes", "reduce", "release", "step",
    "unshard",
]  # fmt: skip


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


Weights = dict[str, torch.Tensor]
Started = tuple[tuple[Route, torch.Tensor], ...]


def _unit(graph_plan: GraphPlan, name: str, verb: str) -> UnitRecipe:
    if name not in graph_plan.units:
        raise ScheduleError(f"{verb}: there is no unit {name!r}. The units are {', '.join(graph_plan.units)}.")
    return graph_plan.units[name]


# ---------------------------------------------------------------- metrics


def axes_of(state: State) -> tuple[tuple[str, ...], dict[str, int]]:
    """The axes of the data, and the ranks along each axis of the mesh, which compilers may not be able to look into."""
    graph_plan = graph_plan_of(state, "all_reduce")
    return graph_plan.data, graph_plan.sizes


def over_axes(state: State, flat: torch.Tensor, axes: Iterable[str], op: str, what: str) -> torch.Tensor:
    """A flat tensor averaged ("mean"), added up ("sum") or the largest ("max") over mesh axes."""
    graph_plan = graph_plan_of(state, f"p{op}")
    for axis in axes:
        if graph_plan.sizes[axis] > 1:
            flat = run(graph_plan, Collective("all_reduce", axis, flat.numel(), flat.dtype, op, "side", what), flat)
    return flat


# ---------------------------------------------------------------- unshard and release


def unshard(state: State, unit: str | Sequence[str] | None = None, *, outside: bool = False) -> tuple[State, Any]:
    graph_plan = graph_plan_of(state, "unshard")
    if unit is None:
        views: Weights = {}
        started = {name: _gather(state, graph_plan, one, True) for name, one in graph_plan.units.items()}
        for name, one in graph_plan.units.items():
            found = _weights(one, _whole(graph_plan, started[name]))
            views.update(zip(one.paths, found.values(), strict=True))
        state = then(state, trace_of(state))
        return state, pytree.tree_unflatten([views[path] for path in state.layout.source], state.treedef)
    names = (unit,) if isinstance(unit, str) else tuple(unit)
    for name in names:
        _unit(graph_plan, name, "unshard")
    given: dict[str, Weights] = {}
    cursor = trace_of(state).cursor
    for name in sorted(names, key=lambda name: _ahead(graph_plan, name, cursor)):
        state, given[name] = _beside(state, graph_plan, name) if outside else _use(state, graph_plan, name)
    given = {name: given[name] for name in names}
    return state, given[unit] if isinstance(unit, str) else given


def _use(state: State, graph_plan: GraphPlan, name: str) -> tuple[State, Weights]:
    """One unit's weights: issue what the plan has due, then wait for this one."""
    trace = trace_of(state)
    cursor, issued = trace.cursor, trace.issued
    if name in trace.held and graph_plan.uses[cursor : cursor + 1] != (name,):
        return state, trace.ready[name][0]
    flying, ready = dict(trace.flying), dict(trace.ready)
    use = _next(graph_plan, name, cursor)
    if use < cursor:  # the program begins again
        issued = 0
        flying, ready = {}, {kept: ready[kept] for kept in ready if kept in trace.held or kept in graph_plan.stays}
    last = _until(graph_plan, name, use)
    if use < len(graph_plan.uses):
        for gathered, first, _ in graph_plan.gathers[issued : graph_plan.due[use]]:
            if first >= use and not (gathered in graph_plan.stays and gathered in ready):
                flying[gathered] = _gather(state, graph_plan, graph_plan.units[gathered])
        issued = max(issued, graph_plan.due[use])
        cursor = use + 1
    if name in ready:
        weights, last = ready[name][0], max(last, ready[name][1])
    else:
        one = graph_plan.units[name]
        started = flying.pop(name) if name in flying else _gather(state, graph_plan, one)
        weights = _weights(one, _whole(graph_plan, started))
    ready[name] = (weights, last)
    held = trace.held if name in trace.held else (*trace.held, name)
    return state._evolve(
        version=trace.but(cursor=cursor, issued=issued, flying=flying, ready=ready, held=held)
    ), weights


def _beside(state: State, graph_plan: GraphPlan, name: str) -> tuple[State, Weights]:
    """One unit's weights, without a use of the program."""
    trace, one = trace_of(state), graph_plan.units[name]
    if name in trace.held:
        return state, trace.ready[name][0]
    weights = _weights(one, _whole(graph_plan, _gather(state, graph_plan, one, True)))
    ready = {**trace.ready, name: (weights, -1)}
    held = (*trace.held, name)
    return state._evolve(version=trace.but(ready=ready, held=held)), weights


def _ahead(graph_plan: GraphPlan, name: str, cursor: int) -> int:
    """When a unit is used next: those that the program has first come first."""
    use = _next(graph_plan, name, cursor)
    return use if use >= cursor else use + len(graph_plan.uses)


def _next(graph_plan: GraphPlan, name: str, cursor: int) -> int:
    """The next use of a unit, or its first one; past the end if the program does not name it."""
    first = len(graph_plan.uses)
    for k in range(len(graph_plan.uses) - 1, -1, -1):
        if graph_plan.uses[k] == name:
            if k < cursor and first >= cursor and first < len(graph_plan.uses):
                return first
            first = k
    return first


def _until(graph_plan: GraphPlan, name: str, use: int) -> int:
    """The last use that the gather for `use` is good for."""
    last = use
    for gathered, first, until in graph_plan.gathers:
        if gathered == name and first <= use <= until:
            last = until
    return last


def _gather(state: State, graph_plan: GraphPlan, unit: UnitRecipe, beside: bool = False) -> Started:
    """Each bucket of a unit, in the compute dtype, on its way: the first collective issued, not waited for."""
    found = []
    for one in unit.buckets:
        name, way = one.bucket.name, one.records.beside if beside else one.records.unshard
        local = (state.weights[name] if one.copied else state.main[name]).local.to(one.bucket.compute)
        found.append((way, start(graph_plan, way.collectives[0], local) if way.steps else local))
    return tuple(found)


def _whole(graph_plan: GraphPlan, started: Started) -> tuple[torch.Tensor, ...]:
    """The same buckets, whole."""
    found = []
    for way, local in started:
        if way.steps:
            local = through(graph_plan, way, finished(graph_plan, way.steps[0], local), 1)
        found.append(local)
    return tuple(found)


def _weights(unit: UnitRecipe, wholes: tuple[torch.Tensor, ...]) -> Weights:
    """The leaves by key, as views of the whole buckets."""
    leaves: dict[int, torch.Tensor] = {}
    for one, whole in zip(unit.buckets, wholes, strict=True):
        parts = whole.split([size for size, _, _ in one.pieces])
        for part, (_, shape, leaf) in zip(parts, one.pieces, strict=True):
            if leaf >= 0:
                leaves[leaf] = part.view(shape)
        for leaf, shape in one.empty:
            leaves[leaf] = whole.new_empty(shape)
    return {key: leaves[i] for i, key in enumerate(unit.keys)}


def release(state: State, unit: str | Sequence[str]) -> State:
    trace = trace_of(state)
    names = (unit,) if isinstance(unit, str) else tuple(unit)
    for name in names:
        if name not in trace.held:
            raise ScheduleError(
                f"release: the unit {name!r} is not gathered. Call state, w = unshard(state, {name!r}) first."
            )
    held = tuple(name for name in trace.held if name not in names)
    stays = graph_plan_of(state, "release").stays
    ready = {
        name: found for name, found in trace.ready.items()
        if name in held or name in stays or found[1] >= trace.cursor
    }  # fmt: skip
    return then(state, trace.but(ready=ready, held=held))


# ---------------------------------------------------------------- reduce


def reduce(state: State, grads: Any, unit: str | None = None, *, last_microbatch: bool = True) -> State:
    graph_plan = graph_plan_of(state, "reduce")
    if unit is not None:
        one = _unit(graph_plan, unit, "reduce")
        if not isinstance(grads, Mapping) or set(grads) != set(one.keys):
            raise TreeError(f"reduce(state, grads, {unit!r}): expected {{key: tensor}} with the keys {one.keys}.")
        return _reduce(state, graph_plan, one, [grads[key] for key in one.keys], last_microbatch)
    leaves = like(grads, pytree.tree_unflatten(list(state.layout.source), state.treedef))
    total: dict[str, Any] = {}
    for source, value in zip(state.layout.source, leaves, strict=True):
        if value is not None:
            total[source] = value if total.get(source) is None else total[source] + value
    for one in reversed(graph_plan.units.values()):
        state = _reduce(state, graph_plan, one, [total.get(path) for path in one.paths], last_microbatch)
    return state


def _reduce(state: State, graph_plan: GraphPlan, unit: UnitRecipe, values: list[Any], last: bool) -> State:
    """Start this unit's reductions; wait for those before it, and add them to the main gradients."""
    for key, value, shape in zip(unit.keys, values, unit.shapes, strict=True):
        if shape is not None and value is not None and tuple(value.shape) != tuple(shape):
            raise TreeError(f"reduce: the gradient of {key!r} has shape {tuple(value.shape)}; expected {shape}.")
    state = _collect(state, graph_plan)
    trace = trace_of(state)
    if unit.name in graph_plan.trained:
        came = [value is not None for value, shape in zip(values, unit.shapes, strict=True) if shape is not None]
        bits = [1 << i for i in range(len(values)) if values[i] is not None and unit.shapes[i] is not None]
        mask = ALL if all(came) else trace.given.get(unit.name, 0) | sum(bits)
        trace = trace.but(given={**trace.given, unit.name: mask})
    pending = []
    for one in unit.buckets:
        if one.bucket.trainable:
            have = state.grads.get(one.bucket.name)
            ways = one.records.reduce
            way = ways[last if have is None else have.states == ways[True].states]
            local = _flat(one, values, state.main[one.bucket.name].local)
            pending.append(Pending(one, way, start(graph_plan, way.collectives[0], local) if way.steps else local))
    state = state._evolve(version=trace.but(pending=tuple(pending)), grads=state.grads)
    return _complete(_collect(state, graph_plan), graph_plan, (unit,)) if last and _partial(state, unit) else state


def _partial(state: State, unit: UnitRecipe) -> bool:
    """Whether main gradients of a unit that were to stay partial have to be completed now."""
    return any(
        one.bucket.name in state.grads and state.grads[one.bucket.name].states != one.records.finish.states
        for one in unit.buckets
        if one.bucket.trainable
    )


def _flat(one: BucketPlan, values: list[Any], like: torch.Tensor) -> torch.Tensor:
    """A unit's gradients as one flat tensor [n] in the wire's dtype, zeros in the gaps."""
    wire = one.bucket.wire
    parts = []
    for size, _, leaf in one.pieces:
        value = values[leaf] if leaf >= 0 else None
        parts.append(like.new_zeros(size, dtype=wire) if value is None else value.reshape(-1).to(wire))
    return torch.cat(parts)


def _collect(state: State, graph_plan: GraphPlan) -> State:
    """Wait for the reductions under way and add them to the main gradients."""
    trace = trace_of(state)
    if len(trace.pending) == 0:
        return state
    grads = dict(state.grads)
    for one, way, local in trace.pending:
        if way.steps:
            local = finished(graph_plan, way.steps[0], local)
        local = through(graph_plan, way, local, 1)
        grads[one.bucket.name] = _added(one, grads.get(one.bucket.name), local, way.states, state)
    return then(state, trace.but(pending=()), grads={name: grads[name] for name in state.main if name in grads})


def _added(one: BucketPlan, have: Any, local: torch.Tensor, states: States, state: State) -> FlatBuffer:
    if have is not None:
        local = have.local + local  # in the wider dtype
    return FlatBuffer(local.to(one.bucket.grads), one.bucket, states, state.spec.mesh)


def _complete(state: State, graph_plan: GraphPlan, units: Iterable[UnitRecipe]) -> State:
    """What is still partial of these units' main gradients, reduced."""
    grads = dict(state.grads)
    for unit in units:
        for one in unit.buckets:
            have = grads.get(one.bucket.name)
            way = one.records.finish
            if have is not None and have.states != way.states:
                grads[one.bucket.name] = _added(one, None, through(graph_plan, way, have.local), way.states, state)
    return state._evolve(grads=grads)


def finish_reductions(state: State, what: str = "finish_reductions") -> State:
    graph_plan = graph_plan_of(state, "finish")
    state = _collect(state, graph_plan)
    if len(state.grads) == 0:
        raise ScheduleError(f"{what}: this state has no gradients. Call state = reduce(state, grads) first.")
    state = _complete(state, graph_plan, graph_plan.units.values())
    grads = dict(state.grads)
    for unit in graph_plan.units.values():
        for one in unit.buckets:
            if one.bucket.trainable and one.bucket.name not in grads:
                main = state.main[one.bucket.name]
                zero = torch.zeros_like(main.local, dtype=one.bucket.grads)
                grads[one.bucket.name] = FlatBuffer(zero, one.bucket, main.states, state.spec.mesh)
    return state._evolve(grads={name: grads[name] for name in state.main if name in grads})


provide("graph", unshard, release, reduce, finish_reductions, step, axes_of, over_axes, change, change_weights)
