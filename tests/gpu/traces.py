"""Chrome traces of torch.profiler, as far as the tests here read them: kernels, calls of the CUDA runtime, marks.

Times are microseconds on the trace's clock, which host and device share.
Needs no GPU: tests/unit/test_gpu_trace_arithmetic.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

Interval = tuple[float, float]  # from, to

RUNTIME_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
WAITS = (*RUNTIME_WAITS, "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize")
GEMM = re.compile(r"gemm|cutlass|nvjet|sm90|xmma", re.IGNORECASE)
COLLECTIVE = re.compile(r"nccl", re.IGNORECASE)


class Kernel(NamedTuple):
    """One kernel on the device."""

    name: str
    stream: int
    start: float
    duration: float

    @property
    def interval(self) -> Interval:
        return self.start, self.start + self.duration


class Call(NamedTuple):
    """One call of the CUDA runtime or driver on the host."""

    name: str
    thread: str
    start: float
    duration: float


class Trace(NamedTuple):
    """What was read, each in order of its start. `marks`: what `record_function` marked on the host, by name."""

    kernels: list[Kernel]
    calls: list[Call]
    marks: dict[str, list[Interval]]

    def collectives(self, what: str) -> list[Kernel]:
        """NCCL's kernels of one kind: "AllGather", "ReduceScatter", "AllReduce"."""
        return [k for k in self.kernels if COLLECTIVE.search(k.name) and what.lower() in k.name.lower()]

    def gemms(self) -> list[Kernel]:
        """Matrix products."""
        return [k for k in self.kernels if GEMM.search(k.name) and not COLLECTIVE.search(k.name)]


def read(path: str | Path) -> Trace:
    """Read a trace that `profile.export_chrome_trace` wrote."""
    kernels: list[Kernel] = []
    calls: list[Call] = []
    marks: dict[str, list[Interval]] = {}
    events = [event for event in json.loads(Path(path).read_text())["traceEvents"] if event.get("ph") == "X"]
    for event in sorted(events, key=lambda event: float(event["ts"])):
        name, start, duration = str(event["name"]), float(event["ts"]), float(event.get("dur", 0))
        category = str(event.get("cat", "")).lower()
        if category == "kernel":
            kernels.append(Kernel(name, int(event.get("args", {}).get("stream", event.get("tid"))), start, duration))
        elif category in ("cuda_runtime", "cuda_driver"):
            calls.append(Call(name, str(event.get("tid")), start, duration))
        elif category == "user_annotation":
            marks.setdefault(name, []).append((start, start + duration))
    return Trace(kernels, calls, marks)


@contextmanager
def recorded() -> Iterator[list[Trace]]:
    """Profile host and device in the block; afterwards the list has the trace. The block waits for the device."""
    found: list[Trace] = []
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        yield found
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        found.append(read(path))


# ---------------------------------------------------------------- intervals


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals, in order; what touches is one."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        elif start < stop:
            found.append((start, stop))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Time that the intervals cover; where several do, once."""
    return sum(stop - start for start, stop in union(intervals))


def overlap(a: Iterable[Interval], b: Iterable[Interval]) -> float:
    """Time that is covered by `a` and by `b`."""
    ours, theirs = union(a), union(b)
    total, i, j = 0.0, 0, 0
    while i < len(ours) and j < len(theirs):
        total += max(0.0, min(ours[i][1], theirs[j][1]) - max(ours[i][0], theirs[j][0]))
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return total


def hidden(kernels: Iterable[Kernel], under: Iterable[Kernel]) -> float:
    """The share of the first kernels' time that lies under the others; 0 where there are none."""
    mine = [kernel.interval for kernel in kernels]
    total = length(mine)
    return overlap(mine, [kernel.interval for kernel in under]) / total if total else 0.0


# ---------------------------------------------------------------- the host


def waits(trace: Trace, mark: str) -> list[str]:
    """Calls inside the mark with which a thread that launches kernels there waits for the device: name and time.

    Other threads (NCCL's watchdog) may do as they like.
    """
    spans = trace.marks.get(mark, [])
    inside = [call for call in trace.calls if any(start <= call.start < stop for start, stop in spans)]
    launching = {call.thread for call in inside if "Launch" in call.name}
    found = [call for call in inside if call.thread in launching and call.name.startswith(WAITS)]
    return [f"{call.name} on thread {call.thread} for {call.duration:.0f} us" for call in found]
