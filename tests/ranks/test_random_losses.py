"""Random losses with derivatives inside, against the plain module in float64: gradients, jvp and pullback of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist
from ranks.test_derivatives import driven_apart
from ranks.test_weight_derivatives import apart
from support.derivatives import Random
from support.driven import start
from support.ranks import each_rank

import functional_fsdp as fsdp


def of_gradients(case: Random, preset: str, spec: Any) -> float:
    return driven_apart(case.module, case.loss, preset, case.microbatches, **spec)


def of_products(case: Random, preset: str, spec: Any) -> float:
    state, model = start(case.module(), preset, **spec)
    found = apart(state, model.train(), case.module(), case.loss, 10 * dist.get_rank())[1]
    return max(found.values())


KINDS = {"gradients": (of_gradients, 3), "products": (of_products, 2)}  # and how deep transforms are nested


WORLDS = [("zero3", 1), ("zero3", 2), ("zero3", 4), ("zero2", 2), ("ddp", 2), ("hsdp", 4)]
ROWS = [
    ("gradients", "zero3", 1, (0,)),
    ("gradients", "zero3", 2, (59, 79, 5)),
    pytest.param("gradients", "zero2", 2, (11,), marks=pytest.mark.large),
    ("gradients", "hsdp", 4, (14,)),
    ("products", "zero3", 1, range(2)),
    ("products", "zero3", 2, (3,)),
    ("products", "zero2", 2, (6,)),
    ("products", "hfsdp", 4, (8,)),
]
LARGE = [
    (kind, preset, n, range(1000 + 100 * i, 1050 + 100 * i)) for kind in KINDS for i, (preset, n) in enumerate(WORLDS)
]


@pytest.mark.parametrize(
    ("kind", "preset", "nprocs", "seeds"), [*ROWS, *(pytest.param(*row, marks=pytest.mark.large) for row in LARGE)]
)
@each_rank("nprocs")
def test_random_losses(kind: str, preset: str, nprocs: int, seeds: Sequence[int]) -> None:
    of, depth = KINDS[kind]
    for seed in seeds:
        case = Random(seed, depth)
        spec: dict[str, Any] = {"units": case.units} if case.units else {}
        spec["schedule"] = fsdp.Schedule(prefetch=case.prefetch, debug=seed % 2 == 0)
        assert of(case, preset, spec) < 1e-9, repr(case)
