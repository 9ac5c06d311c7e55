"""NCCL's symmetric memory: the kernels it takes, and the same results. In a process of its own: torch has one kind of
symmetric memory a process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from gpu.compared import gradients_differ
from gpu.machine import need_ranks, own_gpus
from gpu.traces import recorded
from support.choices import choices
from support.presets import PRESETS, ranks_of
from support.problems import LOOPS, Stack, through_the_stack

import functional_fsdp as fsdp
from functional_fsdp import Spec, SpecError, launch
from functional_fsdp._transports import auto

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.usefixtures("fresh_workers"),
    own_gpus,
]  # windows of NCCL's need NVLink
RANKS = 2
SYMMETRIC: Any = fsdp.symmetric()
ZERO_CTA: Any = fsdp.symmetric(zero_cta=True)


@pytest.mark.parametrize("transport", [SYMMETRIC, ZERO_CTA], ids=["symmetric", "zero-CTA"])
@pytest.mark.parametrize("loop", list(LOOPS))
@pytest.mark.parametrize("preset", PRESETS)
def test_steps_are_the_plain_modules(preset: str, loop: str, transport: Any) -> None:
    ranks = ranks_of(preset, RANKS)
    need_ranks(ranks)
    for differ in launch(gradients_differ, (ranks, preset, loop, transport), nprocs=ranks):
        assert differ[torch.float64] < 1e-12
        assert differ[torch.float32] < 1e-5


def kernels(transport: Any) -> tuple[list[str], list[float]]:
    """In a step of layers of 8 MiB: the names of NCCL's kernels; and losses."""
    with torch.device("cuda"):
        torch.manual_seed(0)
        params, _ = fsdp.functionalize(Stack(2048, 4))
    precision = fsdp.Precision(compute=torch.bfloat16)
    spec = Spec(fsdp.local_mesh(), precision=precision, transport=transport)
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-3))
    torch.manual_seed(fsdp.local_mesh().get_rank())
    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
    losses = []
    for _ in range(4):
        state, loss = through_the_stack(state, x)
        state = fsdp.step(state)
        losses.append(loss.item())
    with recorded() as traces:
        state = fsdp.step(through_the_stack(state, x)[0])
    (trace,) = traces
    return [kernel.name for kernel in trace.kernels if "nccl" in kernel.name.lower()], losses


def test_gathers_and_reductions_take_symmetric_kernels() -> None:
    for names, _ in launch(kernels, (SYMMETRIC,), nprocs=RANKS):
        assert sum("Symk" in name and "AllGather" in name for name in names) == 7  # the last layer is gathered once
        assert sum("Symk" in name and "ReduceScatter" in name for name in names) == 4
        assert len(names) == 11


def test_zero_cta_gathers_take_no_kernel() -> None:
    for names, _ in launch(kernels, (ZERO_CTA,), nprocs=RANKS):
        assert not any("AllGather" in name for name in names)
        assert sum("Symk" in name and "ReduceScatter" in name for name in names) == 4


def test_losses_are_those_of_plain_nccl() -> None:
    plain, symmetric, zero_cta = (launch(kernels, (way,), nprocs=RANKS) for way in ("collective", SYMMETRIC, ZERO_CTA))
    for a, b, c in zip(plain, symmetric, zero_cta, strict=True):
        assert b[1] == pytest.approx(a[1], rel=1e-3)
        assert c[1] == pytest.approx(a[1], rel=1e-3)


@pytest.mark.parametrize("zero_cta", [False, True], ids=["symmetric", "zero-CTA"])
def test_replayed_steps_are_the_eager_ones_bit_for_bit(zero_cta: bool) -> None:
    from gpu.test_graph import same

    same(fsdp.symmetric(zero_cta), 60)


def others() -> tuple[str, str, list[str]]:
    """Beside it in one process: what copy_engine says, and what "auto" takes."""
    mesh = fsdp.local_mesh()
    refused = ""
    try:
        fsdp.shard({"w": torch.ones(4)}, Spec(mesh, transport="copy_engine"), fsdp.sgd(lr=0.1))
    except SpecError as error:
        refused = str(error)
    with choices() as said:
        auto.LARGE = 1
        for _ in range(2):
            spec = Spec(mesh, transport="auto")
            state = fsdp.shard({"w": torch.ones(4)}, spec, fsdp.sgd(lr=0.1))
    return refused, state.spec.transport.name, said


def test_copies_beside_it_are_refused_and_auto_takes_what_there_is() -> None:
    for refused, chosen, said in launch(others, nprocs=RANKS):
        assert "exclude each other" in refused
        assert chosen == "symmetric"
        assert len(said) == 1
