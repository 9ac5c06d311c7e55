"""Gradients that are not finite, found before the reduction: the rank, unit and leaf whose gradient was bad."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.problems import batch, loss_fn, mesh_and_placement, net
from support.ranks import each_rank

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

UNIT, LEAF, RANK = "blocks.1", "blocks.1.up.weight", 1


class Bad(torch.autograd.Function):
    """The same numbers; of its gradient two elements are not finite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> torch.Tensor:
        dx = dx.clone()
        dx.view(-1)[0], dx.view(-1)[3] = float("nan"), float("inf")
        return dx


class Wrong(torch.nn.Linear):
    """The gradient of its weight is bad on one rank, and no other gradient."""

    broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bad = self.broken and dist.get_rank() == RANK
        return torch.nn.functional.linear(x, Bad.apply(self.weight) if bad else self.weight, self.bias)


def module() -> Any:
    made: Any = net()
    old = made.blocks[1].up
    made.blocks[1].up = Wrong(old.in_features, old.out_features).double()
    made.blocks[1].up.load_state_dict(old.state_dict())
    return made


def begin(preset: str) -> tuple[fsdp.State, Any]:
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(module())
    return fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.sgd(lr=0.1)), model


@pytest.mark.parametrize("second_order", [False, True])
@pytest.mark.parametrize("preset", ["zero3", "ddp"])
@each_rank(2)
def test_the_rank_whose_gradient_was_bad_is_named(preset: str, second_order: bool) -> None:
    state, model = begin(preset)
    data = batch(0, dist.get_rank())
    model.blocks[1].up.broken = True
    looking = T.forward_backward(model, loss_fn, find_nonfinite=True, second_order=second_order)
    said = f"before the reduction: rank {RANK}, unit '{UNIT}', leaf '{LEAF}': 2 elements"
    with pytest.raises(T.NonfiniteError, match=said) as caught:
        looking(state, data)
    assert caught.value.found == [T.Nonfinite(LEAF, UNIT, RANK, 2)]
    assert pickle.loads(pickle.dumps(caught.value)).found == caught.value.found
    model.blocks[1].up.broken = False
    looking = T.forward_backward(model, loss_fn, find_nonfinite=True, second_order=second_order)
    plain = T.forward_backward(model, loss_fn, second_order=second_order)
    middle, _ = looking(state, data)  # the state before the step is valid, and nothing is found
    seen = fsdp.full_params(fsdp.step(middle))
    other = fsdp.full_params(fsdp.step(plain(begin(preset)[0], data)[0]))
    assert all(torch.equal(seen[path], other[path]) for path in seen)


@pytest.mark.parametrize("preset", ["zero3", "zero1"])
@each_rank(2)
def test_gradients_by_hand_and_reduced_ones(preset: str) -> None:
    state, params = fsdp.unshard(begin(preset)[0])
    grads = {path: torch.ones_like(p) for path, p in params.items()}
    if dist.get_rank() == RANK:
        grads[LEAF].view(-1)[5] = float("inf")
    state, whole = T.find_nonfinite(state, grads)
    part = {path.removeprefix(f"{UNIT}."): g for path, g in grads.items() if path.startswith(f"{UNIT}.")}
    state, unit = T.find_nonfinite(state, part, UNIT)
    assert whole == unit == [T.Nonfinite(LEAF, UNIT, RANK, 1)]
    with pytest.raises(fsdp.ScheduleError, match="there is no unit 'nothing'"):
        T.find_nonfinite(state, part, "nothing")
    with pytest.raises(fsdp.TreeError, match="the gradient tree has another structure"):
        T.find_nonfinite(state, part)
    state, reduced = T.find_nonfinite(fsdp.reduce(state, grads))
    # of the rank whose shard it is: the first elements of the unit
    assert [(one.leaf, one.elements, one.rank) for one in reduced] == [(LEAF, 1, 0)]
