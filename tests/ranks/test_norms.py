"""Norms by leaf and by unit, products of trees, and the clipping that goes by them, beside the plain module's."""

from __future__ import annotations

import weakref
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.driven import refused
from support.presets import PRESETS, TWO_AXES, ranks_of
from support.problems import batch, full_grads, largest, loss_fn, mesh_and_placement, net, on, reference
from support.ranks import each_rank
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


def by_shards(state: fsdp.State, kind: Any) -> tuple[float, int]:
    """The norm of what `local_shards(unique=True)` gives on all ranks, and how many elements that are. These are views
    of the state's own buffers, of the leaves that it gives without `unique`."""
    mine, every = fsdp.local_shards(state, kind, unique=True), fsdp.local_shards(state, kind)
    assert mine.keys() == every.keys()
    assert all(not part.numel() or part.data_ptr() == every[path].data_ptr() for path, part in mine.items())
    squares = sum((part.double().square().sum() for part in mine.values()), torch.zeros((), dtype=torch.float64))
    _, (total, held) = fsdp.psum(state, (squares, sum(part.numel() for part in mine.values())))
    return float(total.sqrt()), int(held)


def with_ranks(*presets: str) -> list[tuple[str, int]]:
    return [(preset, ranks_of(preset)) for preset in presets]


@pytest.mark.parametrize(("preset", "ranks"), with_ranks(*PRESETS, "mixed"))
@each_rank("ranks")
def test_each_leaf_counts_once(preset: str, ranks: int) -> None:
    _, grads, _ = next(iter(reference(ranks, 1, 1)))
    weights = {path: p.detach() for path, p in net().named_parameters()}
    state = started(preset)
    if any("Partial" in repr(b) for b in state.grads.values()):
        assert fsdp.local_shards(state, "grads")
        with pytest.raises(fsdp.ScheduleError, match=r"are partial, .* fsdp\.finish_reductions\(state\) first"):
            fsdp.local_shards(state, "grads", unique=True)
    for ord in ORDERS:
        state, norm = T.global_norm(state, ord)
        every = nn.utils.get_total_norm([g for g in grads.values() if g.numel()], ord)
        torch.testing.assert_close(norm, every, rtol=1e-12, atol=0)
        for kind, tree in (("grads", grads), ("main", weights)):
            by_leaf = {
                path: torch.linalg.vector_norm(t, ord) if t.numel() else torch.zeros((), dtype=torch.float64)
                for path, t in tree.items()
            }
            of = None if kind == "grads" else state.main
            state, got = T.norms(state, of, ord)
            assert [*got] == [*by_leaf]  # in the tree's order, tied leaves once
            torch.testing.assert_close(got, by_leaf, rtol=1e-12, atol=1e-15)
            state, by_unit = T.norms(state, of, ord, by="unit")
            whole = torch.linalg.vector_norm(torch.stack([*by_leaf.values()]), ord)
            assert len(by_unit) == 5
            torch.testing.assert_close(torch.linalg.vector_norm(torch.stack([*by_unit.values()]), ord), whole)
            block = torch.stack([n for path, n in by_leaf.items() if path.startswith("blocks.1.")])
            torch.testing.assert_close(by_unit["blocks.1"], torch.linalg.vector_norm(block, ord))
    run = state.version.lineage.runtime
    before = run.issued["side"].count
    state, _ = T.norms(state)
    assert run.issued["side"].count - before == (0 if preset == "ddp" else 2 if preset == "hfsdp" else 1)
    state, dot = T.dot(state, state.grads, state.main)
    product = sum((g * weights[path]).sum() for path, g in grads.items())
    torch.testing.assert_close(dot, product, rtol=1e-10, atol=1e-14)
    state, square = T.dot(state, state.main, state.main)
    torch.testing.assert_close(square, sum(p.square().sum() for p in weights.values()), rtol=1e-12, atol=0)
    state = fsdp.finish_reductions(state)
    copies = bool(state.weights) and preset != "mixed"
    assert copies == (preset in ("zero1", "zero2", "hfsdp"))
    for kind in ("main", "grads", *(["weights"] if copies else [])):
        total, held = by_shards(state, kind)
        tree = grads if kind == "grads" else weights
        every = nn.utils.get_total_norm([t for t in tree.values() if t.numel()])
        assert total == pytest.approx(every.item(), abs=1e-12)
        assert held == sum(t.numel() for t in tree.values())
    state, _ = T.norms(state, {"tail:0": state.main["tail:0"]} if "tail:0" in state.main else state.main)
    fsdp.step(state)  # it was not consumed


