"""Parts: which tensors of a state are saved, under which names, and by which rank.

    main.w[0:128]              a shard, under the index of its slice; replicas have the same, and take turns to write
    main.w[0:128] of expert 1  ranks along an axis that a bucket is not averaged over have leaves of their own
    extras.seen                a plain tensor, the same on all ranks: the first one writes
    extras.seen of expert 1    or the same on all ranks that have the same experts

A plain tensor that ranks with the same experts hold differently is refused: it would be given to all of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ._checksum import checksum
from ._errors import TreeError
from ._flat import FlatBuffer
from ._runtime import Runtime, runtime_of
from ._state import State
from ._torch import pytree
from ._tree import Paths, flatten

__all__ = ["SAVED", "Part", "content", "named", "nodes_of", "own_place", "parts_of", "plain_names", "shard_name"]

SAVED = ("main", "opt", "buffers", "count", "rng", "extras")
MAY_DIFFER = ("buffers",)  # where ranks keep their own, the first one's are saved


class Part(NamedTuple):
    """A tensor of a state: the FlatBuffer that it is the shard of, or None."""

    field: str
    path: str
    tensor: torch.Tensor
    buffer: FlatBuffer | None

    @property
    def name(self) -> str:
        return f"{self.field}.{self.path}"


def nodes_of(tree: Any) -> tuple[Paths, list[Any]]:
    """Leaves with their paths, FlatBuffers whole."""

    def whole(x: Any) -> bool:
        return isinstance(x, FlatBuffer)

    nodes = pytree.tree_leaves(tree, is_leaf=whole)
    return flatten(pytree.tree_map(lambda x: 0, tree, is_leaf=whole))[0], nodes


def parts_of(state: State) -> list[Part]:
    """The tensors of a state that are saved.

    Raises:
        TreeError: a leaf that is no tensor, or none that can be written; two leaves of one name.
    """
    found: dict[str, Part] = {}
    for field in SAVED:
        for path, node in zip(*nodes_of(getattr(state, field)), strict=True):
            if node is None:
                continue
            part = Part(field, path, node.local if isinstance(node, FlatBuffer) else node, None)
            if not isinstance(part.tensor, torch.Tensor):
                raise TreeError(
                    f"checkpoint: State.{field} holds a {type(node).__name__} at {path!r}; only tensors are written. "
                    "Keep it as a tensor."
                )
            if type(part.tensor) not in (torch.Tensor, torch.nn.Parameter) or part.tensor.layout is not torch.strided:
                raise TreeError(
                    f"checkpoint: State.{field} holds a {type(part.tensor).__name__} of layout {part.tensor.layout} at "
                    f"{path!r}; only plain, dense tensors are written. Convert it."
                )
            if part.name in found:
                raise TreeError(f"checkpoint: two leaves of State.{field} have the path {path!r}. Rename one.")
            found[part.name] = part._replace(buffer=node) if isinstance(node, FlatBuffer) else part
    return list(found.values())


def content(part: Part) -> str:
    """What a tensor holds, as a text that ranks can compare."""
    number = int(checksum(part.tensor)) % (1 << 64)
    return f"{str(part.tensor.dtype).removeprefix('torch.')} {list(part.tensor.shape)} with checksum {number:016x}"


def shard_name(state: State, part: Part) -> tuple[str, bool]:
    """Under which name a shard is saved: with the index of its slice, so that replicas are written once; and whether by
    this rank. Replicas take turns."""
    assert part.buffer is not None
    run, bucket, (start, stop) = runtime_of(state.spec.mesh), part.buffer.bucket, part.buffer.span()
    own = [axis for axis in state.spec.axes if axis not in bucket.placement.data]
    name = f"{part.name}[{start}:{stop}]{_at(run, own)}"
    index, replicas = 0, 1
    for axis in bucket.placement.data:
        if axis not in part.buffer.sharded():
            index, replicas = index * run.sizes[axis] + run.coordinate[axis], replicas * run.sizes[axis]
    return name, zlib.crc32(name.encode()) % replicas == index


def _at(run: Runtime, axes: list[str]) -> str:
    """Where on axes that a bucket is not averaged over: ranks there have leaves of their own."""
    said = ", ".join(f"{axis} {run.coordinate[axis]}" for axis in axes if run.sizes[axis] > 1)
    return f" of {said}" if said else ""


def own_place(state: State) -> str:
    """Where on all axes that any bucket is not averaged over: plain tensors may differ there."""
    buckets = state.layout.buckets.values()
    axes = [axis for axis in state.spec.axes if any(axis not in bucket.placement.data for bucket in buckets)]
    return _at(runtime_of(state.spec.mesh), axes)


def plain_names(run: Runtime, told: list[tuple[str, dict[str, str]]]) -> dict[str, tuple[str, bool]]:
    """For each plain tensor the name under which it is saved, and whether by this rank.

    Args:
        told: by rank, where on axes of experts it is, and what it holds.

    Raises:
        TreeError: ranks that have the same experts hold different tensors.
    """
    first: dict[str, int] = {}
    for rank, (own, _) in enumerate(told):
        first.setdefault(own, rank)
    found = {}
    for name in dict.fromkeys(name for _, held in told for name in held):
        field, path = name.split(".", 1)
        for rank, (own, held) in enumerate(told):
            there = told[first[own]][1]
            if (name in held) != (name in there) or (held.get(name) != there.get(name) and field not in MAY_DIFFER):
                raise TreeError(
                    f"save: State.{field} holds a plain tensor at {path!r} that differs between ranks: rank "
                    f"{run.ranks[first[own]]} has {there.get(name, 'none')}, rank {run.ranks[rank]} has "
                    f"{held.get(name, 'none')}. It is no FlatBuffer, so it would be written once and given to all "
                    "ranks. Keep what is sharded in FlatBuffers, as tree_map over the main weights in the optimizer's "
                    "init does; what is not must be the same on all ranks."
                )
        own, alike = told[run.rank][0], len({told[rank][1].get(name) for rank in first.values()}) == 1
        found[name] = (name, run.rank == 0) if alike else (name + own, run.rank == first[own])
    return found


def named(state: State, entries: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that this rank reads, under the names that the checkpoint has for them."""
    own, found = own_place(state), {}
    for part in parts_of(state):
        if part.buffer is not None:
            name = shard_name(state, part)[0]
        else:
            name = part.name if part.name in entries or part.name + own not in entries else part.name + own
        found[name] = part.tensor
    return found
