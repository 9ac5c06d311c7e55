"""Another tree in a State: other weights in a lineage of its own, other gradients, other extras.

                  the new State                                   the old one
replace_params    buffers of its own, which it may train on       stays as it is, and usable
replace_grads     goes on in the same step                        is consumed
replace_extras    the same state of the same step                 is the same state
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from .._axes.cuts import cut_of
from .._common.calls import ordinary, traced_as, verb
from .._common.device import checksum, clone_as, empty_as
from .._common.errors import ScheduleError, TreeError, expect
from .._common.torch_names import pytree
from .._common.tree import flatten
from .._nn.packed_weight import PackedWeight
from .._plan.layout import Bucket, Leaf
from .._plan.route import states_of
from .._runtime.agreement import Joint, Topic, agree
from .._runtime.runtime import runtime_of
from .._state.lineage import Version
from .._state.shard import read_sums
from .._state.state import State
from .._storage import FlatBuffer, clear_padding, leaf_shards, refresh, stored_as, zeros
from .._verbs import finish_reductions

Values = dict[str, torch.Tensor]


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise ScheduleError(
        "replace_params and replace_grads make buffers, which a compiled step cannot. Call them outside torch.compile."
    )


# ---------------------------------------------------------------- weights


@verb(_refuse)
def replace_params(state: State, params: Any, *, optimizer: bool = True) -> State:
    """A State with other weights, in a lineage of its own: the inverse of `full_params`, and of `local_shards`.

    Args:
        state: any state that no step has consumed. It stays as it is, and is as usable as before.
        params: the tree that `full_params` gives, leaves of global shapes, the same values on every rank; or
            `{path: [n]}`, this rank's parts, as `local_shards` gives; or `{bucket: FlatBuffer}`, like `state.main`. In
            `Precision.main`, on any device. They are copied. Of tied leaves one path is enough.
        optimizer: False leaves out the optimizer and its state: for evaluation. `step` then refuses.

    Returns:
        a State between steps, without gradients. Its compute copies are those of the new weights; optimizer state,
        count, rng, buffers and extras are copies of the old one's: the two share nothing.

    Memory: as another State, less what `optimizer=False` leaves out (with adamw two thirds of main weights and
    optimizer state). Of whole leaves a rank copies its own part only.

    Raises:
        TreeError: another structure, shape or dtype; ranks that gave different values for what they share, or tied
            leaves that differ. On every rank, and before anything has changed. StaleStateError: a consumed state.

    Collective: every rank calls it. Checks on the host; an all-gather a bucket where a placement keeps compute copies.

    Example, an evaluation with averaged weights: `average = fsdp.replace_params(state, state.extras["ema"],
    optimizer=False)`.
    """
    state._valid("replace_params")
    lineage, run = state.version.lineage, runtime_of(state.spec.mesh)
    trees: dict[str, Any] = {}
    whole: Values | None = None

    def prepare() -> bool:
        nonlocal whole
        main = trees["main"] = zeros(state.main)[0]
        whole = _fill(state, params, main)
        trees.update(copies(state, optimizer))
        return whole is not None

    with Joint(run, "replace_params") as joint:
        lineage.look(state.version.serial)
        lineage.touched()
        everywhere = all(joint(prepare, "what is given"))
        _compare(joint, trees["main"], whole if everywhere else None)
    return renewed(state, trees, optimizer)


def copies(state: State, optimizer: bool) -> dict[str, Any]:
    """Copies of what goes along with other weights, and room for their compute copies."""
    trees = {
        name: pytree.tree_map(_copied, getattr(state, name))
        for name in ("buffers", "count", "rng", "extras", "residual")
    }
    trees["opt"] = pytree.tree_map(_copied, state.opt) if optimizer else {}
    anew = {name: pytree.tree_map(empty_as, getattr(state, name)) for name in ("weights", "scales")}
    return {**trees, **anew}


def renewed(state: State, trees: dict[str, Any], optimizer: bool, steps: int | None = None) -> State:
    """A State of its own lineage with these trees, and so many steps. Collective: as `refresh`."""
    lineage, run = state.version.lineage, runtime_of(state.spec.mesh)
    with lineage.looking(state):
        refresh(trees["main"], trees["weights"], trees["scales"])
    steps = state.steps if steps is None else steps
    new = lineage.heir(run, state.layout, state.spec, steps, trees["count"])
    new.enroll()
    changes = {**trees, "grads": {}, "optimizer": state.optimizer if optimizer else None, "version": Version(new, 0)}
    return state._evolve(**changes)._prepared()


def _copied(x: Any) -> Any:
    return clone_as(x) if isinstance(x, torch.Tensor) else copy.deepcopy(x)


def _fill(state: State, params: Any, main: dict[str, FlatBuffer]) -> Values | None:
    """Copy what was given into `main`. Returns the leaves if all are whole."""
    if isinstance(params, Mapping) and params and all(isinstance(b, FlatBuffer) for b in params.values()):
        _fit("replace_params", params, main, {name: b.bucket.main for name, b in main.items()})
        for name, buffer in main.items():
            buffer.local.copy_(params[name].local.detach())
        clear_padding(main.values())  # a program's `tree_map` may have put something there
        return None
    values = _leaves(state, params)
    is_whole, at = True, runtime_of(state.spec.mesh).coordinate
    for buffer in main.values():
        for leaf, first, local in leaf_shards(buffer):
            n = local.numel()
            if isinstance(packed := values[leaf.path], PackedWeight) and leaf.form is not None:
                values[leaf.path] = stored_as(packed, leaf.form)
            value = _fitting(leaf, buffer.bucket, values[leaf.path], n)
            if tuple(value.shape) == _given_shape(leaf):
                mine = cut_of(value.detach(), leaf.cuts, at) if leaf.cuts and n else value.detach()
                value = mine.reshape(-1)[first : first + n] if n else value.new_empty(0)
            else:
                is_whole = False
            local.copy_(value.detach())
    return values if is_whole else None


def _leaves(state: State, params: Any) -> Values:
    """What was given, by the path that holds the leaf: of tied leaves one, which the others equal."""
    paths, leaves, _ = flatten(params)
    home = dict(zip(state.layout.paths, state.layout.source, strict=True))
    found: Values = {}
    at: dict[str, str] = {}
    unknown = [path for path in paths if path not in home]
    missing = dict.fromkeys(source for source in home.values() if all(home.get(path) != source for path in paths))
    if unknown or missing:
        said = [f"{what} {names[0]!r}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
                for what, names in (("lacks", [*missing]), ("has the unknown", unknown)) if names]  # fmt: skip
        raise TreeError(
            f"replace_params: the tree has another structure than the parameters: it {' and '.join(said)} "
            f"({len(paths)} leaves, expected {len(home)}). Give all leaves, as full_params(state) or "
            "local_shards(state) does."
        )
    for path, value in zip(paths, leaves, strict=True):
        if not isinstance(value, torch.Tensor):
            raise TreeError(f"replace_params: the leaf {path!r} is a {type(value).__name__}; expected a tensor.")
        before = found.get(home[path])
        if before is None:
            found[home[path]], at[home[path]] = value, path
        elif before is not value and not (before.shape == value.shape and torch.equal(before, value.to(before.device))):
            raise TreeError(
                f"replace_params: {at[home[path]]!r} and {path!r} are one tied leaf, and were given different values. "
                "Give one of them, or the same at both."
            )
    return found


def _given_shape(leaf: Leaf) -> tuple[int, ...]:
    """Of a whole leaf: of all ranks' parts together; of a packed one its bytes."""
    return leaf.whole if leaf.form is None else leaf.shape


