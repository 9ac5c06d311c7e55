"""Runs of tensors in the files of a checkpoint, and where the elements of a leaf lie in them.

    write_tensors, write_metadata    the writer
    read_tensors                     the reader
    pieces, blocks                   which elements of the files a rank's part of a leaf is
    recut, read_recut                the same for leaves that were cut along axes of the model's own

Reader: runs of tensors out of the files of a checkpoint, wherever chunks were cut. Nothing that a file says is run.

    wanted      |-------- elements [start, stop) of main.w ---------|
    chunks   ------ __0_0.distcp -----|-- __1_0.distcp --|---- __2_0.distcp ----
    blocks   [   ][   ][   ][   ][   ]|[   ][   ][   ][ ]|[   ][   ]       each is read as a whole, for its sum

Where each run lies, and the sum of each block, `layout.json` says, which was checked before.

Writer: tensors into the files of torch.distributed.checkpoint, each with whatever the disk says against it.

    __0_0.distcp   functional_fsdp <token> __0_0.distcp      which save, which file
                   torch.save(tensor), one after the other   a run of a leaf, or a plain tensor
    .metadata      a pickled `Metadata`: which run lies where. For torch's tools; `load` goes by `layout.json`

torch's own writer talks to all ranks while it writes and wraps what goes wrong; this one talks to none.

`pieces`: where in files the elements of a leaf lie that a rank holds; pure, and alike for reading and for writing.

    leaf in memory ── pieces: what it has in common with each leaf of the file; a stride in either for every dim
    run of a rank  ── boxes: what of a piece lies in the run
                   ── blocks: what of a box lies end to end in the file, 16 Mi elements at most

    memory    [4, 3], a rank has its elements 2 to 6; the file has it transposed, [3, 4]
    boxes     row 0, column 2;  row 1, columns 0 to 2;  row 2, column 0
    blocks    the file's elements 8;  1, 5, 9;  2

A leaf that the file holds as it is, is one piece, and a run of it one block; so is a leaf of a stack. Of a transposed
one a run of whole rows has a block for each row of the file, and the whole leaf is one block.

`recut`: leaves that are cut along axes of the model's own by another number of ranks than when they were saved.

    there    main.w of tp 0, of tp 1    [n / 2] each       here    main.w of tp 0 to 3    [n / 4] each, or main.w [n]
             └── joined, a leaf at a time ──▶ whole leaf ── this rank's part ──▶ this rank's run of it

Leaves that lie as they were saved are read as all others are.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import pickle
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import torch

from .._axes import Cut, Cuts, cut_of, join, part_shape, whole_shape
from .._common.device import lies_on_host
from .._common.errors import CheckpointError, SpecError
from .._export import refuse_blocks
from .._plan.layout import Leaf
from .._runtime.runtime import runtime_of
from .._shared.device import arrival, host_buffer
from .._shared.torch_names import storage_info
from .._state.state import State
from .._storage import FlatBuffer
from .conversions import Concatenated, Conversion, Sliced, Stacked, Transposed
from .folder import NOTE, Claim, bytes_of, inside, prune, read_at, write_file, writing
from .manifest import (
    BLOCK,
    METADATA,
    PLACE,
    Chunk,
    SavedTensor,
    Tensor,
    file_of,
    head,
    places_of,
    saved_nodes,
    write_note,
)

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
    path = claim.path
    by_name: dict[str, Tensor] = {}
    for name, dtype, shape, chunk in written:
        by_name.setdefault(name, Tensor(dtype, tuple(shape), [])).chunks.append(chunk)
    tensors = {name: one._replace(chunks=sorted(one.chunks)) for name, one in sorted(by_name.items())}
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


CHUNK = 1 << 24  # elements of a block at most, read or written at once


class Dim(NamedTuple):
    """A dim of a block of a leaf in memory: `stride` there; `size` elements, from `start` on, of `of` in the file."""

    size: int
    stride: int
    start: int
    of: int


class Line(NamedTuple):
    """`size` elements, so far apart in memory and in the file."""

    size: int
    memory: int
    file: int


class Piece(NamedTuple):
    """Elements that a leaf in memory has in common with one of the file.

    Attributes:
        name, shape: of the leaf in the file.
        box: what of that leaf, as start and stop of each dim.
        lines: how they lie, from the largest stride in memory on.
        memory, file: where the first of them is in either leaf.
        numel: how many they are.
    """

    name: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    lines: tuple[Line, ...]
    memory: int
    file: int
    numel: int

    def meets(self, other: Piece) -> bool:
        """Whether two pieces of one leaf of the file have elements of it in common."""
        pairs = zip(self.box, other.box, strict=True)
        return self.numel > 0 < other.numel and all(max(a, c) < min(b, d) for (a, b), (c, d) in pairs)


class Block(NamedTuple):
    """Elements that lie end to end in a leaf of the file, from `file` on.

    Attributes:
        memory, sizes, strides: where they are in the leaf in memory, in the file's order.
    """

    file: int
    memory: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def of(self, run: torch.Tensor, start: int) -> torch.Tensor:
        """A view of them in the run [n] of a leaf's elements that begins with element `start`."""
        return run.as_strided(self.sizes, self.strides, run.storage_offset() + self.memory - start)


