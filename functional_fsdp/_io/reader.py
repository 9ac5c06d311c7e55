"""Reader: runs of tensors out of the files of a checkpoint, wherever chunks were cut. Nothing that a file says is run.

    wanted      |-------- elements [start, stop) of main.w ---------|
    chunks   ------ __0_0.distcp -----|-- __1_0.distcp --|---- __2_0.distcp ----
    blocks   [   ][   ][   ][   ][   ]|[   ][   ][   ][ ]|[   ][   ]       each is read as a whole, for its sum

Where each run lies, and the sum of each block, `layout.json` says, which was checked before.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._common.device import host_buffer, lies_on_host
from .._common.errors import CheckpointError
from .folder import inside
from .manifest import BLOCK, Chunk, Tensor, head
from .parts import SavedTensor
from .safetensors_file import bytes_of, read_at
from .writer import THREADS, around

__all__ = ["read_tensors"]

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
