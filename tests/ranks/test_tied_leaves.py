"""A tied leaf stays one leaf: under steps inside a loss function, through bind, and through reduce."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.utils._pytree as pytree
from support.ranks import launch
from torch.func import functional_call, grad, grad_and_value

import functional_fsdp as fsdp

STEPS, RATE = 3, 0.5
Tree = dict[str, torch.Tensor]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embed(x))))


def made() -> Tied:
    torch.manual_seed(0)
    return Tied().double()


def task(rank: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(rank)
    x, y, later, to = (torch.randint(0, 7, (6,), generator=g) for _ in range(4))
    return x, y, later, to


def adapted(loss: Callable[..., torch.Tensor], params: Tree, data: Any, after: Any = None) -> torch.Tensor:
    """MAML (Finn et al. 2017): the loss on new data after some steps of gradient descent on old data."""
    x, y, later, to = data
    for _ in range(STEPS):
        g = grad(loss)(params, x, y)
        g = g if after is None else after(g)
        params = {key: p - RATE * g[key] for key, p in params.items()}
    return loss(params, later, to)


def plain(data: Any) -> tuple[torch.Tensor, Tree]:
    """The plain module, its tied weight once in the tree."""
    module = made()
    once = {key: p.detach() for key, p in module.named_parameters()}  # without the duplicate

    def loss(params: Tree, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(module, params, (x,), tie_weights=True), y)

    grads, value = grad_and_value(lambda p: adapted(loss, p, data))(once)
    return value, grads


def bound(placement: str, way: str) -> tuple[float, Tree]:
    module = made()
    params, model = fsdp.functionalize(module)
    spec = fsdp.Spec(fsdp.local_mesh(), getattr(fsdp, placement)("data"))
    state = fsdp.shard(params, spec, fsdp.sgd(lr=1.0))
    before = fsdp.full_params(state)
    state, params = fsdp.unshard(state)
    tie = (lambda g: fsdp.tie(state, g)) if way == "tie" else None

    def by_bind(p: Tree, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(fsdp.bind(model, p)(x), y)

    def by_hand(p: Tree, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(F.linear(F.embedding(x, p["embed.weight"]), p["body.weight"], p["body.bias"]))
        return F.cross_entropy(F.linear(h, p["head.weight"]), y)

    loss = by_hand if way == "tie" else by_bind
    grads, value = grad_and_value(lambda p: adapted(loss, p, task(dist.get_rank()), tie))(params)
    after = fsdp.full_params(fsdp.step(fsdp.reduce(state, grads)))
    return value.item(), {path: before[path] - after[path] for path in before}  # lr is 1


@pytest.mark.parametrize("way", ["bind", "tie"])
@pytest.mark.parametrize("placement", ["zero3", "ddp"])
def test_inner_steps_beside_the_plain_module(placement: str, way: str) -> None:
    want = [plain(task(rank)) for rank in range(2)]
    for rank, (value, grads) in enumerate(launch(bound, (placement, way), nprocs=2)):
        assert value == pytest.approx(want[rank][0].item(), abs=1e-12)
        for path, got in grads.items():
            source = "embed.weight" if path == "head.weight" else path
            mean = (want[0][1][source] + want[1][1][source]) / 2
            assert (got - mean).abs().max() < 1e-12, path


def test_gradients_of_one_step_are_as_before() -> None:
    """Without an inner step: the sum over paths is the plain module's gradient."""
    module = made()
    params, model = fsdp.functionalize(module)
    x, y, *_ = task(0)
    grads = grad(lambda p: F.cross_entropy(fsdp.bind(model, p)(x), y))({k: p.detach() for k, p in params.items()})
    (want,) = torch.autograd.grad(F.cross_entropy(module(x), y), [module.embed.weight])
    torch.testing.assert_close(grads["embed.weight"] + grads["head.weight"], want)
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()))
    both = fsdp.tie(state, grads)
    assert both["head.weight"] is both["embed.weight"]
    torch.testing.assert_close(both["head.weight"], want)
    assert fsdp.tie(state, {**grads, "head.weight": None})["head.weight"] is grads["embed.weight"]


