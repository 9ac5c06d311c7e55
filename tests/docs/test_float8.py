"""Float8 linears of torchao, emulated: sharded as they are, beside the same ones in a plain module."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import float8
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.chains import Chain
from support.commands import TORCHAO
from support.problems import mesh_and_placement

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T

STEPS, RANKS = 3, 2


def net() -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(3))
    return Chain(nn.Linear(16, 32), blocks)


def made(float8s: bool = True) -> nn.Module:
    torch.manual_seed(0)
    if not float8s:
        return net()
    with patch.object(sys, "path", [*sys.path, str(TORCHAO)]):
        return float8.converted(net(), emulate=True)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() - torch.sin(x).repeat(1, 2)).square().mean()


def sharded(preset: str, compile: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    mesh, placement = mesh_and_placement(preset)
    params, skeleton = fsdp.functionalize(made())
    state = fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.sgd(lr=0.05))
    forward_backward, losses = T.forward_backward(skeleton, loss_fn, compile=compile), []
    for step in range(STEPS):
        state, loss = forward_backward(state, batch(step, dist.get_rank()))
        state = fsdp.step(state)
        losses.append(loss.item())
    return losses, fsdp.full_params(state)


def plain() -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """The losses of each rank's batches, and the weights after steps on the mean of the gradients."""
    model, losses = made(), []
    for step in range(STEPS):
        found = [loss_fn(model, batch(step, rank)) for rank in range(RANKS)]
        grads = [torch.autograd.grad(loss, [*model.parameters()]) for loss in found]
        losses.append([loss.item() for loss in found])
        with torch.no_grad():
            for p, *summands in zip(model.parameters(), *grads, strict=True):
                p -= 0.05 * torch.stack(summands).mean(0)
    return [*map(list, zip(*losses, strict=True))], dict(model.named_parameters())


@pytest.mark.parametrize(
    ("preset", "compile"),
    [pytest.param("zero3", False, marks=pytest.mark.large), ("zero2", False), ("zero3", {"backend": "aot_eager"})],
)
def test_sharded_as_in_a_plain_module(preset: str, compile: Any) -> None:
    losses, weights = plain()
    for rank, (found, theirs) in enumerate(launch(sharded, (preset, compile), nprocs=RANKS)):
        assert found == pytest.approx(losses[rank], rel=1e-5)
        for path, weight in weights.items():
            torch.testing.assert_close(theirs[path], weight.detach(), rtol=1e-5, atol=1e-6)


def test_only_these_parts_multiply_in_float8() -> None:
    kinds = {path: type(part).__name__ for path, part in made().named_modules() if isinstance(part, nn.Linear)}
    assert {path for path, kind in kinds.items() if kind == "Float8Linear"} == {p for p in kinds if p != "inp"}
    narrow = {path for path, precision in float8.gathered(made()).items() if precision.gather is not None}
    assert narrow == {f"{path}.weight" for path, kind in kinds.items() if kind == "Float8Linear"}
    x = batch(0, 0)
    exact, found = loss_fn(made(False), x).item(), loss_fn(made(), x).item()
    assert exact != found
    assert found == pytest.approx(exact, rel=1e-2)


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="exceptions have notes from Python 3.11 on")
def test_a_batch_of_no_rows_is_torchaos_own_error() -> None:
    """The module refuses it by itself; in a driven step the error says where it was, and the state goes on."""
    params, skeleton = fsdp.functionalize(made())
    with pytest.raises(RuntimeError, match=r"numel\(\) == 0"):
        fsdp.bind(skeleton, params)(torch.randn(0, 16))
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.05))
    forward_backward = T.forward_backward(skeleton, loss_fn)
    with pytest.raises(RuntimeError, match=r"numel\(\) == 0") as caught:
        forward_backward(state, torch.randn(0, 16))
    assert caught.value.__notes__ == ["In the module 'blocks.0', called with float32 [0, 32]."]
    state, loss = forward_backward(fsdp.drop_gradients(state), batch(0, 0))
    assert loss > 0
    assert fsdp.step(state).steps == 1
