"""Reader: runs of tensors out of the files of a checkpoint, wherever chunks were cut. Nothing that a file says is run.

    wanted      |-------- elements [start, stop) of main.w ---------|
    chunks   ------ __0_0.distcp -----|-- __1_0.distcp --|---- __2_0.distcp ----
    blocks   [   ][   ][   ][   ][   ]|[   ][   ][   ][ ]|[   ][   ]       each is read as a whole, for its sum

Where each run lies, and the sum of each block, `layout.json` says, which was checked before.

Writer: tensors into the files of torch.distributed.checkpoint, each with whatever the disk says against it.

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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import torch

from .._common.device import arrival, host_buffer, lies_on_host
from .._common.errors import CheckpointError
from .._common.torch_names import storage_info
from .folder import Claim, inside, prune, write_file, writing
from .manifest import BLOCK, METADATA, Chunk, Tensor, file_of, head, merged, write_note
from .parts import SavedTensor
from .safetensors_file import bytes_of, read_at

__all__ = ["THREADS", "Written", "around", "complete", "read_tensors", "write_tensors"]

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
        place = folder / file
        with writing(place), open(place, "x+b") as raw, ThreadPoolExecutor(THREADS) as threads:
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


AHEAD = 2 * THREADS  # blocks on their way


class _Target(NamedTuple):
    """What a part of a state has in common with a chunk: elements [first, last) of the leaf."""

    part: SavedTensor
    chunk: Chunk
    dtype: torch.dtype  # in the file
    whole: torch.Tensor  # the part's tensor, contiguous
    first: int
    last: int

    @property
    def direct(self) -> bool:
        """Whether what the file has may be read into its place."""
        return lies_on_host(self.whole) and self.whole.dtype is self.dtype

    def at(self, a: int, b: int) -> torch.Tensor:
        """Elements [a, b) of the leaf."""
        return self.whole.view(-1)[a - self.part.start : b - self.part.start]


class _Block(NamedTuple):
    """Elements [a, b) of a leaf, which have a sum of their own, in the memory into which they are read."""

    of: _Target
    a: int
    b: int
    memory: torch.Tensor
    spare: torch.Tensor | None  # of which the memory is a view; None: it lies in its place

    def read(self, file: int) -> bool:
        """By a thread. Whether the sum is right."""
        view, at = bytes_of(self.memory), (self.a - self.of.chunk.start) * self.of.dtype.itemsize
        found = read_at(file, view, self.of.chunk.data + at)
        return found == len(view) and zlib.crc32(view) == self.of.chunk.sums[1 + at // BLOCK]

    def arrive(self) -> None:
        """To its place, as far as it is wanted."""
        low, high = max(self.a, self.of.first), min(self.b, self.of.last)
        self.of.at(low, high).copy_(self.memory[low - self.a : high - self.a])


def read_tensors(
    folder: Path, note: Mapping[str, Any], there: Mapping[str, Tensor], parts: Iterable[SavedTensor]
) -> None:
    """Read runs into memory, in the order of the files; numbers of another dtype are converted. Threads read blocks and
    take their sums, some ahead; each file is done with before the next.

    Raises:
        CheckpointError: naming the file and the tensor that is damaged.
    """
    by_file: dict[str, list[tuple[Chunk, SavedTensor]]] = {}
    for part in parts:
        for chunk in there[part.name].chunks:
            common = min(chunk.stop, part.start + part.tensor.numel()) - max(chunk.start, part.start)
            if common > 0 or chunk.start == chunk.stop:
                by_file.setdefault(chunk.file, []).append((chunk, part))
    with ThreadPoolExecutor(THREADS) as threads:
        reading = _Reading(threads)
        for file, some in by_file.items():
            with inside(folder, file) as raw:
                begins = head(note["save"], file)
                found, size = raw.read(len(begins)), os.fstat(raw.fileno()).st_size
                if found != begins or size != note["files"][file]:
                    raise CheckpointError(
                        f"{folder / file} is not the file that was written there: it begins with {found[:80]!r} and "
                        f"has {size} bytes; expected {begins!r} and {note['files'][file]}. Load another checkpoint."
                    )
                try:
                    for chunk, part in sorted(some, key=lambda one: one[0].data):
                        target = _target(chunk, there[part.name].dtype, part)
                        nbytes = (chunk.stop - chunk.start) * target.dtype.itemsize
                        if around(raw, chunk, nbytes) != chunk.sums[0]:
                            raise _Damaged(part, chunk)
                        reading.take(raw.fileno(), target)
                        if target.whole is not part.tensor:
                            reading.settle()
                            part.tensor.copy_(target.whole)
                    reading.settle()
                except _Damaged as error:
                    part, chunk = error.args
                    raise CheckpointError(
                        f"{folder / file} is damaged where {part.name!r} lies (bytes {chunk.offset} + "
                        f"{chunk.length}): a checksum is another. Load another checkpoint."
                    ) from None
                finally:
                    reading.give_up()


class _Damaged(Exception):
    """Of a part and a chunk: what lies there is not what was written."""


class _Reading:
    """Blocks on their way, in order."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.threads = threads
        self.way: deque[tuple[Future[bool], _Block]] = deque()
        self.spare: list[torch.Tensor] = []  # [BLOCK] bytes each

    def take(self, file: int, target: _Target) -> None:
        for a, b in _blocks(target):
            self.settle(AHEAD - 1)
            if target.direct and target.first <= a and b <= target.last:
                block = _Block(target, a, b, target.at(a, b), None)
            else:
                spare = self.spare.pop() if self.spare else host_buffer(BLOCK, target.whole.device)
                block = _Block(target, a, b, spare[: (b - a) * target.dtype.itemsize].view(target.dtype), spare)
            self.way.append((self.threads.submit(block.read, file), block))

    def settle(self, left: int = 0) -> None:
        """Wait until no more than so many are on their way.

        Raises:
            _Damaged: a sum is another. OSError: what a thread met.
        """
        while len(self.way) > left:
            done, block = self.way[0]
            if not done.result():
                raise _Damaged(block.of.part, block.of.chunk)
            if block.spare is not None:
                block.arrive()
                self.spare.append(block.spare)
            self.way.popleft()

    def give_up(self) -> None:
        """Have no thread read any more: the file is about to be closed."""
        while self.way:
            done, _ = self.way.pop()
            if not done.cancel():
                done.exception()


def _target(chunk: Chunk, dtype: torch.dtype, part: SavedTensor) -> _Target:
    tensor = part.tensor
    whole = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    first, last = max(chunk.start, part.start), min(chunk.stop, part.start + tensor.numel())
    return _Target(part, chunk, dtype, whole, first, last)


def _blocks(target: _Target) -> Iterator[tuple[int, int]]:
    """Elements [a, b) of each block of a chunk in which something is wanted."""
    chunk, n = target.chunk, BLOCK // target.dtype.itemsize
    a = chunk.start + (target.first - chunk.start) // n * n
    while a < target.last:
        b = min(a + n, chunk.stop)
        yield a, b
        a = b
