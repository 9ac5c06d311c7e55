"""Dtypes on NCCL: the law table, exact sums bit for bit, and the bytes that each placement keeps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.dtypes import PRODUCT, RANKS, exact, hold, pairwise
from support.presets import PRESETS
from support.traffic import counted

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp._engine.sum import ordered_sum

pytestmark = [pytest.mark.timeout(500), pytest.mark.usefixtures("fresh_workers")]


def test_the_table_of_laws() -> None:
    """Every fourth row of the product, and every pair."""
    for found in launch(hold, (list(dict.fromkeys([*pairwise(), *PRODUCT[::4]])),), nprocs=RANKS):
        assert not found, "\n".join(found[:20])


@pytest.mark.parametrize(
    ("preset", "axes"), [("zero3", 1), ("zero1", 1), ("ddp", 1), ("hsdp", 2), ("hfsdp", 2), ("zero2", 2)]
)
def test_an_exact_sum_has_the_bits_of_the_order_of_ranks(preset: str, axes: int) -> None:
    assert launch(exact, (preset, axes, 10), nprocs=RANKS) == [(True, True)] * RANKS


def sums() -> list[str]:
    """Where the one kernel differs from an addition for each rank."""
    wrong = []
    for ranks, n, dtype, mean in itertools.product(
        (2, 3, 4, 8), (1, 128, 100_001), (torch.bfloat16, torch.float32), (True, False)
    ):
        came = torch.randn(ranks * n, device="cuda").to(dtype)
        one, many = torch.empty(n, device="cuda"), torch.empty(n)
        ordered_sum(came, ranks, one, mean)
        ordered_sum(came.cpu(), ranks, many, mean)
        if not torch.equal(one.cpu(), many):
            wrong.append(f"{ranks} ranks, {n} elements of {dtype}, mean {mean}")
        for place in range(ranks):
            apart = came.clone()
            apart[place * n : (place + 1) * n] = float("nan")
            ordered_sum(apart, ranks, one, mean, (place, came[place * n : (place + 1) * n]))
            if not torch.equal(one.cpu(), many):
                wrong.append(f"{ranks} ranks, {n} elements of {dtype}, mean {mean}, that of {place} apart")
    return wrong


def test_the_kernel_adds_in_the_order_of_ranks() -> None:
    assert launch(sums, nprocs=RANKS) == [[]] * RANKS


@pytest.mark.parametrize("preset", PRESETS)
def test_memory_is_the_arithmetic(preset: str) -> None:
    precision = fsdp.Precision(compute=torch.bfloat16)
    for _, held, n in launch(counted, (preset, 1, precision), nprocs=RANKS):
        main, grads, weights = {"ddp": (1, 1, 1), "zero1": (4, 4, 1), "zero2": (4, 4, 1), "zero3": (4, 4, 0),
                                "hsdp": (2, 2, 0), "hfsdp": (4, 4, 2)}[preset]  # fmt: skip
        assert held["main"] == 4 * n // main
        assert held["opt"] == 8 * n // main
        assert held["grads"] == 4 * n // grads
        assert held["weights"] == (2 * n // weights if weights else 0)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: fsdp.adamw(lr=1e-2),
    "sgd": lambda: fsdp.sgd(lr=1e-2, momentum=0.9),
    "partition": lambda: fsdp.partition({"rows": fsdp.sgd(1e-2, 0.9), "default": fsdp.adamw(lr=1e-2)}),
    "muon": lambda: fsdp.partition({"rows": fsdp.muon(lr=1e-2), "default": fsdp.adamw(lr=1e-2)}),
}


def weights_after(optimizer: str, mains: dict[str, torch.dtype], skip: bool) -> dict[str, torch.Tensor]:
    """Whole weights after three steps on given gradients. Main weights have these dtypes, by pattern."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.rows": (64, 32), "a.bias": (33,), "b.rows": (32, 64), "b.bias": (7,)}
    trees = [{path: torch.randn(shape, generator=generator) for path, shape in shapes.items()} for _ in range(4)]
    precision = {path: fsdp.Precision(main=main) for path, main in mains.items()}
    spec = fsdp.Spec(fsdp.local_mesh(), units=["a", "b"], precision=precision, labels={"*.rows": "rows"})
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
    mixed = weights_after(optimizer, {"a.*": bf16, "*": fp32}, skip)
    alone = {dtype: weights_after(optimizer, {"*": dtype}, skip) for dtype in (bf16, fp32)}
    wanted = {path: alone[bf16 if path.startswith("a.") else fp32][path] for path in mixed}
    same = {path: torch.allclose(w, wanted[path], rtol=0.0, atol=near) for path, w in mixed.items()}
    return [path for path, w in mixed.items() if w.dtype is not wanted[path].dtype or not same[path]]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("skip", [False, True], ids=["", "skip"])
def test_several_dtypes_of_main_weights_in_one_step(optimizer: str, skip: bool) -> None:
    assert launch(differing, (optimizer, skip), nprocs=RANKS) == [[]] * RANKS
