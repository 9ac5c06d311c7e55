"""Parts: which tensors of a state are saved, under which names, and by which rank.

    main.layers.0.w            a leaf: the 1-D tensor of its elements. Each rank has runs of leaves, wherever its slices
    opt.mean.layers.0.w        of buckets are cut; replicas have the same runs, and take turns to write them
    main.w of expert 1         ranks along an axis that a bucket is not averaged over have leaves of their own, or
                               parts of one: `layout.json` then says how it was cut
    extras.seen                a plain tensor, the same on all ranks: the first one writes
    extras.seen of expert 1    or the same on all ranks that have the same experts
    residual.layers.0.w        what packing has lost of a leaf's gradients: that of each rank, end to end

So nothing that is saved depends on units, buckets, placement or the number of ranks. A plain tensor that ranks with the
same experts hold differently is refused: it would be given to all of them.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._common.device import checksum
from .._common.errors import SpecError, TreeError
from .._plan.layout import Leaf
from .._plan.route import Partial, Replicated
from .._redistribute import Node, nodes_of
from .._runtime.runtime import Runtime, runtime_of
from .._state.state import State
from .._storage import FlatBuffer, leaf_shards

__all__ = [
    *("PLACE", "SAVED", "SavedTensor", "any_apart", "by_place", "content", "named"),
    *("own_place", "parts_of", "place_at", "places_of", "plain_names", "refuse_packed", "without_place"),
]

SAVED = ("main", "opt", "buffers", "count", "rng", "extras", "residual")
PLACE = " of "  # between a tensor's name and where the ranks are that have it
MAY_DIFFER = ("buffers",)  # where ranks keep their own, the first one's are saved


class SavedTensor(NamedTuple):
    """What this rank holds of a tensor that is saved.

    Attributes:
        name: under which it is saved. Of a plain tensor, `plain_names` may add where it is.
        tensor: of a leaf a run of its elements [stop - start], a view; else the tensor itself.
        shape: of the whole, as it is saved: [elements] of a leaf.
        start: where the run begins, in elements of the leaf.
        writes: whether it is this rank's turn to write it; None of a plain tensor.
        counts: whether it is a number that the optimizer keeps for the leaf, which other states may lack.
        summands: how many tensors of the leaf's elements it is, end to end, of which this rank holds a part of one.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    start: int = 0
    writes: bool | None = None
    counts: bool = False
    summands: int = 1

    @property
    def plain(self) -> bool:
        return self.writes is None


def parts_of(state: State) -> list[SavedTensor]:
    """What this rank holds of the tensors that are saved.

    Raises:
        TreeError: a leaf that is no tensor, or none that can be written; two leaves of one name.
    """
    found: list[SavedTensor] = []
    names: dict[str, Any] = {}
    for field in SAVED:
        for node in nodes_of(getattr(state, field)):
            if node.value is None:
                continue
            for part in _parts(state, field, node):
                if names.setdefault(part.name, node.value) is not node.value:
                    raise TreeError(f"checkpoint: two leaves of State.{field} have the name {part.name!r}. Rename one.")
                found.append(part)
    return found


def _parts(state: State, field: str, node: Node) -> Iterator[SavedTensor]:
    value = node.value
    if isinstance(value, FlatBuffer):
        yield from _runs(state, ".".join(filter(None, (field, node.path))), value)
        return
    if not isinstance(value, torch.Tensor):
        raise TreeError(
            f"checkpoint: State.{field} holds a {type(value).__name__} at {node.path!r}; only tensors are written. "
            "Keep it as a tensor."
        )
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        raise TreeError(
            f"checkpoint: State.{field} holds a {type(value).__name__} of layout {value.layout} at {node.path!r}; only "
            "plain, dense tensors are written. Convert it."
        )
    yield SavedTensor(".".join(filter(None, (field, node.path))), value, tuple(value.shape))


def _runs(state: State, tree: str, buffer: FlatBuffer) -> Iterator[SavedTensor]:
    """The runs of leaves in this rank's slice of a bucket; of leaves without elements an empty one."""
    run, bucket = runtime_of(state.spec.mesh), buffer.bucket
    if tree == "residual":
        yield from _summands(run, buffer)
        return
    if summands := [axis for axis, one in buffer.states if one is Partial]:
        raise TreeError(
            f"checkpoint: State.{tree} is not added up over {', '.join(map(repr, summands))} yet: each rank has a "
            "summand, which no checkpoint tells apart. Call finish_reductions before you keep gradients."
        )
    own = place_at(run, bucket.apart(run.sizes))
    sharded = buffer.sharded()
    index, replicas = _number(run, [axis for axis in (*bucket.placement.data, *bucket.equal) if axis not in sharded])
    first = buffer.span()[0] == 0
    for leaf, at, local in leaf_shards(buffer):
        if local.numel() or (not leaf.numel and first):
            name = f"{tree}.{leaf.path}{own}"
            turn = zlib.crc32(f"{name} {at}".encode()) % replicas == index
            yield SavedTensor(name, local, (leaf.numel,), at, turn, bucket.by_leaf)