def skeletons(model: Any) -> dict[str, Any]:
    return {
        "itself": model,
        "a copy": copy.deepcopy(model),
        "pickled": pickle.loads(pickle.dumps(model)),
        "of a skeleton": fsdp.functionalize(model)[1],
        "the module": made(),
    }


@pytest.mark.parametrize("name", ["itself", "a copy", "pickled", "of a skeleton", "the module"])
def test_every_skeleton_knows_its_ties(name: str) -> None:
    params, model = fsdp.functionalize(made())
    skeleton = skeletons(model)[name]
    weights = {path: p.detach() for path, p in params.items()}
    x = task(0)[0]
    want = fsdp.bind(model, weights)(x)
    apart = {**weights, "head.weight": torch.zeros_like(weights["head.weight"])}
    for given in (weights, apart):
        for _ in range(2):  # the first time, and when its slots are known
            made_of = fsdp.bind(skeleton, given)
            assert torch.equal(made_of(x), want)
            assert made_of.head.weight is weights["embed.weight"]
            assert dict(made_of.named_parameters())["head.weight"] is weights["embed.weight"]


def test_copies_of_a_skeleton_in_one_module_are_not_tied_to_each_other() -> None:
    params, model = fsdp.functionalize(made())
    both = nn.ModuleList([model, copy.deepcopy(model)])
    weights = {f"{i}.{path}": p.detach() + i for i in range(2) for path, p in params.items()}
    assert torch.equal(fsdp.bind(both, weights)[1].embed.weight, params["embed.weight"] + 1)
    with pytest.raises(fsdp.TreeError, match=r"lacks '1\.embed\.weight'"):
        fsdp.bind(both, {key: w for key, w in weights.items() if not key.startswith("1.embed")})
    both[1].head = fsdp.functionalize(nn.Linear(4, 7, bias=False).double())[1]  # untied since
    zero = torch.zeros(7, 4)
    assert fsdp.bind(both, {**weights, "1.head.weight": zero})[1].head.weight is zero


def test_parts_of_a_tied_model_bind_alone() -> None:
    params, model = fsdp.functionalize(made())
    h, w = torch.ones(1, 4, dtype=torch.float64), torch.full((7, 4), 2.0, dtype=torch.float64)
    assert torch.equal(fsdp.bind(model.head, {"weight": w})(h), F.linear(h, w))
    for left_out in ("embed.weight", "head.weight"):
        with pytest.raises(fsdp.TreeError, match=rf"lacks '{left_out}'"):
            fsdp.bind(model, {path: p for path, p in params.items() if path != left_out})


def test_ties_inside_torch_compile() -> None:
    torch._dynamo.reset()
    params, model = fsdp.functionalize(made())
    weights = {path: p.detach() for path, p in params.items()}
    x = task(0)[0]
    for skeleton in (model, made()):
        compiled = torch.compile(lambda w, x, m=skeleton: fsdp.bind(m, w)(x), fullgraph=True, backend="eager")
        apart = {**weights, "head.weight": torch.zeros_like(weights["head.weight"])}
        torch.testing.assert_close(compiled(apart, x), fsdp.bind(model, weights)(x))


def test_a_tree_of_ones_own() -> None:
    shared = torch.ones(2, 3)
    tree = {"a": [shared, torch.ones(2)], "b": {"again": shared}}
    state = fsdp.shard(tree, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=1.0))
    grads = pytree.tree_map(torch.ones_like, tree)
    reduced = fsdp.local_shards(fsdp.reduce(state, grads), "grads")
    assert torch.equal(reduced["a.0"], torch.full((6,), 2.0))
    reduced = fsdp.local_shards(fsdp.reduce(state, {"a": [None, grads["a"][1]], "b": grads["b"]}), "grads")
    assert torch.equal(reduced["a.0"], torch.ones(6))
    both = fsdp.tie(state, grads)
    assert torch.equal(both["b"]["again"], torch.full((2, 3), 2.0))
    assert both["a"][0] is both["b"]["again"]
    assert torch.equal(both["a"][1], torch.ones(2))
