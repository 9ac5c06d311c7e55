"""pmean(wire=): means of what each rank packs, along one axis; in the order of ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.driven import refused
from support.ranks import each_rank

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T
from functional_fsdp.codecs import Form

SHAPES = {"a": (33, 7), "b": (), "c": (0, 3), "d": (256,)}


def values(rank: int) -> dict[str, torch.Tensor]:
    seeded = torch.Generator().manual_seed(rank)
    found = {name: torch.randn(shape, generator=seeded) for name, shape in SHAPES.items()}
    return found | {"d": found["d"].bfloat16()}


def state_on(**axes: int) -> fsdp.State:
    mesh: Any = fsdp.local_mesh(**axes)
    return fsdp.shard({"w": torch.ones(8)}, fsdp.Spec(mesh, fsdp.zero3("shard")), fsdp.sgd(lr=0.1))


def means(codec: Any) -> dict[str, torch.Tensor]:
    _, found = fsdp.pmean(state_on(replica=3, shard=2), values(dist.get_rank()), axis="replica", wire=codec)
    return found


@pytest.mark.parametrize("codec", [fsdp.int4(), fsdp.int8(64), fsdp.fp8_block(), fsdp.int8()], ids=str)
def test_means_are_of_packed_values_in_the_order_of_ranks(codec: fsdp.Codec) -> None:
    found = launch(means, (codec,), nprocs=6, simulate=True)
    for rank, mine in enumerate(found):
        for name, shape in SHAPES.items():
            form = Form(codec, shape, torch.float32)
            each = [form.unpack(form.pack(values(2 * k + rank % 2)[name].float())) for k in range(3)]
            right = ((each[0] + each[1]) + each[2]) / torch.full((), 3.0)
            assert torch.equal(mine[name], right.to(mine[name].dtype)), name
        assert mine["d"].dtype is torch.bfloat16


def exchanged(codec: Any) -> None:
    fsdp.pmean(state_on(replica=2, shard=2), torch.ones(1024), axis="replica", wire=codec)


def test_bytes_on_the_wire() -> None:
    moved = []
    for codec in (None, fsdp.int4):
        with fsdp.simulate(replica=2, shard=2) as world:
            world(exchanged, codec)
            moved.append(world.traffic.bytes(axis="replica"))
    assert moved == [4 * 4 * 1024, 4 * (512 + 1024 // 64 * 4)]


@each_rank(4)
def test_what_cannot_be_is_refused_by_name() -> None:
    state = state_on(replica=2, shard=2)

    def mean(wire: Any, axis: Any) -> Any:
        return lambda: fsdp.pmean(state, torch.ones(3), axis=axis, wire=wire)

    one_axis = "pmean(wire=int8()): expected one axis of the mesh"
    refused(
        (mean("int8", "replica"), "pmean(wire='int8'): expected a codec, as fsdp.int8(64), or None"),
        (mean(fsdp.int8, ("replica", "shard")), one_axis),
        (mean(fsdp.int8, "other"), one_axis),
    )


def test_a_step_that_is_compiled_whole_packs_no_means() -> None:
    state = fsdp.shard({"w": torch.ones(8)}, fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.sgd(lr=0.1))

    def step(state: fsdp.State, x: torch.Tensor) -> Any:
        state, params = fsdp.unshard(state)
        state = fsdp.step(fsdp.reduce(state, {"w": params["w"] * x}))
        return fsdp.pmean(state, x, wire=fsdp.int8)

    with pytest.raises(fsdp.ScheduleError, match=re.escape("pmean(wire=) in a step that is compiled whole")):
        T.compile(step)(state, torch.ones(()))
