"""The collectives on NCCL and on gloo, each a generator: it yields calls that issue asynchronous works, and goes on
when these are done.

NCCL has each as one kernel, which runs on the current stream, and nothing is yielded. gloo's own all-gather and
reduce-scatter copy through temporary buffers; its broadcast and reduce work in place, so here a gather is one broadcast
a slice, a reduce-scatter one reduce a slice, and an all-reduce both, one after the other. That is several times faster,
and makes reduce-scatter and all-reduce equal bit for bit at every world size: the same reduces, in the same order.

A traced step on CPUs calls torch's functional collectives instead, of groups with one thread each: see `_groups`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ._torch import all_gather_single, reduce_scatter_single

__all__ = ["all_gather", "all_reduce", "all_to_all", "barrier", "reduce_scatter"]

Works = Iterator[list[Any] | str]
OPS = {"mean": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def all_gather(out: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> Works:
    """`mine` [n] -> `out` [ranks · n], in rank order; in place where `mine` is this rank's slice of `out`."""
    if not out.is_floating_point():  # integers and booleans travel as bytes
        out, mine = out.view(torch.uint8), mine.view(torch.uint8)
    if out.device.type == "cuda":
        all_gather_single(out, mine, group=group)  # on the current stream; the host does not wait
        return
    slices = out.chunk(group.size()) if out.numel() else ()
    if slices and slices[group.rank()].data_ptr() != mine.data_ptr():
        slices[group.rank()].copy_(mine)
    yield [partial(dist.broadcast, part, group_src=r, group=group, async_op=True) for r, part in enumerate(slices)]


def reduce_scatter(out: torch.Tensor, full: torch.Tensor, op: str, group: dist.ProcessGroup) -> Works:
    """`full` [ranks · n] -> `out` [n]. `full` is scratch afterwards."""
    if out.device.type == "cuda":
        reduce_scatter_single(out, full, op=OPS[op], group=group)
        return
    slices = full.chunk(group.size()) if full.numel() else ()
    yield _reduces(slices, op, group)
    if slices and slices[group.rank()].data_ptr() != out.data_ptr():
        out.copy_(slices[group.rank()])


def all_to_all(out: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup) -> Works:
    """`given` [ranks · n] -> `out` [ranks · n]: the n of each rank's that are this one's, in rank order."""
    if out.device.type == "cuda":
        dist.all_to_all_single(out, given, group=group)
        return
    if out.numel():
        yield [partial(dist.all_to_all_single, out, given, group=group, async_op=True)]


def all_reduce(tensor: torch.Tensor, op: str, group: dist.ProcessGroup, sliced: bool = True) -> Works:
    """`tensor` [n], in place. On gloo `sliced` is for large tensors, whose n divides by the ranks."""
    if tensor.device.type == "cuda":
        dist.all_reduce(tensor, op=OPS[op], group=group)
        return
    if not sliced:
        yield [partial(dist.all_reduce, tensor, op=OPS[op], group=group, async_op=True)]
        return
    slices = tensor.chunk(group.size()) if tensor.numel() else ()
    yield _reduces(slices, op, group)
    yield [partial(dist.broadcast, part, group_src=r, group=group, async_op=True) for r, part in enumerate(slices)]


def barrier(group: dist.ProcessGroup) -> Works:
    """All ranks are here. On GPUs `Runtime.signals` has one that the host does not take part in."""
    yield [partial(dist.all_reduce, torch.zeros(1), group=group, async_op=True)]


def _reduces(slices: tuple[torch.Tensor, ...], op: str, group: dist.ProcessGroup) -> list[Any]:
    how: dict[str, Any] = {"op": OPS[op], "group": group, "async_op": True}
    return [partial(dist.reduce, part, group_dst=r, **how) for r, part in enumerate(slices)]
