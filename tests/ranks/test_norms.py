"""Norms by leaf and by unit, products of trees, and the clipping that goes by them, beside the plain module's."""

from __future__ import annotations

import weakref
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.driven import raised
from support.presets import PRESETS, TWO_AXES, ranks_of
from support.problems import Tree, batch, full_grads, largest, loss_fn, mesh_and_placement, net, on, reference
from support.ranks import launch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import functional_fsdp as fsdp
from functional_fsdp import extend
from functional_fsdp import transforms as T

ORDERS = (1, 2, inf)
MIXED = {"blocks.1.norm.*": fsdp.ddp("data"), "blocks.2": fsdp.zero1("data"), "*": fsdp.zero3("data")}


def started(preset: str) -> fsdp.State:
    """A state with gradients that are not all whole."""
    mesh, placement = mesh_and_placement(preset) if preset != "mixed" else (fsdp.local_mesh(), MIXED)
    params, model = fsdp.functionalize(net())
    state = fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.sgd(lr=0.1))
    data = on(state, batch(0, dist.get_rank()))
    state, _ = T.forward_backward(model, loss_fn)(state, data, last_microbatch=False)
    return state


def measured(preset: str) -> dict[Any, Any]:
    state = started(preset)
    found: dict[Any, Any] = {}
    if any("Partial" in repr(b) for b in state.grads.values()):
        assert fsdp.local_shards(state, "grads")
        with pytest.raises(fsdp.ScheduleError, match=r"are partial, .* fsdp\.finish_reductions\(state\) first"):
            fsdp.local_shards(state, "grads", unique=True)
    run = state.version.lineage.runtime
    for ord in ORDERS:
        state, found["all", ord] = T.global_norm(state, ord)
        for by in ("leaf", "unit"):
            state, found["grads", ord, by] = T.norms(state, ord=ord, by=by)
            state, found["main", ord, by] = T.norms(state, state.main, ord, by=by)
    before = run.issued["side"].count
    state, _ = T.norms(state)
    found["issued"] = run.issued["side"].count - before
    state, found["dot"] = T.dot(state, state.grads, state.main)
    state, found["weights"] = T.dot(state, state.main, state.main)
    state = fsdp.finish_reductions(state)
    kinds = ("main", "grads", *(["weights"] if state.weights and preset != "mixed" else []))
    found["shards"] = {kind: by_shards(state, kind) for kind in kinds}
    state, _ = T.norms(state, {"tail:0": state.main["tail:0"]} if "tail:0" in state.main else state.main)
    fsdp.step(state)  # it was not consumed
    return found


def by_shards(state: fsdp.State, kind: Any) -> tuple[float, int]:
    """The norm of what `local_shards(unique=True)` gives on all ranks, and how many elements that are. These are views
    of the state's own buffers, of the leaves that it gives without `unique`."""
    mine, every = fsdp.local_shards(state, kind, unique=True), fsdp.local_shards(state, kind)
    assert mine.keys() == every.keys()
    assert all(not part.numel() or part.data_ptr() == every[path].data_ptr() for path, part in mine.items())
    squares = sum((part.double().square().sum() for part in mine.values()), torch.zeros((), dtype=torch.float64))
    _, (total, held) = fsdp.psum(state, (squares, sum(part.numel() for part in mine.values())))
    return float(total.sqrt()), int(held)


