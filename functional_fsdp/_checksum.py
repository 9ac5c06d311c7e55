"""One number for a tensor's bits in their order, so that ranks can compare tensors by exchanging numbers.

    words     x[0] x[1] x[2] ...        the bytes in logical order, 4 at a time, signed
    rows      65,536 words each
    number    Σ_r M[r] · Σ_i W[i] · x[r, i]    modulo 2^64; W and M are odd and look random

The words of equal tensors give equal numbers on every device. A change of one word always shows, since its weight is
odd; any other change (a permutation, a transposition, other numbers) goes unseen once in 2^32 at most.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["checksum"]

ROW = 1 << 16  # words
ROWS = {"cpu": 8, "cuda": 64}  # at once: what stays in a cache, or keeps a GPU busy; the number does not hang on it


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """[...] of any dtype -> int64 [] on the same device. Takes a few MiB of memory, and a copy where strides are odd.

    >>> a = torch.arange(6.0).view(2, 3)
    >>> bool(checksum(a) == checksum(a.clone())), bool(checksum(a) == checksum(a.flip(0)))
    (True, False)
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    first = 0
    for words in _words(tensor.detach()):
        total += _rows(words, first)
        first += words.shape[0]
    return total


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor as rows of words, some rows at a time; the last row as long as it is."""
    if not tensor.numel():
        return
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // (4 * ROW) * (4 * ROW)
    if flat.storage_offset() % 4:  # bytes of a view may lie anywhere
        flat = flat.clone()
    rows = flat[:whole].view(torch.int32).view(-1, ROW)
    yield from rows.split(ROWS.get(tensor.device.type, 64)) if len(rows) else ()
    rest = flat[whole:]
    if rest.numel():
        padded = rest.new_zeros(-(-rest.numel() // 4) * 4)
        padded[: rest.numel()] = rest
        yield padded.view(torch.int32).view(1, -1)


def _rows(words: torch.Tensor, first: int) -> torch.Tensor:
    """The part of the sum that these rows give; the first of them is row `first` of the tensor."""
    count, table = len(words), _table(words.device)
    sums = words.to(torch.int64).mul_(table[: words.shape[1]]).sum(1)
    if first + count <= ROW:
        return (sums * table[ROW + first : ROW + first + count]).sum()
    return (sums * _odd(torch.arange(ROW + first, ROW + first + count, device=words.device))).sum()


def _table(device: torch.device) -> torch.Tensor:
    """The weights of a row's words, then those of the first rows."""
    found = _TABLES.get(device)
    if found is None:
        found = _odd(torch.arange(2 * ROW, device=device))
        if type(found) is torch.Tensor:  # no fake one, which another caller could not use
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
