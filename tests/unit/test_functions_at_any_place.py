"""Functions of torch.autograd in driven models: weights that they are given anywhere get their gradients, or an error
says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from support.chains import mean_square as mean
from support.functions import KINDS, PLACES, Placed
from support.tables import marked
from torch.autograd import forward_ad

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def moved(module: nn.Module, preset: str = "zero3", transform: Any = lambda model: model, **how: Any) -> Any:
    """By how much a step moved each weight, beside plain torch: three steps of gradient descent."""
    params, model = fsdp.functionalize(module)
    spec = fsdp.Spec(fsdp.local_mesh(), getattr(fsdp, preset)("data"), units=["a", "b", "norm"])
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1))
    forward_backward = T.forward_backward(transform(model), mean, **how)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        state, loss = forward_backward(state, X)
        state = fsdp.step(state)
        optimizer.zero_grad()
        want = mean(module, X)
        want.backward()
        optimizer.step()
        torch.testing.assert_close(loss, want.detach())
    return fsdp.full_params(state), dict(module.named_parameters(remove_duplicate=False))


HOW: dict[str, dict[str, Any]] = {
    "zero3": {}, "ddp": {"preset": "ddp"}, "second order": {"second_order": True},
    "recomputed": {"transform": lambda model: T.remat(model, "b", "norm")},
}  # fmt: skip


ROWS = [(kind, how) for kind in KINDS for how in HOW]
QUICK = [row for i, row in enumerate(ROWS) if row[1] == "zero3" or i % 3 == 0]


@pytest.mark.parametrize(("kind", "how"), marked(ROWS, QUICK))
def test_weights_that_a_function_is_given_get_their_gradients(kind: str, how: str) -> None:
    for places in (PLACES, *((place,) for place in PLACES if how == "zero3")):
        got, want = moved(Placed(kind, *places), **HOW[how])
        torch.testing.assert_close(got, {path: p.detach() for path, p in want.items()}, msg=f"{kind} at {places}")


def test_a_frozen_weight_that_a_function_is_given_gets_none() -> None:
    module = Placed("Explicit", *PLACES)
    before = module.w.detach().clone()
    params, model = fsdp.functionalize(module)
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), trainable={"w": False}), fsdp.sgd(lr=0.1))
    state, _ = T.forward_backward(model, mean)(state, X)
    module.w.requires_grad_(False)
    mean(module, X).backward()
    got = fsdp.full_params(fsdp.step(state))
    assert torch.equal(got["w"], before)
    torch.testing.assert_close(got["a.bias"], (module.a.bias - 0.1 * module.a.bias.grad).detach())  # type: ignore[operator]


# ---------------------------------------------------------------- gradients that the model takes by itself


class Adjoint(torch.autograd.Function):
    """Calls its module again in its backward, as the adjoint method of an ODE does."""

    @staticmethod
    def forward(ctx: Any, f: nn.Module, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.f = f
        ctx.save_for_backward(x, *weights)
        return x + f(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = x + ctx.f(x)
        return None, *torch.autograd.grad(out, (x, *weights), grad, allow_unused=True)


class Leaves(torch.autograd.Function):
    """Has its module's gradients go into `.grad`, as some reversible blocks do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, f: nn.Module) -> torch.Tensor:
        ctx.f = f
        ctx.save_for_backward(x)
        return f(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.f(x)
        torch.autograd.backward(out, grad)
        return x.grad, None


class Takes(nn.Module):
    """Does something with its parts."""

    def __init__(self, what: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.what = what
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.LayerNorm(4)
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.what(self, x)


def inner_step(m: Any, x: torch.Tensor) -> torch.Tensor:
    weights = dict(m.b.named_parameters())
    loss = torch.func.functional_call(m.b, weights, (x,)).square().mean()
    grads = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
    stepped = {path: w - 0.1 * grad for (path, w), grad in zip(weights.items(), grads, strict=True)}
    return m.a(torch.func.functional_call(m.b, stepped, (x,)))


def dual(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    with forward_ad.dual_level():
        out: torch.Tensor = forward_ad.unpack_dual(m.b(forward_ad.make_dual(h, torch.ones_like(h)))).tangent
        return out + m.norm(h)


def vmapped_weight(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda row: row * m.w)(m.norm(m.b(m.a(x))))


BACKWARD = "a backward was run inside the loss function, the model, or the backward of an"
TAKES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "an adjoint, first": lambda m, x: m.norm(Adjoint.apply(m.b, x, *m.b.parameters())),
    "an adjoint, later": lambda m, x: Adjoint.apply(m.b, m.a(x), *m.b.parameters()),
    "an adjoint of its input": lambda m, x: Adjoint.apply(m.b, m.a(x)),
    "an inner step": inner_step,
}
TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "vmap": lambda m, x: torch.func.vmap(m.b)(m.a(x)),
    "vmap of a weight": vmapped_weight,
    "jacrev": lambda m, x: torch.func.vmap(torch.func.jacrev(m.b))(m.a(x)).sum(-1),
    "hessian": lambda m, x: torch.func.vmap(torch.func.hessian(lambda h: m.b(h).sum()))(m.a(x)).sum(-1),
    "jvp": lambda m, x: torch.func.jvp(m.b, (m.a(x),), (torch.ones_like(x),))[1],
    "forward mode": dual,
}  # fmt: skip


@pytest.mark.parametrize("what", TAKES)
def test_gradients_inside_a_model_name_second_order_and_are_right_with_it(what: str) -> None:
    module = Takes(TAKES[what])
    params, model = fsdp.functionalize(module)
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), units=["a", "b", "norm"]), fsdp.sgd(lr=0.1))
    with pytest.raises(fsdp.ScheduleError, match=BACKWARD) as caught:
        T.forward_backward(model, mean)(state, X)
    assert "T.forward_backward(model, loss_fn, second_order=True)" in str(caught.value)
    if what == "an adjoint of its input":
        return  # plain torch gives its weights no gradient either
    got, want = moved(module, second_order=True)
    torch.testing.assert_close(got, {path: p.detach() for path, p in want.items()})


