"""Memory on GPUs: bytes are those of the plan, a step's peak is what its parts add up to, and nothing stays behind.

Two counters of the caching allocator are read. "requested" is what was asked for, so it can be compared exactly;
"allocated" (torch.cuda.memory_allocated) is what that takes: multiples of 512 bytes, and up to 1 MiB more for a tensor
above 1 MiB, since a block is not split for less. NCCL's own buffers are in neither.

`pytest tests/gpu/test_memory.py -s` prints the figures.
"""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from gpu.layers import Layer
from gpu.machine import RANKS, check_gpus
from support.problems import mesh_and_placement

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T

pytestmark = pytest.mark.timeout(400)  # the first launch starts CUDA and NCCL on every rank

MIB = 2**20
SPLIT = MIB  # bytes: what a block may be larger than what was asked for


class Stack(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))


WIDTH, DEPTH, TOKENS = 3072, 6, 4096  # buckets of 144 MiB in bfloat16: one too many would show
SMALL, FEW = 1024, 4


class Bytes(NamedTuple):
    requested: int
    allocated: int

    def beyond(self, base: Bytes) -> Bytes:
        return Bytes(self.requested - base.requested, self.allocated - base.allocated)


def now() -> Bytes:
    stats = torch.cuda.memory_stats()
    return Bytes(stats["requested_bytes.all.current"], stats["allocated_bytes.all.current"])


def peak() -> Bytes:
    """Since `torch.cuda.reset_peak_memory_stats`."""
    stats = torch.cuda.memory_stats()
    return Bytes(stats["requested_bytes.all.peak"], stats["allocated_bytes.all.peak"])


# ---------------------------------------------------------------- one loop, with shards or with weights that stay

Weights = dict[str, torch.Tensor]


class Shards:
    """The verbs on a state. `at` is told when weights were handed out, and when gradients were taken and dropped."""

    def __init__(self, state: fsdp.State, at: Callable[[str], None] = lambda place: None) -> None:
        self.state, self.at = state, at

    def unshard(self, unit: str) -> Weights:
        self.state, weights = fsdp.unshard(self.state, unit)
        self.at("unshard")
        return weights

    def release(self, unit: str) -> None:
        self.state = fsdp.release(self.state, unit)

    def reduce(self, grads: Weights, unit: str) -> None:
        self.state = fsdp.reduce(self.state, grads, unit)


class Resident:
    """The same verbs on whole compute weights that stay; gradients go nowhere.

    Args:
        taken: bytes of staging and of main gradients, by unit, that are allocated when a unit's gradients come: staging
            until the next ones do, and so long the gradients live, which are copied beside compute; main gradients for
            good. None by default.
    """

    def __init__(self, weights: Mapping[str, Weights], taken: Mapping[str, tuple[int, int]] | None = None) -> None:
        self.weights, self.taken = weights, taken or {}
        self.held: Any = None
        self.main_grads: list[torch.Tensor] = []

    def unshard(self, unit: str) -> Weights:
        return self.weights[unit]

    def release(self, unit: str) -> None:
        pass

    def reduce(self, grads: Weights, unit: str) -> None:
        if unit in self.taken:
            staging, main = self.taken[unit]
            self.held = None
            device = next(iter(grads.values())).device
            self.held = grads, torch.empty(staging, dtype=torch.uint8, device=device)
            self.main_grads.append(torch.empty(main, dtype=torch.uint8, device=device))


def forward_backward(verbs: Any, stages: Mapping[str, nn.Module], x: torch.Tensor) -> None:
    """Unit by unit; of a unit's gradients nothing is left when the next one's are made."""
    h, pullbacks = x, {}
    for unit, stage in stages.items():
        w = verbs.unshard(unit)
        h, pullbacks[unit] = T.vjp(lambda w, h, stage=stage: fsdp.bind(stage, w)(h), w, h)
        verbs.release(unit)
        del w
    dh = (h.float() / len(h)).to(h.dtype)
    del h
    for unit in reversed([*stages]):
        w = verbs.unshard(unit)
        dw, dh = pullbacks.pop(unit)(w, dh)
        verbs.reduce(dw, unit)
        del dw
        verbs.release(unit)
        del w


def activation_peak(
    stages: Mapping[str, nn.Module],
    layout: fsdp.Layout,
    x: torch.Tensor,
    taken: Mapping[str, tuple[int, int]] | None = None,
) -> Bytes:
    """What one rank's forward and backward need beside weights: the most bytes alive beyond weights and batch.

    That is the same loop with the same `T.vjp`, on weights that stay in the compute dtype (as with `ddp`, without its
    state): residuals of every unit, temporaries of one, the gradients of one unit, which are dropped at once, and the
    cotangent between two units. No communication, no main weights; staging and main gradients only as `taken` says.
    """
    weights = {
        unit.name: {
            leaf.key: torch.randn(leaf.shape, device=x.device, dtype=x.dtype).mul_(0.02)
            for bucket in unit.buckets
            for leaf in bucket.leaves
        }
        for unit in layout.units
    }
    base = now()
    torch.cuda.reset_peak_memory_stats()
    forward_backward(Resident(weights, taken), stages, x)
    return peak().beyond(base)


