"""Every transition of a FlatBuffer, on any device."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import functional_fsdp as fsdp
from functional_fsdp import FlatBuffer, Partial, Replicated, Sharded
from functional_fsdp._plan.layout import Bucket
from functional_fsdp._plan.route import Axis

ONE = ("data",)
TWO = ("replica", "shard")


def bucket_on(axes: tuple[str, ...]) -> tuple[Bucket, fsdp.Spec]:
    world = fsdp.local_mesh().size()
    mesh = fsdp.local_mesh() if axes == ONE else fsdp.local_mesh(replica=2, shard=world // 2)
    placement = fsdp.zero3("data") if axes == ONE else fsdp.hfsdp(*TWO)
    spec = fsdp.Spec(mesh, placement)
    plan = fsdp.make_layout(
        {"a": torch.empty(3, 100), "b": torch.empty(250)}, fsdp.Spec(mesh, placement, units=[("a", "b")])
    )
    return next(iter(plan.buckets.values())), spec


def value(rank: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def local_of(states: dict[str, Axis], bucket: Bucket, device_mesh: Any, average: str) -> torch.Tensor:
    """What this rank holds of the test's value in these states, made without any collective.

    The whole is the reduction over all Partial axes of value(rank) at each rank.
    """
    mesh, names = device_mesh.mesh, device_mesh.mesh_dim_names
    here = dict(zip(names, (mesh == dist.get_rank()).nonzero()[0].tolist(), strict=True))
    picks = [range(mesh.shape[i]) if states[a] is not Partial else [here[a]] for i, a in enumerate(names)]
    ranks = [int(mesh[index]) for index in product(*picks)]
    whole = torch.stack([value(r, bucket.numel) for r in ranks]).sum(0)
    if average == "mean":
        whole /= len(ranks)
    start, stop = bucket.span([a for a, s in states.items() if s is Sharded], here)
    return whole[start:stop].to(device_mesh.device_type)


def moves(axes: tuple[str, ...], average: str) -> list[str]:
    """Try every pair of states of every axis; return those that gave the wrong numbers."""
    bucket, spec = bucket_on(axes)
    wrong, tried = [], 0
    allowed = {(Sharded, Replicated), (Partial, Replicated), (Partial, Sharded), (Replicated, Sharded)}
    prefix = [set(bucket.placement.order[:k]) for k in range(len(axes) + 1)]
    for have in product((Sharded, Replicated, Partial), repeat=len(axes)):
        for want in product((Sharded, Replicated, Partial), repeat=len(axes)):
            a, b = dict(zip(axes, have, strict=True)), dict(zip(axes, want, strict=True))
            legal = all(x is y or (x, y) in allowed for x, y in zip(have, want, strict=True))
            legal &= all({k for k, s in states.items() if s is Sharded} in prefix for states in (a, b))
            buffer = FlatBuffer(local_of(a, bucket, spec.mesh, average), bucket, tuple(a.items()), spec.mesh)
            if not legal:
                with pytest.raises(fsdp.SpecError, match=r"not a transition|only leading axes"):
                    buffer.redistribute(b)
                continue
            expected = local_of(b, bucket, spec.mesh, average)
            before = buffer.local.clone()
            got = buffer.redistribute(b, average=average)
            out = torch.full_like(expected, torch.nan)
            again = buffer.redistribute(b, out, average=average)
            tried += 1
            good = dict(got.states) == b and torch.allclose(got.local, expected, rtol=0, atol=1e-12)
            good &= again.local is out and torch.equal(out, got.local) and torch.equal(buffer.local, before)
            if not good:
                wrong.append(f"{a} -> {b}")
    assert tried >= 7
    return wrong
