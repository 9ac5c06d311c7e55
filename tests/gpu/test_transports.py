"""Transports on GPUs: copies over NVLink, and whole steps under torch.compile on NCCL."""

from __future__ import annotations

import pytest
import torch
from gpu.compared import gradients_differ, weights_differ
from gpu.machine import need_ranks
from gpu.traces import recorded
from support.copies import abandoned, copied, gradients, on_two_axes, other_weights
from support.presets import PRESETS, ranks_of
from support.problems import LOOPS, Stack, through_the_stack

import functional_fsdp as fsdp
from functional_fsdp import Spec, launch

pytestmark = [pytest.mark.timeout(500), pytest.mark.usefixtures("fresh_workers")]
RANKS = 2


@pytest.mark.parametrize("loop", list(LOOPS))
@pytest.mark.parametrize("preset", PRESETS)
def test_steps_by_copies_are_the_plain_modules(preset: str, loop: str) -> None:
    ranks = ranks_of(preset, RANKS)
    need_ranks(ranks)
    for differ in launch(gradients_differ, (ranks, preset, loop, "copy_engine"), nprocs=ranks):
        assert differ[torch.float64] < 1e-12
        assert differ[torch.float32] < 1e-5


def test_sums_by_copies_are_exact_and_the_same_bits_every_time() -> None:
    exact, copies = (
        launch(gradients, ("collective", 1), nprocs=RANKS),
        launch(gradients, ("copy_engine", 10), nprocs=RANKS),
    )
    for (expected,), seen in zip(exact, copies, strict=True):
        for found in seen:
            for name, local in expected.items():
                assert torch.equal(found[name], local)


def test_layers_may_be_read_along_different_axes() -> None:
    need_ranks(4)
    for (expected, _), (found, read) in zip(
        launch(on_two_axes, ("collective",), nprocs=4), launch(on_two_axes, ("copy_engine",), nprocs=4), strict=True
    ):
        assert read == ["a", "b"]
        torch.testing.assert_close(found, expected)


def test_copies_read_what_the_state_has() -> None:
    for seen in launch(other_weights, nprocs=RANKS):
        assert seen == pytest.approx([seen[0]] * len(seen), rel=1e-5)


def test_ranks_that_parted_meet_again() -> None:
    for met, same, resting in launch(abandoned, ("copy_engine",), nprocs=RANKS):
        assert met >= 4
        assert same
        assert resting


def test_copies_of_states_and_checkpoints_go_on_alike(tmp_path: object) -> None:
    for seen in launch(copied, (f"{tmp_path}/saved",), nprocs=RANKS):
        assert seen[0] == seen[1] == seen[2]


def kernels() -> tuple[int, ...]:
    """In a step of layers of 8 MiB: NCCL's gathers, its reductions, and its other kernels."""
    with torch.device("cuda"):
        params, _ = fsdp.functionalize(Stack(2048, 4))
    precision = fsdp.Precision(compute=torch.bfloat16)
    spec = Spec(fsdp.local_mesh(), precision=precision, transport="copy_engine")
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-3))
    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        state = fsdp.step(through_the_stack(state, x)[0])
    with recorded() as traces:
        state = fsdp.step(through_the_stack(state, x)[0])
    (trace,) = traces
    found = [[kernel for kernel in trace.kernels if what in kernel.name.lower()] for what in ("nccl", "barrier")]
    return len(trace.collectives("AllGather")), *map(len, found)


def test_copies_run_no_kernel_of_nccl_and_none_that_waits() -> None:
    assert launch(kernels, nprocs=RANKS) == [(0, 0, 0)] * RANKS


@pytest.mark.parametrize(
    ("preset", "loop", "way"),
    [
        ("zero3", "whole", "eager"), ("zero3", "by_unit", "aot_eager"), ("zero3", "by_unit", "T.aot_eager"),
        ("zero2", "by_unit", "aot_eager"), ("ddp", "whole", "aot_eager"), ("zero3", "by_unit", "inductor"),
        ("zero3", "by_unit", "T.inductor"),
    ],
)  # fmt: skip
def test_a_compiled_step_is_the_plain_modules(preset: str, loop: str, way: str) -> None:
    for differ, count in launch(weights_differ, (RANKS, preset, loop, way), nprocs=RANKS):
        assert count == 1
        assert differ < 1e-9
