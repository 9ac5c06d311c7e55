"""Training that is saved and goes on, on any device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.problems import LOOPS, batch, mesh_and_placement, net

import functional_fsdp as fsdp


def start(preset: str) -> tuple[fsdp.State, Any]:
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net(torch.float32))
    return fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.adamw(lr=1e-2)), model


def train(state: fsdp.State, model: Any, first: int, last: int) -> fsdp.State:
    for step in range(first, last):
        state, _ = LOOPS["whole"](model, state, batch(step, dist.get_rank()), True)
        state = fsdp.step(state)
    return state


def resumed(preset: str, folder: str) -> tuple[bool, int, str]:
    state, model = start(preset)
    state = train(state, model, 0, 3)
    path = fsdp.save(state, f"{folder}/step_3")
    straight = fsdp.full_params(train(state, model, 3, 5))  # save did not consume the state
    again = fsdp.load(path, like=start(preset)[0])
    count = int(again.count)
    back = fsdp.full_params(train(again, model, 3, 5))
    return all(torch.equal(straight[key], back[key]) for key in straight), count, str(fsdp.latest_checkpoint(folder))
