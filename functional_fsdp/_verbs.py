"""The verbs of a train step: unshard, release, reduce, step; and how a step starts over.

    state ── unshard ──▶ weights ── your loss, torch.func ──▶ gradients ── reduce ──▶ state.grads ── step ──▶ state

State first in, state first out. What `unshard`, `release` and `reduce` start, and when, is the plan's to say (see
`advance`, and `executor` for how); compute waits for what it needs and nothing else. Which collective it is follows
from the placement:

| verb    | zero3          | zero2          | zero1                | ddp                | hsdp                       |
|---------|----------------|----------------|----------------------|--------------------|----------------------------|
| unshard | all-gather     | -              | -                    | -                  | all-gather (shard)         |
| reduce  | reduce-scatter | reduce-scatter | reduce-scatter, last | all-reduce, last   | r.-s., then all-reduce     |
| step    | -              | all-gather     | all-gather           | -                  | -                          |

"last": once, on the last microbatch.

`step`, which comes first in the file, asks ranks and an optimizer:

    checks ── finish reductions ── vote ── confirm ── update, in place ── compute copies ── the next state
    nothing has changed                 │  from here on ranks cannot take the step back

Until then a step starts over (`newest`, `drop_gradients`). The update itself, by `Schedule(overlap_update=True)`:

    reduce lane   ── bucket 3 ──┬── bucket 2 ──┬── bucket 1 ──┐
    update lane                 └── update 3 ──┴── update 2 ──┴── update 1 ──┐
    compute       ── backward of 2 ── of 1 ── of 0 ──                        └── the step is over

Else compute updates everything after the backward. Leaves that got no gradient stay as they are: the optimizer leaves
them out (`update_some`), or they are kept and put back. A traced step (`_graph/traced.py`) has the same parts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import cache, partial
from operator import is_
from typing import Any, overload

import torch

from ._common.calls import alone, arrive, guard, provided, ranged, uninterruptible, verb
from ._common.errors import ScheduleError, StaleStateError, TreeError, expect
from ._common.record import Collective, Mark, Steps
from ._common.torch_names import foreach_copy_, profiler, pytree
from ._optim.optimizer import Sender, check, in_own_dicts, put, runs, tensors_of
from ._plan.plan import copied_alike
from ._runtime.agreement import ALL, WHOLE, Lacking, Leaves, NewCounts
from ._state.state import State, Version
from ._storage import VERSION, FlatBuffer, LentTree, gather, lent_leaves, of_tree, of_unit, own_part, read, refresh

NOTHING = WHOLE.given
_stream = provided("host_memory.stream")  # the update of what lies in the host's memory
Kept = list[tuple[torch.Tensor, torch.Tensor]]
Main = dict[str, FlatBuffer]


def has_gradients(state: State, what: str) -> None:
    if not state.layout.trainable:
        raise ScheduleError(f"{what}: nothing is trainable: every leaf is frozen. See print(state.layout).")
    if not state.grads and not (state.version.lineage.executor and state.version.lineage.executor.reductions.early):
        raise ScheduleError(f"{what}: this state has no gradients. Call state = reduce(state, grads) first.")


@verb(provided("graph.step"))
def step(state: State, *, skip: torch.Tensor | bool | None = None) -> State:
    """Update main weights with the optimizer, refresh the compute copies, and drop the gradients. Consumes `state`.

    Args:
        skip: a bool tensor [], the same on every rank. Where it is true, weights, optimizer state and count stay what
            they are (see `transforms.skip_nonfinite`); nothing waits for it. Or a bool, which ranks compare.

    A leaf that got a gradient on no rank, in no microbatch, keeps its weights and its optimizer state, as torch.optim
    has it with `grad=None`: no decay, no momentum, and AdamW corrects its bias by the steps in which it got one. Zeros,
    as torch.func gives them for what a loss does not depend on, are gradients. Gradients that came without `reduce`
    (put into the state by hand) count for all leaves.

    Everything is checked first, and every rank votes before anything changes (on the host; devices are not
    synchronised). The buffers of the state are reused, so the states of this step raise StaleStateError from here on.

    An interrupt (SIGINT) before ranks have voted costs nothing. One that comes after it waits until the caller has the
    new state: until the first verb that is given it, or until the caller has come to another line. Then it comes
    through, by the program's own handler; a second one, a second later, comes through at once. `newest` gives the new
    state again if it was lost all the same.

    Raises:
        ScheduleError: no gradients, no optimizer, or ranks that issued different collectives.
        StaleStateError: a consumed state. SpecError: in debug mode, in the first step, a leaf whose gradients along an
            axis of the model's own are not what `Spec(own=)` says of them.

    Collective: what `reduce` left unfinished; an all-gather a bucket where weights are less sharded than main weights;
    one all-reduce of a number a leaf, along each axis that shards them, for those that are gathered in float8;
    on the host two votes, and if no rank has a gradient for every leaf an all-reduce of a byte a leaf.
    """
    skips = skip is True
    skip = may_step(state, skip)
    state._valid("step")
    has_gradients(state, "step")
    lineage = state.version.lineage
    lineage.enter(state.version.serial, "step")
    state._executor.gathers.note_written()
    lineage.check_lent()
    if lineage.reads is not None:
        lineage.end_reads()
    if skips:
        lineage.runtime.remark("step(skip=True)")
    executor = state._executor
    with lineage:
        if state.grads is not executor.sink.grads:
            executor.sink.set_gradients(state.grads)
        if executor.sink.consumers:
            executor.sink.check(state, skip)
        executor.finish(state)
        if lineage.runtime.gate is not None:
            lineage.runtime.gate.join()
        executor.reductions.compare_equal()
        try:
            return _vote_and_take(state, skip)
        except BaseException as error:
            lineage.runtime.withdraw(error)
            raise


def _vote_and_take(state: State, skip: Any) -> State:
    """The step, once what `reduce` left is finished: ranks vote, and take it if all have done the same."""
    lineage, executor = state.version.lineage, state._executor
    vote = lineage.runtime.vote(lineage.identity, executor.digest, executor.reductions.given.vote())
    trainable = state.layout.trainable
    main = {name: state.main[name] for name in trainable}
    copies = [state.weights[name].local for name in trainable if name in state.weights]
    owned = versions_of([buffer.local for buffer in main.values()] + tensors_of(state.opt) + copies)
    compare = lineage.runtime.compare
    if profiler._is_profiler_enabled:
        compare = ranged(compare, "vote")
    try:
        lacking = executor.reductions.given.agree(lineage.runtime, compare(vote))
    except ScheduleError:
        lineage.unchanged()
        raise
    if executor.run.lanes.waits_on_host:  # that may fail: before all commit
        executor.settle()
    if executor.sink.consumers:
        executor.sink.check(state, None, lacking.anywhere)
    opt = counting(state, lacking, executor.run.capturing)
    if opt is not state.opt:  # compute makes counts now, which updates read
        executor.sink.touched()
    before = keep(state, lacking.given, warns=True)
    new = _take(state._evolve(opt=opt), main, skip, lacking.given, before, owned)
    if lacking.anywhere:  # the same on every rank
        executor.sink.note_lacking(lacking.anywhere)
    return new


Versions = tuple[Sequence[torch.Tensor], list[int]]  # of tensors, as they were


def versions_of(tensors: Sequence[torch.Tensor]) -> Versions:
    return tensors, [*map(VERSION, tensors)]


def written_since(before: Versions) -> bool:
    """Whether an operation has written into one of the tensors."""
    tensors, versions = before
    return [*map(VERSION, tensors)] != versions


@uninterruptible
def _take(state: State, main: Main, skip: Any, given: Leaves, before: Kept, owned: Versions) -> State:
    """The step itself, from the moment on in which ranks cannot take it back. An interrupt waits."""
    lineage = state.version.lineage
    guard()
    gradients = versions_of([buffer.local for buffer in state._executor.sink.grads.values()])
    lineage.runtime.confirm()
    try:
        new = _next_state(state, main, skip, given, before)
    except BaseException as error:
        if written_since(owned):
            _give_up(state, error)
        elif not written_since(gradients):  # else the step has to begin anew
            lineage.unchanged()
        raise
    arrive(lineage.others_begun())
    return new


def _next_state(state: State, main: Main, skip: Any, given: Leaves, before: Kept) -> State:
    """Update what the state owns. Returns the state that has it from here on."""
    lineage, executor, opt = state.version.lineage, state._executor, state.opt
    gate = lineage.runtime.gate
    kept = skip if gate is None else gate.decided(skip)
    update = ranged(apply_optimizer, "update") if profiler._is_profiler_enabled else apply_optimizer
    new_main, new_opt = update(state, main, kept, given)
    same = new_main is main and all(main[name] is state.main[name] for name in state.layout.trainable)
    if not same or new_opt is not opt:  # else it was all done in place
        check(main, new_main, "main")
        check(opt, new_opt, "opt")
        _, opt = _install((main, opt), (new_main, new_opt))
    put_back(before)
    if state.weights:
        there = executor.sink.renewed_copies(before)
        refresh(state.main, state.weights, state.scales, trainable_only=True, there=there)
    if state.residual:
        executor.reductions.feedback.keep(kept, given)
    state.count.add_(1 if kept is None else ~kept)
    if skip is not None and lineage.offset is not None:
        lineage.offset.add_(skip if gate is None else gate.stands(skip))
    executor.commit()
    new = state._evolve(grads={}, opt=opt, version=Version(lineage, lineage.latest + 1))
    lineage.commit(state.version, new)
    return new


def _give_up(state: State, error: BaseException) -> None:
    """The update was stopped in its middle: states of the lineage are of no more use."""
    lineage = state.version.lineage
    lineage.give_up(
        f"step() number {lineage.steps + 1} was stopped by {type(error).__name__} while it was updating the weights, "
        "so this State is half updated. Load the last checkpoint."
    )
    if getattr(state.optimizer, "communicates", False):  # peers wait for what will not come
        lineage.runtime.lose(f"{lineage.broken} It said: {error}")


def _install(old: Any, new: Any) -> Any:
    """Put an optimizer's result into the buffers that the state owns, so that their addresses never change."""
    old_leaves, treedef = pytree.tree_flatten(old)
    new_leaves = pytree.tree_leaves(new)
    owned = [a for a in old_leaves if isinstance(a, torch.Tensor)]
    moved = []
    for i, (a, b) in enumerate(zip(old_leaves, new_leaves, strict=True)):
        if isinstance(a, torch.Tensor):
            new_leaves[i] = a
            if a is not b and a.data_ptr() != b.data_ptr():
                moved.append((a, b))
    put(moved, owned)
    return pytree.tree_unflatten(new_leaves, treedef)