def pieces(path: str, shape: Iterable[int], said: Conversion) -> list[Piece]:
    """What a leaf in memory has in each leaf of the file; together all of its elements.

    Raises:
        SpecError: a conversion that does not fit the leaf.
    """
    shape = tuple(shape)
    dims = tuple(Dim(n, stride, 0, n) for n, stride in zip(shape, strides_of(shape), strict=True))
    return [*_pieces(f"convert: {path!r} is {list(shape)}, and", said, dims, 0)]


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """In elements, of a leaf in C order."""
    return tuple(accumulate(reversed((*shape, 1)[1:]), int.__mul__))[::-1]


def _pieces(where: str, said: Conversion, dims: tuple[Dim, ...], offset: int) -> Iterator[Piece]:
    def at(dim: int, whole: bool = False) -> int:
        name, shape = type(said).__name__, [one.size for one in dims]
        if not -len(dims) <= dim < len(dims):
            raise SpecError(f"{where} {name} has dim {dim} of {shape}, which has {len(dims)} dims. Give another dim.")
        one = dims[dim]
        if whole and one.size != one.of:
            raise SpecError(f"{where} a slice along dim {dim} of {name} is of several leaves. Slice each part.")
        return dim % len(dims)

    if isinstance(said, str):
        yield piece_of(said, dims, offset)
    elif isinstance(said, Stacked):
        i = at(said.dim, whole=True)
        if dims[i].size != len(said.parts):
            raise SpecError(
                f"{where} Stacked has {len(said.parts)} parts for the {dims[i].size} elements along its dim "
                f"{said.dim}. Give one part each."
            )
        for k, part in enumerate(said.parts):
            yield from _pieces(where, part, dims[:i] + dims[i + 1 :], offset + k * dims[i].stride)
    elif isinstance(said, Concatenated):
        i = at(said.dim, whole=True)
        parts, total = len(said.parts), dims[i].size
        sizes = said.sizes or (total // max(parts, 1),) * parts
        if sum(sizes) != total:
            raise SpecError(
                f"{where} Concatenated has {parts} parts of {[*sizes] if said.sizes else 'one size'} for the {total} "
                f"elements along its dim {said.dim}. Give sizes= that add up."
            )
        start = 0
        for part, n in zip(said.parts, sizes, strict=True):
            inner = (*dims[:i], Dim(n, dims[i].stride, 0, n), *dims[i + 1 :])
            yield from _pieces(where, part, inner, offset + start * dims[i].stride)
            start += n
    elif isinstance(said, Transposed):
        i, j = at(said.dim0), at(said.dim1)
        order = [*dims]
        order[i], order[j] = dims[j], dims[i]
        yield from _pieces(where, said.part, tuple(order), offset)
    elif isinstance(said, Sliced):
        i = at(said.dim)
        one = dims[i]
        if not 0 <= said.start <= said.start + one.of <= said.of:
            raise SpecError(
                f"{where} Sliced takes {one.of} elements from {said.start} on along dim {said.dim}, of {said.of}. Give "
                "start= and of= that hold them."
            )
        inner = (*dims[:i], Dim(one.size, one.stride, said.start + one.start, said.of), *dims[i + 1 :])
        yield from _pieces(where, said.part, inner, offset)
    else:
        raise SpecError(
            f"{where} a {type(said).__name__} is said of it; expected a name in the file, Stacked, Concatenated, "
            "Transposed or Sliced."
        )


def piece_of(name: str, dims: tuple[Dim, ...], memory: int) -> Piece:
    """A piece from its dims in the file's order; those that follow one another in both leaves are one line."""
    shape = tuple(dim.of for dim in dims)
    strides = strides_of(shape)
    file = sum(dim.start * stride for dim, stride in zip(dims, strides, strict=True))
    lines: list[Line] = []
    for one in sorted(
        (Line(dim.size, dim.stride, stride) for dim, stride in zip(dims, strides, strict=True) if dim.size != 1),
        key=lambda line: -line.memory,
    ):
        if lines and (lines[-1].memory, lines[-1].file) == (one.size * one.memory, one.size * one.file):
            lines[-1] = Line(lines[-1].size * one.size, one.memory, one.file)
        else:
            lines.append(one)
    box = tuple((dim.start, dim.start + dim.size) for dim in dims)
    return Piece(name, shape, box, tuple(lines), memory, file, prod(dim.size for dim in dims))


def blocks(piece: Piece, start: int, stop: int, most: int = CHUNK) -> Iterator[Block]:
    """The elements of a piece that lie in [start, stop) of the leaf in memory, `most` in a block at most."""
    if piece.numel:
        for lines, memory, file in _within(piece.lines, piece.memory, piece.file, start, stop):
            yield from _dense(tuple(sorted(lines, key=lambda line: -line.file)), memory, file, most)


Box = tuple[tuple[Line, ...], int, int]


def _within(lines: tuple[Line, ...], memory: int, file: int, start: int, stop: int) -> Iterator[Box]:
    """Boxes of what lies in [start, stop) in memory: whole ones along the first line, and what is cut at its ends."""
    if not lines:
        if start <= memory < stop:
            yield lines, memory, file
        return
    (n, step, jump), inner = lines[0], lines[1:]
    extent = 1 + sum((line.size - 1) * line.memory for line in inner)
    first = max(0, -((memory + extent - 1 - start) // step))  # the first that begins or ends behind `start`
    last = min(n, -((memory - stop) // step))
    low = max(first, -((memory - start) // step))
    high = max(low, min(last, (stop - extent - memory) // step + 1))
    for i in range(first, min(low, last)):
        yield from _within(inner, memory + i * step, file + i * jump, start, stop)
    if low < high:
        yield (Line(high - low, step, jump), *inner), memory + low * step, file + low * jump
    for i in range(max(high, low), last):
        yield from _within(inner, memory + i * step, file + i * jump, start, stop)


def _dense(lines: tuple[Line, ...], memory: int, file: int, most: int) -> Iterator[Block]:
    """A box, from its largest stride in the file on, in blocks that lie end to end there."""
    sizes = tuple(line.size for line in lines)
    inner = prod(sizes[1:])
    dense = all(line.file == n for line, n in zip(lines, strides_of(sizes), strict=True))
    if dense and prod(sizes) <= most:
        yield Block(file, memory, sizes, tuple(line.memory for line in lines))
        return
    (n, step, jump), rest = lines[0], lines[1:]
    many = most // inner if dense else 0
    for i in range(0, n, max(many, 1)):
        one = (Line(min(many, n - i), step, jump), *rest) if many else rest
        yield from _dense(one, memory + i * step, file + i * jump, most)


class Recut(NamedTuple):
    """A tensor that this state wants by other cuts than it has there.

    Attributes:
        leaf: as this state has it. cuts: as they were, those of more than one rank.
        names: there, by place along these.
    """

    leaf: Leaf
    cuts: Cuts
    names: dict[tuple[int, ...], str]


def recut(
    path: Path, note: Mapping[str, Any], state: State, there: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Recut]]:
    """The tensors of a checkpoint under the names and in the shapes that this state has for them, and by name which of
    these are to be joined and cut.

    Raises:
        CheckpointError: cuts that no save has written.
    """
    found, again = dict(there), {}
    run = runtime_of(state.spec.mesh)
    told = {name: cuts_in(path, name, one) for name, one in note["leaves"].items()}
    for _, tree, node in saved_nodes(state):
        if not isinstance(node.value, FlatBuffer):
            continue
        bucket = node.value.bucket
        for leaf in bucket.leaves:
            old = told.get(leaf.path, ())
            new = tuple(cut for cut in leaf.cuts if cut.ranks > 1)
            places = {axis: run.sizes[axis] for axis in bucket.cut if run.sizes[axis] > 1}
            if {cut.axis: cut.ranks for cut in old} == places if bucket.by_leaf else old == new:
                continue
            refuse_blocks(bucket, leaf.path)
            base = f"{tree}.{leaf.path}"
            names = names_by_place(base, old, there)
            if not names or any(name not in there for name in names.values()):
                continue
            one = there[next(iter(names.values()))]
            for name in names.values():
                found.pop(name, None)
            for at in places_of(bucket.apart(run.sizes), run.sizes):
                found[f"{base}{at}"] = one if bucket.by_leaf else Tensor(one.dtype, (leaf.numel,), [])
                if not bucket.by_leaf:
                    again[f"{base}{at}"] = Recut(leaf, old, names)
    return found, again


def read_recut(
    folder: Path, note: Mapping[str, Any], there: Mapping[str, Tensor], again: Mapping[str, Recut],
    parts: Iterable[SavedTensor], coordinate: Mapping[str, int],
) -> None:  # fmt: skip
    """Read this rank's runs of such leaves. Memory: two whole leaves at a time, on the host."""
    for part in parts:
        leaf, cuts, names = again[part.name]
        local = part_shape(leaf.whole, cuts)
        dtype = there[next(iter(names.values()))].dtype
        held = {at: torch.empty(torch.Size(local).numel(), dtype=dtype, device="cpu") for at in names}
        wanted = [SavedTensor(name, held[at], tuple(held[at].shape)) for at, name in names.items()]
        read_tensors(folder, note, there, wanted)
        value = _joined({at: tensor.view(local) for at, tensor in held.items()}, cuts)
        mine = cut_of(value, leaf.cuts, coordinate).reshape(-1)
        part.tensor.copy_(mine[part.start : part.start + part.tensor.numel()])


def _joined(held: dict[tuple[int, ...], torch.Tensor], cuts: Cuts) -> torch.Tensor:
    """The whole leaf, from the parts by place along each cut."""
    for i in reversed(range(len(cuts))):
        rows: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for at in sorted(held):
            rows.setdefault(at[:i], []).append(held[at])
        held = {at: join(some, cuts[i]) for at, some in rows.items()}
    return held[()]


def names_by_place(base: str, cuts: Cuts, there: Mapping[str, Any]) -> dict[tuple[int, ...], str]:
    """Under which names it is there, by place along the cuts: axes are said in the order of the mesh that was."""
    if not cuts:
        return {(): base}
    axes = [cut.axis for cut in cuts]
    for order in itertools.permutations(range(len(axes))):
        found = {}
        for at in itertools.product(*(range(cut.ranks) for cut in cuts)):
            said = ", ".join(f"{axes[i]} {at[i]}" for i in order)
            found[at] = f"{base}{PLACE}{said}"
        if all(name in there for name in found.values()):
            return found
    return {}


def cuts_in(path: Path, name: str, leaf: Mapping[str, Any]) -> Cuts:
    """How a leaf was cut, as `layout.json` says of it: for more than one rank.

    Raises:
        CheckpointError: no save has written this.
    """
    try:
        found = tuple(Cut(axis, ranks, dim, tuple(sizes)) for axis, ranks, dim, sizes in leaf.get("cuts", ()))
        shape = list(leaf["shape"])
        for cut in found:
            whole = [cut.ranks, cut.dim, *cut.sizes]
            if type(cut.axis) is not str or any(type(n) is not int or n < 0 for n in whole) or not cut.ranks:
                raise ValueError(f"a cut {cut}")
            if sum(cut.sizes) != shape[cut.dim] or any(size % cut.ranks for size in cut.sizes):
                raise ValueError(f"a cut {cut} of {shape}")
            shape[cut.dim] //= cut.ranks
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"{path / NOTE} has cuts of the leaf {name!r} that no save has written: {error}."
        ) from None
    assert whole_shape(shape, found) == tuple(leaf["shape"])
    return tuple(cut for cut in found if cut.ranks > 1)
