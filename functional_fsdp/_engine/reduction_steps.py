"""ReductionSteps: what a reduction does on its lanes, from what is staged to where gradients end.

staging [n] ── reduce-scatter, in place ──▶ own slice ── (outer axis) ──▶ main gradients: copied or added
staging [n] ── exchange ──▶ [ranks · n] ── sum in float32 ──▶             or used up where they arrive, by portions

An exact sum takes an all-to-all in the place of the reduction: what comes in, each rank's summand of the own slice, is
added up in float32 in the order of the ranks, in the bytes from which it was sent; and goes on in float32. What comes
in lies beside the staging, in memory that comes and goes, also where a transport keeps the staging.

    ((r0 + r1) + r2) + ..., in float32, of what each of them sent

On a GPU one Triton kernel reads every summand once and writes the sum once; without Triton, and on the CPU, it is an
addition for each rank. Both give the same bits.

Packed sums: gradients that travel in a codec, with what packing loses kept for the next step.

    staged [n] + residual [n] ──pack──▶ bytes [ranks, m] ──all-to-all──▶ bytes [ranks, m] ──unpack, add──▶ part
                    └── less what the bytes stand for ──▶ the next residual

A row of bytes is the part of one rank: each plane of the codec, those of the widest dtype first. Sums are in float32,
in the order of ranks. Where the sum stays whole on each rank, parts are packed once more and gathered; what that loses
is added to the residual of the rank that packed it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import torch

from .._common.device import in_host_memory, runs_triton, tl, triton
from .._common.record import Collective
from .._distributed.lanes import Mark, Steps
from .._plan.layout import STAGED, aligned
from .._plan.route import Route
from .._runtime.runtime import Runtime
from .._spec.codec import Codec, Planes
from .gathers import Carrier, Portions
from .sink import BucketConsumer

__all__ = ["Feedback", "ReductionSteps", "add_up", "ordered_sum", "pack", "pack_part", "unpack_whole"]

MOST = 1 << 23  # elements at once: what is between is some float32 tensors of so many
Feedback = tuple[torch.Tensor, torch.Tensor]  # the residual so far, and where the next one goes; perhaps the same


def _pieces(codec: Codec, bits: torch.Tensor, n: int) -> Iterator[tuple[int, int, Planes]]:
    """A part's planes, as views of its bytes, in pieces of whole blocks: (first, last) element, and their planes."""
    kinds = sorted(codec.planes((n,)).items(), key=lambda item: -item[1][1].itemsize)
    planes: Planes = {}
    at = 0
    for name, (shape, dtype) in kinds:
        size = torch.Size(shape).numel() * dtype.itemsize
        planes[name] = bits[at : at + size].view(dtype).view(shape)
        at += size
    step = max(MOST // codec.block, 1) * codec.block
    for start in range(0, n, step):
        stop = min(start + step, n)
        yield start, stop, {key: p[p.shape[0] * start // n : p.shape[0] * stop // n] for key, p in planes.items()}


def pack(codec: Codec, stage: torch.Tensor, bits: torch.Tensor, ranks: int, feedback: Feedback | None) -> None:
    """Staged gradients [ranks · n], with the residual, -> bytes [ranks · m]; and what the bytes have lost of them."""
    n = stage.numel() // ranks
    for rank, part in enumerate(bits.view(ranks, -1)):
        for start, stop, planes in _pieces(codec, part, n):
            here = slice(rank * n + start, rank * n + stop)
            values = stage[here].to(torch.float32)
            if feedback is not None:
                values = values + feedback[0][here]
            _put(planes, codec.pack(values))
            if feedback is not None:
                feedback[1][here].copy_(values - codec.unpack(planes, (stop - start,), torch.float32))


def _put(planes: Planes, values: Planes) -> None:
    for name, plane in planes.items():
        plane.copy_(values[name].view(plane.shape))


def add_up(codec: Codec, came: torch.Tensor, ranks: int, out: torch.Tensor, mean: bool) -> None:
    """Bytes [ranks · m], each rank's summand of one part, -> their sum, or mean, in the order of ranks: float32 [n]."""
    for rank, part in enumerate(came.view(ranks, -1)):
        for start, stop, planes in _pieces(codec, part, out.numel()):
            summand = codec.unpack(planes, (stop - start,), torch.float32)
            out[start:stop].add_(summand) if rank else out[start:stop].copy_(summand)
    if mean:
        out.div_(out.new_full((), ranks))  # by a number a GPU multiplies with its inverse, which it rounds


def pack_part(
    codec: Codec, part: torch.Tensor, bits: torch.Tensor, mine: int, ranks: int, mean: bool, feedback: Feedback | None
) -> None:
    """This rank's part of a sum, float32 [n], -> its bytes [m]. What they lose is as much of the whole sum as this
    rank's own summand would have to be larger by, in the next step."""
    n = part.numel()
    for start, stop, planes in _pieces(codec, bits, n):
        _put(planes, codec.pack(part[start:stop]))
        if feedback is not None:
            lost = part[start:stop] - codec.unpack(planes, (stop - start,), torch.float32)
            feedback[1][mine * n + start : mine * n + stop].add_(lost, alpha=ranks if mean else 1)


def unpack_whole(codec: Codec, bits: torch.Tensor, ranks: int, out: torch.Tensor) -> None:
    """Bytes [ranks · m] of all parts -> the whole sum, float32 [ranks · n]."""
    n = out.numel() // ranks
    for rank, part in enumerate(bits.view(ranks, -1)):
        for start, stop, planes in _pieces(codec, part, n):
            out[rank * n + start : rank * n + stop].copy_(codec.unpack(planes, (stop - start,), torch.float32))


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
                local = yield from self._packed_sum(kind, collectives, local, room, last, way.codec, feedback)
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

    def _packed_sum(
        self, kind: str, collectives: tuple[Collective, ...], stage: torch.Tensor, spare: torch.Tensor,
        out: torch.Tensor | None, codec: Codec, feedback: Feedback | None,
    ) -> Generator[Any, None, torch.Tensor]:  # fmt: skip
        """The same of gradients that travel in a codec."""
        out = out if out is not None and out.dtype is torch.float32 else None
        axis, mean = collectives[0].axis, collectives[0].op == "mean"
        ranks, mine = self.run.sizes[axis], self.run.coordinate[axis]
        n, size = stage.numel() // ranks, collectives[0].numel
        sent, came = spare[:size], spare[aligned(size, STAGED) :][:size]
        pack(codec, stage, sent, ranks, feedback)
        yield from self.run.collective(collectives[0], came, sent)
        if kind == "scatter":
            part = stage.view(torch.uint8)[: 4 * n].view(torch.float32) if out is None else out  # it was packed
            add_up(codec, came, ranks, part, mean)
            return part
        begin = 2 * aligned(size, STAGED)
        whole = spare[begin : begin + 4 * ranks * n].view(torch.float32) if out is None else out
        part = whole[mine * n : (mine + 1) * n]
        add_up(codec, came, ranks, part, mean)
        own = sent.view(ranks, -1)[mine]
        pack_part(codec, part, own, mine, ranks, mean, feedback)
        yield from self.run.collective(collectives[-1], sent, own)
        unpack_whole(codec, sent, ranks, whole)
        return whole
