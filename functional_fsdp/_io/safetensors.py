"""save_safetensors: the weights as Hugging Face's files, each rank writing its runs at their places.

folder/                                  appears by one rename, when everything is on disk
  model-00001-of-00003.safetensors       the first rank writes headers and makes room; then all ranks write
  model.safetensors.index.json           which leaf is in which file
"""

from __future__ import annotations

import json
import os
from numbers import Real
from pathlib import Path

import torch

from .._common.calls import alone
from .._common.errors import SpecError, as_path, expect
from .._common.tree import flatten
from .._runtime.agreement import Topic, agree
from .._runtime.runtime import runtime_of
from .._state.state import State
from .checkpoint import saving
from .conversions import Conversions, checked, part_of, same_conversions
from .folder import check_shared, sync, write_file
from .parts import parts_of, place_at, refuse_packed
from .pieces import Piece, blocks, pieces
from .safetensors_file import DTYPES, Entry, create, entries, write_at

__all__ = ["Tensors", "file_names", "files_of", "save_safetensors", "write_index"]

Tensors = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Files = list[Tensors]
Pieces = dict[str, list[Piece]]
Plan = tuple[Pieces, int]  # of each leaf, and how many files


@alone
@torch.no_grad()
def save_safetensors(
    state: State,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5_000_000_000,
    convert: Conversions | None = None,
) -> Path:
    """Write the weights to `folder` as safetensors with an index, as `from_pretrained` reads them. Never consumes it.

    Names are those of the leaves and buffers, or what `convert` says; a tied leaf is written once, by its first path.

    Args:
        folder: appears when everything is on disk. All ranks must see it.
        dtype: of floating leaves in the files; None: that of `Precision.main`.
        max_shard_size: bytes of a file at most; a leaf of the file is never cut.
        convert: {path: which leaves of the file hold the leaf} where that is not one of its name; see `load_weights`.
            With `conversions_of(model)` files are those that save_pretrained writes. Of a transposed leaf a rank writes
            a run for each row of the file.

    Returns:
        the folder.

    Memory: on the host 16 Mi elements a rank, on the device as much for a transposed leaf; nothing is gathered.

    Raises:
        StaleStateError: a state in the middle of a step. SpecError: a dtype that safetensors has not, experts of
            which ranks have their own, a conversion of no leaf, one that does not fit its leaf, several that leave room
            in a leaf of the file, or ranks that were given different ones. FileExistsError: the folder exists.
            CheckpointError: ranks name different folders, or do not see the same. OSError: what a rank met. If one
            rank raises, all do.

    Collective: every rank calls it; exchanges on the host.

    Example: `fsdp.save_safetensors(state, "mixtral-tuned", dtype=torch.bfloat16, convert=fsdp.conversions_of(model))`.
    """
    with saving("save_safetensors", state, folder) as (joint, _, _, path, claim):
        run = joint.run

        def begin() -> tuple[Plan, list[Topic]]:
            state._resting("save_safetensors")
            cuts = checked(convert, (*state.layout.paths, *flatten(state.buffers)[0]))
            parts, tensors = _tensors(state, dtype, cuts)
            files = files_of(tensors, max_shard_size)
            if claim is not None:
                claim.make()
                names = file_names(len(files))
                for name, some in zip(names, files, strict=True):
                    create(path / name, some)
                if len(files) > 1:
                    write_index(path, names, files)
            return (parts, len(files)), [same_conversions(cuts)]

        def write() -> None:
            check_shared("save_safetensors", path, run.ranks, run.rank)
            _write(state, path, *plan)

        def complete() -> None:
            if claim is not None:
                claim.appear()

        plan = agree(joint, "begin", begin)
        joint(write, "weights")
        joint(complete, "end")
    return as_path("folder", folder)


