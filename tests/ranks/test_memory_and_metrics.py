"""What only several ranks show: memory by placement, agreement at shard, metrics, awkward leaves, precision, init."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.driven import raised, refused
from support.initialised import initialised
from support.presets import PRESETS, ranks_of
from support.problems import Block, mesh_and_placement, net
from support.ranks import each_rank, launch
from support.tables import FULL, product

import functional_fsdp as fsdp
from functional_fsdp import FlatBuffer, extend


def _bytes(tree: Any) -> int:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return sum(t.untyped_storage().nbytes() for t in leaves if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", PRESETS)
@each_rank(4)
def test_bytes_a_rank_are_those_of_the_placement_table(preset: str, compute: torch.dtype) -> None:
    elements = 3 * (64 * 33 + 448)  # 448: each bucket is padded to 4 × 128 × k elements
    parts = {"ddp": (1, 1, 1), "hsdp": (2, 2, 2), "hfsdp": (2, 4, 4), "zero1": (1, 4, 4), "zero2": (1, 4, 4)}
    weights, grads, main = parts.get(preset, (4, 4, 4))
    mesh, placement = mesh_and_placement(preset)
    params = {f"blocks.{i}.weight": torch.randn(64, 33, generator=torch.Generator().manual_seed(i)) for i in range(3)}
    spec = fsdp.Spec(mesh, placement, precision=fsdp.Precision(compute=compute))
    state = fsdp.shard(params, spec, fsdp.adamw())
    state = fsdp.finish_reductions(fsdp.reduce(state, params))
    assert _bytes(state.main) == state.layout.nbytes("main") == elements * 4 // main
    assert _bytes(state.opt) == 2 * elements * 4 // main
    assert _bytes(state.grads) == elements * 4 // grads  # after the last microbatch: as main weights
    keeps = weights != main or (weights == 1 and compute is not torch.float32)
    assert _bytes(state.weights) == (elements * compute.itemsize // weights if keeps else 0)
    assert _bytes(fsdp.step(state).grads) == 0


@pytest.mark.parametrize(("preset", "parts"), [("ddp", 1), ("zero1", 1), ("zero2", 4), ("zero3", 4), ("hfsdp", 2)])
@each_rank(4)
def test_between_microbatches_gradients_take_what_the_table_says(preset: str, parts: int) -> None:
    mesh, placement = mesh_and_placement(preset)
    params = {"w": torch.ones(64, 32)}
    state = fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.sgd())
    assert _bytes(fsdp.reduce(state, params, last_microbatch=False).grads) == 64 * 32 * 4 // parts


@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=pytest.mark.large)])
def test_metrics_may_be_complex_or_bool(traced: bool) -> None:
    launch(complex_ones, (traced,), nprocs=4, processes=traced)


def complex_ones(traced: bool) -> None:
    """Means and sums of trees with complex tensors and numbers, bools and integers in them."""
    mesh, placement = mesh_and_placement("hsdp")
    state, rank = fsdp.shard({"w": torch.ones(4)}, fsdp.Spec(mesh, placement)), dist.get_rank()
    z = torch.tensor([[1 + 2j * rank, rank - 1j]], dtype=torch.complex128)
    tree = {"z": z, "conj": z.conj(), "one": 1j * rank, "bools": torch.tensor([rank > 1, True]), "bool": rank == 0,
            "more": [torch.tensor(rank, dtype=torch.int64), 2.0 * rank, torch.tensor(float(rank))],
            "double": torch.full((2, 3), float(rank), dtype=torch.float64), "empty": torch.ones(0)}  # fmt: skip

    def both(state: fsdp.State, tree: Any) -> Any:
        state, nothing = fsdp.pmean(state, {})
        assert nothing == {}
        same, mean = fsdp.pmean(state, tree)
        assert traced or same is state
        state, total = fsdp.psum(same, tree)
        return mean, total

    mean, total = (torch.compile(both, fullgraph=True, backend="eager") if traced else both)(state, tree)
    (own,) = extend.all_reduce(state, [z], "sum", "shard")
    want = torch.tensor([[4 + 12j, 6 - 4j]], dtype=torch.complex128)
    torch.testing.assert_close(total, {
        "z": want, "conj": want.conj().resolve_conj(), "one": torch.tensor(6j), "bools": torch.tensor([2.0, 4.0]),
        "bool": torch.tensor(1.0), "more": [torch.tensor(6.0), torch.tensor(12.0), torch.tensor(6.0)],
        "double": torch.full((2, 3), 6.0, dtype=torch.float64), "empty": torch.ones(0),
    })  # fmt: skip
    torch.testing.assert_close(mean, torch.utils._pytree.tree_map(lambda t: t / 4, total))
    low = rank // 2 * 2
    assert own.tolist() == [[2 + 2j * (2 * low + 1), 2 * low + 1 - 2j]]
    assert z.tolist() == [[1 + 2j * rank, rank - 1j]]  # what was given stays
    largest = "TreeError: pmax: a tensor of torch.complex128, and complex numbers have no largest"
    refused(
        (lambda: fsdp.pmax(state, {"z": z}), largest),
        (lambda: fsdp.pmax(state, {"z": 1j}), "pmax: a tensor of torch.complex64"),
        (lambda: extend.all_reduce(state, [z], "max"), "all_reduce: a tensor of torch.complex128"),
    )


@each_rank(2)
def test_dtypes_that_backends_do_not_add_up_are_refused_and_the_mesh_goes_on() -> None:
    """Tensors that gloo cannot add up; and a sum on the same mesh afterwards."""
    state = fsdp.shard({"w": torch.ones(4)}, fsdp.Spec(fsdp.local_mesh()))
    mixed = {"a": 1.0, "b": torch.ones(2).to(torch.float8_e4m3fn)}
    for metric in (fsdp.psum, fsdp.pmean, fsdp.pmax):
        text = f"TreeError: {metric.__name__}: a tensor [2] of torch.float8_e4m3fn"
        refused((partial(metric, state, mixed), text))
    for dtype in (torch.float8_e5m2, torch.int16, torch.uint16, torch.uint32, torch.uint64):
        text = f"TreeError: all_reduce: a tensor [2] of {dtype}"
        refused((partial(extend.all_reduce, state, [torch.ones(2).to(dtype)]), text))
    assert fsdp.psum(state, torch.ones(2, dtype=torch.int16))[1].sum() == 4  # integers travel as float32


@each_rank(2)
def test_metrics_may_be_views_of_any_strides() -> None:
    """Sums and means of views that are not contiguous, and of a matrix that is transposed on the first rank alone."""
    state = fsdp.shard({"w": torch.ones(4)}, fsdp.Spec(fsdp.local_mesh()))
    rank = dist.get_rank()
    x = torch.arange(12.0).view(2, 6) + 100 * rank
    tree = {"half": x[:, :3], "second": x[:, ::2], "column": x[:, 0], "one": x[0, :1].expand(3)}
    tree["turned"] = torch.arange(6.0).view(2, 3).t() + 100 * rank
    if rank:
        tree["turned"] = tree["turned"].contiguous()
    found = [metric(state, tree)[1] for metric in (fsdp.psum, fsdp.pmean, fsdp.pmax)]
    found.append(dict(zip(tree, extend.all_reduce(state, [*tree.values()], "sum"), strict=True)))
    for name, own in tree.items():
        low = own - 100 * rank
        for got, want in zip(found, (2 * low + 100, low + 50, low + 100, 2 * low + 100), strict=True):
            assert torch.equal(got[name], want), name
    assert torch.equal(x, torch.arange(12.0).view(2, 6) + 100 * rank)  # beside the views nothing changes


@each_rank(4)
def test_metrics_along_an_axis() -> None:
    mesh, placement = mesh_and_placement("hsdp")
    state = fsdp.shard({"w": torch.ones(4)}, fsdp.Spec(mesh, placement))
    names, rank = [*state.spec.axes], dist.get_rank()
    means = {name: fsdp.pmean(state, rank, axis=name)[1].item() for name in names}
    assert means == {"replica": 1 + rank % 2, "shard": rank // 2 * 2 + 0.5}
    assert fsdp.psum(state, rank, axis=names)[1] == 6
    assert fsdp.psum(state, rank, ())[1] == rank
    assert "TreeError" in raised(lambda: fsdp.psum(state, rank, names[rank % 2]))
    refused((lambda: fsdp.psum(state, rank, [names[0], names[0]]), "axis=['replica', 'replica']"))


class Mixed(nn.Module):
    """Leaves of five dtypes in one unit, an integer table, a whole frozen unit."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.blocks = nn.ModuleList([first, second])
        first.bias = nn.Parameter(first.bias.detach().bfloat16())
        second.weight = nn.Parameter(second.weight.detach().double())
        first.table = nn.Parameter(torch.arange(5), requires_grad=False)
        first.mask = nn.Parameter(torch.tensor([True, False, True, True, False]), requires_grad=False)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks: Any = self.blocks
        first, second = blocks
        x = x @ first.weight.T + first.bias.float() + first.table * first.mask
        x = (x.double() @ second.weight.T).float() + second.bias
        y: torch.Tensor = self.frozen(x)
        return y.square().mean()


