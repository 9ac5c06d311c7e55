"""Arguments of another kind than is asked for: an error that says what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import functional_fsdp as fsdp
from functional_fsdp import transforms as T


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


params: Any
model: Any
params, model = fsdp.functionalize(nn.Linear(2, 2))
sizes: Any = {"data": 2}
wrong: Any = (["*bias"], {"*": 3}, None, 1.5, torch.tensor(3.0))
hidden, head = torch.randn(3, 4), torch.randn(5, 4)

CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a class": (lambda state: fsdp.functionalize(nn.Linear), "a model: expected a module, as Net.., and got the class"),
    "a state": (lambda state: T.forward_backward(state, loss_fn), "expected a module, .* and got a State"),
    "apply": (lambda state: T.apply(params, loss_fn), "expected a module, .* and got a dict"),
    "bind": (lambda state: fsdp.bind(params, model), r"bind\(model, weights\): expected a module, .* and got a dict"),
    "as_module": (lambda state: fsdp.as_module(state, model), "expected a module, .* and got a State"),
    "no weights": (lambda state: fsdp.as_module(model, model), "expected a State, or {path: tensor}"),
    "buffers": (lambda state: fsdp.buffers(state), r"buffers\(module\): expected a module, .* and got a State"),
    "units": (lambda state: fsdp.units(params, nn.Linear), "expected a module, .* and got a dict"),
    "make_layout": (
        lambda state: fsdp.make_layout(params, sizes),
        "make_layout: spec is a dict; expected a Spec",
    ),
    "make_plan": (
        lambda state: fsdp.make_plan(state),
        "expected what make_layout gives, or state.layout, and got a State",
    ),
    "step_memory": (lambda state: T.step_memory(model, state), "expected what T.forward_backward.* and got a Linear"),
    "no seed": (lambda state: fsdp.shard(params, state.spec, seed=wrong[2]), "seed=None: expected a whole number"),
    "half a seed": (lambda state: fsdp.init(lambda: nn.Linear(2, 2), state.spec, seed=wrong[3]), "seed=1.5: expected"),
    "a long seed": (lambda state: fsdp.shard(params, state.spec, seed=2**63), r"from -2\*\*63 to 2\*\*63 - 1"),
    "a tensor": (lambda state: fsdp.shard(params, state.spec, seed=wrong[4]), r"seed=tensor\(3.\): expected a whole"),
    "a list": (lambda state: fsdp.Spec(sizes, trainable=wrong[0]), r"Spec\(trainable=.*expected {pattern: bool}"),
    "a number": (lambda state: fsdp.Spec(sizes, labels=wrong[1]), r"Spec\(labels=.*expected {pattern: str}"),
    "labels": (
        lambda state: T.linear_cross_entropy(hidden, head, torch.rand(3)),
        "labels are torch.float32; expected int",
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_is_of_another_kind_is_named(call: str) -> None:
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.sgd(lr=0.1))
    function, said = CALLS[call]
    with pytest.raises((fsdp.TreeError, fsdp.SpecError), match=said):
        function(state)


def test_labels_of_any_integers_and_one_token_alone() -> None:
    small = torch.tensor([0, 255, 4], dtype=torch.uint8)
    found = T.linear_cross_entropy(hidden, head, small, ignore_index=255)
    torch.testing.assert_close(found, F.cross_entropy(hidden @ head.T, small.long(), ignore_index=255))
    one = T.linear_cross_entropy(hidden[0], head, torch.tensor(3))
    torch.testing.assert_close(one, F.cross_entropy(hidden[0] @ head.T, torch.tensor(3)))
