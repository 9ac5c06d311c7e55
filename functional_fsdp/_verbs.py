"""The verbs of a train step: unshard, release, reduce, step; and pmean for metrics. State first in, state first out.

    state ── unshard ──▶ weights ── your loss, torch.func ──▶ gradients ── reduce ──▶ state.grads ── step ──▶ state

Each is one `redistribute` a bucket (see `_flat`); which collective that is follows from the placement:

| verb    | zero3          | zero2          | zero1                | ddp                | hsdp                       |
|---------|----------------|----------------|----------------------|--------------------|----------------------------|
| unshard | all-gather     | -              | -                    | -                  | all-gather (shard)         |
| reduce  | reduce-scatter | reduce-scatter | reduce-scatter, last | all-reduce, last   | r.-s., then all-reduce     |
| step    | -              | all-gather     | all-gather           | -                  | -                          |

"last": once, on the last microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast, overload

import torch
import torch.utils._pytree as pytree

from ._comm import runtime_of
from ._errors import ScheduleError, TreeError
from ._flat import FlatBuffer, leaves_of, write_leaves
from ._layout import Bucket, Unit
from ._route import Partial, states_of
from ._state import State, Token
from ._tree import flatten
from ._weights import Gathered, gather, refresh, whole_of

__all__ = ["finish", "pmean", "reduce", "release", "step", "unshard"]

F = TypeVar("F", bound=Callable[..., Any])
Weights = dict[str, torch.Tensor]


def _verb(fn: F) -> F:
    """A verb runs without autograd, and not inside a torch.func transform (collectives cannot be differentiated)."""

    @wraps(fn)
    def verb(*args: Any, **kwargs: Any) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise ScheduleError(
                f"{fn.__name__} was called inside a torch.func transform (grad, vjp, vmap, ...), which cannot see "
                "through a collective. Call unshard before the transform and reduce after it; inside, compute on the "
                "weights only."
            )
        if args and not isinstance(args[0], State):
            raise TypeError(f"{fn.__name__}(state, ...): the first argument is a State, not {type(args[0]).__name__}.")
        with torch.no_grad():
            return fn(*args, **kwargs)

    return cast(F, verb)


def _then(state: State, verb: str, **changes: Any) -> State:
    """The state after `verb`: consumes `state`, applies `changes`."""
    ledger = state.token.ledger
    return state.evolve(**changes, token=Token(ledger, ledger.advance(state.token.serial, verb)))


def _unit(state: State, name: Any, verb: str) -> Unit:
    try:
        return state.layout.by_name[name]
    except (KeyError, TypeError):
        raise ScheduleError(
            f"{verb}: there is no unit {name!r}. The units are {', '.join(map(repr, state.units))}."
        ) from None


# ---------------------------------------------------------------- unshard and release


@overload
def unshard(state: State) -> tuple[State, Any]: ...
@overload
def unshard(state: State, unit: str) -> tuple[State, Weights]: ...  # type: ignore[overload-overlap]
@overload
def unshard(state: State, unit: Sequence[str]) -> tuple[State, dict[str, Weights]]: ...
@_verb
def unshard(state: State, unit: str | Sequence[str] | None = None) -> tuple[State, Any]:
    """Gather weights: shards [n / ranks] -> leaves of their global shapes, in the compute dtype.

    Args:
        state: the newest state of a step, or the state between steps.
        unit: None for the whole tree; the name of one unit; or several names.

    Returns:
        The new state and the weights. The whole tree has the structure that was sharded, its tensors are yours as long
        as you hold them (where weights are replicated they are views of the state's own copy, which `step`
        overwrites). A unit's weights are `{path relative to the unit: tensor}`, borrowed until
        `release`; several units give `{unit: weights}`. Gathering a unit that is already gathered costs nothing.

    Raises:
        StaleStateError: a consumed state. ScheduleError: an unknown unit, or inside a torch.func transform.

    Collective: one all-gather a bucket and axis where weights are sharded; none where they are replicated.

    Example: `state, params = fsdp.unshard(state)`; `state, w = fsdp.unshard(state, "blocks.0")`.
    """
    if unit is None:
        state = _then(state, "unshard()")
        views: dict[str, torch.Tensor] = {}
        for bucket in state.layout.buckets.values():
            whole = whole_of(state, bucket)
            views |= leaves_of(bucket, gather(state, bucket) if whole is None else whole)
        return state, state.treedef.unflatten([views[path] for path in state.layout.source])

    names = [unit] if isinstance(unit, str) else list(unit)
    units = [_unit(state, name, "unshard") for name in names]
    state = _then(state, f"unshard({', '.join(map(repr, names))})")
    live = state.token.ledger.live
    for one in units:
        if one.name not in live:
            live[one.name] = Gathered(state, one)
        if not live[one.name].held:
            live[one.name].gather(state)
    found = {name: dict(live[name].weights) for name in names}
    return state, found[names[0]] if isinstance(unit, str) else found


@_verb
def release(state: State, unit: str | Sequence[str]) -> State:
    """Give back a unit's gathered weights. They must not be used until the unit is gathered again, to the same tensors.

    Raises:
        ScheduleError: an unknown unit, or one that is not gathered.
    """
    names = [unit] if isinstance(unit, str) else list(unit)
    state.token.ledger.enter(state.token.serial, "release()")
    live = state.token.ledger.live
    for name in names:
        _unit(state, name, "release")
        if name not in live or not live[name].held:
            raise ScheduleError(
                f"release: the unit {name!r} is not gathered. Call state, w = unshard(state, {name!r}) first."
            )
    state = _then(state, f"release({', '.join(map(repr, names))})")
    for name in names:
        live[name].release()
    return state


# ---------------------------------------------------------------- reduce


@_verb
def reduce(state: State, grads: Any, unit: str | None = None, *, last: bool = True) -> State:
    """Average gradients over the data ranks (or sum, by `Spec`) and add them to `state.grads`.

    Args:
        grads: as the weights that `unshard` gave: the whole tree, or a unit's `{relative path: tensor}`, leaves of
            global shape. None means zero; gradients of frozen leaves are ignored; those of tied leaves add up.
        unit: None for the whole tree, or the unit that `grads` belong to.
        last: False says that more microbatches follow, so that a placement which keeps whole gradients (`ddp`,
            `zero1`, and the outer axis of `hsdp` and `hfsdp`) can add them up locally first. A wrong flag costs time
            only: `step` finishes whatever is still partial.

    Returns:
        The new state: leaves of global shape -> shards [n / ranks of grads] in `Precision.grads`. Calls add up.

    Raises:
        TreeError: another structure, shape or a non-tensor, before anything is sent. StaleStateError, ScheduleError.

    Collective: reduce-scatter where gradients are sharded, and on the last call what the placement's
    table row says; in the compute dtype.
    """
    layout = state.layout
    if unit is None:
        chosen: Iterable[Unit] = layout.units
        paths, leaves, _ = flatten(grads)
        values = _match(layout.paths, paths, leaves, "reduce(state, grads)")
        named = [(path, source, values[path]) for path, source in zip(layout.paths, layout.source, strict=True)]
    else:
        one = _unit(state, unit, "reduce")
        chosen = [one]
        if not isinstance(grads, Mapping):
            raise TreeError(
                f"reduce(state, grads, {unit!r}): grads is a {type(grads).__name__}; expected {{key: tensor}}."
            )
        values = _match(one.keys, list(grads), list(grads.values()), f"reduce(state, grads, {unit!r})")
        named = [(key, path, values[key]) for key, path in zip(one.keys, one.paths, strict=True)]

    buckets = [bucket for one in chosen for bucket in one.buckets if bucket.trainable]
    shapes = {leaf.path: leaf.shape for bucket in buckets for leaf in bucket.leaves}
    total: dict[str, torch.Tensor | None] = {}
    for name, source, value in named:
        if source not in shapes or value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.shape != shapes[source]:
            got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise TreeError(
                f"reduce: the gradient of {name!r} has {got}; expected a tensor of the parameter's global shape "
                f"{shapes[source]} (or None for zero)."
            )
        before = total.get(source)
        total[source] = value if before is None else before + value

    state = _then(state, f"reduce({unit!r})" if unit else "reduce()")
    new = dict(state.grads or {})
    for bucket in buckets:
        new[bucket.name] = _accumulate(state, bucket, new.get(bucket.name), total, last)
    return state.evolve(grads=new)


def _match(wanted: Sequence[str], paths: Sequence[str], leaves: Sequence[Any], where: str) -> dict[str, Any]:
    values = dict(zip(paths, leaves, strict=True))
    if values.keys() != set(wanted):
        missing = [p for p in wanted if p not in values]
        extra = [p for p in paths if p not in set(wanted)]
        said = [f"{what} {names[0]!r}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
                for what, names in (("lacks", missing), ("has the unknown", extra)) if names]  # fmt: skip
        raise TreeError(
            f"{where}: the gradient tree has another structure than the parameters: it {' and '.join(said)} "
            f"({len(paths)} leaves, expected {len(wanted)}). Return a gradient, or None, for each."
        )
    return values


def _accumulate(
    state: State, bucket: Bucket, have: FlatBuffer | None, values: Mapping[str, torch.Tensor | None], last: bool
) -> FlatBuffer:
    """Stage the bucket's gradients, reduce them as far as they need be now, and add them to what is there."""
    main = state.main[bucket.name]
    stage = main.local.new_empty(bucket.numel, dtype=bucket.compute)
    write_leaves(bucket, stage, {leaf.path: values.get(leaf.path) for leaf in bucket.leaves})
    new = FlatBuffer(stage, bucket, tuple((axis, Partial) for axis in bucket.placement.data), main.mesh)
    partial, final = states_of(bucket, "grads", Partial), states_of(bucket, "main")
    whole = have.states == final if have is not None else last
    target = final if whole else partial
    new = new.redistribute(target, average=state.spec.average, donate=True)
    new = new.but(new.local.to(bucket.grads)) if have is None else have.but(have.local.add_(new.local))
    return _finished(state, new) if last else new


