"""torch.func over sharded parameters: of the whole tree, of one unit's borrowed weights; Hessian-vector products."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from support.driven import raised
from support.problems import Tree, batch, full_grads, largest
from support.ranks import launch
from support.staged import HEAD, loss_fn, noted, plain, stages, start, weights
from support.tables import each

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

PRESETS = ("zero3", "zero2")

with warnings.catch_warnings():  # torch loads torch.jit, which it deprecates, when forward mode is first used
    warnings.simplefilter("ignore", DeprecationWarning)
    torch.func.jvp(torch.sin, (torch.ones(()),), (torch.ones(()),))


def direction(seed: int = 3) -> Tree:
    g = torch.Generator().manual_seed(seed)
    return {key: torch.randn(p.shape, generator=g, dtype=p.dtype) for key, p in weights()[0].items()}


def hessian_vector(data: Any, v: Tree) -> Tree:
    product: Tree = torch.func.jvp(lambda p: torch.func.grad(plain)(p, data), (weights()[0],), (v,))[1]
    return product


def mean(of: Callable[[Any], Tree]) -> Tree:
    """Over the data of two ranks."""
    return pytree.tree_map(lambda *t: sum(t) / 2, *(of(batch(0, rank)) for rank in range(2)))


def per_sample(of: Callable[[Tree, Any], Any], data: Any) -> Any:
    """A function of one sample's loss, over the batch."""
    return torch.func.vmap(lambda *sample: of(weights()[0], sample))(*data)


# ---------------------------------------------------------------- the whole tree


def of_whole_trees(preset: str) -> dict[str, Any]:
    state, model = start(preset)
    data = batch(0, dist.get_rank())
    ties = {"head.weight": "embed.weight"}
    found: dict[str, Any] = {}

    def loss(p: Tree, data: Any = data) -> torch.Tensor:
        return loss_fn(fsdp.bind(model, p), data)

    def reduced(grads: Tree) -> Tree:
        return full_grads(fsdp.finish_reductions(fsdp.reduce(middle, grads)))

    v = direction()
    middle, params = fsdp.unshard(state)
    along = {k: v.get(ties.get(k, k), torch.zeros_like(p)) for k, p in params.items()}
    found["grad"] = reduced(torch.func.grad(loss)(params))
    middle, params = fsdp.unshard(state)
    grads, found["loss"] = torch.func.grad_and_value(loss)(params)
    found["grad_and_value"] = reduced(grads)
    middle, params = fsdp.unshard(state)
    value, pullback = torch.func.vjp(loss, params)  # type: ignore[misc]
    found["vjp"] = reduced(pullback(torch.ones_like(value))[0])
    middle, params = fsdp.unshard(state)
    found["jvp"] = torch.func.jvp(loss, (params,), (along,))[1]
    found["hvp"] = reduced(torch.func.jvp(torch.func.grad(loss), (params,), (along,))[1])
    middle, params = fsdp.unshard(state)
    every = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, data)
    every["embed.weight"] = every["embed.weight"] + every.pop("head.weight")
    found["vmap"] = {k: g for k, g in every.items() if k in v}
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_of_the_whole_tree(preset: str) -> None:
    grads = mean(lambda data: torch.func.grad(plain)(weights()[0], data))
    products = mean(lambda data: hessian_vector(data, direction()))
    for rank, found in enumerate(launch(of_whole_trees, (preset,), nprocs=2)):
        data = batch(0, rank)
        for name in ("grad", "grad_and_value", "vjp"):
            assert largest(found[name], grads) < 1e-12
        assert largest(found["hvp"], products) < 1e-10
        torch.testing.assert_close(found["loss"], plain(weights()[0], data))
        torch.testing.assert_close(
            found["jvp"], torch.func.jvp(partial(plain, data=data), (weights()[0],), (direction(),))[1]
        )
        assert found["vmap"].keys() == grads.keys()
        assert largest(found["vmap"], per_sample(torch.func.grad(plain), data)) < 1e-12


# ---------------------------------------------------------------- one unit


