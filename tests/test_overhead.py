"""Host time of the schedule, with a transport that does nothing: what the verbs cost a unit and step."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp._runtime import Runtime

UNITS, LEAVES, STEPS = 40, 6, 100  # six leaves: a block of examples/benchmark.py


def host_time() -> float:
    """Microseconds of this thread for two unshards, two releases and a reduce; of the fastest step."""
    torch.set_num_threads(1)
    params = {f"blocks.{i:02}.p{k}": torch.randn(128) for i in range(UNITS) for k in range(LEAVES)}
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), units=["blocks.*"]), fsdp.sgd(lr=0.0))
    transport = Runtime.collective
    nothing: Any = lambda *_: iter(())  # noqa: E731
    Runtime.collective = nothing  # type: ignore[method-assign]
    gc.collect()
    gc.disable()  # as timeit does: what else lives in this process is not the schedule's account
    try:
        best = float("inf")
        for _ in range(STEPS):
            middle = state
            begun = time.thread_time()
            for unit in state.units:
                middle, w = fsdp.unshard(middle, unit)
                middle = fsdp.release(middle, unit)
            for unit in reversed(state.units):
                middle, w = fsdp.unshard(middle, unit)
                middle = fsdp.reduce(middle, w, unit)
                middle = fsdp.release(middle, unit)
            best = min(best, time.thread_time() - begun)
            Runtime.collective = transport  # type: ignore[method-assign]
            state = fsdp.step(middle)  # its vote is real
            Runtime.collective = nothing  # type: ignore[method-assign]
    finally:
        gc.enable()
        Runtime.collective = transport  # type: ignore[method-assign]
    return best / UNITS * 1e6


def test_the_schedule_takes_less_than_60_microseconds_a_unit_and_step() -> None:
    found: list[float] = []
    for _ in range(8):  # the machine may do something else for a while
        found += launch(host_time, 2)
        if min(found) < 60:
            return
        time.sleep(2)
    raise AssertionError(f"{found} µs")
