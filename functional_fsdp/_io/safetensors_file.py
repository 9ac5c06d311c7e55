"""safetensors: tensors by name in a file, so that a rank reads or writes just the bytes that it wants.

    8 bytes     n, the length of the header, little-endian
    n bytes     JSON: {name: {"dtype": "F32", "shape": [3, 4], "data_offsets": [start, stop]}}, of the rest
    the rest    the tensors' bytes, without gaps

The format is that of https://github.com/huggingface/safetensors; its library writes whole tensors of one process.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._common.errors import CheckpointError
from .folder import writing

__all__ = ["DTYPES", "Entry", "bytes_of", "create", "entries", "read_at", "read_header", "read_into", "write_at"]

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip
PAIRS = "F4"  # two numbers a byte: the format counts numbers, torch counts bytes
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST = 100_000_000  # bytes of a header, as the format's own library has it


class Entry(NamedTuple):
    """A tensor in a file: `nbytes` bytes from `start` on, in C order."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def entries(path: Path) -> dict[str, Entry]:
    """What a file holds; raises as `read_header`."""
    return read_header(path)[0]


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """What a file holds, and what else its header says: texts by name.

    Raises:
        CheckpointError: it is no such file, or damaged, or has a dtype that torch has not. OSError: as the disk has it.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        n = int.from_bytes(file.read(8), "little")
        if size < 8 or n > min(size - 8, MOST):
            raise CheckpointError(f"{path} is no safetensors file: its header would have {n} of its {size} bytes.")
        text = file.read(n)
    try:
        header = json.loads(text)
        about = header.pop("__metadata__", None) or {}
        return {name: _entry(path, name, one, 8 + n, size) for name, one in header.items()}, about
    except CheckpointError:  # a ValueError, too
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {type(error).__name__}: {error}") from None


def _entry(path: Path, name: str, about: Mapping[str, Any], base: int, size: int) -> Entry:
    start, stop = about["data_offsets"]
    kind, shape = about["dtype"], tuple(about["shape"])
    if kind not in DTYPES:
        raise CheckpointError(
            f"{path} has {name!r} as {kind}, a dtype that this torch has not, or that is not read. Expected one of "
            f"{', '.join(DTYPES)}."
        )
    if kind == PAIRS:
        if not shape or shape[-1] % 2:
            raise ValueError(f"{about} has no pairs")
        shape = (*shape[:-1], shape[-1] // 2)
    made = Entry(path, DTYPES[kind], shape, base + start)
    if not all(type(n) is int and n >= 0 for n in (*made.shape, start, stop)) or base + stop > size:
        raise ValueError(f"{about} is beyond the file's {size} bytes")
    if stop - start != made.numel * made.dtype.itemsize:
        raise ValueError(f"{about} has {stop - start} bytes")
    return made


def create(path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Entry]:
    """Write a file's header, and make room for its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        n = torch.Size(shape).numel() * dtype.itemsize
        said = [*shape[:-1], 2 * shape[-1]] if NAMES[dtype] == PAIRS and shape else [*shape]
        header[name] = {"dtype": NAMES[dtype], "shape": said, "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with writing(path), open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return entries(path)


def bytes_of(host: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, for as long as the tensor lives."""
    if not host.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * host.nbytes).from_address(host.data_ptr())).cast("B")


def write_at(file: int, entry: Entry, first: int, values: torch.Tensor) -> None:
    """Write elements [first, first + n) of a tensor; `values` [n] are on the host, and of its dtype."""
    view, at = bytes_of(values), entry.start + first * entry.dtype.itemsize
    with writing(entry.path):
        while view:
            n = os.pwrite(file, view, at)
            view, at = view[n:], at + n


def read_into(file: int, entry: Entry, first: int, values: torch.Tensor) -> None:
    """Read elements [first, first + n) of a tensor into `values` [n], on the host and of its dtype.

    Raises:
        CheckpointError: the file ends before.
    """
    view = bytes_of(values)
    done = read_at(file, view, entry.start + first * entry.dtype.itemsize)
    if done < len(view):
        raise CheckpointError(f"{entry.path} ends after {done} of {len(view)} bytes that were wanted there.")


def read_at(file: int, view: memoryview, at: int) -> int:
    """Read as many bytes as the view has, or those that are there, from `at` on. Returns how many. Threads may."""
    done = 0
    while done < len(view) and (n := os.preadv(file, [view[done:]], at + done)):
        done += n
    return done
