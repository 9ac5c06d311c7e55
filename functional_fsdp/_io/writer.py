"""Writer: tensors into the files of torch.distributed.checkpoint, each with whatever the disk says against it.

    __0_0.distcp   functional_fsdp <token> __0_0.distcp      which save, which file
                   torch.save(tensor), one after the other   a run of a leaf, or a plain tensor
    .metadata      a pickled `Metadata`: which run lies where. For torch's tools; `load` goes by `layout.json`

torch's own writer talks to all ranks while it writes and wraps what goes wrong; this one talks to none.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import torch

from .._common.device import arrival, host_buffer, lies_on_host
from .._common.torch_names import storage_info
from .folder import Claim, prune, write_file
from .manifest import BLOCK, METADATA, Chunk, Tensor, file_of, head, merged, write_note
from .parts import SavedTensor
from .safetensors_file import bytes_of

__all__ = ["THREADS", "Written", "around", "complete", "write_tensors"]

THREADS = min(8, os.cpu_count() or 1)  # that read, copy and sum beside each other, which holds no interpreter lock
SMALL = 1 << 16  # bytes: to hand so few to a thread, or to read them again from the file, takes longer than the rest
HEADER, SIGNATURE = 30, b"PK\x03\x04"  # bytes of a zip member's header before its name, and how it begins
MEMBER = b"/data/0"  # how the tensor's name ends in its archive

T = TypeVar("T")


class Written(NamedTuple):
    """A chunk that a rank has written, and of which tensor it is."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunk: Chunk


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


def write_tensors(folder: Path, file: str, token: str, parts: Sequence[SavedTensor]) -> tuple[list[Written], int]:
    """Write runs and plain tensors to a new file, to disk. Returns where they lie, and the file's bytes.

    Raises:
        OSError: as the disk gave it.
    """
    entries = []
    arrival(part.tensor for part in parts)()  # threads copy on streams of their own
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # there are sums of our own, of blocks
    try:
        with open(folder / file, "x+b") as raw, ThreadPoolExecutor(THREADS) as threads:
            raw.write(head(token, file))
            for part, host in _on_host(parts, threads):
                sums = _sums(host, threads)  # taken while it is written
                archive: IO[bytes] = raw if host.nbytes > SMALL else io.BytesIO()
                start, n = archive.tell(), host.numel()
                _save(host, archive)
                end = archive.tell()
                data = _data(archive, start) if n else end
                chunk = Chunk(part.start, part.start + n, file, start, end - start, data, ())
                chunk = chunk._replace(sums=(around(archive, chunk, host.nbytes), *(one() for one in sums)))
                archive.seek(end)
                if isinstance(archive, io.BytesIO):
                    at = raw.tell()
                    raw.write(archive.getbuffer())
                    chunk = chunk._replace(offset=at, data=at + data)
                entries.append(Written(part.name, host.dtype, part.shape, chunk))
            raw.flush()
            os.fsync(raw.fileno())
            return entries, raw.tell()
    finally:
        torch.serialization.set_crc32_options(before)


def _on_host(parts: Iterable[SavedTensor], threads: ThreadPoolExecutor) -> Iterator[tuple[SavedTensor, torch.Tensor]]:
    """Each part with its numbers on the host; those of the next are copied meanwhile."""
    ahead: tuple[SavedTensor, Callable[[], torch.Tensor]] | None = None
    for part in parts:
        now, ahead = ahead, (part, _started(threads, part.tensor, _plain, part.tensor))
        if now:
            yield now[0], now[1]()
    if ahead:
        yield ahead[0], ahead[1]()


def _started(threads: ThreadPoolExecutor, tensor: torch.Tensor, work: Callable[..., T], *args: Any) -> Callable[[], T]:
    """Have a thread do work on a tensor, or do it now where it is small. What is returned gives the result."""
    if tensor.nbytes > SMALL or not lies_on_host(tensor):
        return threads.submit(work, *args).result
    done = work(*args)
    return lambda: done


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


def _data(file: IO[bytes], start: int) -> int:
    """Where the bytes of the tensor begin in the archive that begins at `start`."""
    file.seek(start)
    begins = file.read(SMALL)  # the members before it hold a few hundred bytes
    name = begins.index(MEMBER)
    header = begins.rindex(SIGNATURE, 0, name)
    lengths = begins[header + HEADER - 4 : header + HEADER]  # of the name, and of what comes after it
    return start + header + HEADER + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


def around(raw: IO[bytes], chunk: Chunk, nbytes: int) -> int:
    """The CRC-32 of what torch.save wrote around a tensor's bytes."""
    raw.seek(chunk.offset)
    before = zlib.crc32(raw.read(chunk.data - chunk.offset))
    raw.seek(chunk.data + nbytes)
    return zlib.crc32(raw.read(chunk.offset + chunk.length - chunk.data - nbytes), before)


def _sums(host: torch.Tensor, threads: ThreadPoolExecutor) -> list[Callable[[], int]]:
    view = bytes_of(host)
    return [_started(threads, host, zlib.crc32, view[at : at + BLOCK]) for at in range(0, len(view), BLOCK)]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, contiguous, alone in its storage: of host memory a view where it can be one. By a thread."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not lies_on_host(plain):
        return host_buffer(plain.nbytes, plain.device).view(plain.dtype).view(plain.shape).copy_(plain)
    if plain.untyped_storage().nbytes() == plain.nbytes:
        return plain
    # a view of something larger, which whoever saves it keeps
    if not plain.nbytes:
        return plain.new_empty(plain.shape)
    return torch.frombuffer(bytes_of(plain), dtype=torch.uint8).view(plain.dtype).view(plain.shape)


def write_metadata(folder: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write `.metadata` for torch's tools, to disk. Returns its bytes and their sha256."""
    from torch.distributed.checkpoint import metadata as dcp

    about: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for name, (dtype, shape, chunks) in tensors.items():
        size = torch.Size(shape)
        parts = []
        for i, chunk in enumerate(chunks):
            leaf = len(shape) == 1  # a run of it; other tensors are whole
            offsets = torch.Size([chunk.start] if leaf else [0] * len(shape))
            parts.append(dcp.ChunkStorageMetadata(offsets, torch.Size([chunk.stop - chunk.start]) if leaf else size))
            places[dcp.MetadataIndex(name, offsets, i)] = storage_info()(chunk.file, chunk.offset, chunk.length)
        about[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), size, parts)
    names = {name: (name,) for name in about}
    data = pickle.dumps(dcp.Metadata(about, names, places, dcp.StorageMeta(), "1.0.0"))
    write_file(folder / METADATA, data)
    return len(data), hashlib.sha256(data).hexdigest()


def complete(
    claim: Claim, about: Mapping[str, Any], written: list[Written], nbytes: list[int], keep: int | None
) -> None:
    """The first rank's, once all have written: say what is there, have the folder appear, and remove older ones.

    Args:
        about: what `layout.json` says of the state.
        written, nbytes: the chunks of all ranks, and by rank how long its file is.
        keep: how many checkpoints are kept; None: all.
    """
    path, tensors = claim.path, merged(written)
    files = {file_of(rank): n for rank, n in enumerate(nbytes) if n}
    size, digest = write_metadata(path, tensors)
    write_note(path, {**about, "files": {**files, METADATA: size}, "metadata": digest}, tensors)
    claim.appear()
    if keep is not None:
        prune(claim.final, keep)