# ---------------------------------------------------------------- what is checked, and what is kept


def may_step(state: State, skip: torch.Tensor | bool | None) -> torch.Tensor | None:
    """Refuse a step that cannot be taken. Returns whether to skip it, on the state's device; None for False."""
    if isinstance(skip, bool):
        skip = torch.full((), True, device=state.count.device) if skip else None
    elif skip is not None and (not isinstance(skip, torch.Tensor) or skip.dtype is not torch.bool or skip.dim()):
        had = f"shape {tuple(skip.shape)} and dtype {skip.dtype}" if isinstance(skip, torch.Tensor) else repr(skip)
        raise TreeError(f"step: skip has {had}; expected a bool, or a tensor of shape [] and torch.bool.")
    elif skip is not None and skip.device != state.count.device:
        raise TreeError(f"step: skip is on {skip.device}; expected the state's device, {state.count.device}.")
    if state.optimizer is None:
        raise ScheduleError(
            "step: this state has no optimizer. Give one to shard(params, spec, optimizer), as fsdp.adamw(lr=3e-4)."
        )
    return skip


def counting(state: State, lacking: Lacking, capturing: bool = False) -> Any:
    """The optimizer's state, with counts for the buckets in which a leaf got no gradient, if it keeps some.

    Raises:
        NewCounts: while a step is captured, if there were none before.
    """
    optimizer, opt = state.optimizer, state.opt
    if not (lacking.anywhere and hasattr(optimizer, "counting")):
        return opt
    names = counted(state)
    if all(name in names for name in lacking.anywhere):
        return opt
    grown = with_counts(state, (*names, *lacking.anywhere))
    if len(counted(grown)) == len(names):
        return opt
    if capturing:
        raise NewCounts(
            "cuda_graph: leaves that got a gradient in every step so far got none in the step that is captured, and "
            f"the optimizer counts their steps from now on (in {', '.join(map(repr, lacking.anywhere[:3]))})."
        )
    return grown.opt


