"""Compatibility: what a checkpoint says of the state that wrote it, and what a state that reads it must have in common.

leaves: paths, shapes, ties, experts     must be the same
placement, world, units, dtypes          are converted
average, another optimizer, replicas     must be said, by `allow=`
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .._common.errors import CheckpointError, SpecError, TreeError
from .._common.torch_names import pytree
from .._optim_extra.from_torch import FromTorch
from .._optim_extra.partition import Partition
from .._optim_extra.whole import WholeLeaves
from .._redistribute.redistribute import leaf_infos
from .._runtime.runtime import runtime_of
from .._state.state import State
from .._state.update import counted, with_counts
from .._storage.flat import FlatBuffer, Node, nodes_of
from .manifest import Tensor
from .parts import SAVED, SavedTensor, any_apart, by_place, places_of

__all__ = ["ALLOWED", "about_of", "as_there", "check_same", "fits", "names_of", "share_residuals", "with_residuals"]

ALLOWED = ("average", "optimizer", "replicas")


def about_of(state: State) -> dict[str, Any]:
    """What `layout.json` says of a state beside its tensors."""
    at = {leaf.path: leaf for bucket in state.layout.buckets.values() for leaf in bucket.leaves}
    leaves = {
        info.path: {
            "shape": list(info.shape),
            "dtype": str(info.dtype).removeprefix("torch."),
            "trainable": info.trainable,
            "label": at[info.path].label,
            "ties": list(info.aliases),
            **({} if info.form is None else {"codec": str(info.form.codec)}),
            **({"cuts": [list(cut) for cut in at[info.path].cuts]} if at[info.path].cuts else {}),
        }
        for info in leaf_infos(state.layout, state.spec)
    }
    return {
        "placement": ", ".join(f"{pattern}: {placement}" for pattern, placement in state.spec.placements),
        "mesh": " × ".join(f"{axis} {size}" for axis, size in state.spec.axes.items()),
        "average": state.spec.average,
        "optimizer": _kind(state.optimizer),
        "leaves": leaves,
        "paths": list(state.layout.paths),
        "tree": _plain(pytree.tree_unflatten([*range(len(state.layout.paths))], state.treedef)),
        "extras": _kinds(state.extras),
        "buffers": _kinds(state.buffers),
        "local_buffers": sorted(state.local_buffers),
        "src": state.version.lineage.src,
        **({"activations": dict(activations)} if (activations := state.version.lineage.activations) else {}),
    }


def _plain(tree: Any) -> Any:
    """Dicts, lists and tuples with text as keys, so that JSON can have them; None for anything else."""
    if type(tree) is int:
        return tree
    if type(tree) is dict and all(type(key) is str for key in tree):
        inner = [[key, _plain(value)] for key, value in tree.items()]
        return None if any(value is None for _, value in inner) else {"dict": inner}
    if type(tree) in (list, tuple):
        items = [_plain(value) for value in tree]
        return None if None in items else {type(tree).__name__: items}
    return None


def _kinds(tree: Any) -> list[Any] | None:
    """By keys what lies there: elements of leaves, or a plain tensor."""
    found: dict[Any, None] = {}
    for node in nodes_of(tree):
        keys = tuple([getattr(key, "key", None) for key in node.keys])
        if node.value is not None and not all(type(key) is str for key in keys):
            return None
        if node.value is not None:
            found[keys, "leaf" if isinstance(node.value, FlatBuffer) else "plain"] = None
    return [[[*keys], kind] for keys, kind in found]


def _kind(optimizer: Any) -> str:
    """What an optimizer is called: its class, or for a mere pair of functions the first one's name."""
    if optimizer is None:
        return "none"
    if isinstance(optimizer, FromTorch | WholeLeaves):
        return f"from_torch({optimizer.cls.__qualname__})"
    if isinstance(optimizer, Partition):
        return f"partition({', '.join(f'{label}: {_kind(one)}' for label, one in sorted(optimizer.members.items()))})"
    pair = getattr(optimizer, "pair", optimizer)
    named = getattr(pair, "init", pair) if isinstance(pair, tuple) else type(pair)
    name = getattr(named, "__qualname__", type(named).__qualname__)
    return name if pair is optimizer else f"{type(optimizer).__qualname__}({name})"


