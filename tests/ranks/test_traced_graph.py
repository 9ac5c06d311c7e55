"""What is in the graph of a traced step, and what may be around it: clipping, skipping, saving, other optimizers."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from support.problems import Stack, batch, net, through_the_stack
from support.traced import compiled, few
from torch._dynamo.backends.common import aot_autograd

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp._graph.graph import _memory, keep_residuals, kind_of, point_at_second_gathers

# ---------------------------------------------------------------- what is in the graph


LAYERS = 4


def captured(recompute: bool, keep: Any) -> tuple[dict[str, int], dict[str, int], list[int], int]:
    """Of the graph that a backend gets: its collectives, the plan's, the most bytes of gathered weights before and
    after the pass, and those of one layer."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def look(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    params, _ = fsdp.functionalize(Stack(depth=LAYERS))
    spec = fsdp.Spec(fsdp.local_mesh(), schedule=fsdp.Schedule(keep=keep))
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1))

    def train_step(state: fsdp.State, x: torch.Tensor) -> Any:
        state, loss = through_the_stack(state, x)
        return fsdp.step(state), loss

    with keep_residuals(not recompute):
        first = dist.get_rank() == 0  # whose graph is looked at; the other has the same collectives
        backend = aot_autograd(fw_compiler=look) if first else "eager"
        torch.compile(train_step, fullgraph=True, backend=backend)(state, torch.ones(4, 32))
    if not first:
        return {}, {}, [], 0
    (module,) = graphs
    gathered = [_memory(module.graph).gathered]
    point_at_second_gathers(module.graph)
    module.graph.eliminate_dead_code()
    gathered.append(_memory(module.graph).gathered)
    kinds = Counter(str(kind_of(node)) for node in module.graph.nodes if kind_of(node))
    plan = fsdp.make_plan(state.layout, spec.schedule)
    planned = {"all_gather": len(plan.gathers), "reduce_scatter": len(plan.reductions)}
    return dict(kinds), planned, gathered, plan.units[0].nbytes


KEPT = [
    pytest.param(True, None, marks=pytest.mark.large), pytest.param(False, None, marks=pytest.mark.large),
    (False, {"layers.1"}),
]  # fmt: skip


@pytest.mark.parametrize(("recompute", "keep"), KEPT)
def test_the_graph_has_the_plans_collectives_and_no_more_gathered_bytes(recompute: bool, keep: Any) -> None:
    kinds, planned, (before, after), layer = launch(captured, (recompute, keep), nprocs=2)[0]
    assert kinds == planned
    assert after == (3 if keep else 2) * layer
    # without the pass, residuals hold the first gathers
    assert before == after if recompute else before >= LAYERS * layer


# ---------------------------------------------------------------- around a step


def saved(folder: str) -> tuple[int, float, float]:
    """A state of compiled steps, saved and loaded, goes on as it would have."""
    params = {"first": {"w": torch.ones(3, 5), "b": torch.zeros(5)}, "second": {"w": torch.ones(5, 2)}}
    spec = fsdp.Spec(fsdp.local_mesh(), units=["first", "second"])
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-2))

    def loss_of(w: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ w["first"]["w"] + w["first"]["b"]) @ w["second"]["w"]).square().mean()

    def train_step(state: fsdp.State, x: torch.Tensor) -> Any:
        state, params = fsdp.unshard(state)
        grads, loss = torch.func.grad_and_value(loss_of)(params, x)
        return fsdp.step(fsdp.reduce(state, grads)), loss

    def batch(step: int, rank: int) -> torch.Tensor:
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))

    step, _ = compiled("eager", train_step)
    for i in range(2):
        state, _ = step(state, batch(i, dist.get_rank()))
    addresses = [buffer.local.data_ptr() for buffer in state.main.values()]
    fsdp.save(state, folder)
    fresh = fsdp.load(folder, like=fsdp.shard(params, spec, fsdp.adamw(lr=1e-2)))
    steps = fresh.steps
    fresh, theirs = step(fresh, batch(2, dist.get_rank()))
    state, mine = step(state, batch(2, dist.get_rank()))
    assert addresses == [buffer.local.data_ptr() for buffer in state.main.values()]
    return steps, theirs.item(), mine.item()


def test_a_checkpoint_of_compiled_steps_goes_on(tmp_path: Any) -> None:
    for steps, theirs, mine in few(saved, str(tmp_path / "there")):
        assert steps == 2
        assert theirs == mine


# ---------------------------------------------------------------- as eager steps


def descended(way: str, kind: str) -> tuple[list[float], bool]:
    """Three steps of an optimizer of one's own: sums of the weights after each, and whether they have a history."""

    def update(grads: Any, opt: Any, main: Any, count: Any) -> Any:
        if kind == "the last weights are kept":
            return pytree.tree_map(lambda g, p: p - 0.1 * g, grads, main), main
        return pytree.tree_map(lambda g, p, m: p - 0.1 * (g + m), grads, main, opt), grads

    initial: Any = lambda main: pytree.tree_map(torch.zeros_like, main)  # noqa: E731
    spec = fsdp.Spec(fsdp.local_mesh())
    params, model = fsdp.functionalize(net(depth=1))
    teacher = net(depth=1)  # its weights require gradients, and nobody wants them
    state = fsdp.shard(params, spec, fsdp.Optimizer(initial, update))

    def train_step(state: fsdp.State, data: Any) -> Any:
        state, params = fsdp.unshard(state)
        with torch.no_grad() if way == "lanes" else nullcontext():
            wanted = teacher(data[0])
        grads = torch.func.grad(lambda p: (fsdp.bind(model, p)(data[0]) - wanted * 0.5).square().mean())(params)
        return fsdp.step(fsdp.reduce(state, grads)), 0

    step = compiled(way, train_step)[0] if way != "lanes" else train_step
    sums = []
    for i in range(3):
        state, _ = step(state, batch(i, dist.get_rank()))
        sums.append(sum(p.double().sum().item() for p in fsdp.full_params(state).values()))
    return sums, any(buffer.local.requires_grad for buffer in state.main.values())


@pytest.mark.parametrize("kind", [pytest.param("momentum", marks=pytest.mark.large), "the last weights are kept"])
def test_an_optimizer_of_ones_own_does_the_same(kind: str) -> None:
    for (eager, _), (traced, history) in zip(*(few(descended, way, kind) for way in ("lanes", "eager")), strict=True):
        assert traced == pytest.approx(eager, rel=1e-12)
        assert not history