def _fitting(leaf: Leaf, bucket: Bucket, value: torch.Tensor, mine: int) -> torch.Tensor:
    if tuple(value.shape) not in (_given_shape(leaf), (mine,)):
        raise TreeError(
            f"replace_params: the leaf {leaf.path!r} has shape {tuple(value.shape)}; expected its global shape "
            f"{_given_shape(leaf)}, or ({mine},), this rank's part of it."
        )
    if value.dtype is not bucket.main:
        raise TreeError(
            f"replace_params: the leaf {leaf.path!r} is {value.dtype}; expected {bucket.main}, as main weights are. "
            f"Convert it: .to({bucket.main})."
        )
    return value


def _compare(joint: Joint, main: dict[str, FlatBuffer], whole: Values | None) -> None:
    """Raise TreeError unless ranks have the same weights wherever they hold the same, or were given whole leaves."""
    run = joint.run
    values: Values = {}
    owns: list[tuple[str, ...]] = []
    for buffer in main.values():
        parted = () if whole is not None else buffer.sharded()
        own = buffer.bucket.apart(run.sizes) if whole is None else buffer.bucket.unlike(run.sizes)
        apart = tuple(axis for axis in run.sizes if axis in parted or axis in own)
        for leaf, _, local in leaf_shards(buffer):
            values[leaf.path] = local if whole is None else whole[leaf.path].detach()
            owns.append(apart)

    def look() -> tuple[None, list[Topic]]:
        numbers = read_sums([checksum(value) for value in values.values()])
        lines = [f"{path} checksum {n:016x}" for path, n in zip(values, numbers, strict=True)]
        return None, [Topic(lines, TreeError, "values", "leaf", "Give every rank the same.", owns)]

    agree(joint, "values", look)


# ---------------------------------------------------------------- gradients