# ---------------------------------------------------------------- comparison


def check_same(path: Path, note: Mapping[str, Any], state: State, allow: Collection[str]) -> None:
    """Refuse a checkpoint of other leaves, and of what must be said.

    Raises:
        TreeError: naming leaves that are missing, unexpected, or of another shape. SpecError: another `average`.
    """
    shapes = {leaf.path: leaf.whole for b in state.layout.buckets.values() for leaf in b.leaves}
    here = {p: shapes[source] for p, source in zip(state.layout.paths, state.layout.source, strict=True)}
    there = {p: tuple(leaf["shape"]) for path_, leaf in note["leaves"].items() for p in (path_, *leaf["ties"])}
    said = [
        *(f"{p!r} is missing there" for p in here if p not in there),
        *(f"{p!r} is there, and this state has it not" for p in there if p not in here),
        *(f"{p!r} is {list(there[p])} there, {list(here[p])} here" for p in here if there.get(p, here[p]) != here[p]),
    ]
    codecs = {leaf.path: str(leaf.form.codec) for b in state.layout.buckets.values() for leaf in b.leaves if leaf.form}
    held = {path_: leaf.get("codec") for path_, leaf in note["leaves"].items()}
    packed = [p for p in held if p in here and held[p] != codecs.get(p)]
    if packed and not said:
        by = (one.get(packed[0]) for one in (held, codecs))
        how = [f"packed by {codec}" if codec else "not packed" for codec in by]
        raise SpecError(
            f"load: {path} has the leaf {packed[0]!r} {how[0]}, and this state has it {how[1]}. Load it with "
            "the precision that it was saved with, and change it then: redistribute(state, spec)."
        )
    alias = {p: path_ for path_, leaf in note["leaves"].items() for p in leaf["ties"]}
    tied = {p: source for p, source in zip(state.layout.paths, state.layout.source, strict=True) if p != source}
    if not said:
        differ = sorted({*alias} ^ {*tied})
        said = [f"{p!r} is tied {'there' if p in alias else 'here'} only" for p in differ]
    if said:
        more = f", and {len(said) - 4} more" if len(said) > 4 else ""
        raise TreeError(
            f"load: {path} has other leaves than this state: {'; '.join(said[:4])}{more}. Build the model that was "
            "saved."
        )
    if note["average"] != state.spec.average and "average" not in allow:
        raise SpecError(
            f"load: {path} was written with average={note['average']!r}, and this state has "
            f"average={state.spec.average!r}: its gradients are of another size. Where that is meant, say "
            "load(..., allow=['average'])."
        )


def as_there(state: State, there: Collection[str]) -> State:
    """The state with counts in the buckets of leaves for which the checkpoint has them, and in no others."""
    every = with_counts(state, state.layout.trainable)
    counting = counted(every)
    if not counting:
        return state
    chosen = []
    placed = by_place(there)
    always = {(node.path, node.value.bucket.name) for node in _by_leaf(with_counts(state, ()))}
    for node in _by_leaf(every):
        bucket = node.value.bucket
        if (node.path, bucket.name) not in always:
            names = [f"opt.{node.path}.{leaf.path}" for leaf in bucket.leaves]
            if any(name in placed for name in names):
                chosen.append(bucket.name)
    return with_counts(state, chosen)


def _by_leaf(state: State) -> list[Node]:
    """What the optimizer keeps as one number a leaf."""
    return [n for n in nodes_of(state.opt) if isinstance(n.value, FlatBuffer) and n.value.bucket.by_leaf]


