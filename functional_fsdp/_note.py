"""Note: `layout.json`, what a checkpoint says of itself.

step, save         how many steps were taken; the token of the save, which its files name, too
placement, mesh, average, leaves, layout, optimizer, tree        what a state must have in common with it to be read
counted            buckets of which the optimizer counts steps by leaf
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
from typing import Any

from ._errors import CheckpointError
from ._folder import inside

__all__ = ["METADATA", "NOTE", "head", "read_note", "sizes", "write_note"]

NOTE = "layout.json"
METADATA = ".metadata"
FIELDS: dict[str, type] = {
    "step": int, "save": str, "placement": str, "mesh": str, "average": str, "leaves": int, "layout": str,
    "optimizer": str, "tree": dict, "counted": list, "files": dict, "metadata": str,
}  # fmt: skip


def head(token: str, file: str) -> bytes:
    """How a file of tensors begins: which save it is of, and which of its files. So swapped ones are found."""
    return f"functional_fsdp {token} {file}\n".encode()


def write_note(folder: Path, about: Mapping[str, Any]) -> None:
    """Write `layout.json` to disk."""
    text = json.dumps({**about, "digest": _digest(about)}, indent=1)
    with open(folder / NOTE, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_note(folder: Path) -> dict[str, Any]:
    """What `layout.json` says.

    Raises:
        FileNotFoundError: there is none. CheckpointError: it is damaged, or says something of another kind.
    """
    if not os.path.lexists(folder / NOTE):
        raise FileNotFoundError(f"load: {folder} is not a complete checkpoint (it has no {NOTE}).")
    with inside(folder, NOTE) as file:
        data = file.read()
    where = folder / NOTE
    try:
        note = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: it is no JSON ({error}). Load another checkpoint.") from None
    if not isinstance(note, dict):
        raise CheckpointError(f"{where} is damaged: it holds a {type(note).__name__}; expected an object.")
    for key, kind in {**FIELDS, "digest": str}.items():
        if key not in note:
            raise CheckpointError(f"{where} has no {key!r}. Load another checkpoint.")
        if type(note[key]) is not kind:
            raise CheckpointError(
                f"{where} has {note[key]!r} as {key!r}: a {type(note[key]).__name__}; expected {kind.__name__}."
            )
    if note["digest"] != _digest({key: value for key, value in note.items() if key != "digest"}):
        raise CheckpointError(f"{where} is damaged: its digest is another. Load another checkpoint.")
    sound = all(type(size) is int and size >= 0 for size in note["files"].values())
    sound = sound and all(type(name) is str for name in note["counted"])
    if note["step"] < 0 or not sound or METADATA not in note["files"]:
        raise CheckpointError(
            f"{where} says step {note['step']}, files {note['files']} and counts {note['counted']}, which no save has "
            "written."
        )
    return note


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


def _digest(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
