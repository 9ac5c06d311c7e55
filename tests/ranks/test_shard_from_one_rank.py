"""shard(src=): weights that one rank has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.driven import refused
from support.problems import mesh_and_placement, net
from support.ranks import each_rank
from support.strikes import bits

import functional_fsdp as fsdp


def weights() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    params, _ = fsdp.functionalize(net(torch.float32))
    params["odd"] = torch.tensor([-0.0, float("nan"), float("-inf"), 1e-45, 3.0])
    params["half"] = torch.randn(3, 5).bfloat16()
    params["tied"] = params["odd"]
    params["none"], params["one"] = torch.zeros(0, 3), torch.tensor(-1.5)
    return params, {"seen": torch.tensor(7), "mask": torch.tensor([True, False])}


def on_meta(leaf: torch.Tensor) -> torch.Tensor:
    meta = leaf.detach().to("meta")
    return torch.nn.Parameter(meta, leaf.requires_grad) if isinstance(leaf, torch.nn.Parameter) else meta


@pytest.mark.parametrize(("preset", "ranks", "src"), [("zero3", 1, 0), ("zero2", 2, 1), ("hsdp", 4, 2)])
@each_rank("ranks")
def test_all_ranks_get_the_bits_of_one(preset: str, ranks: int, src: int) -> None:
    """The others' leaves have no values, or others."""
    mesh, placement = mesh_and_placement(preset)
    spec = fsdp.Spec(mesh, placement)
    params, held = weights()
    wanted = fsdp.shard(params, spec, fsdp.adamw(), buffers=held)
    if dist.get_rank() != src:
        metas = {id(leaf): on_meta(leaf) for leaf in params.values()}  # ties stay
        params = {name: metas[id(leaf)] for name, leaf in params.items()}
        held = {name: torch.zeros_like(buffer) for name, buffer in held.items()}
    state = fsdp.shard(params, spec, fsdp.adamw(), buffers=held, src=src)
    for a, b in zip(bits(state), bits(wanted), strict=True):
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    assert {k: b.tolist() for k, b in state.buffers.items()} == {"seen": 7, "mask": [True, False]}


@each_rank(2)
def test_what_cannot_be_given_by_one_rank_is_refused() -> None:
    rank = dist.get_rank()
    mesh = fsdp.local_mesh()
    alone, experts = fsdp.Spec(mesh), fsdp.Spec(fsdp.local_mesh(expert=2, data=1), {"a": fsdp.zero3("data")})

    def given(spec: fsdp.Spec, leaf: torch.Tensor, **more: Any) -> Any:
        return lambda: fsdp.shard({"a": leaf}, spec, **more)

    ones = torch.ones(4)
    refused(
        (given(alone, ones, src=2), "shard(src=2): the mesh has the ranks [0, 1]. Give one of them."),
        (given(alone, ones, src=rank), "src: 0", "src: 1", "Give every rank the same src"),
        (given(alone, torch.ones(4 + rank), src=0), "ranks have different trees"),
        (given(alone, torch.ones(4, device="meta"), src=0), "is on the meta device and has no values"),
        (given(alone, ones, src=0, buffers={"b": torch.ones(1 + rank)}), "buffer b (1,)"),
        (given(experts, ones, src=0),
         "ranks have 'a' of their own along ['expert'], and rank 0 has not all of them"),
    )  # fmt: skip
