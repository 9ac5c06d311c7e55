"""Lanes on GPUs: what runs where, how much of it compute hides, and that no schedule, delay or exception changes a bit.

Kernels are read from torch.profiler's traces (traces.py). `pytest tests/gpu/test_overlap.py -s` prints the figures.
"""

from __future__ import annotations

import gc
import json
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from gpu.layers import Layer
from gpu.machine import RANKS, check_gpus, deterministic, need_ranks, no_synchronisation, own_gpus
from gpu.traces import Kernel, hidden, length, recorded, waits
from support.problems import mesh_and_placement

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T
from functional_fsdp._runtime.runtime import runtime_of

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("exact_workers")]  # the first starts CUDA and NCCL

At = Callable[[str, int], None]  # (lane of the loop: "forward" or "backward", unit)


def nothing(place: str, unit: int) -> None:
    pass


def train_step(state: fsdp.State, model: Any, x: torch.Tensor, at: At = nothing) -> tuple[fsdp.State, torch.Tensor]:
    """Unit by unit; the loss is half the mean square of the outputs' rows."""
    h, pullbacks = x, {}
    for i, unit in enumerate(state.units):
        state, w = fsdp.unshard(state, unit)
        h, pullbacks[unit] = T.vjp(lambda w, h, i=i: fsdp.bind(model.layers[i], w)(h), w, h)
        state = fsdp.release(state, unit)
        del w
        at("forward", i)
    loss, dh = h.float().square().sum() / (2 * len(h)), (h.float() / len(h)).to(h.dtype)
    del h
    for i, unit in reversed([*enumerate(state.units)]):
        state, w = fsdp.unshard(state, unit)
        dw, dh = pullbacks.pop(unit)(w, dh)
        state = fsdp.reduce(state, dw, unit)
        state = fsdp.release(state, unit)
        del dw, w
        at("backward", i)
    return fsdp.step(state), loss


# ---------------------------------------------------------------- what runs where and when


class Chain(nn.Module):
    """Equal blocks of two square matrix products and nothing else, so that "under compute" is "under a GEMM".

    At 8,192 tokens a block computes for about 1.7 ms forward and 3.4 ms backward on an H200 and is gathered and reduced
    in about 0.4 ms each on two to four of them. On two: 15 GB a rank.
    """

    WIDTH, DEPTH, TOKENS = 6144, 16, 8192

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(self.WIDTH, self.WIDTH, bias=False) for _ in range(2))) for _ in range(self.DEPTH)
        )


STEPS = 3  # under the profiler; in the first one ranks may still be apart, so its times do not count


