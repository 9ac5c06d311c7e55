"""Fingerprints on GPUs: a graph has those of eager steps, and what is planted is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from gpu.machine import RANKS
from support.problems import mesh_and_placement

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("exact_workers")]

WIDTH, STEPS = 256, 9


class Layer(nn.Module):
    def __init__(self, planted: str) -> None:
        super().__init__()
        self.linear, self.dropout, self.planted = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), planted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.planted == "seed" and dist.get_rank() == 1:
            torch.cuda.manual_seed(3)
        out: torch.Tensor = self.dropout(torch.tanh(self.linear(x)))
        return out * (1 + 2**-6) if self.planted == "forward" else out


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def run(preset: str = "zero3", graphed: bool = False, planted: str = "") -> fsdp.Prints:
    mesh, placement = mesh_and_placement(preset)
    wire = torch.bfloat16 if planted == "wire" else torch.float32
    spec = fsdp.Spec(mesh, placement, precision=fsdp.Precision(wire=wire))

    def make() -> nn.Module:
        return nn.Sequential(*(Layer(planted if i == 1 else "") for i in range(3)))

    state, model = fsdp.init(make, spec, fsdp.adamw(lr=1.05e-3 if planted == "rate" else 1e-3), seed=0)
    forward_backward = T.forward_backward(model, loss_of)

    def train_step(state: fsdp.State, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, x)
        return fsdp.step(state), loss

    step = fsdp.fingerprint(T.cuda_graph(train_step) if graphed else train_step)
    rank = dist.get_rank()
    for i in range(STEPS):
        drawn = torch.Generator().manual_seed(1000 * i + (rank if planted != "batch" or i != 4 else 1 - rank))
        state, _ = step(state, torch.randn(32, WIDTH, generator=drawn).to(mesh.device_type))
    return step.prints


def launched(**settings: Any) -> fsdp.Prints:
    return launch(run, (), settings, nprocs=RANKS)[0]


@pytest.fixture(scope="module")
def plain(exact_workers: None) -> fsdp.Prints:
    return launched()


def test_equal_runs_have_no_difference(plain: fsdp.Prints) -> None:
    found = fsdp.compare(plain, launched())
    assert found.exact
    assert found.first is None, repr(found)


def test_a_graph_is_compared_with_eager_steps(plain: fsdp.Prints) -> None:
    graph = launched(graphed=True)
    replayed = {key.kind for key in graph.steps[-1].rows}
    assert {"input", "main", "update", "result"} <= replayed
    assert "gradient" not in replayed  # no Python ran
    found = fsdp.compare(plain, graph)
    assert found.first is None, repr(found)
    found = fsdp.compare(plain, launched(graphed=True, planted="rate"))
    assert found.first is not None
    assert (found.first.cls, found.first.kind, found.first.step) == ("optimizer", "update", 0)


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2"])
def test_strategies_are_alike(plain: fsdp.Prints, preset: str) -> None:
    found = fsdp.compare(plain, launched(preset=preset), exact=False)
    assert found.first is None, repr(found)


@pytest.mark.parametrize(
    ("planted", "want"),
    [
        ("batch", ("inputs", "input", "", 4)),
        ("forward", ("compute", "output", "1", 0)),
        ("seed", ("dropout", "output", "1", 0)),
        ("wire", ("order of a sum", "reduced", "0", 0)),
        ("rate", ("optimizer", "update", "0", 0)),
    ],
)
def test_what_is_planted_is_found(plain: fsdp.Prints, planted: str, want: tuple[str, str, str, int]) -> None:
    first = fsdp.compare(plain, launched(planted=planted)).first
    assert first is not None
    assert (first.cls, first.kind, first.unit, first.step) == want, repr(first)
    if planted in ("batch", "seed"):
        assert first.ranks == ((0, 1) if planted == "batch" else (1,))