@pytest.mark.parametrize("preset", [*PRESETS, "mixed"])
def test_each_leaf_counts_once(preset: str) -> None:
    ranks = ranks_of(preset)
    _, grads, _ = next(iter(reference(ranks, 1, 1)))
    weights = dict(net().named_parameters())
    trees = {"grads": grads, "main": {path: p.detach() for path, p in weights.items()}}
    for found in launch(measured, (preset,), nprocs=ranks):
        for ord in ORDERS:
            every = nn.utils.get_total_norm([g for g in grads.values() if g.numel()], ord)
            torch.testing.assert_close(found["all", ord], every, rtol=1e-12, atol=0)
            for kind, tree in trees.items():
                by_leaf = {
                    path: torch.linalg.vector_norm(t, ord) if t.numel() else torch.zeros((), dtype=torch.float64)
                    for path, t in tree.items()
                }
                got = found[kind, ord, "leaf"]
                assert [*got] == [*by_leaf]  # in the tree's order, tied leaves once
                torch.testing.assert_close(got, by_leaf, rtol=1e-12, atol=1e-15)
                by_unit = found[kind, ord, "unit"]
                whole = torch.linalg.vector_norm(torch.stack([*by_leaf.values()]), ord)
                assert len(by_unit) == 5
                torch.testing.assert_close(torch.linalg.vector_norm(torch.stack([*by_unit.values()]), ord), whole)
                block = torch.stack([n for path, n in by_leaf.items() if path.startswith("blocks.1.")])
                torch.testing.assert_close(by_unit["blocks.1"], torch.linalg.vector_norm(block, ord))
        assert ("weights" in found["shards"]) == (preset in ("zero1", "zero2", "hfsdp"))
        for kind, (total, held) in found["shards"].items():
            tree = trees["grads" if kind == "grads" else "main"]
            every = nn.utils.get_total_norm([t for t in tree.values() if t.numel()])
            assert total == pytest.approx(every.item(), abs=1e-12)
            assert held == sum(t.numel() for t in tree.values())
        assert found["issued"] == (0 if preset == "ddp" else 2 if preset == "hfsdp" else 1)
        product = sum((g * weights[path].detach()).sum() for path, g in grads.items())
        torch.testing.assert_close(found["dot"], product, rtol=1e-10, atol=1e-14)
        square = sum(p.detach().square().sum() for p in weights.values())
        torch.testing.assert_close(found["weights"], square, rtol=1e-12, atol=0)


def of_experts() -> tuple[dict[str, Tree], Tree, dict[str, tuple[float, int]]]:
    import moe

    state, model = moe.sharded(fsdp.local_mesh(expert=2, data=2), fsdp.sgd(lr=0.5))
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
    state, _ = T.forward_backward(model, moe.loss_fn)(state, tokens)
    state, whole = T.global_norm(state)
    found = {}
    for by in ("leaf", "unit"):
        state, found[by] = T.norms(state, by=by)
    state, main = T.norms(state, state.main)
    _, square = T.dot(state, state.grads, state.grads)
    shards = {kind: by_shards(state, kind) for kind in ("main", "grads")}
    return {**found, "whole": {"": whole}, "dot": {"": square.sqrt()}}, main, shards


def test_experts_count_each_of_their_own() -> None:
    import moe

    moe.GROUP = None
    weights = dict(moe.Model().named_parameters())
    for found, main, shards in launch(of_experts, nprocs=4, processes=True):
        (whole,) = found["whole"].values()
        assert shards["main"][0] == pytest.approx(nn.utils.get_total_norm(list(weights.values())).item(), rel=1e-6)
        assert shards["grads"][0] == pytest.approx(whole.item(), rel=1e-5)
        assert shards["main"][1] == shards["grads"][1] == sum(p.numel() for p in weights.values())
        for by in ("leaf", "unit", "dot"):
            torch.testing.assert_close(torch.stack([*found[by].values()]).norm(), whole, rtol=1e-5, atol=0)
        for path, norm in main.items():
            torch.testing.assert_close(norm, weights[path].detach().norm(), rtol=1e-5, atol=0)


# ---------------------------------------------------------------- clipping


def clipped(preset: str, ord: float) -> tuple[torch.Tensor, Tree]:
    state, norm = T.clip_by_global_norm(started(preset), 0.01, ord, error_if_nonfinite=True)
    return norm, full_grads(state)