def traced(preset: str) -> dict[str, Any]:
    """Train, profile `STEPS` steps; what the trace says about this rank."""
    gc.collect()
    mesh, placement = mesh_and_placement(preset)
    device = mesh.device_type
    spec = fsdp.Spec(mesh, placement, precision=fsdp.Precision(compute=torch.bfloat16))
    state, model = fsdp.init(Chain, spec, fsdp.adamw(lr=1e-4))
    x = torch.randn(Chain.TOKENS, Chain.WIDTH, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        state, loss = train_step(state, model, x)
    plan = state.cursor.plan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whatever the profiler has to say
        with recorded():
            x.sum()  # the first use of the profiler takes seconds
        dist.all_reduce(torch.zeros((), device=device))  # all ranks are here
        torch.cuda.synchronize()
        with recorded() as traces, no_synchronisation():
            for _ in range(STEPS):
                with torch.profiler.record_function("train_step"):
                    state, loss = train_step(state, model, x)
    (trace,) = traces
    assert trace.kernels, "the profiler saw no kernels"

    gemms = trace.gemms()
    lanes = {
        "gather": trace.collectives("AllGather"),
        "reduce": trace.collectives("ReduceScatter"),
        "outer": trace.collectives("AllReduce"),
    }
    late = {name: _after_first_step(kernels) for name, kernels in lanes.items()}
    compute_stream = {kernel.stream for kernel in gemms}
    compute = [kernel for kernel in trace.kernels if kernel.stream in compute_stream]
    first, last = trace.kernels[0].start, max(kernel.interval[1] for kernel in trace.kernels)
    return {
        "units": len(state.units),
        "planned gathers": len(plan.gathers),
        "steps marked": len(trace.marks.get("train_step", [])),
        "kernels": {name: len(kernels) for name, kernels in lanes.items()} | {"gemm": len(gemms)},
        "streams": {name: _streams(kernels) for name, kernels in (*lanes.items(), ("gemm", gemms))},
        "hidden": {name: hidden(kernels, gemms) for name, kernels in late.items()},
        "under any compute": {name: hidden(kernels, compute) for name, kernels in late.items()},
        "ms a kernel": {name: 1e-3 * sum(k.duration for k in ks) / max(1, len(ks)) for name, ks in late.items()},
        "ms a step": 1e-3 * (last - first) / STEPS,
        "gemm share": length(kernel.interval for kernel in gemms) / (last - first),
        "waits": waits(trace, "train_step"),
        "launches": sum("Launch" in call.name for call in trace.calls),
        "names": sorted({k.name[:60] for ks in (*lanes.values(), gemms) for k in ks}),
        "loss": loss.item(),
    }


def _after_first_step(kernels: list[Kernel]) -> list[Kernel]:
    """Each step has as many, one after the other on one stream."""
    return kernels[len(kernels) // STEPS :]


def _streams(kernels: list[Kernel]) -> list[int]:
    return sorted({kernel.stream for kernel in kernels})


@pytest.fixture(scope="module")
def zero3(exact_workers: None) -> list[dict[str, Any]]:
    check_gpus(RANKS)
    return shown(launch(traced, ("zero3",), nprocs=RANKS))


def shown(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for rank, found in enumerate(ranks):
        print(f"\nrank {rank}: {json.dumps(found, indent=1)}")
    return ranks


def test_collectives_a_step_are_those_of_the_plan(zero3: list[dict[str, Any]]) -> None:
    for found in zero3:
        units = found["units"]
        assert units == Chain.DEPTH
        assert found["steps marked"] == STEPS
        assert found["planned gathers"] == 2 * units - 1  # the last unit stays gathered
        assert found["kernels"]["gather"] == STEPS * found["planned gathers"]
        assert found["kernels"]["reduce"] == STEPS * units
        assert found["kernels"]["outer"] == 0
        assert found["kernels"]["gemm"] >= STEPS * units * 2 * 3


def test_every_lane_has_a_stream_of_its_own(zero3: list[dict[str, Any]]) -> None:
    for found in zero3:
        streams = [found["streams"][name] for name in ("gather", "reduce", "gemm")]
        assert all(len(of_lane) == 1 for of_lane in streams), streams
        assert len({of_lane[0] for of_lane in streams}) == 3, streams


@own_gpus
def test_compute_hides_communication(zero3: list[dict[str, Any]]) -> None:
    """All but the first gather of a step and its last reduction: 1 in 31 and 1 in 16."""
    for found in zero3:
        assert found["hidden"]["gather"] >= 0.90, found
        assert found["hidden"]["reduce"] >= 0.80, found


def test_the_host_never_waits_for_the_device_in_a_step(zero3: list[dict[str, Any]]) -> None:
    """Nor did torch's own check raise, which was on."""
    for found in zero3:
        assert found["launches"] > 0
        assert found["waits"] == []


def test_hsdp_has_an_outer_lane() -> None:
    need_ranks(4)
    for found in shown(launch(traced, ("hsdp",), nprocs=4)):
        units = found["units"]
        assert found["kernels"]["gather"] == STEPS * found["planned gathers"] == STEPS * (2 * units - 1)
        assert found["kernels"]["reduce"] == found["kernels"]["outer"] == STEPS * units
        streams = [found["streams"][name] for name in ("gather", "reduce", "outer", "gemm")]
        assert all(len(of_lane) == 1 for of_lane in streams), streams
        assert len({of_lane[0] for of_lane in streams}) == 4, streams
        assert found["waits"] == []


# ---------------------------------------------------------------- bits


class Stack(nn.Module):
    """Buckets of 4 MiB in bfloat16."""

    WIDTH, DEPTH, TOKENS = 512, 8, 1024

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(self.WIDTH) for _ in range(self.DEPTH))


Bits = tuple[list[float], dict[str, torch.Tensor]]  # losses, weights


def start(schedule: fsdp.Schedule) -> tuple[fsdp.State, Any, list[torch.Tensor]]:
    """A state, its skeleton, and batches that differ by rank and step."""
    mesh, placement = mesh_and_placement("zero3")
    spec = fsdp.Spec(mesh, placement, precision=fsdp.Precision(compute=torch.bfloat16), schedule=schedule)
    state, model = fsdp.init(Stack, spec, fsdp.adamw(lr=1e-3))
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (5, Stack.TOKENS, Stack.WIDTH)
    return state, model, list(torch.randn(shape, generator=generator).to(mesh.device_type, torch.bfloat16))


def trained(schedule: fsdp.Schedule, steps: int, at: At = nothing) -> Bits:
    state, model, data = start(schedule)
    losses = []
    for x in data[:steps]:
        state, loss = train_step(state, model, x, at)
        losses.append(loss)
    return [loss.item() for loss in losses], fsdp.full_params(state)


def differs(found: Bits, expected: Bits) -> list[str]:
    """Losses and weights whose bits differ."""
    losses = [f"loss {i}: {a} {b}" for i, (a, b) in enumerate(zip(found[0], expected[0], strict=True)) if a != b]
    return losses + [path for path in expected[1] if not torch.equal(found[1][path], expected[1][path])]


SCHEDULES: dict[str, dict[str, Any]] = {
    "default": {},
    "prefetch 0": {"prefetch": 0},
    "prefetch 2": {"prefetch": 2},
    "prefetch 4": {"prefetch": 4},
    "keep all": {"keep": "all"},
    "keep nothing": {"keep": ()},
    "debug": {"debug": True},
    "debug, prefetch 0": {"debug": True, "prefetch": 0},
    "debug, prefetch 4": {"debug": True, "prefetch": 4},
    "recorded": {"order": "recorded"},
}


def schedules() -> dict[str, list[str]]:
    """By schedule, what differs from the serial one after 3 steps."""
    with deterministic():
        serial = trained(fsdp.Schedule(prefetch=0, keep=()), 3)
        assert all(torch.isfinite(weight).all() for weight in serial[1].values())
        assert len(set(serial[0])) == 3
        return {name: differs(trained(fsdp.Schedule(**given), 3), serial) for name, given in SCHEDULES.items()}


def test_every_schedule_gives_the_same_bits() -> None:
    assert launch(schedules, nprocs=RANKS) == [{name: [] for name in SCHEDULES}] * RANKS


CYCLES = 3_000_000  # about 1.6 ms


@contextmanager
def slow_lanes(seed: int) -> Iterator[None]:
    """Every job on a lane sleeps before it begins and before it ends, for random times."""
    lanes: Any = runtime_of(fsdp.local_mesh()).lanes
    draw, submit = random.Random(seed), lanes.submit

    def late(job: Any) -> Any:  # a generator: it runs when its lane's stream is the current one
        torch.cuda._sleep(draw.randrange(CYCLES))
        yield from job
        torch.cuda._sleep(draw.randrange(CYCLES))

    def slow(lane: str, hops: Any, job: Any, *args: Any, **kwargs: Any) -> Any:
        return submit(lane, hops, job if lane == "control" else late(job), *args, **kwargs)  # control: on the host

    lanes.submit = slow
    try:
        yield
    finally:
        del lanes.submit


def sleepy(seed: int) -> At:
    """Between units, compute sleeps for a random time, and what was freed is allocated anew and written over."""
    draw = random.Random(seed)

    def at(place: str, unit: int) -> None:
        if draw.random() < 0.5:
            torch.cuda._sleep(draw.randrange(CYCLES))
        sizes = [draw.choice((1 << 18, 1 << 19, 1 << 20, 1 << 21)) for _ in range(3)]  # shards, leaves, activations
        _ = [torch.full((size,), torch.nan, device="cuda") for size in sizes]

    return at


def delayed(prefetch: int) -> list[list[str]]:
    """What differs in 5 steps from the undisturbed ones, for a few seeds: slow lanes, slow compute, both."""
    schedule, rank = fsdp.Schedule(prefetch=prefetch), dist.get_rank()
    with deterministic():
        expected = trained(schedule, 5)
        found = [differs(trained(schedule, 5, sleepy(rank)), expected)]
        for seed in range(3):
            with slow_lanes(10 * seed + rank):
                found.append(differs(trained(schedule, 5), expected))
                found.append(differs(trained(schedule, 5, sleepy(100 + 10 * seed + rank)), expected))
        return found


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_memory_that_a_lane_uses_is_never_handed_out(prefetch: int) -> None:
    assert launch(delayed, (prefetch,), nprocs=RANKS) == [[[]] * 7] * RANKS


class Boom(Exception):
    pass


PLACES = [("forward", 2), ("forward", Stack.DEPTH - 1), ("backward", Stack.DEPTH - 2), ("backward", 0)]


def interrupted(place: str, unit: int, who: list[int], prefetch: int) -> tuple[list[str], int, int]:
    """In step 2, ranks in `who` raise at a place, with slow lanes, so that gathers and reductions are under way.

    All go on from the state before the step. Returns what differs from training undisturbed, exceptions, restarts.
    """
    steps, bad, schedule = 4, 2, fsdp.Schedule(prefetch=prefetch)
    with deterministic():
        expected = trained(schedule, steps)
        state, model, data = start(schedule)
        losses: list[torch.Tensor] = []
        raised = restarts = 0

        def boom(here: str, i: int) -> None:
            if len(losses) == bad and not raised and dist.get_rank() in who and (here, i) == (place, unit):
                raise Boom

        with slow_lanes(dist.get_rank()):
            while len(losses) < steps:
                try:
                    after, loss = train_step(state, model, data[len(losses)], boom)
                except Boom:
                    raised += 1
                except fsdp.RestartError:
                    restarts += 1
                else:
                    state = after
                    losses.append(loss)
        found = [loss.item() for loss in losses], fsdp.full_params(state)
        return differs(found, expected), raised, restarts


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize(("place", "unit"), PLACES)
def test_an_exception_on_every_rank_in_the_middle_of_a_step(place: str, unit: int, prefetch: int) -> None:
    assert launch(interrupted, (place, unit, list(range(RANKS)), prefetch), nprocs=RANKS) == [([], 1, 0)] * RANKS


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize(("place", "unit"), PLACES)
def test_an_exception_on_one_rank_in_the_middle_of_a_step(place: str, unit: int, prefetch: int) -> None:
    found = launch(interrupted, (place, unit, [1], prefetch), nprocs=RANKS)
    assert found == [([], 1, 0) if rank == 1 else ([], 0, 1) for rank in range(RANKS)]
