"""Sums in the order of ranks: ((r0 + r1) + r2) + ..., in float32, of what each of them sent.

On a GPU one Triton kernel reads every summand once and writes the sum once; without Triton, and on the CPU, it is an
addition for each rank. Both give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch

from .._common.device import runs_triton
from .._common.triton import tl, triton

__all__ = ["ordered_sum"]

BLOCK = 2048  # elements


def ordered_sum(
    came: torch.Tensor, ranks: int, out: torch.Tensor, mean: bool, own: tuple[int, torch.Tensor] | None = None,
    first: int = 0,
) -> None:  # fmt: skip
    """`came` [ranks · n] -> `out` [n], float32: the sum over ranks, in their order, or that divided by their number.

    own: a rank and its summand [n], where that is not in `came`. first: `out` is the sum of the elements from here on,
    and may be fewer than n.
    """
    stride, size = came.numel() // ranks, out.numel()
    place, mine = own or (0, came[:stride])
    if triton is not None and runs_triton(out):
        if size:
            grid = (triton.cdiv(size, BLOCK),)
            _kernel()[grid](came[first:], mine[first:], out, size, stride, place, ranks, mean, BLOCK)
        return
    for rank in range(ranks):
        summand = (mine if rank == place else came[rank * stride :])[first : first + size]
        out.add_(summand) if rank else out.copy_(summand)
    if mean:
        out.div_(out.new_full((), ranks))  # by a number a GPU multiplies with its inverse, which it rounds


_KERNEL: list[Any] = []


def _kernel() -> Any:
    """The kernel, made when it is first needed: where there is Triton but no GPU, it cannot be."""
    if not _KERNEL:

        @triton.jit  # type: ignore[untyped-decorator]
        def summed(  # type: ignore[no-untyped-def]
            came, mine, out, size, stride, PLACE: tl.constexpr, RANKS: tl.constexpr, MEAN: tl.constexpr,
            SIZE: tl.constexpr
        ):  # fmt: skip
            at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
            inside = at < size
            total = tl.load((mine if PLACE == 0 else came) + at, mask=inside).to(tl.float32)
            for rank in tl.static_range(1, RANKS):
                came += stride
                total += tl.load((mine if rank == PLACE else came) + at, mask=inside).to(tl.float32)
            if MEAN:
                total = tl.math.div_rn(total, tl.full(total.shape, RANKS, tl.float32))
            tl.store(out + at, total, mask=inside)

        _KERNEL.append(summed)
    return _KERNEL[0]
