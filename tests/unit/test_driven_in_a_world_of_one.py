"""Driven models against the plain module: what would be other than it, without a word, is right or refused."""

from __future__ import annotations

import argparse
import contextvars
import copy
import ctypes
import dataclasses
import functools
import gc
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from support.tables import marked, product
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp.transforms._drive import settings as driven_settings
from functional_fsdp.transforms._drive.unit_uses import UnitUse

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Two units, and a parameter of its own."""

    def __init__(self, last: Callable[[], nn.Module] = lambda: nn.Linear(4, 4)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), last()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh()) * self.w


def total(model: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x)
    return out.sum()


def made(
    module: nn.Module, preset: str = "zero3", buffers: bool = True, every: bool = False, lr: float = 0.1, **spec: Any
) -> tuple[fsdp.State, nn.Module]:
    """`buffers`: the state has them; `every`: also those that are not persistent."""
    params, model = fsdp.functionalize(module)
    placed = fsdp.Spec(fsdp.local_mesh(), getattr(fsdp, preset)("data"), **spec)
    held = fsdp.buffers(module, every=every) if buffers else None
    return fsdp.shard(params, placed, fsdp.sgd(lr=lr), buffers=held), model


def evaluated(model: Any, params: Any, x: torch.Tensor = X) -> torch.Tensor:
    """By torch's functional_call."""
    return torch.func.functional_call(model, params, (x,))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("second_order", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_a_loss_without_a_gradient_to_step_by_is_refused(dtype: torch.dtype, second_order: bool) -> None:
    state, model = made(Net())
    call = T.forward_backward(model, lambda m, x: total(m, x).to(dtype), second_order=second_order)
    with pytest.raises(fsdp.TreeError, match=f"a loss of {dtype}, .* expected a floating tensor"):
        call(state, X)
    T.forward_backward(model, total)(fsdp.drop_gradients(state), X)


class Twice(nn.Module):
    """One weight at two places, if it is tied."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


TIED_WAYS: dict[str, Any] = {
    "forward_backward": lambda model: T.forward_backward(model, total),
    "second_order": lambda model: T.forward_backward(model, total, second_order=True),
    "apply": T.apply,
    "norms": lambda model: T.per_sample_norms(model, total),
    "lower": lambda model: lambda state, x: fsdp.lower(T.forward_backward(model, total), state, x),
}


@pytest.mark.parametrize("way", TIED_WAYS)
def test_leaves_that_are_not_tied_where_the_models_are_are_refused(way: str) -> None:
    tied, two = Twice(), Twice(False)
    good, model = made(tied)
    loose, untied = made(two)
    call = TIED_WAYS[way](model)
    for _ in range(2):  # after the model was fitted to a state, too
        with pytest.raises(fsdp.TreeError, match=r"one weight at 'a.weight' and 'b.weight', .* two leaves"):
            call(loose, X)
        call(good, X)
        good = fsdp.drop_gradients(good)
    TIED_WAYS[way](untied)(good, X)  # whoever ties leaves of a model that does not has one leaf, as wished


# ---------------------------------------------------------------- weights that a forward changes


class Changes(nn.Linear):
    """Does something to its weight, when told to."""

    what: Any = None
    late = False  # not in the first call

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1 or not self.late:
            type(self).what(self)
        return super().forward(x)


class Loose(Net):
    """Does something to a parameter of its own, which is in no module that is gathered on its own."""

    what: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).what(self)
        return super().forward(x)


def put(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def put_item(owner: Any, name: Any, value: Any) -> None:
    owner[name] = value


def replaced(m: Any) -> None:
    weight = m.weight.detach() * 0.5
    del m.weight
    m.weight = weight


IN_PLACE = "in place, by aten"
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {  # of a weight, and how the error calls it
    "clamp": (lambda m: m.weight.clamp_(-0.1, 0.1), IN_PLACE),
    "view": (lambda m: m.weight.view(-1)[:2].zero_(), IN_PLACE),
    "item": (lambda m: put_item(m.weight, 0, 3.0), IN_PLACE),
    "out": (lambda m: torch.mul(m.weight, 2, out=m.weight), IN_PLACE),
    "foreach": (lambda m: torch._foreach_mul_([m.weight], 0.5), IN_PLACE),
    "data": (lambda m: m.weight.data.mul_(0.5), IN_PLACE),
    "set data": (lambda m: put(m.weight, "data", m.weight.detach() * 0.5), r"by \.data ="),
    "assign": (lambda m: put(m, "weight", nn.Parameter(m.weight.detach() * 0.5)), "by assignment"),
    "attribute": (replaced, "by assignment"),
}


def changing(what: str) -> Any:
    return staticmethod(torch.no_grad()(CHANGES[what][0]))


def drives(how: str, model: nn.Module) -> Callable[..., Any]:
    if how == "apply":
        return T.apply(model)
    return T.forward_backward(model, total, second_order=how == "second order")


HOWS = ("forward_backward", "apply", "second order")


@pytest.mark.parametrize(("what", "how", "preset"), product(CHANGES, HOWS, ("zero3", "ddp")))
def test_a_weight_that_a_forward_changes_is_refused_at_the_operation(what: str, how: str, preset: str) -> None:
    """And nothing has changed: not the state, not what it lends."""
    Changes.what, Changes.late = changing(what), False
    state, model = made(Net(Changes), preset)
    before = fsdp.full_params(state)
    run = drives(how, model)
    for _ in range(2):
        if how == "second order" and what == "set data":
            continue  # these are leaves of their own: see below
        with pytest.raises(fsdp.ScheduleError, match=rf"changed the weight 'b\.weight' {CHANGES[what][1]}"):
            run(state, X)
        assert same(fsdp.full_params(state), before)
    Changes.what = staticmethod(lambda m: None)
    want = evaluated(Net(Changes), before)
    assert torch.equal(T.apply(model)(state, X)[1], want)
    if how == "apply":
        assert torch.equal(run(state, X)[1], want)


@pytest.mark.parametrize(("what", "how", "preset"), product(("clamp", "assign", "attribute"), HOWS, ("zero3", "ddp")))
def test_in_a_later_call_too(what: str, how: str, preset: str) -> None:
    """Operations are not looked at any more: weights that are lent as they are stored, which one rank does, have been
    changed."""
    Changes.what, Changes.late = changing(what), True
    state, model = made(Net(Changes), preset)
    run = drives(how, model)
    run(state, X)
    with pytest.raises(fsdp.ScheduleError, match=r"changed (the weight 'b\.weight'|a weight \(one .*'b\.weight'.*\)) "):
        run(state, X)
    if what == "clamp":
        with pytest.raises(fsdp.StaleStateError, match=r"changed weights in place.* they were this State's own"):
            run(state, X)
    else:
        Changes.what = staticmethod(lambda m: None)
        assert torch.equal(T.apply(model)(state, X)[1], evaluated(Net(Changes), fsdp.full_params(state)))


def test_later_calls_name_the_weight_where_autograd_knows_it() -> None:
    Changes.what, Changes.late = staticmethod(lambda m: m.weight.mul_(2)), True
    state, model = made(Net(Changes))
    run = T.forward_backward(model, total)
    run(state, X)
    with pytest.raises(fsdp.ScheduleError, match=r"changed the weight 'b\.weight' in place, in the module 'b'\."):
        run(state, X)


@pytest.mark.parametrize("what", ["data", "set data"])
@pytest.mark.parametrize("how", ["forward_backward", "apply"])
def test_debug_looks_at_every_call(how: str, what: str) -> None:
    Changes.what, Changes.late = changing(what), True
    state, model = made(Net(Changes), schedule=fsdp.Schedule(debug=True))
    run = drives(how, model)
    run(state, X)
    with pytest.raises(fsdp.ScheduleError, match=r"changed the weight 'b\.weight'"):
        run(state, X)


@pytest.mark.parametrize("how", ["forward_backward", "apply"])
@pytest.mark.parametrize("what", CHANGES)
def test_a_weight_outside_its_entry_is_refused_too(what: str, how: str) -> None:
    class Named(Loose):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    Named.what = changing(what)
    state, model = made(Named())
    run = drives(how, model)
    for _ in range(2):
        with pytest.raises(fsdp.ScheduleError, match=r"changed the weight 'weight' (in place|by)"):
            run(state, X)
    Named.what = staticmethod(lambda m: None)
    assert torch.equal(T.apply(model)(state, X)[1], Named()(X))


def test_a_weight_assigned_from_outside_its_module() -> None:
    class Outside(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.b.weight = nn.Parameter(torch.zeros(4, 4))
            return super().forward(x)

    state, model = made(Outside())
    with pytest.raises(fsdp.ScheduleError, match=r"changed the weight 'b\.weight' by assignment, outside the module"):
        T.forward_backward(model, total)(state, X)


class Rebinds(nn.LSTM):
    """As on GPUs, where the weights of recurrent modules are made to point into one chunk of memory."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    @torch.no_grad()
    def flatten_parameters(self) -> None:
        for w in self._flat_weights:
            if isinstance(w, torch.Tensor) and w.device.type == "cpu":
                w.set_(w.clone().untyped_storage(), 0, w.shape, w.stride())

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)[0]


