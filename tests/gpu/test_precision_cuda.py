"""LeafPrecision on NCCL: the law table, exact sums bit for bit, and the bytes that each placement keeps."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.dtypes import PRODUCT, RANKS, exact, hold
from support.presets import PRESETS
from support.tables import covering
from support.traffic import counted

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp._exact_sums import ordered_sum

pytestmark = [pytest.mark.timeout(500), pytest.mark.usefixtures("fresh_workers")]


def test_the_table_of_laws() -> None:
    """Every fourth row of the product, and every pair."""
    for found in launch(hold, (list(dict.fromkeys([*covering(PRODUCT), *PRODUCT[::4]])),), nprocs=RANKS):
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
