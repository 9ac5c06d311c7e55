"""The host's work for the schedule: how many calls the verbs make a unit and step, with a transport that does nothing;
and how many a driven forward and backward makes.

Times hang on the machine and on what else it does; calls do not. `python tests/ranks/test_host_overhead.py` prints the
time, too; with PYTHONPATH set to another checkout, that one's.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn as nn

import functional_fsdp as fsdp
import functional_fsdp.transforms as T
from functional_fsdp import launch
from functional_fsdp._runtime.runtime import Runtime

UNITS, LEAVES, STEPS = 40, 6, 100  # six leaves: a block of examples/benchmark.py
CALLS = 235
DRIVEN, FILES = 846, 20  # of five units: Python calls of the package, and in how many of its files


def host_work(counting: bool) -> float:
    """Of two unshards, two releases and a reduce: calls, or this thread's microseconds in the fastest step."""
    torch.set_num_threads(1)
    params = {f"blocks.{i:02}.p{k}": torch.randn(128) for i in range(UNITS) for k in range(LEAVES)}
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), units=["blocks.*"]), fsdp.sgd(lr=0.0))
    transport = Runtime.collective
    nothing: Any = lambda *_: iter(())  # noqa: E731
    gc.collect()
    gc.disable()  # as timeit does: what else lives in this process is not the schedule's account
    best, profile = float("inf"), cProfile.Profile()
    try:
        for step in range(6 if counting else STEPS):
            Runtime.collective = nothing  # type: ignore[method-assign]
            middle = state
            if counting and step == 5:  # everything is made by then
                profile.enable()
            begun = time.thread_time()
            for unit in state.units:
                middle, w = fsdp.unshard(middle, unit)
                middle = fsdp.release(middle, unit)
            for unit in reversed(state.units):
                middle, w = fsdp.unshard(middle, unit)
                middle = fsdp.reduce(middle, w, unit)
                middle = fsdp.release(middle, unit)
            best = min(best, time.thread_time() - begun)
            profile.disable()
            Runtime.collective = transport  # type: ignore[method-assign]
            state = fsdp.step(middle)  # its vote is real
    finally:
        gc.enable()
        Runtime.collective = transport  # type: ignore[method-assign]
    if counting:
        return float(pstats.Stats(profile).total_calls) / UNITS  # type: ignore[attr-defined]
    return best / UNITS * 1e6


def test_the_verbs_make_no_more_calls_than_they_need() -> None:
    calls = launch(host_work, (True,), nprocs=2)
    assert max(calls) <= CALLS, calls


def driven_calls() -> tuple[int, int]:
    """Of a driven forward and backward of five units in the sixth step: Python calls of the package; and its files."""
    params, model = fsdp.functionalize(nn.Sequential(*(nn.Linear(16, 16) for _ in range(5))))
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.adamw(lr=1e-3))
    driven = T.forward_backward(model, lambda model, x: model(x).square().mean())
    home = Path(fsdp.__file__).parent
    folders = tuple(f"{folder.resolve()}/" for folder in (home, home / "transforms"))
    calls: Counter[str] = Counter()

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_filename] += 1

    transport = Runtime.collective
    nothing: Any = lambda *_: iter(())  # noqa: E731
    for step in range(6):
        if step == 5:
            Runtime.collective = nothing  # type: ignore[method-assign]
            sys.setprofile(seen)
        try:
            state, _ = driven(state, torch.ones(8, 16))
        finally:
            sys.setprofile(None)
            Runtime.collective = transport  # type: ignore[method-assign]
        state = fsdp.step(state)
    ours = {file: n for file, n in calls.items() if str(Path(file).resolve()).startswith(folders)}
    return sum(ours.values()), len(ours)


def test_a_driven_forward_and_backward_make_no_more_calls_than_they_need() -> None:
    for calls, files in launch(driven_calls, nprocs=2):
        assert calls <= DRIVEN
        assert files <= FILES


if __name__ == "__main__":
    for _ in range(5):
        print(
            [round(calls) for calls in launch(host_work, (True,), nprocs=2)],
            [round(t, 1) for t in launch(host_work, (False,), nprocs=2)],
        )