@pytest.mark.parametrize("preset", ["zero3", "ddp"])
def test_recurrent_modules_may_rebind_their_weights(preset: str) -> None:
    module = Net(Rebinds)
    plain = Net(Rebinds)
    state, model = made(module, preset)
    run, look = T.forward_backward(model, total), T.apply(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        torch.testing.assert_close(look(state, X)[1], plain(X))
        state = fsdp.step(run(state, X)[0])
        optimizer.zero_grad()
        total(plain, X).backward()
        optimizer.step()
    torch.testing.assert_close(fsdp.full_params(state), dict(plain.named_parameters()), check_layout=False)


# ---------------------------------------------------------------- weights that are given back


class Gives(Net):
    """Returns weights of its own, and of a part."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"out": super().forward(x), "own": [self.w], "part": self.b.weight}


@pytest.mark.parametrize("second_order", [False, True])
def test_a_weight_that_is_given_back_is_a_tensor(second_order: bool) -> None:
    state, model = made(Gives())
    plain = Gives()
    _, found = T.apply(model)(state, X)
    assert type(found["own"][0]) is torch.Tensor
    assert torch.equal(found["own"][0], plain.w)
    assert torch.equal(found["part"], plain.b.weight)  # type: ignore[arg-type]
    state, (loss, aux) = T.forward_backward(
        model, lambda m, x: ((y := m(x))["own"][0].sum() + y["part"].square().sum(), y), True, second_order=second_order
    )(state, X)
    assert torch.equal(aux["own"][0], plain.w)
    assert loss == 4 + plain.b.weight.square().sum()  # type: ignore[operator]
    grads = fsdp.local_shards(fsdp.finish_reductions(state), "grads")
    assert torch.equal(grads["w"], torch.ones(4))
    torch.testing.assert_close(grads["b.weight"].view(4, 4), 2 * plain.b.weight.detach())  # type: ignore[operator]


def test_a_weight_may_be_the_loss() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module.scale = nn.Parameter(torch.tensor(3.0))
    state, model = made(module)
    state, loss = T.forward_backward(model, lambda m, x: m.scale)(state, X)
    assert loss == 3
    assert fsdp.local_shards(fsdp.finish_reductions(state), "grads")["scale"] == 1


def test_an_empty_leaf_first_in_its_bucket() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none, self.weight = nn.Parameter(torch.ones(0, 4)), nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight

    state, model = made(nn.Sequential(Empty(), nn.Linear(4, 4)), schedule=fsdp.Schedule(debug=True))
    _, found = T.apply(model, lambda m, x: m[0](x))(state, X)
    assert torch.equal(found, torch.ones(4))  # a copy: what was borrowed has been released


def test_jit_modules_that_have_weights_are_refused() -> None:
    with pytest.warns(DeprecationWarning, match="deprecated"):
        scripted, weighty = torch.jit.script(nn.ReLU()), torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(fsdp.TreeError, match=r"the module '1' is a torch\.jit module"):
        fsdp.functionalize(nn.Sequential(nn.Linear(4, 4), weighty))
    state, model = made(nn.Sequential(nn.Linear(4, 4), scripted))
    want = fsdp.bind(model, fsdp.full_params(state))(X)
    assert torch.equal(T.apply(model)(state, X)[1], want)


def test_parts_and_buffers_of_a_jit_module() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.BatchNorm1d(4, affine=False)))
    with pytest.warns(DeprecationWarning, match="deprecated"):
        module[1] = torch.jit.script(module[1])
    state, model = made(module)
    forward_backward = T.forward_backward(model, total)
    state, loss = forward_backward(state, X)
    state = fsdp.step(state)
    assert torch.equal(loss, total(module, X))
    assert same(dict(state.buffers), dict(module.named_buffers()))
    bare = fsdp.shard(fsdp.full_params(state), state.spec)
    model.eval()
    forward_backward(bare, X)  # its buffers stay with the module


def test_freezing_a_skeleton_says_what_to_do() -> None:
    _, model = fsdp.functionalize(Net())
    with pytest.raises(fsdp.TreeError, match=r"Spec\(trainable=\{pattern: False\}\)"):
        model.w.requires_grad = False
    model.w.requires_grad = True


# ---------------------------------------------------------------- dtypes of inputs


BF16 = fsdp.Precision(compute=torch.bfloat16)
CAST = fsdp.Precision(compute=torch.bfloat16, inputs=True)


@pytest.mark.parametrize("how", ["forward_backward", "apply"])
def test_a_batch_of_another_dtype_says_what_to_do(how: str) -> None:
    state, model = made(Net(), precision=BF16)
    want = r"the module 'a' computes in bfloat16 and was given float32\. .* Precision\(compute=torch\.bfloat16, inputs"
    with pytest.raises(fsdp.SpecError, match=want) as caught:
        drives(how, model)(state, X)
    assert "must have the same dtype" in str(caught.value.__cause__)
    with pytest.raises(fsdp.SpecError, match=r"the weight 'a\.weight' computes in bfloat16 and was given float32"):
        T.apply(model, lambda m, x: F.linear(x, m.a.weight))(state, X)


def test_inputs_are_cast() -> None:
    class Takes(Net):
        def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
            seen.append(self.a(x).dtype)
            return super().forward(x) * scale["by"][0]

    seen: list[torch.dtype] = []
    state, model = made(Takes(), precision=CAST)
    scale: Any = {"by": [torch.ones(4)], "at": torch.arange(4)}
    state, loss = T.forward_backward(model, lambda m, x, s: m(x, scale=s).sum())(state, X, scale)
    plain = Takes().bfloat16()
    assert seen == [torch.bfloat16]
    assert loss == (plain.b(plain.a(X.bfloat16()).tanh()) * plain.w * scale["by"][0]).sum()
    grads = fsdp.local_shards(fsdp.finish_reductions(state), "grads")
    assert all(bool(g.isfinite().all()) for g in grads.values())


class Noting(nn.Linear):
    def forward(self, x: torch.Tensor, seen: list[torch.Tensor], notes: dict[str, Any]) -> torch.Tensor:  # type: ignore[override]
        y = super().forward(x.to(self.weight.dtype))
        seen.append(y.square().mean())
        notes["seen"].append(y.sin().mean())
        notes["sum"] = notes.get("sum", 0) + y.mean()
        notes.pop("first", None)
        notes["last"] = notes.pop("last") * 2
        return y


class Noted(nn.Module):
    """Its loss has what its parts write to a list and a dict that they are given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = Noting(4, 4), Noting(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[Any] = [x.mean()]
        notes = {"first": x, "last": x, "x": x, "seen": seen}
        y = self.b(self.a(x, seen, notes).tanh(), seen, notes)
        assert [*notes] == ["x", "seen", "sum", "last"]
        assert notes["x"] is x
        assert notes["seen"] is seen
        total: torch.Tensor = y.square().mean() + sum(seen) + notes["sum"]
        return total


@pytest.mark.parametrize("how", ["cast", "grad", "hvp"])
def test_what_a_module_writes_to_a_list_or_a_dict_is_there(how: str) -> None:
    """Where tensors that it is given are replaced by others, the list has others, too; a list that is there twice is
    one."""
    state, model = made(Noted(), precision=CAST if how == "cast" else fsdp.Precision())
    plain = Noted()
    if how == "hvp":
        state, (loss, found) = T.hvp(model, lambda model, x: model(x))(state, state.main, X)
        weights = [*plain.parameters()]
        grads = torch.autograd.grad(plain(X), weights, create_graph=True)
        along = torch.stack([(g * w.detach()).sum() for g, w in zip(grads, weights, strict=True)]).sum()
        products = torch.autograd.grad(along, weights)
        shards = fsdp.local_shards(fsdp.replace_grads(state, found), "grads")
        for (path, _), product in zip(plain.named_parameters(), products, strict=True):
            torch.testing.assert_close(shards[path].flatten(), product.flatten())
        torch.testing.assert_close(loss, plain(X).detach())
        return

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.grad(model)(x).square().sum() if how == "grad" else model(x)
        return found

    state, loss = T.forward_backward(model, loss_fn)(state, X)
    right = loss_fn(plain.bfloat16() if how == "cast" else plain, X)
    right.backward()
    assert loss == right
    shards = fsdp.local_shards(fsdp.finish_reductions(state), "grads")
    for path, p in plain.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(shards[path].flatten().to(p.grad.dtype), p.grad.flatten())


def test_buffers_that_a_module_changes_in_a_jvp_are_dropped() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    state, model = made(plain)
    before = {path: buffer.clone() for path, buffer in state.buffers.items()}
    params = {path: p.detach() for path, p in plain.named_parameters()}

    def of(params: Any) -> Any:
        buffers = {path: buffer.clone() for path, buffer in plain.named_buffers()}
        return torch.func.functional_call(plain, {**params, **buffers}, (X,))

    right = torch.func.jvp(of, (params,), (params,))
    state, found = T.jvp(model)(state, state.main, X)
    torch.testing.assert_close(found, right)
    assert all(torch.equal(buffer, before[path]) for path, buffer in state.buffers.items())
    assert before


def test_inputs_are_cast_by_rule() -> None:
    """A norm that computes in float32 beside weights in bfloat16: one dtype is asked for."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.dtype)
            return self.up(self.norm(x.float()).to(x.dtype))

    seen: list[torch.dtype] = []
    module = nn.Sequential(Part(), Part())
    state, model = made(module, precision={"*norm*": fsdp.Precision(), "*": CAST}, units=["0", "1"])
    _, out = T.apply(model)(state, X)
    assert seen == [torch.bfloat16] * 2
    assert out.dtype is torch.bfloat16
    state, model = made(module, precision={"*norm*": fsdp.Precision(inputs=True), "*": CAST}, units=["0", "1"])
    with pytest.raises(fsdp.SpecError, match=r"the module '0' has weights that compute in torch\.float32 and in "):
        T.apply(model)(state, X)


def test_inputs_in_words() -> None:
    assert "compute bfloat16 (inputs too)" in str(CAST)
    with pytest.raises(fsdp.SpecError, match=r"Precision\(inputs\): expected True or False, and got 1"):
        fsdp.Precision(inputs=1)  # type: ignore[arg-type]
    state, model = made(Net(), precision=CAST)
    with pytest.raises(fsdp.SpecError, match=r"Precision\(inputs=True\) with forward_backward\(second_order=True\)"):
        T.forward_backward(model, total, second_order=True)(state, X)


# ---------------------------------------------------------------- what hooks see


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gain = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).tanh()


class Tower(nn.Module):
    """Hooks keep what parts return, as output_hidden_states does in Hugging Face models, or change it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Scaled() for _ in range(4))
        self.kept: dict[str, Any] = {}
        kept = self.kept
        if how != "changed":
            self.parts[1].register_forward_hook(lambda part, args, out: kept.__setitem__("out", out))
        if how != "kept":
            self.parts[1].register_forward_hook(lambda part, args, out: (out * part.gain).exp() * part.up.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def of_kept(model: Any, x: torch.Tensor, both: bool) -> torch.Tensor:
    out = model(x)
    kept = model.kept.get("out", out)
    loss: torch.Tensor = (kept - 1).square().sum()
    return loss + out.sum() if both else loss


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("how", ["kept", "changed", "kept and changed"])
def test_what_a_hook_keeps_may_be_all_that_the_loss_uses(how: str, both: bool) -> None:
    plain = Tower(how)
    state, model = made(Tower(how), schedule=fsdp.Schedule(debug=True))
    run = T.forward_backward(model, of_kept)
    want = of_kept(plain, X, both)
    grads = torch.autograd.grad(want, [*plain.parameters()], allow_unused=True, materialize_grads=True)
    for _ in range(2):
        middle, loss = run(state, X, both)
        assert torch.equal(loss, want.detach())
        found = fsdp.local_shards(fsdp.finish_reductions(middle), "grads")
        for (path, _), grad in zip(plain.named_parameters(), grads, strict=True):
            torch.testing.assert_close(found[path].view_as(grad), grad, msg=path)


def test_what_a_hook_inside_keeps_says_what_to_do() -> None:
    class Inside(Tower):
        def __init__(self) -> None:
            super().__init__("")
            kept = self.kept
            part: Any = self.parts[2]
            part.up.register_forward_hook(lambda part, args, out: kept.__setitem__("out", out))

    state, model = made(Inside())
    with pytest.raises(fsdp.ScheduleError, match=r"no output of the module 'parts\.2'.* a unit of its own: Spec"):
        T.forward_backward(model, of_kept)(state, X, False)
    units = ["parts.0", "parts.1", "parts.2.up", "parts.2.gain", "parts.3"]
    state, model = made(Inside(), units=units)
    _, loss = T.forward_backward(model, of_kept)(state, X, False)
    assert torch.equal(loss, of_kept(Inside(), X, False).detach())


# ---------------------------------------------------------------- settings of the model, changed later


class Config:
    def __init__(self) -> None:
        self.scale, self.rope, self.table = 2.0, {"factor": 1.0}, torch.ones(2)


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float = 2.0
    inner: list[Any] = dataclasses.field(default_factory=lambda: [{"deep": [1, {"deeper": 2}]}])


class Words(dict[str, Any]):
    """A dict whose items are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]

    __setattr__ = dict.__setitem__


class Configured(Net):
    flag = False

    def __init__(self) -> None:
        super().__init__()
        self.config, self.widths, self.drop = Config(), [4, 4], nn.Dropout(0.5)
        self.heads, self.mask = {1, 2}, torch.ones(4)
        self.space, self.args = types.SimpleNamespace(scale=2.0), argparse.Namespace(inner=types.SimpleNamespace(a=1))
        self.slotted, self.ordered, self.words = Slotted(), OrderedDict(a=[{"b": 1}], c=[1]), Words(scale=2.0)
        self.queue, self.frozen = deque([{"a": 1}]), types.MappingProxyType({"a": [{"b": 1}]})
        self.nested = [[1.0], ([2],)]
        self.array, self.large = np.ones(4), np.arange(40_000.0)
        self.strided, self.names = np.ones((4, 4))[:, ::2], np.array([{"a": 1}, None], dtype=object)
        self.raw, self.shared, self.long = bytearray(4), ctypes.c_double(1.0), [*range(200)]
        self.tensors, self.calls = [torch.ones(2), {"t": torch.ones(2)}], [functools.partial(max, 0), 3]
        self._private, self.loose = types.SimpleNamespace(scale=2.0, seen={}), [nn.Linear(2, 2, bias=False)]
        self.register_buffer("rotary", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(super().forward(x)) * self.config.scale


CHANGED: dict[str, tuple[Callable[[Any], None], str]] = {
    "an attribute": (lambda m: put(m.drop, "p", 0.1), r"'drop\.p' was 0\.5 and is 0\.1"),
    "a class's default": (lambda m: put(m, "flag", True), "'flag' is new"),
    "a configuration": (lambda m: put(m.config, "scale", 3.0), r"'config\.scale' was 2\.0 and is 3\.0"),
    "inside it": (lambda m: m.config.rope.update(factor=2.0), r"config\.rope\['factor'\].* was 1\.0 and is 2\.0"),
    "a list": (lambda m: m.widths.append(4), r"'widths' was \[4, 4\] and is \[4, 4, 4\]"),
    "a module": (lambda m: put(m, "b", nn.Linear(4, 4)), "its modules or hooks"),
    "a hook": (lambda m: m.b.register_forward_hook(lambda *args: None), "the modules or hooks of 'b'"),
    "a set": (lambda m: m.heads.discard(2), r"'heads' was \{1, 2\} and is \{1\}"),
    "a tensor": (lambda m: put(m, "mask", torch.zeros(4)), "'mask' is another tensor"),
    "a tensor's values": (lambda m: m.mask.zero_(), "the tensor 'mask' was changed in place"),
    "a tensor inside it": (lambda m: m.config.table.zero_(), r"the tensor 'config\.table' was changed in place"),
    "a buffer's values": (lambda m: m.rotary.zero_(), "the tensor 'rotary' was changed in place"),
    "a namespace": (lambda m: put(m.space, "scale", 3.0), r"'space\.scale' was 2\.0 and is 3\.0"),
    "a namespace in one": (lambda m: put(m.args.inner, "a", 2), r"'args\.inner\.a' was 1 and is 2"),
    "slots": (lambda m: put(m.slotted, "scale", 3.0), r"'slotted\.scale' was 2\.0 and is 3\.0"),
    "deep": (lambda m: put_item(m.slotted.inner[0]["deep"][1], "deeper", 3), r"\['deeper'\]. was 2 and is 3"),
    "an ordered dict": (lambda m: put_item(m.ordered["a"][0], "b", 2), r"ordered\['a'\]\[0\]\['b'\]. was 1"),
    "a class of dicts": (lambda m: put(m.words, "scale", 3.0), r"words\['scale'\]. was 2\.0 and is 3\.0"),
    "a list in a list": (lambda m: put_item(m.nested[0], 0, 2.0), r"'nested' was \[\[1\.0\], \(\[2\],\)\] and is"),
    "a list in a tuple": (lambda m: m.nested[1][0].append(2), r"'nested' was \[\[1\.0\], \(\[2\],\)\] and is"),
    "a list in a dict": (lambda m: m.ordered["c"].append(2), r"ordered\['c'\]. was \[1\] and is \[1, 2\]"),
    "a deque": (lambda m: put_item(m.queue[0], "a", 2), r"queue\[0\]\['a'\]. was 1 and is 2"),
    "behind a proxy": (lambda m: put_item(m.frozen["a"][0], "b", 2), r"frozen\['a'\]\[0\]\['b'\]. was 1 and is 2"),
    "an array": (lambda m: put_item(m.array, 3, 2.0), "the array 'array' was changed"),
    "a large array": (lambda m: put_item(m.large, 39_999, 5.0), "the array 'large' was changed"),
    "a strided array": (lambda m: put_item(m.strided, (3, 1), 5.0), "the array 'strided' was changed"),
    "another array": (lambda m: put(m, "array", np.ones(5)), "the array 'array' was changed"),
    "objects in an array": (lambda m: put_item(m.names[0], "a", 2), r"names\[0\]\['a'\]. was 1 and is 2"),
    "bytes": (lambda m: put_item(m.raw, 0, 1), "the array 'raw' was changed"),
    "a number of C's": (lambda m: put(m.shared, "value", 2.0), "the array 'shared' was changed"),
    "a long list": (lambda m: put_item(m.long, 150, 0), r"'long\[150\]' was 150 and is 0"),
    "another object": (lambda m: put(m, "space", types.SimpleNamespace(scale=1)), r"'space\.scale' was 2\.0 and is 1"),
    "another kind": (lambda m: put(m, "space", Slotted()), r"'space' was a SimpleNamespace and is a Slotted"),
    "tensors in a list": (lambda m: m.tensors[0].zero_(), r"the tensor 'tensors\[0\]' was changed in place"),
    "tensors in a dict": (lambda m: put_item(m.tensors[1], "t", torch.ones(2)), r"tensors\[1\]\['t'\]. is another"),
    "a private one": (lambda m: put(m._private, "scale", 3.0), r"'_private\.scale' was 2\.0 and is 3\.0"),
    "a module in a list": (lambda m: put_item(m.loose, 0, nn.Linear(2, 2)), r"'loose\[0\]' is another module"),
    "deleted": (lambda m: delattr(m, "widths"), r"'widths' was \[4, 4\] and is None"),
}


ROWS = [(what, HOWS[i % 3], real) for i, what in enumerate(CHANGED) for real in (False, True)]


@pytest.mark.parametrize(("what", "how", "real"), marked(ROWS, [row for i, row in enumerate(ROWS) if i % 4 in (0, 3)]))
def test_a_setting_that_is_changed_later_is_refused(what: str, how: str, real: bool) -> None:
    module = Configured()
    state, model = made(module)
    model = module if real else model
    run = drives(how, model)
    run(state, X)
    change, said = CHANGED[what]
    change(model)
    for _ in range(3 if what == "a large array" and not real else 0):
        run(state, X)  # a part of it is looked at in each step
    for _ in range(2):
        with pytest.raises(fsdp.SpecError, match=rf"the model was changed after the transform was made of it.*{said}"):
            run(state, X)
    if what not in ("a module", "deleted"):
        drives(how, model)(state, X)


@pytest.mark.parametrize("real", [False, True])
def test_a_setting_that_stays_what_it_was_is_no_change(real: bool) -> None:
    """Objects may be made anew; what grows in a private container is a cache."""
    module = Configured()
    state, copied = made(module)
    model: Any = module if real else copied
    run = T.forward_backward(model, total)
    for _ in range(3):
        run(state, X)
        model.space, model.slotted, model.calls = types.SimpleNamespace(scale=2.0), Slotted(), [*model.calls]
        model.array, model.large = model.array.copy(), model.large.copy()
        model._private.seen[len(model._private.seen)] = 1
        model.ordered = copy.deepcopy(model.ordered)


def test_that_there_is_more_than_is_looked_at_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driven_settings, "MOST", 10)
    module = Net()
    state, _ = made(module)
    module.rows = [{"a": i} for i in range(11)]  # type: ignore[assignment]
    with pytest.warns(UserWarning, match=r"the model holds more than 10 objects that are no modules, as .*rows"):
        T.forward_backward(module, total)(state, X)


@pytest.mark.parametrize("real", [False, True])
def test_a_cache_that_is_replaced_is_no_setting(real: bool) -> None:
    module = Configured()
    state, model = made(module)
    model = module if real else model
    run = T.apply(model)
    before = run(state, X)[1]
    model.rotary = torch.zeros(4)
    assert torch.equal(run(state, X)[1], before)


@pytest.mark.parametrize("real", [False, True])
def test_modes_are_followed(real: bool) -> None:
    module = Configured()
    state, model = made(module)
    model = module if real else model
    run, look = T.forward_backward(model, total), T.apply(model)
    follows = T.apply(model, training=True)
    want = Configured().eval()(X)

    def evaluates(f: Any) -> bool:
        out = f(state, X)[1]
        return torch.equal(out, want if out.dim() else want.sum())

    assert [evaluates(f) for f in (run, look, follows)] == [False, True, False]
    model.eval()
    assert [evaluates(f) for f in (run, look, follows)] == [True, True, True]
    model.train()
    assert [evaluates(f) for f in (run, look, follows)] == [False, True, False]
    run.driver.model.eval()  # as a loss function may do
    assert evaluates(run)


def test_modes_decide_about_running_statistics() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    state, model = made(module.eval())
    run = T.forward_backward(model, total)
    frozen, _ = run(state, X)
    assert torch.equal(frozen.buffers["1.running_mean"], state.buffers["1.running_mean"])
    module.train()
    module(X)
    model.train()
    trained, _ = run(state, X)
    assert torch.equal(trained.buffers["1.running_mean"], module[1].running_mean)  # type: ignore[arg-type]


@pytest.mark.parametrize("first", ["eval", "train", "another state"])
def test_statistics_that_no_state_has_are_refused_whenever_they_change(first: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    bare, model = made(module, buffers=False)
    run = T.forward_backward(model, total)
    if first == "another state":
        run(made(module)[0], X)
    elif first == "eval":
        model.eval()
        run(bare, X)
        model.train()
    for _ in range(2):
        with pytest.raises(fsdp.SpecError, match=r"changed the buffer '1.running_mean', which is not in the state"):
            run(bare, X)


class Counting(Net):
    """Counts in a buffer, or lets a kernel note something: always in one way, or in that which a call says."""

    count: torch.Tensor

    def __init__(self, how: str, persistent: bool) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("count", torch.zeros(4), persistent=persistent)
        self.extra = {
            "attribute": [self.count], "view": self.count[:2], "deep": [{"a": (0, self.count)}],
            "object": types.SimpleNamespace(seen=self.count), "slots": Slotted(inner=[self.count[1:]]),
        }.get(how, 0)  # fmt: skip
        if how == "name":
            self.register_buffer("other", self.count)
        if how == "none":
            self.register_buffer("late", None, persistent=persistent)

    def forward(self, x: torch.Tensor, how: str = "") -> torch.Tensor:
        how = how or self.how
        if how == "removed":
            self.count = None  # type: ignore[assignment]
        if how in ("removed", ""):
            return super().forward(x)
        if how == "replaced":
            self.count = self.count + 1
        elif how == "none":
            self.late = torch.ones(4)
        elif how == "kernel":
            F.batch_norm(x, self.count, torch.ones(4), training=True)
        else:
            self.count += 1
        return super().forward(x) * self.count.mean()


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(("how", "mode"), [("in place", "train"), ("replaced", "train"), ("kernel", "eval")])
def test_a_buffer_that_changes_late_is_refused(how: str, mode: str, persistent: bool) -> None:
    state, model = made(Counting("", persistent), buffers=False)
    run = T.forward_backward(model, lambda model, x, how="": model(x, how).sum())
    model.train(mode == "train")
    run(state, X)
    model.train()
    if how == "replaced" and not persistent:
        with pytest.warns(UserWarning, match="replaced the buffer 'count'"):
            run(state, X, how)
        return
    with pytest.raises(fsdp.SpecError, match="changed the buffer 'count'"):
        run(state, X, how)


def test_a_model_that_is_gone_is_not_kept_alive() -> None:
    module = Configured()
    state, _ = made(module)
    run = T.forward_backward(module, total)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    run(state, X)


def test_units_that_are_called_again_in_the_backward_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(lambda x: self.a(x).tanh(), x, use_reentrant=False)
            return self.b(x) * self.w

    uses: list[weakref.ref[UnitUse]] = []
    begin = UnitUse.__init__

    def noted(self: UnitUse, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        uses.append(weakref.ref(self))

    monkeypatch.setattr(UnitUse, "__init__", noted)
    state, model = made(Checkpointed())
    T.forward_backward(model, total)(state, X)
    gc.collect()
    assert len(uses) > 3  # two modules and a weight, and one module again
    assert not [use for use in uses if use() is not None]


# ---------------------------------------------------------------- buffers


@pytest.mark.parametrize("how", ["in place", "kernel", "replaced"])
def test_a_buffer_that_is_not_persistent_rides_in_the_state_if_it_is_given(how: str, tmp_path: Any) -> None:
    plain = Counting(how, False)
    state, model = made(plain, every=True, lr=0.0)
    run, look = T.forward_backward(model, total), T.apply(model, training=True)
    for _ in range(3):
        abandoned, _ = run(state, X)
        middle, loss = run(state, X)
        torch.testing.assert_close(loss, total(plain, X).detach())
        assert torch.equal(middle.buffers["count"], plain.count)
        assert torch.equal(abandoned.buffers["count"], plain.count)
        state = fsdp.step(middle)
    fsdp.save(state, tmp_path / "saved")
    loaded = fsdp.load(tmp_path / "saved", like=state)
    torch.testing.assert_close(look(loaded, X)[1], plain(X))


def test_init_gives_buffers_that_are_not_persistent_too() -> None:
    spec = fsdp.Spec(fsdp.local_mesh())
    assert fsdp.init(lambda: Counting("in place", False), spec, every_buffer=True)[0].buffers.keys() == {"count"}
    assert not fsdp.init(lambda: Counting("in place", False), spec)[0].buffers


def test_a_cache_that_is_replaced_warns_once() -> None:
    state, model = made(Counting("replaced", False))
    run = T.forward_backward(model, total)
    with pytest.warns(UserWarning, match="replaced the buffer 'count', which is not persistent") as caught:
        run(state, X)
    assert len(caught) == 1
    run(state, X)  # where warnings are errors


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("in place, not persistent", r"changed the buffer 'count' in place, which is not persistent"),
        ("kernel, not persistent", r"changed the buffer 'count' in place, which is not persistent"),
        ("removed", "the forward removed the buffer 'count'"),
        ("none", "the forward registered the buffer 'late', which the state cannot know of"),
        ("attribute", r"whose memory the attribute 'extra\[0\]' has too"),
        ("view", "whose memory the attribute 'extra' has too"),
        ("deep", r"whose memory the attribute .extra\[0\]\['a'\]\[1\]. has too"),
        ("object", r"whose memory the attribute 'extra\.seen' has too"),
        ("slots", r"whose memory the attribute 'extra\.inner\[0\]' has too"),
        ("name", "whose memory the buffer '(other|count)' has too"),
    ],
)
def test_buffers_that_cannot_be_followed(how: str, said: str) -> None:
    state, model = made(Counting(how.partition(",")[0], "not persistent" not in how))
    run = T.forward_backward(model, total)
    for _ in range(2):
        with pytest.raises(fsdp.SpecError, match=said):
            run(state, X)


class Rotary(Net):
    """Computes a buffer when it is built, as Hugging Face models do."""

    inv_freq: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / torch.arange(1, 5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.inv_freq


@pytest.mark.parametrize("how", ["forward_backward", "apply", "second order", "bind"])
def test_buffers_without_values_are_refused(how: str) -> None:
    with torch.device("meta"):
        meta = Rotary()
    shapes, model = fsdp.functionalize(meta)
    assert fsdp.make_layout(shapes, fsdp.Spec({"data": 8}))  # to plan needs no values
    params = dict(Rotary().named_parameters())
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    with pytest.raises(fsdp.SpecError, match=r"buffer 'inv_freq' is on the meta .* init\(lambda: Model\(config\)"):
        fsdp.bind(model, params)(X) if how == "bind" else drives(how, model)(state, X)
    assert fsdp.bind(model, shapes)(X.to("meta")).is_meta
    state, model = fsdp.init(Rotary, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    torch.testing.assert_close(T.apply(model)(state, X)[1], evaluated(Rotary(), fsdp.full_params(state)))


# ---------------------------------------------------------------- a unit that returns its input


class Passes(nn.Linear):
    """A block that is left out: it gives back what it got, or a view of that."""

    view = False

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1) if self.view else x


class Around(nn.Module):
    def __init__(self, which: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.which = nn.Linear(4, 4), Passes(), nn.Linear(4, 4), which
        self.b.view = which == "view"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        y = self.b(h)
        (h if self.which == "input" else y).mul_(2.0)
        return self.c(h + y.view(h.shape))


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: T.remat(model, "b")], ids=["", "remat"])
@pytest.mark.parametrize("which", ["output", "input"])
def test_an_input_that_a_unit_returns_is_that_input(which: str, wrap: Callable[[Any], Any]) -> None:
    plain = Around(which)
    total(plain, X).backward()
    state, model = made(Around(which))
    state, _ = T.forward_backward(wrap(model), total)(state, X)
    for path, grad in fsdp.local_shards(state, "grads").items():
        wanted = dict(plain.named_parameters())[path].grad
        assert wanted is None or torch.allclose(grad.view_as(wanted), wanted)


def test_a_view_of_an_input_that_is_changed_says_so() -> None:
    state, model = made(Around("view"))
    with pytest.raises(fsdp.ScheduleError, match="'b' share memory, or one does with an input, and it was changed"):
        T.forward_backward(model, total)(state, X)


# ---------------------------------------------------------------- outputs of units that are not seen as such


class Opaque:
    """Nobody looks into it."""

    def __init__(self, h: torch.Tensor) -> None:
        self.h = h


class Hides(nn.Module):
    """Gives what it computes away by a way of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.second = how, nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept: list[torch.Tensor] = []
        if how == "hook":
            self.first.register_forward_hook(lambda part, args, out: self.kept.append(out))

    def forward(self, x: torch.Tensor) -> Any:
        self.kept.clear()
        h = self.second(self.first(x).tanh())
        if self.how == "object":
            return Opaque(h)
        self.kept.append(h)
        return h if self.how == "seen" else h.detach()


class Features(nn.Module):
    """A loss on features, as of a frozen network."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.hides, self.after, self.last = nn.Linear(4, 4), Hides(how), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.hides(self.before(x))
        h = out.h if isinstance(out, Opaque) else out if self.hides.how == "seen" else self.hides.kept[0]
        return self.last(self.after(h).tanh())


@pytest.mark.parametrize("frozen", ["", "hides.*", "hides.first.*"])
@pytest.mark.parametrize("how", ["object", "attribute", "hook", "seen"])
def test_a_loss_on_what_is_no_output_of_a_unit(how: str, frozen: str) -> None:
    """Without the error a frozen unit's backward would read the bytes of others."""
    module = Features(how)
    units = ["before", "hides", "after", "last"]
    debug = fsdp.Schedule(debug=True)
    state, model = made(module, units=units, schedule=debug, trainable={frozen: False} if frozen else {})
    run = T.forward_backward(model, total)
    if how != "seen":
        for _ in range(2):
            with pytest.raises(fsdp.ScheduleError, match="a tensor that is no output of the module 'hides': one kept"):
                run(state, X)
        return
    for path, p in module.named_parameters():
        p.requires_grad_(not (frozen and path.startswith(frozen[:-1])))
    state = fsdp.step(run(state, X)[0])
    total(module, X).backward()
    for path, p in module.named_parameters():
        want = p if p.grad is None else p - 0.1 * p.grad
        torch.testing.assert_close(fsdp.full_params(state)[path], want.detach())


# ---------------------------------------------------------------- how a forward reaches weights


class Holder:
    __slots__ = ("__weakref__", "held")

    def __init__(self, held: Any) -> None:
        self.held = held


class Both(NamedTuple):
    weight: Any
    others: list[Any]


def local_of(value: Any) -> threading.local:
    made = threading.local()
    made.held = value
    return made


def closing(m: Any) -> Callable[[], Any]:
    w = m.w
    return lambda: w * m.a.bias


def hooked(m: Any) -> weakref.ref[Any]:
    """A hook that holds the module weakly; the other way is in the hook."""
    m.b.register_forward_hook(functools.partial(lambda ref, part, args, out: out * ref().w, weakref.ref(m)))
    return weakref.ref(m)


#: what a module has in an attribute, and what its forward makes of that
REACHED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "weak reference": (weakref.ref, lambda it: it().w),
    "weak reference to a part": (lambda m: [weakref.ref(m.a)], lambda it: it[0]().bias),
    "weak reference to a weight": (lambda m: weakref.ref(m.w), lambda it: it() * 1),
    "weak method": (lambda m: weakref.WeakMethod(m.scale), lambda it: it()()),
    "weak values": (lambda m: weakref.WeakValueDictionary(a=m.a), lambda it: it["a"].bias),
    "weak keys": (lambda m: weakref.WeakKeyDictionary({m.a: 2}), lambda it: next(k.bias * v for k, v in it.items())),
    "weak set": (lambda m: weakref.WeakSet([m.a]), lambda it: next(iter(it)).bias),
    "proxy": (lambda m: [weakref.proxy(m)], lambda it: it[0].w),
    "hook that holds it": (hooked, lambda it: 1.0),
    "cached method": (lambda m: functools.lru_cache(maxsize=2)(m.scale), lambda it: it.cache_clear() or it()),
    "cache in a list": (lambda m: [functools.cache(lambda: m.w * 2)], lambda it: it[0].cache_clear() or it[0]()),
    "of a thread": (local_of, lambda it: it.held.w),
    "slots": (Holder, lambda it: it.held.w),
    "method": (lambda m: m.scale, lambda it: it()),
    "partial": (lambda m: functools.partial(torch.mul, m.w), lambda it: it(2.0)),
    "closure over a weight": (closing, lambda it: it()),
    "default that is a weight": (lambda m: lambda x, w=m.w: x * w, lambda it: it(2.0)),
    "tuple of functions": (lambda m: (lambda: m.w, m.scale), lambda it: it[0]() * it[1]()),
    "set of functions": (lambda m: {m.scale}, lambda it: next(iter(it))()),
    "builtin method": (lambda m: {"w": m}.get, lambda it: it("w").w),
    "list of weights": (lambda m: [m.w, m.a.bias], lambda it: it[0] * it[1].exp()),
    "tuple of weights": (lambda m: (m.w, [m.a.bias]), lambda it: it[0].exp() * torch.stack((it[1][0], it[0]))[0]),
    "named tuple of weights": (lambda m: Both(m.w, [m.a.bias]), lambda it: it.weight.clone().mul_(2) + it.others[0]),
    "dict of weights": (lambda m: {"w": m.w, "v": [{1: m.w}]}, lambda it: it["w"] * it["v"][0][1]),
    "dict by weight": (lambda m: {m.w: 3.0}, lambda it: next(k * v for k, v in it.items())),
    "proxy of a dict": (lambda m: types.MappingProxyType({"w": m.w, "m": m}), lambda it: it["w"] * it["m"].w),
    "object with a weight": (lambda m: types.SimpleNamespace(w=m.w, n=[m]), lambda it: it.w + it.n[0].a.bias),
}


class Reaching(Net):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.way = how, REACHED[how][0](self)

    def scale(self) -> torch.Tensor:
        return self.w * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * REACHED[self.how][1](self.way)


@pytest.mark.parametrize("how", REACHED)
def test_whatever_leads_to_weights_leads_to_those_of_the_state(how: str) -> None:
    plain = Reaching(how)
    losses = []
    for _ in range(2):
        loss = total(plain, X)
        grads = torch.autograd.grad(loss, [*plain.parameters()])
        with torch.no_grad():
            for p, g in zip(plain.parameters(), grads, strict=True):
                p.sub_(0.1 * g)
        losses.append(loss.item())
    weights = dict(plain.named_parameters())
    for way in ("driven", "second order" if [*REACHED].index(how) % 2 else "bound"):
        module = Reaching(how)
        state, model = made(module)
        del module  # what a weak reference leads to is the copy's
        run: Any = T.forward_backward(model, total, second_order=way == "second order")
        for want in losses:
            if way == "bound":
                state, params = fsdp.unshard(state)
                loss_of = functools.partial(lambda model, p: total(fsdp.bind(model, p), X), model)
                grads, loss = torch.func.grad_and_value(loss_of)(params)
                state = fsdp.reduce(state, grads)
            else:
                state, loss = run(state, X)
            state = fsdp.step(state)
            assert loss.item() == pytest.approx(want)
        for path, weight in fsdp.full_params(state).items():
            torch.testing.assert_close(weight, weights[path].detach())
        torch.testing.assert_close(T.apply(fsdp.functionalize(model)[1])(state, X)[1], plain(X).detach())


REGISTRY: dict[str, Any] = {}


def looked_up(name: str) -> Any:
    return REGISTRY[name]


class Registered(Net):
    last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * REGISTRY["m"].w


class Helped(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * looked_up("m").w


class Shared(Net):
    last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * type(self).last.w


class Owner:
    def __init__(self, module: Any) -> None:
        self.module = module


def test_what_leads_to_weights_from_outside_is_refused() -> None:
    said = {Registered: r"Registered\.forward\) reads the global variable 'REGISTRY', which holds a part of the model",
            Helped: r"looked_up\) reads the global variable 'REGISTRY', which holds a part of the model",
            Shared: r"Shared\.forward\) reads the attribute 'last' of Shared, which is a part of"}  # fmt: skip
    for kind, match in said.items():
        module = kind()
        assert fsdp.functionalize(module)
        REGISTRY["m"] = Shared.last = module
        with pytest.raises(fsdp.TreeError, match=match):
            fsdp.functionalize(module)
        REGISTRY.clear()
        Shared.last = None

    module = Net()
    owner = Owner(module)
    module.owner = [weakref.ref(owner)]  # type: ignore[assignment]
    with pytest.raises(fsdp.TreeError, match=r"'owner\[0\]' .* leads to a part of the model, by a weak reference"):
        fsdp.functionalize(module)
    module.owner = owner  # type: ignore[assignment]
    model: Any = fsdp.functionalize(module)[1]
    assert model.owner.module is model


class Remade(nn.Module):
    """Makes a part anew when it is copied, as modules do that compile their code."""

    part: nn.Module

    def __init__(self, keeps: bool = True) -> None:
        super().__init__()
        self.keeps, self.w = keeps, nn.Parameter(torch.ones(4))
        self.part = nn.Sequential(nn.Tanh(), nn.Linear(4, 4))

    def __getstate__(self) -> dict[str, Any]:
        held = self.__dict__.copy()
        held["_modules"] = {}
        return held

    def __setstate__(self, held: dict[str, Any]) -> None:
        self.__dict__.update(held)
        self.part = nn.Sequential(nn.Tanh(), nn.Linear(4, 4, bias=self.keeps))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x * self.w)


def test_modules_that_make_a_part_anew_when_they_are_copied() -> None:
    module = Remade()
    want = module(X)
    state, model = made(module)
    assert torch.equal(T.apply(model)(state, X)[1], want)
    with pytest.raises(fsdp.TreeError, match=r"a copy of Remade has other parameters than it has: \['part\.1\.bias'\]"):
        fsdp.functionalize(Remade(keeps=False))


class Assigns(nn.Module):
    n: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 1)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n = self.n + 1
        return self.a(x).tanh()


