"""CUDA graphs of steps in which the host reads from the device, makes constants, or is asked about the stream."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from gpu.machine import deterministic, own_gpus

import functional_fsdp as fsdp
from functional_fsdp import Schedule, ScheduleError, Spec, launch
from functional_fsdp import transforms as T

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic matrix products
pytestmark = pytest.mark.timeout(200)
RANKS, WIDTH = 2, 64


class Block(nn.Module):
    """Reads a number of the batch's, and decides by it."""

    def __init__(self, reads: bool, constant: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.reads, self.constant = reads, constant

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        if self.reads:
            y = y * (1 + kind.max().item()) if kind.sum() > 0 else y - 0.1
            if torch.equal(kind, torch.zeros_like(kind)):
                y = y + 0.01 * len(kind.tolist())
        if self.constant:
            y = y + torch.tensor([0.1] * WIDTH, device=y.device)
            if torch.cuda.is_current_stream_capturing():
                raise AssertionError("this is a library, which is told what is true in warm-up")
        return x + y


class Net(nn.Module):
    def __init__(self, **block: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**block) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, kind)
        return self.head(x)


def loss_fn(model: Any, x: torch.Tensor, y: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x, kind), y)


def made(transport: Any, compile: Any = False, **block: bool) -> tuple[fsdp.State, Any]:
    spec = Spec(fsdp.local_mesh(), schedule=Schedule(overlap_update=True), transport=transport)
    state, model = fsdp.init(partial(Net, **block), spec, fsdp.adamw(lr=1e-2, weight_decay=0.1), seed=0)
    forward_backward = T.forward_backward(model, loss_fn, compile=compile)
    step = T.skip_nonfinite(fsdp.step)

    def train_step(state: fsdp.State, x: torch.Tensor, y: torch.Tensor, kind: torch.Tensor) -> Any:
        state, loss = forward_backward(state, x, y, kind)
        state, norm = T.clip_by_global_norm(state, 0.5)
        return step(state), loss, norm

    return state, train_step


def batch(step: int, kind: int) -> list[torch.Tensor]:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    return [t.cuda() for t in (x, x.sum(1, keepdim=True), torch.full((4,), kind))]


def look(state: fsdp.State) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves((state.main, state.opt, state.buffers, state.extras, state.count))
    return [leaf.detach().cpu().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def kinds(which: str, step: int) -> int:
    """What the batches of this rank say."""
    if which == "rises":  # now and then, on every rank
        return step // 15
    if which == "every tenth":
        return step // 10
    if which == "one rank's":  # now and then, on one of them
        return int(dist.get_rank() == 1 and step in (12, 13, 14, 25))
    return int(step % 7 == 6)  # "often"


@deterministic()
def trained(transport: Any, which: str, graph: bool, steps: int, compile: Any = False) -> Any:
    state, train_step = made(transport, compile, reads=True, constant=True)
    if graph:
        train_step = T.cuda_graph(train_step, host_reads="guard", graphs=16)
    seen = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(steps):
            x, y, kind = batch(i, kinds(which, i))
            if i == 16:
                y = y / 0  # a step that is skipped
            state, *rest = train_step(state, x, y, kind)
            seen.append(torch.stack(rest).cpu())
    texts = [str(one.message) for one in said if "cuda_graph" in str(one.message)]
    return seen, look(state), len(train_step.graphs) if graph else 0, texts, int(state.count), state.steps


def both(transport: Any, which: str, steps: int) -> tuple[Any, ...]:
    """Eagerly, and in graphs."""
    return tuple(trained(transport, which, graph, steps) for graph in (False, True))


@pytest.mark.parametrize("which", ["rises", "one rank's", "often"])
@pytest.mark.parametrize("transport", ["collective", "copy_engine"])
def test_a_guarded_step_is_the_eager_one_bit_for_bit(transport: str, which: str) -> None:
    steps = 60
    found = launch(both, (transport, which, steps), nprocs=RANKS)
    for (numbers, leaves, *_), (again, others, graphs, texts, count, taken) in found:
        for i, (a, b) in enumerate(zip(numbers, again, strict=True)):
            assert torch.equal(a, b) or i == 16
        assert all(torch.equal(a, b) for a, b in zip(leaves, others, strict=True))
        assert (count, taken) == (steps - 1, steps)
        assert graphs >= 1
        assert len(texts) == (which == "often"), texts
    if which == "often":
        assert "has changed 5 times in" in found[0][1][3][0]
    else:
        assert max(graphs for _, (_, _, graphs, *_) in found) == (4 if which == "rises" else 2)


def every_tenth() -> Any:
    return both("copy_engine", "every tenth", 100)


def test_what_changes_every_tenth_step_trains_to_the_eager_weights() -> None:
    for (_, leaves, *_), (_, others, graphs, texts, *_) in launch(every_tenth, nprocs=RANKS):
        assert all(torch.equal(a, b) for a, b in zip(leaves, others, strict=True))
        assert graphs >= 4
        assert len(texts) == 1  # the fifth change is one too many


def refused() -> dict[str, Any]:
    found: dict[str, Any] = {}
    state, train_step = made("collective", reads=True, constant=False)
    graphed = T.cuda_graph(train_step, warmup=2)
    for i in range(3):
        before = look(state)
        try:
            state = graphed(state, *batch(i, 0))[0]
        except ScheduleError as error:
            found["error"] = str(error)
    assert all(torch.equal(a, b) for a, b in zip(look(state), before, strict=True))
    state = train_step(state, *batch(3, 0))[0]

    def late(state: fsdp.State, *data: torch.Tensor) -> Any:
        state, loss, _ = train_step(state, *data)
        return state, loss * (data[2].sum().item() + 1)

    def changes(state: fsdp.State, *data: torch.Tensor) -> Any:
        return train_step(state, data[0] * (1 + 0 * data[0].sum().item()), *data[1:])

    for step in (late, changes):
        graphed = T.cuda_graph(step, warmup=2, host_reads="guard")
        for i in range(8):
            try:
                state = graphed(state, *batch(i, 0))[0]
            except ScheduleError as error:
                found[step.__name__] = str(error), i
                break
        state = train_step(state, *batch(9, 0))[0]
    return found


def test_what_is_not_guarded_is_an_error_with_the_innermost_line() -> None:
    for found in launch(refused, nprocs=RANKS):
        assert "if kind.sum() > 0 else" in found["error"]
        assert 'host_reads="guard"' in found["error"]
        assert "after step()" in found["late"][0]
        assert "data[2].sum().item()" in found["late"][0]
        assert "changes from step to step" in found["changes"][0]
        assert found["changes"][1] == 4


class WithSync(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.SyncBatchNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.linear(x)))