def of_one_unit(preset: str) -> dict[str, float]:
    """Every transform of a block, of its borrowed weights, beside the same of copies of them."""
    state, model = start(preset)
    h = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    state, w = fsdp.unshard(state, "blocks.0")
    own = pytree.tree_map(torch.clone, w)
    v = pytree.tree_map(torch.randn_like, own)

    def fn(w: Tree, h: torch.Tensor) -> Any:
        return fsdp.bind(model.blocks[0], w)(h)

    def loss(w: Tree, h: torch.Tensor) -> Any:
        return fn(w, h).square().mean()

    f = torch.func
    calls: dict[str, Callable[[Tree], Any]] = {
        "grad": lambda w: f.grad(loss, argnums=(0, 1))(w, h),
        "vjp": lambda w: f.vjp(fn, w, h)[1](h),
        "jvp": lambda w: f.jvp(fn, (w, h), (v, h)),
        "forward over reverse": lambda w: f.jvp(f.grad(loss, argnums=(0, 1)), (w, h), (v, h)),
        "reverse over reverse": lambda w: f.grad(lambda w: f.grad(loss, argnums=1)(w, h).square().sum())(w),
        "vmap of grad": lambda w: f.vmap(f.grad(loss), in_dims=(None, 0))(w, h),
        "jacrev": lambda w: f.jacrev(lambda b: fn({**w, "down.bias": b}, h[0, 0]))(w["down.bias"]),
        "jacfwd": lambda w: f.jacfwd(lambda b: fn({**w, "norm.bias": b}, h[0, 0]))(w["norm.bias"]),
        "hessian": lambda w: f.hessian(lambda b: loss({**w, "norm.bias": b}, h[0, 0]))(w["norm.bias"]),
        "T.vjp under vmap": lambda w: f.vmap(lambda h: T.vjp(fn, w, h)[1](w, h))(h),
    }
    differ = {}
    for name, call in calls.items():
        got, want = pytree.tree_leaves(call(w)), pytree.tree_leaves(call(own))
        assert len(got) == len(want) > 0
        differ[name] = max((a - b).abs().max().item() for a, b in zip(got, want, strict=True))
    fsdp.release(state, "blocks.0")
    return differ


@pytest.mark.parametrize("preset", PRESETS)
def test_of_one_units_borrowed_weights(preset: str) -> None:
    for differ in launch(of_one_unit, (preset,), nprocs=2):
        assert set(differ.values()) == {0.0}, differ


def transformed_verbs() -> list[str]:
    state, _ = start("zero3")
    one = torch.ones(())
    return [
        raised(lambda: torch.func.grad(lambda x: fsdp.unshard(state, "tail")[1]["scale"] * x)(one)),
        raised(lambda: torch.func.vmap(lambda x: fsdp.unshard(state)[1]["tail.scale"] * x)(one[None])),
        raised(lambda: torch.func.jvp(lambda x: fsdp.unshard(state, "tail")[1]["scale"] * x, (one,), (one,))),
    ]


def test_verbs_inside_a_transform_say_what_to_do() -> None:
    for said in launch(transformed_verbs, nprocs=2):
        assert all("Call unshard before the transform and reduce after it" in text for text in said)


# ---------------------------------------------------------------- hvp


def vector(state: fsdp.State, tree: Tree) -> dict[str, fsdp.FlatBuffer]:
    """A tree by path as shards."""
    leaves = {k: torch.nn.Parameter(t) for k, t in (tree | weights()[1]).items()}
    for key in weights()[1]:
        leaves[key].requires_grad_(False)
    params = {path: leaves[source] for path, source in zip(state.layout.paths, state.layout.source, strict=True)}
    return fsdp.shard(params, state.spec).main


def products(preset: str, order: str) -> dict[str, Any]:
    state, model = start(preset, schedule=fsdp.Schedule(debug=True, order="recorded" if order == "recorded" else None))
    v, data = vector(state, direction()), batch(0, dist.get_rank())
    product = T.hvp(stages(model))
    most: list[int] = []
    found: dict[str, Any] = {"equal": True}
    after, (found["loss"], hv) = T.hvp(noted(state, stages(model), most))(state, v, data)
    found["between steps"] = after is state and state.between_steps and state.cursor.idle
    found["most"] = max(most)
    found["Hv"] = full_grads(after._evolve(grads=hv))
    # again, of what came out; in the middle of a step, whose gradients stay; and then the step
    after, (_, twice) = product(after, hv, data)
    found["HHv"] = full_grads(after._evolve(grads=twice))
    forward_backward = T.forward_backward(model, loss_fn)
    middle, _ = forward_backward(after, data, last_microbatch=False)
    middle, (_, again) = product(middle, v, data)
    found["equal"] &= all(torch.equal(a.local, again[name].local) for name, a in hv.items())
    found["grad"] = full_grads(fsdp.finish_reductions(middle))
    middle, _ = forward_backward(middle, data)
    found["grads"] = full_grads(fsdp.finish_reductions(middle))
    state = fsdp.step(middle)
    found["weights"] = fsdp.full_params(state)
    return found