@each_rank(4, processes=True)
def test_experts_count_each_of_their_own() -> None:
    import moe

    state, model = moe.sharded(fsdp.local_mesh(expert=2, data=2), fsdp.sgd(lr=0.5))
    moe.GROUP, group = None, moe.GROUP
    weights = dict(moe.Model().named_parameters())
    moe.GROUP = group
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
    state, _ = T.forward_backward(model, moe.loss_fn)(state, tokens)
    state, whole = T.global_norm(state)
    for by in ("leaf", "unit"):
        state, found = T.norms(state, by=by)
        torch.testing.assert_close(torch.stack([*found.values()]).norm(), whole, rtol=1e-5, atol=0)
    state, main = T.norms(state, state.main)
    for path, norm in main.items():
        torch.testing.assert_close(norm, weights[path].detach().norm(), rtol=1e-5, atol=0)
    _, square = T.dot(state, state.grads, state.grads)
    torch.testing.assert_close(square.sqrt(), whole, rtol=1e-5, atol=0)
    every = sum(p.numel() for p in weights.values())
    for kind, want in (("main", nn.utils.get_total_norm(list(weights.values()))), ("grads", whole)):
        total, held = by_shards(state, kind)
        assert total == pytest.approx(want.item(), rel=1e-6 if kind == "main" else 1e-5)
        assert held == every


# ---------------------------------------------------------------- clipping


ALONG_TWO = [pytest.param(*row, marks=pytest.mark.large) for row in with_ranks(*TWO_AXES)]


@pytest.mark.parametrize("ord", [1, inf])
@pytest.mark.parametrize(("preset", "ranks"), [*with_ranks("zero3"), *ALONG_TWO])
@each_rank("ranks")
def test_clipping_by_another_norm_is_torchs(preset: str, ranks: int, ord: float) -> None:
    _, grads, _ = next(iter(reference(ranks, 1, 1)))
    parameters = [nn.Parameter(g.clone()) for g in grads.values()]
    for p, g in zip(parameters, grads.values(), strict=True):
        p.grad = g.clone()
    want = nn.utils.clip_grad_norm_([p for p in parameters if p.numel()], 0.01, ord)
    state, norm = T.clip_by_global_norm(started(preset), 0.01, ord, error_if_nonfinite=True)
    torch.testing.assert_close(norm, want, rtol=1e-12, atol=0)
    wanted = {key: p.grad for key, p in zip(grads, parameters, strict=True)}
    assert largest(full_grads(state), wanted) < 1e-12  # type: ignore[arg-type]


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("value", [torch.nan, inf])
@each_rank(2)
def test_what_is_not_finite_is_so_on_every_rank(value: float, who: int) -> None:
    """One element of one rank's shard."""
    state, mine = fsdp.finish_reductions(started("zero3")), dist.get_rank() == who
    if mine:
        state.grads["blocks.1"].local[0] = value
    for ord in ORDERS:
        state, norm = T.global_norm(state, ord)
        assert norm.item() == pytest.approx(value, nan_ok=True)
    state, by_leaf = T.norms(state, ord=inf)
    (leaf,) = (path for path, norm in by_leaf.items() if not norm.isfinite())
    said = rf"gradients are not finite \(clip_by_global_norm: their norm is {value}\)"
    with pytest.raises(T.NonfiniteError, match=said) as caught:
        T.clip_by_global_norm(state, 1.0, error_if_nonfinite=True)
    assert [(one.leaf, one.rank, one.elements) for one in caught.value.found] == [(leaf, who, 1)]
    _, most = fsdp.pmax(state, torch.tensor([value if mine else 1.0, -2.0]))
    assert most.tolist() == pytest.approx([value, -2.0], nan_ok=True)


