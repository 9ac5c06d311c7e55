"""The law table of dtypes: placement × main × compute × grads × wire × sum × microbatches × mesh, on 4 ranks.

A gradient's life is followed stage by stage. Ranks exchange what autograd gave them, so the reference is one process
that casts where the library says it casts and adds up in float64. What may differ is rounding: of the sum, in the
wire's dtype or in float32, and of the accumulation, in the dtype of main gradients. The bound, for each element, is

    (ranks · eps(sum) + [cast again] · eps(wire) + (microbatches + 1) · eps(grads)) · Σ |summands| / divisor

where a placement that keeps whole sums between microbatches casts them to the wire again.

`make laws` runs the full product; by default every pair of values of two columns is in at least one row.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from support.dtypes import BF16, F32, PRODUCT, RANKS, exact, hold, pairs
from support.ranks import launch
from support.tables import FULL, covering

import functional_fsdp as fsdp


def test_the_table_of_laws() -> None:
    laws = PRODUCT if FULL else covering(PRODUCT)
    assert set().union(*map(pairs, laws)) == set().union(*map(pairs, PRODUCT))
    for found in launch(hold, (laws,), nprocs=RANKS):
        assert not found, "\n".join(found[:20])
    print(f"{len(laws)} of {len(PRODUCT)} rows hold")


# ---------------------------------------------------------------- exact sums


@pytest.mark.parametrize(
    ("preset", "axes"), [("zero3", 1), ("zero1", 1), ("ddp", 1), ("hsdp", 2), ("hfsdp", 2), ("zero2", 2)]
)
def test_an_exact_sum_has_the_bits_of_the_order_of_ranks(preset: str, axes: int) -> None:
    found = launch(exact, (preset, axes, 10 if FULL else 3), nprocs=RANKS, processes=preset == "zero1")
    assert found == [(True, True)] * RANKS


def by_pattern() -> dict[str, tuple[Any, ...]]:
    params, _ = fsdp.functionalize(nn.ModuleDict({"norm": nn.LayerNorm(8), "up": nn.Linear(8, 8)}))
    rules = {"norm": fsdp.Precision(), "*": fsdp.Precision(compute=BF16, grads=BF16)}
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), precision=rules), fsdp.adamw())
    state, weights = fsdp.unshard(state)
    state = fsdp.finish_reductions(fsdp.reduce(state, {key: torch.ones_like(w) for key, w in weights.items()}))
    kinds = {key: (w.dtype, state.grads[key.split(".")[0]].local.dtype) for key, w in weights.items()}
    fsdp.step(state)
    return kinds


def test_precision_by_pattern() -> None:
    for kinds in launch(by_pattern, nprocs=2):
        assert kinds["norm.weight"] == kinds["norm.bias"] == (F32, F32)
        assert kinds["up.weight"] == kinds["up.bias"] == (BF16, BF16)