def counted(state: State) -> tuple[str, ...]:
    """The buckets of which the optimizer counts steps by leaf."""
    return tuple(state.optimizer.counted(state.opt)) if hasattr(state.optimizer, "counted") else ()


def with_counts(state: State, names: Iterable[str]) -> State:
    """The state with counts for these buckets and no others: those that it has, zeros for new ones."""
    if not hasattr(state.optimizer, "counting"):
        return state
    main = {name: state.main[name] for name in state.layout.trainable}
    return state._evolve(opt=state.optimizer.counting(state.opt, main, names))


def keep(state: State, given: Leaves, warns: bool = False) -> Kept:
    """Of an optimizer that does not leave out leaves by itself: where their weights and its FlatBuffers are, and copies
    of them. `warns`: of what it keeps elsewhere."""
    if not given or hasattr(state.optimizer, "update_some"):
        return []
    nodes = pytree.tree_leaves((state.main, state.opt), is_leaf=lambda x: isinstance(x, FlatBuffer))
    views = []
    for buffer in nodes:
        if isinstance(buffer, FlatBuffer):
            name = buffer.bucket.name
            some = given.get(name)
            if some is not None and buffer.bucket.numel == state.layout.buckets[name].numel:
                views += [view for _, view in buffer.by_label([not one for one in some])]
        elif isinstance(buffer, torch.Tensor) and buffer.numel() > 1 and warns:
            warnings.warn(
                f"step: {type(state.optimizer).__name__} keeps a tensor {tuple(buffer.shape)} that is no FlatBuffer, "
                "so it is not known which leaf it belongs to. Leaves that got no gradient in this step keep their "
                "weights, but there it sees zeros for them. Make such state by tree_map over main weights.",
                stacklevel=5,
            )
    return [(view, view.clone()) for view in views if view.numel()]