@pytest.mark.parametrize(("preset", "ranks"), with_ranks("zero3", "hsdp"))
@each_rank("ranks")
def test_pmax_is_the_largest_of_each_element(preset: str, ranks: int) -> None:
    state, rank = started(preset), dist.get_rank()
    state, tree = fsdp.pmax(state, {"a": torch.tensor([rank, -rank]), "b": 0.5 * rank, "c": torch.tensor(-3.0)})
    assert {name: t.tolist() for name, t in tree.items()} == {"a": [ranks - 1, 0], "b": 0.5 * (ranks - 1), "c": -3.0}
    along = {"data": 1, "replica": 2 + rank % 2, "shard": rank // 2 * 2 + 1}
    for axis in state.spec.axes:
        state, most = fsdp.pmax(state, rank, axis)
        assert most.item() == along[axis]


# ---------------------------------------------------------------- replicas that train apart


def in_islands(bad: bool = False) -> tuple[fsdp.State, Any]:
    """In a mesh with an axis that no placement names; `bad`: one element on rank 3 is NaN."""
    mesh = fsdp.local_mesh(replica=2, shard=2)
    params, model = fsdp.functionalize(net())
    state = fsdp.shard(params, fsdp.Spec(mesh, fsdp.zero3("shard")), fsdp.sgd(lr=0.1))
    forward_backward = T.forward_backward(model, loss_fn)
    state, _ = forward_backward(state, batch(0, dist.get_rank()))
    if bad and dist.get_rank() == 3:
        state.grads["blocks.1"].local[0] = torch.nan
    return state, forward_backward


def steps_of(state: fsdp.State, forward_backward: Any) -> tuple[int, int, int]:
    """How many steps are taken, and skipped, by one update; and taken by another one."""
    state = T.skip_nonfinite(fsdp.step)(state)
    taken = int(state.count), int(state.extras["skipped"])
    state, _ = forward_backward(state, batch(1, dist.get_rank()))
    return *taken, int(T.skip_nonfinite(fsdp.step)(state).count)


@each_rank(4)
def test_replicas_that_train_apart_have_norms_of_their_own() -> None:
    model = net()
    trained = {path: p for path, p in model.named_parameters() if p.requires_grad}
    pair = (0, 1) if dist.get_rank() < 2 else (2, 3)
    loss = sum(loss_fn(model, batch(0, one)) / 2 for one in pair)
    grads = dict(zip(trained, torch.autograd.grad(loss, [*trained.values()]), strict=True))  # type: ignore[arg-type]
    every = [g for g in grads.values() if g.numel()]
    norm = nn.utils.get_total_norm(every)
    state, forward_backward = in_islands()
    for ord in ORDERS:
        state, found = T.global_norm(state, ord)
        torch.testing.assert_close(found, nn.utils.get_total_norm(every, ord), rtol=1e-12, atol=0)
    state, leaves = T.norms(state)
    assert len(leaves) == len(grads)
    for path, one in leaves.items():
        torch.testing.assert_close(one, grads[path].norm(), rtol=1e-12, atol=1e-15)
    state, main = T.norms(state, state.main)
    for path, one in main.items():
        torch.testing.assert_close(one, model.get_parameter(path).detach().norm(), rtol=1e-12, atol=1e-15)
    state, dot = T.dot(state, state.grads, state.grads)
    torch.testing.assert_close(dot, norm.square(), rtol=1e-12, atol=0)
    state, bad = T.any_nonfinite(state)
    assert not bad
    state, clipped = T.clip_by_global_norm(state, 0.01, error_if_nonfinite=True)
    torch.testing.assert_close(clipped, norm, rtol=1e-12, atol=0)
    state, after = T.norms(state)
    for path, one in after.items():
        torch.testing.assert_close(one, grads[path].norm() * 0.01 / (norm + 1e-6), rtol=1e-12, atol=1e-15)
    assert steps_of(state, forward_backward) == (1, 0, 2)


@each_rank(4)
def test_a_replica_with_a_nan_skips_its_step_alone() -> None:
    state, forward_backward = in_islands(bad=True)
    apart = dist.get_rank() >= 2
    state, norm = T.global_norm(state)
    assert norm.isnan() == apart
    state, bad = T.any_nonfinite(state)
    assert bad.item() == apart
    said = "their norm is nan), of the rank that holds it: rank 3, unit 'blocks.1'"  # on every rank
    refused((lambda: T.clip_by_global_norm(state, 1.0, error_if_nonfinite=True), "NonfiniteError", said))
    assert steps_of(state, forward_backward) == ((0, 1, 1) if apart else (1, 0, 2))


@each_rank(2)
def test_bytes_of_packed_leaves_are_no_numbers_and_integers_are() -> None:
    """A leaf that is packed, one that trains, and one of integers."""
    params = {"base": nn.Parameter(torch.ones(8, 64)), "w": torch.full((4,), 3.0), "n": torch.tensor([3, 4])}
    precision = {"base": fsdp.Precision(main=fsdp.nf4), "*": fsdp.Precision()}
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh("cpu"), precision=precision), fsdp.sgd(lr=0.1))
    for call in (lambda: T.norms(state, state.main), lambda: T.dot(state, state.main, state.main)):
        with pytest.raises(fsdp.TreeError, match=r"whose leaves are packed \('base'\): bytes are no numbers"):
            call()
    plain = {name: buffer for name, buffer in state.main.items() if buffer.local.dtype is not torch.uint8}
    state, found = T.norms(state, plain)
    assert {path: float(n) for path, n in found.items()} == {"w": 6.0, "n": 5.0}
    state, product = T.dot(state, plain, plain)
    assert float(product) == 36.0 + 25.0


@pytest.mark.parametrize("preset", ["zero3", "ddp"])
@each_rank(2)
def test_padding_does_not_count(preset: str) -> None:
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
