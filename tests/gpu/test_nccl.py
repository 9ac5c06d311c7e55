"""The core on NCCL: parity, bits, transactions, checkpoints, memory, and no host synchronisation inside a step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from gpu.layers import Layer
from gpu.machine import no_synchronisation
from support.initialised import initialised
from support.presets import PRESETS
from support.problems import LOOPS, largest, mesh_and_placement, reference, sharded
from support.redistributed import ONE, TWO, moves
from support.resumed import resumed
from support.transactions import (
    Boom,
    another_order,
    check_that_different_collectives_do_not_commit,
    disturbed,
    undisturbed,
)

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T
from functional_fsdp._launch.launch import stop_workers
from functional_fsdp._runtime.runtime import runtime_of

RANKS = 2


def where() -> tuple[str, str]:
    return fsdp.local_mesh().device_type, torch.cuda.get_device_name()


def test_ranks_are_on_gpus() -> None:
    for kind, name in launch(where, nprocs=RANKS):
        assert kind == "cuda"
        assert name


@pytest.mark.parametrize("average", ["mean", "sum"])
@pytest.mark.parametrize("axes", [ONE, TWO])
def test_every_transition(axes: tuple[str, ...], average: str) -> None:
    assert launch(moves, (axes, average), nprocs=RANKS) == [[]] * RANKS


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("preset", PRESETS)
def test_five_adamw_steps_equal_the_plain_module(preset: str, loop: str, micro: int) -> None:
    expected = list(reference(RANKS, 5, micro))
    for seen in launch(sharded, (preset, loop, 5, micro), nprocs=RANKS):
        for (_, grads, weights), (_, ref_grads, ref_weights) in zip(seen, expected, strict=True):
            assert largest(grads, ref_grads) < 1e-12
            assert largest(weights, ref_weights) < 1e-9


@pytest.mark.parametrize("preset", ["zero3", "zero1", "hfsdp"])
@pytest.mark.parametrize("place", ["unshard", "reduce"])
def test_an_exception_on_every_rank_costs_nothing(preset: str, place: str) -> None:
    expected = launch(undisturbed, (preset,), nprocs=RANKS)[0]
    for weights, raised, restarts in launch(disturbed, (preset, place, list(range(RANKS)), Boom), nprocs=RANKS):
        assert (raised, restarts) == (1, 0)
        assert all(torch.equal(weights[key], expected[key]) for key in expected)


@pytest.mark.parametrize("preset", ["zero3", "ddp"])
@pytest.mark.parametrize("place", ["unshard", "grad", "reduce"])
def test_an_exception_on_one_rank_restarts_the_others(preset: str, place: str) -> None:
    expected = launch(undisturbed, (preset,), nprocs=RANKS)[0]
    for weights, _, _ in launch(disturbed, (preset, place, [1], Boom), nprocs=RANKS):
        assert all(torch.equal(weights[key], expected[key]) for key in expected)


def test_ranks_that_use_units_in_another_order_are_not_mixed_up() -> None:
    for grads in launch(another_order, nprocs=RANKS):
        for path, part in grads.items():
            expected = 1.5 if path.startswith(("blocks.0.", "blocks.1.")) else 0.0
            assert torch.equal(part, torch.full_like(part, expected)), path


def test_ranks_that_issue_different_collectives_do_not_commit() -> None:
    check_that_different_collectives_do_not_commit()


@pytest.mark.parametrize("preset", PRESETS)
def test_resuming_gives_the_same_bits(preset: str, tmp_path: Path) -> None:
    for same, count, _ in launch(resumed, (preset, str(tmp_path)), nprocs=RANKS):
        assert same
        assert count == 3


def test_init_gives_the_same_bits_for_every_placement() -> None:
    expected = launch(initialised, ("ddp",), nprocs=RANKS)[0]
    for preset in PRESETS:
        got = launch(initialised, (preset,), nprocs=RANKS)[-1]
        assert all(torch.equal(got[key], expected[key]) for key in expected)


WIDTH, DEPTH = 2048, 8


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(DEPTH))


def step_by_unit(state: fsdp.State, model: Any, x: torch.Tensor) -> fsdp.State:
    pullbacks: dict[str, Any] = {}
    for i, unit in enumerate(state.units):
        state, w = fsdp.unshard(state, unit)
        x, pullbacks[unit] = T.vjp(lambda w, x, i=i: fsdp.bind(model.layers[i], w)(x), w, x)
        state = fsdp.release(state, unit)
    dx = torch.ones_like(x)
    for unit in reversed(state.units):
        state, w = fsdp.unshard(state, unit)
        dw, dx = pullbacks.pop(unit)(w, dx)
        state = fsdp.reduce(state, dw, unit)
        state = fsdp.release(state, unit)
        del dw, w
    return fsdp.step(state)


def peaks() -> dict[str, float]:
    """MiB: at rest, at the peak of init, at the peak of a step unit by unit, after it."""
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    mesh, placement = mesh_and_placement("zero3")
    spec = fsdp.Spec(mesh, placement, precision=fsdp.Precision(compute=torch.bfloat16))
    state, model = fsdp.init(Stack, spec, fsdp.adamw(lr=1e-4))
    found = {"init": torch.cuda.max_memory_allocated() - base, "rest": torch.cuda.memory_allocated() - base}
    x = torch.randn(4, 128, WIDTH, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        state = step_by_unit(state, model, x)
        found["step"] = torch.cuda.max_memory_allocated() - base
    found["after"] = torch.cuda.memory_allocated() - base - x.numel() * 2
    found["plan"] = state.layout.nbytes("main") * 3
    found["unit"] = next(iter(state.layout.buckets.values())).numel * 4
    return {key: value / 2**20 for key, value in found.items()}


def test_memory_is_the_shards_and_what_a_unit_needs() -> None:
    for mib in launch(peaks, nprocs=RANKS):
        assert mib["rest"] == pytest.approx(mib["plan"], abs=1)
        assert mib["init"] <= mib["plan"] + 2.5 * mib["unit"]  # a unit, and a temporary of its initialisers
        assert mib["after"] == pytest.approx(mib["rest"], abs=2)
        # gradients of main weights, a gathered unit and its gradient in bfloat16, its staging, activations
        assert mib["step"] <= mib["plan"] * 4 / 3 + 2 * mib["unit"] + 160


def quiet() -> bool:
    mesh, placement = mesh_and_placement("zero3")
    spec = fsdp.Spec(mesh, placement, precision=fsdp.Precision(compute=torch.bfloat16))
    schedule = lambda count: 1e-4 * (count / 10).clamp(max=1.0)  # noqa: E731
    state, model = fsdp.init(Stack, spec, fsdp.adamw(lr=schedule))
    x = torch.randn(4, 128, WIDTH, device="cuda", dtype=torch.bfloat16)
    state = step_by_unit(state, model, x)
    with no_synchronisation():
        for _ in range(2):
            state = step_by_unit(state, model, x)
    return True


def test_a_step_never_synchronises_host_and_device() -> None:
    assert launch(quiet, nprocs=RANKS) == [True] * RANKS


def one_rank_is_late() -> float:
    """Rank 1 sleeps 2 s before its reduce; the host of rank 0 waits for it in step, not longer."""
    mesh, placement = mesh_and_placement("zero3")
    state = fsdp.shard({"w": torch.ones(1 << 20)}, fsdp.Spec(mesh, placement), fsdp.sgd())
    state, params = fsdp.unshard(state)
    if mesh.get_rank() == 1:
        time.sleep(2)
    begun = time.monotonic()
    state = fsdp.reduce(state, params)
    spent = time.monotonic() - begun
    fsdp.step(state)
    return spent


def test_reduce_does_not_wait_for_other_ranks() -> None:
    assert launch(one_rank_is_late, nprocs=RANKS)[0] < 1.0


def connected(trains: bool) -> tuple[list[str], float]:
    mesh = fsdp.local_mesh()
    lanes: Any = runtime_of(mesh).lanes
    before = {*lanes.unconnected()}
    state = fsdp.shard({"w": torch.ones(64)}, fsdp.Spec(mesh), fsdp.sgd(lr=0.1) if trains else None)
    after = {*lanes.unconnected()}
    return sorted(before - after), fsdp.full_params(state)["w"].sum().item()


@pytest.mark.parametrize(("trains", "lanes"), [(True, ["gather", "reduce"]), (False, ["gather"])])
def test_communicators_of_a_step_are_connected_while_a_state_is_made(trains: bool, lanes: list[str]) -> None:
    """In workers of their own, whose communicators nobody has used."""
    stop_workers()
    assert launch(connected, (trains,), nprocs=RANKS) == [(lanes, 64.0)] * RANKS
    assert launch(connected, (trains,), nprocs=RANKS) == [([], 64.0)] * RANKS
