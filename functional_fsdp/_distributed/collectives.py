"""The collectives on gloo, as a generator: it yields calls that issue asynchronous works, and goes on when these are
done. (NCCL has each as one kernel, see `_runtime.stream_lanes`.)

gloo's own all-gather and reduce-scatter copy through temporary buffers; its broadcast and reduce work in place, so here
a gather is one broadcast a slice, a reduce-scatter one reduce a slice, and an all-reduce both, one after the other.
That is several times faster, and makes reduce-scatter and all-reduce equal bit for bit at every world size: the same
reduces, in the same order.

A traced step on CPUs calls torch's functional collectives instead, of groups with one thread each: see `groups`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .._common.record import Collective

__all__ = ["OPS", "gloo"]

OPS = {"mean": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def gloo(hop: Collective, out: torch.Tensor, given: torch.Tensor, group: Any) -> Iterator[list[Any] | str]:
    """One collective of this group.

    all_gather       `given` [n] -> `out` [ranks · n], in rank order; in place where `given` is the slice of `out`
    reduce_scatter   `given` [ranks · n] -> `out` [n]; `given` is scratch afterwards
    all_to_all       `given` [ranks · n] -> `out` [ranks · n]: the n of each rank's that are this one's, by rank; with
                     `splits` (elements that come, that go) as many as they say
    all_reduce       `out` [n], in place; of a bucket (not of a few numbers) n divides by the ranks
    barrier          all ranks are here
    """
    own, how = group.rank(), dict[str, Any](group=group, async_op=True)
    if hop.kind == "barrier":
        yield [partial(dist.all_reduce, torch.zeros(1, device="cpu"), **how)]
    elif hop.kind == "all_to_all" and hop.splits:
        came, sent = ([n * hop.dtype.itemsize for n in some] for some in hop.splits)
        yield [partial(dist.all_to_all_single, out.view(torch.uint8), given.view(torch.uint8), came, sent, **how)]
    elif hop.kind == "all_to_all":
        if out.numel():
            yield [partial(dist.all_to_all_single, out, given, **how)]
    elif hop.kind == "all_reduce" and (hop.lane == "control" or not hop.bucket):
        yield [partial(dist.all_reduce, out, op=OPS[hop.op], **how)]
    elif hop.kind == "all_gather":
        if not out.is_floating_point() or out.itemsize == 1:  # integers, booleans and float8 travel as bytes
            out, given = out.view(torch.uint8), given.view(torch.uint8)
        slices = out.chunk(group.size()) if out.numel() else ()
        if slices and slices[own].data_ptr() != given.data_ptr():
            slices[own].copy_(given)
        yield [partial(dist.broadcast, part, group_src=r, **how) for r, part in enumerate(slices)]
    else:
        full = out if hop.kind == "all_reduce" else given
        slices = full.chunk(group.size()) if full.numel() else ()
        yield [partial(dist.reduce, part, group_dst=r, op=OPS[hop.op], **how) for r, part in enumerate(slices)]
        if hop.kind == "all_reduce":
            yield [partial(dist.broadcast, part, group_src=r, **how) for r, part in enumerate(slices)]
        elif slices and slices[own].data_ptr() != out.data_ptr():
            out.copy_(slices[own])
