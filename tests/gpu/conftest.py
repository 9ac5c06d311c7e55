"""GPU tests, run by hand where there is a GPU: `pytest tests/gpu/test_nccl.py`, each file in a process of its own,
since workers are forked and CUDA must not have been touched before. Without a GPU they fail. On one, ranks share it
(see `machine.py`), and what needs a GPU for each rank skips; so does what needs four where there are two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpu.machine import CUBLAS, check_gpus

from functional_fsdp._launch.launch import stop_workers


@pytest.fixture(scope="module")
def fresh_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers of this file's own."""
    ranks = request.module.RANKS
    check_gpus(ranks)
    stop_workers()
    yield
    stop_workers()


@pytest.fixture(scope="module")
def exact_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers of this file's own, whose cuBLAS repeats its bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CUBLAS, ":4096:8")
        request.getfixturevalue("fresh_workers")
        yield
