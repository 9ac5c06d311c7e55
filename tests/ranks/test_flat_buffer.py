"""FlatBuffer.redistribute on 1-D and 2-D meshes: every transition of the table, in place, into `out`, mean and sum."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.ranks import each_rank, launch
from support.redistributed import ONE, TWO, bucket_on, moves, value

import functional_fsdp as fsdp
from functional_fsdp import FlatBuffer, Partial, Replicated, Sharded
from functional_fsdp._storage import padding


@pytest.mark.parametrize("average", ["mean", "sum"])
@pytest.mark.parametrize(("axes", "ranks"), [(ONE, 1), (ONE, 2), (ONE, 4), (TWO, 2), (TWO, 4)])
def test_every_transition(axes: tuple[str, ...], ranks: int, average: str) -> None:
    assert launch(moves, (axes, average), nprocs=ranks) == [[]] * ranks


@each_rank(2)
def test_a_gather_is_in_place() -> None:
    bucket, spec = bucket_on(ONE)
    whole = torch.full((bucket.numel,), torch.nan, dtype=torch.float64)
    start, stop = bucket.span(ONE, {"data": dist.get_rank()})
    own = whole[start:stop].copy_(value(dist.get_rank(), stop - start))
    got = FlatBuffer(own, bucket, (("data", Sharded),), spec.mesh).redistribute({"data": Replicated}, whole)
    assert got.local is whole
    assert torch.equal(whole, torch.cat([value(r, stop - start) for r in range(2)]))


def test_a_wrong_out_says_both_shapes() -> None:
    bucket, spec = bucket_on(ONE)
    buffer = FlatBuffer(torch.zeros(bucket.numel), bucket, (("data", Partial),), spec.mesh)
    with pytest.raises(fsdp.SpecError, match=rf"out has shape \(3,\) .* expected \({bucket.numel},\)"):
        buffer.redistribute({"data": Replicated}, torch.zeros(3))
    with pytest.raises(fsdp.SpecError, match="unknown axis 'tensor'"):
        buffer.redistribute({"tensor": Replicated})


@pytest.mark.parametrize("ranks", [1, 2, 3])
@each_rank("ranks")
def test_leaves_and_padding_are_every_element_once(ranks: int) -> None:
    leaves = {str(i): torch.ones(n) for i, n in enumerate((0, 1, 127, 128, 0, 129, 511, 0))}
    spec = fsdp.Spec(fsdp.local_mesh("cpu"))
    state = fsdp.shard({"unit": leaves}, spec, fsdp.adamw(moments=fsdp.dynamic8(32)))
    for buffer in (buffer for tree in (state.main, *state.opt.mean.values()) for buffer in tree.values()):
        seen = buffer.but(torch.zeros(buffer.local.numel()))
        for view in (*padding(seen), *(shard.local for shard in fsdp.extend.leaf_shards(seen))):
            view.add_(1)
        assert (seen.local == 1).all()