def _finished(state: State, grads: FlatBuffer) -> FlatBuffer:
    """Reduce what is still Partial. The identity when nothing is."""
    final = states_of(grads.bucket, "main")
    if grads.states == final:
        return grads
    wire = grads.but(grads.local.to(grads.bucket.compute))
    done = wire.redistribute(final, average=state.spec.average, donate=True)
    return done.but(done.local.to(grads.bucket.grads))


@_verb
def finish(state: State) -> State:
    """Make `state.grads` whole: every trainable bucket, each in its final placement. For whoever reads gradients.

    What was announced with `last=False` is reduced now; a unit that got no gradient counts as zero, and is
    reduced like the others because its peers on other ranks may have got one. Called by `step`.

    Raises:
        ScheduleError: there are no gradients at all.

    Collective: as `reduce`, for what was left over; none when nothing was.
    """
    if not state.layout.trainable:
        raise ScheduleError("step: nothing is trainable: every leaf is frozen. See print(state.layout).")
    if not state.grads:
        raise ScheduleError("step: this state has no gradients. Call state = reduce(state, grads) first.")
    final = {name: states_of(bucket, "main") for name, bucket in state.layout.trainable.items()}
    if all(name in state.grads and state.grads[name].states == final[name] for name in final):
        return state
    state = _then(state, "finish()")
    new = dict(state.grads)
    for name, bucket in state.layout.trainable.items():
        have = new.get(name)
        new[name] = _accumulate(state, bucket, None, {}, True) if have is None else _finished(state, have)
    return state.evolve(grads={name: new[name] for name in state.layout.trainable})