@pytest.mark.parametrize("ord", [1, inf])
@pytest.mark.parametrize("preset", ["zero3", *(pytest.param(p, marks=pytest.mark.large) for p in TWO_AXES)])
def test_clipping_by_another_norm_is_torchs(preset: str, ord: float) -> None:
    ranks = ranks_of(preset)
    _, grads, _ = next(iter(reference(ranks, 1, 1)))
    parameters = [nn.Parameter(g.clone()) for g in grads.values()]
    for p, g in zip(parameters, grads.values(), strict=True):
        p.grad = g.clone()
    want = nn.utils.clip_grad_norm_([p for p in parameters if p.numel()], 0.01, ord)
    for norm, found in launch(clipped, (preset, ord), nprocs=ranks):
        torch.testing.assert_close(norm, want, rtol=1e-12, atol=0)
        assert largest(found, {key: p.grad for key, p in zip(grads, parameters, strict=True)}) < 1e-12  # type: ignore[misc]


def not_finite(value: float, who: int) -> dict[str, Any]:
    """One element of one rank's shard."""
    state = started("zero3")
    found: dict[str, Any] = {}
    state = fsdp.finish_reductions(state)
    if dist.get_rank() == who:
        state.grads["blocks.1"].local[0] = value
    for ord in ORDERS:
        state, norm = T.global_norm(state, ord)
        found[f"{ord}"] = norm.item()
    state, by_leaf = T.norms(state, ord=inf)
    found["leaves"] = [path for path, norm in by_leaf.items() if not norm.isfinite()]
    found["said"] = raised(lambda: T.clip_by_global_norm(state, 1.0, error_if_nonfinite=True))
    try:
        T.clip_by_global_norm(state, 1.0, error_if_nonfinite=True)
    except T.NonfiniteError as error:
        found["places"] = [(one.leaf, one.rank, one.elements) for one in error.found]
    _, found["pmax"] = fsdp.pmax(state, torch.tensor([value if dist.get_rank() == who else 1.0, -2.0]))
    return found


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("value", [torch.nan, inf])
def test_what_is_not_finite_is_so_on_every_rank(value: float, who: int) -> None:
    for found in launch(not_finite, (value, who), nprocs=2):
        for ord in ORDERS:
            assert found[f"{ord}"] == pytest.approx(value, nan_ok=True)
        assert len(found["leaves"]) == 1
        assert found["places"] == [(found["leaves"][0], who, 1)]
        assert f"NonfiniteError: gradients are not finite (clip_by_global_norm: their norm is {value})" in found["said"]
        assert found["pmax"].tolist() == pytest.approx([value, -2.0], nan_ok=True)


def largest_of(preset: str) -> dict[str, Any]:
    state, rank = started(preset), dist.get_rank()
    state, tree = fsdp.pmax(state, {"a": torch.tensor([rank, -rank]), "b": 0.5 * rank, "c": torch.tensor(-3.0)})
    found = {name: t.tolist() for name, t in tree.items()}
    for axis in state.spec.axes:
        state, one = fsdp.pmax(state, rank, axis)
        found[axis] = one.item()
    return found


@pytest.mark.parametrize("preset", ["zero3", "hsdp"])
def test_pmax_is_the_largest_of_each_element(preset: str) -> None:
    ranks = ranks_of(preset)
    for rank, found in enumerate(launch(largest_of, (preset,), nprocs=ranks)):
        assert found["a"] == [ranks - 1, 0]
        assert found["b"] == 0.5 * (ranks - 1)
        assert found["c"] == -3.0
        if preset == "hsdp":
            assert found["replica"] == 2 + rank % 2
            assert found["shard"] == rank // 2 * 2 + 1


# ---------------------------------------------------------------- replicas that train apart