@pytest.mark.parametrize("preset", PRESETS)
@each_rank(4)
def test_mixed_dtypes_frozen_units_and_integer_leaves(preset: str) -> None:
    """One SGD step."""
    torch.manual_seed(1)
    plain = Mixed()
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(plain)
    state = fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.sgd(lr=0.5))
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    state, w = fsdp.unshard(state)
    dtypes = [t.dtype for t in w.values()]
    loss, pullback = fsdp.transforms.vjp(lambda w: fsdp.bind(model, w)(x), w)
    state = fsdp.step(fsdp.reduce(state, pullback(w, torch.ones_like(loss))[0]))
    for rank in range(dist.get_world_size()):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
        (plain(x) / dist.get_world_size()).backward()
    torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.5).step()
    weights, expected = fsdp.full_params(state), {k: p.detach() for k, p in plain.named_parameters()}
    assert dtypes == [t.dtype for t in expected.values()]
    assert weights["blocks.0.bias"].dtype is torch.float32  # main weights of a bfloat16 leaf
    for key, want in expected.items():
        # the bfloat16 leaf's update is rounded to bfloat16 by the plain module, its gradient travels in it here
        atol = 2e-2 if want.dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(weights[key].to(want.dtype), want, rtol=0, atol=atol)
    for key in ("frozen.weight", "blocks.0.table", "blocks.0.mask"):
        assert torch.equal(weights[key], expected[key])


