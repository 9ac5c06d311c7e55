"""The arithmetic of tests/gpu/traces.py, on a trace made by hand: what the GPU tests conclude rests on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu.traces import hidden, length, overlap, read, union, waits


def event(category: str, name: str, start: float, duration: float, tid: Any = 7, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "pid": 0, "tid": tid, "args": args}


EVENTS: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "ts": 0, "pid": 0, "args": {"name": "python"}},
    event("kernel", "nvjet_tst_192x192_64x4_1x2_h_bz_coopB_NNT", 100, 50, stream=7, correlation=1),
    event("kernel", "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", 160, 40, stream=7),
    event("kernel", "void at::native::elementwise_kernel", 150, 10, stream=7),
    event("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 140, 20, stream=20),
    event("kernel", "ncclDevKernel_ReduceScatter_SumPostDiv_bf16_RING_SIMPLE", 190, 20, stream=24),
    event("gpu_user_annotation", "step", 100, 110, stream=7),
    event("user_annotation", "step", 10, 90, tid=1),
    event("cpu_op", "aten::mm", 12, 5, tid=1),
    event("cuda_runtime", "cudaLaunchKernel", 13, 2, tid=1),
    event("cuda_runtime", "cudaEventRecord", 20, 2, tid=1),
    event("cuda_driver", "cuLaunchKernelEx", 30, 2, tid=2),
    event("cuda_runtime", "cudaStreamSynchronize", 40, 25, tid=2),
    event("cuda_runtime", "cudaEventSynchronize", 50, 2, tid=3),
    event("cuda_runtime", "cudaDeviceSynchronize", 101, 120, tid=1),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": EVENTS[::-1]}))
    return file


def test_kernels_calls_and_marks(path: Path) -> None:
    trace = read(path)
    assert [kernel.start for kernel in trace.kernels] == [100, 140, 150, 160, 190]
    assert [kernel.name[:6] for kernel in trace.gemms()] == ["nvjet_", "void c"]
    assert [kernel.interval for kernel in trace.collectives("AllGather")] == [(140, 160)]
    assert [kernel.stream for kernel in trace.collectives("reducescatter")] == [24]
    assert trace.collectives("AllReduce") == []
    assert trace.marks == {"step": [(10, 100)]}
    assert len(trace.calls) == 6


def test_what_lies_under_matrix_products(path: Path) -> None:
    trace = read(path)
    assert hidden(trace.collectives("AllGather"), trace.gemms()) == pytest.approx(0.5)
    assert hidden(trace.collectives("ReduceScatter"), trace.gemms()) == pytest.approx(0.5)
    assert hidden([], trace.gemms()) == 0


def test_waits_are_those_of_threads_that_launch_inside_the_mark(path: Path) -> None:
    assert waits(read(path), "step") == ["cudaStreamSynchronize on thread 2 for 25 us"]
    assert waits(read(path), "elsewhere") == []


def test_intervals() -> None:
    assert union([(3, 5), (1, 2), (4, 7), (7, 8), (9, 9)]) == [(1, 2), (3, 8)]
    assert length([(0, 2), (1, 3), (5, 6)]) == 4
    assert overlap([(0, 10), (20, 30)], [(5, 25), (26, 27), (40, 50)]) == 11
    assert overlap([(0, 1)], [(1, 2)]) == 0
    assert overlap([], [(1, 2)]) == 0