@verb(_refuse)
def replace_grads(state: State, grads: Any) -> State:
    """Put other gradients in the place of the state's own, for `step` to take: those of another state, say.

    Args:
        state: the newest state of a step, or the state between steps. It is consumed, as by a verb.
        grads: a State of the same layout, whose gradients are finished, and taken, and with them which leaves got one,
            and what packing has lost of them (`Precision(feedback=True)`); or `{bucket: FlatBuffer}`, whole and sharded
            as main weights, in `Precision.grads`, as `T.hvp` returns: then every leaf counts as one that got a
            gradient. They are copied.

    Raises:
        TreeError: buckets that lack or are unknown, of another shape, dtype or sharding. StaleStateError.

    Collective: every rank calls it. What `finish_reductions` issues, if a state has gradients that are not whole.

    Example, gradients taken at other weights (sharpness-aware minimisation):
        >>> there = fsdp.replace_params(state, moved)
        >>> there, loss = forward_backward(there, batch)
        >>> state = fsdp.step(fsdp.replace_grads(state, fsdp.finish_reductions(there)))
    """
    state._valid("replace_grads")
    given: tuple[set[str], dict[str, int]] = set(), {}
    lost: dict[str, torch.Tensor] = {}
    main = {name: state.main[name] for name in state.layout.trainable}
    dtypes = {name: b.bucket.grads for name, b in main.items()}
    if isinstance(grads, State):
        grads._valid("replace_grads")
        theirs = grads._executor.reductions
        if grads.grads or theirs.early:  # what is under way there is not in them yet
            like = {name: grads.main[name] for name in grads.layout.trainable}
            like = {n: b.but(torch.empty_like(b.local, dtype=b.bucket.grads, device="meta")) for n, b in like.items()}
            _fit("replace_grads", like, main, dtypes)  # before they are consumed
            own, grads = grads is state, finish_reductions(grads)
            state = grads if own else state
        given, grads = (set(theirs.given.full), dict(theirs.given.noted)), grads.grads
        lost = theirs.feedback.errors
    _fit("replace_grads", grads, main, dtypes)
    reductions, sink = state._executor.reductions, state._executor.sink
    if state.grads or reductions.early:  # what is under way would be added to the new ones
        state = finish_reductions(state)
    state.version.lineage.enter(state.version.serial, "replace_grads")
    with state.version.lineage:
        sink.set_gradients({name: buffer.but(grads[name].local.detach().clone()) for name, buffer in main.items()})
        reductions.given.resume(given)
        reductions.feedback.resume(lost)
        state = state.version.lineage.advance(state, "replace_grads()", sink.grads)
    state._executor.end_round(True)
    return state


def _fit(what: str, given: Any, main: dict[str, FlatBuffer], dtypes: dict[str, torch.dtype]) -> None:
    """Raise TreeError unless these are buffers of the same buckets, sharded as main weights."""
    if not isinstance(given, Mapping) or given.keys() != main.keys():
        got = ", ".join(map(repr, given)) if isinstance(given, Mapping) else f"a {type(given).__name__}"
        raise TreeError(f"{what}: expected {{bucket: FlatBuffer}} for {', '.join(map(repr, main))}; got {got[:500]}.")
    for name, want in main.items():
        buffer, states = given[name], states_of(want.bucket, "main")
        if not isinstance(buffer, FlatBuffer):
            raise TreeError(f"{what}: the bucket {name!r} is a {type(buffer).__name__}; expected a FlatBuffer.")
        have = (buffer.bucket.leaves, buffer.local.shape, buffer.states, buffer.local.dtype)
        if have != (want.bucket.leaves, want.local.shape, states, dtypes[name]):
            raise TreeError(
                f"{what}: the bucket {name!r} is {buffer!r}; expected {want.local.numel():,} elements of "
                f"{dtypes[name]}, {dict(states)}, of the same {len(want.bucket.leaves)} leaves at the same places. "
                "Give buffers of a state of the same layout, gradients after fsdp.finish_reductions(state)."
            )


# ---------------------------------------------------------------- extras


def _with_extras(state: State, **named: Any) -> State:
    others = {name: tree for name, tree in state.extras.items() if name not in named}
    kept = {name: tree for name, tree in named.items() if tree is not None}
    return state._evolve(extras={**others, **kept})


@traced_as(_with_extras)  # a graph has no way to look at its tensors
def replace_extras(state: State, **named: Any) -> State:
    """The same State with other extras under these names: what a transform carries along, saved with the state.

    Args:
        named: pytrees of tensors; FlatBuffers too (an average of the weights). None takes a name out. Others stay.

    Returns:
        the same state of its step, in the same buffers: nothing is consumed, nothing is copied.

    Raises:
        TreeError: a leaf that is no tensor, or one that requires a gradient, and would keep its graph.

    Example: `state = fsdp.replace_extras(state, seen=torch.zeros((), device=state.count.device))`.
    """
    expect("replace_extras(state)", state, State, "a State", TypeError)
    leaves = [leaf for tree in named.values() if tree is not None for leaf in pytree.tree_leaves(tree)]
    if any(not isinstance(leaf, torch.Tensor) or leaf.requires_grad for leaf in leaves):
        _refuse_extras({name: tree for name, tree in named.items() if tree is not None})
    return _with_extras(state, **(ordinary(named) if any(leaf.is_inference() for leaf in leaves) else named))


def _refuse_extras(named: dict[str, Any]) -> None:
    for path, leaf in zip(*flatten(named)[:2], strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise TreeError(
                f"replace_extras: {path!r} is a {type(leaf).__name__}; expected a tensor, as checkpoints can hold. "
                "Make it one: torch.tensor(...)."
            )
        if leaf.requires_grad:
            raise TreeError(f"replace_extras: {path!r} requires a gradient, and would keep its graph. Detach it.")
