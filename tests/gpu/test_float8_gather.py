"""Weights gathered in float8 on GPUs: the bits of bfloat16 gathers that are cast at use, and half of their bytes.

GPUs multiply in float8 from compute capability 8.9 on; torchao lies where `make` puts it.
"""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest.mock import patch

import float8
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from gpu.machine import deterministic, own_gpus
from support.commands import TORCHAO

import functional_fsdp as fsdp
from functional_fsdp import _float8 as float8_cast
from functional_fsdp import launch
from functional_fsdp import transforms as T
from functional_fsdp._launch.launch import stop_workers

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic matrix products
pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.usefixtures("fresh_workers"),
    pytest.mark.skipif(not TORCHAO.exists(), reason=f"needs torchao in {TORCHAO}: make"),
]
RANKS, STEPS, WIDTH, DEPTH = 2, 8, 256, 4
WAYS: dict[str, tuple[str, bool, bool]] = {
    "eager": ("collective", False, False),
    "compiled": ("collective", True, False),
    "symmetric": ("symmetric", False, False),
    "compiled, copies": ("copy_engine", True, False),
    "compiled, copies, a graph": ("copy_engine", True, True),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)) for _ in range(DEPTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() - x.float().sin()).square().mean()


def trained(in_float8: bool, way: str) -> tuple[list[float], dict[str, torch.Tensor], int, int]:
    """Losses, weights, bytes of the arena, bytes that gathers of a step move."""
    transport, compile, graph = WAYS[way]
    torch.manual_seed(0)
    with patch.object(sys, "path", [*sys.path, str(TORCHAO)]):
        model = float8.converted(Net())
    params, skeleton = fsdp.functionalize(model)
    precision = float8.gathered(model) if in_float8 else fsdp.Precision(compute=torch.bfloat16)
    spec = fsdp.Spec(fsdp.local_mesh(), precision=precision, transport=transport)
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-3))
    forward_backward = T.forward_backward(skeleton, loss_fn, compile=compile)

    def train_step(state: fsdp.State, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, x)
        return fsdp.step(state), loss

    step: Any = T.cuda_graph(train_step) if graph else train_step
    losses = []
    for i in range(STEPS):
        generator = torch.Generator().manual_seed(100 * i + dist.get_rank())
        x = torch.randn(64, WIDTH, generator=generator).to("cuda", torch.bfloat16)
        state, loss = step(state, x)
        losses.append(loss.clone())
    if graph:
        (captured,) = step.graphs.values()
        assert captured.graph is not None
    plan, buckets = state.cursor.plan, state.layout.buckets
    moved = sum(part.nbytes for gather in plan.gathers for part in plan.by_name[gather.unit].parts)
    assert (
        all(bucket.gather.itemsize == 1 for bucket in buckets.values() if len(bucket.leaves[0].shape) == 2) is in_float8
    )
    return [*map(float, losses)], {p: w.cpu() for p, w in fsdp.full_params(state).items()}, plan.arena, moved


def refuse(self: fsdp.Float8Weight) -> torch.Tensor:
    raise AssertionError("a weight in float8 was cast back")


@deterministic()
def both(way: str) -> tuple[Any, Any]:
    with patch.object(fsdp.Float8Weight, "dequantized", refuse):
        return trained(False, way), trained(True, way)


@pytest.mark.parametrize("way", [pytest.param(way, marks=own_gpus if way == "symmetric" else ()) for way in WAYS])
def test_bits_are_those_of_bfloat16_gathers(way: str) -> None:
    found = launch(both, (way,), nprocs=RANKS)
    if way == "symmetric":  # whose processes can have no peers' memory
        stop_workers()
    for wide, narrow in found:
        assert wide[0] == narrow[0]
        assert all(torch.equal(weight, narrow[1][path]) for path, weight in wide[1].items())
        assert wide[0][-1] < wide[0][0]
        for many, few in zip(wide[2:], narrow[2:], strict=True):
            assert 0.5 < few / many < 0.51  # but for the biases


def casts() -> dict[str, int]:
    """How many bytes of the kernel's differ from those of torch's operations, one after the other."""
    found = {}
    generator = torch.Generator("cuda").manual_seed(0)
    for gather in (torch.float8_e4m3fn, torch.float8_e5m2):
        for seen in (torch.bfloat16, torch.float32):
            rows = torch.randn(1000, 128, generator=generator, device="cuda").mul_(3)
            rows[3, 4], rows[5, 6], rows[7, 8], rows[9] = float("nan"), float("inf"), -1e30, 0
            starts, scale = (0, 7, 400, 401, 5000), torch.tensor([10.0, 3e4, 0.1, 7.0, 1.0], device="cuda")
            outs = [torch.zeros(1000, 128, dtype=torch.uint8, device="cuda").view(gather) for _ in range(2)]
            float8_cast.cast_float8(rows, outs[0], scale, seen, 20, starts)
            with patch.object(float8_cast, "triton", None):
                float8_cast.cast_float8(rows, outs[1], scale, seen, 20, starts)
            a, b = (out.view(torch.uint8) for out in outs)
            found[f"{gather}, {seen}"] = int((a != b).sum())
            found[f"{gather}, {seen}, not zero"] = int(not b.any())
    return found


def test_the_kernel_has_the_bits_of_torchs_operations() -> None:
    for found in launch(casts, nprocs=RANKS):
        assert {name: count for name, count in found.items() if count} == {}
