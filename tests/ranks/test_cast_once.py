"""Shards that are kept in the dtype of compute, too: gathers cast nothing, and not a bit is other than with casts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from support.presets import AXES, PRESETS, ranks_of
from support.problems import DEPTH, batch, loss_fn, mesh_and_placement, net
from support.ranks import each_rank, launch
from support.strays import strays
from support.streams import ordered
from support.tables import FULL, marked

import functional_fsdp as fsdp
from functional_fsdp import SpecError
from functional_fsdp import transforms as T

BF16, STEPS = torch.bfloat16, 3 if FULL else 2
CASTS, ONCE = fsdp.Precision(compute=BF16), fsdp.Precision(compute=BF16, gather=BF16)
WAYS = ("driven", "compiled units", "whole step", "whole tree", "poisoned", "copies", "in the host's memory")


def start(preset: str, once: bool, way: str = "") -> tuple[fsdp.State, Any]:
    params, model = fsdp.functionalize(net(torch.float32, 1 if way == "whole step" else DEPTH))  # tracing takes time
    mesh, _ = mesh_and_placement(preset)
    kind = "pinned_host" if way == "in the host's memory" else "device"
    spec = fsdp.Spec(
        mesh,
        getattr(fsdp, preset)(*AXES[preset], memory_kind=kind),
        precision=ONCE if once else CASTS,
        schedule=fsdp.Schedule(debug=way == "poisoned"),
        transport="copy_engine" if way == "copies" else "collective",
    )
    return fsdp.shard(params, spec, fsdp.adamw(lr=1e-2)), model


def whole(state: fsdp.State, model: Any, data: Any) -> tuple[fsdp.State, torch.Tensor]:
    state, params = fsdp.unshard(state)
    leaves = {path: w.detach().requires_grad_(w.is_floating_point()) for path, w in params.items()}
    loss = loss_fn(fsdp.bind(model, leaves), data)
    grads = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
    return fsdp.reduce(state, dict(zip(leaves, grads, strict=True))), loss.detach()


def up_to_date(state: fsdp.State) -> bool:
    """Whether each copy is what main weights are, cast: of what this rank has of both."""
    for name, copy in state.weights.items():
        main = state.main[name]
        start = main.span()[0] - copy.span()[0]
        part = copy.local[start : start + main.local.numel()]
        if not torch.equal(part, main.local.to(part.dtype)):
            return False
    return True


def trained(preset: str, way: str, once: bool) -> tuple[list[float], list[torch.Tensor], bool]:
    """Losses, weights, and whether copies are right after every step."""
    state, model = start(preset, once, way)
    assert not once or {*state.weights} == {name for name, b in state.layout.buckets.items() if b.main is not b.gather}
    forward_backward = T.forward_backward(
        model, loss_fn, compile={"backend": "aot_eager"} if way == "compiled units" else False
    )

    def train_step(state: fsdp.State, data: Any) -> tuple[fsdp.State, torch.Tensor]:
        call = (lambda s, d: whole(s, model, d)) if way == "whole tree" else forward_backward
        state, loss = call(state, data)
        return fsdp.step(state), loss

    step = T.compile(train_step, backend="aot_eager") if way == "whole step" else train_step
    losses, right = [], up_to_date(state)
    for i in range(STEPS):
        state, loss = step(state, batch(i, dist.get_rank(), 0))
        losses.append(loss.item())
        right = right and up_to_date(state)
    return losses, [*fsdp.full_params(state).values()], right


ROWS = [*itertools.product(PRESETS, WAYS)]
QUICK = [
    ("zero3", "driven"), ("zero3", "whole step"), ("zero3", "poisoned"),
    ("zero3", "copies"), ("zero3", "in the host's memory"), ("hfsdp", "copies"),
    ("zero2", "whole tree"), ("ddp", "driven"),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "way"), marked(ROWS, QUICK))
def test_bits_are_those_of_gathers_that_cast(preset: str, way: str) -> None:
    whole = way == "whole step"
    ranks = ranks_of(preset) if FULL or not whole else 1  # each traces the same
    both = [launch(trained, (preset, way, once), nprocs=ranks, processes=whole) for once in (True, False)]
    for (losses, weights, right), (wanted, others, _) in zip(*both, strict=True):
        assert losses == wanted
        assert all(map(torch.equal, weights, others))
        assert right


@pytest.mark.parametrize(
    ("preset", "ranks"), marked([("zero3", 2), ("hfsdp", 4), ("zero2", 2)], [("zero3", 2), ("zero2", 2)])
)
@each_rank("ranks", processes=True)
def test_copies_are_renewed_where_updates_run(preset: str, ranks: int) -> None:
    """In steps that update beside the backward."""
    with ordered() as order:
        params, model = fsdp.functionalize(net(torch.float32))
        mesh, _ = mesh_and_placement(preset)
        placement, schedule = getattr(fsdp, preset)(*AXES[preset]), fsdp.Schedule(overlap_update=True)
        state = fsdp.shard(params, fsdp.Spec(mesh, placement, precision=ONCE, schedule=schedule), fsdp.adamw(lr=1e-2))
        call, renewed = T.forward_backward(model, loss_fn), 0
        for i in range(STEPS):
            state, _ = call(state, batch(i, dist.get_rank(), 0))
            state = fsdp.step(state)
            assert up_to_date(state)
            renewed += len(state._executor.sink.renewed)
        assert bool(renewed) == (preset == "zero3")  # else copies are gathered, too
        assert not order.races


@each_rank(2)
def test_copies_follow_whatever_changes_main_weights(tmp_path: Path) -> None:
    state, model = start("zero3", True)
    call, mesh = T.forward_backward(model, loss_fn), fsdp.local_mesh()

    def stepped(state: fsdp.State, i: int, **more: Any) -> fsdp.State:
        return fsdp.step(call(state, batch(i, dist.get_rank(), 0))[0], **more)

    specs = [fsdp.Spec(mesh, fsdp.zero2("data"), precision=ONCE), fsdp.Spec(mesh, precision=ONCE)]
    assert strays(state, stepped, up_to_date, tmp_path, [*specs, fsdp.Spec(mesh, precision=CASTS)])[0] == []


class Copies(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts copies from one dtype to another."""

    casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].dtype is not args[1].dtype:
            self.casts += 1
        return func(*args, **(kwargs or {}))


@each_rank(2, processes=True)
def test_gathers_cast_nothing() -> None:
    for once in (True, False):
        state, model = start("zero3", once, "copies")
        call = T.forward_backward(model, loss_fn)
        for i in range(2):
            state = fsdp.step(call(state, batch(i, dist.get_rank(), 0))[0])
        with Copies() as seen:
            for unit in state.units:
                state = fsdp.release(fsdp.unshard(state, unit)[0], unit)
        assert (seen.casts == 0) is once


def test_it_is_said_what_it_takes() -> None:
    shapes = {"w": torch.empty(1000, 64, device="meta")}
    states = [
        fsdp.abstract_state(shapes, fsdp.Spec({"data": 8}, precision=precision), fsdp.sgd(0.1))
        for precision in (CASTS, ONCE)
    ]
    plain, kept = (sum(tensor.nbytes for tensor in _tensors(state)) for state in states)
    assert kept - plain == states[1].layout.nbytes("weights") > 64_000 * 2 // 8
    with pytest.raises(SpecError, match="or the dtype of compute"):
        fsdp.Precision(compute=torch.float32, gather=BF16)


def _tensors(state: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((state.main, state.weights, state.opt))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
