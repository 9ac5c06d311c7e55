"""Norms, reductions of scalars, freezing, gradients of inputs and shared gathers on GPUs, beside the plain module's.

`pytest tests/gpu/test_verbs.py`
"""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from gpu.machine import need_ranks
from support.presets import PRESETS, ranks_of
from support.problems import batch, loss_fn, mesh_and_placement, net, on, reference

import functional_fsdp as fsdp
from functional_fsdp import Schedule, launch
from functional_fsdp import transforms as T

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("fresh_workers")]
RANKS = 2
MICRO, STEPS = 3, 3


def started(preset: str, **spec: Any) -> tuple[fsdp.State, Any]:
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net())
    return fsdp.shard(params, fsdp.Spec(mesh, placement, **spec), fsdp.adamw(lr=1e-2, weight_decay=0.1)), model


def apart(mine: torch.Tensor, right: torch.Tensor) -> float:
    assert mine.is_cuda
    return float((mine.cpu() - right).abs() / (1e-3 + right.abs()))


def measured(preset: str) -> tuple[float, int]:
    """How far norms and products of gradients are from the plain module's; and the collectives of one call."""
    state, model = started(preset)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state, _ = T.forward_backward(model, loss_fn)(state, on(state, batch(0, rank)))
    _, grads, _ = next(iter(reference(ranks, 1, 1)))
    weights = {path: p.detach() for path, p in net().named_parameters()}
    worst = 0.0
    for ord in (1, 2, inf):
        state, every = T.global_norm(state, ord)
        worst = max(worst, apart(every, nn.utils.get_total_norm([g for g in grads.values() if g.numel()], ord)))
        state, norms = T.norms(state, ord=ord)
        assert norms.keys() == grads.keys()
        worst = max(worst, *(apart(norms[p], torch.linalg.vector_norm(g, ord)) for p, g in grads.items() if g.numel()))
    log = state.version.lineage.runtime.issued["side"]
    before = log.count
    state, product = T.dot(state, state.grads, state.main)
    issued = log.count - before
    worst = max(worst, apart(product, torch.stack([(g * weights[p]).sum() for p, g in grads.items()]).sum()))
    mine = torch.tensor(float(rank), device=product.device)
    state, most = fsdp.pmax(state, mine)
    state, mean = fsdp.pmean(state, mine)
    assert float(most) == ranks - 1
    assert float(mean) == (ranks - 1) / 2
    return worst, issued


@pytest.mark.parametrize("preset", PRESETS)
def test_each_leaf_counts_once(preset: str) -> None:
    ranks = ranks_of(preset, RANKS)
    need_ranks(ranks)
    for worst, issued in launch(measured, (preset,), nprocs=ranks):
        assert worst < 1e-9
        assert issued == (0 if preset == "ddp" else 2 if preset == "hfsdp" else 1)


def trained(preset: str, keep: Any) -> tuple[float, list[int]]:
    """The largest difference of any weight after each of three steps of three microbatches; and gathers of each."""
    state, model = started(preset, schedule=Schedule(keep=keep))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    forward_backward = T.forward_backward(model, loss_fn)
    worst, gathers = 0.0, []
    for step, (_, _, weights) in enumerate(reference(ranks, STEPS, MICRO)):
        before = state.version.lineage.runtime.issued["gather"].count
        for k in range(MICRO):
            data = on(state, batch(step, rank, k))
            state, _ = forward_backward(state, data, last_microbatch=k == MICRO - 1)
        gathers.append(state.version.lineage.runtime.issued["gather"].count - before)
        state = fsdp.step(state)
        found = fsdp.full_params(state)
        worst = max(worst, *(float((found[p].cpu() - w).abs().max()) for p, w in weights.items() if w.numel()))
    return worst, gathers


@pytest.mark.parametrize("preset", PRESETS)
def test_microbatches_share_one_gather_of_each_unit(preset: str) -> None:
    ranks = ranks_of(preset, RANKS)
    need_ranks(ranks)
    each = launch(trained, (preset, ()), nprocs=ranks)
    once = launch(trained, (preset, "all"), nprocs=ranks)
    for (kept, few), (anew, many) in zip(once, each, strict=True):
        assert kept == anew < 1e-9
        if preset in ("zero3", "hsdp", "hfsdp"):
            assert few[-1] * (2 * MICRO - 1) <= many[-1]


def frozen(preset: str) -> tuple[float, bool]:
    """The largest difference from torch's AdamW where blocks.0 trains in the first and the third step."""
    state, model = started(preset)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    forward_backward = T.forward_backward(model, loss_fn)
    plain = net()
    chosen = [p for name, p in plain.named_parameters() if name.startswith("blocks.0.")]
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    worst, stayed = 0.0, True
    for step in range(3):
        if step:
            change = fsdp.freeze if step == 1 else fsdp.unfreeze
            before = fsdp.full_params(state)
            state = change(state, "blocks.0.*")
            for p in chosen:
                p.requires_grad_(step == 2)
                optimizer.state.pop(p, None)
            stayed &= all(torch.equal(w, before[path]) for path, w in fsdp.full_params(state).items())
        state = fsdp.step(forward_backward(state, on(state, batch(step, rank)))[0])
        optimizer.zero_grad()
        for r in range(ranks):
            (loss_fn(plain, batch(step, r)) / ranks).backward()
        optimizer.step()
        found = fsdp.full_params(state)
        right = {path: p.detach() for path, p in plain.named_parameters() if p.numel()}
        worst = max(worst, *(float((found[path].cpu() - p).abs().max()) for path, p in right.items()))
    return worst, stayed


@pytest.mark.parametrize("preset", PRESETS)
def test_a_frozen_leaf_stays_and_trains_again(preset: str) -> None:
    ranks = ranks_of(preset, RANKS)
    need_ranks(ranks)
    for worst, stayed in launch(frozen, (preset,), nprocs=ranks):
        assert worst < 1e-9
        assert stayed


def of_inputs(preset: str, compiled: bool) -> float:
    """How far gradients of what this rank gives are from the plain module's."""
    mesh, placement = mesh_and_placement(preset)
    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double().cuda()
    params, model = fsdp.functionalize(whole)
    state = fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.sgd(lr=0.1))
    g = torch.Generator().manual_seed(dist.get_rank())
    x, y = (torch.randn(4, n, generator=g, dtype=torch.float64).cuda() for n in (3, 2))
    options: dict[str, Any] = {"compile": True} if compiled else {}

    def mean_square(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x) - y).square().mean()

    f = T.forward_backward(model, mean_square, input_grads=True, **options)
    for _ in range(2):  # the second time the order of units is known
        state, (loss, grads) = f(state, x, y)
        state = fsdp.drop_gradients(state)
    x.requires_grad_()
    y.requires_grad_()
    right = mean_square(whole, x, y)
    wanted = torch.autograd.grad(right, (x, y))
    pairs = zip((loss, *grads), (right, *wanted), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("preset", PRESETS)
def test_gradients_of_inputs(preset: str, compiled: bool) -> None:
    ranks = ranks_of(preset, RANKS)
    need_ranks(ranks)
    assert max(launch(of_inputs, (preset, compiled), nprocs=ranks)) < 1e-12