F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("preset", "main", "compute", "grads"),
    product(["zero3", "zero2", "ddp", "hfsdp"], [F64, F32, BF16], [None, BF16], [None, F32, BF16]),
)
@each_rank(2)
def test_every_stage_has_the_dtype_that_was_asked_for(preset: str, main: Any, compute: Any, grads: Any) -> None:
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(Block(7))
    precision = fsdp.Precision(main=main, compute=compute, grads=grads)
    state = fsdp.shard(params, fsdp.Spec(mesh, placement, precision=precision), fsdp.adamw(lr=1e-2))
    state, w = fsdp.unshard(state)
    x = torch.randn(2, 7, generator=torch.Generator().manual_seed(1)).to(next(iter(w.values())).dtype)
    state = fsdp.reduce(state, torch.func.grad(lambda p: fsdp.bind(model, p)(x).float().square().mean())(w))
    found = {"main": state.main, "opt": state.opt, "grads": state.grads, "compute": w}
    leaves = torch.utils._pytree.tree_leaves
    seen = {kind: {t.dtype for t in leaves(tree) if t.is_floating_point()} for kind, tree in found.items()}
    assert seen == {"main": {main}, "opt": {main}, "grads": {grads or main}, "compute": {compute or main}}
    before, after = fsdp.full_params(state), fsdp.full_params(fsdp.step(state))
    assert not any(torch.equal(after[key], before[key]) for key in after)


def test_init_gives_the_same_bits_for_every_world_size_and_placement() -> None:
    expected = launch(initialised, ("ddp",), nprocs=1)[0]
    assert expected["blocks.0.up.weight"].std() > 0.1
    for preset in PRESETS:
        for ranks in (1, 2, 4) if FULL else (ranks_of(preset),):
            got = launch(initialised, (preset,), nprocs=ranks)[-1]
            assert all(torch.equal(got[key], expected[key]) for key in expected)


@each_rank(4)
def test_local_shards_are_zero_copy_and_tile_every_leaf() -> None:
    """Parts of every leaf, put together over ranks, are the leaf; and they are views of the state's own buffers."""
    mesh, placement = mesh_and_placement("zero3")
    params = dict(net().named_parameters())
    state = fsdp.shard(params, fsdp.Spec(mesh, placement))
    mine = fsdp.local_shards(state)
    parts: list[Any] = [None] * 4
    dist.all_gather_object(parts, mine)
    for key, p in params.items():
        assert torch.equal(torch.cat([part[key] for part in parts]), p.detach().reshape(-1))
    mine["blocks.1.up.weight"].fill_(7.0)
    buffer: FlatBuffer = state.main["blocks.1"]
    assert not mine["blocks.1.up.weight"].numel() or (buffer.local == 7.0).any()
