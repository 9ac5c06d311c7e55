"""`T.budget` on GPUs: what the caching allocator gave in a step is within the budget, eagerly and in a graph."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from benchmark_memory import GPT, Shape, loss_fn
from gpu.machine import RANKS

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("fresh_workers")]

SHAPE = Shape(1024, 12, 8, 4, 1024, vocab=16384)


def measured(share: float, moves: bool, graph: bool, compile: bool) -> tuple[int, int, dict[str, str], str]:
    """The budget, bytes that were taken beyond what there was before, the ways, and the choice as a table."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    spec = fsdp.Spec(fsdp.local_mesh(), precision=fsdp.Precision(compute=torch.bfloat16))
    state, model = fsdp.init(lambda: GPT(SHAPE), spec, fsdp.adamw(lr=1e-4), seed=0)
    tokens = torch.randint(0, SHAPE.vocab, (SHAPE.batch, SHAPE.seq + 1), device="cuda")
    plain = T.step_memory(T.forward_backward(model, loss_fn), state, tokens).peak
    forward_backward = T.forward_backward(T.budget(model, int(share * plain), moves=moves), loss_fn, compile=compile)

    def train_step(state: fsdp.State, tokens: torch.Tensor) -> Any:
        state, loss = forward_backward(state, tokens)
        return fsdp.step(state), loss

    step: Any = T.cuda_graph(train_step, warmup=2) if graph else train_step
    most = 0
    for i in range(5):
        if i == 3:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        state, _ = step(state, tokens)
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated() - before
    if graph:
        most = torch.cuda.memory_allocated() - before + max(one.peak for one in step.graphs.values())
    choice = forward_backward.choice
    return choice.nbytes, most + state.shared_bytes, choice.ways, repr(choice)


@pytest.mark.parametrize(
    ("share", "moves", "graph", "compile"),
    [
        (0.7, False, False, False), (0.6, False, False, False), (0.6, True, False, False), (0.6, False, True, False),
        (0.6, False, False, True), (0.6, True, True, True),
    ],
)  # fmt: skip
def test_a_step_takes_no_more_than_its_budget(share: float, moves: bool, graph: bool, compile: bool) -> None:
    found = launch(measured, (share, moves, graph, compile), nprocs=RANKS)
    assert all(ways == found[0][2] for _, _, ways, _ in found)
    for nbytes, taken, ways, table in found:
        print(f"{share}, moves {moves}, graph {graph}, compile {compile}")
        print(f"{nbytes / 2**20:.0f} MiB, taken {taken / 2**20:.0f}\n{table}")
        assert ways, table
        assert taken <= nbytes + (48 << 20), table  # cuBLAS's workspace, of which nobody asked here
