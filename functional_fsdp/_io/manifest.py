"""What of a state is saved, what a checkpoint says of itself, and which states may read it.

`parts_of`: which tensors of a state are saved, under which names, and by which rank.

    main.layers.0.w            a leaf: the 1-D tensor of its elements. Each rank has runs of leaves, wherever its slices
    opt.mean.layers.0.w        of buckets are cut; replicas have the same runs, and take turns to write them
    main.w of expert 1         ranks along an axis that a bucket is not averaged over have leaves of their own, or
                               parts of one: `layout.json` then says how it was cut
    extras.seen                a plain tensor, the same on all ranks: the first one writes
    extras.seen of expert 1    or the same on all ranks that have the same experts
    residual.layers.0.w        what packing has lost of a leaf's gradients: that of each rank, end to end

So nothing that is saved depends on units, buckets, placement or the number of ranks. A plain tensor that ranks with the
same experts hold differently is refused: it would be given to all of them.

`layout.json`: what a checkpoint says of itself (`about_of`, `FIELDS`).

format             which fields there are, and how they are written: `FORMAT`
step, save         how many steps were taken; the token of the save, which its files name, too
placement, mesh, average, optimizer      of the state that wrote it
leaves             {path: {shape, dtype, trainable, label, ties}}, in the order of the tree; ties are further paths.
                   Of packed leaves also "codec"; of those that were cut along axes of the model's own also "cuts",
                   [[axis, ranks, dim, sizes], ...]
paths, tree        all paths in the tree's order; its dicts, lists and tuples, with numbers of paths in the leaves'
                   place, or null where it is made of something else
extras, buffers    [[keys, "leaf" or "plain"], ...], of what lies under these names; null where keys are no text
local_buffers      paths of buffers that may differ by rank, as `shard(local_buffers=)` said
src                the rank that had the values where only one had them (`shard(src=)`), or null
activations        {path of a module: what becomes of what it saves}, where `T.budget` chose that; no reader asks for it
tensors            {name: [dtype, shape, chunks]}, a chunk is [start, stop, file, offset, length, data, sums]
files              {name: bytes}, every file beside this one
metadata           sha256 of `.metadata`
digest             sha256 of all of the above, so that a flipped byte shows

Every file has what `FIELDS` lists: one more there is another `FORMAT`, and older files are refused. What is written
only where it is given (codec, cuts, activations) needs neither: who reads it takes its absence for the default.

Compatibility (`check_same`, `fits`): what a checkpoint says of the state that wrote it, and what a state that reads it
must have in common.

leaves: paths, shapes, ties, experts     must be the same
placement, world, units, dtypes          are converted
average, another optimizer, replicas     must be said, by `allow=` (`ALLOWED`)
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._common.device import checksum
from .._common.errors import CheckpointError, SpecError, TreeError
from .._common.torch_names import pytree
from .._common.tree import flatten
from .._optim_extra.from_torch import FromTorch
from .._optim_extra.partition import Partition
from .._optim_extra.whole import WholeLeaves
from .._plan.layout import Leaf
from .._plan.route import Partial, Replicated
from .._redistribute import Node, leaf_infos, nodes_of
from .._runtime.runtime import Runtime, runtime_of
from .._state.state import State
from .._storage import FlatBuffer, leaf_shards
from .._verbs import counted, with_counts
from .folder import NOTE, inside, write_file

SAVED = ("main", "opt", "buffers", "count", "rng", "extras", "residual")
PLACE = " of "  # between a tensor's name and where the ranks are that have it
MAY_DIFFER = ("buffers",)  # where ranks keep their own, the first one's are saved
ALLOWED = ("average", "optimizer", "replicas")  # what `load(allow=)` may name
METADATA = ".metadata"
BLOCK = 1 << 22  # bytes of a tensor that have a sum of their own
FORMAT = 3  # of `layout.json`
FIELDS: dict[str, Any] = {
    "format": int, "step": int, "save": str, "placement": str, "mesh": str, "average": str, "optimizer": str,
    "leaves": dict, "paths": list, "tree": (dict, list, int, type(None)), "extras": (list, type(None)),
    "buffers": (list, type(None)), "local_buffers": list, "src": (int, type(None)), "tensors": dict,
    "files": dict, "metadata": str, "digest": str,
}  # fmt: skip


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
    for field, name, node in saved_nodes(state):
        for part in _parts(state, field, name, node):
            if names.setdefault(part.name, node.value) is not node.value:
                raise TreeError(f"checkpoint: two leaves of State.{field} have the name {part.name!r}. Rename one.")
            found.append(part)
    return found


def saved_nodes(state: State) -> Iterator[tuple[str, str, Node]]:
    """What of a state is saved: its field, the name under which it is saved, and it."""
    for field in SAVED:
        for node in nodes_of(getattr(state, field)):
            if node.value is not None:
                yield field, ".".join(filter(None, (field, node.path))), node


def _parts(state: State, field: str, name: str, node: Node) -> Iterator[SavedTensor]:
    value = node.value
    if isinstance(value, FlatBuffer):
        yield from _runs(state, name, value)
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
    yield SavedTensor(name, value, tuple(value.shape))


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


def buffers_of(state: State) -> dict[str, Any]:
    """Buffers by path."""
    return dict(zip(*flatten(state.buffers)[:2], strict=True))


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


def without_places(note: Mapping[str, Any]) -> Callable[[str], str]:
    """Of a tensor's name, what it is without where the ranks are that have it: `main.w of expert 0` -> `main.w`; but
    for leaves and plain tensors that the checkpoint's notes have under just that name."""
    own = {*note["leaves"], *(".".join(keys) for field in ("buffers", "extras") for keys, _ in note[field] or ())}

    def without_place(name: str) -> str:
        if any(letter == "." and name[at + 1 :] in own for at, letter in enumerate(name)):
            return name
        return re.sub(r" of [^ ,]+ \d+(, [^ ,]+ \d+)*$", "", name)

    return without_place


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


