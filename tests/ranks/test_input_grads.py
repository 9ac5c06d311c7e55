"""forward_backward(input_grads=True): gradients of what a rank gives, beside the plain module's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.driven import raised, start
from support.presets import PRESETS, ranks_of
from support.problems import full_grads
from support.ranks import each_rank, launch
from support.tables import FULL, marked

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

WIDTH = 6


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Middle(nn.Module):
    """A stage of a pipeline; the first unit is frozen, as one with adapters behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.parts[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def middle() -> Middle:
    torch.manual_seed(0)
    return Middle().double()


def data_of(rank: int, rows: int = 4) -> tuple[dict[str, Any], torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    x, dy, unused = (torch.randn(rows, WIDTH, generator=g, dtype=torch.float64) for _ in range(3))
    return {"x": x, "which": torch.arange(rows), "more": (unused, 3)}, dy


def hanging(model: Any, batch: Any, dy: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is what the next stage has handed back."""
    out: torch.Tensor = (model(batch["x"])[batch["which"]] * dy).sum()
    return out


def with_aux(model: Any, batch: Any, dy: torch.Tensor) -> tuple[torch.Tensor, Any]:
    loss = hanging(model, batch, dy)
    return loss, {"double": 2 * loss}


WAYS: dict[str, dict[str, Any]] = {
    "eager": {}, "compiled units": {"compile": {"backend": "aot_eager"}}, "second order": {"second_order": True},
    "T.compile": {},
}  # fmt: skip


def found(preset: str, way: str) -> dict[str, Any]:
    state, model = start(middle(), preset)
    data = data_of(dist.get_rank())
    plain = T.forward_backward(model, hanging, **WAYS[way])
    asked = T.forward_backward(model, hanging, input_grads=True, **WAYS[way])

    def train_step(state: fsdp.State, batch: Any, dy: torch.Tensor) -> Any:
        state, out = asked(state, batch, dy)
        return fsdp.step(state), out

    if way == "T.compile":
        step = T.compile(train_step, "aot_eager")
        for _ in range(2):
            state, (loss, grads) = step(state, *data)
        return {"loss": loss, "grads": grads}
    middle_, right = plain(state, *data)
    weights = full_grads(fsdp.finish_reductions(middle_))
    state, (loss, grads) = asked(fsdp.drop_gradients(middle_), *data)
    state = fsdp.finish_reductions(state)
    same = torch.equal(loss, right) and all(torch.equal(g, weights[path]) for path, g in full_grads(state).items())
    assert not any(t.requires_grad for t in data if isinstance(t, torch.Tensor))
    state = fsdp.step(state)  # a second time, when the order of units is known
    state, (loss, grads) = asked(state, *data)
    return {"loss": loss, "grads": grads, "same": same}


def right(rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the plain module after a step."""
    model = middle()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    for p, g in zip(trained, torch.autograd.grad(
        torch.stack([hanging(model, *data_of(r)) for r in range(ranks)]).mean(), trained), strict=True):  # fmt: skip
        p.grad = g
    optimizer.step()
    batch, dy = data_of(rank)
    batch["x"].requires_grad_()
    dy.requires_grad_()
    loss = hanging(model, batch, dy)
    dx, ddy = torch.autograd.grad(loss, [batch["x"], dy])
    return loss.detach(), dx, ddy


@pytest.mark.parametrize(
    ("preset", "way"),
    marked([(p, w) for p in PRESETS for w in WAYS],
           [("zero3", "compiled units"), ("zero3", "second order"), ("hfsdp", "eager"), ("zero3", "T.compile")]),
)  # fmt: skip
def test_they_are_the_plain_modules(preset: str, way: str) -> None:
    ranks = ranks_of(preset) if FULL or way != "compiled units" else 1
    for rank, got in enumerate(launch(found, (preset, way), nprocs=ranks, processes=way == "T.compile")):
        loss, dx, ddy = right(rank, ranks)
        batch, dy = got["grads"]
        assert got.get("same", True)
        torch.testing.assert_close(got["loss"], loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close((batch["x"], dy), (dx, ddy), rtol=1e-12, atol=1e-12)
        assert batch["which"] is None
        assert batch["more"][1] is None
        assert torch.equal(batch["more"][0], torch.zeros(4, WIDTH, dtype=torch.float64))


# ---------------------------------------------------------------- a world of one


def one(call: Callable[[fsdp.State, nn.Module], Any], module: nn.Module | None = None) -> Any:
    params, model = fsdp.functionalize(module or middle())
    return call(fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1)), model)


def test_aux_scale_and_microbatches() -> None:
    data = data_of(0)

    def call(state: fsdp.State, model: nn.Module) -> Any:
        f = T.forward_backward(model, with_aux, has_aux=True, input_grads=True)
        state, (loss, (aux, (batch, dy))) = f(state, *data, last_microbatch=False)
        assert torch.equal(aux["double"], 2 * loss)
        state, (_, (_, (half, _))) = f(state, *data, scale=0.5)
        torch.testing.assert_close(half["x"], batch["x"] / 2, rtol=1e-14, atol=0)
        state = fsdp.drop_gradients(state)
        g = T.accumulate(T.forward_backward(model, lambda m, x: m(x).square().mean(), input_grads=True), 2)
        _, (loss, parts) = g(state, dy)
        assert [grads.shape for (grads,) in parts] == [(2, WIDTH), (2, WIDTH)]
        return dy, torch.cat([grads for (grads,) in parts])

    dy, found = one(call)
    dy.requires_grad_()
    want = torch.autograd.grad(middle()(dy).square().mean(), dy)[0]
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-15)


def test_what_cannot_be_differentiated_says_so() -> None:
    def call(state: fsdp.State, model: nn.Module) -> str:
        f = T.forward_backward(model, lambda m, i, x: m(x).sum(), input_grads=True)
        return raised(lambda: f(state, torch.arange(3), x=torch.ones(2, WIDTH)))

    said = "forward_backward(input_grads=True): there is no floating tensor in the positional arguments"
    assert said in one(call)


def test_inputs_from_inference_mode_and_float32() -> None:
    with torch.inference_mode():
        x = torch.randn(3, WIDTH)

    def call(state: fsdp.State, model: nn.Module) -> torch.Tensor:
        f = T.forward_backward(model, lambda m, x: m(x).square().sum(), input_grads=True)
        dx: torch.Tensor = f(state, x)[1][1][0]
        return dx

    module = middle().float()
    plain = x.clone().requires_grad_()
    want = torch.autograd.grad(module(plain).square().sum(), plain)[0]
    torch.testing.assert_close(one(call, module), want, rtol=1e-5, atol=1e-6)


class Optional(nn.Module):
    """Ranks use the parts that they name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)).double()

    def forward(self, x: torch.Tensor, which: list[int]) -> torch.Tensor:
        for i in which:
            x = torch.tanh(self.parts[i](x))
        return x.square().mean()


USED: tuple[list[list[int]], ...] = ([[0, 1, 2], [0, 1, 2]], [[0, 1, 2], []], [[], []], [[], [1]])  # in each step


@pytest.mark.parametrize("preset", ["zero3", "zero2", "ddp"])
@each_rank(2)
def test_a_rank_may_use_no_weight_at_all(preset: str) -> None:
    module = Optional()
    state, model = start(module, preset)
    rank = dist.get_rank()
    state = fsdp.shard(dict(module.named_parameters()), state.spec, fsdp.sgd(lr=0.5))
    backward = T.forward_backward(model, lambda model, x, which: model(x, which), input_grads=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    data = [torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True) for _ in USED[0]]
    for used in USED:
        state, (_, (dx, _)) = backward(state, data[rank].detach(), used[rank])
        state = fsdp.step(state)
        optimizer.zero_grad()
        for x, which in zip(data, used, strict=True):
            x.grad = None
            (module(x, which) / len(used)).backward()
        optimizer.step()
        assert (dx - len(used) * data[rank].grad).abs().max() < 1e-12  # type: ignore[operator]
    weights = fsdp.full_params(state)
    assert all((weights[path] - p).abs().max() < 1e-12 for path, p in module.named_parameters())