def put_back(kept: Kept) -> None:
    """What `keep` has copied."""
    if kept:
        foreach_copy_([view for view, _ in kept], [copy for _, copy in kept])


# ---------------------------------------------------------------- the update


def apply_optimizer(state: State, main: Main, skip: torch.Tensor | None, given: Leaves) -> tuple[Any, Any]:
    """The update of all, eagerly: on GPUs in parts, as gradients come, if the optimizer is one for parts. A stream
    waits, the host does not. Compute has waited for all of it at the end, also where it raises."""
    executor = state._executor
    sink = executor.sink
    if sink.consumers or sink.updated_beside or sink.renewed:  # of this step, or of the one before
        sink.begin_update(name for name, one in sink.consumers.items() if one.used and copied_alike(main[name].bucket))
    left = {n: b for n, b in main.items() if not sink.used_up(b.bucket.name)} if sink.consumers else main
    try:
        new, opt = _applied(state, left, skip, given)
        return main if new is left else new, opt
    except BaseException:  # what lanes have begun reads and writes what may be let go now
        for lane in ("fetch", "update", "store"):
            executor.run.lanes.join(lane)
        sink.renewed_copies(())
        raise


def _applied(state: State, main: Main, skip: torch.Tensor | None, given: Leaves) -> tuple[Any, Any]:
    executor, optimizer = state._executor, state.optimizer
    if not getattr(optimizer, "by_bucket", False) or not (skip is None or hasattr(optimizer, "update_unless")):
        executor.settle()
        return update(state, executor.sink.grads, main, skip, given)
    left = main if executor.run.lanes.waits_on_host else _while_gradients_come(state, main, skip, given)
    executor.settle()
    near = {name: buffer for name, buffer in left.items() if not buffer.bucket.on_host}
    if near:
        in_place(state, near, skip, given)
    if far := [name for name in left if name not in near]:
        _stream(state, far, skip, given)
        executor.settle()
    return main, state.opt


