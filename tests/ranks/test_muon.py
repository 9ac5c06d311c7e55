"""Muon, whose matrices travel to owners, beside the same rule on whole matrices. Skipped steps, leaves
without a gradient and checkpoints: `test_optimizers_together`."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.matrices import begun, differ, reference, trained
from support.presets import AXES, PRESETS, TWO_AXES, placement_of
from support.ranks import each_rank, launch
from support.tables import FULL, marked

import functional_fsdp as fsdp
from functional_fsdp import Spec, SpecError

STEPS = 20 if FULL else 5
WAYS = ("eager", "overlapped", "torch.compile", "T.compile", "aot_eager", "compiled")
ROWS = [
    (preset, way, ranks) for preset in PRESETS for way in WAYS for ranks in ((4,) if preset in TWO_AXES else (1, 2, 4))
]
QUICK = [("hfsdp", "eager", 4), ("zero2", "eager", 2)]  # `test_optimizers_together` compiles a step of it


@pytest.mark.parametrize(("preset", "way", "ranks"), marked(ROWS, QUICK))
def test_steps_are_those_on_whole_matrices(preset: str, way: str, ranks: int) -> None:
    compiled = way not in ("eager", "overlapped")
    for dtype, most in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        if dtype is torch.float32 and compiled:
            continue  # two compilations say no more
        expected = reference(ranks, STEPS, dtype)
        for found in launch(trained, (preset, way, dtype, STEPS), nprocs=ranks, processes=compiled):
            assert differ(found, expected) < most


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_in_bfloat16_it_is_as_near_to_torchs_as_another_order_of_sums(adjust: str | None) -> None:
    """Beside torch.optim.Muon, one step: our difference is within what permuted columns make of torch's own, which adds
    up the same products in another order."""
    torch.manual_seed(0)
    weight, grad = torch.randn(300, 700), torch.randn(300, 700)
    orders = (torch.arange(700), *(torch.randperm(700) for _ in range(8)))
    theirs = [after(weight, grad, order, adjust) for order in orders]
    spread = max(float((one - theirs[0]).abs().max()) for one in theirs[1:])
    state = fsdp.shard({"w": weight}, Spec(fsdp.local_mesh()), fsdp.muon(lr=0.1, adjust_lr_fn=adjust))
    state, _ = fsdp.unshard(state)
    state = fsdp.step(fsdp.reduce(state, {"w": grad}))
    ours = float((fsdp.full_params(state)["w"] - theirs[0]).abs().max())
    assert 0 < spread < 0.01
    assert ours <= spread


def after(weight: torch.Tensor, grad: torch.Tensor, order: torch.Tensor, adjust: str | None) -> torch.Tensor:
    p = nn.Parameter(weight[:, order].clone())
    p.grad = grad[:, order].clone()
    torch.optim.Muon([p], lr=0.1, adjust_lr_fn=adjust).step()
    return p.detach()[:, order.argsort()]


@pytest.mark.parametrize(("preset", "sizes"), [("zero3", (8,)), ("hfsdp", (2, 4)), ("hsdp", (2, 4)), ("ddp", (8,))])
def test_matrices_of_a_group_travel_by_two_exchanges_an_axis(preset: str, sizes: tuple[int, ...]) -> None:
    mesh = dict(zip(AXES[preset], sizes, strict=True))
    spec = Spec(mesh, placement_of(preset), units=["layers.*"])
    params = {f"layers.{i}.{k}": torch.empty(64, 64, device="meta") for i in range(4) for k in "ab"}
    state = fsdp.abstract_state(params, spec, fsdp.muon())

    def train_step(state: fsdp.State) -> fsdp.State:
        return fsdp.step(fsdp.reduce(state, {path: torch.ones(64, 64) for path in params}))

    issued = [one for one in fsdp.lower(train_step, state).collectives if one.kind == "all_to_all"]
    cut = {"zero3": 1, "hfsdp": 2, "hsdp": 1, "ddp": 0}[preset]
    assert len(issued) == 2 * cut
    assert {one.dtype for one in issued} <= {torch.bfloat16}
    assert all(one.numel == 8 * 64 * 64 // (8 if cut == 2 else dict(mesh)[issued[0].axis]) for one in issued)


@each_rank(2)
def test_a_leaf_that_is_no_matrix_is_refused_on_every_rank() -> None:
    said = r"the leaf 'b' has shape \[4\]; expected a matrix \[rows, columns\](.|\n)*fsdp\.partition"
    with pytest.raises(SpecError, match=said):
        fsdp.shard({"w": torch.ones(4, 4), "b": torch.ones(4)}, Spec(fsdp.local_mesh()), fsdp.muon())


def left_behind() -> tuple[str, float]:
    """One rank fails where the matrices are exchanged. What the other one says, and after how many seconds."""
    state, params = fsdp.unshard(begun("zero3", torch.float64)[0])
    state = fsdp.reduce(state, {path: torch.ones_like(p) for path, p in params.items()})
    run, begin = state._executor.run, time.monotonic()
    if dist.get_rank() == 0:

        def failing(*_: Any) -> None:
            raise MemoryError("no room for what this rank owns")

        run.__dict__["now"] = failing
    with pytest.raises((MemoryError, fsdp.CommError)) as error:
        fsdp.step(state)
    return f"{type(error.value).__name__}: {error.value}", time.monotonic() - begin


def test_an_owner_that_fails_is_an_error_on_every_rank() -> None:
    (mine, _), (theirs, seconds) = launch(left_behind, nprocs=2)
    assert mine == "MemoryError: no room for what this rank owns"
    assert theirs.startswith("CommError")
    assert "no room for what this rank owns" in theirs
    assert seconds < 30
