"""GPU tests, run by hand where there are two GPUs or more: `pytest tests/gpu/test_nccl.py`, each
file in a process of its own, since workers are forked and CUDA must not have been touched before. Elsewhere they fail;
only what needs four GPUs skips where there are two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from functional_fsdp._launch.launch import stop_workers


@pytest.fixture(scope="module")
def fresh_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers of this file's own, one on each of its `RANKS` GPUs at least."""
    ranks = request.module.RANKS
    assert torch.cuda.device_count() >= ranks, f"these tests need {ranks} GPUs"
    stop_workers()
    yield
    stop_workers()
