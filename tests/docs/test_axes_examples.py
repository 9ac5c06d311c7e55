"""Examples of models along axes of their own, beside the models that are not cut, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import context_parallel
import expert_parallel
import pipeline
import pytest
import tensor_parallel
import torch
from support.commands import EXAMPLES

from functional_fsdp import launch

Tree = dict[str, torch.Tensor]
D = torch.float64
STEPS = [2, pytest.param(20, marks=pytest.mark.large)]
NAMES = ("tensor_parallel.py", "context_parallel.py", "expert_parallel.py", "pipeline.py")


@cache
def whole(main: Callable[..., Any], args: tuple[Any, ...], ranks: int) -> tuple[list[float], Tree]:
    """Losses and weights of the model that is not cut, or less."""
    return launch(main, args, nprocs=ranks, simulate=True)[0]


def alike(found: list[Any], losses: list[float], weights: Tree) -> None:
    for seen, whole in found:
        assert seen == pytest.approx(losses, abs=1e-9)
        for name, weight in weights.items():
            torch.testing.assert_close(whole[name], weight, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= 120


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.large)])
def test_tensor_parallel(ranks: int, steps: int) -> None:
    """tp 2 and 4, beside tp 1."""
    right = whole(tensor_parallel.main, (steps, 2, D), 2)
    alike(launch(tensor_parallel.main, (steps, 2, D), nprocs=ranks, simulate=True), *right)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("how", ["ring", "ulysses"])
def test_context_parallel(how: str, steps: int) -> None:
    """cp 2 and 4 by either way, beside plain attention on one rank of each row."""
    for rows in (2, 1):
        right = whole(context_parallel.main, (steps, "ulysses", rows, D), rows)
        alike(launch(context_parallel.main, (steps, how, rows, D), nprocs=4, simulate=True), *right)


@pytest.mark.parametrize("steps", STEPS)
def test_expert_parallel(steps: int) -> None:
    """data 2 × ep 2, and data 1 × ep 4, beside all experts on every one of 4 ranks."""
    right = whole(expert_parallel.main, (steps, 4, D), 4)
    for rows in (2, 1):
        alike(launch(expert_parallel.main, (steps, rows, D), nprocs=4, simulate=True), *right)


def plain_stages(steps: int, data: int) -> tuple[list[float], list[Tree]]:
    torch.manual_seed(0)
    stages = [pipeline.Stage(0).to(D), pipeline.Stage(1).to(D)]
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=1e-2)
    losses = []
    for step in range(steps):
        total = torch.zeros((), dtype=D)
        for rank in range(data):
            generator = torch.Generator().manual_seed(100 * step + rank)
            shape = pipeline.MICRO, 2, pipeline.LENGTH + 1
            drawn = torch.randint(0, pipeline.VOCAB // 4, shape, generator=generator).cumsum(2) % pipeline.VOCAB
            for window in drawn:
                h = stages[0](window[:, :-1])
                total = total + pipeline.loss_fn(stages[1], h, window[:, 1:]) / pipeline.MICRO / data
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses, [{name: p.detach() for name, p in stage.named_parameters()} for stage in stages]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("simulated", [True, False])
def test_pipeline(simulated: bool, steps: int) -> None:
    losses, weights = plain_stages(steps, 2)
    found = launch(pipeline.main, (steps, D), nprocs=4, simulate=simulated)
    alike([(losses, whole) for _, whole in found[:2]], losses, weights[0])
    alike(found[2:], losses, weights[1])


@pytest.mark.large  # `make test` has the pipeline's
@pytest.mark.parametrize("example", [tensor_parallel, expert_parallel], ids=lambda example: example.__name__)
def test_on_processes(example: Any) -> None:
    alike(launch(example.main, (2, 2, D), nprocs=4), *whole(example.main, (2, 2, D), 4))