def of_islands(bad: bool) -> dict[str, Any]:
    """In a mesh with an axis that no placement names; `bad`: one element on rank 3 is NaN."""
    mesh = fsdp.local_mesh(replica=2, shard=2)
    rank = dist.get_rank()
    params, model = fsdp.functionalize(net())
    state = fsdp.shard(params, fsdp.Spec(mesh, fsdp.zero3("shard")), fsdp.sgd(lr=0.1))
    state, _ = T.forward_backward(model, loss_fn)(state, batch(0, rank))
    if bad and rank == 3:
        state.grads["blocks.1"].local[0] = torch.nan
    found: dict[str, Any] = {}
    for ord in ORDERS:
        state, found[f"all {ord}"] = T.global_norm(state, ord)
    state, found["leaves"] = T.norms(state)
    state, found["main"] = T.norms(state, state.main)
    state, found["dot"] = T.dot(state, state.grads, state.grads)
    state, found["bad"] = T.any_nonfinite(state)
    if bad:
        found["said"] = raised(lambda: T.clip_by_global_norm(state, 1.0, error_if_nonfinite=True))
    else:
        state, found["clipped"] = T.clip_by_global_norm(state, 0.01, error_if_nonfinite=True)
        state, found["after"] = T.norms(state)
    state = T.skip_nonfinite(fsdp.step)(state)
    found["steps"], found["skipped"] = int(state.count), int(state.extras["skipped"])
    state, _ = T.forward_backward(model, loss_fn)(state, batch(1, rank))
    found["later"] = int(T.skip_nonfinite(fsdp.step)(state).count)
    return found


