"""Packed sums: gradients that travel in a codec, with what packing loses kept for the next step.

    staged [n] + residual [n] ──pack──▶ bytes [ranks, m] ──all-to-all──▶ bytes [ranks, m] ──unpack, add──▶ part
                    └── less what the bytes stand for ──▶ the next residual

A row of bytes is the part of one rank: each plane of the codec, those of the widest dtype first. Sums are in float32,
in the order of ranks. Where the sum stays whole on each rank, parts are packed once more and gathered; what that loses
is added to the residual of the rank that packed it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .._spec.codec import Codec, Planes

__all__ = ["Feedback", "add_up", "pack", "pack_part", "unpack_whole"]

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
