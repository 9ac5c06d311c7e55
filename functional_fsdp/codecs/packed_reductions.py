"""Packed reductions: gradients that travel in a codec, with what packing loses kept for the next step.

    staged [n] + residual [n] ──pack──▶ bytes [ranks, m] ──all-to-all──▶ bytes [ranks, m] ──unpack, add──▶ part
                    └── less what the bytes stand for ──▶ the next residual

A row of bytes is the part of one rank: each plane of the codec, those of the widest dtype first. Sums are in float32,
in the order of ranks. Where the sum stays whole on each rank, parts are packed once more and gathered; what that loses
is added to the residual of the rank that packed it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .._common.calls import provide
from .._common.record import Collective
from .._plan.layout import STAGED, aligned
from .._runtime.agreement import Leaves
from .._runtime.runtime import Runtime
from .._spec.precision import Codec, Planes
from .._storage import FlatBuffer
from . import kernels

Feedback = tuple[torch.Tensor, torch.Tensor]  # the residual so far, and where the next one goes; perhaps the same
MOST = 1 << 23  # elements at once: what is between is some float32 tensors of so many


class ErrorFeedback:
    """What packing loses of a lineage's gradients.

    Attributes:
        residual: by bucket, what earlier steps have lost. errors: what is lost up to now in this one.
    """

    def __init__(self, residual: Mapping[str, FlatBuffer]) -> None:
        self.residual = residual
        self.errors: dict[str, torch.Tensor] = {}

    def of(self, bucket: str) -> Feedback | None:
        """What packing has lost of a bucket, and where what it loses now goes: of the step's first reduction, bytes of
        its own, as the step may not be taken."""
        if bucket not in self.residual:
            return None
        old, new = self.residual[bucket].local, self.errors.get(bucket)
        if new is None:
            new = self.errors[bucket] = torch.empty_like(old)
            return old, new
        return new, new

    def keep(self, skip: torch.Tensor | None, given: Leaves) -> None:
        """The step is taken: what it has lost is the residual, but where `skip` says that it changes nothing. Of leaves
        that got no gradient (see `GradientMask`) what was sent is not used, and the residual stays, too."""
        for name, new in self.errors.items():
            old = self.residual[name]
            if name in given:
                lacks = [not one for one in given[name]]
                for (_, there), (_, stays) in zip(old.but(new).by_label(lacks), old.by_label(lacks), strict=True):
                    there.copy_(stays)
            old.local.copy_(new if skip is None else torch.where(skip, old.local, new))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is reduced inside is no gradient of the step: nothing is added to it, and what it loses is dropped."""
        residual, errors, self.residual, self.errors = self.residual, self.errors, {}, {}
        try:
            yield
        finally:
            self.residual, self.errors = residual, errors

    def resume(self, errors: Mapping[str, torch.Tensor]) -> None:
        """Other gradients are in the place of this step's, of which this was lost: it is copied."""
        self.errors = {name: errors[name].clone() for name in self.residual if name in errors}

    def clear(self) -> None:
        """A step begins."""
        self.errors.clear()


def _planes(codec: Codec, bits: torch.Tensor, n: int) -> Planes:
    """A part's planes, as views of its bytes."""
    kinds = sorted(codec.planes((n,)).items(), key=lambda item: -item[1][1].itemsize)
    planes: Planes = {}
    at = 0
    for name, (shape, dtype) in kinds:
        size = torch.Size(shape).numel() * dtype.itemsize
        planes[name] = bits[at : at + size].view(dtype).view(shape)
        at += size
    return planes


def _pieces(codec: Codec, bits: torch.Tensor, n: int) -> Iterator[tuple[int, int, Planes]]:
    """A part's planes in pieces of whole blocks: (first, last) element, and their planes."""
    planes, step = _planes(codec, bits, n), max(MOST // codec.block, 1) * codec.block
    for start in range(0, n, step):
        stop = min(start + step, n)
        yield start, stop, {key: p[p.shape[0] * start // n : p.shape[0] * stop // n] for key, p in planes.items()}


def pack(codec: Codec, stage: torch.Tensor, bits: torch.Tensor, ranks: int, feedback: Feedback | None) -> None:
    """Staged gradients [ranks · n], with the residual, -> bytes [ranks · m]; and what the bytes have lost of them."""
    n = stage.numel() // ranks
    for rank, part in enumerate(bits.view(ranks, -1)):
        if kernels.fused(codec, stage) and not (feedback and codec.kind in kernels.FLOAT8):
            here = slice(rank * n, (rank + 1) * n)
            lost = None if feedback is None else (feedback[0][here], feedback[1][here])
            kernels.pack(codec, stage[here], _planes(codec, part, n), feedback=lost)
            continue
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
    if kernels.fused(codec, came):
        stride = came.numel() // ranks
        data, scales = kernels.both(_planes(codec, came[:stride], out.numel()))
        kernels.unpack(codec, data, scales, out, ranks=ranks, stride=stride, mean=mean)
        return
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


def packed_sum(
    run: Runtime, kind: str, collectives: tuple[Collective, ...], stage: torch.Tensor, spare: torch.Tensor,
    out: torch.Tensor | None, codec: Codec, feedback: Feedback | None,
) -> Generator[Any, None, torch.Tensor]:  # fmt: skip
    """The sum over the first axis of gradients that travel in a codec, float32: this rank's part of it, or the
    whole sum where it stays whole."""
    out = out if out is not None and out.dtype is torch.float32 else None
    axis, mean = collectives[0].axis, collectives[0].op == "mean"
    ranks, mine = run.sizes[axis], run.coordinate[axis]
    n, size = stage.numel() // ranks, collectives[0].numel
    sent, came = spare[:size], spare[aligned(size, STAGED) :][:size]
    pack(codec, stage, sent, ranks, feedback)
    yield from run.collective(collectives[0], came, sent)
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
    yield from run.collective(collectives[-1], sent, own)
    unpack_whole(codec, sent, ranks, whole)
    return whole


provide("codecs", packed_sum, ErrorFeedback)
