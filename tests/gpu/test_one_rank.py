"""One rank on a GPU: sharded weights are lent as they are stored, and gradients are written where they stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("fresh_workers")]

RANKS, WIDTH, LAYERS, STEPS = 1, 512, 6, 12


def made() -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False))
                for _ in range(LAYERS)
            )
        )


def batch(step: int) -> torch.Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.roll(1, -1)).square().mean()


def trained(way: str, schedule: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], bool]:
    """Losses, the last weights, and whether what is lent is the state's own."""
    params, skeleton = fsdp.functionalize(made())
    spec = fsdp.Spec(fsdp.local_mesh(), schedule=fsdp.Schedule(**schedule))
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-3, weight_decay=0.01))
    del params
    forward_backward = T.forward_backward(skeleton, loss_fn)

    def train_step(state: fsdp.State, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        for last in (False, True):  # of two microbatches the second is added
            state, loss = forward_backward(state, x, last_microbatch=last)
        return fsdp.step(state), loss

    run: Any = T.cuda_graph(train_step) if way == "graph" else train_step
    losses = []
    for step in range(STEPS):
        state, loss = run(state, batch(step))
        losses.append(loss.clone())
    torch.cuda.synchronize()
    state, lent = fsdp.unshard(state, "0")
    own = {buffer.local.untyped_storage().data_ptr() for buffer in state.main.values()}
    same = all(weight.untyped_storage().data_ptr() in own for weight in lent.values())
    state = fsdp.release(state, "0")
    return [*map(float, losses)], {path: p.cpu() for path, p in fsdp.full_params(state).items()}, same


def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    losses = []
    for step in range(STEPS):
        for _ in range(2):
            loss = loss_fn(model, batch(step))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {path: p.detach().cpu() for path, p in model.named_parameters()}


@pytest.mark.parametrize("way", ["eager", "graph"])
@pytest.mark.parametrize("schedule", [{}, {"overlap_update": True}, {"debug": True}], ids=str)
def test_steps_are_the_plain_modules(way: str, schedule: dict[str, Any]) -> None:
    ((losses, weights, own),) = launch(trained, (way, schedule), nprocs=1)
    ((expected, theirs),) = launch(plain, nprocs=1)
    assert losses == pytest.approx(expected, rel=1e-4)
    for path, weight in theirs.items():
        torch.testing.assert_close(weights[path], weight, rtol=0, atol=2e-4)
    assert own is not bool(schedule.get("debug"))  # there a copy is lent, which is poisoned afterwards
