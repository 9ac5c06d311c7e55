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
from support.driven import refused
from support.problems import Tree, batch, full_grads, largest
from support.ranks import each_rank
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
    return torch.func.jvp(lambda p: torch.func.grad(plain)(p, data), (weights()[0],), (v,))[1]


def mean(of: Callable[[Any], Tree]) -> Tree:
    """Over the data of two ranks."""
    return pytree.tree_map(lambda *t: sum(t) / 2, *(of(batch(0, rank)) for rank in range(2)))


def per_sample(of: Callable[[Tree, Any], Any], data: Any) -> Any:
    """A function of one sample's loss, over the batch."""
    return torch.func.vmap(lambda *sample: of(weights()[0], sample))(*data)


# ---------------------------------------------------------------- the whole tree


@pytest.mark.parametrize("preset", PRESETS)
@each_rank(2)
def test_of_the_whole_tree(preset: str) -> None:
    data, v, ties = batch(0, dist.get_rank()), direction(), {"head.weight": "embed.weight"}
    state, model = start(preset)

    def loss(p: Tree, data: Any = data) -> torch.Tensor:
        return loss_fn(fsdp.bind(model, p), data)

    def is_reduced_to(grads: Tree, want: Tree, within: float = 1e-12) -> None:
        assert largest(full_grads(fsdp.finish_reductions(fsdp.reduce(middle, grads))), want) < within

    want = mean(lambda data: torch.func.grad(plain)(weights()[0], data))
    middle, params = fsdp.unshard(state)
    along = {k: v.get(ties.get(k, k), torch.zeros_like(p)) for k, p in params.items()}
    is_reduced_to(torch.func.grad(loss)(params), want)
    middle, params = fsdp.unshard(state)
    grads, value = torch.func.grad_and_value(loss)(params)
    torch.testing.assert_close(value, plain(weights()[0], data))
    is_reduced_to(grads, want)
    middle, params = fsdp.unshard(state)
    value, pullback = torch.func.vjp(loss, params)  # type: ignore[misc]
    is_reduced_to(pullback(torch.ones_like(value))[0], want)
    middle, params = fsdp.unshard(state)
    moved = torch.func.jvp(partial(plain, data=data), (weights()[0],), (v,))[1]
    torch.testing.assert_close(torch.func.jvp(loss, (params,), (along,))[1], moved)
    products = mean(lambda data: hessian_vector(data, v))
    is_reduced_to(torch.func.jvp(torch.func.grad(loss), (params,), (along,))[1], products, 1e-10)
    middle, params = fsdp.unshard(state)
    every = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, data)
    every["embed.weight"] = every["embed.weight"] + every.pop("head.weight")
    assert largest({k: every[k] for k in v}, per_sample(torch.func.grad(plain), data)) < 1e-12


# ---------------------------------------------------------------- one unit


@pytest.mark.parametrize("preset", PRESETS)
@each_rank(2)
def test_of_one_units_borrowed_weights(preset: str) -> None:
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
    for name, call in calls.items():
        got, want = pytree.tree_leaves(call(w)), pytree.tree_leaves(call(own))
        assert len(got) == len(want) > 0
        assert all(map(torch.equal, got, want)), name
    fsdp.release(state, "blocks.0")


@each_rank(2)
def test_verbs_inside_a_transform_say_what_to_do() -> None:
    state, _ = start("zero3")
    one = torch.ones(())
    for call in (
        lambda: torch.func.grad(lambda x: fsdp.unshard(state, "tail")[1]["scale"] * x)(one),
        lambda: torch.func.vmap(lambda x: fsdp.unshard(state)[1]["tail.scale"] * x)(one[None]),
        lambda: torch.func.jvp(lambda x: fsdp.unshard(state, "tail")[1]["scale"] * x, (one,), (one,)),
    ):
        refused((call, "Call unshard before the transform and reduce after it"))


# ---------------------------------------------------------------- hvp


def vector(state: fsdp.State, tree: Tree) -> dict[str, fsdp.FlatBuffer]:
    """A tree by path as shards."""
    leaves = {k: torch.nn.Parameter(t) for k, t in (tree | weights()[1]).items()}
    for key in weights()[1]:
        leaves[key].requires_grad_(False)
    params = {path: leaves[source] for path, source in zip(state.layout.paths, state.layout.source, strict=True)}
    return fsdp.shard(params, state.spec).main


