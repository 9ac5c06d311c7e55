"""Examples of derivatives, beside plain torch in float64, on two ranks: a fixed point, influence, natural gradients."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T

sys.path.append(str(Path(__file__).parents[2] / "examples"))
RANKS = 2
Batch = tuple[torch.Tensor, torch.Tensor]


def batch(seed: int, rank: int, rows: int = 6) -> Batch:
    draws = torch.Generator().manual_seed(10 * seed + rank)
    x = torch.randn(rows, 4, generator=draws, dtype=torch.float64)
    return x, torch.randn(rows, 2, generator=draws, dtype=torch.float64)


class Equilibrium(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.inp, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.double()

    def cell(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(0.5 * self.mix(z) + self.inp(x))


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def started(module: nn.Module, lr: float = 0.1) -> tuple[fsdp.State, nn.Module]:
    params, model = fsdp.functionalize(module)
    return fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=lr)), model


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def dense(module: nn.Module, fn: Any) -> Any:
    """`fn` of a module, as a function of its weights in one vector."""
    sizes = [p.numel() for p in module.parameters()]
    names = [name for name, _ in module.named_parameters()]
    shapes = [p.shape for p in module.parameters()]

    def of(vector: torch.Tensor) -> Any:
        parts = zip(names, vector.split(sizes), shapes, strict=True)
        params = {name: part.view(shape) for name, part, shape in parts}
        return fn(lambda *args: torch.func.functional_call(module, params, args))

    return of


def apart(state: fsdp.State, want: torch.Tensor) -> float:
    """How far the weights are from these."""
    got = torch.cat([p.flatten() for p in fsdp.full_params(state).values()])
    return float((got - want).abs().max())


# ---------------------------------------------------------------- a fixed point


def fixed_point() -> float:
    import equilibrium

    state, model = started(Equilibrium())
    forward_backward = T.forward_backward(model, equilibrium.loss_fn(steps=60))
    module = Equilibrium()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(2):
        state, _ = forward_backward(state, batch(step, dist.get_rank()))
        state = fsdp.step(state)
        optimizer.zero_grad()
        for rank in range(RANKS):  # through the iteration
            x, y = batch(step, rank)
            z = torch.zeros_like(x)
            for _ in range(60):
                z = module.cell(z, x)
            ((module.head(z) - y).square().mean() / RANKS).backward()
        optimizer.step()
    got = fsdp.full_params(state)
    return max(float((got[path] - p.detach()).abs().max()) for path, p in module.named_parameters())


def test_an_equilibrium_has_the_gradient_of_its_iteration() -> None:
    assert max(launch(fixed_point, nprocs=RANKS, simulate=True)) < 1e-9


# ---------------------------------------------------------------- curvature


def losses_of(model: Any, data: Batch) -> torch.Tensor:
    return (model(data[0]) - data[1]).square().mean(1)


def scores() -> float:
    import influence

    state, model = started(chain())
    scores_of = influence.influence(model, losses_of, steps=30, damping=1.0)
    rank = dist.get_rank()
    state, got = scores_of(state, batch(0, rank), batch(1, rank))
    module = chain()
    at = flat(module)

    def mean(seed: int) -> Any:
        every = [batch(seed, rank) for rank in range(RANKS)]
        return lambda call: sum(losses_of(call, data).mean() for data in every) / RANKS

    hessian = torch.func.hessian(dense(module, mean(0)))(at)
    slope = torch.func.grad(dense(module, mean(1)))(at)
    x = torch.linalg.solve(hessian + 1.0 * torch.eye(len(at), dtype=at.dtype), slope)
    own = batch(0, rank)
    each = torch.func.jacrev(dense(module, lambda call: losses_of(call, own)))(at)
    return float((got + each @ x).abs().max() / (each @ x).abs().max())


def test_influence_is_that_of_dense_matrices() -> None:
    assert max(launch(scores, nprocs=RANKS, simulate=True)) < 1e-9


def natural() -> float:
    import natural_gradient

    outputs_of = lambda model, data: model(data[0])  # noqa: E731
    loss_of = lambda out, batch: (out - batch[1]).square().mean()  # noqa: E731
    state, model = started(chain(), lr=0.3)
    gradients = natural_gradient.natural_gradient(model, outputs_of, loss_of, steps=40, damping=0.2)
    module = chain()
    at = flat(module)
    for step in range(2):
        state, _ = gradients(state, batch(step, dist.get_rank()))
        state = fsdp.step(state)
        matrix, slope = torch.zeros(len(at), len(at), dtype=at.dtype), torch.zeros_like(at)
        for rank in range(RANKS):
            data = batch(step, rank)
            jacobian = torch.func.jacrev(dense(module, lambda call, data=data: outputs_of(call, data)))(at)
            out = dense(module, lambda call, data=data: outputs_of(call, data))(at)
            bend = torch.func.hessian(lambda out, data=data: loss_of(out, data))(out)
            tall = jacobian.flatten(0, 1)
            matrix += tall.T @ bend.reshape(len(tall), len(tall)) @ tall / RANKS
            slope += torch.func.grad(lambda out, data=data: loss_of(out, data))(out).flatten() @ tall / RANKS
        at = at - 0.3 * torch.linalg.solve(matrix + 0.2 * torch.eye(len(at), dtype=at.dtype), slope)
    return apart(state, at)


def test_the_natural_gradient_is_that_of_dense_matrices() -> None:
    assert max(launch(natural, nprocs=RANKS, simulate=True)) < 1e-9


@pytest.mark.parametrize("name", ["conjugate_gradients", "derivatives", "equilibrium", "influence", "natural_gradient"])
def test_examples_are_short(name: str) -> None:
    assert len((Path(__file__).parents[2] / "examples" / f"{name}.py").read_text().splitlines()) <= 60
