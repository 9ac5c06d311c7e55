"""Reader: runs of tensors out of the files of a checkpoint, wherever chunks were cut. Nothing that a file says is run.

    wanted      |-------- elements [start, stop) of main.w ---------|
    chunks   ------ __0_0.distcp -----|-- __1_0.distcp --|---- __2_0.distcp ----
    blocks   [   ][   ][   ][   ][   ]|[   ][   ][   ][ ]|[   ][   ]       each is read as a whole, for its sum

Where each run lies, and the sum of each block, `layout.json` says, which was checked before.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from .._common.device import lies_on_host
from .._common.errors import CheckpointError
from .._storage.safetensors import bytes_of, read_bytes
from .folder import inside
from .note import BLOCK, Chunk, Tensor, head
from .parts import SavedTensor
from .writer import around

__all__ = ["read_tensors"]


def read_tensors(
    folder: Path, note: Mapping[str, Any], there: Mapping[str, Tensor], parts: Iterable[SavedTensor]
) -> None:
    """Read runs into memory, in the order of the files; numbers of another dtype are converted.

    Raises:
        CheckpointError: naming the file and the tensor that is damaged.
    """
    by_file: dict[str, list[tuple[Chunk, SavedTensor]]] = {}
    for part in parts:
        for chunk in there[part.name].chunks:
            common = min(chunk.stop, part.start + part.tensor.numel()) - max(chunk.start, part.start)
            if common > 0 or chunk.start == chunk.stop:
                by_file.setdefault(chunk.file, []).append((chunk, part))
    for file, some in by_file.items():
        with inside(folder, file) as raw:
            begins = head(note["save"], file)
            found, size = raw.read(len(begins)), os.fstat(raw.fileno()).st_size
            if found != begins or size != note["files"][file]:
                raise CheckpointError(
                    f"{folder / file} is not the file that was written there: it begins with {found[:80]!r} and has "
                    f"{size} bytes; expected {begins!r} and {note['files'][file]}. Load another checkpoint."
                )
            for chunk, part in sorted(some, key=lambda one: one[0].data):
                if not _read(raw, chunk, there[part.name].dtype, part):
                    raise CheckpointError(
                        f"{folder / file} is damaged where {part.name!r} lies (bytes {chunk.offset} + "
                        f"{chunk.length}): a checksum is another. Load another checkpoint."
                    )


def _read(raw: IO[bytes], chunk: Chunk, dtype: torch.dtype, part: SavedTensor) -> bool:
    """What a part has in common with a chunk, block by block. Whether the sums are right."""
    direct = lies_on_host(part.tensor) and part.tensor.dtype is dtype and part.tensor.is_contiguous()
    target = part.tensor if part.tensor.is_contiguous() else torch.empty_like(part.tensor).contiguous()
    flat, size = target.reshape(-1), dtype.itemsize
    first, last = max(chunk.start, part.start), min(chunk.stop, part.start + flat.numel())
    whole = (chunk.stop - chunk.start) * size
    if around(raw, chunk, whole) != chunk.sums[0]:
        return False
    at = (first - chunk.start) * size // BLOCK * BLOCK  # bytes within the chunk
    spare = torch.empty(0, dtype=dtype)
    while at < (last - chunk.start) * size:
        n = min(BLOCK, whole - at)
        a, b = chunk.start + at // size, chunk.start + (at + n) // size
        inner = direct and first <= a and b <= last
        if not inner and not spare.numel():
            spare = torch.empty(min(BLOCK, whole) // size, dtype=dtype)
        block = flat[a - part.start : b - part.start] if inner else spare[: b - a]
        view = bytes_of(block)
        raw.seek(chunk.data + at)
        if read_bytes(raw, view) != n or zlib.crc32(view) != chunk.sums[1 + at // BLOCK]:
            return False
        if not inner:
            low, high = max(a, first), min(b, last)
            flat[low - part.start : high - part.start].copy_(block[low - a : high - a])
        at += n
    if target is not part.tensor:
        part.tensor.copy_(target)
    return True
