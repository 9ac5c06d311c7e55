"""Per-sample gradients, their norms, and clipped gradients with noise, against torch.func on the whole plain module."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.utils._pytree as pytree
from support.driven import raised, refused
from support.driven import start as begin
from support.problems import Tree, batch, full_grads, largest, mesh_and_placement
from support.ranks import each_rank, launch
from support.staged import HEAD, loss_fn, noted, plain, stages, start, weights
from support.tables import each, marked
from support.transactions import Boom, taken

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp.transforms import _per_sample as _noise

PRESETS = ("zero3", "zero2")
BOUND = 11.0  # some samples are clipped, and some are not


def samples(rank: int, step: int = 0) -> Any:
    """Six of them."""
    return tuple(torch.cat(parts) for parts in zip(*(batch(step, rank, micro) for micro in range(3)), strict=True))


def per_sample(rank: int, step: int = 0, trained: Tree | None = None) -> tuple[Tree, torch.Tensor, torch.Tensor]:
    """By torch.func, of the plain module: each sample's gradients, losses and norms."""
    at = weights()[0] if trained is None else trained
    grads, losses = torch.func.vmap(lambda *one: torch.func.grad_and_value(plain)(at, one))(*samples(rank, step))
    norms = sum(g.reshape(len(g), -1).square().sum(1) for g in grads.values() if g.numel()).sqrt()
    return grads, losses, norms


def clipped_mean(ranks: int = 2, bound: float = BOUND, step: int = 0, trained: Tree | None = None) -> Tree:
    found = []
    for rank in range(ranks):
        grads, _, norms = per_sample(rank, step, trained)
        by = (bound / norms).clamp(max=1)
        found.append({k: torch.einsum("b,b...->...", by, g) / len(by) for k, g in grads.items()})
    return pytree.tree_map(lambda *g: sum(g) / ranks, *found)


# ---------------------------------------------------------------- per_sample_vjp


def test_per_sample_vjp_is_vjp_of_each_sample() -> None:
    g = torch.Generator().manual_seed(0)
    w: Any = {"a": torch.randn(3, 4, generator=g), "n": torch.tensor(2), "unused": torch.ones(2)}
    h = {"x": torch.randn(5, 3, generator=g), "y": (torch.randn(5, generator=g),), "ids": torch.arange(5) % 3}
    shared = torch.tensor(0.5)

    def fn(w: Any, h: Any, scale: torch.Tensor, nothing: None) -> Any:
        out = torch.tanh(h["x"] @ w["a"]) * h["y"][0] * scale
        return {"out": out, "more": w["a"][h["ids"]].sin()}

    out, pullback = T.per_sample_vjp(fn, w, h, shared, None)
    dout = {name: torch.randn(t.shape, generator=g) for name, t in out.items()}
    dw, dh, dshared, dnothing = pullback(w, dout)
    assert dw["a"].shape == (5, 3, 4)
    assert dw["n"] is None
    assert dw["unused"].shape == (5, 2)
    assert not dw["unused"].any()
    assert dh["ids"] is dnothing is None
    assert dshared.shape == (5,)
    for i in range(5):
        one, pull = T.vjp(fn, w, pytree.tree_map(lambda t: t[i], h), shared, None)  # noqa: B023
        want, want_h, want_shared, _ = pull(w, {name: t[i] for name, t in dout.items()})
        torch.testing.assert_close({name: t[i] for name, t in out.items()}, one)
        torch.testing.assert_close(dw["a"][i], want["a"])
        torch.testing.assert_close((dh["x"][i], dh["y"][0][i]), (want_h["x"], want_h["y"][0]))
        torch.testing.assert_close(dshared[i], want_shared)


def test_per_sample_vjp_takes_the_weights_that_its_pullback_is_given() -> None:
    w, other, x = {"a": torch.tensor(3.0)}, {"a": torch.tensor(5.0)}, torch.tensor([1.0, 2.0])
    _, pullback = T.per_sample_vjp(lambda w, x: w["a"] * w["a"] * x, w, x)
    assert pullback(other, torch.ones(2))[0]["a"].tolist() == [10.0, 20.0]
    assert pullback(w, torch.ones(2))[0]["a"].tolist() == [6.0, 12.0]  # as often as wanted


