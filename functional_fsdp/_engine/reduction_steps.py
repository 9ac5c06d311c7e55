"""ReductionSteps: what a reduction does on its lanes, from what is staged to where gradients end.

staging [n] ── reduce-scatter, in place ──▶ own slice ── (outer axis) ──▶ main gradients: copied or added
staging [n] ── exchange ──▶ [ranks · n] ── sum in float32 ──▶             or used up where they arrive, by portions

An exact sum takes an all-to-all in the place of the reduction: what comes in, each rank's summand of the own slice, is
added up in float32 in the order of the ranks, in the bytes from which it was sent; and goes on in float32. What comes
in lies beside the staging, in memory that comes and goes, also where a transport keeps the staging.

    ((r0 + r1) + r2) + ..., in float32, of what each of them sent

On a GPU one Triton kernel reads every summand once and writes the sum once; without Triton, and on the CPU, it is an
addition for each rank. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from .._common.calls import provided
from .._common.device import in_host_memory, runs_triton, tl, triton
from .._common.record import Collective
from .._distributed.lanes import Mark, Steps
from .._plan.layout import STAGED, aligned
from .._plan.route import Route
from .._runtime.runtime import Runtime
from .gathers import Carrier, Portions
from .sink import BucketConsumer

Feedback = tuple[torch.Tensor, torch.Tensor]  # the residual so far, and where the next one goes; perhaps the same
_packed_sum = provided("codecs.packed_sum")
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


class ReductionSteps:
    """For all reductions of one lineage."""

    def __init__(self, run: Runtime, carrier: Carrier, marks: dict[str, Mark]) -> None:
        self.run, self.carrier = run, carrier
        self.marks = marks  # the newest point on each lane that compute has to wait for

    def of(
        self, way: Route, stage: torch.Tensor, spare: torch.Tensor, out: torch.Tensor | None, add: bool,
        consumer: BucketConsumer | None = None, feedback: Feedback | None = None,
    ) -> Steps:  # fmt: skip
        """The steps, in place in `stage`, the last one straight into `out` if it can be; else copied or added. Or they
        are used up by a consumer. feedback: what a way with a codec loses is kept there."""
        if consumer is not None and not consumer.beside:
            self.run.lanes.wait(self.marks.get("update"))  # which may use the same room
        if consumer is not None and consumer.sums and way.alone:  # the sum is all that is done
            yield from self._consumed(way.steps[0].collectives, stage, spare, consumer)
            return
        local = stage
        lane = "reduce"
        far = out is not None and in_host_memory(out)  # which collectives do not write to
        for i, (kind, collectives, start, size) in enumerate(way.steps):
            if collectives[0].lane != lane:
                lane = collectives[0].lane
                yield lane
            last = out if not (add or self.carrier.inside or far) and i == len(way.steps) - 1 else None
            if way.codec is not None and i == way.packed:
                room = spare[way.room :]
                packed = _packed_sum(self.run, kind, collectives, local, room, last, way.codec, feedback)
                local = yield from packed
            elif way.exact and i == 0:
                local = yield from self._sum(kind, collectives, stage, spare, last)
            elif kind == "scatter":
                part = last if last is not None and last.dtype is local.dtype else local[start : start + size]
                yield from self.run.collective(collectives[0], part, local)
                local = part
            else:
                yield from self.run.collective(collectives[0], local, local)
        if way.divisor > 1:
            local.div_(way.divisor)
        if consumer is not None:
            consumer.use(local)
        elif out is not None and add:
            out.add_(local)
        elif out is not None and local is not out:
            out.copy_(local)

    def _consumed(
        self, collectives: tuple[Collective, ...], stage: torch.Tensor, spare: torch.Tensor, consumer: BucketConsumer
    ) -> Steps:
        """What comes is added up and used up, piece by piece: here, or on the update lane while the rest comes. Then
        this lane waits for the sums only: the next gradients are staged on bytes that these read."""
        if collectives[0].lane != "reduce":
            yield collectives[0].lane
        lanes, mean = self.run.lanes, collectives[0].op == "mean"
        portions = Portions(consumer.pieces if consumer.beside else ())
        came, ranks, own = yield from self._exchanged(collectives, stage, spare, portions)
        if not consumer.beside:
            consumer.add_up(came, ranks, mean, own, lanes)
            return
        there, summed = portions.there or [lanes.mark()] * len(consumer.pieces), []

        def job() -> Steps:
            summed.append(consumer.add_up(came, ranks, mean, own, lanes, there))
            yield from ()

        self.marks["update"] = lanes.enqueue("update", job())
        lanes.wait(summed[0])

    def _exchanged(
        self, collectives: tuple[Collective, ...], stage: torch.Tensor, spare: torch.Tensor, portions: Portions
    ) -> Generator[Any, None, tuple[torch.Tensor, int, tuple[int, torch.Tensor] | None]]:
        """What each rank along the first axis has sent [ranks · n], how many these are, and the own place and summand
        where it is not among them."""
        axis = collectives[0].axis
        ranks, mine = self.run.sizes[axis], self.run.coordinate[axis]
        came = spare[: stage.numel() * stage.element_size()].view(stage.dtype)
        n = stage.numel() // ranks
        apart = yield from self.carrier.exchange(collectives, stage, came, portions)
        return came, ranks, (mine, stage[mine * n : (mine + 1) * n]) if apart else None

    def _sum(
        self, kind: str, collectives: tuple[Collective, ...], stage: torch.Tensor, spare: torch.Tensor,
        out: torch.Tensor | None,
    ) -> Generator[Any, None, torch.Tensor]:  # fmt: skip
        """The exact sum over the first axis, float32: this rank's part of it, or all of it where it stays whole."""
        out = out if out is not None and out.dtype is torch.float32 else None
        came, ranks, own = yield from self._exchanged(collectives, stage, spare, Portions())
        n, mine = stage.numel() // ranks, self.run.coordinate[collectives[0].axis]
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
            yield from self.run.collective(collectives[-1], whole, part)
        return whole