def problem() -> tuple[fsdp.Spec, fsdp.Layout, dict[str, nn.Module], torch.Tensor]:
    """Spec, layout, the units' skeletons by name, and a batch."""
    mesh, placement = mesh_and_placement("zero3")
    spec = fsdp.Spec(mesh, placement, precision=fsdp.Precision(compute=torch.bfloat16))
    with torch.device("meta"):
        params, skeleton = fsdp.functionalize(Stack(WIDTH, DEPTH))
    layout = fsdp.make_layout(params, spec)
    stages = {unit.name: skeleton.get_submodule(unit.name) for unit in layout.units}
    x = torch.randn(TOKENS, WIDTH, device=mesh.device_type, dtype=torch.bfloat16)
    return spec, layout, stages, x


def settle() -> Bytes:
    """What is alive now, without garbage that is collected later and without anything under way."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return now()


# ---------------------------------------------------------------- a run, measured


def measured() -> dict[str, Any]:
    """Train 4 steps; bytes on this rank beyond those before `init`, in order, and what they should be."""
    spec, layout, stages, x = problem()
    main_grads = {unit.name: sum(bucket.nbytes("grads") for bucket in unit.buckets) for unit in layout.units}
    activation_peak(stages, layout, x)  # libraries allocate their workspaces on first use
    activations = activation_peak(stages, layout, x)
    staging = {reduction.unit: reduction.nbytes for reduction in fsdp.make_plan(layout, spec.schedule).reductions}
    whole = activation_peak(stages, layout, x, {unit: (staging[unit], main_grads[unit]) for unit in main_grads})
    base = settle()

    seen: dict[str, Bytes] = {}
    state, _ = fsdp.init(lambda: Stack(WIDTH, DEPTH), spec, fsdp.adamw(lr=1e-4))
    seen["after init"] = now().beyond(base)
    plan = state.cursor.plan

    # the verbs, one by one: what the first use of each allocates
    state, w = fsdp.unshard(state, state.units[0])
    seen["after the first unshard"] = now().beyond(base)
    state = fsdp.release(state, state.units[0])
    del w
    for unit in state.units[1:]:
        state, w = fsdp.unshard(state, unit)
        state = fsdp.release(state, unit)
        del w
    last = state.units[-1]
    state, w = fsdp.unshard(state, last)
    seen["after a forward"] = now().beyond(base)
    grads = {key: torch.ones_like(weight) for key, weight in w.items()}
    state = fsdp.reduce(state, grads, last)
    del grads, w
    seen["after the first reduce"] = now().beyond(base)
    state = fsdp.release(state, last)
    state = fsdp.step(state)  # AdamW counts, for leaves without gradients, the steps that they missed
    seen["after step 1"] = now().beyond(base)

    for step in (2, 3, 4):
        torch.cuda.reset_peak_memory_stats()
        verbs = Shards(state)
        forward_backward(verbs, stages, x)
        state = fsdp.step(verbs.state)
        del verbs
        seen[f"after step {step}"] = now().beyond(base)
        seen[f"peak of step {step}"] = peak().beyond(base)
    return {
        "seen": {place: tuple(found) for place, found in seen.items()},
        "state": 3 * layout.nbytes("main") + 16,  # main weights, two moments, the count and what it began at
        "counts": 8 * sum(len(b.leaves) for unit in layout.units if unit.name != last for b in unit.buckets),
        "main gradients": layout.nbytes("grads"),
        "first main gradient": main_grads[last],
        "arena": plan.arena,
        "staging": plan.staging,
        "first staging": plan.reductions[0].nbytes,
        "first gradients": sum(
            leaf.numel * bucket.compute.itemsize for bucket in layout.by_name[last].buckets for leaf in bucket.leaves
        ),
        "activations": tuple(activations),
        "activations, staging and main gradients": tuple(whole),
        "tensors": 3 * len(layout.buckets) + 5,  # and the two counts, arena, staging, a main gradient
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    check_gpus(RANKS)
    found = launch(measured, nprocs=RANKS)
    for rank, one in enumerate(found):
        print(f"\nrank {rank}: {json.dumps(one, indent=1)}")
    return found


def test_allocations_are_those_of_the_plan(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        seen = found["seen"]
        gathered = found["state"] + found["arena"]
        expected = {
            "after init": found["state"],
            "after the first unshard": gathered,
            "after a forward": gathered,
            "after the first reduce": gathered
            + found["first gradients"]
            + found["first staging"]
            + found["first main gradient"],  # copied beside compute, gradients live until compute has waited for that
            "after step 1": found["state"] + found["counts"],
        }
        assert {place: seen[place][0] for place in expected} == expected
        for place in expected:
            requested, allocated = seen[place]
            assert requested <= allocated <= requested + SPLIT * found["tensors"], place


def test_between_steps_memory_is_at_rest(ranks: list[dict[str, Any]]) -> None:
    """The arena and staging are there within a step only."""
    for found in ranks:
        after = [tuple(found["seen"][f"after step {step}"]) for step in (2, 3, 4)]
        assert after[0][0] == found["state"] + found["counts"]
        assert after == [after[0]] * 3  # requested and allocated


def test_the_peak_of_a_step_is_the_sum_of_its_parts(ranks: list[dict[str, Any]]) -> None:
    """State, main gradients, arena, staging and activations (see `activation_peak`), and at most 64 MiB more."""
    for found in ranks:
        planned = found["state"] + found["arena"] + found["staging"]
        bound = planned + found["main gradients"] + found["activations"][1]
        assert found["seen"]["peak of step 3"][1] <= bound + 64 * MIB, found


def test_the_peak_of_a_step_is_to_be_predicted(ranks: list[dict[str, Any]]) -> None:
    """Staging and main gradients come unit by unit, while residuals go: what the loop needs in which just that happens.

    So this is the tighter bound, of bytes asked for: one more copy of a unit's weights or gradients would show.
    """
    for found in ranks:
        predicted = found["state"] + found["arena"] + found["activations, staging and main gradients"][0]
        assert found["seen"]["peak of step 3"][0] <= predicted + 4 * MIB, found


# ---------------------------------------------------------------- what the allocator adds


def rounded(leaves: int) -> tuple[int, int]:
    """Bytes that a state of `leaves` units is asked for, and that it takes beyond. Each shard has 8 KiB more than 11
    MiB: in a segment of its own it takes 12."""
    mesh, placement = mesh_and_placement("zero3")
    numel = dist.get_world_size() * (11 * MIB + 8192) // 4
    base = settle()
    params = {f"w{i}": torch.ones(numel, device=mesh.device_type) for i in range(leaves)}
    state = fsdp.shard(params, fsdp.Spec(mesh, placement, units=[*params]), fsdp.adamw())
    del params
    requested, allocated = settle().beyond(base)
    assert len(state.units) == leaves
    return requested, allocated - requested


def test_all_of_a_state_is_rounded_up_once() -> None:
    for requested, beyond in launch(rounded, (8,), nprocs=RANKS):
        assert requested == 3 * 8 * (11 * MIB + 8192) + 16  # and two counts
        assert beyond <= MIB


# ---------------------------------------------------------------- what stays behind


def train(how: str, device: str) -> None:
    """Two steps and half a third, and every name for what was made goes out of scope."""
    mesh, placement = mesh_and_placement("zero3")
    spec = fsdp.Spec(mesh, placement, precision=fsdp.Precision(compute=torch.bfloat16))
    if how == "init":
        state, model = fsdp.init(lambda: Stack(SMALL, FEW), spec, fsdp.adamw(lr=1e-4))
    else:
        torch.manual_seed(0)
        params, model = fsdp.functionalize(Stack(SMALL, FEW))
        state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-4))
    stages = {unit: model.get_submodule(unit) for unit in state.units}
    x = torch.randn(512, SMALL, device=device, dtype=torch.bfloat16)
    for _ in range(2):
        verbs = Shards(state)
        forward_backward(verbs, stages, x)
        state = fsdp.step(verbs.state)
    verbs = Shards(state)
    forward_backward(verbs, stages, x)  # gradients are there, and reductions under way


def left(how: str) -> tuple[int, int]:
    """Bytes alive after a state was dropped without a garbage collection, beyond those before; and while it lived."""
    device = fsdp.local_mesh().device_type
    train(how, device)  # workspaces, communicators
    base = settle()
    torch.cuda.reset_peak_memory_stats()
    gc.disable()
    try:
        train(how, device)
        torch.cuda.synchronize()
        return now().beyond(base).allocated, peak().beyond(base).allocated
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["init", "shard"])
def test_a_dropped_state_frees_everything_without_a_collection(how: str) -> None:
    for after, most in launch(left, (how,), nprocs=RANKS):
        assert most > 64 * MIB
        assert after <= 1 * MIB


# ---------------------------------------------------------------- beside FSDP2


def contest() -> dict[str, int]:
    """Peaks of examples/benchmark.py, in bytes: the larger of all ranks'."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says about its own FSDP2
        import benchmark

        turns = ["--start", "float32", "--steps", "1", "--rounds", "1", "--warmup", "2"]
        args = benchmark.arguments(["--model", "0.16b", *turns, "--only", "unit by unit,FSDP2"])
        gc.collect()
        rows = benchmark.measure(args).rows
    dist.all_reduce(torch.zeros((), device=fsdp.local_mesh().device_type))  # all ranks are done
    return {row.name: row.peak_bytes for row in rows}


def test_the_peak_is_no_higher_than_fsdp2s() -> None:
    for found in launch(contest, nprocs=RANKS):
        print({name: f"{size / MIB:.0f} MiB" for name, size in found.items()})
        assert found["unit by unit"] <= found["FSDP2"]
