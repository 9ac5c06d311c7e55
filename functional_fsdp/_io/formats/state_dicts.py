"""Single files of torch.save: a state dict, or what a trainer saves, with a state dict and an optimizer's in it.

Lightning    "state_dict", "optimizer_states", "pytorch-lightning_version", "global_step"
others       "model" or "model_state_dict" or "state_dict" or "module"; "optimizer" or "optimizer_state_dict"

Files of ranks: each rank's state dict of DTensors, by torch.save, as verl writes them, put together without ranks.

model_world_size_2_rank_0.pt    boxes of leaves, and how the mesh cuts them
optim_world_size_2_rank_0.pt    the same of an optimizer's state
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..._common.errors import CheckpointError
from ..contents import Contents, buffers_by_shards, by_number, plain_name, plain_names, steps_from, without_prefix
from ..pickles import Distributed, Held, read_saved, span_of
from ..spans import Cut, box, numel_of
from .hugging_face import tensors_of

__all__ = ["RankFiles", "StateDict", "moments_of", "weights_of"]

MODELS = ("state_dict", "model_state_dict", "model", "module")
OPTIMIZERS = ("optimizer_states", "optimizer_state_dict", "optimizer", "optim")


class StateDict:
    """A file that is not of safetensors."""

    def claims(self, path: Path) -> bool:
        return path.is_file()

    def read(self, path: Path) -> Contents:
        tree, span = read_saved(path)
        if not isinstance(tree, Mapping):
            raise CheckpointError(f"{path} holds a {type(tree).__name__}; expected a state dict.")
        name = next((n for n in MODELS if isinstance(tree.get(n), Mapping)), None)
        if name is None:
            found, ties, prefix = weights_of(path, tree, span)
            return Contents("torch.save", found, ties=ties or None, prefix=prefix)
        found, ties, prefix = weights_of(path, tree[name], span)
        version = tree.get("pytorch-lightning_version")
        optimizer = next((tree[n] for n in OPTIMIZERS if tree.get(n)), None)
        several = len(optimizer) if isinstance(optimizer, list) else 1
        if isinstance(optimizer, list):
            optimizer = optimizer[0] if several == 1 else None
        moments, why = moments_of(path, optimizer, found, span, prefix) if optimizer else ({}, "")
        why = f"{path.name}: states of {several} optimizers" if several > 1 else why
        steps = steps_from(moments)
        step = tree.get("global_step")
        left = [n for n in tree if n != name and n not in OPTIMIZERS]
        return Contents(
            "Lightning" if version else f"torch.save, {name!r}",
            found,
            version if isinstance(version, str) else None,
            ties=ties or None,
            moments=moments,
            steps=steps,
            step=step if isinstance(step, int) else None,
            prefix=prefix,
            left=(*left, *([why] if why else [])),
        )


def weights_of(path: Path, tree: Mapping[Any, Any], span: Any) -> tuple[dict[str, Any], dict[str, str], str]:
    """A state dict's tensors, ties once; its ties; and the prefix that its names had."""
    if any(isinstance(one, Distributed) for one in tree.values()):
        raise CheckpointError(
            f"{path} has DTensors, of which it is one rank's file. Open the folder of all ranks' files: {path.parent}."
        )
    tree = {name: one for name, one in tree.items() if not (isinstance(name, str) and name.endswith("_extra_state"))}
    found, ties = tensors_of(path, tree, span)
    names = plain_names(found)
    prefix = without_prefix([*names.values()])
    names = {name: plain.removeprefix(prefix) for name, plain in names.items()}
    kept = {names[name]: one for name, one in found.items() if name not in ties}
    return kept, {names[alias]: names[first] for alias, first in ties.items()}, prefix


def moments_of(
    path: Path, optimizer: Any, weights: Mapping[str, Any], span: Any, prefix: str = ""
) -> tuple[dict[str, dict[str, Any]], str]:
    """What a torch.optim optimizer's state dict keeps, by the names of weights; and why there is nothing."""
    if not isinstance(optimizer, Mapping) or not isinstance(optimizer.get("state"), Mapping):
        return {}, f"{path.name}: an optimizer's state that is no state dict of torch.optim"
    state = {
        key: {slot: span_of(t, span) for slot, t in kept.items() if isinstance(t, Held | int | float) or _lies(t)}
        for key, kept in optimizer["state"].items()
    }
    if state and all(isinstance(key, str) for key in state):
        return {plain_name(key).removeprefix(prefix): kept for key, kept in state.items()}, ""
    return by_number(path, state, optimizer.get("param_groups", ()), weights)


def _lies(one: Any) -> bool:
    return hasattr(one, "shape") and hasattr(one, "dtype")


FILE = re.compile(r"^(?P<what>.*?)(?:_world_size_(?P<world>\d+))?_rank_?(?P<rank>\d+)\.(?:pt|pth|bin)$")
Tree = Mapping[Any, Any]
Spanned = tuple[Tree, Callable[[Held], Any], Path]


class RankFiles:
    """A folder with a file of each rank."""

    def claims(self, path: Path) -> bool:
        return path.is_dir() and bool(_files(path, "model"))

    def read(self, path: Path) -> Contents:
        ranks = _opened(path, _files(path, "model"))
        weights, ties = _joined(ranks, [tree for tree, _, _ in ranks])
        names = plain_names(weights)
        prefix = without_prefix([*names.values()])
        names = {name: plain.removeprefix(prefix) for name, plain in names.items()}
        found = {names[name]: one for name, one in weights.items() if name not in ties}
        moments, left = _moments(path, found, len(ranks))
        steps = steps_from(moments)
        return Contents(
            "files of ranks (torch.save of DTensors)", found, None, len(ranks),
            {names[alias]: names[one] for alias, one in ties.items()} or None,
            buffers=buffers_by_shards(found, moments), moments=moments, steps=steps, prefix=prefix, left=left,
        )  # fmt: skip


