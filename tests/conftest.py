"""What all tests share: which files come first, and workers of `launch` that are each file's own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from functional_fsdp._launch import stop_workers

# Files that take longest, so that processes that share the tests, a file at a time, are done at about the same time.
LONG = (
    "test_traced", "test_traced_graph", "test_traced_errors", "test_benchmark", "test_compile_units", "test_schedule",
    "test_examples", "test_models", "test_launch", "test_cuda_graph", "test_copy_engine", "test_attack", "test_given",
    "test_notebooks", "test_transactions", "test_parity", "test_interrupts", "test_per_sample", "test_deaths",
    "test_forward_backward", "test_checkpoint",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {name: place for place, name in enumerate(LONG)}
        items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))


@pytest.fixture(scope="module", autouse=True)
def own_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a file leaves in its workers does not depend on the files that came before. (On GPUs they begin slowly.)"""
    yield
    if request.path.parent.name != "gpu":
        stop_workers()
