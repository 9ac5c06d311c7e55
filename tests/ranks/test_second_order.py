"""forward_backward with second_order: gradients of gradients, against the plain module, on different data per rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from support.driven import Dropout, refused, start
from support.models import CASES, Stack, batch_of, entropy, made
from support.problems import full_grads, largest
from support.ranks import each_rank, launch
from support.scenario import Scenario, all_alike, apart, plain
from support.tables import each
from support.transactions import Boom, taken

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

Tree = dict[str, torch.Tensor]
WIDTH, TOKENS = 6, 13


class Block(nn.Module):
    """Attention and an MLP, smooth."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
        weights = (q @ k.mT / WIDTH**0.5).masked_fill(~mask, -1e9).softmax(-1)
        x = x + self.out(weights @ v)
        y: torch.Tensor = x + self.down(F.gelu(self.up(x)))
        return y


class GPT(nn.Module):
    """A tied head, and a frozen scale."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.25), requires_grad=False)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(x) * self.scale
        return y

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.run(self.embed(tokens))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 9)
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        self.head = nn.Linear(9, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inp(x))
        for block in self.blocks:
            x = x + F.softplus(block(x))
        y: torch.Tensor = self.head(x)
        return y


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_the_input(model: Any, seed: int) -> torch.Tensor:
    """WGAN-GP's penalty: the norm of the critic's gradient with respect to its input is to be 1."""
    x = numbers(4, 5, seed=seed).requires_grad_()
    out = model(x)
    (dx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + 10 * (dx.norm(dim=1) - 1).square().mean()


def of_the_weights(model: Any, seed: int) -> torch.Tensor:
    """The squared norm of the gradient with respect to the weights themselves, tied and frozen ones among them."""
    loss = model(numbers(4, 5, seed=seed)).square().mean()
    grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], create_graph=True)
    return loss + 0.1 * sum(g.square().sum() for g in grads)


def of_nothing(model: Any, seed: int) -> torch.Tensor:
    """Of a quantity that no weight has a part in."""
    x = numbers(4, 5, seed=seed).requires_grad_()
    (dx,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    return model(dx).mean() + dx.square().mean()


def not_created(model: Any, seed: int) -> torch.Tensor:
    """An inner gradient that is a constant to the outer one: an adversarial input."""
    x = numbers(4, 5, seed=seed).requires_grad_()
    (dx,) = torch.autograd.grad(model(x).sum(), x)
    return model(x.detach() + 0.1 * dx.sign()).square().mean()


def of_the_embedding(model: Any, seed: int) -> torch.Tensor:
    tokens = torch.randint(TOKENS, (2, 7), generator=torch.Generator().manual_seed(seed))
    x = model.embed(tokens)
    loss = F.cross_entropy(model.run(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + 3 * dx.square().sum()


def of_tied_weights(model: Any, seed: int) -> torch.Tensor:
    tokens = torch.randint(TOKENS, (2, 7), generator=torch.Generator().manual_seed(seed))
    loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], create_graph=True)
    return loss + 0.5 * sum(g.square().sum() for g in grads)


LOSSES: dict[str, tuple[type[nn.Module], Callable[[Any, int], torch.Tensor]]] = {
    "the input": (MLP, of_the_input),
    "the weights": (MLP, of_the_weights),
    "nothing": (MLP, of_nothing),
    "not created": (MLP, not_created),
    "the embedding": (GPT, of_the_embedding),
    "tied weights": (GPT, of_tied_weights),
}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return LOSSES[name][0]().to(dtype)


def of(name: str, **more: Any) -> Scenario:
    data = lambda step, rank, micro: 100 * step + 10 * rank + micro  # noqa: E731
    options = {"second_order": True}
    return Scenario(model=lambda: build(name), loss_fn=LOSSES[name][1], data=data, options=options, **more)


@pytest.mark.parametrize(("name", "preset"), each(LOSSES, ["zero3", "zero2"]))
def test_gradients_of_gradients_are_the_plain_modules(name: str, preset: str) -> None:
    one = of(name, preset=preset, micro=2 if name == "the embedding" else 1)
    wanted = plain(one, 2)
    for seen in all_alike(one, other=wanted):
        assert max(map(apart, seen.grads, wanted[0].grads)) < 1e-10
    assert all(max(g.abs().max().item() for g in grads.values()) > 1e-3 for grads in wanted[0].grads)


@each_rank(2)
def test_in_float32() -> None:
    name = "tied weights"
    state, model = start(build(name, torch.float32), "zero3")
    forward_backward = T.forward_backward(model, LOSSES[name][1], second_order=True)
    state, _ = forward_backward(state, 10 * dist.get_rank())
    assert not any(type(p) in (torch.Tensor, nn.Parameter) for p in forward_backward.driver.model.parameters())
    found = full_grads(fsdp.finish_reductions(state))
    for path, g in plain(of(name, steps=1), 2)[0].grads[0].items():
        assert (found[path] - g).abs().max() < 1e-5 * g.abs().max()


# ---------------------------------------------------------------- as the first-order one otherwise


@pytest.mark.parametrize("preset", ["zero3", pytest.param("ddp", marks=pytest.mark.large)])
@each_rank(2)
def test_it_changes_nothing_else(preset: str) -> None:
    """Loss, gradients, aux, dropout masks, buffers, frozen and tied leaves."""
    torch.manual_seed(5)
    state, model = start(Dropout().double(), preset)
    data = torch.randint(0, 30, (2, 3), generator=torch.Generator().manual_seed(dist.get_rank()))
    found = []

    def loss_fn(model: Any, x: torch.Tensor) -> Any:
        out = model(x)
        return out.square().mean(), out

    for second_order in (False, True):
        forward_backward = T.forward_backward(model, loss_fn, True, second_order=second_order)
        middle, out = forward_backward(state, data, last_microbatch=False)
        middle, more = forward_backward(middle, data, scale=0.5)
        found.append((out, more, full_grads(fsdp.finish_reductions(middle))))
    (a, b, grads), (c, d, other) = found
    assert torch.equal(a[0], c[0])
    assert torch.equal(b[0], d[0])
    assert not torch.equal(a[0], b[0])
    assert torch.equal(a[1], c[1])
    assert not c[1].requires_grad
    assert largest(grads, other) < 1e-14
    case = CASES["resnet"]
    state, model = start(made(case), preset)
    kept = []
    for second_order in (False, True):
        forward_backward = T.forward_backward(model, case.loss_fn, second_order=second_order)
        middle, _ = forward_backward(state, batch_of(case, 0, dist.get_rank()))
        kept.append(dict(middle.buffers))
    assert all(torch.equal(kept[0][key], kept[1][key]) for key in kept[0])


class Breaks(nn.Module):
    where = ""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Breaks.where == "forward":
            raise Boom("on purpose")
        out: torch.Tensor = self.module(x)
        return _Break.apply(out)


class _Break(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Breaks.where == "backward" or (Breaks.where == "inner backward" and torch.is_grad_enabled()):
            raise Boom("on purpose")
        return grad


def breaks(where: str, who: tuple[int, ...]) -> tuple[Tree, list[str]]:
    torch.manual_seed(0)
    state, model = start(Breaks(MLP().double()))
    forward_backward = T.forward_backward(model, of_the_input, second_order=True)

    def take(state: fsdp.State, step: int, met: list[str]) -> fsdp.State:
        Breaks.where = where if step == 1 and not met and dist.get_rank() in who else ""
        return fsdp.step(forward_backward(state, 100 * step + 10 * dist.get_rank())[0])

    state, met = taken(state, take, 3)
    return fsdp.full_params(state), met


@pytest.mark.parametrize(("where", "who"), each(["forward", "inner backward", "backward"], [(0, 1), (1,)]))
def test_an_error_inside_the_model_costs_nothing(where: str, who: tuple[int, ...]) -> None:
    good, _ = launch(breaks, ("", ()), nprocs=2, processes=True)[0]
    for rank, (weights, said) in enumerate(launch(breaks, (where, who), nprocs=2, processes=True)):
        assert said == ["Boom" if rank in who else "RestartError"]
        assert all(torch.equal(weights[key], good[key]) for key in good)


@each_rank(2)
def test_what_cannot_work_says_so() -> None:
    state, model = start(build("the input"))
    other, _ = start(nn.Linear(2, 2))
    again: Any = T.forward_backward(model, lambda model, seed: again(state, seed)[1], second_order=True)

    def attempt(fn: Callable[..., Any], state: fsdp.State = state, second_order: bool = True) -> Callable[[], Any]:
        return lambda: T.forward_backward(model, fn, second_order=second_order)(state, dist.get_rank())

    asked = "ScheduleError: a gradient of a gradient was asked for (create_graph=True)"
    remedy = "T.forward_backward(model, loss_fn, second_order=True)"
    refused(
        (attempt(of_the_input, second_order=False), asked, remedy),
        (attempt(not_created, second_order=False), "a backward was run inside the loss function", remedy),
        (attempt(of_the_input, other), "this state is of another model"),
        (lambda: again(state, 0), "called again from within its own loss function"),
        (attempt(lambda model, seed: torch.zeros(())), "does not depend on any weight that trains"),
    )
    attempt(of_the_input)()


@each_rank(2)
def test_accumulated_and_recomputed() -> None:
    """T.accumulate and T.remat around and inside."""
    torch.manual_seed(0)
    state, model = start(Stack().double())
    data = batch_of(CASES["loose parameters"], 0, dist.get_rank())

    def penalty(model: Any, batch: Any) -> torch.Tensor:
        x = model.embed(batch["source"]) + model.start
        out = F.linear(model.norm(model.run(x)), model.embed.weight)
        (dx,) = torch.autograd.grad(out.square().mean(), x, create_graph=True)
        return entropy(model, batch) + dx.square().sum()

    grads = []
    for one in (model, T.remat(model, "layers.*")):
        middle, _ = T.accumulate(T.forward_backward(one, penalty, second_order=True), 2)(state, data)
        grads.append(full_grads(fsdp.finish_reductions(middle)))
    assert largest(*grads) < 1e-12


def no_gradient(model: Any, seed: int) -> torch.Tensor:
    loss: torch.Tensor = model(torch.full((1, 3), seed % TOKENS)).square().mean()
    return loss


@pytest.mark.parametrize("order", [pytest.param(None, marks=pytest.mark.large), "recorded"])
@each_rank(2)
def test_beside_first_order_microbatches(order: Any) -> None:
    """Steps of one microbatch each way, in turns: which comes first does not matter."""
    module = build("the embedding")
    for rank in range(2):
        ((of_the_embedding(module, 10 * rank) + no_gradient(module, 10 * rank)) / 2).backward()
    wanted = {path: p.grad for path, p in module.named_parameters() if p.requires_grad and p.grad is not None}
    state, model = start(build("the embedding"), schedule=fsdp.Schedule(order=order, debug=True))
    both = [T.forward_backward(model, of_the_embedding, second_order=True), T.forward_backward(model, no_gradient)]
    seen = []
    for step in range(4):
        turn = both if step % 2 else both[::-1]
        middle = state
        for forward_backward in turn:
            middle, _ = forward_backward(middle, 10 * dist.get_rank(), last_microbatch=forward_backward is turn[-1])
        seen.append(full_grads(fsdp.finish_reductions(middle)))
        state = fsdp.step(middle) if step == 2 else state
    assert all(largest(found, wanted) < 1e-10 for found in seen[:3])  # of the same state
    assert largest(seen[3], seen[0]) > 1e-3  # after a step
