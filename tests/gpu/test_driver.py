"""forward_backward on NCCL: the plain module's numbers, and the bits, kernels and bytes of the loop by hand.

`pytest tests/gpu/test_driver.py -s` prints the figures.
"""

from __future__ import annotations

import gc
import json
import os
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from gpu.layers import Layer
from gpu.machine import CUBLAS, deterministic, no_synchronisation, own_gpus
from gpu.test_overlap import Bits, Chain, differs, train_step
from gpu.traces import hidden, recorded, waits
from support.modelled import Seen, driven, plain
from support.models import CASES, own_loss
from support.problems import full_grads, largest, mesh_and_placement

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T
from functional_fsdp._launch.launch import stop_workers

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("exact_workers")]  # the first starts CUDA and NCCL

RANKS = 2

Loop = Callable[[fsdp.State, torch.Tensor], tuple[fsdp.State, torch.Tensor]]


def settle() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    dist.all_reduce(torch.zeros((), device=fsdp.local_mesh().device_type))  # all ranks are here


# ---------------------------------------------------------------- the plain module's numbers

# These compute in float32 inside (norms, softmaxes, their loss), whatever the dtype of their weights.
FLOAT32_INSIDE = ("llama", "gpt2", "mixtral", "t5", "mamba", "qwen2")


def distance(seen: Seen, expected: Seen) -> dict[str, float]:
    """The largest difference of any step."""
    pairs = [*zip(seen, expected, strict=True)]
    assert all(a[2].keys() == b[2].keys() for a, b in pairs)
    return {
        "losses": max(abs(a[0] - b[0]) for a, b in pairs) if dist.get_rank() == 0 else 0.0,  # the plain one's: rank 0's
        "gradients": max(largest(a[1], {key: b[1][key] for key in a[1]}) for a, b in pairs),
        "weights": max(largest(a[2], b[2]) for a, b in pairs),
    }


def distances(name: str, steps: int) -> tuple[bool, dict[str, dict[str, float]]]:
    """Whether the module is what it was; how far driven steps are from the plain module's on this GPU, and on the CPU.

    All of it runs on the ranks: a backward on the CPU touches CUDA, after which a process cannot fork workers.
    """
    with warnings.catch_warnings():  # weights that lie in a bucket are not laid out as cuDNN likes best
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        seen, untouched = driven(name, "zero3", steps, torch.float64, debug=True)
        here = plain(name, steps, torch.float64, fsdp.local_mesh().device_type)
    cpu = plain(name, steps, torch.float64)
    return untouched, {
        "GPU": distance(seen, here),
        "CPU": distance(seen, cpu),
        "CPU, first step": distance(seen[:1], cpu[:1]),
    }


@pytest.mark.parametrize("name", CASES)
def test_two_steps_equal_the_plain_module(name: str) -> None:
    """In float64, with released bytes poisoned.

    Kernels sum in another order than the CPU's, and some in another order each time. What that changes in a gradient
    near zero, about 1e-15, AdamW multiplies by up to lr / eps = 1e6: hence 1e-8, not the CPU's 1e-9. Where a model
    computes in float32 inside, the CPU is a reference for that precision only, and not after AdamW.
    """
    if CASES[name].loss_fn is own_loss and find_spec("transformers") is None:
        pytest.skip("the model is of the transformers package, which is not installed")
    for untouched, found in launch(distances, (name, 2), nprocs=RANKS):
        assert untouched
        assert max(found["GPU"].values()) < 1e-8, found
        if name.split(",")[0] in FLOAT32_INSIDE:
            assert max(found["CPU, first step"][what] for what in ("losses", "gradients")) < 1e-5, found
        else:
            assert max(found["CPU"].values()) < 1e-8, found


# ---------------------------------------------------------------- beside the loop by hand


class Stack(nn.Module):
    """Buckets of 4 MiB in bfloat16; the wide one's, of 64 MiB, show in a peak if there is one too many."""

    def __init__(self, width: int = 512, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))


def wide() -> Stack:
    return Stack(2048, 6)