def _tensors(state: State, dtype: torch.dtype | None, convert: Conversions) -> tuple[Pieces, Tensors]:
    """The pieces of each leaf and buffer, and the leaves of the files: in the tree's order, then those of buffers."""
    if dtype is not None and (dtype not in DTYPES.values() or not dtype.is_floating_point):
        raise SpecError(f"save_safetensors(dtype={dtype}): expected a floating dtype that safetensors has, or None.")
    run = runtime_of(state.spec.mesh)
    at = {leaf.path: (leaf, bucket) for bucket in state.layout.buckets.values() for leaf in bucket.leaves}
    leaves: Tensors = {}
    for path in state.layout.paths:
        if path in at:
            leaf, bucket = at[path]
            refuse_packed("save_safetensors", leaf)
            own = [*bucket.unlike(run.sizes)]
            if own:
                raise SpecError(
                    f"save_safetensors: ranks along {own} have {path!r} of their own, and a file has one leaf of a "
                    "name. Save a checkpoint, which has all of them."
                )
            leaves[path] = (dtype if dtype and bucket.main.is_floating_point else bucket.main), leaf.whole
    for path, held in zip(*flatten(state.buffers)[:2], strict=True):
        if path in leaves:
            raise SpecError(f"save_safetensors: a parameter and a buffer are both called {path!r}. Rename one of them.")
        leaves[path] = held.dtype, tuple(held.shape)
    parts = {path: pieces(path, shape, convert.get(path, path)) for path, (_, shape) in leaves.items()}
    tensors: Tensors = {}
    owners: dict[str, list[tuple[str, Piece]]] = {}
    for path, some in parts.items():
        for piece in some:
            said = leaves[path][0], piece.shape
            if tensors.setdefault(piece.name, said) != said:
                kind, shape = tensors[piece.name]
                raise SpecError(
                    f"save_safetensors: {piece.name!r} is {kind} {list(shape)} by other leaves and {said[0]} "
                    f"{list(said[1])} by {path!r}. Say of all of them one shape; if their dtypes differ, give dtype=."
                )
            where = owners.setdefault(piece.name, [])
            where += [(path, piece)]
            twice = [other for other, before in where[:-1] if piece.meets(before)]
            if twice:
                raise SpecError(
                    f"save_safetensors: {twice[0]!r} and {path!r} have the same elements of {piece.name!r}. Give each "
                    "leaf a name, or a slice, of its own by convert=."
                )
    for name, (_, shape) in tensors.items():
        filled, whole = sum(piece.numel for _, piece in owners[name]), torch.Size(shape).numel()
        if filled != whole:
            raise SpecError(
                f"save_safetensors: {name!r} has {whole} elements as {list(shape)}, and leaves fill {filled} of them. "
                "Say by convert= which leaves have the others."
            )
    unknown = [(name, kind) for name, (kind, _) in tensors.items() if kind not in DTYPES.values()]
    if unknown:
        raise SpecError(f"save_safetensors: {unknown[0][0]!r} is {unknown[0][1]}, which safetensors has not.")
    for path, (leaf, _) in at.items():
        if leaf.cuts:
            mine = part_of(convert.get(path, path), leaf.whole, leaf.cuts, run.coordinate)
            parts[path] = pieces(path, leaf.shape, mine)
    return parts, tensors


def files_of(tensors: Tensors, most: int) -> Files:
    """What goes into which file, in that order."""
    expect("max_shard_size", most, Real, "a number of bytes")
    files: Files = [{}]
    size = 0
    for name, (kind, shape) in tensors.items():
        n = torch.Size(shape).numel() * kind.itemsize
        if files[-1] and size + n > most:
            files.append({})
            size = 0
        files[-1][name] = (kind, shape)
        size += n
    return files


def file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def write_index(path: Path, names: list[str], files: Files) -> None:
    total = sum(torch.Size(shape).numel() * kind.itemsize for some in files for kind, shape in some.values())
    index = {name: file for file, some in zip(names, files, strict=True) for name in some}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    write_file(path / "model.safetensors.index.json", text.encode())


def _write(state: State, path: Path, parts: Pieces, files: int) -> None:
    """This rank's runs, and of the first rank buffers, at their places."""
    places: dict[str, Entry] = {}
    for name in file_names(files):
        places |= entries(path / name)
    run = runtime_of(state.spec.mesh)
    paths = {
        f"main.{leaf.path}{place_at(run, bucket.apart(run.sizes))}": leaf.path
        for bucket in state.layout.buckets.values() for leaf in bucket.leaves
    }  # fmt: skip
    mine = [
        (paths[part.name], part.start, part.tensor) for part in parts_of(state) if part.name in paths and part.writes
    ]
    if run.rank == 0:
        mine += [(name, 0, held) for name, held in zip(*flatten(state.buffers)[:2], strict=True)]
    opened: dict[Path, int] = {}
    try:
        for name, start, tensor in mine:
            flat = tensor.detach().reshape(-1)
            for piece in parts[name]:
                place = places[piece.name]
                if place.path not in opened:
                    opened[place.path] = os.open(place.path, os.O_WRONLY)
                for block in blocks(piece, start, start + flat.numel()):
                    host = block.of(flat, start).to("cpu", place.dtype).contiguous()
                    write_at(opened[place.path], place, block.file, host)
        for file in opened.values():
            os.fsync(file)
    finally:
        for file in opened.values():
            os.close(file)
    sync(path)
