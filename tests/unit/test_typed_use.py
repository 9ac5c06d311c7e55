"""A user's strict type check sees States and tensors: mypy reads this file, and these functions run, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from typing_extensions import assert_type

import functional_fsdp as fsdp
from functional_fsdp import State
from functional_fsdp import transforms as T

X = torch.ones(4, 3)


def loss_fn(model: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def linear(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, w["weight"], w["bias"])


def with_aux(model: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return loss_fn(model, x), 3


def made() -> tuple[State, nn.Linear]:
    mesh = fsdp.local_mesh()
    made = fsdp.init(lambda: nn.Linear(3, 3), fsdp.Spec(mesh), fsdp.adamw(lr=1e-2))
    return assert_type(made, tuple[State, nn.Linear])


def test_a_train_step_is_typed() -> None:
    state, model = made()
    forward_backward = T.forward_backward(model, loss_fn)
    before, loss = forward_backward(state, X, last_microbatch=True)
    assert_type(loss, torch.Tensor)
    state, norm = T.clip_by_global_norm(before, 1.0)
    state = assert_type(fsdp.step(state), State)
    state, mean = fsdp.pmean(state, loss)
    state, rows = fsdp.psum(state, 3)
    assert mean.item() == loss.item()
    assert rows.item() == 3
    assert state.steps == 1
    assert_type(mean, torch.Tensor)
    assert_type(rows, torch.Tensor)
    assert assert_type(norm, torch.Tensor) > 0


def test_what_a_loss_function_returns_beside_its_loss_is_typed() -> None:
    state, model = made()
    state, (loss, number) = T.forward_backward(model, with_aux, has_aux=True)(state, X)
    assert_type(number, int)
    state = fsdp.step(state)
    accumulated = T.accumulate(T.forward_backward(model, with_aux, has_aux=True), 2)
    state, (loss, numbers) = accumulated(state, X)
    assert assert_type(numbers, list[int]) == [3, 3]
    state = fsdp.step(state)
    state, loss = T.accumulate(T.forward_backward(model, loss_fn), 2)(state, X)
    assert assert_type(loss, torch.Tensor).isfinite()


def test_what_is_computed_with_a_model_is_typed() -> None:
    state, model = made()
    state, loss = T.apply(model, loss_fn)(state, X)
    assert assert_type(loss, torch.Tensor).isfinite()
    weights = fsdp.full_params(state)
    out, pullback = T.vjp(linear, weights, X)
    assert assert_type(out, torch.Tensor).shape == (4, 3)
    assert pullback(weights, torch.ones_like(out))[0]["bias"].tolist() == [4, 4, 4]


def test_transforms_of_a_step_keep_its_type() -> None:
    state, model = made()
    forward_backward = T.forward_backward(model, loss_fn)

    def train_step(state: State, x: torch.Tensor) -> tuple[State, torch.Tensor]:
        state, loss = forward_backward(state, x)
        return fsdp.step(state), loss

    graphed: Callable[[State, torch.Tensor], tuple[State, torch.Tensor]] = T.cuda_graph(train_step)
    compiled: Callable[[State, torch.Tensor], tuple[State, torch.Tensor]] = T.compile(train_step)
    assert callable(graphed)
    assert callable(compiled)
    fields: list[dict[str, Any]] = [state.main, state.weights, state.grads, state.buffers, state.extras]
    assert [*map(bool, fields)] == [True, False, False, False, False]