def test_a_buffer_that_is_assigned_within_nested_transforms_is_a_plain_tensor() -> None:
    state, model = made(Assigns())

    def curvature(model: Any, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda x: model(x).sum())
        return torch.func.jvp(slope, (x,), (torch.ones_like(x),))[1].square().mean()

    for count in (1, 2, 3):  # torch's own second call of the plain module ends in an internal assert
        state, _ = T.forward_backward(model, curvature)(state, X)
        state = fsdp.step(state)
        assert type(state.buffers["n"]) is torch.Tensor
        assert state.buffers["n"].item() == count


class Failing:
    """An object that refuses to be copied."""

    def __init__(self, held: Any, error: Exception | None = None) -> None:
        self.held, self.error = held, error

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.error or NotImplementedError("not me")


def test_what_cannot_be_copied_is_shared_unless_it_leads_to_a_weight(tmp_path: Path) -> None:
    module: Any = Net()
    with (tmp_path / "log").open("w") as file:
        held = [threading.Lock(), file, map(int, "12"), (i for i in range(3)), threading.Event(), Failing([1]),
                contextvars.ContextVar("c"), memoryview(b"1"), torch.utils._pytree.tree_structure([1]),
                StorageWeakRef(torch.ones(1, device="cpu").untyped_storage())]  # fmt: skip
        module.held = dict(enumerate(held))
        state, copied = made(module)
        model: Any = copied
        for i, value in enumerate(held):
            assert (model.held[i] is value) is (i not in (2, 4))
        assert model.held[4] is not held[4]  # an object of Python's; its lock is the same
        want = T.apply(model)(state, X)[1]
        assert torch.equal(want, module(X))
    for value in (Failing([module.a]), (p for p in [module.w]), Failing(weakref.ref(module.b)), module.w * 2):
        module.held = [value]
        with pytest.raises(fsdp.TreeError, match=r"'held\[0\]' .* cannot be copied .* may lead to weights") as caught:
            fsdp.functionalize(module)
        assert isinstance(caught.value.__cause__, Exception)  # the class's own error, with its lines
    for spent in (MemoryError(), torch.OutOfMemoryError()):  # says nothing of the class
        module.held = Failing([1], spent)
        with pytest.raises(type(spent)):
            fsdp.functionalize(module)


