"""Scales of weights in float8, a number for each leaf, and the cast by it.

It follows from the largest number of the whole leaf, and all leaves of all buckets ask the other ranks for it at once:

    main ──▶ the largest number of each leaf's part ── all-reduce, max ──▶ scale ──▶ main · scale, cast

Main weights count as compute would see them, rounded to its dtype, and the numbers are those of torchao's dynamic
scaling of a whole tensor. So a weight that is gathered in float8 has the bits of one that is gathered in the compute
dtype and cast where it is used.

Casts to float8: main weights, as compute would see them, times the scale of their leaf.

On a GPU of compute capability 9.0 on, one Triton kernel reads each weight once and writes its byte. Without Triton, and
elsewhere, it is an operation after the other, some rows at a time. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .._common.calls import provide
from .._common.device import casts_float8, tl, triton
from .._common.record import Collective, over_each_axis
from .._common.torch_names import foreach_copy_, foreach_norm
from .._plan.layout import ALIGN, Bucket
from .._runtime.runtime import runtime_of
from .._storage import FlatBuffer, alias_of
from .weight import Float8Weight, take_float8

__all__ = ["cast_float8", "cast_scaled", "rescale"]

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


Span = tuple[int, int]
LEAST = 1e-12  # of the largest number of a leaf: torchao's, so that a leaf of zeros has a scale


def cast_scaled(main: FlatBuffer, own: torch.Tensor, scales: torch.Tensor) -> None:
    """Main weights, or a cut of them, in float8 into their part of the compute copy, by the scales of their leaves."""
    rows, begin = main.local.view(-1, ALIGN), main.span()[0] // ALIGN
    cast_float8(rows, own.view(-1, ALIGN), scales, main.bucket.compute, begin, main.bucket.rows)


def rescale(buffers: list[FlatBuffer], scales: Mapping[str, torch.Tensor]) -> None:
    """The scales of all leaves of these buckets, from their main weights."""
    if not buffers:
        return
    run = runtime_of(buffers[0].mesh)

    def reduced(axis: str, flat: torch.Tensor) -> torch.Tensor:
        run.now(Collective("all_reduce", axis, flat.numel(), flat.dtype, "max", "side", ""), flat, flat)
        return flat

    kinds: dict[tuple[torch.dtype, ...], list[FlatBuffer]] = {}
    for buffer in buffers:  # of one kind, nearly always
        kinds.setdefault((buffer.bucket.main, buffer.bucket.compute, buffer.bucket.gather), []).append(buffer)
    ordered = [buffer for some in kinds.values() for buffer in some]
    largest = [part for some in kinds.values() for part in _largest(some)]
    axes = [axis for axis, ranks in run.sizes.items() if ranks > 1]
    found = iter(over_each_axis(largest, [buffer.sharded() for buffer in ordered], axes, reduced))
    for (_, _, gather), some in kinds.items():
        most = torch.cat([next(found) for _ in some]).to(torch.float64)  # as torchao: compilers differ in float32
        new = (torch.finfo(gather).max / most.clamp_(min=LEAST)).to(torch.float32)
        own = [scales[buffer.bucket.name] for buffer in some]
        foreach_copy_(own, [*new.split([len(one) for one in own])])


def _largest(buffers: list[FlatBuffer]) -> Sequence[torch.Tensor]:
    """Of buckets of one kind, float32 [leaves] each: the largest number in this rank's part of a leaf, as compute would
    see it (rounding keeps the order, so it may come after); 0 where this rank has none."""
    counts = [len(buffer.bucket.leaves) for buffer in buffers]
    found = torch.zeros(sum(counts), dtype=torch.float32, device=buffers[0].local.device)
    views = [view for buffer in buffers for view in _views(buffer)]
    if views:
        where = _where(tuple([b.bucket for b in buffers]), tuple([b.span() for b in buffers]), found.device)
        most = torch.stack(foreach_norm(views, float("inf")))
        found.index_copy_(0, where, most.to(buffers[0].bucket.compute).to(torch.float32))
    return found.split(counts)


_VIEWS = WeakTensorKeyDictionary()  # of main weights: made once, and gone with them


def _views(buffer: FlatBuffer) -> list[torch.Tensor]:
    """This rank's part of each leaf of which it has one."""
    found: list[torch.Tensor] | None = _VIEWS.get(buffer.local)
    if found is None:
        found = _VIEWS[buffer.local] = [view for _, view in buffer.but(alias_of(buffer.local)).by_leaf()]
    return found


@lru_cache(maxsize=1 << 10)
def _where(buckets: tuple[Bucket, ...], spans: tuple[Span, ...], device: torch.device) -> torch.Tensor:
    """int64: of the parts that a rank has, which leaves they are of, if those of all buckets are counted on."""
    found, at = [], 0
    for bucket, (start, stop) in zip(buckets, spans, strict=True):
        held = [a < b for a, b in (leaf.within(start, stop) for leaf in bucket.leaves)]
        found += [at + i for i, here in enumerate(held) if here]
        at += len(held)
    return torch.tensor(found, dtype=torch.int64, device=device)


provide("float8", rescale, cast_scaled, Float8Weight, take_float8)
