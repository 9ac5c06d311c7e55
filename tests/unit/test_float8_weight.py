"""Gathers in float8: what a spec says of them and what follows, pure; and the tensors that compute sees."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from support.chains import mean_square as loss_fn

import functional_fsdp as fsdp
from functional_fsdp import Float8Weight, Precision, ScheduleError, Spec, SpecError, extend
from functional_fsdp import transforms as T
from functional_fsdp._common.torch_names import pytree
from functional_fsdp._plan.plan import copied_alike, keeps_copy

E4M3, E5M2, BF16, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
RULES = {"*.weight": Precision(compute=BF16, gather=E4M3), "*": Precision(compute=BF16)}


def shapes() -> dict[str, torch.Tensor]:
    sizes = {"blocks.0.weight": (300, 100), "blocks.0.bias": (300,), "blocks.1.weight": (300, 100)}
    return {path: torch.empty(size, device="meta") for path, size in sizes.items()}


# ---------------------------------------------------------------- the spec, the layout, the plan


def test_a_precision_says_what_is_gathered() -> None:
    precision = Precision(compute=BF16, gather=E4M3)
    assert precision.resolve(F32).gather is E4M3
    assert precision.resolve(torch.int64).gather is torch.int64
    assert "compute bfloat16, gather float8_e4m3fn, grads" in str(precision)
    assert str(precision.resolve(F32)).startswith("main float32, compute bfloat16, gather float8_e4m3fn, grads")
    assert "gather" not in str(Precision(compute=BF16).resolve(F32))


@pytest.mark.parametrize("dtype", [BF16, torch.int8, torch.float8_e8m0fnu])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    for compute in (None, F32):
        names = "torch.float8_e4m3fn, torch.float8_e5m2"
        said = rf"Precision\(gather={dtype}, compute={compute}\): expected one of {names}; or a codec with blocks"
        with pytest.raises(SpecError, match=said):
            Precision(compute=compute, gather=dtype)


def test_the_dtype_of_compute_is_kept_where_main_weights_have_another_one() -> None:
    kept, none = Precision(compute=BF16, gather=BF16), Precision(compute=F32, gather=F32)
    assert kept.resolve(F32).copy
    assert str(kept.resolve(F32)).startswith("main float32, compute bfloat16, gather bfloat16, grads")
    assert not kept.resolve(torch.int64).copy
    assert not none.resolve(F32).copy
    plain = fsdp.make_layout(shapes(), Spec({"data": 4}, precision=Precision(compute=BF16)))
    layout = fsdp.make_layout(shapes(), Spec({"data": 4}, precision=kept))
    assert layout.hash != plain.hash
    assert [b.numel for b in layout.buckets.values()] == [b.numel for b in plain.buckets.values()]
    assert all(keeps_copy(b) and copied_alike(b) and not b.in_float8 for b in layout.buckets.values())
    assert not any(map(keeps_copy, plain.buckets.values()))


def test_weights_in_float8_lie_in_buckets_of_their_own() -> None:
    layout = fsdp.make_layout(shapes(), Spec({"data": 1024}, precision=RULES))
    plain = fsdp.make_layout(shapes(), Spec({"data": 1024}, precision=Precision(compute=BF16)))
    narrow, rest = layout.by_name["blocks.0"].buckets
    assert [leaf.path for leaf in narrow.leaves] == ["blocks.0.weight"]
    assert (narrow.gather, narrow.compute, narrow.grads, narrow.wire) == (E4M3, BF16, F32, BF16)
    assert rest.gather is BF16
    assert narrow.nbytes("weights") == narrow.numel // 1024
    assert "float32/bfloat16/float8_e4m3fn" in repr(layout)
    plans = [fsdp.make_plan(one) for one in (layout, plain)]
    wide = plain.buckets["blocks.1"]
    assert [plan.by_name["blocks.1"].nbytes for plan in plans] == [wide.numel, 2 * wide.numel]
    assert layout.hash != plain.hash


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            Spec({"data": 4}, precision=Precision(gather=E4M3)),
            "of the leaf 'blocks.0.bias', of shape (300,): expected a matrix [n, m]",
        ),
        (
            Spec({"data": 4}, fsdp.zero3("data", memory_kind={"main": "pinned_host"}), precision=RULES),
            "of the leaf 'blocks.0.weight': its state lies in the host's memory",
        ),
    ],
    ids=["a vector", "on the host"],
)
def test_what_cannot_be_gathered_in_float8_is_refused(spec: Spec, said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(f"Precision(gather=torch.float8_e4m3fn) {said}")):
        fsdp.make_layout(shapes(), spec)


# ---------------------------------------------------------------- the tensor


def weight(dtype: torch.dtype = E4M3) -> Float8Weight:
    bits = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).mul_(50).to(dtype)
    return Float8Weight(bits, torch.tensor(37.0), BF16)


def test_it_seems_to_be_a_tensor_of_the_compute_dtype() -> None:
    w = weight()
    assert (w.shape, w.dtype, w.device.type, w.is_contiguous()) == ((8, 16), BF16, "cpu", True)
    assert repr(w) == "Float8Weight(shape=(8, 16), dtype=torch.bfloat16, bits=float8_e4m3fn)"
    plain = (w.bits.float() / 37).to(BF16)
    torch.testing.assert_close(w + 0, plain, rtol=0, atol=0)
    x = torch.randn(3, 16).to(BF16)
    torch.testing.assert_close(nn.functional.linear(x, w), x @ plain.t(), rtol=0, atol=0)
    assert type(w.clone()) is torch.Tensor


def test_views_are_of_the_same_bytes() -> None:
    w = weight(E5M2)
    for view in (w.t(), w.transpose(0, 1), w.detach()):
        assert type(view) is Float8Weight
        assert view.bits.data_ptr() == w.bits.data_ptr()
        assert view.scale is w.scale
    assert w.t().shape == (16, 8)


def test_its_gradient_is_a_tensor_of_the_compute_dtype() -> None:
    w, x = weight().requires_grad_(), torch.randn(3, 16).to(BF16)
    (grad,) = torch.autograd.grad((x @ w.t()).float().sum(), [w])
    assert (type(grad), grad.dtype) == (torch.Tensor, BF16)
    torch.testing.assert_close(grad, x.sum(0, dtype=F32).to(BF16).expand(8, 16), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "write", [lambda w: w.zero_(), lambda w: torch.neg(w.clone(), out=w), lambda w: w.t().copy_(torch.zeros(16, 8))]
)
def test_it_cannot_be_changed_in_place(write: Callable[[Any], Any]) -> None:
    w = weight()
    before = w.bits.float().clone()
    with pytest.raises(ScheduleError, match="would write to a weight that was gathered in float8"):
        write(w)
    assert torch.equal(w.bits.float(), before)


# ---------------------------------------------------------------- states


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Returning(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.up.weight


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


def start(module: nn.Module | None = None, **schedule: Any) -> tuple[fsdp.State, nn.Module]:
    params, model = fsdp.functionalize(module or Net())
    rules = {"*.weight": Precision(gather=E4M3), "*": Precision()}
    spec = Spec(fsdp.local_mesh(), precision=rules, schedule=fsdp.Schedule(**schedule))
    return fsdp.shard(params, spec, fsdp.sgd(lr=0.1)), model


def rounded(module: nn.Module) -> nn.Module:
    """The module with its matrices as they are after a cast to float8 and back."""
    with torch.no_grad():
        for p in (p for p in module.parameters() if p.dim() == 2):
            scale = (448 / p.abs().max().double()).float()
            p.copy_((p * scale).clamp(-448, 448).to(E4M3).float() / scale)
    return module


def whole(state: fsdp.State, model: nn.Module) -> tuple[fsdp.State, torch.Tensor]:
    state, params = fsdp.unshard(state)
    grads, loss = torch.func.grad_and_value(lambda p: loss_fn(fsdp.bind(model, p), X))(params)
    return fsdp.reduce(state, grads), loss


def driven(state: fsdp.State, model: nn.Module, **options: Any) -> tuple[fsdp.State, torch.Tensor]:
    return T.forward_backward(model, loss_fn, **options)(state, X)


@pytest.mark.parametrize(
    "way", [whole, driven, lambda *given: driven(*given, second_order=True)], ids=["whole", "driven", "second order"]
)
def test_any_module_computes_with_what_is_left_of_its_weights(way: Callable[..., Any]) -> None:
    plain = rounded(Net())
    loss = loss_fn(plain, X)
    grads = torch.autograd.grad(loss, [*plain.parameters()])
    state, found = way(*start())
    torch.testing.assert_close(found, loss.detach())
    mine = fsdp.local_shards(state, "grads")
    for (path, p), grad in zip(plain.named_parameters(), grads, strict=True):
        torch.testing.assert_close(mine[path].view(p.shape), grad, rtol=1e-4, atol=1e-6)
    state = fsdp.step(state)  # main weights keep their digits
    torch.testing.assert_close(fsdp.full_params(state)["up.weight"], Net().up.weight.detach() - 0.1 * grads[0])


def test_whole_weights_are_the_callers_own() -> None:
    state, model = start()
    _, params = fsdp.unshard(state)
    before = params["up.weight"].dequantized()
    state = fsdp.step(whole(state, model)[0])
    assert torch.equal(params["up.weight"].dequantized(), before)


def test_lent_bytes_are_known_under_a_wrapper() -> None:
    state, _ = start()
    weight: Any = fsdp.unshard(state, "up")[1]["weight"]
    assert all(map(extend.is_lent, (weight, weight.t(), weight.bits[1:])))
    assert not extend.is_lent(weight.clone())
    assert extend.loan_of(weight) is not None


def test_a_weight_that_a_unit_returns_is_copied() -> None:
    state, model = start(Returning(), debug=True)  # released bytes are poisoned
    _, (_, found) = T.apply(model)(state, X)
    torch.testing.assert_close(found, rounded(Net()).get_parameter("up.weight").detach())


def test_released_bytes_are_poisoned() -> None:
    state, _ = start(debug=True)
    state, lent = fsdp.unshard(state, "up")
    weight: Any = lent["weight"]
    assert not weight.dequantized().isnan().any()
    fsdp.release(state, "up")
    assert weight.dequantized().isnan().all()


def test_weights_have_the_scales_of_the_tree_that_they_are_of() -> None:
    state, _ = start()
    first: Any = fsdp.unshard(state, "up")[1]["weight"]
    other = pytree.tree_map(torch.clone, state)
    next(iter(other.scales.values())).mul_(2)
    second: Any = fsdp.unshard(other, "up")[1]["weight"]
    assert second.scale == 2 * first.scale
    assert torch.equal(second.bits.float(), first.bits.float())


def test_residuals_are_of_one_step() -> None:
    """In the next one other numbers lie there."""
    state, model = start()
    state = fsdp.step(driven(state, model)[0])  # the first step looks at the order of use
    weights: Any = fsdp.unshard(state, "up")[1]
    _, pullback = T.vjp(lambda w, x: fsdp.bind(model.get_submodule("up"), w)(x), weights, X)
    state = fsdp.step(driven(state, model)[0])
    again: Any = fsdp.unshard(state, "up")[1]
    assert again["weight"] is weights["weight"]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pullback(again, torch.ones(4, 32))


def test_a_step_that_is_compiled_whole_is_refused() -> None:
    state, model = start()
    forward_backward = T.forward_backward(model, loss_fn)

    def train_step(state: fsdp.State) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, X)
        return fsdp.step(state), loss

    said = r"compiled whole does not gather in float8.*'up.weight'.*compile=True\), with T.cuda_graph"
    for compiled in (T.compile(train_step, backend="aot_eager"), lambda state: fsdp.lower(train_step, state)):
        with pytest.raises(ScheduleError, match=said):
            compiled(state)
    abstract = fsdp.abstract_state({"up.weight": torch.empty(8, 8, device="meta")}, Spec({"data": 2}, precision=RULES))
    assert abstract.weights["up"].local.dtype is E4M3
    fsdp.step(driven(state, model)[0])  # the state is as good as before