def _while_gradients_come(state: State, main: Main, skip: torch.Tensor | None, given: Leaves) -> Main:
    """Update what has its gradients, on a lane or by compute, while others are on their way. Returns what is left."""
    executor = state._executor
    left = _beside(state, main, given) if state.spec.schedule.overlap_update and skip is None else main
    late = executor.reductions.staging.late()
    if late is None or getattr(state.optimizer, "communicates", False):  # who communicates does so once
        return left
    early = {name: buffer for name, buffer in left.items() if name not in late and not buffer.bucket.on_host}
    if early:
        executor.run.lanes.wait(executor.gathers.newest)  # a gather may be reading weights still
        in_place(state, early, skip, given)
    return {name: buffer for name, buffer in left.items() if name not in early}


def in_place(
    state: State,
    main: Main,
    skip: torch.Tensor | None = None,
    given: Leaves = NOTHING,
    grads: Any = None,
) -> None:
    new, opt = update(state, state._executor.sink.grads if grads is None else grads, main, skip, given)
    for what, old, one in (("main", main, new), ("opt", state.opt, opt)):
        if one is not old and not _same_tensors(old, one):
            raise TreeError(
                f"step: {type(state.optimizer).__name__} says by_bucket = True, and its update returned other tensors "
                f"in {what} than it was given; expected them changed in place. Change them (p.copy_(...)), or leave "
                "by_bucket out."
            )


def _same_tensors(old: Any, new: Any) -> bool:
    before, after = tensors_of(old), tensors_of(new)
    return len(before) == len(after) and all(map(is_, before, after))


def _beside(state: State, main: Main, given: Leaves = NOTHING) -> Main:
    """Update on a lane what only lanes have touched since its gradients came. Returns what is left for compute: where
    leaves have no gradient, compute has just made or copied something."""
    executor = state._executor
    lanes, staging, sink = executor.run.lanes, executor.reductions.staging, executor.sink
    shards = (name for name in sink.untouched if main[name].sharded() and not main[name].bucket.lent_as_stored)
    alone = [name for name in shards if name not in given]  # all others compute reads
    sizes = {name: main[name].local.nbytes for name in alone if not main[name].bucket.on_host}
    far = [name for name in alone if name not in sizes and main[name].bucket.placement.weights]
    sink.note_beside([name for name in sizes if not staging.seen.get(name)])
    for some in runs(state.optimizer, state.opt, sizes):
        job = _portion(state, {name: main[name] for name in some}, [sink.untouched[name] for name in some])
        staging.ends("update", lanes.enqueue("update", job))
    if far:
        _stream(state, far, None, given, beside=True)
    return {name: buffer for name, buffer in main.items() if name not in sizes and name not in far}


def _portion(state: State, main: Main, after: Sequence[Mark]) -> Steps:
    for mark in after:
        state._executor.run.lanes.wait(mark)  # the lane does: it is the current one
    in_place(state, main)
    state._executor.sink.renew(name for name, buffer in main.items() if renew(state, buffer))
    yield from ()


def renew(state: State, main: FlatBuffer) -> bool:
    """Cast main weights, or a cut of them, to their part of the compute copy, if the rank has no other. Returns whether
    it does."""
    if not copied_alike(main.bucket):
        return False
    own_part(main, state.weights[main.bucket.name]).copy_(main.local)
    return True


def update(
    state: State,
    reduced: Any,
    main: Any,
    skip: torch.Tensor | None,
    given: Leaves = NOTHING,
    sender: Sender | None = None,
) -> tuple[Any, Any]:
    """The optimizer's update of these main weights; with `skip`, of which only what the tensor says is there after.
    Leaves without a gradient are left out if the optimizer can. `sender`: what it communicates by, if not the lanes."""
    optimizer, opt = state.optimizer, state.opt
    grads = {name: reduced[name] for name in main}
    for name, buffer in main.items():
        if grads[name].local.dtype is not buffer.local.dtype:
            grads[name] = grads[name].but(grads[name].local.to(buffer.local.dtype))
    args: tuple[Any, ...] = (grads, opt, main, state.count)
    if getattr(optimizer, "communicates", False):
        args = (*args, _by_lanes(state) if sender is None else sender)
    if given and hasattr(optimizer, "update_some"):
        return optimizer.update_some(given, skip, *args)
    call = optimizer.update
    if skip is not None and hasattr(optimizer, "update_unless"):
        call, skip = partial(optimizer.update_unless, skip), None
    if skip is None:
        return call(*args) if hasattr(optimizer, "update_some") else in_own_dicts(call, *args)
    before = pytree.tree_map_only(torch.Tensor, torch.clone, (main, opt))
    after = in_own_dicts(call, *args)

    def choose(old: Any, new: Any) -> Any:
        return torch.where(skip, old, new) if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor) else new

    return pytree.tree_map(choose, before, after)