class Chunk(NamedTuple):
    """Where elements [start, stop) of a tensor lie: in `file[offset : offset + length]` as torch.save wrote them, their
    bytes alone from `data` on. sums: CRC-32s, of what torch.save wrote around these, and of each block of them."""

    start: int
    stop: int
    file: str
    offset: int
    length: int
    data: int
    sums: tuple[int, ...]


class Tensor(NamedTuple):
    """A tensor that is saved: its chunks cover its elements, in order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def head(token: str, file: str) -> bytes:
    """How a file of tensors begins: which save it is of, and which of its files. So swapped ones are found."""
    return f"functional_fsdp {token} {file}\n".encode()


def file_of(rank: int) -> str:
    """The file of tensors of a rank, by its place among all that save."""
    return f"__{rank}_0.distcp"


def write_note(folder: Path, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write `layout.json` to disk."""
    told = {
        name: [str(one.dtype).removeprefix("torch."), list(one.shape), [[*c[:-1], list(c.sums)] for c in one.chunks]]
        for name, one in tensors.items()
    }
    whole = {"format": FORMAT, **about, "tensors": told}
    text = json.dumps({**whole, "digest": _digest(whole)})
    write_file(folder / NOTE, text.encode())


def read_note(folder: Path) -> dict[str, Any]:
    """What `layout.json` says.

    Raises:
        FileNotFoundError: there is none. CheckpointError: it is damaged, or says something of another kind.
    """
    if not os.path.lexists(folder / NOTE):
        raise FileNotFoundError(
            f"load: {folder} is not a complete checkpoint (it has no {NOTE}). What another package wrote goes to "
            "init(weights=), load_weights and load_optimizer_state."
        )
    with inside(folder, NOTE) as file:
        data = file.read()
    where = folder / NOTE
    try:
        note = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: it is no JSON ({error}). Load another checkpoint.") from None
    if not isinstance(note, dict):
        raise CheckpointError(f"{where} is damaged: it holds a {type(note).__name__}; expected an object.")
    if type(told := note.get("format")) is int and told != FORMAT:  # which may have other fields, and another digest
        remedy = "Update this package" if told > FORMAT else "Save it anew by the version that wrote it"
        raise CheckpointError(f"{where} is of format {told}; this version reads {FORMAT}. {remedy}.")
    for key, kind in FIELDS.items():
        if key not in note:
            raise CheckpointError(f"{where} has no {key!r}. Load another checkpoint.")
        if not isinstance(note[key], kind) or type(note[key]) is bool:
            raise CheckpointError(f"{where} has {note[key]!r} as {key!r}; expected {kind}.")
    if note["digest"] != _digest({key: value for key, value in note.items() if key != "digest"}):
        raise CheckpointError(f"{where} is damaged: its digest is another. Load another checkpoint.")
    sound = all(type(size) is int and size >= 0 for size in note["files"].values())
    if note["step"] < 0 or not sound or METADATA not in note["files"]:
        raise CheckpointError(f"{where} says step {note['step']} and files {note['files']}, which no save has written.")
    return note


def tensors_of(where: Path, note: Mapping[str, Any]) -> dict[str, Tensor]:
    """Which tensors there are, and where their chunks lie.

    Raises:
        CheckpointError: an entry that no save has written: of an unknown dtype, with elements that no chunk has or that
            two have, outside of the checkpoint's files.
    """
    return {name: _tensor(where / NOTE, name, entry, note["files"]) for name, entry in note["tensors"].items()}


