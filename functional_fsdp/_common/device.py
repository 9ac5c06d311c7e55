"""What hangs on the kind of device, and is no matter of lanes: memory, random numbers, and which kernels there are.

One number for a tensor's bits in their order, so that ranks can compare tensors by exchanging numbers.

    words     x[0] x[1] x[2] ...        the bytes in logical order, 4 at a time, signed
    rows      16,384 words each
    number    Σ_r M[r] · Σ_i W[i] · x[r, i]    modulo 2^64; W and M are odd and look random

The words of equal tensors give equal numbers on every device. A change of one word always shows, since its weight is
odd; any other change (a permutation, a transposition, other numbers) goes unseen once in 2^32 at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from .calls import provided

BLOCK = 512  # bytes: what the caching allocator rounds up to inside a segment


def current_device(kind: str) -> torch.device:
    """The device of this kind that this rank computes on, with its index where there are several."""
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


# ---- memory


def keeps_released(device: torch.device) -> bool:
    """Whether weights that were released keep their bytes until others come, so that a late reader does not crash. Else
    the allocator gets them back."""
    return device.type != "cuda"


def make_room(sizes: Iterable[int], device: torch.device) -> None:
    """Have the caching allocator hold one segment for tensors of these sizes (bytes), which are made next.

    A tensor that has a segment of its own takes up to 1 MiB more than it needs: a block is not split for less
    (PyTorch documentation, "CUDA semantics", memory management).
    """
    if device.type == "cuda":
        with suppress(torch.OutOfMemoryError):  # there may be room for each
            torch.empty(sum(-(-n // BLOCK) * BLOCK for n in sizes), dtype=torch.uint8, device=device)


def lies_on_host(tensor: torch.Tensor) -> bool:
    """Whether the host may read and write its bytes."""
    return tensor.device.type == "cpu"


# ---- host memory as a device's tensors


host_memory = provided("host_memory.host_memory")  # zeros [numel] there: numel, dtype, device


def in_host_memory(tensor: torch.Tensor) -> bool:
    """Whether `host_memory` made the bytes of this tensor."""
    return tensor.device.type != "meta" and hasattr(tensor.untyped_storage(), "host_bytes")


def empty_as(tensor: torch.Tensor) -> torch.Tensor:
    """Like `torch.empty_like`, in the same kind of memory."""
    return zeros_as(tensor) if in_host_memory(tensor) else torch.empty_like(tensor)


def zeros_as(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Like `torch.zeros_like`, in the same kind of memory."""
    if in_host_memory(tensor):
        return host_memory(tensor.numel(), dtype or tensor.dtype, tensor.device).view(tensor.shape)
    return torch.zeros_like(tensor, dtype=dtype)


def clone_as(tensor: torch.Tensor) -> torch.Tensor:
    """Like `tensor.clone()`, in the same kind of memory."""
    return empty_as(tensor).copy_(tensor) if in_host_memory(tensor) else tensor.clone()


# ---- copies to the host


# ---- random numbers


def default_generator(device: torch.device) -> torch.Generator | None:
    """The generator that a GPU draws from by default; None where that is the host's, `torch.default_generator`."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else None


# ---- kernels


def fused_sgd_takes(weight: torch.Tensor) -> bool:
    """Whether torch's fused SGD takes weights like this one: on the CPU not in bfloat16."""
    return weight.device.type != "cpu" or weight.dtype is not torch.bfloat16


def as_rate(lr: Any) -> Any:
    """A rate as fused kernels take it: on GPUs they read a float32, of whatever dtype it is."""
    return lr.float() if isinstance(lr, torch.Tensor) and lr.device.type != "cpu" else lr


def rows_at_once(device: torch.device, rows: int) -> int:
    """Of so many rows of 64 KiB each: what stays in a CPU's cache; or keeps a GPU busy, 32 MiB at least and in 32
    pieces at most, so that the host's launches are not what takes the time."""
    return 32 if device.type == "cpu" else max(512, rows // 32)


ROW = 1 << 14  # words


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """[...] of any dtype -> int64 [] on the same device. Takes a few MiB of memory, on a GPU 64 MiB, or a tenth
    of a large tensor's if that is more; and a copy where strides are odd.

    >>> a = torch.arange(6.0).view(2, 3)
    >>> bool(checksum(a) == checksum(a.clone())), bool(checksum(a) == checksum(a.flip(0)))
    (True, False)
    """
    first, parts, table = 0, [], _table(tensor.device)
    for words in _words(tensor.detach()):
        parts.append(_sum(words, first, table))
        first += words.shape[0]
    if not parts:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor as rows of words, some rows at a time; the last row as long as it is."""
    if not tensor.numel():
        return
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    flat = flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element may have any stride
    if flat.storage_offset() % 4:  # bytes of a view may lie anywhere
        flat = flat.clone()
    whole = flat.numel() // (4 * ROW) * (4 * ROW)
    if whole:
        rows = flat[:whole].view(torch.int32).view(-1, ROW)
        yield from rows.split(rows_at_once(tensor.device, len(rows)))
    rest = flat[whole:]
    if rest.numel() % 4:
        rest = torch.cat([rest, rest.new_zeros(-rest.numel() % 4)])
    if rest.numel():
        yield rest.view(torch.int32).view(1, -1)


def _sum(words: torch.Tensor, first: int, table: torch.Tensor) -> torch.Tensor:
    """The part of the sum that these rows give; the first of them is row `first` of the tensor."""
    count = len(words)
    product = words.to(torch.int64).mul_(table[: words.shape[1]])
    rows = table[ROW + first : ROW + first + count]
    if first + count > ROW:
        rows = _odd(torch.arange(ROW + first, ROW + first + count, device="cpu")).to(words.device)
    return (product.sum(1) * rows).sum() if count > 1 else product.sum() * rows[0]


def _table(device: torch.device) -> torch.Tensor:
    """The weights of a row's words, then those of the first rows."""
    found = _TABLES.get(device)
    if found is None:
        found = _odd(torch.arange(2 * ROW, device="cpu")).to(device)  # a GPU would load kernels
        if type(found) is torch.Tensor and device.type == "cpu":  # no fake one; a GPU's memory is the user's
            _TABLES[device] = found
    return found


_TABLES: dict[torch.device, torch.Tensor] = {}


def _odd(numbers: torch.Tensor) -> torch.Tensor:
    """An odd number for each, by SplitMix64 (Steele, Lea and Flood 2014), in arithmetic modulo 2^64."""
    z = (numbers + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, with zeros coming in."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(n: int) -> int:
    return n - (1 << 64) if n >> 63 else n