@pytest.mark.parametrize(("preset", "order"), each([*PRESETS, "hsdp"], ["default", "recorded"]))
def test_a_hessian_vector_product_unit_by_unit(preset: str, order: str) -> None:
    once = mean(lambda data: hessian_vector(data, direction()))
    twice = mean(lambda data: hessian_vector(data, once))
    grads = mean(lambda data: torch.func.grad(plain)(weights()[0], data))
    for rank, found in enumerate(launch(products, (preset, order), nprocs=2)):
        torch.testing.assert_close(found["loss"], plain(weights()[0], batch(0, rank)))
        assert found["Hv"].keys() == once.keys()
        assert largest(found["Hv"], once) < 1e-10
        assert largest(found["HHv"], twice) < 1e-9
        assert found["between steps"]
        assert found["equal"]
        assert largest(found["grad"], grads) < 1e-12
        assert largest(found["grads"], {k: 2 * g for k, g in grads.items()}) < 1e-12
        assert largest(found["weights"], {k: p - 0.2 * grads[k] for k, p in weights()[0].items()}) < 1e-12
        if preset == "zero3" and order == "default":
            assert found["most"] == 2


def with_frozen() -> tuple[Tree, Tree]:
    """A first unit without anything that trains, one frozen leaf in the second, a pytree between stages."""
    g = torch.Generator().manual_seed(0)
    p = {name: torch.randn(4, 4, generator=g, dtype=torch.float64) for name in "abc"}
    params = {
        "a": {"w": torch.nn.Parameter(p["a"], requires_grad=False)},
        "b": {"w": torch.nn.Parameter(p["b"]), "fixed": torch.nn.Parameter(p["c"], requires_grad=False)},
    }
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    cut = {
        "a": lambda w, h, x: {"h": x @ w["w"], "x": x},
        "b": lambda w, h, x: torch.tanh(h["h"] @ w["w"] + h["x"] @ w["fixed"]).square().mean(),
    }
    _, (_, hv) = T.hvp(cut)(state, dict(state.main), x)

    def loss(w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ p["a"] @ w + x @ p["c"]).square().mean()

    return full_grads(state._evolve(grads=hv)), {"b.w": torch.func.jvp(torch.func.grad(loss), (p["b"],), (p["b"],))[1]}


def test_hvp_with_frozen_units_and_leaves() -> None:
    (got, a), (again, b) = launch(with_frozen, nprocs=2)
    assert got.keys() == again.keys() == {"b.w"}
    assert largest(got, {"b.w": (a["b.w"] + b["b.w"]) / 2}) < 1e-12
    assert a["b.w"].abs().max() > 1e-3


def refused() -> list[str]:
    state, model = start("zero3")
    v, data, cut = vector(state, direction()), batch(0, dist.get_rank()), stages(model)
    without = {key: fn for key, fn in cut.items() if key != "blocks.1"}
    whole = {name: buffer.redistribute({"data": fsdp.Replicated}) for name, buffer in v.items()}
    unreduced = {**cut, HEAD: lambda w, h, data: h.sum(-1)}
    calls: list[Callable[[], Any]] = [
        lambda: T.hvp({}),
        lambda: T.hvp(without)(state, v, data),
        lambda: T.hvp({**cut, "blocks.7": cut["blocks.1"]})(state, v, data),
        lambda: T.hvp(cut)(state, {}, data),
        lambda: T.hvp(cut)(state, whole, data),
        lambda: T.hvp(unreduced)(state, v, data),
    ]
    said = [raised(call) for call in calls]
    return [*said, str(T.hvp(cut)(state, v, data)[1][0].isfinite().item())]


def test_hvp_says_what_is_wrong() -> None:
    for empty, without, unknown, no_vector, whole, scalar, fine in launch(refused, nprocs=2):
        assert "TreeError: hvp: stages is {}; expected {unit: function of (weights, h, batch)}, at least 1" in empty
        assert "ScheduleError: hvp: no stage uses the unit 'blocks.1'. Give a stage for each of the 5 units" in without
        assert "there is no unit 'blocks.7'" in unknown
        assert "TreeError: hvp: the vector has None for the bucket" in no_vector
        assert "elements" in whole
        assert "expected" in whole
        assert "or the `main` of a state of the same layout" in whole
        assert "the last stage, ('embed.weight', 'tail'), returned a tensor of shape (2, 5)" in scalar
        assert fine == "True"
