"""What lies outside of a state: it neither changes with it, nor trains, and that is said."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn

import functional_fsdp as fsdp
from functional_fsdp import extend
from functional_fsdp import transforms as T

X = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def begin() -> tuple[fsdp.State, Any]:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()

    return fsdp.init(make, fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.sgd(lr=0.1), seed=0)


@pytest.mark.parametrize("second_order", [False, True])
def test_parameters_of_another_module_are_warned_of_once(second_order: bool) -> None:
    criterion = nn.Linear(1, 1).double()
    state, model = begin()
    forward_backward = T.forward_backward(model, lambda m, x: criterion(m(x)).mean(), second_order=second_order)
    with pytest.warns(UserWarning, match=r"parameters that are not the model's \(2, as one of shape \(1"):
        state, _ = forward_backward(state, X)
    state = fsdp.step(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward_backward(state, X)


def test_what_needs_no_gradient_is_not_warned_of() -> None:
    teacher = nn.Linear(4, 1).double()
    state, model = begin()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        T.forward_backward(model, lambda m, x: (m(x) - teacher(x).detach()).square().mean())(state, X.clone())


def test_a_loss_of_many_operations_is_freed() -> None:
    """Nodes that Python has seen are freed by recursion: a walk over all of these would end the process."""

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        y = scale * model(x).mean()
        for _ in range(60_000):
            y = y + 0.0
        return nearest * y

    scale, nearest = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(()))
    state, model = begin()
    with pytest.warns(UserWarning, match=r"not the model's \(1, as one of shape \(\)"):
        state, loss = T.forward_backward(model, lambda m, x: loss_fn(m, x).sum())(state, X)
    assert loss.isfinite()


def test_a_forward_by_hand_changes_no_buffers_of_a_state() -> None:
    state, model = begin()
    state = extend.evolve(state, buffers=fsdp.buffers(model))
    before = {path: held.clone() for path, held in state.buffers.items()}
    _, weights = fsdp.unshard(state)  # a step that is dropped
    T.vjp(lambda w, x: fsdp.bind(model, w)(x).mean(), weights, X)
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    assert all(torch.equal(state.buffers[path], held) for path, held in before.items())
