"""Simulated ranks that share one GPU: as one process for each computes them on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.presets import PRESETS
from support.problems import batch, largest, loss_fn, net

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

RANKS = 4


def trained(device: str, preset: str) -> dict[str, torch.Tensor]:
    mesh = fsdp.local_mesh(device, replica=2, shard=2) if preset in ("hsdp", "hfsdp") else fsdp.local_mesh(device)
    placement: Any = getattr(fsdp, preset)(*mesh.mesh_dim_names or ())
    params, model = fsdp.functionalize(net(torch.float64))
    state = fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.adamw(lr=1e-2))
    forward_backward = T.forward_backward(model, loss_fn)
    for i in range(3):
        data = [x.to(device) for x in batch(i, dist.get_rank(), 0)]
        state, _ = forward_backward(state, data)
        state = fsdp.step(state)
    return {key: leaf.cpu() for key, leaf in fsdp.full_params(state).items()}


@pytest.mark.parametrize("preset", PRESETS)
def test_steps_on_one_gpu_are_those_on_cpus(preset: str) -> None:
    simulated, right = (
        fsdp.launch(trained, (device, preset), nprocs=RANKS, simulate=True) for device in ("cuda", "cpu")
    )
    for mine, expected in zip(simulated, right, strict=True):
        assert largest(mine, expected) < 1e-9
