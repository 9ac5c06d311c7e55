"""shard(src=): weights that one rank has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.problems import mesh_and_placement, net
from support.strikes import bits

import functional_fsdp as fsdp
from functional_fsdp import launch


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


def given(preset: str, src: int) -> bool:
    """The same bits as where all ranks have them; the others' leaves have no values, or others."""
    mesh, placement = mesh_and_placement(preset)
    spec = fsdp.Spec(mesh, placement)
    params, held = weights()
    wanted = fsdp.shard(params, spec, fsdp.adamw(), buffers=held)
    if dist.get_rank() != src:
        metas = {id(leaf): on_meta(leaf) for leaf in params.values()}  # ties stay
        params = {name: metas[id(leaf)] for name, leaf in params.items()}
        held = {name: torch.zeros_like(buffer) for name, buffer in held.items()}
    state = fsdp.shard(params, spec, fsdp.adamw(), buffers=held, src=src)
    same = [torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
            for a, b in zip(bits(state), bits(wanted), strict=True)]  # fmt: skip
    return all(same) and {k: b.tolist() for k, b in state.buffers.items()} == {"seen": 7, "mask": [True, False]}


@pytest.mark.parametrize(("preset", "ranks", "src"), [("zero3", 1, 0), ("zero2", 2, 1), ("hsdp", 4, 2)])
def test_all_ranks_get_the_bits_of_one(preset: str, ranks: int, src: int) -> None:
    assert launch(given, (preset, src), nprocs=ranks) == [True] * ranks


def refused() -> list[str]:
    said: list[str] = []
    alone = fsdp.Spec(fsdp.local_mesh())

    def tried(**kwargs: Any) -> None:
        spec = kwargs.pop("spec", alone)
        params = kwargs.pop("params", {"a": torch.ones(4)})
        with pytest.raises((fsdp.SpecError, fsdp.TreeError)) as caught:
            fsdp.shard(params, spec, **kwargs)
        said.append(str(caught.value))

    rank = dist.get_rank()
    tried(src=2)
    tried(src=rank)
    tried(src=0, params={"a": torch.ones(4 + rank)})
    tried(src=0, params={"a": torch.ones(4, device="meta")})
    tried(src=0, buffers={"b": torch.ones(1 + rank)})
    mesh = fsdp.local_mesh(expert=2, data=1)
    tried(src=0, spec=fsdp.Spec(mesh, {"a": fsdp.zero3("data")}))
    return said


def test_what_cannot_be_given_by_one_rank_is_refused() -> None:
    for said in launch(refused, nprocs=2):
        assert "shard(src=2): the mesh has the ranks [0, 1]. Give one of them." in said[0]
        assert "src: 0" in said[1]
        assert "src: 1" in said[1]
        assert "Give every rank the same src" in said[1]
        assert "ranks have different trees" in said[2]
        assert "is on the meta device and has no values" in said[3]
        assert "buffer b (1,)" in said[4]
        assert "ranks have 'a' of their own along ['expert'], and rank 0 has not all of them" in said[5]