def half_square(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The loss of `train_step`, to the bit where tokens are a power of two."""
    for layer in model.layers:
        x = layer(x)
    return x.float().square().sum() / (2 * len(x))


def hand_loop(model: nn.Module) -> Loop:
    return lambda state, x: train_step(state, model, x)


def driven_loop(model: nn.Module) -> Loop:
    forward_backward = T.forward_backward(model, half_square)

    def step(state: fsdp.State, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, x)
        return fsdp.step(state), loss

    return step


LOOPS = {"by hand": hand_loop, "driven": driven_loop}


def start(make: Callable[[], nn.Module]) -> tuple[fsdp.State, Any]:
    mesh, placement = mesh_and_placement("zero3")
    spec = fsdp.Spec(mesh, placement, precision=fsdp.Precision(compute=torch.bfloat16))
    return fsdp.init(make, spec, fsdp.adamw(lr=1e-3))


def batches(count: int, tokens: int, width: int, rank: int | None = None) -> list[torch.Tensor]:
    """Batches that differ by rank and step."""
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    data = torch.randn(count, tokens, width, generator=generator)
    return list(data.to(fsdp.local_mesh().device_type, torch.bfloat16))


def trained(how: str, steps: int) -> Bits:
    state, model = start(Stack)
    step, losses = LOOPS[how](model), []
    for x in batches(steps, 1024, 512):
        state, loss = step(state, x)
        losses.append(loss)
    return [loss.item() for loss in losses], fsdp.full_params(state)


def bits() -> list[str]:
    """What differs after 5 steps."""
    with deterministic():
        expected = trained("by hand", 5)
        assert len(set(expected[0])) == 5
        assert all(torch.isfinite(weight).all() for weight in expected[1].values())
        return differs(trained("driven", 5), expected)


def test_losses_and_weights_have_the_bits_of_the_loop_by_hand() -> None:
    assert launch(bits, nprocs=RANKS) == [[]] * RANKS


STEPS = 3  # under the profiler; in the first one ranks may still be apart, so its times do not count
LANES = {"gather": "AllGather", "reduce": "ReduceScatter", "outer": "AllReduce"}


def traced(how: str) -> dict[str, Any]:
    """What a trace of `STEPS` steps says about this rank."""
    settle()
    state, model = start(Chain)
    step = LOOPS[how](model)
    (x,) = batches(1, Chain.TOKENS, Chain.WIDTH)
    for _ in range(3):
        state, loss = step(state, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whatever the profiler has to say
        with recorded():
            x.sum()  # the first use of the profiler takes seconds
        dist.all_reduce(torch.zeros((), device=x.device))  # all ranks are here; what they have allocated stays
        torch.cuda.synchronize()
        with recorded() as traces:
            for _ in range(STEPS):
                with torch.profiler.record_function("train_step"):
                    state, loss = step(state, x)
    (trace,) = traces
    lanes = {name: trace.collectives(what) for name, what in LANES.items()}
    late = {name: kernels[len(kernels) // STEPS :] for name, kernels in lanes.items()}  # a step has as many as the next
    return {
        "units": len(state.units),
        "planned gathers": len(state.cursor.plan.gathers),
        "kernels": {name: len(kernels) for name, kernels in lanes.items()},
        "gemms": len(trace.gemms()),
        "hidden": {name: hidden(kernels, trace.gemms()) for name, kernels in late.items()},
        "waits": waits(trace, "train_step"),
        "loss": loss.item(),
    }


@pytest.fixture(scope="module")
def traces(exact_workers: None) -> dict[str, list[dict[str, Any]]]:
    stop_workers()  # new ones: what other tests left behind (allocations, modes) is not measured
    found = {how: launch(traced, (how,), nprocs=RANKS) for how in LOOPS}
    print(f"\n{json.dumps(found, indent=1)}")
    return found


def test_kernels_are_those_of_the_loop_by_hand_and_of_the_plan(traces: dict[str, list[dict[str, Any]]]) -> None:
    for mine, hand in zip(traces["driven"], traces["by hand"], strict=True):
        units = mine["units"]
        assert units == hand["units"] == Chain.DEPTH
        assert mine["planned gathers"] == hand["planned gathers"] == 2 * units - 1  # the last unit stays gathered
        assert mine["kernels"] == hand["kernels"]
        assert mine["kernels"] == {"gather": STEPS * (2 * units - 1), "reduce": STEPS * units, "outer": 0}
        assert 0 < mine["gemms"] <= hand["gemms"]  # that loop has the gradient of its input as well


@own_gpus
def test_compute_hides_communication(traces: dict[str, list[dict[str, Any]]]) -> None:
    """All but the first gather of a step and its last reduction, as in the loop by hand."""
    for found in traces["driven"]:
        assert found["hidden"]["gather"] >= 0.90, found
        assert found["hidden"]["reduce"] >= 0.80, found


def test_the_host_never_waits_for_the_device_in_a_step(traces: dict[str, list[dict[str, Any]]]) -> None:
    for found in traces["driven"]:
        assert found["waits"] == []


def peak(how: str) -> int:
    """Most bytes alive in the third step, beyond those before there was a state."""
    settle()
    base = torch.cuda.memory_allocated()
    state, model = start(wide)
    step = LOOPS[how](model)
    for x in batches(3, 4096, 2048):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        state, _ = step(state, x)
    return torch.cuda.max_memory_allocated() - base


def peaks() -> dict[str, int]:
    peak("by hand")  # libraries allocate their workspaces on first use
    return {how: peak(how) for how in LOOPS}


def test_the_peak_is_at_most_1_percent_above_the_loop_by_hand() -> None:
    for found in launch(peaks, nprocs=RANKS):
        print({how: f"{size / 2**20:.1f} MiB" for how, size in found.items()})
        assert found["driven"] <= 1.01 * found["by hand"]


# ---------------------------------------------------------------- around a step


def quiet() -> bool:
    """Driven steps, clipped and skipped if not finite, with torch's check for waits of the host on."""
    state, model = start(Stack)
    forward_backward, step = T.forward_backward(model, half_square), T.skip_nonfinite(fsdp.step)

    def train_step(state: fsdp.State, x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> fsdp.State:
        state, _ = forward_backward(state, x, scale=scale)
        state, _ = T.clip_by_global_norm(state, 1.0)
        return step(state)

    data = batches(4, 1024, 512)
    scale = torch.full((), 0.5, device=data[0].device)
    state = train_step(state, data[0])
    settle()
    with no_synchronisation():
        state = train_step(state, data[1])
        state = train_step(state, data[2], scale)
    return True


def test_a_step_never_synchronises_host_and_device() -> None:
    assert launch(quiet, nprocs=RANKS) == [True] * RANKS


def around() -> tuple[float, float, float]:
    """`clip_by_global_norm` and `skip_nonfinite` alone under that check: the norm, what it should be, and after."""
    state, model = start(Stack)
    forward_backward, step = T.forward_backward(model, half_square), T.skip_nonfinite(fsdp.step)
    for x in batches(2, 1024, 512):
        state, _ = forward_backward(state, x)
        state = fsdp.finish_reductions(state)
        expected = torch.stack([g.double().norm() for g in full_grads(state).values()]).norm().item()
        settle()
        with no_synchronisation():
            state, norm = T.clip_by_global_norm(state, 0.5)
        clipped = torch.stack([g.double().norm() for g in full_grads(state).values()]).norm().item()
        with no_synchronisation():
            state = step(state)
    return norm.item(), expected, clipped


def test_clipping_and_skipping_wait_for_nothing_and_are_exact() -> None:
    found = launch(around, nprocs=RANKS)
    assert len(set(found)) == 1
    norm, expected, clipped = found[0]
    assert expected > 0.5
    assert norm == pytest.approx(expected, rel=1e-5)  # float32
    assert clipped == pytest.approx(0.5, rel=1e-4)


def one_nan() -> tuple[list[str], list[str], list[int]]:
    """Rank 1 has a NaN in its second batch: what the step changed, what the next one did, and what was counted."""
    state, model = start(Stack)
    forward_backward, step = T.forward_backward(model, half_square), T.skip_nonfinite(fsdp.step)

    def train_step(state: fsdp.State, x: torch.Tensor) -> fsdp.State:
        state, _ = forward_backward(state, x)
        with no_synchronisation():
            return step(state)

    first, bad, last = batches(3, 1024, 512)
    if dist.get_rank() == 1:
        bad[0, 0] = torch.nan
    state = train_step(state, first)
    before = fsdp.full_params(state)
    state = train_step(state, bad)
    between = fsdp.full_params(state)
    state = train_step(state, last)
    after = fsdp.full_params(state)
    assert all(torch.isfinite(weight).all() for weight in after.values())
    counted = [int(state.count), int(state.extras["skipped"])]
    return differs(([], between), ([], before)), differs(([], after), ([], between)), counted


def test_a_step_is_skipped_on_all_ranks_when_one_has_a_nan() -> None:
    for skipped, taken, counted in launch(one_nan, nprocs=RANKS):
        assert skipped == []
        assert len(taken) == 8 * 6  # leaves
        assert counted == [2, 1]


class Dropping(Stack):
    """Returns its dropout masks beside the loss."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        masks = []
        for layer in self.layers:
            y = F.dropout(layer(x), 0.5)
            masks.append(y == 0)
            x = y
        return x.float().square().mean(), masks


def dropped() -> tuple[bool, bool, list[torch.Tensor], list[torch.Tensor]]:
    """Whether a step that is taken again has the same bits, whether the caller's generators go on; masks of 2 steps."""
    state, model = start(Dropping)
    forward_backward = T.forward_backward(model, lambda model, x: model(x), has_aux=True)
    (x,) = batches(1, 256, 512, rank=0)  # the same on every rank

    def generators() -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]

    before = generators()
    looked, (loss, masks) = forward_backward(state, x)
    mine = full_grads(fsdp.finish_reductions(looked))
    again, (same_loss, same_masks) = forward_backward(state, x)
    again = fsdp.finish_reductions(again)
    theirs = full_grads(again)
    same = torch.equal(loss, same_loss) and all(map(torch.equal, masks, same_masks))
    same &= all(torch.equal(mine[path], theirs[path]) for path in mine)
    _, (_, later) = forward_backward(fsdp.step(again), x)
    return same, all(map(torch.equal, before, generators())), masks, later


def dropped_deterministically() -> tuple[bool, bool, list[torch.Tensor], list[torch.Tensor]]:
    with deterministic():
        return dropped()


def test_dropout_differs_by_rank_and_step_and_comes_again() -> None:
    found = launch(dropped_deterministically, nprocs=RANKS)
    assert all(same and kept for same, kept, _, _ in found)
    masks = [mask for _, _, first, later in found for mask in (*first, *later)]
    assert all(0.4 < mask.float().mean() < 0.6 for mask in masks)
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


def test_cublas_repeats_its_bits_on_the_ranks() -> None:
    """Else what is said above about bits says nothing."""
    assert launch(lambda: os.environ.get(CUBLAS), nprocs=RANKS) == [":4096:8"] * RANKS