class Defaults(nn.Module):
    """Keeps its default arguments, and methods have such, too."""

    def __init__(
        self, norm: Any = functools.partial(nn.LayerNorm, eps=1e-6), sizes: Any = [4, 4], act: Any = nn.ReLU(),  # noqa: B006, B008
        first: Any = nn.Linear(4, 4), config: Any = types.SimpleNamespace(width=4),  # noqa: B008
    ) -> None:  # fmt: skip
        super().__init__()
        self.kept, self.act, self.norm, self.config = (norm, sizes), act, norm(4), config
        self.first, self.second = first, nn.Linear(*sizes)

    def forward(self, x: torch.Tensor, act: Any = F.relu, sizes: Any = (4, 4)) -> torch.Tensor:
        out: torch.Tensor = act(self.act(self.second(self.norm(self.first(x)))))
        return out.reshape(-1, sizes[1])


def test_default_arguments_that_an_instance_keeps() -> None:
    module = Defaults()
    state, model = made(module)
    assert torch.equal(T.apply(model)(state, X)[1], module(X))

    class Later(Net):
        def late(self, layer: Any = Net().a) -> Any:  # noqa: B008
            return layer

    later = Later()
    later.a = Later.late.__defaults__[0]  # type: ignore[index]
    with pytest.raises(fsdp.TreeError, match=r"Later\.late\) closes over a part of the model"):
        fsdp.functionalize(later)