def test_replicas_that_train_apart_have_norms_of_their_own() -> None:
    model = net()
    trained = {path: p for path, p in model.named_parameters() if p.requires_grad}
    for rank, found in enumerate(launch(of_islands, (False,), nprocs=4)):
        pair = (0, 1) if rank < 2 else (2, 3)
        loss = sum(loss_fn(model, batch(0, one)) / 2 for one in pair)
        grads = dict(zip(trained, torch.autograd.grad(loss, [*trained.values()]), strict=True))  # type: ignore[arg-type]
        for ord in ORDERS:
            want = nn.utils.get_total_norm([g for g in grads.values() if g.numel()], ord)
            torch.testing.assert_close(found[f"all {ord}"], want, rtol=1e-12, atol=0)
        norm = nn.utils.get_total_norm([g for g in grads.values() if g.numel()])
        assert len(found["leaves"]) == len(grads)
        for path, one in found["leaves"].items():
            torch.testing.assert_close(one, grads[path].norm(), rtol=1e-12, atol=1e-15)
        for path, one in found["main"].items():
            torch.testing.assert_close(one, model.get_parameter(path).detach().norm(), rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(found["dot"], norm.square(), rtol=1e-12, atol=0)
        torch.testing.assert_close(found["clipped"], norm, rtol=1e-12, atol=0)
        for path, one in found["after"].items():
            torch.testing.assert_close(one, grads[path].norm() * 0.01 / (norm + 1e-6), rtol=1e-12, atol=1e-15)
        assert not found["bad"]
        assert (found["steps"], found["skipped"], found["later"]) == (1, 0, 2)


def test_a_replica_with_a_nan_skips_its_step_alone() -> None:
    for rank, found in enumerate(launch(of_islands, (True,), nprocs=4)):
        assert found["bad"].item() == (rank >= 2)
        assert found["all 2"].isnan() == (rank >= 2)
        assert "NonfiniteError" in found["said"]  # on every rank
        assert "their norm is nan), of the rank that holds it: rank 3, unit 'blocks.1'" in found["said"]
        assert (found["steps"], found["skipped"], found["later"]) == ((0, 1, 1) if rank >= 2 else (1, 0, 2))


def packed_and_counts() -> fsdp.State:
    """A leaf that is packed, one that trains, and one of integers."""
    params = {"base": nn.Parameter(torch.ones(8, 64)), "w": torch.full((4,), 3.0), "n": torch.tensor([3, 4])}
    precision = {"base": fsdp.Precision(main=fsdp.nf4), "*": fsdp.Precision()}
    spec = fsdp.Spec(fsdp.local_mesh("cpu"), precision=precision)
    return fsdp.shard(params, spec, fsdp.sgd(lr=0.1))


def measured_numbers() -> tuple[dict[str, float], float]:
    state = packed_and_counts()
    for call in (lambda: T.norms(state, state.main), lambda: T.dot(state, state.main, state.main)):
        with pytest.raises(fsdp.TreeError, match=r"whose leaves are packed \('base'\): bytes are no numbers"):
            call()
    plain = {name: buffer for name, buffer in state.main.items() if buffer.local.dtype is not torch.uint8}
    state, found = T.norms(state, plain)
    state, product = T.dot(state, plain, plain)
    return {path: float(n) for path, n in found.items()}, float(product)


def test_bytes_of_packed_leaves_are_no_numbers_and_integers_are() -> None:
    found = fsdp.launch(measured_numbers, nprocs=2, simulate=True)
    assert found == [({"w": 6.0, "n": 5.0}, 36.0 + 25.0)] * 2


def beside_leaves(preset: str) -> None:
    """What a program's tree_map has put between leaves is no number of theirs."""
    mesh, placement = mesh_and_placement(preset)
    params = {"a": {"w": torch.ones(7, 19), "b": torch.ones(5)}, "c": {"w": torch.ones(300)}}
    state = fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.sgd(lr=1.0))
    v = {name: buffer.but(torch.full_like(buffer.local, 2.0)) for name, buffer in state.main.items()}
    state, product = T.dot(state, v, v)
    state, units = T.norms(state, v, by="unit")
    assert float(product) == 4 * (7 * 19 + 5 + 300)
    assert {name: float(norm) ** 2 for name, norm in units.items()} == pytest.approx({"a": 4 * 138, "c": 1200})
    moved, norm = T.global_norm(fsdp.replace_grads(fsdp.replace_params(state, v), v))
    assert float(norm) ** 2 == pytest.approx(float(product))
    moved = fsdp.step(moved)
    assert not any(buffer.local.any() for buffer in moved.main.values())  # 2 - 2 in leaves, and 0 beside them
    ones = tree_map(torch.ones_like, params)
    for how in ("evolved", "changed", "weights"):
        there = fsdp.finish_reductions(fsdp.reduce(fsdp.replace_params(state, v), ones))
        if how == "evolved":  # as it is, unchecked
            there = extend.evolve(there, grads=tree_map(torch.add, there.grads, v))
        elif how == "changed":
            there = extend.change(there, "add()", lambda: tree_map(torch.Tensor.add_, there.grads, v))  # noqa: B023
        else:
            there = fsdp.step(there)
            there = extend.change_weights(there, "add()", lambda: tree_map(torch.Tensor.add_, there.main, v))  # noqa: B023
            squares = sum(buffer.local.square().sum() for buffer in there.main.values())
            assert float(fsdp.psum(there, squares)[1]) / (2 if preset == "ddp" else 1) == pytest.approx(9 * 438)
            continue
        there, norm = T.global_norm(there)
        assert float(norm) ** 2 == pytest.approx(9 * 438)
        assert all((buffer.local == (buffer.local != 0) * -1.0).all() for buffer in fsdp.step(there).main.values())
    there = fsdp.finish_reductions(fsdp.reduce(fsdp.replace_params(state, v), ones))
    there = extend.change(there, "add()", lambda: tree_map(torch.Tensor.add_, there.grads, v), keeps_zeros=True)
    counted = sum(buffer.local.count_nonzero() for buffer in there.grads.values())
    assert int(fsdp.psum(there, counted)[1]) // (2 if preset == "ddp" else 1) > 438  # nothing looked there


class Products(TorchDispatchMode):
    """How many products there are at once."""

    def __init__(self) -> None:
        super().__init__()
        self.refs: list[Any] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mul.Tensor and out.dim():
            self.refs.append(weakref.ref(out))
            self.most = max(self.most, sum(ref() is not None for ref in self.refs))
        return out


def test_a_product_takes_memory_for_one_bucket_at_a_time() -> None:
    params = {str(i): {"w": torch.ones(300)} for i in range(4)}
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh("cpu"), units=["*"]))
    with Products() as seen:
        state, product = T.dot(state, state.main, state.main)
    assert float(product) == 1200
    assert len(seen.refs) == 4
    assert seen.most == 1


@pytest.mark.parametrize("preset", ["zero3", "ddp"])
def test_padding_does_not_count(preset: str) -> None:
    fsdp.launch(beside_leaves, (preset,), nprocs=2, simulate=True)
