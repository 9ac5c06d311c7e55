"""Digests: what a fingerprint keeps of a tensor. Parts of a tensor add up to the digest of the whole.

hash           int64: mixed bits of each element and its place, added up with wrap-around: equal or not
squares        float64: the sum of squares
projections    two float64: sums of the elements, each with a random sign of its own place: of a difference of two
               tensors they say how large it is, and they are linear, so gradients of ranks have the mean of theirs
"""

from __future__ import annotations

import torch

__all__ = ["Digest", "digest"]

Digest = tuple[torch.Tensor, torch.Tensor]  # int64 [], float64 [3]
CHUNK = 1 << 22  # elements at a time
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
A, B, C = 0x1E3779B97F4A7C15, -0x40A7B892E31B1A47, 0x14CEB9FE1A85EC53


def _mixed(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ (x >> 30)) * B
    x = (x ^ (x >> 27)) * C
    return x ^ (x >> 31)


def digest(tensor: torch.Tensor, start: int = 0, rows: bool = False) -> Digest:
    """The digest of a tensor, on its device; nothing waits.

    Args:
        start: the place of its first element in the whole, where it is a part of a flat tensor.
        rows: places count within a row (a part along the first dim), so that rows may lie on any rank, in any order.

    >>> t = torch.arange(9.0)
    >>> whole, a, b = digest(t), digest(t[:5]), digest(t[5:], 5)
    >>> bool(whole[0] == a[0] + b[0]), float(whole[1][0])
    (True, 204.0)
    """
    x = tensor.detach()
    if x.is_nested:
        x, rows = torch.cat([part.reshape(-1) for part in x.unbind()] or [x.new_empty(0)]), False
    if x.is_quantized:
        x = x.dequantize()
    if x.layout is not torch.strided:
        x = x.to_dense()
    x = x.resolve_conj().resolve_neg()
    if x.is_complex():
        x = torch.view_as_real(x)
    if x.dtype is torch.float4_e2m1fn_x2:
        x = x.view(torch.uint8)
    width = x.numel() // len(x) if rows and x.dim() and len(x) else 0
    x = x.reshape(-1)
    if x.dtype is torch.bool:
        x = x.to(torch.int8)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    numbers = torch.zeros(3, dtype=torch.float64, device=x.device)
    for first in range(0, x.numel(), CHUNK):
        part = x[first : first + CHUNK]
        place = torch.arange(start + first, start + first + part.numel(), dtype=torch.int64, device=x.device)
        if width:
            place %= width
        place = _mixed(place * A + C)
        bits = part.view(BITS[part.element_size()]).to(torch.int64)
        total += _mixed(bits * A ^ place).sum()
        value = part.to(torch.float64)
        signs = [1 - 2 * (place >> shift & 1) for shift in (7, 19)]
        numbers += torch.stack([value.dot(value), *[value.dot(sign.to(torch.float64)) for sign in signs]])
    return total, numbers
