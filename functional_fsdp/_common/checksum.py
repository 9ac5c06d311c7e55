"""One number for a tensor's bits in their order, so that ranks can compare tensors by exchanging numbers.

    words     x[0] x[1] x[2] ...        the bytes in logical order, 4 at a time, signed
    rows      16,384 words each
    number    Σ_r M[r] · Σ_i W[i] · x[r, i]    modulo 2^64; W and M are odd and look random

The words of equal tensors give equal numbers on every device. A change of one word always shows, since its weight is
odd; any other change (a permutation, a transposition, other numbers) goes unseen once in 2^32 at most.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .device import rows_at_once, table_may_stay

__all__ = ["checksum"]

ROW = 1 << 14  # words


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """[...] of any dtype -> int64 [] on the same device. Takes a few MiB of memory, on a GPU a tenth of a large
    tensor's at most, and a copy where strides are odd.

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
        rows = _odd(torch.arange(ROW + first, ROW + first + count, device=words.device))
    return (product.sum(1) * rows).sum() if count > 1 else product.sum() * rows[0]


def _table(device: torch.device) -> torch.Tensor:
    """The weights of a row's words, then those of the first rows."""
    found = _TABLES.get(device)
    if found is None:
        found = _odd(torch.arange(2 * ROW, device=device))
        if type(found) is torch.Tensor and table_may_stay(device):  # no fake one
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
