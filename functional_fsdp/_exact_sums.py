"""Gradients added up in float32, in the order of the ranks.

Exact sums: an all-to-all in the place of a reduction, whose summands each rank adds up in float32.

    staging [n] ── exchange ──▶ [ranks · n] ── ((r0 + r1) + r2) + ..., in float32 ──▶ own slice, or used up by portions

What comes in, each rank's summand of the own slice, is added up in the order of the ranks, in the bytes from which it
was sent; and goes on in float32. What comes in lies beside the staging, in memory that comes and goes, also where a
transport keeps the staging.

On a GPU one Triton kernel reads every summand once and writes the sum once; without Triton, and on the CPU, it is an
addition for each rank. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from ._common.calls import provide
from ._common.record import Collective, Steps
from ._engine.gathers import Carrier, Portions
from ._engine.reductions import Staging
from ._plan.layout import STAGED, aligned
from ._runtime.runtime import Runtime
from ._shared.device import runs_triton, tl, triton

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


def used_up(
    staging: Staging,
    collectives: tuple[Collective, ...],
    stage: torch.Tensor,
    spare: torch.Tensor,
    consumer: Any,
) -> Steps:
    """All of a reduction that is one sum: what comes is added up and used up, piece by piece: here, or on the update
    lane while the rest comes. Then this lane waits for the sums only: the next gradients are staged on bytes that these
    read."""
    if collectives[0].lane != "reduce":
        yield collectives[0].lane
    lanes, mean = staging.run.lanes, collectives[0].op == "mean"
    portions = Portions(consumer.pieces if consumer.beside else ())
    came, ranks, own = yield from _exchanged(staging.run, staging.carrier, collectives, stage, spare, portions)
    if not consumer.beside:
        consumer.add_up(came, ranks, mean, own, lanes)
        return
    there, summed = portions.there or [lanes.mark()] * len(consumer.pieces), []

    def job() -> Steps:
        summed.append(consumer.add_up(came, ranks, mean, own, lanes, there))
        yield from ()

    staging.ends("update", lanes.enqueue("update", job()))
    lanes.wait(summed[0])


def _exchanged(
    run: Runtime, carrier: Carrier, collectives: tuple[Collective, ...], stage: torch.Tensor, spare: torch.Tensor,
    portions: Portions,
) -> Generator[Any, None, tuple[torch.Tensor, int, tuple[int, torch.Tensor] | None]]:  # fmt: skip
    """What each rank along the first axis has sent [ranks · n], how many these are, and the own place and summand
    where it is not among them."""
    axis = collectives[0].axis
    ranks, mine = run.sizes[axis], run.coordinate[axis]
    came = spare[: stage.numel() * stage.element_size()].view(stage.dtype)
    n = stage.numel() // ranks
    apart = yield from carrier.exchange(collectives, stage, came, portions)
    return came, ranks, (mine, stage[mine * n : (mine + 1) * n]) if apart else None


def exact_sum(
    run: Runtime, carrier: Carrier, kind: str, collectives: tuple[Collective, ...], stage: torch.Tensor,
    spare: torch.Tensor, out: torch.Tensor | None,
) -> Generator[Any, None, torch.Tensor]:  # fmt: skip
    """A step of a reduction (`Staging._steps`): the sum over the first axis, float32: this rank's part of it, or all of
    it where it stays whole."""
    out = out if out is not None and out.dtype is torch.float32 else None
    came, ranks, own = yield from _exchanged(run, carrier, collectives, stage, spare, Portions())
    n, mine = stage.numel() // ranks, run.coordinate[collectives[0].axis]
    if own is not None and out is None:  # the sum may take its place
        own = mine, came[mine * n : (mine + 1) * n].copy_(own[1])
    if kind == "scatter":
        whole = part = stage.view(torch.uint8)[: 4 * n].view(torch.float32) if out is None else out  # it was sent
    else:
        begin = aligned(came.numel() * came.element_size(), STAGED)
        whole = spare[begin : begin + 4 * ranks * n].view(torch.float32) if out is None else out
        part = whole[mine * n : (mine + 1) * n]
    ordered_sum(came, ranks, part, collectives[0].op == "mean", own)
    if kind != "scatter":
        yield from run.collective(collectives[-1], whole, part)
    return whole


provide("exact_sums", exact_sum, used_up)
