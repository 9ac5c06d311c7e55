"""The verbs of a train step: unshard, release, reduce, step. State first in, state first out.

    state ── unshard ──▶ weights ── your loss, torch.func ──▶ gradients ── reduce ──▶ state.grads ── step ──▶ state

What each starts, and when, is the plan's to say (see `advance`, and `executor` for how); compute waits for what it
needs and nothing else. Which collective it is follows from the placement:

| verb    | zero3          | zero2          | zero1                | ddp                | hsdp                       |
|---------|----------------|----------------|----------------------|--------------------|----------------------------|
| unshard | all-gather     | -              | -                    | -                  | all-gather (shard)         |
| reduce  | reduce-scatter | reduce-scatter | reduce-scatter, last | all-reduce, last   | r.-s., then all-reduce     |
| step    | -              | all-gather     | all-gather           | -                  | -                          |

"last": once, on the last microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from .._common.calls import alone, provided, verb
from .._common.errors import ScheduleError, StaleStateError
from .._common.interrupts import arrive, guard, uninterruptible
from .._common.ranges import ranged
from .._common.torch_names import profiler, pytree
from .._optim.optimizer import check, put, tensors_of
from .._runtime.given import ALL, Leaves
from .._state.lineage import Version
from .._state.state import State
from .._state.update import Kept, apply_optimizer, counting, keep, may_step, put_back
from .._storage.gradients import of_tree, of_unit, refuse_zeros
from .._storage.weights import LentTree, gather, lent_leaves, refresh, whole_of

Weights = dict[str, torch.Tensor]


def no_unit(state: State, name: Any, verb: str) -> ScheduleError:
    return ScheduleError(f"{verb}: there is no unit {name!r}. The units are {', '.join(map(repr, state.units))}.")


# ---------------------------------------------------------------- unshard and release


@overload
def unshard(state: State) -> tuple[State, Any]: ...
@overload
def unshard(state: State, unit: str, *, outside: bool = False) -> tuple[State, Weights]: ...  # type: ignore[overload-overlap]
@overload
def unshard(state: State, unit: Sequence[str], *, outside: bool = False) -> tuple[State, dict[str, Weights]]: ...
@verb(provided("graph.unshard"))
def unshard(state: State, unit: str | Sequence[str] | None = None, *, outside: bool = False) -> tuple[State, Any]:
    """Gather weights: shards [n / ranks] -> leaves of their global shapes, in the compute dtype. What is gathered in
    float8 is a `Float8Weight`.

    Args:
        state: the newest state of a step, or the state between steps.
        unit: None for the whole tree; the name of one unit; or several names.
        outside: this is no use of the schedule, even if it expects one. The unit is gathered into bytes of its own, the
            same ones each time, and compute waits for it; every rank must do the same.

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
    lineage = state.version.lineage
    if unit is None:
        lineage.enter(state.version.serial, "unshard")
        state = lineage.advance(state, "unshard()", busy=False)
        views: dict[str, torch.Tensor] = {}
        lineage.touched()
        with lineage.off_plan(state):
            own = {name: scale.clone() for name, scale in state.scales.items()}  # those of a state change with it
            lent = []
            for bucket in state.layout.buckets.values():
                whole = whole_of(state, bucket)
                if whole is None:
                    whole = gather(state, bucket)
                    views |= lent_leaves(bucket, whole, own)
                else:
                    views |= lent_leaves(bucket, whole, state.scales)
                lent.append((bucket, whole))
        lineage.check_lent()
        lineage.lend(LentTree(lent))
        return state, state.treedef.unflatten([views[path] for path in state.layout.source])

    names = (unit,) if isinstance(unit, str) else tuple(dict.fromkeys(unit))
    for name in names:
        if name not in state.layout.by_name:
            raise no_unit(state, name, "unshard")
    lineage.enter(state.version.serial, "unshard")
    executor = lineage.executor or state._executor
    move = executor.gathers.plan_unshard(names, outside)
    with lineage.call:
        weights = executor.unshard(state, names, move)
        new = lineage.advance(state, ("unshard", names), executor.reductions.grads or state.grads)
    return new, weights[unit] if isinstance(unit, str) else weights