@pytest.mark.parametrize(("preset", "order"), each([*PRESETS, "hsdp"], ["default", "recorded"]))
@each_rank(2)
def test_a_hessian_vector_product_unit_by_unit(preset: str, order: str) -> None:
    once = mean(lambda data: hessian_vector(data, direction()))
    grads = mean(lambda data: torch.func.grad(plain)(weights()[0], data))
    state, model = start(preset, schedule=fsdp.Schedule(debug=True, order="recorded" if order == "recorded" else None))
    v, data = vector(state, direction()), batch(0, dist.get_rank())
    product, most = T.hvp(stages(model)), list[int]()
    after, (loss, hv) = T.hvp(noted(state, stages(model), most))(state, v, data)
    torch.testing.assert_close(loss, plain(weights()[0], data))
    assert after is state
    assert state.between_steps
    assert state.cursor.idle
    assert max(most) == 2 or preset != "zero3" or order != "default"
    found = full_grads(after._evolve(grads=hv))
    assert found.keys() == once.keys()
    assert largest(found, once) < 1e-10
    # again, of what came out; in the middle of a step, whose gradients stay; and then the step
    after, (_, twice) = product(after, hv, data)
    assert largest(full_grads(after._evolve(grads=twice)), mean(lambda data: hessian_vector(data, once))) < 1e-9
    forward_backward = T.forward_backward(model, loss_fn)
    middle, _ = forward_backward(after, data, last_microbatch=False)
    middle, (_, again) = product(middle, v, data)
    assert all(torch.equal(a.local, again[name].local) for name, a in hv.items())
    assert largest(full_grads(fsdp.finish_reductions(middle)), grads) < 1e-12
    middle, _ = forward_backward(middle, data)
    assert largest(full_grads(fsdp.finish_reductions(middle)), {k: 2 * g for k, g in grads.items()}) < 1e-12
    trained = {k: p - 0.2 * grads[k] for k, p in weights()[0].items()}
    assert largest(fsdp.full_params(fsdp.step(middle)), trained) < 1e-12


@each_rank(2)
def test_hvp_with_frozen_units_and_leaves() -> None:
    """A first unit without anything that trains, one frozen leaf in the second, a pytree between stages."""
    g = torch.Generator().manual_seed(0)
    p = {name: torch.randn(4, 4, generator=g, dtype=torch.float64) for name in "abc"}
    params = {
        "a": {"w": torch.nn.Parameter(p["a"], requires_grad=False)},
        "b": {"w": torch.nn.Parameter(p["b"]), "fixed": torch.nn.Parameter(p["c"], requires_grad=False)},
    }
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    xs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(2)]
    cut = {
        "a": lambda w, h, x: {"h": x @ w["w"], "x": x},
        "b": lambda w, h, x: torch.tanh(h["h"] @ w["w"] + h["x"] @ w["fixed"]).square().mean(),
    }
    _, (_, hv) = T.hvp(cut)(state, dict(state.main), xs[dist.get_rank()])

    def loss(w: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.tanh(x @ p["a"] @ w + x @ p["c"]).square().mean() for x in xs]).mean()

    want = torch.func.jvp(torch.func.grad(loss), (p["b"],), (p["b"],))[1]
    got = full_grads(state._evolve(grads=hv))
    assert got.keys() == {"b.w"}
    assert largest(got, {"b.w": want}) < 1e-12
    assert want.abs().max() > 1e-3


@each_rank(2)
def test_hvp_says_what_is_wrong() -> None:
    state, model = start("zero3")
    v, data, cut = vector(state, direction()), batch(0, dist.get_rank()), stages(model)
    without = {key: fn for key, fn in cut.items() if key != "blocks.1"}
    whole = {name: buffer.redistribute({"data": fsdp.Replicated}) for name, buffer in v.items()}
    unreduced = {**cut, HEAD: lambda w, h, data: h.sum(-1)}
    refused(
        (lambda: T.hvp({}),
         "TreeError: hvp: stages is {}; expected {unit: function of (weights, h, batch)}, at least 1"),
        (lambda: T.hvp(without)(state, v, data),
         "ScheduleError: hvp: no stage uses the unit 'blocks.1'. Give a stage for each of the 5 units"),
        (lambda: T.hvp({**cut, "blocks.7": cut["blocks.1"]})(state, v, data), "there is no unit 'blocks.7'"),
        (lambda: T.hvp(cut)(state, {}, data), "TreeError: hvp: the vector has None for the bucket"),
        (lambda: T.hvp(cut)(state, whole, data),
         "elements", "expected", "or the `main` of a state of the same layout"),
        (lambda: T.hvp(unreduced)(state, v, data),
         "the last stage, ('embed.weight', 'tail'), returned a tensor of shape (2, 5)"),
    )  # fmt: skip
    assert T.hvp(cut)(state, v, data)[1][0].isfinite()
