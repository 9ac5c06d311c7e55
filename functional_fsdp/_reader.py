"""Reader: tensors out of the files of torch.distributed.checkpoint. Nothing that a file says is run or trusted.

    .metadata      unpickled by stand-ins for the few classes that belong there; any other name is an error
    __0_0.distcp   the bytes of a tensor, as torch.save's archive has them, compared with its CRC-32; no unpickling

Every name, offset, shape and dtype is checked before a tensor is read.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from ._errors import CheckpointError
from ._folder import inside
from ._note import METADATA, head
from ._writer import Entry

__all__ = ["check", "read_metadata", "read_tensors"]

CHUNK = 1 << 24  # bytes read at once
METADATA_CLASSES = "torch.distributed.checkpoint.metadata"
STORAGE_CLASSES = "torch.distributed.checkpoint.filesystem"
RECORDS = (
    (METADATA_CLASSES, "Metadata"),
    (METADATA_CLASSES, "TensorStorageMetadata"),
    (METADATA_CLASSES, "BytesStorageMetadata"),
    (METADATA_CLASSES, "ChunkStorageMetadata"),
    (METADATA_CLASSES, "TensorProperties"),
    (METADATA_CLASSES, "MetadataIndex"),
    (METADATA_CLASSES, "StorageMeta"),
    (STORAGE_CLASSES, "_StorageInfo"),
)
PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")


class _Unpickler(pickle.Unpickler):
    """Knows stand-ins only, made anew for each file, so that a file can call nothing and change no class of torch's."""

    def __init__(self, data: bytes, where: Path) -> None:
        super().__init__(io.BytesIO(data))
        self.where = where
        self.known: dict[tuple[str, str], Any] = {key: _record(key[1]) for key in RECORDS}
        self.known["torch", "Size"] = lambda sizes=(): tuple(sizes)
        self.known["torch.serialization", "_get_layout"] = lambda name: name
        self.known[METADATA_CLASSES, "_MEM_FORMAT_ENCODING"] = lambda number: number
        for name in PATHS:
            self.known["pathlib", name] = self.known["pathlib._local", name] = lambda *parts: parts

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.known:
            return self.known[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise CheckpointError(
            f"{self.where} asks for {module}.{name}, which does not belong in the metadata of a checkpoint. Nothing "
            "was run. Do not trust this checkpoint."
        )


def _record(name: str) -> type:
    """A class whose objects keep what they were pickled with, as `state`."""

    def __init__(self: Any, *given: Any) -> None:
        self.state = {}

    def __setstate__(self: Any, state: Any) -> None:
        self.state = state

    return type(name, (), {"__init__": __init__, "__setstate__": __setstate__, "state": {}})


def read_metadata(folder: Path, note: Mapping[str, Any]) -> dict[str, Entry]:
    """Which tensor lies where.

    Raises:
        CheckpointError: `.metadata` is another than the note says, asks for what does not belong there, holds
            something else than tensors, or names places outside the folder's files.
    """
    where = folder / METADATA
    with inside(folder, METADATA) as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != note["metadata"]:
        raise CheckpointError(f"{where} is damaged: its digest is another. Load another checkpoint.")
    try:
        root = _Unpickler(data, where).load()
        if type(root).__name__ != "Metadata":
            raise _odd(where, f"holds a {type(root).__name__}; expected Metadata")
        tensors, places = root.state["state_dict_metadata"], root.state["storage_data"]
        found = {_name(key): value for key, value in places.items()}
        return {name: _entry(name, about, found, note["files"], where) for name, about in tensors.items()}
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # whatever a crafted file makes of it
        raise CheckpointError(f"{where} is damaged: {type(error).__name__}: {error}") from error


def _odd(where: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{where} {what}. Load another checkpoint.")


def _name(index: Any) -> tuple[str, tuple[int, ...]]:
    return index.state["fqn"], tuple(index.state.get("offset") or ())


def _entry(name: str, about: Any, places: Mapping[Any, Any], files: Mapping[str, int], where: Path) -> Entry:
    if type(name) is not str or type(about).__name__ != "TensorStorageMetadata":
        raise _odd(
            where,
            f"has a {type(about).__name__} under {name!r}; expected a tensor, since reading another object could run "
            "code",
        )
    dtype, _, _, _, _ = about.state["properties"].state
    shape, chunks = about.state["size"], [chunk.state for chunk in about.state["chunks"]]
    zero = (0,) * len(shape)
    whole = [{"offsets": zero, "sizes": shape}] == chunks and all(type(n) is int and n >= 0 for n in shape)
    if not isinstance(dtype, torch.dtype) or not whole:
        raise _odd(where, f"has {name!r} as {dtype} {shape} in the parts {chunks}; expected one part, the whole")
    if (name, zero) not in places:
        raise _odd(where, f"does not say where {name!r} lies")
    place = places[name, zero].state
    file, offset, length = (place.get(key) for key in ("relative_path", "offset", "length"))
    if type(file) is not str or file not in files or file == METADATA:
        raise _odd(where, f"has {name!r} in {file!r}, which is no file of this checkpoint")
    if not (type(offset) is type(length) is int and offset >= 0 and length > 0 and offset + length <= files[file]):
        raise _odd(where, f"has {name!r} in bytes {offset} + {length} of {file!r}, which has {files[file]}")
    if place.get("transform_descriptors"):
        raise _odd(where, f"has {name!r} transformed by {place['transform_descriptors']}; expected it as it is")
    return Entry(name, dtype, shape, file, offset, length)


def check(folder: Path, entries: Mapping[str, Entry], wanted: Mapping[str, torch.Tensor]) -> None:
    """Check that the checkpoint has these tensors.

    Raises:
        CheckpointError: naming the first that it does not have, or has with another shape or dtype.
    """
    for name, tensor in wanted.items():
        if name not in entries:
            raise CheckpointError(f"{folder} has no {name!r}, which this state has. Build the state that was saved.")
        there = entries[name]
        if (there.shape, there.dtype) != (tuple(tensor.shape), tensor.dtype):
            raise CheckpointError(
                f"{folder} has {name!r} as {there.dtype} {list(there.shape)}; this state has {tensor.dtype} "
                f"{list(tensor.shape)}. Build the state that was saved."
            )


def read_tensors(
    folder: Path, note: Mapping[str, Any], entries: Mapping[str, Entry], into: Mapping[str, torch.Tensor]
) -> None:
    """Read tensors by name into memory of their shape and dtype.

    Raises:
        CheckpointError: naming the file and the tensor that is damaged.
    """
    by_file: dict[str, list[str]] = {}
    for name in into:
        by_file.setdefault(entries[name].file, []).append(name)
    for file, names in by_file.items():
        with inside(folder, file) as raw:
            begins = head(note["save"], file)
            found, size = raw.read(len(begins)), os.fstat(raw.fileno()).st_size
            if found != begins or size != note["files"][file]:
                raise CheckpointError(
                    f"{folder / file} is not the file that was written there: it begins with {found[:80]!r} and has "
                    f"{size} bytes; expected {begins!r} and {note['files'][file]}. Load another checkpoint."
                )
            for name in sorted(names, key=lambda name: entries[name].offset):
                try:
                    _read(raw, entries[name], into[name])
                except (OSError, MemoryError):
                    raise
                except Exception as error:  # whatever is damaged, zipfile has many words for it
                    if isinstance(error.__context__, OSError):  # and one for what could not be read
                        raise error.__context__ from None
                    raise CheckpointError(
                        f"{folder / file} is damaged where {name!r} lies (bytes {entries[name].offset} + "
                        f"{entries[name].length}): {type(error).__name__}: {error}. Load another checkpoint."
                    ) from error


def _read(raw: IO[bytes], entry: Entry, into: torch.Tensor) -> None:
    """The bytes of one tensor, from torch.save's archive, without its pickle. Every member's CRC is compared."""
    with zipfile.ZipFile(io.BufferedReader(_Part(raw, entry.offset, entry.length))) as archive:
        data = None
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile(f"{info.filename} is compressed")
            if info.filename.endswith("/data/0"):
                data = info
            else:
                archive.read(info)
        if data is None or data.file_size != into.nbytes:
            raise zipfile.BadZipFile(f"{data.file_size if data else 'no'} bytes of data; expected {into.nbytes}")
        target = into if into.is_contiguous() else torch.empty_like(into, memory_format=torch.contiguous_format)
        flat, buffer, at = target.reshape(-1).view(torch.uint8), bytearray(min(CHUNK, max(into.nbytes, 1))), 0
        chunk = torch.frombuffer(buffer, dtype=torch.uint8)
        with archive.open(data) as opened:
            member: Any = opened
            while n := member.readinto(buffer):  # the last one compares the CRC
                flat[at : at + n].copy_(chunk[:n])
                at += n
        if at != into.nbytes:
            raise EOFError(f"{at} bytes of data; expected {into.nbytes}")
        if target is not into:
            into.copy_(target)


class _Part(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self.file, self.start, self.size, self.at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        if at < 0:
            raise ValueError(f"before the part's begin: {at}")
        self.at = at
        return at

    def readinto(self, buffer: Any) -> int:
        self.file.seek(self.start + self.at)
        data: Any = self.file
        n = int(data.readinto(memoryview(buffer)[: max(self.size - self.at, 0)]))
        self.at += n
        return n