@verb(provided("graph.release"))
def release(state: State, unit: str | Sequence[str]) -> State:
    """Give back a unit's gathered weights. They must not be used until the unit is gathered again, to the same tensors.

    Nothing waits: the gather that reuses the bytes waits, on its own lane, until compute has passed this point. A unit
    that the schedule keeps stays gathered. `Schedule(debug=True)` fills the bytes with NaN.

    Raises:
        ScheduleError: an unknown unit, or one that is not gathered.
    """
    names = (unit,) if isinstance(unit, str) else tuple(dict.fromkeys(unit))
    for name in names:
        if name not in state.layout.by_name:
            raise no_unit(state, name, "release")
    lineage = state.version.lineage
    lineage.enter(state.version.serial, "release")
    executor = lineage.executor or state._executor
    move = executor.gathers.plan_release(names)
    if executor.gathers.written:
        lineage.check_lent()
    with lineage.call:
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
    lineage = state.version.lineage
    if unit is not None:
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
        reductions = executor.reductions
        move = reductions.plan_reduce(one.name) if values else None
        with lineage.call:
            if state.grads is not reductions.grads:
                reductions.set_gradients(state.grads)
            if executor.sink.pending is not None:
                lineage.end_reads()
                executor.sink.begin(state)
            before = len(reductions.grads)
            if move is not None:
                if came == ALL:
                    reductions.given.full.add(one.name)
                else:
                    reductions.given.note(one.name, came)
                executor.reduce(state, one.name, values, last_microbatch, move)
            if before < len(reductions.grads) == len(state.layout.trainable):
                reductions.put_in_order()
            return lineage.advance(state, ("reduce", unit), reductions.grads)

    total = of_tree(state.layout, grads)
    if any(grad.is_inference() for grad in total.values()):
        refuse_zeros(total.values())
    lineage.enter(state.version.serial, "reduce")
    lineage.check_lent()
    executor = state._executor
    reductions = executor.reductions
    with lineage.call:
        reductions.set_gradients(state.grads)
        if executor.sink.pending is not None:
            lineage.end_reads()
            executor.sink.begin(state)
        executor.reduce_tree(state, total, last_microbatch)
        reductions.put_in_order()
        return lineage.advance(state, "reduce()", reductions.grads)


def has_gradients(state: State, what: str) -> None:
    if not state.layout.trainable:
        raise ScheduleError(f"{what}: nothing is trainable: every leaf is frozen. See print(state.layout).")
    if not state.grads and not (state.version.lineage.executor and state.version.lineage.executor.reductions.early):
        raise ScheduleError(f"{what}: this state has no gradients. Call state = reduce(state, grads) first.")


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
    reductions = executor.reductions
    with state.version.lineage.call:
        reductions.set_gradients(state.grads)
        complete = reductions.complete
        if not complete:
            executor.finish(state, step=False)
        before = reductions.grads
        reductions.put_in_order()
        executor.settle()
        if not complete or reductions.grads is not before:
            state = state.version.lineage.advance(state, "finish_reductions()", reductions.grads)
    return state


# ---------------------------------------------------------------- step


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
    with lineage.call:
        executor.reductions.set_gradients(state.grads)
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
    vote = lineage.runtime.vote(executor.digest, executor.reductions.given.vote())
    trainable = state.layout.trainable
    main = {name: state.main[name] for name in trainable}
    copies = [state.weights[name].local for name in trainable if name in state.weights]
    touched = [buffer.local for buffer in main.values()] + tensors_of(state.opt) + copies
    versions = [leaf._version for leaf in touched]
    compare = lineage.runtime.compare
    if profiler._is_profiler_enabled:
        compare = ranged(compare, "vote")
    try:
        lacking = executor.reductions.given.agree(lineage.runtime, compare(vote))
    except ScheduleError:
        lineage.call.unchanged()
        raise
    if executor.run.lanes.waits_on_host:  # that may fail: before all commit
        executor.settle()
    if executor.sink.consumers:
        executor.sink.check(state, None, lacking.anywhere)
    opt = counting(state, lacking, executor.run.capturing)
    if opt is not state.opt:  # compute makes counts now, which updates read
        executor.sink.touched()
    before = keep(state, lacking.given, warns=True)
    new = _take(state._evolve(opt=opt), main, skip, lacking.given, before, touched, versions)
    if lacking.anywhere:  # the same on every rank
        executor.sink.note_lacking(lacking.anywhere)
    return new


@uninterruptible
def _take(
    state: State, main: Any, skip: Any, given: Leaves, before: Kept, touched: list[torch.Tensor], versions: list[int]
) -> State:
    """The step itself, from the moment on in which ranks cannot take it back. An interrupt waits."""
    lineage = state.version.lineage
    executor = state._executor
    guard()
    gate = lineage.runtime.gate
    given_grads = [buffer.local for buffer in executor.reductions.grads.values()]
    as_given = [grad._version for grad in given_grads]
    lineage.runtime.confirm()
    try:
        kept = skip if gate is None else gate.decided(skip)
        update = ranged(apply_optimizer, "update") if profiler._is_profiler_enabled else apply_optimizer
        new_main, new_opt = update(state, main, kept, given)
        opt = state.opt
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
            executor.reductions.staging.keep_errors(kept)
        state.count.add_(1 if kept is None else ~kept)
        if skip is not None and lineage.offset is not None:
            lineage.offset.add_(skip if gate is None else gate.stands(skip))
        executor.commit()
        new = state._evolve(grads={}, opt=opt, version=Version(lineage, lineage.latest + 1))
        lineage.commit(state.version, new)
    except BaseException as error:
        if versions == [leaf._version for leaf in touched]:
            if as_given == [grad._version for grad in given_grads]:  # else the step has to begin anew
                lineage.call.unchanged()
        else:
            lineage.give_up(
                f"step() number {lineage.steps + 1} was stopped by {type(error).__name__} while it was updating the "
                f"weights, so this State is half updated. Load the last checkpoint."
            )
            if getattr(state.optimizer, "communicates", False):  # peers wait for what will not come
                lineage.runtime.lose(f"{lineage.broken} It said: {error}")
        raise
    arrive(lineage.others_begun())
    return new


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
    found: State = base
    return found


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