def _tensor(where: Path, name: str, entry: Any, files: Mapping[str, int]) -> Tensor:
    try:
        kind, shape, chunks = entry
        dtype = getattr(torch, kind, None) if isinstance(kind, str) else None
        if not isinstance(dtype, torch.dtype) or not all(type(n) is int and n >= 0 for n in shape):
            raise _odd(where, name, f"has it as {kind!r} {shape!r}; expected a dtype and a shape")
        found = Tensor(dtype, tuple(shape), [Chunk._make([*c[:-1], tuple(c[-1])]) for c in chunks])
        at = 0
        for chunk in found.chunks:
            numbers = (chunk.start, chunk.stop, chunk.offset, chunk.length, chunk.data, *chunk.sums)
            if not all(type(n) is int and n >= 0 for n in numbers):
                raise _odd(where, name, f"has a chunk {tuple(chunk)}; expected whole numbers")
            if chunk.start != at or chunk.stop < at:
                raise _odd(where, name, f"has no chunk for its elements from {at} on, or two")
            if type(chunk.file) is not str or chunk.file not in files or chunk.file == METADATA:
                raise _odd(where, name, f"has it in {chunk.file!r}, which is no file of this checkpoint")
            size, at = (chunk.stop - chunk.start) * dtype.itemsize, chunk.stop
            if len(chunk.sums) != 1 + -(-size // BLOCK):
                raise _odd(where, name, f"has {len(chunk.sums)} sums for {size} bytes")
            end = chunk.offset + chunk.length
            if end > files[chunk.file] or not chunk.offset <= chunk.data <= chunk.data + size <= end:
                raise _odd(where, name, f"has it in bytes {chunk.data} + {size} of {chunk.file!r}, beyond its place")
        if at != found.numel:
            raise _odd(where, name, f"has chunks for {at} of its {found.numel} elements")
        return found
    except CheckpointError:  # a ValueError, too
        raise
    except (TypeError, ValueError, IndexError) as error:
        raise _odd(where, name, f"has {str(entry)[:80]} there ({error})") from None


def _odd(where: Path, name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{where}, for {name!r}: it {what}. No save has written this. Load another checkpoint.")


def sizes(folder: Path, note: Mapping[str, Any]) -> None:
    """Check that the files are there, and as long as they were written.

    Raises:
        CheckpointError: naming the first that is not.
    """
    for name, nbytes in note["files"].items():
        with inside(folder, name) as file:
            found = os.fstat(file.fileno()).st_size
        if found != nbytes:
            raise CheckpointError(f"{folder / name} has {found} bytes; {nbytes} were written. Load another checkpoint.")


def unchanged(folder: Path, note: Mapping[str, Any]) -> None:
    """Check that `.metadata` is what was written, for those who read it by torch's tools."""
    with inside(folder, METADATA) as file:
        found = hashlib.sha256(file.read()).hexdigest()
    if found != note["metadata"]:
        raise CheckpointError(f"{folder / METADATA} is damaged: its digest is another. Load another checkpoint.")


def _digest(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def about_of(state: State) -> dict[str, Any]:
    """What `layout.json` says of a state beside its tensors."""
    at = state.layout.leaves
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
    leaves = state.layout.leaves
    here = {p: leaves[source].whole for p, source in zip(state.layout.paths, state.layout.source, strict=True)}
    there = {p: tuple(leaf["shape"]) for path_, leaf in note["leaves"].items() for p in (path_, *leaf["ties"])}
    said = [
        *(f"{p!r} is missing there" for p in here if p not in there),
        *(f"{p!r} is there, and this state has it not" for p in there if p not in here),
        *(f"{p!r} is {list(there[p])} there, {list(here[p])} here" for p in here if there.get(p, here[p]) != here[p]),
    ]
    codecs = {p: str(leaf.form.codec) for p, leaf in leaves.items() if leaf.form}
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
        kinds = note["optimizer"], _kind(state.optimizer)
        first = {"there" if name in there else "here": name for name in reversed(opt)}
        differs = ", ".join(f"{name!r} is {at} only" for at, name in first.items())
        said = (
            f"a {kinds[0]} that keeps something else, as by other settings (momentum, amsgrad) or another version"
            if kinds[0] == kinds[1]
            else f"another optimizer: {kinds[0]} there, {kinds[1]} here"
        )
        raise SpecError(
            f"load: {path} was written with {said}; {differs}. Give the state the optimizer of the "
            "checkpoint (its numbers may be others), or begin with a new optimizer state: load(..., "
            "allow=['optimizer']). If it is what trains that differs, load it with its own Spec(trainable=), and "
            "freeze or unfreeze then."
        )
    rest = sorted(name for name in (*other, *more) if not name.startswith("opt."))
    if rest:
        more_ = f", and {len(rest) - 1} more are" if len(rest) > 1 else ""
        raise TreeError(
            f"load: {path} holds other tensors than this state: {rest[0]!r} is "
            f"{'there' if rest[0] in there else 'here'} only{more_}. Give the state the buffers that it was saved "
            "with, extras of the same trees, and the mesh axes of its experts."
        )
    if not opt and note["optimizer"] != _kind(state.optimizer) and any(name.startswith("opt.") for name in there):
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
    chosen: list[SavedTensor], there: Mapping[str, Tensor]
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
    for field, name, node in saved_nodes(state):
        if isinstance(node.value, FlatBuffer):
            bucket = node.value.bucket
            places = places_of(bucket.apart(run.sizes), run.sizes)
            optional = bucket.by_leaf or field == "residual"
            found |= {f"{name}.{leaf.path}{at}": optional for leaf in bucket.leaves for at in places}
        else:
            some = {f"{name}{at}": False for at in everywhere}
            found |= some if name not in there and some.keys() & there.keys() else {name: False}
    return found
