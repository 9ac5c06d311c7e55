"""Muon on GPUs: beside the same rule on whole matrices, whichever way the step runs."""

from __future__ import annotations

import pytest
import torch
from support.matrices import differ, reference, trained

from functional_fsdp import launch

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("fresh_workers")]
RANKS = 2


@pytest.mark.parametrize("way", ["eager", "overlapped", "graph", "T.compile"])
@pytest.mark.parametrize("preset", ["zero3", "zero2", "ddp"])
def test_eight_steps_are_those_on_whole_matrices(preset: str, way: str) -> None:
    expected = reference(RANKS, 8, torch.float64)
    for found in launch(trained, (preset, way, torch.float64, 8), nprocs=RANKS):
        assert differ(found, expected) < 1e-9


@pytest.mark.parametrize("way", ["eager", "overlapped"])
def test_a_skipped_step_changes_nothing(way: str) -> None:
    expected = reference(RANKS, 5, torch.float64, skipped=2)
    for found in launch(trained, ("zero3", way, torch.float64, 5, 2), nprocs=RANKS):
        assert differ(found, expected) < 1e-9