def test_per_sample_vjp_under_a_transform() -> None:
    x = torch.tensor([1.0, 2.0])

    def norm(a: torch.Tensor) -> torch.Tensor:
        _, pullback = T.per_sample_vjp(lambda w, x: (w["a"] * x).sin(), {"a": a}, x)
        grad: torch.Tensor = pullback({"a": a}, torch.ones(2))[0]["a"]
        return grad.square().sum()

    a = torch.tensor(0.7)
    want = torch.autograd.functional.jacobian(lambda a: (x * (a * x).cos()).square().sum(), a)
    torch.testing.assert_close(torch.func.grad(norm)(a), want)


@pytest.mark.parametrize("preset", PRESETS)
@each_rank(2)
def test_per_sample_gradients_unit_by_unit(preset: str) -> None:
    """And of weights that were released."""
    state, model = start(preset)
    data = samples(dist.get_rank())
    cut = stages(model)
    h: Any = None
    pullbacks = {}
    for key, fn in cut.items():
        state, w = fsdp.unshard(state, key)
        h, pullbacks[key] = T.per_sample_vjp(lambda w, h, data, fn=fn: fn(w, h, data), w, h, data)
        state = fsdp.release(state, key)
    if preset == "zero3":
        for late in (lambda: T.per_sample_vjp(cut["blocks.0"], w, h, data), lambda: pullbacks[HEAD](w, h)):
            assert "were released. Gather them first: state, w = unshard(state, " in raised(late)
    dh: Any = torch.ones_like(h)
    found: dict[str, Any] = {}
    for key in reversed(cut):
        state, w = fsdp.unshard(state, key)
        dw, dh, _ = pullbacks.pop(key)(w, dh)
        for unit, grads in ({key: dw} if isinstance(key, str) else dw).items():
            for name, g in grads.items():
                path = unit if unit == "embed.weight" else f"{unit}.{name}"
                found[path] = found.get(path, 0) + g
        state = fsdp.release(state, key)
    assert largest(found, per_sample(dist.get_rank())[0]) < 1e-12


# ---------------------------------------------------------------- per_sample_norms


@pytest.mark.parametrize(("preset", "chunk"), each([*PRESETS, "hsdp"], [None, 1, 4]))
@each_rank(2)
def test_norms_of_each_samples_gradient(preset: str, chunk: int | None) -> None:
    rank, both = dist.get_rank(), [per_sample(rank)[0] for rank in range(2)]
    grads = {k: both[0][k].mean(0) + both[1][k].mean(0) for k in both[0]}
    trained = {k: p - 0.1 * grads[k] for k, p in weights()[0].items()}
    state, model = start(preset)
    data, most = samples(rank), list[int]()
    f = T.per_sample_norms(noted(state, stages(model), most), chunk=chunk)
    after, found = f(state, data)
    assert after is state
    assert state.between_steps
    assert state.cursor.idle
    assert not found[0].requires_grad
    torch.testing.assert_close(found, per_sample(rank)[1:], rtol=1e-10, atol=0)
    # in the middle of a step: its gradients stay, and it goes on
    forward_backward = T.forward_backward(model, loss_fn)
    middle, _ = forward_backward(state, data, last_microbatch=False)
    middle, again = f(middle, data)
    assert all(map(torch.equal, again, found))
    middle, _ = forward_backward(middle, data)
    middle = fsdp.finish_reductions(middle)
    assert largest(full_grads(middle), grads) < 1e-12
    _, (_, later) = f(fsdp.step(middle), data)
    torch.testing.assert_close(later, per_sample(rank, 0, trained)[2], rtol=1e-10, atol=0)
    assert max(most) == (0 if preset == "zero2" else 2)


