"""Main weights of several dtypes in one step: each is as among those of its own. Fused kernels take one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu.machine import RANKS

import functional_fsdp as fsdp
from functional_fsdp import launch

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("fresh_workers")]

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: fsdp.adamw(lr=1e-2),
    "sgd": lambda: fsdp.sgd(lr=1e-2, momentum=0.9),
    "partition": lambda: fsdp.partition({"rows": fsdp.sgd(1e-2, 0.9), "default": fsdp.adamw(lr=1e-2)}),
    "muon": lambda: fsdp.partition({"rows": fsdp.muon(lr=1e-2), "default": fsdp.adamw(lr=1e-2)}),
}


def weights_after(optimizer: str, mains: dict[str, torch.dtype], skip: bool) -> dict[str, torch.Tensor]:
    """Whole weights after three steps on given gradients. Main weights have these dtypes, by pattern."""
    generator = torch.Generator().manual_seed(0)
    shapes = {f"{unit}.{path}": shape for unit in "abcd" for path, shape in (("rows", (64, 32)), ("bias", (33,)))}
    trees = [{path: torch.randn(shape, generator=generator) for path, shape in shapes.items()} for _ in range(4)]
    precision = {path: fsdp.Precision(main=main) for path, main in mains.items()}
    spec = fsdp.Spec(fsdp.local_mesh(), units=[*"abcd"], precision=precision, labels={"*.rows": "rows"})
    state = fsdp.shard({path: w.cuda() for path, w in trees[0].items()}, spec, OPTIMIZERS[optimizer]())
    for tree in trees[1:]:
        state = fsdp.reduce(state, {path: grad.cuda().to(state_dtype(state, path)) for path, grad in tree.items()})
        state = fsdp.step(state, skip=torch.zeros((), dtype=torch.bool, device="cuda") if skip else None)
    return {path: w.cpu() for path, w in fsdp.full_params(state).items()}


def state_dtype(state: fsdp.State, path: str) -> torch.dtype:
    return fsdp.local_shards(state)[path].dtype


def differing(optimizer: str, skip: bool) -> list[str]:
    """Leaves that are other beside main weights of another dtype than among those of their own. Muon multiplies other
    matrices together then: its are close."""
    near = 1e-3 if optimizer == "muon" else 0.0
    bf16, fp32 = torch.bfloat16, torch.float32
    mixed = weights_after(optimizer, {"[ac].*": bf16, "*": fp32}, skip)
    alone = {dtype: weights_after(optimizer, {"*": dtype}, skip) for dtype in (bf16, fp32)}
    wanted = {path: alone[bf16 if path[0] in "ac" else fp32][path] for path in mixed}
    same = {path: torch.allclose(w, wanted[path], rtol=0.0, atol=near) for path, w in mixed.items()}
    return [path for path, w in mixed.items() if w.dtype is not wanted[path].dtype or not same[path]]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("skip", [False, True], ids=["", "skip"])
def test_several_dtypes_of_main_weights_in_one_step(optimizer: str, skip: bool) -> None:
    assert launch(differing, (optimizer, skip), nprocs=RANKS) == [[]] * RANKS
