"""Manifest: `layout.json`, what a checkpoint says of itself.

step, save         how many steps were taken; the token of the save, which its files name, too
placement, mesh, average, optimizer      of the state that wrote it
leaves             {path: {shape, dtype, trainable, label, ties}}, in the order of the tree; ties are further paths.
                   Of leaves that were cut along axes of the model's own also "cuts", [[axis, ranks, dim, sizes], ...]
paths, tree        all paths in the tree's order; its dicts, lists and tuples, with numbers of paths in the leaves'
                   place, or null where it is made of something else
extras, buffers    [[keys, "leaf" or "plain"], ...], of what lies under these names; null where keys are no text
local_buffers      paths of buffers that may differ by rank, as `shard(local_buffers=)` said
src                the rank that had the values where only one had them (`shard(src=)`), or null
tensors            {name: [dtype, shape, chunks]}, a chunk is [start, stop, file, offset, length, data, sums]
files              {name: bytes}, every file beside this one
metadata           sha256 of `.metadata`
digest             sha256 of all of the above, so that a flipped byte shows
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._common.errors import CheckpointError
from .folder import NOTE, inside, write_file

__all__ = [
    "BLOCK",
    "METADATA",
    "NOTE",
    "Chunk",
    "Tensor",
    "file_of",
    "head",
    "merged",
    "read_note",
    "sizes",
    "tensors_of",
    "unchanged",
    "write_note",
]

METADATA = ".metadata"
BLOCK = 1 << 22  # bytes of a tensor that have a sum of their own
FORMAT = 3
FIELDS: dict[str, Any] = {
    "format": int, "step": int, "save": str, "placement": str, "mesh": str, "average": str, "optimizer": str,
    "leaves": dict, "paths": list, "tree": (dict, list, int, type(None)), "extras": (list, type(None)),
    "buffers": (list, type(None)), "local_buffers": list, "src": (int, type(None)), "tensors": dict,
    "files": dict, "metadata": str, "digest": str,
}  # fmt: skip


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


def merged(written: list[Any]) -> dict[str, Tensor]:
    """The tensors of which ranks have written chunks."""
    found: dict[str, Tensor] = {}
    for name, dtype, shape, chunk in written:
        found.setdefault(name, Tensor(dtype, tuple(shape), [])).chunks.append(chunk)
    return {name: one._replace(chunks=sorted(one.chunks)) for name, one in sorted(found.items())}


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
    for key, kind in FIELDS.items():
        if key not in note:
            raise CheckpointError(f"{where} has no {key!r}. Load another checkpoint.")
        if not isinstance(note[key], kind) or type(note[key]) is bool:
            raise CheckpointError(f"{where} has {note[key]!r} as {key!r}; expected {kind}.")
    if note["digest"] != _digest({key: value for key, value in note.items() if key != "digest"}):
        raise CheckpointError(f"{where} is damaged: its digest is another. Load another checkpoint.")
    if note["format"] != FORMAT:
        raise CheckpointError(f"{where} is of format {note['format']}; this version reads {FORMAT}.")
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
