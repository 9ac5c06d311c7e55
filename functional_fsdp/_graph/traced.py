"""The verbs as torch.compile sees them: plain tensor operations and functional collectives, in one graph.

    unshard   cast the shard, all-gather; gathers that the plan has next are issued before this one is waited for
    release   the weights are forgotten: in a graph bytes are free when nothing uses them any more
    reduce    the gradients in one flat tensor, reduce-scatter, waited for when the next one comes
    step      the update as plain operations, written into the state's own buffers

What the verbs of a step know of each other (the cursor, what is in flight) travels in the state's version, a `Trace`.
Nothing in Python changes from one run to the next, so nothing recompiles; nothing votes either, since every rank runs
the same graph. Which leaves get no gradient is a part of that graph: ranks compare it once, when they trace
(`GraphPlan.lacking`).

Other changes in place, of gradients and of weights (`_extend`), are written as those of `step` are.

`GraphPlan`: what the traced verbs need of a layout, a plan and a mesh, worked out once, as tuples of plain values.

While torch.compile traces a step it runs Python slowly and guards what it reads; so nothing is planned there.

    layout + plan + mesh ──▶ GraphPlan ──▶ the verbs here: which collectives, of which group, cut where

`Trace`: the version of a state in the middle of a traced step, and what such a step may begin with.

It exists only while the step is traced. Where nothing is under way it is always the same, so that the rest of the step
may be another compiled function; an eager verb that is given one raises.

A collective's record is an operation of the graph, issued by `start` and waited for by `finished`. Those name their
group by a string and need no process group while they are traced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .._common.calls import provide, refuse, tracing_now
from .._common.errors import FsdpError, ScheduleError, StaleStateError, TreeError
from .._common.record import LANES, Collective
from .._common.torch_names import pytree
from .._optim.optimizer import Sender, check
from .._plan.layout import Bucket, Layout, Unit
from .._plan.plan import Records, keeps_copy, make_plan, records
from .._plan.route import Route, States, Step
from .._runtime.agreement import ALL, Lacking, Seats
from .._runtime.runtime import Runtime
from .._shared.torch_names import disable_current_modes, functional_collectives
from .._spec.spec import Spec
from .._storage import FlatBuffer, clear_padding
from .._verbs import counting, keep, may_step, put_back, update

if TYPE_CHECKING:
    from .._state.state import State

Groups = Mapping[tuple[str, str], str]  # (lane, axis) -> the name of the group


class BucketPlan(NamedTuple):
    """What happens to a bucket.

    copied: whether there is a compute copy between steps. records: which collectives.
    pieces: (elements, shape, which of the unit's leaves) in the order of the bucket; -1 is padding.
    empty: (which of the unit's leaves, shape) of leaves without elements.
    """

    bucket: Bucket
    copied: bool
    records: Records
    pieces: tuple[tuple[int, tuple[int, ...], int], ...]
    empty: tuple[tuple[int, tuple[int, ...]], ...]


class UnitRecipe(NamedTuple):
    """A unit's buckets, and the names of its leaves: in the unit, and in the tree."""

    name: str
    keys: tuple[str, ...]
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, ...]  # of the leaves that train
    buckets: tuple[BucketPlan, ...]


class GraphPlan:
    """All of it, and the program of gathers: uses, what is due at each, and how long a gather's bytes are good.

    Args:
        sizes, coordinate: of the mesh's axes, and this rank's place.
        groups: the communicators' names, by lane and axis.
    """

    def __init__(
        self, layout: Layout, spec: Spec, sizes: Mapping[str, int], coordinate: Mapping[str, int], groups: Groups,
        run: Runtime | None = None,
    ) -> None:  # fmt: skip
        for bucket in layout.buckets.values():
            packed = next((leaf for leaf in bucket.leaves if leaf.form is not None), None)
            if packed is not None:
                raise ScheduleError(
                    f"a step that is compiled whole does not gather packed leaves, as {packed.path!r} is, by "
                    f"{packed.form and packed.form.codec}. Compile the units: T.forward_backward(model, loss_fn, "
                    "compile=True), with T.cuda_graph around the step; or unpack it by another spec."
                )
            if bucket.codec is not None:
                raise ScheduleError(
                    f"a step that is compiled whole does not send gradients in a codec, as Precision(wire="
                    f"{bucket.codec}) says of {bucket.leaves[0].path!r}. Compile the units: T.forward_backward(model, "
                    "loss_fn, compile=True), with T.cuda_graph around the step; or leave wire out."
                )
            if bucket.in_float8 or bucket.gather_codec is not None:
                how = "in float8" if bucket.in_float8 else "in a codec"
                said = bucket.gather_codec or bucket.gather
                raise ScheduleError(
                    f"a step that is compiled whole does not gather {how}, as Precision(gather={said}) "
                    f"says of {bucket.leaves[0].path!r}. Compile the units: T.forward_backward(model, loss_fn, "
                    "compile=True), with T.cuda_graph around the step; or leave gather out."
                )
        self.sizes, self.coordinate, self.groups = dict(sizes), dict(coordinate), dict(groups)
        self.seats, self.run, self.layout = Seats(layout, sizes, coordinate), run, layout.hash
        self.trained = tuple(self.seats.units)
        self.data = spec.data
        self.average, self.traits = spec.average, spec.transport.traits._replace(gathers="gather")
        _ = layout.trainable  # cached: Dynamo does not trace the first time
        schedule = spec.schedule if spec.schedule.order != "recorded" else spec.schedule.ordered(None)
        program = make_plan(layout, schedule)
        self.uses = tuple(use.unit for use in program.uses)
        self.due, self.stays = program.due, program.stays
        self.gathers = tuple((gather.unit, gather.first, gather.last) for gather in program.gathers)
        self.units = {unit.name: self._unit(unit) for unit in layout.units}

    def group(self, lane: str, axis: str) -> str:
        """The name of a lane's communicator on an axis."""
        return self.groups[lane, axis]

    def lacking(self, masks: tuple[int, ...]) -> tuple[tuple[str, str], Any, tuple[str, ...]]:
        """The error to raise and its text, if any, and `Lacking`'s fields, of a step in which the leaves of `trained`
        got gradients by these masks; without any, all did.

        Called while a step is traced. Ranks that share a leaf must have gradients for it alike: their graphs cannot ask
        each other. They compare that when one of them first traces such a step.

        Collective, on the host: when masks are new to this layout.
        """
        noted = dict(zip(self.trained, masks or (ALL,) * len(self.trained), strict=True))
        mine = self.seats.row(noted)
        rows = [mine]
        if self.run is not None:
            try:
                with disable_current_modes():  # ranks really do it, while a graph is made
                    rows = _rows(self.run, self.layout, mine)
            except FsdpError as error:  # Dynamo would wrap it
                return (type(error).__name__, str(error)), (), ()
        lacking, parted, amiss = self.seats.lacking(bytes(map(max, *rows, mine))), self.seats.parted(rows), ("", "")
        if parted:
            amiss = (
                "ScheduleError",
                f"in this compiled step the leaf {parted!r} gets a gradient on some ranks only, and graphs cannot ask "
                "each other. Give zeros in the place of None there, or None on every rank.",
            )
        return amiss, tuple(lacking.given.items()), lacking.anywhere

    lacking._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch._dynamo.assume_constant_result's mark

    def _unit(self, unit: Unit) -> UnitRecipe:
        buckets = tuple(self._bucket(unit, bucket) for bucket in unit.buckets)
        return UnitRecipe(unit.name, unit.keys, unit.paths, unit.trains, buckets)

    def _bucket(self, unit: Unit, bucket: Bucket) -> BucketPlan:
        _ = bucket.labels, bucket.ranks, bucket.counts  # cached: Dynamo does not trace the first time
        leaf_at = dict(zip(bucket.leaf_pieces, bucket.leaves, strict=True))
        pieces = []
        for i, shape in enumerate(bucket.pieces):
            leaf = leaf_at.get(i)
            pieces.append((prod(shape), shape, -1 if leaf is None else unit.paths.index(leaf.path)))
        empty = tuple((unit.paths.index(leaf.path), leaf.shape) for leaf in bucket.empty)
        found = records(bucket, tuple(self.coordinate.items()), self.average, self.traits)
        return BucketPlan(bucket, keeps_copy(bucket), found, tuple(pieces), empty)


ONE_THREAD = "gloo_with_one_thread"
_ROWS: WeakKeyDictionary[Runtime, dict[tuple[str, bytes], list[bytes]]] = WeakKeyDictionary()


def _rows(run: Runtime, layout: str, row: bytes) -> list[bytes]:
    """Every rank's row of leaves with gradients. Collective, on the host, when the row is new to this layout."""
    known = _ROWS.setdefault(run, {})
    if (layout, row) not in known:
        known[layout, row] = run.everyone(row, "leaves with gradients")
    return known[layout, row]


def _group(run: Runtime, lane: str, axis: str) -> Any:
    """The communicator of a lane on an axis: on CPUs one for all traced lanes."""
    return run.extra_group(lane, axis, one_thread()) if lane == "traced" else run.groups[lane, axis]


def one_thread() -> str:
    """The name of a backend for `new_group`: gloo with one worker thread a group, for functional collectives.

    torch gives a group two, and a thread that has done a work writes the work's name into a string of the group's
    without a lock. Short names fit into the string itself; a functional all-gather's, "ALLGATHER_COALESCED", does not,
    so both threads now and then free the same old name, which corrupts the heap (seen with torch 2.13 on its own).
    """
    if ONE_THREAD not in dist.Backend.backend_list:
        dist.Backend.register_backend(ONE_THREAD, _gloo_with_one_thread, extended_api=True, devices=["cpu"])
    return ONE_THREAD


def _gloo_with_one_thread(group: Any, _: Any) -> Any:
    backend: Any = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options = backend._Options()
    options._devices = [backend.create_device(interface=name) for name in names] or [backend.create_default_device()]
    options._threads = 1
    options._timeout = group.timeout
    options.global_ranks_in_group, options.group_name = group.global_ranks_in_group, group.group_id
    return backend(group.store, group.group_rank, group.group_size, options)


def graph_plan(layout: Layout, spec: Spec, run: Runtime) -> GraphPlan:
    """The graph plan of a state that runs. Collective where a mesh of CPUs has none yet."""
    axes = [axis for axis, ranks in run.sizes.items() if ranks > 1]
    groups = {(lane, axis): _group(run, run.lanes.traced(lane), axis).group_name for lane in LANES for axis in axes}
    return GraphPlan(layout, spec, run.sizes, run.coordinate, groups, run)


provide("graph", graph_plan)


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


def change(
    state: State, what: str, work: Callable[[], None], by: Any = "", *, every_leaf: bool = False,
    keeps_zeros: bool = False,
) -> State:  # fmt: skip
    with torch.no_grad():
        work()
        if not keeps_zeros:
            clear_padding(state.grads.values())
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
        clear_padding(state.main.values())
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


def unshard(state: State, unit: str | Sequence[str] | None = None) -> tuple[State, Any]:
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
        state, given[name] = _use(state, graph_plan, name)
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


def like(grads: Any, tree: Any) -> list[Any]:
    """The leaves of `grads`, None among them, in the order of a tree of which only dicts may have another order.

    Raises:
        TreeError: they have different structures.

    >>> like({"b": 1, "a": [None, 2]}, {"a": ["x", "y"], "b": "z"})
    [None, 2, 1]
    """
    if isinstance(grads, dict) and isinstance(tree, dict) and set(grads) == set(tree):
        return [leaf for key in tree for leaf in like(grads[key], tree[key])]
    if isinstance(grads, (list, tuple)) and type(grads) is type(tree) and len(grads) == len(tree):
        return [leaf for one, other in zip(grads, tree, strict=True) for leaf in like(one, other)]
    leaves, treedef = pytree.tree_flatten(grads, is_leaf=lambda node: node is None)
    expected = pytree.tree_structure(tree)
    if treedef != expected:
        raise TreeError(f"reduce(state, grads): grads has the structure {treedef}; expected {expected}.")
    return leaves


def begin_compiled(state: Any) -> None:
    """A compiled step is about to begin with this state, and has what it goes by. Drops what a step that was abandoned
    has in flight.

    Raises:
        StaleStateError: it was consumed. ScheduleError: it is in the middle of a step.
    """
    lineage, version = state.version.lineage, state.version
    lineage.valid(version.serial, "a compiled step")
    if version.origin is not None or state.grads:
        raise ScheduleError(
            "a compiled step was given a State in the middle of a step. It begins with a state between steps: give it "
            "the one that the step began with, or the one that step() returned."
        )
    lineage.enter(version.serial, "a compiled step")
    lineage.end_reads()
    kind, said = lineage.for_graphs()
    if said:
        refuse(kind, said)


provide("graph", unshard, release, reduce, finish_reductions, step)
