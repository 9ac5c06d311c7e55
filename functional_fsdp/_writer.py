"""Writer: tensors into the files of torch.distributed.checkpoint, each with whatever the disk says against it.

    __0_0.distcp   functional_fsdp <token> __0_0.distcp      which save, which file
                   torch.save(tensor), one after the other
    .metadata      a pickled `Metadata`: which tensor lies where; torch's tools read it

torch's own writer talks to all ranks while it writes and wraps what goes wrong; this one talks to none.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from ._note import METADATA, head
from ._torch import storage_info

__all__ = ["Entry", "write_metadata", "write_tensors"]


class Entry(NamedTuple):
    """Where a tensor lies: `file[offset : offset + length]`, bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


class _Sink:
    """What torch.save writes to. torch's writer aborts the process if a write raises while it is being destroyed, so
    none does: the first error is kept, and what comes after it goes nowhere."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: BaseException | None = None
        self.over = False

    def write(self, data: Any) -> int:
        try:
            if not self.over:
                self.file.write(data)
        except BaseException as error:
            self.error, self.over = error, True
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Once for all tensors, at the end."""


def write_tensors(folder: Path, file: str, token: str, tensors: Mapping[str, torch.Tensor]) -> tuple[list[Entry], int]:
    """Write tensors to a new file, to disk. Returns where they lie, and the file's bytes.

    Raises:
        OSError: as the disk gave it.
    """
    entries = []
    # the sums by which `_reader` finds damage are a setting of torch.save
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        with open(folder / file, "xb") as raw:
            raw.write(head(token, file))
            for name, tensor in tensors.items():
                start = raw.tell()
                _save(_plain(tensor), raw)
                entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), file, start, raw.tell() - start))
            raw.flush()
            os.fsync(raw.fileno())
            return entries, raw.tell()
    finally:
        torch.serialization.set_crc32_options(before)


def _save(tensor: torch.Tensor, raw: IO[bytes]) -> None:
    sink = _Sink(raw)
    try:
        torch.save(tensor, sink)  # type: ignore[arg-type]
    except RuntimeError as error:
        if sink.error is None:
            raise _begun(error) from None
    finally:
        sink.over = True
    if sink.error is not None:
        raise sink.error


def _begun(error: BaseException) -> BaseException:
    """What torch.save met: it raises an error of its own while it closes an archive that it could not end."""
    while isinstance(error, RuntimeError) and error.__context__ is not None:
        error = error.__context__
    return error


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, contiguous, alone in its storage."""
    host = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    return host if host.untyped_storage().nbytes() == host.nbytes else host.clone()


def write_metadata(folder: Path, entries: Iterable[Entry]) -> tuple[int, str]:
    """Write `.metadata` for torch's tools and for `load`, to disk. Returns its bytes and their sha256."""
    from torch.distributed.checkpoint import metadata as dcp

    tensors: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for name, dtype, shape, file, offset, length in entries:
        size, zero = torch.Size(shape), torch.Size([0] * len(shape))
        properties = dcp.TensorProperties(dtype=dtype)
        tensors[name] = dcp.TensorStorageMetadata(properties, size, [dcp.ChunkStorageMetadata(zero, size)])
        places[dcp.MetadataIndex(name, zero, 0)] = storage_info()(file, offset, length)
    names = {name: (name,) for name in tensors}
    data = pickle.dumps(dcp.Metadata(tensors, names, places, dcp.StorageMeta(), "1.0.0"))
    with open(folder / METADATA, "xb") as raw:
        raw.write(data)
        raw.flush()
        os.fsync(raw.fileno())
    return len(data), hashlib.sha256(data).hexdigest()
