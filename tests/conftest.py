"""What all tests share: how processes share them, and workers of `launch` that are each file's own."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import pytest

# Files that take longest come first, and processes share each of them a function at a time, all others a file at a
# time: so processes are done at about the same time.
LONG = (
    "test_traced", "test_traced_graph", "test_ways_in_turn", "test_ways", "test_extend",
    "test_attack", "test_whole_step", "test_compile_units", "test_traced_errors", "test_arrivals", "test_from_torch",
    "test_workers", "test_schedule", "test_benchmark", "test_launch", "test_remat", "test_models", "test_dtensors",
    "test_simulated", "test_cuda_graph", "test_cursor", "test_parity", "test_interrupts", "test_startup",
)  # fmt: skip
WHOLE = ("test_examples",)  # long, but tests share what a test before them has made


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # what is imported now stays for good: looking for garbage in it would take a third of the time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start what runs in the background without it
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        return  # all others wait until this process, which only shares the tests out, has begun
    import hypothesis
    import torch
    from support.tables import FULL

    from functional_fsdp._launch import pool
    from functional_fsdp._shared.device import forks_after_inductor

    hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one may take a second for anything
    hypothesis.settings.load_profile("any machine")
    if os.environ.setdefault("OMP_NUM_THREADS", "1") == "1":  # torch's sums go by threads, and processes share them
        torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # more are processes, each of which imports torch
    pool.PRELOAD[:] = ["pytest", "hypothesis", "support.problems"]
    # where there are GPUs, whatever may ask about them is each rank's own to import; `make test` has it on no ranks
    if FULL and forks_after_inductor():
        pool.PRELOAD.append("transformers.models.llama.modeling_llama")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {name: place for place, name in enumerate((*WHOLE, *LONG))}
        items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    if "torch._dynamo" in sys.modules:
        importlib.import_module("support.guards")
        sys.modules["functional_fsdp._launch.pool"].PRELOAD.append("support.guards")
    gc.freeze()  # nor is it looked at again by each full collection
    gc.enable()
    gc.set_threshold(20_000, 20, 20)  # full ones are rare: a test that needs one asks for it


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`: what a process is given at a time."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class LongFilesInParts(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file, _, name = nodeid.partition("::")
            return f"{file}::{name.partition('[')[0]}" if PurePath(file).stem in LONG else file

    return LongFilesInParts(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="module", autouse=True)
def own_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a file leaves in its workers does not depend on the files that came before; and the threads of process
    groups that nobody uses any more take their share of the cores. (On GPUs workers begin slowly.)"""
    from functional_fsdp._launch.launch import stop_workers

    yield
    if request.path.parent.name != "gpu":
        stop_workers()


@pytest.fixture(autouse=True)
def same_dispatcher() -> Iterator[None]:
    """A trace that fails may leave the thread's dispatcher changed: all that is compiled after it would be made anew in
    each call."""
    before = dispatcher()
    yield
    assert dispatcher() == before


def dispatcher() -> tuple[str, str, int]:
    import torch

    sets = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return str(sets[0]), str(sets[1]), torch._C._len_torch_function_stack()


FEW = 8  # tests: after forty, threads of groups take most of the time
_GROUPED = pytest.StashKey[dict[Any, int]]()  # how many tests of each file have made groups


@pytest.fixture
def few_groups(request: pytest.FixtureRequest) -> None:
    """New workers now and then, for tests each of which makes groups of its own: their threads stay with a process."""
    counts = request.session.stash.setdefault(_GROUPED, {})
    counts[request.path] = counts.get(request.path, 0) + 1
    if counts[request.path] % FEW == 0:
        from functional_fsdp._launch.launch import stop_workers

        stop_workers()