# ---------------------------------------------------------------- step


@_verb
def step(state: State) -> State:
    """Update main weights with the optimizer, refresh the compute copies, and drop the gradients. Consumes `state`.

    Everything is checked first, and every rank votes before anything changes (on the host; devices are not
    synchronised). The buffers of the state are reused, so the states of this step raise StaleStateError from here on.

    Raises:
        ScheduleError: no gradients, no optimizer, or ranks that issued different collectives.
        StaleStateError: a consumed state.

    Collective: what `reduce` left unfinished; an all-gather a bucket where weights are less sharded than main weights.
    """
    if state.optimizer is None:
        raise ScheduleError(
            "step: this state has no optimizer. Give one to shard(params, spec, optimizer), as fsdp.adamw(lr=3e-4)."
        )
    state.valid("step")
    state = finish(state)
    ledger = state.token.ledger
    ledger.enter(state.token.serial, "step")
    trainable = state.layout.trainable
    main = {name: state.main[name] for name in trainable}
    grads = {name: _cast(state.grads[name], bucket.main) for name, bucket in trainable.items()}
    ledger.runtime.vote()

    touched = [leaf for leaf in pytree.tree_leaves((main, state.opt)) if isinstance(leaf, torch.Tensor)]
    versions = [leaf._version for leaf in touched]
    try:
        new_main, new_opt = state.optimizer.update(grads, state.opt, main, state.count)
        _check(main, new_main, "main")
        _check(state.opt, new_opt, "opt")
        _, opt = _install((main, state.opt), (new_main, new_opt))
        if state.weights:
            for name, kept in state.weights.items():
                if state.layout.buckets[name].trainable:
                    refresh(state.main[name], kept)
        state.count.add_(1)
        token = Token(ledger, ledger.commit(state.token.serial))
    except BaseException as error:
        if versions != [leaf._version for leaf in touched]:
            ledger.broken = (
                f"step() number {ledger.steps + 1} was stopped by {type(error).__name__} while it was updating the "
                f"weights, so this State is half updated. Load the last checkpoint."
            )
        raise
    return state.evolve(grads=(), opt=opt, token=token)