@pytest.mark.parametrize("preset", PRESETS)
@each_rank(2)
def test_frozen_leaves_and_units_and_pytrees_between_stages(preset: str) -> None:
    """A wholly frozen first unit, a frozen leaf in the second, a pytree between stages, and a number in the batch."""
    g = torch.Generator().manual_seed(0)
    params = {
        "a": {"w": torch.nn.Parameter(torch.randn(3, 4, generator=g), requires_grad=False)},
        "b": {"w": torch.nn.Parameter(torch.randn(4, 4, generator=g)),
              "fixed": torch.nn.Parameter(torch.randn(4, generator=g), requires_grad=False)},
        "c": {"w": torch.nn.Parameter(torch.randn(4, generator=g))},
    }  # fmt: skip
    mesh, ids = fsdp.local_mesh(), torch.arange(5) % 4
    state = fsdp.shard(params, fsdp.Spec(mesh, getattr(fsdp, preset)("data")), fsdp.sgd(lr=0.1))
    xs = [torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    cut: dict[Any, Any] = {
        "a": lambda w, h, s: (s["x"] @ w["w"], {"x": s["x"].sum()}),
        "b": lambda w, h, s: (torch.tanh(h[0] @ w["w"] + w["fixed"]), h[1]),
        "c": lambda w, h, s: (h[0] * w["w"] * h[1]["x"]).gather(0, s["id"][None])[0] + h[0].sum() * s["scale"],
    }

    def loss(p: Any, x: torch.Tensor, i: torch.Tensor) -> Any:
        h = torch.tanh(x @ params["a"]["w"] @ p["b.w"] + params["b"]["fixed"])
        return (h * p["c.w"] * x.sum()).gather(0, i[None])[0] + h.sum() * 0.5

    p = {f"{name}.w": params[name]["w"].detach() for name in "bc"}
    alone = torch.func.vmap(torch.func.grad_and_value(loss), in_dims=(None, 0, 0))
    wanted, means = [], []
    for x in xs:
        grads, losses = alone(p, x, ids)
        norms = (grads["b.w"].flatten(1).square().sum(1) + grads["c.w"].square().sum(1)).sqrt()
        assert (norms > 0.5).any()
        wanted.append((losses, norms))
        by = (0.5 / norms).clamp(max=1) / 5
        means.append({key: torch.einsum("b,b...->...", by, grad) for key, grad in grads.items()})
    data = {"x": xs[dist.get_rank()], "id": ids, "scale": 0.5}
    state, found = T.per_sample_norms(cut)(state, data)
    torch.testing.assert_close(found, wanted[dist.get_rank()], rtol=1e-5, atol=1e-6)  # float32
    middle, _ = T.clipped_gradients(cut, max_norm=0.5)(state, data)
    mean = {key: (means[0][key] + means[1][key]) / 2 for key in p}
    torch.testing.assert_close(full_grads(fsdp.finish_reductions(middle)), mean, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- clipped_gradients


@pytest.mark.parametrize(("preset", "how"), each([*PRESETS, "ddp", "hfsdp"], [("mean", 1), ("mean", 3), ("sum", 1)]))
@each_rank(2)
def test_each_samples_gradient_is_clipped(preset: str, how: tuple[Any, int]) -> None:
    average, micro = how
    _, _, norms = per_sample(0)
    assert (norms > BOUND).any()
    assert (norms < BOUND).any()
    state, model = start(preset, average=average)
    most = list[int]()
    f: Any = T.clipped_gradients(noted(state, stages(model), most), max_norm=BOUND)
    f = f if micro == 1 else T.accumulate(f, micro)
    trained, weight = weights()[0], 1 if average == "mean" else 2
    for step in range(2):
        want = {k: weight * g for k, g in clipped_mean(step=step, trained=trained).items()}
        middle, losses = f(state, samples(dist.get_rank(), step))
        if micro == 1:
            torch.testing.assert_close(losses, per_sample(dist.get_rank(), step, trained)[1], rtol=1e-10, atol=0)
        middle = fsdp.finish_reductions(middle)
        grads = full_grads(middle)
        assert grads.keys() == want.keys()
        assert largest(grads, want) < 1e-12
        state, trained = fsdp.step(middle), {k: p - 0.1 * want[k] for k, p in trained.items()}
    assert max(most) <= 2


# ---------------------------------------------------------------- noise


WIDE = 60_000


def wide(preset: str, noise: float, seed: int, micro: int = 1) -> dict[str, Any]:
    """Gradients of zero but for noise, and how they lie; the caller's random numbers go on as they were."""
    mesh, placement = mesh_and_placement(preset)
    params = {"a": {"w": torch.zeros(WIDE), "small": torch.zeros(3)}, "b": {"w": torch.zeros(7, 11)}}
    state = fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.sgd(lr=0.1), seed=seed)
    cut: dict[Any, Any] = {
        "a": lambda w, h, s: s * 0 * (w["w"].sum() + w["small"].sum()),
        "b": lambda w, h, s: h * w["w"].sum(),
    }
    f: Any = T.clipped_gradients(cut, max_norm=0.5, noise=noise)
    f = f if micro == 1 else T.accumulate(f, micro)
    torch.manual_seed(dist.get_rank())
    before = torch.random.get_rng_state()
    middle, _ = f(state, torch.ones(4))
    found: dict[str, Any] = {"first": full_grads(fsdp.finish_reductions(middle))}
    found["own"] = torch.equal(before, torch.random.get_rng_state())
    padding = []
    for buffer in middle.grads.values():
        start, _ = buffer.span()
        there = torch.zeros(buffer.bucket.numel, dtype=torch.bool)
        for leaf in buffer.bucket.leaves:
            there[leaf.offset : leaf.offset + leaf.numel] = True
        padding.append(buffer.local[~there[start : start + buffer.local.numel()]])
    found["padding"] = torch.cat(padding)
    middle, _ = f(state, torch.ones(4))  # the step is taken again
    found["again"] = full_grads(fsdp.finish_reductions(middle))
    state = fsdp.step(middle)
    middle, _ = f(state, torch.ones(4))
    found["second"] = full_grads(fsdp.finish_reductions(middle))
    return found


def test_noise_has_the_standard_deviation_of_a_mean() -> None:
    for micro in (1, 2):
        for found in launch(wide, ("zero3", 3.0, 0, micro), nprocs=2):
            draws = torch.cat([g.flatten() for g in found["first"].values()])
            want = 3.0 * 0.5 / (4 * 2)  # of the sum: noise · max_norm; of the mean over 4 samples on each of 2 ranks
            n = len(draws)
            assert abs(draws.mean()) < 5 * want / math.sqrt(n)
            assert abs(draws.std() / want - 1) < 5 / math.sqrt(2 * n)
            assert abs((draws.abs() > 2 * want).float().mean() - 0.0455) < 5 * math.sqrt(0.0455 / n)
            halves = draws[: n // 2], draws[n // 2 : n // 2 * 2]  # other shards have other draws
            assert abs(torch.corrcoef(torch.stack(halves))[0, 1]) < 5 / math.sqrt(n / 2)
            assert draws.unique().numel() > 0.99 * n
            assert found["own"]
            assert not found["padding"].any()
            second = torch.cat([g.flatten() for g in found["second"].values()])
            assert abs(torch.corrcoef(torch.stack([draws, second]))[0, 1]) < 5 / math.sqrt(n)


def test_noise_follows_from_seed_step_and_leaf_alone() -> None:
    zero3, other = launch(wide, ("zero3", 1.0, 0), nprocs=2)
    for preset in ("zero2", "ddp", "zero1"):
        for found in launch(wide, (preset, 1.0, 0), nprocs=2):
            for when in ("first", "again", "second"):
                assert all(torch.equal(found[when][key], zero3[when][key]) for key in zero3[when])
    assert all(torch.equal(zero3["first"][key], zero3["again"][key]) for key in zero3["first"])
    assert all(torch.equal(zero3["first"][key], other["first"][key]) for key in zero3["first"])
    assert not torch.equal(zero3["first"]["a.w"], zero3["second"]["a.w"])
    (more, *_), (seeded, *_) = launch(wide, ("zero3", 1.0, 0), nprocs=4), launch(wide, ("zero3", 1.0, 1), nprocs=2)
    assert all(torch.equal(2 * g, zero3["first"][key]) for key, g in more["first"].items())  # twice the batch
    assert not torch.equal(seeded["first"]["a.w"], zero3["first"]["a.w"])
    for preset in ("hsdp", "hfsdp"):  # 2 × 2
        for found in launch(wide, (preset, 1.0, 0), nprocs=4):
            assert all(torch.equal(g, more["first"][key]) for key, g in found["first"].items())
    (without, *_) = launch(wide, ("zero3", 0.0, 0), nprocs=2)
    assert not any(g.any() for g in without["first"].values())


def test_noise_in_blocks() -> None:
    def in_blocks(preset: str) -> dict[str, Any]:
        before, _noise.BLOCK = _noise.BLOCK, 1000
        try:
            return wide(preset, 1.0, 0)
        finally:
            _noise.BLOCK = before

    (zero3, _), (ddp, _) = (launch(in_blocks, (one,), nprocs=2, processes=True) for one in ("zero3", "ddp"))
    assert all(torch.equal(ddp["first"][key], zero3["first"][key]) for key in zero3["first"])
    draws = zero3["first"]["a.w"]
    assert draws.unique().numel() > 0.99 * WIDE
    assert abs(draws.std() / (0.5 / 8) - 1) < 5 / math.sqrt(2 * WIDE)


# ---------------------------------------------------------------- one rank, and bfloat16


@pytest.mark.parametrize("ranks", [1, 2])
@each_rank("ranks")
def test_in_bfloat16_and_on_one_rank(ranks: int) -> None:
    """Compute in bfloat16, from main weights in float32, beside the same in float64."""
    state, model = start("zero3", precision=fsdp.Precision(main=torch.float32, compute=torch.bfloat16))
    data, cut = samples(dist.get_rank()), stages(model)
    _, (_, norms) = T.per_sample_norms(cut)(state, data)
    assert norms.dtype is torch.float32
    torch.testing.assert_close(norms.double(), per_sample(dist.get_rank())[2], rtol=0.05, atol=0)  # 8 bits
    middle, losses = T.clipped_gradients(cut, max_norm=BOUND, noise=0.1)(state, data)
    _, (_, hv) = T.hvp(cut)(state, dict(state.main), data)
    assert all(b.local.isfinite().all() for b in hv.values())
    dtypes = {losses.dtype, *(buffer.local.dtype for buffer in (*middle.grads.values(), *hv.values()))}
    assert dtypes == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize(("sizes", "scale"), [((2, 6), 0.5), ((6, 2), 0.5), ((6, 2), torch.tensor(0.5))])
@each_rank(2)
def test_noise_hides_the_sample_that_weighs_most(sizes: tuple[int, int], scale: Any) -> None:
    """Of two microbatches of these sizes; and in the next step of one sample that is weighed by 1 / 100."""
    spec = fsdp.Spec(fsdp.local_mesh(), fsdp.zero2("data"))
    state = fsdp.shard({"a": {"w": torch.zeros(WIDE)}}, spec, fsdp.sgd(lr=0.1))
    f: Any = T.clipped_gradients({"a": lambda w, h, s: s * 0 * w["w"].sum()}, max_norm=0.5, noise=3.0)
    for size, last in zip(sizes, (False, True), strict=True):
        state, _ = f(state, torch.ones(size), last_microbatch=last, scale=scale)
    draws = full_grads(state)["a.w"].flatten()
    want = 3.0 * 0.5 * 0.5 / 2 / 2  # noise · max_norm · scale / samples of the smallest microbatch / ranks
    assert abs(draws.std() / want - 1) < 5 / math.sqrt(2 * WIDE)
    state = fsdp.step(state)
    assert [*state.extras] == []
    state, _ = f(state, torch.ones(1), scale=0.01)
    after = full_grads(state)["a.w"].std().item()
    assert abs(after / (3.0 * 0.5 * 0.01 / 2) - 1) < 5 / math.sqrt(2 * WIDE)


@each_rank(2)
def test_ranks_that_add_other_noise_hear_of_it() -> None:
    """max_norm, noise, or the number of samples differ between ranks."""
    mesh, rank = fsdp.local_mesh(), dist.get_rank()
    for norm, noise, size in ((1.0 + rank, 1.0, 4), (1.0, 1.0 + rank, 4), (1.0, 1.0, 4 + rank)):
        state = fsdp.shard({"a": {"w": torch.zeros(5)}}, fsdp.Spec(mesh, fsdp.ddp("data")), fsdp.sgd(lr=0.1))
        cut: Any = {"a": lambda w, h, s: s * w["w"].sum()}
        state, _ = T.clipped_gradients(cut, max_norm=norm, noise=noise)(state, torch.ones(size))
        refused((partial(fsdp.step, state), "by other noise"))


# ---------------------------------------------------------------- errors


@each_rank(2)
def test_what_is_wrong_says_so() -> None:
    state, model = start("zero3")
    data, cut = samples(dist.get_rank()), stages(model)
    without = {k: fn for k, fn in cut.items() if k != "blocks.2"}
    refused(
        (lambda: T.per_sample_norms(cut, chunk=0),
         "SpecError: per_sample_norms(chunk=0): expected a number of samples of at least 1"),
        (lambda: T.per_sample_norms(cut)(state, (data[0], data[1][:4])),
         "shapes (6, 5) and (4, 5); expected the same number of samples in dim 0, got 6 and 4."),
        (lambda: T.per_sample_norms(cut)(state, 3.0), "nothing in the batch has a leading dim of samples"),
        (lambda: T.per_sample_norms({**cut, HEAD: lambda w, h, s: h.sum(-1)})(state, data),
         "the last stage, ('embed.weight', 'tail'), returned a tensor of shape (5,)"),
        (lambda: T.clipped_gradients(without, max_norm=1.0)(state, data),
         "clipped_gradients: no stage uses the unit 'blocks.2'"),
        (lambda: T.per_sample_vjp(lambda w, x: x, {}, data[0])[1]({}, data[0][:4]),
         "pullback: cotangents of 4 samples; the forward had 6."),
    )  # fmt: skip
    state, _ = T.clipped_gradients(cut, max_norm=BOUND)(state, data)
    assert largest(full_grads(fsdp.finish_reductions(state)), clipped_mean()) < 1e-12


@each_rank(1)
def test_norms_and_keys_that_mean_nothing_are_refused() -> None:
    stages: dict[Any, Any] = {"a": lambda w, h, sample: (w["w"] * sample).sum()}
    state = fsdp.shard({"a": {"w": torch.ones(3)}}, fsdp.Spec(fsdp.local_mesh(), units=["a"]), fsdp.sgd(lr=0.1))
    for value in (float("inf"), float("nan"), 0.0):
        said = "expected a finite norm above 0"
        refused((partial(T.clipped_gradients, stages, max_norm=value), "SpecError: clipped_gradients(max_norm=", said))
    for value in (float("inf"), -1.0):
        said = f"SpecError: clipped_gradients(noise={value}): expected a finite multiplier of at least 0."
        refused((partial(T.clipped_gradients, stages, max_norm=1.0, noise=value), said))
    refused(
        (lambda: T.per_sample_norms({("a", "a"): stages["a"]}), "SpecError", "the key ('a', 'a') names a unit twice"),
        (lambda: T.per_sample_norms(stages)(state, torch.ones(0, 3)),
         "TreeError", "a batch without samples: a tensor of shape (0, 3)"),
    )  # fmt: skip
    assert state.cursor.idle  # nothing was gathered


# ---------------------------------------------------------------- transactions


def breaks(way: str, who: tuple[int, ...], where: int) -> tuple[list[Tree], list[str]]:
    """Three steps; in the second, on some ranks, a stage raises when it is called for the `where`th time."""
    state, model = start("zero3")
    calls, bad = [0], [False]

    def broken(w: Any, h: Any, data: Any) -> Any:
        calls[0] += 1
        if bad[0] and calls[0] == where:
            raise Boom("on purpose")
        return stages(model)["blocks.1"](w, h, data)

    cut = {**stages(model), "blocks.1": broken}
    clip, norms, product = T.clipped_gradients(cut, max_norm=BOUND, noise=0.5), T.per_sample_norms(cut), T.hvp(cut)
    seen: list[Tree] = []

    def take(state: fsdp.State, step: int, met: list[str]) -> fsdp.State:
        data = samples(dist.get_rank(), step)
        calls[0], bad[0] = 0, step == 1 and not met and dist.get_rank() in who
        if way == "hvp":
            middle, _ = T.forward_backward(model, loss_fn)(state, data)
            middle, _ = product(middle, dict(state.main), data)
        elif way == "norms":
            state, _ = norms(state, data)
            middle, _ = T.forward_backward(model, loss_fn)(state, data)
        else:
            middle, _ = clip(state, data)
        middle = fsdp.finish_reductions(middle)
        grads = full_grads(middle)
        state = fsdp.step(middle)
        seen.append(grads)
        return state

    return seen, taken(state, take, 3)[1]


@cache
def undisturbed(way: str) -> list[Any]:
    return launch(breaks, (way, (), 0), nprocs=2)


STOPPED = [("hvp", 1), ("hvp", 2), ("norms", 1), ("norms", 2), ("clip", 2), ("clip", 3)]


@pytest.mark.parametrize(
    ("way", "where", "who"),
    marked(
        [(*one, who) for one in STOPPED for who in ((0, 1), (1,))],
        [("hvp", 2, (0, 1)), ("norms", 1, (0, 1)), ("clip", 2, (1,))],
    ),
)
def test_an_error_in_a_stage_costs_nothing(way: str, where: int, who: tuple[int, ...]) -> None:
    good, _ = undisturbed(way)[0]
    for rank, (seen, said) in enumerate(launch(breaks, (way, who, where), nprocs=2)):
        assert said == ["Boom" if rank in who else "RestartError"]
        assert all(torch.equal(a[key], b[key]) for a, b in zip(seen, good, strict=True) for key in b)


# ---------------------------------------------------------------- embeddings with a padding index


class Padded(nn.Module):
    """The padding's row gets gradients from the tied head alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(5, 3, padding_idx=1), nn.Linear(3, 5)
        self.table, self.head.weight = nn.Parameter(torch.randn(4, 3)), self.embed.weight
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + F.embedding(tokens % 4, self.table, padding_idx=-2)
        return self.head(x.tanh()).sin()


def of_tokens(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).square().mean()


@each_rank(2)
def test_the_row_of_a_padding_index_gets_no_gradient_from_lookups() -> None:
    tokens, each = torch.tensor([[1, 2, 1, 4], [0, 1, 2, 3], [1, 1, 1, 2]]), []
    state, model = begin(Padded())
    for row in tokens:
        module = Padded()
        of_tokens(module, row[None]).backward()
        each.append({path: p.grad for path, p in module.named_parameters() if p.grad is not None})
    want = torch.stack([torch.stack([g.square().sum() for g in one.values()]).sum().sqrt() for one in each])
    state, (_, norms) = T.per_sample_norms(model, of_tokens)(state, tokens)
    assert (norms - want).abs().max() < 1e-9
    params = {path: torch.stack([leaf] * 3) for path, leaf in fsdp.full_params(state).items()}
    params["head.weight"] = params["embed.weight"]
    members = fsdp.shard(params, state.spec, fsdp.sgd(lr=0.1))
    ensemble = T.vmap(of_tokens, in_dims=0)
    members, _ = T.forward_backward(model, lambda m, tokens: ensemble(m, tokens).sum())(members, tokens)
    got = full_grads(fsdp.finish_reductions(members))
    assert all((got[path][i] - one[path]).abs().max() < 1e-9 for i, one in enumerate(each) for path in one)
    members = fsdp.drop_gradients(members)
    slope = T.jvp(model, lambda m, tokens: ensemble(m, tokens).sum())(members, members.main, tokens)[1][1]
    module = Padded()
    at = {path: p.detach() for path, p in module.named_parameters()}
    called = lambda w: [of_tokens(partial(torch.func.functional_call, module, w), row[None]) for row in tokens]  # noqa: E731
    alone = torch.func.jvp(called, (at,), (at,))[1]
    assert (slope - torch.stack(alone).sum()).abs() < 1e-9


@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
def test_each_sample_is_padded_as_its_convolution_says(mode: Literal["zeros", "reflect", "circular"]) -> None:
    torch.manual_seed(0)
    module = nn.Conv1d(2, 3, 3, padding=1, padding_mode=mode).double()
    x, want = torch.randn(4, 2, 5, dtype=torch.float64), []
    for one in x.split(1):
        grads = torch.autograd.grad(module(one).sin().sum(), list(module.parameters()))
        want.append(torch.cat([g.flatten() for g in grads]).norm())
    params, model = fsdp.functionalize(module)
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()))
    _, (_, norms) = T.per_sample_norms(model, lambda m, x: m(x).sin().sum())(state, x)
    torch.testing.assert_close(norms, torch.stack(want), rtol=1e-10, atol=0)


class Reads(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.layer = what, nn.Linear(3, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y * x.sum().item() if self.what == "value" else y[y > 0]


@pytest.mark.parametrize(("what", "said"), [
    ("value", "reads a value, which differs from sample to"), ("shape", "makes a tensor whose shape follows from val"),
])  # fmt: skip
@each_rank(1)
def test_what_follows_from_values_is_named(what: str, said: str) -> None:
    state, model = begin(nn.Sequential(Reads(what)))
    norms = T.per_sample_norms(model, lambda m, x: m(x).sum())
    x = torch.ones(2, 3, dtype=torch.float64)
    refused((lambda: norms(state, x), f"TreeError: per_sample_norms: the model itself {said}"))