def _by_lanes(state: State) -> Sender:
    run = state._executor.run

    def send(one: Collective, given: torch.Tensor, splits: tuple[Sequence[int], Sequence[int]] | None) -> torch.Tensor:
        if splits is None:  # an all-reduce, which is in place
            out = given = given.clone()
        else:
            out = given.new_empty(sum(splits[0]))
        run.now(one, out, given)
        return out

    return Sender(tuple(run.coordinate.items()), run.sizes, send)


# ---------------------------------------------------------------- where a step was lost, or starts over


def newest(state: State) -> State:
    """The state that the last `step` of this one's lineage returned: where an interrupt, or an error of the caller's,
    came between that and the assignment. Changes nothing, and waits for nothing.

    Where `redistribute`, `freeze` or `unfreeze` took what the state held, it is what they returned, or the last step
    from there on. So whoever holds the old state keeps the memory of that one.

    Args:
        state: any state of the lineage, also a consumed one.

    Raises:
        StaleStateError: no step has been taken, and what `shard`, `init` or `load` gave is still valid; the last one
            was compiled, and keeps nothing; one was cut short while it updated the weights, or a verb that moves them.

    Example: `try: state = train_step(state, batch)`; `except KeyboardInterrupt: state = fsdp.newest(state)`.
    """
    expect("newest(state)", state, State, "a State", TypeError)
    lineage = [state.version.lineage, *state.version.lineage.successors][-1]
    lineage.valid(None, "newest")
    if lineage.taken is None:
        why = "no step of this state's lineage has been taken. The state that shard, init or load gave is valid"
        if lineage.commits:
            why = "the last step was one that torch.compile runs, which keeps nothing. Its state is what it returned"
        raise StaleStateError(f"newest: {why}.")
    new = object.__new__(State)
    new.__dict__.update(lineage.taken, version=Version(lineage, lineage.base))
    return new


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
    return base


Weights = dict[str, torch.Tensor]
SEVERAL = (tuple, list, Iterable)  # to look at those two alone takes a third of the time


def no_unit(state: State, name: Any, verb: str) -> ScheduleError:
    return ScheduleError(f"{verb}: there is no unit {name!r}. The units are {', '.join(map(repr, state.units))}.")


# ---------------------------------------------------------------- unshard and release


@overload
def unshard(state: State) -> tuple[State, Any]: ...
@overload
def unshard(state: State, unit: str) -> tuple[State, Weights]: ...  # type: ignore[overload-overlap]
@overload
def unshard(state: State, unit: Sequence[str]) -> tuple[State, dict[str, Weights]]: ...
@verb(provided("graph.unshard"))
def unshard(state: State, unit: str | Sequence[str] | None = None) -> tuple[State, Any]:
    """Gather weights: shards [n / ranks] -> leaves of their global shapes, in the compute dtype. What is gathered in
    float8 is a `Float8Weight`.

    Args:
        state: the newest state of a step, or the state between steps.
        unit: None for the whole tree; the name of one unit; or several names.

    Returns:
        The new state and the weights. The whole tree has the structure that was sharded, its tensors are yours as long
        as you hold them (where weights are replicated they are views of the state's own copy, which `step`
        overwrites); a tied leaf is one tensor at each of its paths, for which torch.func gives a gradient each (`bind`
        and `tie` keep it one). A unit's weights are `{path relative to the unit: tensor}`, borrowed until
        `release`; several units give `{unit: weights}`. Gathering a unit that is already gathered costs nothing.

    Raises:
        StaleStateError: a consumed state. ScheduleError: an unknown unit, or inside a torch.func transform.

    Collective: one all-gather a bucket and axis where weights are sharded; none where they are replicated.

    Example: `state, params = fsdp.unshard(state)`; `state, w = fsdp.unshard(state, "blocks.0")`.
    """
    if unit is None:
        return _unshard_tree(state)
    lineage = state.version.lineage
    names = (unit,) if isinstance(unit, str) or not isinstance(unit, SEVERAL) else tuple(dict.fromkeys(unit))
    for name in names:
        if name not in state.layout.by_name:
            raise no_unit(state, name, "unshard")
    lineage.enter(state.version.serial, "unshard")
    executor = lineage.executor or state._executor
    move = executor.gathers.plan_unshard(names)
    with lineage:
        weights = executor.unshard(state, names, move)
        new = lineage.advance(state, ("unshard", names), executor.sink.grads or state.grads)
    return new, weights[unit] if isinstance(unit, str) else weights


