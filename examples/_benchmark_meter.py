"""Clock and memory of one rank's device, for benchmark.py: seconds by `Meter.time`, bytes by `Meter.memory`."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

BETWEEN = re.compile(r"nccl|barrier|memcpy PtoP", re.IGNORECASE)  # what moves data between GPUs, or waits for them


@contextmanager
def hushed() -> Iterator[None]:
    """Nothing on stderr: the profiler's C++ side announces itself there, and complains in forked processes."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


class Memory(NamedTuple):
    """Bytes: of tensors, of the caching allocator's blocks, and of what the driver gave to everyone on the device."""

    tensors: int
    reserved: int = 0
    device: int = 0

    def beyond(self, before: Memory) -> Memory:
        return Memory(*(now - then for now, then in zip(self, before, strict=True)))


class Meter:
    """Clock and memory of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        if self.cuda:  # a library's workspace is allocated on first use: not on the first contestant's account
            x = torch.ones(64, 64, device=device)
            F.linear(x, x, x[0])
        self.meet()  # and the communicator of all ranks

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def meet(self) -> None:
        """All ranks are here, and nothing is left to do."""
        gc.collect()
        dist.all_reduce(torch.zeros((), device=self.device))
        self.synchronize()

    def time(self, run: Callable[[], Any]) -> tuple[float, float]:
        """Seconds until the device was done with `run()`, and until the host was."""
        self.meet()
        start = time.perf_counter()
        run()
        returned = time.perf_counter()
        self.synchronize()
        return time.perf_counter() - start, returned - start

    def memory(self, run: Callable[[], None], lead_in: Callable[[], None] = lambda: None) -> tuple[Memory, Memory]:
        """What `run()` leaves behind, and the most that it held meanwhile, both beyond what there was before.

        On the CPU a block that is freed counts only if its allocation was seen: that is what `lead_in` is for.
        """
        self.meet()
        if self.cuda:
            lead_in()
            before = self._now()
            torch.cuda.reset_peak_memory_stats()
            run()
            gc.collect()
            self.synchronize()
            free, total = torch.cuda.mem_get_info()  # caches still full: what the step took is not given back
            most = Memory(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), total - free)
            return self._now().beyond(before), most.beyond(before)
        cpu = torch.profiler.ProfilerActivity.CPU
        with hushed(), torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
            lead_in()
            with torch.profiler.record_function("run"):
                run()
                gc.collect()
        profiler: Any = profile.profiler
        events = sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns())
        start = next(event.start_ns() for event in events if event.name() == "run")
        sizes = [event.nbytes() for event in events if event.name() == "[memory]" and event.start_ns() >= start]
        alive = list(accumulate(sizes, initial=0))
        return Memory(alive[-1]), Memory(max(alive))

    def kernels(self, run: Callable[[], None]) -> dict[str, tuple[int, float]]:
        """What moves data between GPUs in `run()`, by a profile of this GPU: how many of each, their ms in all."""
        self.meet()
        with hushed(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            self.synchronize()
        profiler: Any = profile.profiler
        found: dict[str, list[float]] = {}
        for event in profiler.kineto_results.events():
            if "CUDA" in str(event.device_type()) and BETWEEN.search(event.name()):
                found.setdefault(event.name().split("(")[0].strip(), []).append(event.duration_ns() / 1e6)
        return {name: (len(ms), sum(ms)) for name, ms in sorted(found.items())}

    def _now(self) -> Memory:
        """What is held on the GPU with empty caches."""
        gc.collect()
        self.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return Memory(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free)

    def joules(self) -> float | None:
        """What this GPU has used since its driver was loaded, by NVML; None where that is not there."""
        if not self.cuda:
            return None
        try:
            import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(self.device).uuid}")
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
        except Exception:  # no such package, a driver that does not say it
            return None

    def slowest(self, values: list[float]) -> list[float]:
        """The largest of each value over the ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return list(tensor.tolist())