def fits(
    path: Path, note: Mapping[str, Any], there: Mapping[str, Tensor], state: State, parts: list[SavedTensor],
    allow: Collection[str],
) -> tuple[list[SavedTensor], bool]:  # fmt: skip
    """The parts that are read, and whether the optimizer's state begins anew: all, but for counts that are missing, and
    the optimizer's where another one is allowed.

    Raises:
        SpecError: another optimizer. TreeError: experts along other axes, extras or buffers of other names.
        CheckpointError: a tensor of another shape or kind.
    """
    expected = names_of(state, there)
    other = [name for name, optional in expected.items() if name not in there and not optional]
    more = {name for name in there.keys() - expected.keys() if not name.startswith("residual.")}
    opt = sorted(name for name in (*other, *more) if name.startswith("opt."))
    if opt and "optimizer" not in allow:
        raise SpecError(
            f"load: {path} was written with another optimizer: {note['optimizer']} there, {_kind(state.optimizer)} "
            f"here; {opt[0]!r} is {'there' if opt[0] in there else 'here'} only. Give the state the optimizer of the "
            "checkpoint (its numbers may be others), or begin with a new optimizer state: load(..., "
            "allow=['optimizer'])."
        )
    rest = sorted(name for name in (*other, *more) if not name.startswith("opt."))
    if rest:
        more_ = f", and {len(rest) - 1} more are" if len(rest) > 1 else ""
        raise TreeError(
            f"load: {path} holds other tensors than this state: {rest[0]!r} is "
            f"{'there' if rest[0] in there else 'here'} only{more_}. Give the state the buffers that it was saved "
            "with, extras of the same trees, and the mesh axes of its experts."
        )
    if not opt and note["optimizer"] != _kind(state.optimizer):
        warnings.warn(
            f"load: {path} was written with the optimizer {note['optimizer']}, and this state has "
            f"{_kind(state.optimizer)}, whose state has the same names. What it holds is taken over as it is.",
            stacklevel=2,
        )
    chosen = [part for part in parts if part.name in there and not (opt and part.name.startswith("opt."))]
    for part in chosen:
        one = there[part.name]
        if part.name.startswith("residual."):
            continue
        convert = not part.plain and one.dtype.is_floating_point and part.tensor.dtype.is_floating_point
        if one.shape != part.shape or (one.dtype != part.tensor.dtype and not convert):
            raise CheckpointError(
                f"{path} has {part.name!r} as {one.dtype} {list(one.shape)}; this state has {part.tensor.dtype} "
                f"{list(part.shape)}. Build the state that was saved."
            )
    return chosen, bool(opt)


def with_residuals(
    state: State, chosen: list[SavedTensor], there: Mapping[str, Tensor]
) -> tuple[list[SavedTensor], list[tuple[SavedTensor, torch.Tensor]]]:
    """Of leaves whose errors other numbers of ranks have saved: all of them, to be added up. The sum is what counts.

    Returns:
        what is to be read, and the parts whose errors are to be made of what was read, see `share_residuals`.
    """
    read, left = [], []
    for part in chosen:
        if part.name.startswith("residual.") and there[part.name].shape != part.shape:
            whole = torch.empty(there[part.name].shape, dtype=part.tensor.dtype, device=part.tensor.device)
            left.append((part, whole))
            part = part._replace(tensor=whole, start=0, shape=there[part.name].shape)
        read.append(part)
    return read, left


def share_residuals(state: State, left: Iterable[tuple[SavedTensor, torch.Tensor]]) -> None:
    """Errors of other ranks, shared by these: what they add to a step's gradients stays the same."""
    for part, whole in left:
        numel = part.shape[0] // part.summands
        before, at = whole.numel() // max(numel, 1), part.start % max(numel, 1)
        total = whole.view(before, -1)[:, at : at + part.tensor.numel()].to(torch.float32).sum(dim=0)
        part.tensor.copy_(total / (before if state.spec.average == "mean" else part.summands))


def names_of(state: State, there: Mapping[str, Tensor]) -> dict[str, bool]:
    """Under which names any rank of this state has something to read, and whether it may be missing: numbers that the
    optimizer keeps by leaf are zero, then."""
    found: dict[str, bool] = {}
    run = runtime_of(state.spec.mesh)
    everywhere = places_of(any_apart(state, run), run.sizes)
    for field in SAVED:
        for node in nodes_of(getattr(state, field)):
            name = ".".join(filter(None, (field, node.path)))
            if isinstance(node.value, FlatBuffer):
                bucket = node.value.bucket
                places = places_of(bucket.apart(run.sizes), run.sizes)
                found |= {
                    f"{name}.{leaf.path}{at}": bucket.by_leaf or field == "residual"
                    for leaf in bucket.leaves
                    for at in places
                }
            elif node.value is not None:
                some = {f"{name}{at}": False for at in everywhere}
                found |= some if name not in there and some.keys() & there.keys() else {name: False}
    return found
