"""What a state gives out: whole parameters, this rank's part of each leaf, and whole leaves of one buffer.

| | gives | collective |
|---|---|---|
| `full_params`, `state_dict` | all leaves, whole, on every rank | an all-gather a bucket and sharded axis |
| `local_shards` | this rank's part of each leaf, as views | none |
| `gather_leaves`, `whole_leaves` | the leaves of one buffer, whole | an all-gather for each axis that shards it |

Nothing here consumes a state: ranks that communicate about one come by `come_to_look`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal

import torch
import torch.nn as nn

from ._axes import joined_leaves
from ._common.calls import alone, guard
from ._common.errors import FsdpError, RestartError, ScheduleError, SpecError, TreeError
from ._common.torch_names import pytree
from ._common.tree import flatten
from ._nn.skeleton import needs_module
from ._plan.layout import Bucket
from ._plan.route import Partial, Replicated
from ._runtime.runtime import runtime_of
from ._state.state import State
from ._storage import FlatBuffer, leaf_shards, leaves_of, unpacked_leaves


def come_to_look(state: State) -> None:
    """Before ranks communicate about the base outside a step: all of them come here.

    Never consumes: where all ranks look from the same place, the step goes on afterwards.

    Raises:
        RestartError: a look in the middle of a step that some have abandoned. Those at the base go on.
    """
    lineage, serial = state.version.lineage, state.version.serial
    while True:
        lineage.come(serial)
        if serial != lineage.base and lineage.epoch != lineage.runtime.epoch:
            raise RestartError(
                "a look at this state: a rank was stopped, and its step was abandoned. Nothing is lost: go on from "
                "the state that the step started from (it is still valid), on every rank."
            )
        again = serial == lineage.base and lineage.runtime.stage != "moving"
        with suppress(RestartError) if again else nullcontext():
            return lineage.runtime.come_to_look("a look at this state", lineage.identity)


@contextmanager
def looking(state: State) -> Iterator[None]:
    """What ranks communicate within is about this state, and consumes nothing; who is stopped in it meets them."""
    lineage = state.version.lineage
    try:
        come_to_look(state)
        guard()
        with lineage, lineage.off_plan(state):
            yield
    except BaseException as error:
        if not isinstance(error, FsdpError):  # peers may wait in it, or be past it
            lineage.runtime.void()
        raise
    lineage.looked()


@alone
@torch.no_grad()
def full_params(state: State) -> Any:
    """The whole parameters on every rank, in `Precision.main`: shards [n / ranks] -> leaves of global shapes.

    Returns:
        the tree that was sharded, with tensors of your own, of packed leaves `PackedWeight`s; tied leaves are the same
        tensor at each path. When the tree came from `functionalize`, `module.load_state_dict` takes it (with
        strict=False if the module has buffers).

    Raises:
        StaleStateError: a state that `step` has consumed.

    Collective: one all-gather a bucket and sharded axis, on a lane of its own: every rank must call it.

    Example: `torch.save(fsdp.full_params(state), "model.pt")`.
    """
    state._valid("full_params")
    views: dict[str, torch.Tensor] = {}
    with looking(state):
        state.version.lineage.touched()
        for name in state.layout.buckets:
            own = {path: leaf.clone() for path, leaf in whole_leaves(state.main[name]).items()}
            views |= unpacked_leaves(state.layout.buckets[name], own)
    return state.treedef.unflatten([views[path] for path in state.layout.source])


@alone
def local_shards(
    state: State, kind: Literal["main", "weights", "grads"] = "main", *, unique: bool = False
) -> dict[str, torch.Tensor]:
    """This rank's part of every leaf, as 1-D views of the state's own buffers: no copy, no communication.

    Args:
        kind: of "grads", reductions that are due are waited for, and no others. A unit whose gradient has come too
            early for its turn is not in it before `finish_reductions`.
        unique: where several ranks hold the same part (ddp, hsdp, compute copies), all but the first of them get empty
            views. Then each element of a leaf is on one rank, and a sum over ranks counts it once. (Experts of which
            ranks have their own are not the same part: each counts.)

    Returns:
        `{path: [elements of this leaf that this rank holds]}`; empty where it holds none. Since a bucket is cut
        whatever the leaf boundaries, a part is a run of the flattened leaf, not whole rows. Tied leaves
        appear once. Frozen leaves have no gradients; placements without compute copies have no "weights". Of leaves
        that are gathered in float8 these are the weights times `state.scales`, in float8. Main weights are to be read:
        compute copies (ddp, zero1, zero2, `Precision(gather=)`) do not follow a write, see `extend.change_weights`.

    Raises:
        StaleStateError: a state that `step` has consumed. ScheduleError: `unique` gradients that are still partial
            (`reduce(..., last_microbatch=False)`), of which each rank holds a summand.

    Example, the norm of the weights:
        >>> mine = fsdp.local_shards(state, unique=True).values()
        >>> state, square = fsdp.psum(state, sum(part.square().sum() for part in mine))
    """
    state._valid("local_shards")
    if kind not in ("main", "weights", "grads"):
        raise TreeError(f"local_shards(state, {kind!r}): expected one of 'main', 'weights', 'grads'.")
    tree, lineage = getattr(state, kind), state.version.lineage
    if kind == "grads" and tree:
        lineage.enter(state.version.serial, "local_shards")
        with lineage:
            state._executor.look(state)
    elif kind != "grads":
        lineage.touched()
    at = runtime_of(state.spec.mesh).coordinate
    found: dict[str, torch.Tensor] = {}
    for name, buffer in (tree or {}).items():
        assert isinstance(buffer, FlatBuffer)
        if unique and any(placed is Partial for _, placed in buffer.states):
            raise ScheduleError(
                f"local_shards(state, {kind!r}, unique=True): the gradients of {name!r} are partial, {buffer!r}: each "
                "rank holds a summand of every element. Call state = fsdp.finish_reductions(state) first."
            )
        same = (axis for axis, placed in buffer.states if placed is Replicated)
        elsewhere = unique and any(at[axis] for axis in (*same, *buffer.bucket.equal))
        for leaf, _, local in leaf_shards(buffer):
            found[leaf.path] = local[:0] if elsewhere else local
    return found


@alone
def state_dict(state: State, module: nn.Module | None = None) -> dict[str, Any]:
    """Whole parameters and the state's buffers by path, on every rank, for `plain.load_state_dict`.

    Args:
        module: the model, or its skeleton. It knows what a state does not, and what `load_state_dict` asks for: the
            versions of its classes (without them one that has changed its format takes new weights for old ones, and
            converts them), what its parts add by `get_extra_state`, and further paths of a module with buffers that
            has several. Leave it out of parameters that are of no module.

    Returns:
        tensors of your own; what is tied, or has several paths, is the same tensor at each. With a module an
        OrderedDict as the module's own `state_dict()` gives, with its `_metadata`.

    Raises:
        TreeError: a parameter and a buffer have one path. Else, and collective: as `full_params`.

    Example: `plain.load_state_dict(fsdp.state_dict(state, model))`.
    """
    both = set(state.layout.paths) & set(flatten(state.buffers)[0])
    if both:
        raise TreeError(
            f"state_dict: a parameter and a buffer are both called {min(both)!r}. Use full_params(state) and "
            "state.buffers, or rename one of them."
        )
    found = dict(zip(state.layout.paths, pytree.tree_leaves(full_params(state)), strict=True))
    found |= {path: value.clone() for path, value in zip(*flatten(state.buffers)[:2], strict=True)}
    return found if module is None else _of_module(module, found)


def _of_module(module: nn.Module, found: dict[str, Any]) -> dict[str, Any]:
    """The same, with what a module knows of it."""
    needs_module("state_dict(module)", module)
    out: Any = OrderedDict(found)
    out._metadata = OrderedDict()
    first: dict[nn.Module, str] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        out._metadata[path] = {"version": part._version}
        prefix = f"{path}." if path else ""
        source = first.setdefault(part, path)
        for name in part._buffers if source != path else ():
            if f"{source}.{name}" in found:
                out.setdefault(f"{prefix}{name}", found[f"{source}.{name}"])
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            out[f"{prefix}_extra_state"] = part.get_extra_state()
    return out


def gather_leaves(buffer: FlatBuffer, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The leaves of a buffer by path, whole, of their global shapes: views of one new tensor.

    Args:
        dtype: of the result, and so of what travels; by default the buffer's own.

    Raises:
        ScheduleError: gradients that may still be under way, or are partial.

    Collective: an all-gather for each axis that shards it, which compute waits for. Eager.

    Example: `extend.gather_leaves(fsdp.finish_reductions(state).grads["head"])["head.weight"]`.
    """
    bucket = buffer.bucket
    for lineage in runtime_of(buffer.mesh).lineages:
        if lineage.executor is not None and lineage.executor.reductions.awaits(buffer):
            raise ScheduleError(
                f"gather_leaves: the gradients of {bucket.name!r} may be on their way still, or partial. Take whole "
                "ones: state = fsdp.finish_reductions(state), and then those of state.grads."
            )
    return leaves_of(bucket, buffer.gather(buffer.local.new_empty(bucket.numel, dtype=dtype or buffer.local.dtype)))


def whole_leaves(buffer: FlatBuffer, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """As `gather_leaves`, and of leaves that are cut along axes of the model's own the parts of all ranks, joined.

    Collective: one all-gather more for each such axis of a bucket.

    Raises:
        SpecError: of scales of blocks, see `refuse_blocks`.
    """
    if not any(leaf.cuts for leaf in buffer.bucket.leaves):
        return gather_leaves(buffer, dtype)
    refuse_blocks(buffer.bucket, buffer.bucket.leaves[0].path)
    return joined_leaves(buffer, dtype)


def refuse_blocks(bucket: Bucket, path: str) -> None:
    """Refuse to join or cut otherwise what lies by blocks of each rank's part of a leaf.

    Raises:
        SpecError: the bucket is of such blocks.
    """
    if bucket.every > 1:
        raise SpecError(
            f"what the optimizer keeps of {path!r} is in a codec, by blocks of each rank's part: the leaf is cut along "
            "axes of the model's own, and these parts are neither joined nor cut otherwise. Keep the axes and their "
            "ranks; or have plain moments, adamw without moments=, which begin anew: load(..., allow=['optimizer'])."
        )
