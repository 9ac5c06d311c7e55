"""Template: a state without values for a checkpoint, made from what `layout.json` says and a spec."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .._common.device import empty_as, zeros_as
from .._common.errors import CheckpointError, FsdpError, TreeError
from .._common.torch_names import pytree
from .._common.tree import flatten
from .._engine.carrier import resolve_transport
from .._optim.optimizer import as_optimizer
from .._plan.layout import LeafInfo
from .._plan.route import Partial
from .._runtime.agree import Topic, agree
from .._runtime.joint import Joint
from .._spec.spec import Spec
from .._state.shard import build, given
from .._state.state import State
from .._storage.flat import FlatBuffer, leaf_shards, nodes_of
from .manifest import NOTE, Tensor
from .parts import by_place

__all__ = ["blank", "made_for", "with_extras"]


def blank(value: Any) -> Any:
    """Memory like a FlatBuffer's, for what a checkpoint has: zeros in the padding, which none has, and in counts, which
    it may lack. Zeros like other tensors."""
    if not isinstance(value, FlatBuffer):
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
    lacked = value.bucket.by_leaf or any(one is Partial for _, one in value.states)  # residuals
    if lacked or not value.local.is_floating_point():
        return value.but(zeros_as(value.local))
    made = value.but(empty_as(value.local))
    start, at = made.span()[0], 0
    for leaf, first, local in leaf_shards(made):
        if local.numel():
            begin = leaf.offset + first - start
            made.local[at:begin].zero_()
            at = begin + local.numel()
    made.local[at:].zero_()
    return made


def made_for(
    joint: Joint, path: Path, note: Mapping[str, Any], there: Mapping[str, Tensor], spec: Spec, optimizer: Any
) -> State:
    """A State of zeros with the leaves, buffers and extras of a checkpoint.

    Raises:
        TreeError: the parameters were another kind of tree, or extras have keys that are no text. SpecError: a spec
        that does not fit the leaves; ranks that gave different ones.

    Collective: exchanges of digests on the host, as `shard`.
    """

    def look() -> tuple[Any, list[Topic]]:
        try:
            infos, paths, treedef = _leaves(path, note)
            buffers = _tree(path, "buffers", note, there)
            local = note["local_buffers"]
            if unknown := sorted({*local} - {*flatten(buffers)[0]}):
                raise ValueError(f"local_buffers {unknown[:3]}")
        except FsdpError:  # some are ValueErrors, too
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path / NOTE} has leaves, buffers or a tree that no save has written "
                f"({type(error).__name__}: {error})."
            ) from error
        layout, topics = given(infos, paths, spec, as_optimizer(optimizer), 0)
        return (infos, paths, treedef, buffers, local, layout), topics

    infos, paths, treedef, buffers, local, layout = agree(joint, "what is given", look)
    spec, layout = resolve_transport(spec, infos, paths, layout)
    state = build(joint, layout, spec, optimizer, treedef, None, buffers, local, 0, src=note["src"])
    return state._evolve(extras=_tree(path, "extras", note, there, state))


def with_extras(path: Path, note: Mapping[str, Any], there: Mapping[str, Tensor], state: State) -> State:
    """The state with extras of the checkpoint's names: its own, and zeros for those that it lacks."""
    if note["extras"] is None or not all(keys for keys, _ in note["extras"]):
        return state
    names = {keys[0] for keys, _ in note["extras"]}
    left = [name for name, value in state.extras.items() if name not in names and not _is_empty(value)]
    if left:
        warnings.warn(
            f"load: {path} has no {', '.join(f'extras[{name!r}]' for name in left)}, which the given state has. The "
            "state that is loaded has the extras of the checkpoint.",
            stacklevel=2,
        )
    lacking = [one for one in note["extras"] if one[0][0] not in state.extras]
    own = {name: value for name, value in state.extras.items() if name not in left}
    return state._evolve(extras={**own, **_tree(path, "extras", {"extras": lacking}, there, state)})


def _is_empty(tree: Any) -> bool:
    return all(node.value is None for node in nodes_of(tree))


def _leaves(path: Path, note: Mapping[str, Any]) -> tuple[list[LeafInfo], tuple[str, ...], pytree.TreeSpec]:
    if note["tree"] is None:
        raise TreeError(
            f"load: {path} has parameters in a tree that is not of dicts, lists and tuples. Give a state of that tree: "
            "load(folder, like=state)."
        )
    infos = [
        LeafInfo(name, tuple(one["shape"]), _dtype(one["dtype"]), one["trainable"], tuple(one["ties"]))
        for name, one in note["leaves"].items()
    ]
    paths, _, treedef = flatten(_nested(note["tree"]))
    if [*paths] != note["paths"] or {*paths} != {p for info in infos for p in (info.path, *info.aliases)}:
        raise ValueError(f"paths {paths[:3]} in the tree, {note['paths'][:3]} beside it")
    return infos, paths, treedef


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def _nested(tree: Any) -> Any:
    if isinstance(tree, int):
        return tree
    ((kind, items),) = tree.items()
    if kind == "dict":
        return {key: _nested(value) for key, value in items}
    return {"list": list, "tuple": tuple}[kind](map(_nested, items))


def _tree(
    path: Path, field: str, note: Mapping[str, Any], there: Mapping[str, Tensor], state: State | None = None
) -> dict[str, Any]:
    """Extras or buffers, of zeros."""
    if note[field] is None:
        raise TreeError(
            f"load: {path} has {field} whose keys are not all text. Give a state that has them: "
            "load(folder, like=state)."
        )
    made: dict[str, Any] = {}
    placed = by_place(there)
    for keys, kind in note[field]:
        name = ".".join((field, *keys))
        found: Any
        if kind == "leaf":
            assert state is not None
            alike = {b.bucket.name: _optimizer_like(b, name, placed, there) for b in state.main.values()}
            found = {bucket: like for bucket, like in alike.items() if like is not None}
        else:
            one = there[placed[name]]
            found = torch.zeros(one.shape, dtype=one.dtype, device=None if state is None else state.count.device)
        at = made
        for key in keys[:-1]:
            at = at.setdefault(key, {})
        at[keys[-1]] = found
    return made


def _optimizer_like(main: FlatBuffer, name: str, placed: Mapping[str, str], there: Mapping[str, Tensor]) -> FlatBuffer | None:
    """Zeros for what a tree of the checkpoint has for a bucket's leaves; None if it has nothing."""
    for leaf in main.bucket.leaves:
        key = placed.get(f"{name}.{leaf.path}")
        if key is not None:
            return main.but(torch.zeros_like(main.local, dtype=there[key].dtype))
    return None