def _unshard_tree(state: State) -> tuple[State, Any]:
    """The weights of a whole tree, which no plan names."""
    lineage = state.version.lineage
    lineage.enter(state.version.serial, "unshard")
    state = lineage.advance(state, "unshard()", busy=False)
    views: dict[str, torch.Tensor] = {}
    lineage.touched()
    with lineage.off_plan(state):
        own = {name: scale.clone() for name, scale in state.scales.items()}  # those of a state change with it
        lent = []
        for bucket in state.layout.buckets.values():
            kept = read(state, bucket)
            if kept.sharded() or kept.local.dtype is not bucket.gather:
                whole = gather(state, bucket)
                views |= lent_leaves(bucket, whole, own)
            else:  # replicated: the state's own
                whole = kept.local
                views |= lent_leaves(bucket, whole, state.scales)
            lent.append((bucket, whole))
    lineage.check_lent()
    lineage.lend(LentTree(lent))
    return state, state.treedef.unflatten([views[path] for path in state.layout.source])


@verb(provided("graph.release"))
def release(state: State, unit: str | Sequence[str]) -> State:
    """Give back a unit's gathered weights. They must not be used until the unit is gathered again, to the same tensors.

    Nothing waits: the gather that reuses the bytes waits, on its own lane, until compute has passed this point. A unit
    that the schedule keeps stays gathered. `Schedule(debug=True)` fills the bytes with NaN.

    Raises:
        ScheduleError: an unknown unit, or one that is not gathered.
    """
    names = (unit,) if isinstance(unit, str) or not isinstance(unit, SEVERAL) else tuple(dict.fromkeys(unit))
    for name in names:
        if name not in state.layout.by_name:
            raise no_unit(state, name, "release")
    lineage = state.version.lineage
    lineage.enter(state.version.serial, "release")
    executor = lineage.executor or state._executor
    move = executor.gathers.plan_release(names)
    if executor.gathers.written:
        lineage.check_lent()
    with lineage:
        executor.release(state, names, move)
        return lineage.advance(state, ("release", names))


# ---------------------------------------------------------------- reduce


