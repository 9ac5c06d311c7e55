"""stream_to on GPUs: what comes is the state of the call, whatever step begins at once; and what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from gpu.machine import RANKS

import functional_fsdp as fsdp
from functional_fsdp import Schedule, launch
from functional_fsdp import transforms as T

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("fresh_workers")]

WIDTH, DEPTH = 4096, 8
UNIT = 4 * WIDTH * WIDTH  # bytes


def make() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def parted(rank: int) -> slice:
    """The rows of each leaf, a unit of its own, that a rank has."""
    return slice(rank * WIDTH // dist.get_world_size(), (rank + 1) * WIDTH // dist.get_world_size())


def streamed(way: str, gather: bool) -> tuple[list[bool], int]:
    """Whether what came was the state of each call, and the bytes at the peak of one beyond what there was."""
    torch.set_float32_matmul_precision("high")  # else compilers warn
    spec = fsdp.Spec(fsdp.local_mesh(), units=["*"], schedule=Schedule(overlap_update=way == "overlapped"))
    state, model = fsdp.init(make, spec, fsdp.adamw(lr=1e-2), seed=0)
    forward_backward = T.forward_backward(model, lambda model, x: model(x).square().mean())

    def train_step(state: fsdp.State, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, x)
        return fsdp.step(state), loss

    step: Any = T.cuda_graph(train_step) if way == "graph" else train_step
    x = torch.randn(64, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(dist.get_rank()))
    host = {f"{i}.weight": torch.empty(WIDTH, WIDTH, pin_memory=True) for i in range(DEPTH)}

    def put(unit: str, named: Any) -> None:
        if not gather:
            fsdp.apply_delta(host, named)
        for name, leaf in named.items() if gather else ():
            host[name].copy_(leaf, non_blocking=True)

    for _ in range(6):
        state, _ = step(state, x)
    found = []
    for _ in range(4):
        before = {name: leaf.cpu() for name, leaf in fsdp.full_params(state).items()}
        arrived = fsdp.stream_to(put, state, gather=gather)
        state, _ = step(state, x)
        arrived()
        rows = slice(None) if gather else parted(dist.get_rank())
        found.append(all(torch.equal(host[name][rows], leaf[rows]) for name, leaf in before.items()))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    there = torch.cuda.memory_allocated()
    fsdp.stream_to(put, state, gather=gather)()
    return found, torch.cuda.max_memory_allocated() - there


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("way", ["eager", "overlapped", "graph"])
def test_a_stream_has_the_weights_of_its_call_beside_any_step(way: str, gather: bool) -> None:
    for found, peak in launch(streamed, (way, gather), nprocs=RANKS):
        assert all(found)
        assert peak <= 2 * UNIT / (1 if gather else RANKS)