@pytest.mark.parametrize("second_order", [False, True])
@pytest.mark.parametrize("what", TRANSFORMS)
def test_transforms_inside_a_model_are_right_with_and_without_second_order(what: str, second_order: bool) -> None:
    got, want = moved(Takes(TRANSFORMS[what]), second_order=second_order)
    torch.testing.assert_close(got, {path: p.detach() for path, p in want.items()})


@pytest.mark.parametrize("second_order", [False, True])
@pytest.mark.parametrize("what", ["a unit", "a weight"])
def test_gradients_that_go_into_the_weights_themselves_are_refused(what: str, second_order: bool) -> None:
    def does(m: Any, x: torch.Tensor) -> torch.Tensor:
        return Leaves.apply(m.a(x), m.b if what == "a unit" else lambda h: h * m.w)

    params, model = fsdp.functionalize(Takes(does))
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), units=["a", "b", "norm"]), fsdp.sgd(lr=0.1))
    where = "b.0.weight" if what == "a unit" else "w"
    said = f"left a gradient in .grad of the weight '{where}'" if second_order else BACKWARD
    with pytest.raises(fsdp.ScheduleError, match=said):
        T.forward_backward(model, mean, second_order=second_order)(state, X)


def test_a_function_inside_a_unit_may_call_the_unit_again() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Adjoint.apply(self.f, x, *self.f.parameters())

    module = Takes(lambda m, x: m.norm(m.b(m.a(x))))
    module.b = nn.Sequential(Inner(), nn.Tanh())
    got, want = moved(module)
    torch.testing.assert_close(got, {path: p.detach() for path, p in want.items()})


def test_a_gradient_of_no_weight_may_be_taken_inside() -> None:
    def does(m: Any, x: torch.Tensor) -> torch.Tensor:
        z = x.detach().clone().requires_grad_()
        (grad,) = torch.autograd.grad(z.square().sum(), z)
        return m.norm(m.b(m.a(torch.func.vmap(lambda row: row.exp())(grad)))) * m.w

    got, want = moved(Takes(does))
    torch.testing.assert_close(got, {path: p.detach() for path, p in want.items()})
