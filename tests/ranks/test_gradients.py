"""Gradients of every kind that reduce may be given, and clipping of gradients of several dtypes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from support.ranks import each_rank

import functional_fsdp as fsdp
from functional_fsdp import Spec, TreeError
from functional_fsdp import transforms as T

MIXED = {"a": torch.float64, "b": torch.float32, "c": torch.bfloat16}


def mixed(preset: str = "zero3") -> fsdp.State:
    params = {"none": torch.ones(0, dtype=torch.float64)}
    params |= {name: torch.ones(3, dtype=dtype) for name, dtype in MIXED.items()}
    precision = {name: fsdp.Precision(main=dtype, grads=dtype) for name, dtype in MIXED.items()}
    precision["none"] = precision["a"]
    mesh = fsdp.local_mesh()
    return fsdp.shard(params, Spec(mesh, getattr(fsdp, preset)("data"), precision=precision), fsdp.sgd(lr=1.0))


@each_rank(2)
def test_gradients_of_several_dtypes_are_clipped_by_one_norm() -> None:
    for preset in ("zero3", "ddp"):
        grads = {name: torch.full((3,), 2.0, dtype=MIXED[name]) for name in ("b", "a", "c")} | {"none": None}
        state, norm = T.clip_by_global_norm(fsdp.reduce(mixed(preset), grads), 3.0)
        assert norm.item() == pytest.approx(6.0)
        assert norm.dtype is torch.float64
        weights = fsdp.full_params(fsdp.step(state))
        assert all(weights[name][0].item() == pytest.approx(0.0, abs=1e-2) for name in MIXED)


@pytest.mark.parametrize("transform", [T.clip_by_value, lambda s, by: T.divide(s, 1 / by), T.divide, None])
def test_every_transform_takes_gradients_of_several_dtypes(transform: Callable[..., Any] | None) -> None:
    state = mixed()
    state = fsdp.reduce(state, {name: torch.full((3,), 2.0, dtype=d) for name, d in MIXED.items()} | {"none": None})
    if transform is None:
        state = T.skip_nonfinite(fsdp.step)(state)
        wanted = -1.0
    else:
        state = fsdp.step(transform(state, 1.0))
        wanted = 0.0 if transform is T.clip_by_value else -1.0
    weights = fsdp.full_params(state)
    assert [weights[name][0].item() for name in MIXED] == [wanted] * 3


# ---------------------------------------------------------------- what is no dense tensor of floats


def odd() -> dict[str, tuple[torch.Tensor, str]]:
    quantized = torch.quantize_per_tensor(torch.ones(4, 3), 0.1, 0, torch.quint8)
    return {
        "complex": (torch.ones(4, 3, dtype=torch.complex64), r"is complex \(torch.complex64\).*Give its real part"),
        "meta": (
            torch.ones(4, 3, device="meta"),
            r"is on the meta device.*Compute it on the weights that unshard gave",
        ),
        "quantized": (quantized, r"is quantized \(torch.quint8\).*Give value.dequantize\(\)"),
    }


def given(state: fsdp.State, value: torch.Tensor, by_unit: bool) -> fsdp.State:
    if by_unit:
        return fsdp.reduce(state, {"w": value, "b": torch.ones(2)}, "u")
    return fsdp.reduce(state, {"u.w": value, "u.b": torch.ones(2)})


@pytest.mark.parametrize("by_unit", [False, True])
@pytest.mark.parametrize("kind", ["complex", "meta", "quantized"])
def test_what_cannot_be_added_up_is_refused_by_name(kind: str, by_unit: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of quantized tensors
        value, text = odd()[kind]
    base = fsdp.shard({"u.w": torch.ones(4, 3), "u.b": torch.ones(2)}, Spec(fsdp.local_mesh(), units=["u"]), fsdp.sgd())
    with pytest.raises(TreeError, match=rf"reduce: the gradient of 'u\.w' {text}"):
        given(base, value, by_unit)
    state = fsdp.step(fsdp.reduce(base, {"w": torch.ones(4, 3), "b": None}, "u"))  # nothing was sent
    assert state.steps == 1


@pytest.mark.parametrize("by_unit", [False, True])
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_sparse_gradients_are_made_dense_with_a_warning(make: Any, by_unit: bool) -> None:
    params = {"u.w": torch.ones(4, 3), "u.b": torch.ones(2)}
    state = fsdp.shard(params, Spec(fsdp.local_mesh(), units=["u"]), fsdp.sgd(lr=1.0))
    grad = torch.tensor([[0.0, 1.0, 0.0]]).expand(4, 3).contiguous()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse = make(grad)
    with pytest.warns(UserWarning, match=r"the gradient of 'u\.w' has the layout torch\.sparse_\w+\. It is made dense"):
        state = given(state, sparse, by_unit)
    assert torch.equal(fsdp.full_params(fsdp.step(state))["u.w"], 1 - grad)


def test_a_module_with_sparse_gradients_trains_and_warns_once() -> None:
    module = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    plain = {name: p.detach().clone() for name, p in module.named_parameters()}
    params, model = fsdp.functionalize(module)
    state = fsdp.shard(params, Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.5))
    forward_backward = T.forward_backward(model, lambda model, x: model(x).square().mean())
    x = torch.tensor([0, 2, 2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            state, _ = forward_backward(state, x)
            state = fsdp.step(state)
            module(x).square().mean().backward()
            with torch.no_grad():
                for p in module.parameters():
                    assert p.grad is not None
                    p.sub_(0.5 * (p.grad.to_dense() if p.grad.is_sparse else p.grad))
                    p.grad = None
    assert ["is made dense" in str(warning.message) for warning in caught] == [True]
    found = fsdp.full_params(state)
    for name, p in module.named_parameters():
        torch.testing.assert_close(found[name], p.detach())
        assert not torch.equal(found[name], plain[name])
    assert math.isfinite(float(found["0.weight"].sum()))


def test_gradients_of_another_float_dtype_are_cast() -> None:
    state = fsdp.shard({"w": torch.ones(3), "b": torch.ones(2)}, Spec(fsdp.local_mesh(), units=["*"]), fsdp.sgd(lr=1.0))
    for unit in state.layout.units:
        grads = {key: torch.full(state.layout.buckets[unit.name].leaves[0].shape, 0.5).double() for key in unit.keys}
        state = fsdp.reduce(state, grads, unit.name)
    assert [p.tolist() for p in fsdp.full_params(fsdp.step(state)).values()] == [[0.5] * 3, [0.5] * 2]


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("unshard('b') is not what", lambda state: fsdp.unshard(state, "b")),
        ("reduce('b') is not what", lambda state: fsdp.reduce(state, {"w": torch.ones(3)}, "b")),
        ("has the layout torch.sparse_coo", lambda state: fsdp.reduce(state, {"w": torch.ones(2).to_sparse()}, "a")),
    ],
    ids=["unshard", "reduce", "sparse"],
)
def test_a_warning_points_at_the_call_of_the_verb(what: str, call: Any) -> None:
    spec = Spec(fsdp.local_mesh(), units=["a", "b"], schedule=fsdp.Schedule(order=["a", "a"]))
    state = fsdp.shard({"a.w": torch.ones(2), "b.w": torch.ones(3)}, spec, fsdp.sgd(lr=1.0))
    with pytest.warns(UserWarning, match="schedule|layout") as caught:
        call(state)
    assert [(what in str(one.message), one.filename) for one in caught] == [(True, __file__)]


@pytest.mark.filterwarnings("ignore:reduce\\('b'\\) is not what the schedule expects")
@pytest.mark.parametrize("order", [None, ["a", "a"]])
def test_a_meta_gradient_of_the_usual_shape_is_named(order: Any) -> None:
    params = {"a.w": torch.ones(2), "b.w": torch.ones(3), "b.none": torch.ones(0)}
    spec = Spec(fsdp.local_mesh(), units=["a", "b"], schedule=fsdp.Schedule(order=order))
    state = fsdp.shard(params, spec, fsdp.sgd(lr=1.0))
    grads = {"w": torch.ones(3, device="meta"), "none": torch.ones(0)}
    with pytest.raises(TreeError, match=r"the gradient of 'b\.w' is on the meta device"):
        fsdp.reduce(state, grads, "b")
    state = fsdp.step(fsdp.reduce(state, grads | {"w": torch.ones(3)}, "b"))
    assert fsdp.full_params(state)["b.w"].tolist() == [0.0] * 3