def _cast(buffer: FlatBuffer, dtype: torch.dtype) -> FlatBuffer:
    return buffer if buffer.local.dtype is dtype else buffer.but(buffer.local.to(dtype))


def _check(old: Any, new: Any, what: str) -> None:
    """Refuse an optimizer's result that does not fit, before anything is written."""
    old_leaves, old_def = pytree.tree_flatten(old)
    new_leaves, new_def = pytree.tree_flatten(new)
    if old_def != new_def:
        raise TreeError(
            f"step: the optimizer's update returned another structure for {what}: {new_def}; expected {old_def}."
        )
    for a, b in zip(old_leaves, new_leaves, strict=True):
        if isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            raise TreeError(f"step: the optimizer's update returned a {type(b).__name__} in {what}; expected a tensor.")
        if isinstance(a, torch.Tensor) and (a.shape != b.shape or a.dtype != b.dtype):
            raise TreeError(
                f"step: the optimizer's update returned {what} of shape {tuple(b.shape)} and dtype {b.dtype}; "
                f"expected {tuple(a.shape)} and {a.dtype}."
            )


def _install(old: Any, new: Any) -> Any:
    """Put an optimizer's result into the buffers that the state owns, so that their addresses never change.

    A result may be an old tensor in another place (a history that moves along): it is read before any is written.
    """
    old_leaves, treedef = pytree.tree_flatten(old)
    new_leaves = pytree.tree_leaves(new)
    owned = {a.untyped_storage()._cdata for a in old_leaves if isinstance(a, torch.Tensor)}
    moved = []
    for i, (a, b) in enumerate(zip(old_leaves, new_leaves, strict=True)):
        if isinstance(a, torch.Tensor):
            new_leaves[i] = a
            if a is not b and a.data_ptr() != b.data_ptr():
                moved.append((a, b.clone() if b.untyped_storage()._cdata in owned else b))
    for a, b in moved:
        a.copy_(b)
    return pytree.tree_unflatten(new_leaves, treedef)


# ---------------------------------------------------------------- pmean


@_verb
def pmean(state: State, tree: Any) -> tuple[State, Any]:
    """Average a pytree of metrics over the data ranks (JAX's `pmean`). Numbers become tensors, integers float32.

    One all-reduce an axis and dtype, on a lane of its own; the state is not consumed.

    Example: `state, loss = fsdp.pmean(state, loss)`.
    """
    state.token.ledger.enter(state.token.serial, "pmean")
    run = runtime_of(state.spec.mesh)
    leaves, treedef = pytree.tree_flatten(tree)
    tensors = [torch.as_tensor(leaf, device=run.device).detach() for leaf in leaves]
    tensors = [t if t.is_floating_point() else t.float() for t in tensors]
    axes = [axis for axis in run.sizes if any(axis in placement.data for _, placement in state.spec.placements)]
    done: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        which = [i for i, t in enumerate(tensors) if t.dtype is dtype]
        flat = torch.cat([tensors[i].reshape(-1) for i in which])
        for axis in axes:
            run.all_reduce(flat, axis, "mean", lane="side")
        parts = flat.split([tensors[i].numel() for i in which])
        done |= {i: part.view(tensors[i].shape) for i, part in zip(which, parts, strict=True)}
    return state, pytree.tree_unflatten([done[i] for i in range(len(tensors))], treedef)
