"""Casts to float8: main weights, as compute would see them, times the scale of their leaf.

On a GPU of compute capability 9.0 on, one Triton kernel reads each weight once and writes its byte. Without Triton, and
elsewhere, it is an operation after the other, some rows at a time. Both give the same bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from .._common.device import casts_float8, tl, triton

__all__ = ["cast_float8"]

ROWS = 1 << 17  # at once, where it is done by torch's operations: what is between is 16 Mi elements
BLOCK = 16  # rows of the kernel's


def cast_float8(
    source: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, seen: torch.dtype, begin: int, starts: tuple[int, ...]
) -> None:
    """Main weights [k, m] -> float8 [k, m]: `source` rounded to the dtype `seen`, times a scale, the same for a row.

    Args:
        scale: float32 [leaves].
        begin: the number of the first row; rows from `starts[i]` on have the scale `scale[i]`.
    """
    first = _tensor(starts, source.device)
    most = torch.finfo(out.dtype).max
    if triton is not None and casts_float8(source):
        if source.numel():
            grid = (triton.cdiv(len(source), BLOCK),)
            dtype, width = getattr(tl, str(seen).removeprefix("torch.")), source.shape[1]
            _kernel()[grid](source, out, scale, first, len(source), begin, len(first), most, dtype, width, BLOCK)
        return
    for at in range(0, len(source), ROWS):
        rows = source[at : at + ROWS]
        number = torch.arange(begin + at, begin + at + len(rows), device=source.device)
        by = scale.index_select(0, torch.bucketize(number, first, right=True) - 1)[:, None]
        out[at : at + ROWS].copy_((rows.to(seen).to(torch.float32) * by).clamp_(-most, most))


@lru_cache(maxsize=1 << 16)
def _tensor(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


_KERNEL: list[Any] = []


def _kernel() -> Any:
    """The kernel, made when it is first needed: where there is Triton but no GPU, it cannot be."""
    if not _KERNEL:

        @triton.jit  # type: ignore[untyped-decorator]
        def scaled(  # type: ignore[no-untyped-def]
            source, out, scale, starts, k, begin, LEAVES: tl.constexpr,
            MOST: tl.constexpr, SEEN: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
        ):  # fmt: skip
            row = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
            at = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
            inside = row[:, None] < k
            leaf = tl.full([SIZE], -1, tl.int32)
            for i in range(LEAVES):
                leaf += (tl.load(starts + i) <= row + begin).to(tl.int32)
            by = tl.load(scale + leaf)
            seen = tl.load(source + at, mask=inside, other=0.0).to(SEEN).to(tl.float32)
            found = tl.clamp(seen * by[:, None], -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
            tl.store(out + at, found.to(out.dtype.element_ty), mask=inside)

        _KERNEL.append(scaled)
    return _KERNEL[0]
