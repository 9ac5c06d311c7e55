"""`Schedule(overlap_update=True)` on GPUs: the same bits, updates beside the backward, and whoever reads before `step`.

`pytest tests/gpu/test_update.py -s` prints the figures.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from gpu.machine import RANKS, deterministic
from gpu.traces import recorded

import functional_fsdp as fsdp
from functional_fsdp import Schedule, launch
from functional_fsdp import transforms as T
from functional_fsdp.extend import Session

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic matrix products
pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("fresh_workers")]

WIDTH, DEPTH, TOKENS = 6144, 10, 4096  # 75 M elements a unit: an update of its own each on up to 8 ranks


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))) for _ in range(DEPTH)
        )


def made(transport: Any, overlapped: bool) -> tuple[fsdp.State, Any, torch.Tensor]:
    gc.collect()
    schedule = Schedule(overlap_update=overlapped)
    precision = fsdp.Precision(compute=torch.bfloat16)
    spec = fsdp.Spec(fsdp.local_mesh(), precision=precision, schedule=schedule, transport=transport)
    rate = lambda count: 1e-4 * ((count + 1) / 4).clamp(max=1.0)  # noqa: E731
    state, model = fsdp.init(Chain, spec, fsdp.adamw(lr=rate, weight_decay=0.1), seed=0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    return state, model, torch.randn(TOKENS, WIDTH, generator=generator).to("cuda", torch.bfloat16)


def gradients(state: fsdp.State, model: Any, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
    """The loop by hand, up to the last `reduce`."""
    h, pullbacks = x, {}
    for i, unit in enumerate(state.units):
        state, w = fsdp.unshard(state, unit)
        h, pullbacks[unit] = T.vjp(lambda w, h, i=i: h + fsdp.bind(model.layers[i], w)(h), w, h)
        state = fsdp.release(state, unit)
    loss, dh = h.float().square().mean(), (h.float() / len(h)).to(h.dtype)
    for unit in reversed(state.units):
        state, w = fsdp.unshard(state, unit)
        dw, dh = pullbacks.pop(unit)(w, dh)
        state = fsdp.release(state, unit)
        state = fsdp.reduce(state, dw, unit)
    return state, loss


def numbers(state: fsdp.State) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves((state.main, state.opt, state.count))
    return [leaf.detach().cpu().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]


# ---------------------------------------------------------------- the same bits


@deterministic()
def trained(transport: str, graph: bool, clipped: bool, overlapped: bool) -> list[torch.Tensor]:
    state, model, x = made(transport, overlapped)

    def train_step(state: fsdp.State, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        for _ in range(2):  # microbatches: an update waits for the second one's reduction
            state, loss = gradients(state, model, x)
        if clipped:
            state, _ = T.clip_by_global_norm(state, 0.1)
        return fsdp.step(state), loss

    step: Any = T.cuda_graph(train_step) if graph else train_step
    losses = []
    for i in range(8):
        state, loss = step(state, x.roll(i, 0))
        losses.append(loss.cpu())
    assert losses[-1] < losses[0]
    return [*losses, *numbers(state)]


def differ(transport: str, graph: bool, clipped: bool) -> int:
    """How many tensors of a training differ between updates beside the backward and after it."""
    one, other = (trained(transport, graph, clipped, overlapped) for overlapped in (True, False))
    assert len(one) == len(other) > 8
    return sum(not torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("transport", ["collective", "copy_engine"])
def test_updates_beside_the_backward_change_no_bit(transport: str, graph: bool, clipped: bool) -> None:
    assert launch(differ, (transport, graph, clipped), nprocs=RANKS) == [0] * RANKS


# ---------------------------------------------------------------- beside the backward


def times(graph: bool, overlapped: bool) -> tuple[list[float], float]:
    """When AdamW's kernels of one step begin, and when its last matrix product ends, in ms."""
    state, model, x = made("copy_engine", overlapped)

    def train_step(state: fsdp.State, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = gradients(state, model, x)
        return fsdp.step(state), loss

    step: Any = T.cuda_graph(train_step) if graph else train_step
    for _ in range(5):
        state, _ = step(state, x)
    torch.cuda.synchronize()
    with recorded():
        x.sum()  # the first use of the profiler takes seconds
    dist.all_reduce(torch.zeros((), device="cuda"))
    torch.cuda.synchronize()
    with recorded() as traces:
        for _ in range(2):
            torch.cuda._sleep(400_000_000)  # the host is ahead
            state, _ = step(state, x)
    (trace,) = traces
    updates, gemms = [k for k in trace.kernels if "adam" in k.name.lower()], trace.gemms()
    updates, gemms = updates[len(updates) // 2 :], gemms[len(gemms) // 2 :]  # of the second step
    zero = gemms[0].start
    return [1e-3 * (k.start - zero) for k in updates], 1e-3 * (max(k.interval[1] for k in gemms) - zero)


@pytest.mark.parametrize("graph", [False, True])
def test_updates_run_beside_the_backward(graph: bool) -> None:
    for begun, end in launch(times, (graph, True), nprocs=RANKS):
        print(f"\ngraph {graph}: products end at {end:.2f} ms, updates begin at {', '.join(f'{t:.2f}' for t in begun)}")
        each = len(begun) // DEPTH  # kernels: one divides a large share among several
        assert each
        assert len(begun) == each * DEPTH
        assert sum(t < end for t in begun) >= each * (DEPTH - 3)  # all but those of the last units
    for begun, end in launch(times, (graph, False), nprocs=RANKS):
        assert begun
        assert min(begun) > end


# ---------------------------------------------------------------- whoever reads main weights before the step


def read_before(how: str) -> tuple[bool, bool]:
    """Whether weights that are gathered between the last `reduce` and `step`, late, are those before the step; and
    whether the step was taken."""
    state, model, x = made("collective", overlapped=True)
    for _ in range(2):
        state, _ = gradients(state, model, x)
        state = fsdp.step(state)
    state, before = fsdp.unshard(state)
    expected = {path: weight.clone() for path, weight in before.items()}
    state, _ = gradients(state, model, x)
    torch.cuda._sleep(2_000_000_000)  # compute is late: what does not wait for it goes first
    if how == "whole tree":
        state, seen = fsdp.unshard(state)
        kept = {path: weight.clone() for path, weight in seen.items()}
    else:
        unit = state.units[0]
        with pytest.warns(UserWarning, match="not what the schedule expects"):
            state, w = Session.unshard(state, (unit,))
        kept = {f"{unit}.{key}": weight.clone() for key, weight in w[unit].items()}
        state = fsdp.release(state, unit)
    state = fsdp.step(state)
    same = all(torch.equal(weight, expected[path]) for path, weight in kept.items())
    _, after = fsdp.unshard(state)
    return same, all(not torch.equal(after[path], weight) for path, weight in kept.items())


@pytest.mark.parametrize("how", ["whole tree", "outside"])
def test_weights_gathered_before_a_step_are_the_old_ones(how: str) -> None:
    assert launch(read_before, (how,), nprocs=RANKS) == [(True, True)] * RANKS


def looked_at() -> dict[str, float]:
    """How far norms, products and shards that are read late in a step are from those of the weights before it."""
    found: dict[str, float] = {}
    for how in ("norms", "dot", "shards"):
        params = {f"layers.{i}": {"w": torch.ones(1 << 20)} for i in range(4)}
        spec = fsdp.Spec(fsdp.local_mesh(), schedule=Schedule(overlap_update=True))
        state = fsdp.shard(params, spec, fsdp.sgd(lr=1.0))
        grads = {name: {"w": torch.ones(1 << 20, device=state.count.device)} for name in params}
        for _ in range(2):
            wanted = sum(float(buffer.local.square().sum()) for buffer in state.main.values())
            state = fsdp.reduce(state, grads)
            torch.cuda._sleep(100_000_000)  # compute is late, and what lanes have could go on
            if how == "norms":
                state, norms = T.norms(state, state.main)
                seen: Any = torch.stack([*norms.values()]).square().sum() / dist.get_world_size()
            elif how == "dot":
                state, product = T.dot(state, state.main, state.main)
                seen = product / dist.get_world_size()
            else:
                seen = torch.stack([part.square().sum() for part in fsdp.local_shards(state).values()]).sum()
            state = fsdp.step(state)
            found[how] = max(found.get(how, 0.0), abs(float(seen) - wanted))
    return found


def test_looks_at_weights_come_before_the_update_beside_them() -> None:
    for found in launch(looked_at, nprocs=RANKS):
        assert max(found.values()) <= 1.0, found  # of 4 Mi ones; a step makes them zeros


def norms_of_gradients() -> list[float]:
    """Norms of gradients of ones that were just given to `reduce`, and are under way."""
    found: list[float] = []
    params = {f"layers.{i}": {"w": torch.zeros(1 << 24)} for i in range(4)}
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=1e-3))
    grads = {name: {"w": torch.ones(1 << 24, device=state.count.device)} for name in params}
    for _ in range(3):
        state = fsdp.reduce(state, grads)
        state, norms = T.norms(state, state.grads)
        found += [float(norm) for norm in norms.values()]
        state = fsdp.step(state)
    return found


def test_norms_of_gradients_wait_for_them() -> None:
    for found in launch(norms_of_gradients, nprocs=RANKS):
        assert found == pytest.approx([4096.0] * 12, rel=1e-5)