def _files(path: Path, kind: str) -> dict[int, tuple[Path, int | None]]:
    """The files of ranks of a kind: {rank: (file, how many there are, as its name says)}."""
    found: dict[int, tuple[Path, int | None]] = {}
    for file in path.iterdir():
        match = FILE.match(file.name)
        if match and kind in match["what"]:
            rank = int(match["rank"])
            if rank in found:
                raise CheckpointError(f"{path} has two files of rank {rank}: {file.name} and {found[rank][0].name}.")
            found[rank] = (file, int(match["world"]) if match["world"] else None)
    return found


def _opened(path: Path, files: Mapping[int, tuple[Path, int | None]]) -> list[Spanned]:
    """What each rank's file holds, of all ranks."""
    world = max([max(files) + 1, *(n for _, n in files.values() if n)])
    missing = [rank for rank in range(world) if rank not in files]
    if missing:
        name = next(iter(files.values()))[0].name
        raise CheckpointError(f"{path} lacks the file of rank {missing[0]} of {world}, beside {name}.")
    found = []
    for rank in range(world):
        file, said = files[rank]
        if said not in (None, world):
            raise CheckpointError(f"{file} is of {said} ranks, and another file there is of {world}.")
        tree, span = read_saved(file)
        if not isinstance(tree, Mapping):
            raise CheckpointError(f"{file} holds a {type(tree).__name__}; expected a state dict.")
        found.append((tree, span, file))
    return found


def _joined(ranks: list[Spanned], trees: list[Tree]) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors of all ranks' trees, put together; and those that are the same bytes."""
    found: dict[str, Any] = {}
    ties: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, one in trees[0].items():
        if not isinstance(one, Distributed | Held) and not hasattr(one, "untyped_storage"):
            continue
        for (_, _, file), tree in zip(ranks, trees, strict=True):
            if name not in tree or type(tree[name]) is not type(one):
                raise CheckpointError(f"{file} has no {name!r} as the first rank's file has it: is it of another run?")
        found[name] = _leaf(name, [tree[name] for tree in trees], ranks)
        local = one.local if isinstance(one, Distributed) else one
        if isinstance(local, Held) and numel_of(local.shape):
            key = (local.storage.name, local.first, local.shape)
            if first.setdefault(key, name) != name:
                ties[name] = first[key]
    return found, ties


def _leaf(name: str, held: list[Any], ranks: list[Spanned]) -> Any:
    """One tensor, from what each rank has of it."""
    one = held[0]
    if not isinstance(one, Distributed):
        return span_of(one, ranks[0][1])
    parts = []
    for rank, (part, (_, span, file)) in enumerate(zip(held, ranks, strict=True)):
        if (part.shape, part.mesh, part.placements) != (one.shape, one.mesh, one.placements):
            raise CheckpointError(
                f"{file} has {name!r} of another shape or on another mesh than the first rank's file."
            )
        if numel_of(one.mesh) != len(ranks):
            raise CheckpointError(
                f"{file} is of {numel_of(one.mesh)} ranks (mesh {[*one.mesh]}); {len(ranks)} are there."
            )
        place = _place(rank, part)
        if place is None:
            continue
        offsets, sizes = place
        if part.local.shape != tuple(sizes):
            raise CheckpointError(
                f"{file} has {[*part.local.shape]} of {name!r} {[*one.shape]}; rank {rank} of {len(ranks)} should have "
                f"{sizes}."
            )
        parts.append(box(one.shape, offsets, sizes, span(part.local)))
    return Cut(one.shape, one.local.dtype, tuple(parts))


def _place(rank: int, part: Distributed) -> tuple[list[int], list[int]] | None:
    """Where a rank's box begins, and its sizes, as torch cuts them; None of further replicas."""
    offsets, sizes = [0] * len(part.shape), [*part.shape]
    inner = numel_of(part.mesh)
    for n, (kind, dim) in zip(part.mesh, part.placements, strict=True):
        inner //= n
        i = rank // inner % n
        if kind == "replicate":
            if i:
                return None
            continue
        each = -(-sizes[dim] // n)
        start = min(sizes[dim], each * i)
        offsets[dim], sizes[dim] = offsets[dim] + start, min(each, sizes[dim] - start)
    return offsets, sizes


def _state_of(one: Spanned) -> Mapping[Any, Any]:
    tree, _, file = one
    found = tree.get("state")
    if not isinstance(found, Mapping) or not all(isinstance(kept, Mapping) for kept in found.values()):
        raise CheckpointError(f"{file} has no 'state' by parameters: it is no state dict of an optimizer.")
    return found


def _moments(path: Path, weights: dict[str, Any], world: int) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    files = _files(path, "optim")
    if not files:
        return {}, ()
    ranks = _opened(path, files)
    if len(ranks) != world:
        raise CheckpointError(f"{path} has weights of {world} ranks and optimizer states of {len(ranks)}.")
    state: dict[Any, dict[str, Any]] = {}
    for key in _state_of(ranks[0]):
        trees = [_state_of(one).get(key, {}) for one in ranks]
        numbers = {slot: one for slot, one in trees[0].items() if isinstance(one, int | float)}
        state[key] = {**_joined(ranks, trees)[0], **numbers}
    if state and all(isinstance(key, str) for key in state):
        return {plain_name(key): kept for key, kept in state.items()}, ()
    moments, why = by_number(path, state, ranks[0][0].get("param_groups", ()), weights)
    return moments, (why,) if why else ()
