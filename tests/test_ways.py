"""One state, every way: eager and compiled steps follow each other, and nothing is converted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from problems import LOOPS, batch, mesh_and_placement, net
from traced import PRESETS, Counted

import functional_fsdp as fsdp
from functional_fsdp import StaleStateError, launch
from functional_fsdp import transforms as T

TURNS = ("eager", "compiled", "T", "eager", "T", "T", "compiled", "compiled", "eager", "eager", "compiled", "T")


def problem(preset: str, loop: str) -> tuple[fsdp.State, Any]:
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net(torch.float64, 2))
    state = fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.adamw(lr=1e-2, weight_decay=0.1))

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
    backend = Counted("aot_eager")
    ways = {"eager": train_step, "compiled": torch.compile(train_step, fullgraph=True, backend=backend)}
    ways["T"] = T.compile(train_step, "aot_eager")
    seen, graphs = [], []
    for i, way in enumerate(turns):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        old = state
        state, loss = ways[way](state, [batch(i, dist.get_rank(), k) for k in range(2)])
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
        seen.append((loss.item(), state.steps if i % 3 else i + 1, state.between_steps, old.between_steps))
        if i % 4 == 1:
            with pytest.raises(StaleStateError, match="was consumed by"):
                ways[turns[(i + 1) % len(turns)]](old, [batch(0, 0, 0)] * 2)
            with pytest.raises(StaleStateError, match="was consumed by"):
                fsdp.unshard(old)
    return seen, fsdp.full_params(state), graphs, backend.count


@pytest.mark.parametrize("loop", ["whole", "by_unit"])
@pytest.mark.parametrize("preset", PRESETS)
def test_eager_and_compiled_steps_follow_each_other(preset: str, loop: str) -> None:
    ranks = 4 if preset in ("hsdp", "hfsdp") else 2
    plain = launch(alternated, ranks, preset, loop, ("eager",) * len(TURNS))
    for (seen, weights, graphs, count), (expected, right, none, _) in zip(
        launch(alternated, ranks, preset, loop, TURNS), plain, strict=True
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
