"""Staging: how gradients get into staging."""

from __future__ import annotations

import pytest
import torch

from functional_fsdp._engine import reductions as _stage
from functional_fsdp._engine.reductions import copy_large


def test_large_gradients_are_copied_apart_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stage, "LARGE", 64)
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)  # each number
    numbers = every[~every.isnan()]
    values = [numbers[:2048].view(64, 32).t(), torch.ones(4, dtype=torch.bfloat16), numbers, torch.ones(64)]
    leaves = [torch.full(value.shape, 7.0, dtype=torch.bfloat16) for value in values]
    left, given = copy_large(leaves, values)
    assert [a is b for a, b in zip(left, (leaves[1], leaves[3]), strict=True)] == [True, True]  # small; another dtype
    assert [a is b for a, b in zip(given, (values[1], values[3]), strict=True)] == [True, True]
    assert bool((leaves[1] == 7).all() & (leaves[3] == 7).all())
    for i in (0, 2):
        assert torch.equal(leaves[i].view(torch.int16), values[i].contiguous().view(torch.int16))