@verb(provided("graph.reduce"))
def reduce(state: State, grads: Any, unit: str | None = None, *, last_microbatch: bool = True) -> State:
    """Average gradients over the data ranks (or sum, by `Spec`) and add them to `state.grads`.

    Args:
        grads: as the weights that `unshard` gave: the whole tree, or a unit's `{relative path: tensor}`, leaves of
            global shape. They belong to the reduction from here on: do not change them in place. None means that a
            leaf has none: it adds nothing, and a leaf that gets none in a step, on any rank, stays as it is (see
            `step`). Gradients of frozen leaves are ignored; those of tied leaves add up; sparse ones are made dense.
        unit: None for the whole tree, or the unit that `grads` belong to.
        last_microbatch: False says that more microbatches follow, so that a placement which keeps whole gradients
            (`ddp`, `zero1`, and the outer axis of `hsdp` and `hfsdp`) can add them up locally first. A wrong flag costs
            time only, if it is the same on every rank: `step` finishes whatever is still partial.

    Returns:
        The new state: leaves of global shape -> shards [n / ranks of grads] in `Precision.grads`. Calls add up.

    Raises:
        TreeError: another structure, shape or a non-tensor, a complex or quantized gradient, before anything is sent;
            one on the meta device. StaleStateError, ScheduleError: also under `torch.inference_mode` where
            torch.func gives zeros there (torch 2.11).

    Collective: reduce-scatter where gradients are sharded, and on the last call what the placement's
    table row says; in the compute dtype.
    """
    if unit is None:
        return _reduce_tree(state, of_tree(state.layout, grads), last_microbatch)
    lineage = state.version.lineage
    one = state.layout.by_name.get(unit) if isinstance(unit, str) else None
    if one is None:
        raise no_unit(state, unit, "reduce")
    values, came = of_unit(one, grads)
    if values and values[-1] is not None and values[-1].is_inference():
        refuse_zeros(values)
    lineage.enter(state.version.serial, "reduce")
    if lineage.lent:
        lineage.check_lent()
    executor = lineage.executor or state._executor
    reductions, sink = executor.reductions, executor.sink
    move = reductions.plan_reduce(unit) if values else None
    with lineage:
        if state.grads is not sink.grads:
            sink.set_gradients(state.grads)
        if sink.pending is not None:
            lineage.end_reads()
            sink.begin(state)
        before = len(sink.grads)
        if move is not None:
            if came == ALL:
                reductions.given.full.add(unit)
            else:
                reductions.given.note(unit, came)
            executor.reduce(state, unit, values, last_microbatch, move)
        if before < len(sink.grads) == len(state.layout.trainable):
            sink.put_in_order()
        return lineage.advance(state, ("reduce", unit), sink.grads)


def refuse_zeros(grads: Iterable[torch.Tensor | None]) -> None:
    """Refuse inference tensors of zeros where torch.func gives these under `torch.inference_mode`, as in torch 2.11.

    Raises:
        ScheduleError: it does.
    """
    if _inference_gives_zeros() and not any(grad.any() for grad in grads if grad is not None):
        raise ScheduleError(
            f"reduce under torch.inference_mode: torch.func.grad gives zeros there in torch {torch.__version__}, with "
            "no error. Take the step outside of it; for weights without gradients use torch.no_grad."
        )


@cache
def _inference_gives_zeros() -> bool:
    with torch.inference_mode():
        grad: torch.Tensor = torch.func.grad(torch.square)(torch.ones((), device="cpu"))
        return not bool(grad)


def _reduce_tree(state: State, grads: dict[str, torch.Tensor], last_microbatch: bool) -> State:
    """The gradients of a whole tree, by path: a round of its own."""
    lineage = state.version.lineage
    if any(grad.is_inference() for grad in grads.values()):
        refuse_zeros(grads.values())
    lineage.enter(state.version.serial, "reduce")
    lineage.check_lent()
    executor = state._executor
    sink = executor.sink
    with lineage:
        sink.set_gradients(state.grads)
        if sink.pending is not None:
            lineage.end_reads()
            sink.begin(state)
        executor.reduce_tree(state, grads, last_microbatch)
        sink.put_in_order()
        return lineage.advance(state, "reduce()", sink.grads)


@verb(provided("graph.finish_reductions"))
def finish_reductions(state: State) -> State:
    """Make `state.grads` whole: every trainable bucket, each in its final placement. For whoever reads gradients.

    What was announced with `last_microbatch=False` is reduced now; a unit that got no gradient counts as zero, and is
    reduced like the others because its peers on other ranks may have got one. Called by `step`.

    Ranks vote in `step`, not here. Where they did different things in this step, so that `step` will refuse it, what
    this gives them may be other gradients on each rank.

    Raises:
        ScheduleError: there are no gradients at all.

    Collective: as `reduce`, for what was left over; none when nothing was.
    """
    has_gradients(state, "finish_reductions")
    state.version.lineage.enter(state.version.serial, "finish")
    executor = state._executor
    sink = executor.sink
    with state.version.lineage:
        sink.set_gradients(state.grads)
        complete = executor.reductions.complete
        if not complete:
            executor.finish(state, step=False)
        before = sink.grads
        sink.put_in_order()
        executor.settle()
        if not complete or sink.grads is not before:
            state = state.version.lineage.advance(state, "finish_reductions()", sink.grads)
    return state
