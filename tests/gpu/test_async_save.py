"""async_save on GPUs: what is saved is the state of the call, whatever changes it at once; and how long the call takes.

`pytest tests/gpu/test_async_save.py -s` prints the figures.
"""

from __future__ import annotations

import time
from pathlib import Path
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


def make() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def made(overlapped: bool) -> tuple[fsdp.State, Any]:
    torch.set_float32_matmul_precision("high")  # else compilers warn
    spec = fsdp.Spec(fsdp.local_mesh(), units=["*"], schedule=Schedule(overlap_update=overlapped))
    state, model = fsdp.init(make, spec, fsdp.adamw(lr=1e-2), seed=0)
    forward_backward = T.forward_backward(model, lambda model, x: model(x).square().mean())

    def train_step(state: fsdp.State, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, x)
        return fsdp.step(state), loss

    return state, train_step


def equal(a: fsdp.State, b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(leaf, b[path]) for path, leaf in fsdp.local_shards(a).items())


def beside(folder: str, way: str) -> tuple[list[bool], float, float]:
    """Three saves while steps go on, each loaded again; seconds of the last call, and of a plain save."""
    state, train_step = made(way == "overlapped")
    x = torch.randn(256, WIDTH, device="cuda")
    wraps: dict[str, Any] = {"graph": T.cuda_graph, "compiled": T.compile}
    step = wraps[way](train_step) if way in wraps else train_step
    for _ in range(4):
        state, _ = step(state, x)
    wanted, futures, call = [], [], 0.0
    for number in range(3):
        wanted.append({path: leaf.clone() for path, leaf in fsdp.local_shards(state).items()})
        torch.cuda.synchronize()
        begun = time.perf_counter()
        futures.append(fsdp.async_save(state, f"{folder}/step_{number}"))
        call = time.perf_counter() - begun
        for _ in range(3):  # at once, and on the same stream
            state, _ = step(state, x)
        if number < 2:
            futures[-1].result(300)
    futures[-1].result(300)
    dist.barrier()
    same = [equal(fsdp.load(f"{folder}/step_{i}", like=state), wanted[i]) for i in range(3)]
    torch.cuda.synchronize()
    begun = time.perf_counter()
    fsdp.save(state, f"{folder}/plain")
    return same, call, time.perf_counter() - begun


@pytest.mark.parametrize("way", ["eager", "overlapped", "graph", "compiled"])
def test_what_is_saved_is_the_state_of_the_call(way: str, tmp_path: Path) -> None:
    for same, call, plain in launch(beside, (str(tmp_path), way), nprocs=RANKS):
        assert same == [True] * 3
        print(f"{way}: the call {call * 1e3:.0f} ms, save {plain * 1e3:.0f} ms, ratio {call / plain:.3f}")
