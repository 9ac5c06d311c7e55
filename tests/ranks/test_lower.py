"""lower: a train step as a graph, from shapes alone. No process group, save where it is compared with what runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.problems import Stack, through_the_stack
from support.ranks import each_rank
from support.tables import each
from torch.utils.flop_counter import FlopCounterMode

import functional_fsdp as fsdp
from functional_fsdp import Precision, Schedule, Spec, StaleStateError

WIDTH, DEPTH, ROWS = 256, 5, 4
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes in float32; divides by 2 ranks × 128 elements
X = torch.empty(ROWS, WIDTH, device="meta")


def stack(
    ranks: Any = 2, placement: Any = None, optimizer: Any = None, width: int = WIDTH, depth: int = DEPTH, **spec: Any
) -> fsdp.State:
    with torch.device("meta"):
        params, _ = fsdp.functionalize(Stack(width, depth))
    mesh = ranks if isinstance(ranks, dict) else {"data": ranks}
    return fsdp.abstract_state(params, Spec(mesh, placement, **spec), optimizer or fsdp.sgd(lr=0.1))


def by_unit(state: fsdp.State, x: torch.Tensor) -> Any:
    state, loss = through_the_stack(state, x)
    return fsdp.step(state), loss


def whole(state: fsdp.State, x: torch.Tensor) -> Any:
    state, params = fsdp.unshard(state)

    def loss_fn(params: Any) -> torch.Tensor:
        h = x
        for i in range(DEPTH):
            h = torch.tanh(h @ params[f"layers.{i}.weight"].T + params[f"layers.{i}.bias"])
        return h.square().mean()

    grads, loss = torch.func.grad_and_value(loss_fn)(params)
    return fsdp.step(fsdp.reduce(state, grads)), loss


@pytest.mark.parametrize(("ranks", "recompute"), each([2, 4096], [True, False]))
def test_gathers_and_reductions_are_the_plans(ranks: int, recompute: bool) -> None:
    state = stack(ranks)
    lowered = fsdp.lower(by_unit, state, X, recompute=recompute)
    plan = fsdp.make_plan(state.layout)
    kinds = [(one.kind, one.lane, one.axis) for one in lowered.collectives]
    assert kinds.count(("all_gather", "gather", "data")) == len(plan.gathers) == 2 * DEPTH - 1
    assert kinds.count(("reduce_scatter", "reduce", "data")) == len(plan.reductions) == DEPTH
    assert len(kinds) == 3 * DEPTH - 1
    elements = next(iter(state.layout.buckets.values())).numel
    sizes = {(one.numel, one.nbytes, one.dtype) for one in lowered.collectives}
    assert sizes == {(elements, 4 * elements, torch.float32)}
    assert lowered.cost_analysis().received == (3 * DEPTH - 1) * 4 * elements * (ranks - 1) // ranks


def test_the_next_gather_is_issued_before_this_one_is_waited_for() -> None:
    nodes = list(fsdp.lower(by_unit, stack(8), X).graph.graph.nodes)
    gathers = [node for node in nodes if "all_gather" in str(node.target)]
    waits = [next(iter(node.users)) for node in gathers]
    assert all("wait_tensor" in str(wait.target) for wait in waits)
    ahead = [nodes.index(after) < nodes.index(wait) for after, wait in zip(gathers[1:], waits, strict=False)]
    assert ahead == [k != DEPTH - 1 for k in range(2 * DEPTH - 2)]  # the last unit is used again at once: it waits
    reductions = [node for node in nodes if "reduce_scatter" in str(node.target)]
    for node in reductions[:-1]:  # waited for after more compute: the next unit's backward
        between = nodes[nodes.index(node) : nodes.index(next(iter(node.users)))]
        assert any("mm" in str(other.target) for other in between)


@pytest.mark.parametrize("recompute", [True, False])
def test_weights_take_a_shard_and_two_layers(recompute: bool) -> None:
    """ZeRO-3: half of the full weights on 2 ranks, and two gathered layers; without the regathering pass it is all."""
    state = stack()
    memory = fsdp.lower(by_unit, state, X, recompute=recompute).memory_analysis()
    shards = state.layout.nbytes("main")
    assert shards == DEPTH * LAYER // 2
    assert memory.gathered == 2 * LAYER
    assert shards + memory.gathered <= DEPTH * LAYER // 2 + 2 * LAYER
    assert memory.arguments == shards + X.nbytes + 2 * 8  # and the count and the seed
    assert memory.peak == memory.arguments + memory.temporaries
    kept = stack(schedule=Schedule(keep="all"))
    assert fsdp.lower(by_unit, kept, X, recompute=recompute).memory_analysis().gathered >= (DEPTH - 1) * LAYER


def test_in_bfloat16_everything_beside_the_state_fits_into_half_of_the_weights_and_two_layers() -> None:
    state = stack(precision=Precision(compute=torch.bfloat16))
    memory = fsdp.lower(by_unit, state, X.bfloat16()).memory_analysis()
    assert memory.temporaries < DEPTH * LAYER // 2 + 2 * LAYER


def test_without_recomputation_a_step_has_the_operations_of_an_eager_one() -> None:
    state = stack()
    once = fsdp.lower(by_unit, state, X).cost_analysis().flops
    again = fsdp.lower(by_unit, state, X, recompute=True).cost_analysis().flops
    real, _ = fsdp.functionalize(Stack(WIDTH, DEPTH))
    eager = fsdp.shard(real, Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    with FlopCounterMode(display=False) as counter:
        by_unit(eager, torch.ones(ROWS, WIDTH))
    product = 2 * ROWS * WIDTH * WIDTH
    assert counter.get_total_flops() == 3 * DEPTH * product
    assert once == (3 * DEPTH - 1) * product  # the gradient of the batch, which nobody uses, is left out
    assert again == (4 * DEPTH - 1) * product


@pytest.mark.parametrize(
    ("preset", "gathers", "reductions"),
    [
        ("ddp", 0, "all_reduce"),
        ("zero2", DEPTH, "reduce_scatter"),
        pytest.param("zero1", DEPTH, "reduce_scatter", marks=pytest.mark.large),
    ],
)
def test_other_placements_gather_after_the_update_only(preset: str, gathers: int, reductions: str) -> None:
    state = stack(4, getattr(fsdp, preset)("data"))
    lowered = fsdp.lower(by_unit, state, X)
    assert [one.kind for one in lowered.collectives].count("all_gather") == gathers
    assert [one.kind for one in lowered.collectives].count(reductions) == DEPTH
    assert lowered.memory_analysis().gathered <= 1.01 * LAYER  # of a refresh, with padding


@pytest.mark.parametrize(("preset", "kind"), [("ddp", "all_reduce"), ("zero1", "reduce_scatter")])
def test_whole_gradients_travel_once_for_all_microbatches(preset: str, kind: str) -> None:
    def train_step(state: fsdp.State, x: torch.Tensor) -> Any:
        for k in range(3):
            state, params = fsdp.unshard(state)
            grads = torch.func.grad(lambda p: sum((x @ w.T).sum() for w in p.values() if w.dim() == 2))(params)
            state = fsdp.reduce(state, grads, last_microbatch=k == 2)
        return fsdp.step(state)

    kinds = [one.kind for one in fsdp.lower(train_step, stack(4, getattr(fsdp, preset)("data")), X).collectives]
    assert kinds.count(kind) == DEPTH


def test_a_value_of_several_parts_lives_part_by_part() -> None:
    def train_step(state: fsdp.State, x: torch.Tensor) -> Any:
        values, where = torch.topk(x, 1 << 18)
        state, params = fsdp.unshard(state)
        used = values.sum()  # the values are done with here; the places are needed to the end
        grads = torch.func.grad(lambda p: p["layers.0.bias"].sum() * used)(params)
        return fsdp.step(fsdp.reduce(state, grads)), where.sum()

    memory = fsdp.lower(train_step, stack(depth=1, width=8), torch.empty(1 << 20, device="meta")).memory_analysis()
    assert memory.temporaries < (4 + 8) * (1 << 18) + 8192


def test_two_axes_reduce_twice() -> None:
    state = stack({"replica": 4, "shard": 8}, fsdp.hsdp("replica", "shard"))
    lowered = fsdp.lower(by_unit, state, X)
    kinds = [(one.kind, one.lane, one.axis) for one in lowered.collectives]
    assert kinds.count(("reduce_scatter", "reduce", "shard")) == DEPTH
    assert kinds.count(("all_reduce", "outer", "replica")) == DEPTH
    assert kinds.count(("all_gather", "gather", "shard")) == 2 * DEPTH - 1


def test_an_exact_sum_is_an_all_to_all() -> None:
    state = stack(4, precision=Precision(compute=torch.bfloat16, sum="fp32"))
    lowered = fsdp.lower(by_unit, state, X.bfloat16())
    kinds = {(one.kind, one.dtype) for one in lowered.collectives if one.lane == "reduce"}
    assert kinds == {("all_to_all", torch.bfloat16)}


def test_labels_cut_buckets_as_they_do_where_it_runs() -> None:
    optimizer, labels = fsdp.adamw(lr={"bias": 0.1, "default": 0.2}), {"*bias": "bias"}
    state = stack({"replica": 2, "shard": 4}, fsdp.hsdp("replica", "shard"), optimizer, labels=labels)
    assert len(fsdp.lower(by_unit, state, X).collectives) == 4 * DEPTH - 1


def test_the_whole_tree_is_gathered_once() -> None:
    state = stack(8, fsdp.zero3("data"), fsdp.adamw())
    lowered = fsdp.lower(whole, state, X)
    assert [one.kind for one in lowered.collectives] == ["all_gather"] * DEPTH + ["reduce_scatter"] * DEPTH
    assert lowered.memory_analysis().gathered == sum(4 * b.numel for b in state.layout.buckets.values())


def test_printing_gives_a_table() -> None:
    state = stack(4096)
    text = repr(fsdp.lower(by_unit, state, X))
    assert text.startswith("a step on mesh data 4096: ")
    assert f"all_gather      gather  data  float32      {2 * DEPTH - 1:2}" in text
    assert "floating-point operations a rank" in text


def test_an_abstract_state_prints_and_has_no_memory() -> None:
    state = stack(4096, fsdp.zero2("data"), fsdp.adamw())
    assert repr(state).startswith(f"State of {DEPTH} units, {2 * DEPTH} leaves, mesh data 4096, step 0, between steps")
    tensors = [*state.main.values(), *state.weights.values(), *state.opt.mean.values()]
    assert {buffer.local.device.type for buffer in tensors} == {"meta"}
    assert next(iter(state.main.values())).local.numel() * 4096 == next(iter(state.layout.buckets.values())).numel


@each_rank(2)
def test_lowering_changes_nothing() -> None:
    """A real state can be lowered, and goes on as if nothing had happened."""
    params, _ = fsdp.functionalize(Stack(32, 2))
    state = fsdp.shard(params, Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    x = torch.ones(2, 32)
    before = [buffer.local.clone() for buffer in state.main.values()]
    lowered = fsdp.lower(by_unit, state, x)
    for old, buffer in zip(before, state.main.values(), strict=True):
        assert torch.equal(old, buffer.local)
    later, first = by_unit(state, x)
    with pytest.raises(StaleStateError):
        fsdp.lower(by_unit, state, x)
    begun = fsdp.unshard(later, later.units[0])[0]
    with pytest.raises(StaleStateError, match="lower: this State is in the middle of a step"):
        fsdp.lower(by_unit, begun, x)
    later = fsdp.release(begun, later.units[0])
    assert len(lowered.collectives) == 5
    assert by_unit(later, x)[1] < first
