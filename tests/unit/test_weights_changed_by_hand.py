"""Steps by hand whose forward changes a weight in place: refused by name, whatever the placement, in both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

X = torch.arange(5)


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table = nn.Embedding(5, 4, max_norm=0.1 if how == "max_norm" else None)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            if self.how == "clamp":
                self.linear.weight.clamp_(-0.01, 0.01)
        return self.linear(self.table(x)).sum()


def begun(how: str, placement: str) -> tuple[fsdp.State, Any]:
    torch.manual_seed(0)
    params, model = fsdp.functionalize(Net(how))
    spec = fsdp.Spec(fsdp.local_mesh(), getattr(fsdp, placement)("data"), units=["table", "linear"])
    return fsdp.shard(params, spec, fsdp.sgd(lr=0.1)), model


def by_tree(state: fsdp.State, model: Any) -> fsdp.State:
    state, params = fsdp.unshard(state)
    grads, _ = torch.func.grad_and_value(lambda p: fsdp.bind(model, p)(X))(params)
    return fsdp.step(fsdp.reduce(state, grads))


def by_vjp(state: fsdp.State, model: Any) -> fsdp.State:
    state, params = fsdp.unshard(state)
    out, pullback = T.vjp(lambda p: fsdp.bind(model, p)(X), params)
    (grads,) = pullback(params, torch.ones_like(out))
    return fsdp.step(fsdp.reduce(state, grads))


def evaluated(state: fsdp.State, model: Any) -> fsdp.State:
    state, params = fsdp.unshard(state)
    fsdp.bind(model, params)(X)
    return fsdp.drop_gradients(state)


def by_unit(state: fsdp.State, model: Any) -> fsdp.State:
    def linear(w: Any, h: torch.Tensor) -> Any:
        with torch.no_grad():
            if model.how == "clamp":
                w["weight"].clamp_(-0.01, 0.01)
        return fsdp.bind(model.linear, w)(h)

    state, w = fsdp.unshard(state, "table")
    h, to_table = T.vjp(lambda w: fsdp.bind(model.table, w)(X), w)
    state = fsdp.release(state, "table")
    state, w = fsdp.unshard(state, "linear")
    out, pullback = T.vjp(linear, w, h)
    dw, dh = pullback(w, torch.ones_like(out))
    state = fsdp.reduce(state, dw, "linear")
    state, w = fsdp.unshard(fsdp.release(state, "linear"), "table")
    state = fsdp.reduce(state, to_table(w, dh)[0], "table")
    return fsdp.step(fsdp.release(state, "table"))


@pytest.mark.parametrize("placement", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("way", [by_tree, by_vjp, by_unit, evaluated])
@pytest.mark.parametrize(("how", "leaf"), [("clamp", "linear.weight"), ("max_norm", "table.weight")])
def test_a_changed_weight_is_refused_by_name(how: str, leaf: str, way: Any, placement: str) -> None:
    state, model = begun(how, placement)
    before = {path: value.clone() for path, value in fsdp.full_params(state).items()}
    with pytest.raises(fsdp.ScheduleError, match=rf"the forward changed (a|the) weight .*'{leaf}'.* in place"):
        way(state, model)
    spec = state.spec
    if all(not bucket.gathers(spec.schedule.debug) for bucket in state.layout.buckets.values()):
        with pytest.raises(fsdp.StaleStateError, match=r"they were this State's own\. Load the last checkpoint"):
            fsdp.full_params(state)
        return
    state = fsdp.drop_gradients(state)  # gathered: nothing is lost
    assert all(torch.equal(value, before[path]) for path, value in fsdp.full_params(state).items())
    model.how, model.table.max_norm = "not", None
    by_tree(state, model)


@pytest.mark.parametrize("way", [by_tree, by_vjp, by_unit, evaluated])
def test_a_forward_that_changes_nothing_goes_on(way: Any) -> None:
    state, model = begun("not", "ddp")
    for _ in range(3):
        state = way(state, model)
    assert state.steps == (0 if way is evaluated else 3)


def test_what_was_lent_before_a_step_is_nobodys_concern_after_it() -> None:
    """A caller keeps the tree: where weights are replicated, `step` writes into it; a copy it may change."""
    for placement in ("ddp", "zero3"):
        state, model = begun("not", placement)
        state, params = fsdp.unshard(state)
        grads, _ = torch.func.grad_and_value(lambda p, model=model: fsdp.bind(model, p)(X))(params)
        state = fsdp.step(fsdp.reduce(state, grads))
        if placement == "zero3":
            params["linear.weight"].zero_()
        state = by_tree(state, model)
        assert state.steps == 2
