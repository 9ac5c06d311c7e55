"""Sums in the order of ranks: ((r0 + r1) + r2) + ..., in float32, of what each of them sent.

On a GPU one Triton kernel reads every summand once and writes the sum once; without Triton, and on the CPU, it is an
addition for each rank. Both give the same bits.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

try:
    triton: Any = import_module("triton")
    tl: Any = import_module("triton.language")
except ImportError:  # torch for the CPU comes without
    triton = tl = None

__all__ = ["ordered_sum", "peer_sum"]

BLOCK = 2048  # elements
READERS = 64  # programs that read other ranks, beside compute


def ordered_sum(came: torch.Tensor, ranks: int, out: torch.Tensor, mean: bool) -> None:
    """`came` [ranks · n] -> `out` [n], float32: the sum over ranks, in their order, or that divided by their number."""
    n = out.numel()
    if triton is not None and out.is_cuda:
        if n:
            _kernel("summed")[(triton.cdiv(n, BLOCK),)](came, out, n, ranks, mean, BLOCK)
        return
    out.copy_(came[:n])
    for rank in range(1, ranks):
        out.add_(came[rank * n : (rank + 1) * n])
    if mean:
        out.div_(ranks)


def peer_sum(parts: list[torch.Tensor], places: torch.Tensor | None, at: int, out: torch.Tensor, mean: bool) -> None:
    """The same of `parts` [n] that lie on other ranks, read once and written nowhere else.

    places: where the slabs begin, int64 [ranks] on the device; at: bytes from there to each part. On GPUs.
    """
    n = out.numel()
    if triton is not None and out.is_cuda:
        if n:
            programs, wide = min(triton.cdiv(n, BLOCK), READERS), parts[0].dtype is torch.float32
            _kernel("read")[(programs,)](places, at, out, n, len(parts), mean, wide, BLOCK, num_warps=8)
        return
    out.copy_(parts[0])
    for part in parts[1:]:
        out.add_(part)
    if mean:
        out.div_(len(parts))


_KERNELS: dict[str, Any] = {}


def _kernel(name: str) -> Any:
    """The kernels, made when they are first needed: where there is Triton but no GPU, they cannot be."""
    if not _KERNELS:

        @triton.jit  # type: ignore[untyped-decorator]
        def summed(came, out, n, RANKS: tl.constexpr, MEAN: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
            at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
            inside = at < n
            total = tl.load(came + at, mask=inside).to(tl.float32)
            for _ in tl.static_range(1, RANKS):
                came += n
                total += tl.load(came + at, mask=inside).to(tl.float32)
            if MEAN:
                total = tl.math.div_rn(total, tl.full(total.shape, RANKS, tl.float32))
            tl.store(out + at, total, mask=inside)

        @triton.jit  # type: ignore[untyped-decorator]
        def read(  # type: ignore[no-untyped-def]
            places, offset, out, n,
            RANKS: tl.constexpr, MEAN: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr,
        ):  # fmt: skip
            kind = tl.float32 if WIDE else tl.bfloat16
            for block in range(tl.program_id(0), tl.cdiv(n, SIZE), tl.num_programs(0)):
                at = tl.full((SIZE,), SIZE, tl.int64) * block + tl.arange(0, SIZE)
                inside = at < n
                first = tl.multiple_of((tl.load(places) + offset).to(tl.pointer_type(kind)), 16)
                total = tl.load(first + at, mask=inside).to(tl.float32)
                for rank in tl.static_range(1, RANKS):
                    theirs = tl.multiple_of((tl.load(places + rank) + offset).to(tl.pointer_type(kind)), 16)
                    total += tl.load(theirs + at, mask=inside).to(tl.float32)
                if MEAN:
                    total = tl.math.div_rn(total, tl.full(total.shape, RANKS, tl.float32))
                tl.store(out + at, total, mask=inside)

        _KERNELS["summed"], _KERNELS["read"] = summed, read
    return _KERNELS[name]