def test_buffers_carried_to_a_bound_critic_and_back_are_those_of_a_loop_in_plain_torch() -> None:
    """Adversarial training by the recipe: a forward of either side turns the vectors of `spectral_norm`."""

    def make(wide: int, seed: int, norm: Any = lambda layer: layer) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(norm(nn.Linear(3, wide)), nn.Tanh(), norm(nn.Linear(wide, 3))).double()

    def tell_apart(critic: Any, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        return F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()

    spectral = nn.utils.parametrizations.spectral_norm
    plain_critic, plain_generator = make(8, 1, spectral), make(4, 0)
    sides = [torch.optim.SGD(one.parameters(), lr=0.3) for one in (plain_critic, plain_generator)]
    module, spec = make(8, 1, spectral), fsdp.Spec(fsdp.local_mesh())
    (critic_params, critic), (generator_params, generator) = map(fsdp.functionalize, (module, make(4, 0)))
    judge = fsdp.shard(critic_params, spec, fsdp.sgd(lr=0.3), buffers=fsdp.buffers(module))
    artist = fsdp.shard(generator_params, spec, fsdp.sgd(lr=0.3))
    for step in range(5):
        torch.manual_seed(step)
        noise, real = torch.randn(2, 6, 3, dtype=torch.float64)
        for side, optimizer in enumerate(sides):
            optimizer.zero_grad()
            fake = plain_generator(noise)
            loss = F.softplus(-plain_critic(fake)).mean() if side else tell_apart(plain_critic, real, fake.detach())
            loss.backward()
            optimizer.step()
        artist, fake = T.apply(generator)(artist, noise)
        judge, _ = T.forward_backward(critic, tell_apart)(judge, real, fake)
        judge, whole = fsdp.unshard(fsdp.step(judge))
        critic.load_state_dict(dict(judge.buffers), strict=False)
        bound = fsdp.bind(critic, whole)
        fooled = T.forward_backward(generator, lambda model, z: F.softplus(-bound(model(z))).mean())  # noqa: B023
        artist = fsdp.step(fooled(artist, noise)[0])
        judge = fsdp.extend.evolve(fsdp.drop_gradients(judge), buffers=fsdp.buffers(critic))
    for state, plain in ((judge, plain_critic), (artist, plain_generator)):
        found, want = fsdp.state_dict(state), plain.state_dict()
        assert found.keys() == want.keys()
        for name, tensor in want.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)