def _summands(run: Runtime, buffer: FlatBuffer) -> Iterator[SavedTensor]:
    """What packing has lost of each leaf, a summand on each rank along some axes: these end to end, [summands ·
    elements]."""
    bucket = buffer.bucket
    index, count = _number(run, [axis for axis, placed in buffer.states if placed is Partial])
    first = not any(run.coordinate[axis] for axis, placed in buffer.states if placed is Replicated)
    own = place_at(run, bucket.apart(run.sizes))
    for leaf, at, local in leaf_shards(buffer):
        if local.numel() or not leaf.numel:
            start = index * leaf.numel + at
            whole = (count * leaf.numel,)
            yield SavedTensor(f"residual.{leaf.path}{own}", local, whole, start, first, summands=count)


def _number(run: Runtime, axes: Iterable[str]) -> tuple[int, int]:
    """This rank's number among those along the axes, the last one fastest, and how many they are."""
    index, count = 0, 1
    for axis in axes:
        index, count = index * run.sizes[axis] + run.coordinate[axis], count * run.sizes[axis]
    return index, count


def content(part: SavedTensor) -> str:
    """What a tensor holds, as a text that ranks can compare."""
    number = int(checksum(part.tensor)) % (1 << 64)
    return f"{str(part.tensor.dtype).removeprefix('torch.')} {list(part.tensor.shape)} with checksum {number:016x}"


def place_at(run: Runtime, axes: Iterable[str]) -> str:
    """Where on axes that a bucket is not averaged over: ranks there have leaves of their own."""
    said = ", ".join(f"{axis} {run.coordinate[axis]}" for axis in axes)
    return f"{PLACE}{said}" if said else ""


def own_place(state: State) -> str:
    """Where on all axes that any bucket is not averaged over: plain tensors may differ there."""
    run = runtime_of(state.spec.mesh)
    return place_at(run, any_apart(state, run))


def by_place(there: Iterable[str]) -> dict[str, str]:
    """By its name without a place the first tensor that a checkpoint has of each: `main.w` -> `main.w of expert 0`."""
    found: dict[str, str] = {}
    for name in there:
        found.setdefault(name, name)
        at = name.find(PLACE)
        while at >= 0:
            found.setdefault(name[:at], name)
            at = name.find(PLACE, at + 1)
    return found


def without_place(name: str) -> str:
    """A tensor's name without where the ranks are that have it: `main.w of expert 0` -> `main.w`."""
    return re.sub(r" of [^ ,]+ \d+(, [^ ,]+ \d+)*$", "", name)


def any_apart(state: State, run: Runtime) -> list[str]:
    """The axes along which ranks have leaves of their own, of any bucket; in the mesh's order."""
    apart = {axis for bucket in state.layout.buckets.values() for axis in bucket.apart(run.sizes)}
    return [axis for axis in run.sizes if axis in apart]


def plain_names(
    what: str, ranks: list[int], rank: int, told: list[tuple[str, dict[str, str]]]
) -> dict[str, tuple[str, bool]]:
    """For each plain tensor the name under which it is saved, and whether by this rank.

    Args:
        what: the call, for errors. ranks: the global numbers of all that save; rank: this one's place among them.
        told: by rank, where on axes of experts it is, and what it holds.

    Raises:
        TreeError: ranks that have the same experts hold different tensors.
    """
    first: dict[str, int] = {}
    for other, (own, _) in enumerate(told):
        first.setdefault(own, other)
    found = {}
    for name in dict.fromkeys(name for _, held in told for name in held):
        field, _, path = name.partition(".")
        for other, (own, held) in enumerate(told):
            there = told[first[own]][1]
            if (name in held) != (name in there) or (held.get(name) != there.get(name) and field not in MAY_DIFFER):
                raise TreeError(
                    f"{what}: State.{field} holds a plain tensor at {path!r} that differs between ranks: rank "
                    f"{ranks[first[own]]} has {there.get(name, 'none')}, rank {ranks[other]} has "
                    f"{held.get(name, 'none')}. It is no FlatBuffer, so it would be written once and given to all "
                    "ranks. Keep what is sharded in FlatBuffers, as tree_map over the main weights in the optimizer's "
                    "init does; what is not must be the same on all ranks."
                )
        own, alike = told[rank][0], len({told[other][1].get(name) for other in first.values()}) == 1
        found[name] = (name, rank == 0) if alike else (name + own, rank == first[own])
    return found


def named(state: State, there: Mapping[str, Any]) -> list[SavedTensor]:
    """What this rank reads, under the names that a checkpoint has for it."""
    own = own_place(state)
    parts = parts_of(state)
    return [
        part._replace(name=part.name + own)
        if part.plain and part.name not in there and part.name + own in there
        else part
        for part in parts
    ]


def places_of(axes: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """Every place along these axes, as names of tensors say it."""
    places = itertools.product(*(range(sizes[axis]) for axis in axes))
    said = [", ".join(f"{axis} {i}" for axis, i in zip(axes, place, strict=True)) for place in places]
    return [f"{PLACE}{text}" if text else "" for text in said]


def refuse_packed(verb: str, leaf: Leaf) -> None:
    """Raise the SpecError for a packed leaf, of which a verb's files know nothing."""
    if leaf.form is not None:
        raise SpecError(
            f"{verb}: the leaf {leaf.path!r} is packed by {leaf.form.codec}, which these files do not have. Save a "
            "checkpoint, fsdp.save; an adapter of PEFT alone, fsdp.save_adapter, or in its base, fsdp.save_merged; or "
            "unpack it first: "
            f"redistribute(state, spec) with {{{leaf.path!r}: Precision(main={leaf.form.dtype})}}."
        )
