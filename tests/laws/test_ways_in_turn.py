"""One state, every way: eager and compiled steps follow each other, and nothing is converted."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.presets import PRESETS, ranks_of
from support.problems import LOOPS, batch, loss_fn, mesh_and_placement, net
from support.tables import FULL, marked
from support.traced import BLOCKS, Counted

import functional_fsdp as fsdp
from functional_fsdp import StaleStateError, launch
from functional_fsdp import transforms as T

TURNS = ("eager", "compiled", "T", "eager", "T", "T", "compiled", "compiled", "eager", "eager", "compiled", "T")


def problem(preset: str, loop: str, transport: str = "collective") -> tuple[fsdp.State, Any]:
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net(torch.float64, BLOCKS if FULL else 0))  # `test_ways` has a block
    state = fsdp.shard(params, fsdp.Spec(mesh, placement, transport=transport), fsdp.adamw(lr=1e-2, weight_decay=0.1))

    def train_step(state: fsdp.State, batches: Any) -> Any:
        for k, data in enumerate(batches):
            state, loss = LOOPS[loop](model, state, data, k == len(batches) - 1)
        state, loss = fsdp.pmean(state, loss)
        return fsdp.step(state), loss

    return state, train_step


def alternated(preset: str, loop: str, turns: tuple[str, ...]) -> Any:
    """(loss, steps, how many were seen) of each step taken in these ways, the weights at the end, and how often it was
    compiled in each way."""
    state, train_step = problem(preset, loop)
    torch._dynamo.reset()
    backend = Counted("aot_eager" if FULL else "eager")
    ways = {"eager": train_step, "compiled": torch.compile(train_step, fullgraph=True, backend=backend)}
    ways["T"] = T.compile(train_step, "aot_eager")
    seen, graphs = [], []
    for i, way in enumerate(turns):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        old = state
        state, loss = ways[way](state, [batch(i, dist.get_rank(), k) for k in range(1 + FULL)])
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
        seen.append((loss.item(), state.steps if i % 3 else i + 1, state.between_steps, old.between_steps))
        if i % 4 == 1:
            with pytest.raises(StaleStateError, match="was consumed by"):
                ways[turns[(i + 1) % len(turns)]](old, [batch(0, 0, 0)] * (1 + FULL))
            with pytest.raises(StaleStateError, match="was consumed by"):
                fsdp.unshard(old)
    return seen, fsdp.full_params(state), graphs, backend.count


ROWS = [*product(PRESETS, LOOPS)]
FEW = [("zero3", "whole")]


@pytest.mark.parametrize(("preset", "loop"), marked(ROWS, FEW))
def test_eager_and_compiled_steps_follow_each_other(preset: str, loop: str) -> None:
    ranks = ranks_of(preset) if FULL else 1  # which trace the same; `counted` compiles on two
    plain = launch(alternated, (preset, loop, ("eager",) * len(TURNS)), nprocs=ranks)
    for (seen, weights, graphs, count), (expected, right, none, _) in zip(
        launch(alternated, (preset, loop, TURNS), nprocs=ranks), plain, strict=True
    ):
        assert (
            [one[1:] for one in seen]
            == [one[1:] for one in expected]
            == [(i + 1, True, False) for i in range(len(TURNS))]
        )
        torch.testing.assert_close([one[0] for one in seen], [one[0] for one in expected], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(weights, right, rtol=1e-9, atol=1e-11)
        assert sum(none) == 0
        assert count == 1
        assert sum(graphs) == 2  # one for torch.compile, one for T.compile


def given_back(transport: str) -> tuple[list[int], list[float]]:
    """Bytes that a transport keeps, after each step and once they are given back; and the losses."""
    state, train_step = problem("zero3", "by_unit", transport)
    kept, losses = [], []
    for i in range(3):
        state, loss = train_step(state, [batch(i, dist.get_rank(), 0)])
        losses.append(loss.item())
        kept.append(state.shared_bytes)
        state = fsdp.free_arena(state)
        kept.append(state.shared_bytes)
    return kept, losses


def test_memory_that_eager_steps_keep_is_given_back_and_made_again() -> None:
    plain = launch(given_back, ("collective",), nprocs=2)
    for (kept, losses), (none, expected) in zip(launch(given_back, ("copy_engine",), nprocs=2), plain, strict=True):
        assert none == [0] * 6
        assert kept[1::2] == [0] * 3
        assert min(kept[::2]) == max(kept[::2]) > 0
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)


def test_memory_is_given_back_between_steps() -> None:
    state, _ = problem("zero3", "by_unit")
    middle, _ = fsdp.unshard(state, state.units[0])
    with pytest.raises(StaleStateError, match="free_arena: this State is in the middle of a step"):
        fsdp.free_arena(middle)


def counted(turns: tuple[str, ...]) -> list[int]:
    """The steps after each turn, one of which is skipped."""
    state = fsdp.shard({"w": torch.ones(3)}, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=1.0))

    def train_step(state: fsdp.State, skip: torch.Tensor) -> fsdp.State:
        state, w = fsdp.unshard(state)
        return fsdp.step(fsdp.reduce(state, w), skip=skip)

    torch._dynamo.reset()
    ways = {"eager": train_step, "compiled": torch.compile(train_step, fullgraph=True, backend="eager")}
    seen = []
    for i, way in enumerate(turns):
        state = ways[way](state, torch.tensor(i == 1))
        if i != 1:
            seen.append(state.steps)
    assert int(state.count) == len(turns) - 1
    assert copy.deepcopy(state).steps == state.steps
    return seen


@pytest.mark.parametrize(
    "turns",
    [
        *(pytest.param((way,) * 4, marks=pytest.mark.large) for way in ("eager", "compiled")),
        ("compiled", "eager") * 2,
        ("eager", "compiled") * 2,
    ],
)
def test_steps_count_those_that_were_skipped(turns: tuple[str, ...]) -> None:
    ranks = 2 if FULL else 1  # which trace the same
    assert launch(counted, (turns,), nprocs=ranks) == [[1, 3, 4]] * ranks


def test_the_state_before_a_compiled_step_knows_that_it_was_consumed() -> None:
    torch._dynamo.reset()
    before = fsdp.shard({"w": torch.ones(3)}, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=1.0))
    resting = [before.between_steps]

    def train_step(state: fsdp.State) -> fsdp.State:
        state, w = fsdp.unshard(state)
        return fsdp.step(fsdp.reduce(state, w))

    step = torch.compile(train_step, fullgraph=True, backend="eager")
    after = step(before)
    assert [*resting, before.between_steps, after.between_steps] == [True, False, True]
    assert "consumed by a compiled step()" in repr(before)
    later = step(after)
    assert "consumed by a compiled step()" in repr(after)
    with pytest.raises(StaleStateError, match=r"consumed by a step\(\). Use the State that it returned"):
        step(before)
    with pytest.raises(StaleStateError, match=r"newest: the last step was one that torch.compile runs"):
        fsdp.newest(before)
    with pytest.raises(StaleStateError, match=r"Use the State that that call returned; to keep an old one"):
        fsdp.full_params(before)  # it does not say that newest has it
    assert later.steps == 2


def driven_and_lost() -> list[str]:
    """What old states say after a compiled step, which keeps nothing, as the first call after it."""
    params, model = fsdp.functionalize(net())
    old = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    forward_backward = T.forward_backward(model, loss_fn)

    def train_step(state: fsdp.State, data: Any) -> fsdp.State:
        return fsdp.step(forward_backward(state, data)[0])

    step = T.compile(train_step, backend="aot_eager")
    new = step(old, batch(0, 0))
    said = []
    for state in (old, new):
        with pytest.raises(StaleStateError) as caught:
            fsdp.newest(state)
        said.append(str(caught.value))
    return said


def test_newest_says_that_a_compiled_step_keeps_nothing() -> None:
    (found,) = launch(driven_and_lost, nprocs=1)
    for said in found:
        assert said.startswith("newest: the last step was one that torch.compile runs, which keeps nothing.")