def of_sync_batch_norm(graph: bool) -> tuple[list[torch.Tensor], int]:
    spec = Spec(fsdp.local_mesh())
    state, model = fsdp.init(WithSync, spec, fsdp.sgd(lr=1e-2), seed=0)
    forward_backward = T.forward_backward(model, loss_fn)

    def train_step(state: fsdp.State, *data: torch.Tensor) -> Any:
        state, loss = forward_backward(state, *data)
        return fsdp.step(state), loss

    step = T.cuda_graph(train_step) if graph else train_step
    losses = []
    for i in range(7):
        state, loss = step(state, *batch(i, 0))
        losses.append(loss.cpu())
    return losses, len(step.graphs) if graph else 0  # type: ignore[attr-defined]


def test_torch_hears_the_truth_about_the_stream() -> None:
    """Its SyncBatchNorm picks by a mask, which waits for the device, where it hears "no"."""
    eager, graph = (launch(of_sync_batch_norm, (graph,), nprocs=RANKS) for graph in (False, True))
    for (mine, _), (theirs, graphs) in zip(eager, graph, strict=True):
        assert graphs == 1
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def drawing() -> list[str]:
    state, train_step = made("collective", reads=False, constant=False)

    def draws(state: fsdp.State, x: torch.Tensor, *rest: torch.Tensor) -> Any:
        return train_step(state, x * float(torch.rand(())), *rest)

    graphed = T.cuda_graph(draws, warmup=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(3):
            state = graphed(state, *batch(i, 0))[0]
    return [str(one.message) for one in said if "random" in str(one.message)]


def test_what_is_drawn_on_the_host_warns() -> None:
    for texts in launch(drawing, nprocs=RANKS):
        assert len(texts) == 1
        assert "x * float(torch.rand(()))" in texts[0]


def costs() -> dict[str, float]:
    """Milliseconds a step: a graph without reads with and without a guard, and one that reads."""
    found = {}
    for name, reads, guard in (
        ("plain", False, "error"),
        ("guard, no reads", False, "guard"),
        ("reads", True, "guard"),
    ):
        state, train_step = made("copy_engine", reads=reads, constant=False)
        step = T.cuda_graph(train_step, host_reads=guard)  # type: ignore[arg-type]
        data, times = batch(0, 0), []
        for i in range(60):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(5):
                state = step(state, *data)[0]
            torch.cuda.synchronize()
            if i >= 10:
                times.append((time.perf_counter() - start) * 200)
        found[name] = statistics.median(times)
    return found


@own_gpus
def test_graphs_without_reads_pay_nothing_and_guards_little() -> None:
    found = launch(costs, nprocs=RANKS)[0]
    print(found)
    assert found["guard, no reads"] < 1.1 * found["plain"] + 0.05
    assert found["reads"] < found["plain"] + 1.0  # milliseconds
