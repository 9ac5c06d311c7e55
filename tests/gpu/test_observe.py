"""Steps that are observed on GPUs: exposed communication is what kernels say, and a slow rank is named.

`pytest tests/gpu/test_observe.py -s` prints the tables.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from gpu.machine import RANKS, own_gpus
from gpu.traces import length, overlap, read, recorded
from support.problems import mesh_and_placement

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T
from functional_fsdp._runtime.runtime import runtime_of

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("fresh_workers")]

SLOW = 0.02  # seconds
STEPS = 5


class Slow(nn.Module):
    """A layer in which rank 1's host sleeps, having waited for its device: so the device is late, too."""

    def __init__(self, width: int, slow: bool) -> None:
        super().__init__()
        self.linear, self.slow = nn.Linear(width, width, bias=False), slow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.slow and dist.get_rank() == 1:
            torch.cuda.synchronize()
            time.sleep(SLOW)
        return self.linear(x)


def made(width: int, slow: bool = False) -> tuple[fsdp.State, Any]:
    mesh, placement = mesh_and_placement("zero3")
    spec = fsdp.Spec(mesh, placement, precision=fsdp.Precision(compute=torch.bfloat16))
    return fsdp.init(
        lambda: nn.Sequential(*(Slow(width, slow and i == 3) for i in range(8))), spec, fsdp.adamw(lr=1e-4)
    )


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def observed(slow: bool, folder: str, graphed: bool = False) -> dict[str, Any]:
    """What `observe` says, and what the trace that it has read says by other arithmetic."""
    width, tokens = 4096, 512  # few rows: communication is not hidden
    state, model = made(width, slow)
    forward_backward = T.forward_backward(model, loss_of)

    def train_step(state: fsdp.State, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, x)
        return fsdp.step(state), loss

    step = fsdp.observe(T.cuda_graph(train_step) if graphed else train_step, steps=STEPS, skip=6)
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    path = Path(folder) / f"{dist.get_rank()}.json"
    export = torch.profiler.profile.export_chrome_trace

    def kept(self: Any, to: str) -> Any:
        out = export(self, to)
        path.write_text(Path(to).read_text())
        return out

    with mock.patch.object(torch.profiler.profile, "export_chrome_trace", kept):
        for _ in range(6 + STEPS + 1):
            state, _ = step(state, x)
    report = step.report
    assert report is not None
    print(report)
    report.draw(path.with_suffix(".svg"))
    return {
        "exposed": report.ranks[report.rank].waited, "kernels": from_kernels(path), "late": report.late,
        "rows": report.rows, "peaks": report.peaks,
        "counts": Counter(s.lane for one in report.steps for s in one.spans),
        "planned": (len(report.plan.gathers), len(report.plan.reductions)),
    }  # fmt: skip


def from_kernels(path: Path) -> float:
    """Seconds a step, after the first, in which a kernel of NCCL's runs and none of the stream of the products does."""
    trace = read(path)
    home = Counter(kernel.stream for kernel in trace.gemms()).most_common(1)[0][0]
    communication = trace.collectives("AllGather") + trace.collectives("ReduceScatter")
    compute = [k.interval for k in trace.kernels if k.stream == home and "nccl" not in k.name.lower()]
    gathers = trace.collectives("AllGather")
    first = gathers[len(gathers) // (STEPS + 1)].start  # of the second step: each has as many
    some = [k.interval for k in communication if k.start >= first]
    return 1e-6 * (length(some) - overlap(some, compute)) / STEPS


@pytest.mark.parametrize("graphed", [False, True])
def test_exposed_communication_is_what_kernels_say(tmp_path: Path, graphed: bool) -> None:
    for found in launch(observed, (False, str(tmp_path), graphed), nprocs=RANKS):
        assert found["exposed"] == pytest.approx(found["kernels"], rel=0.05), found
        assert found["kernels"] > 0
        gathers, reductions = found["planned"]
        assert found["counts"]["gather"] == STEPS * gathers
        assert found["counts"]["reduce"] == STEPS * reductions
        assert all(peak > 1 << 20 for peak in found["peaks"])
        if not graphed:
            assert len(found["rows"]) == 16
            assert all(row.compute > 0 and row.planned is not None for row in found["rows"])
            assert all(row.gather_bytes > 0 for row in found["rows"] if row.gather is not None)


def names_in_a_capture() -> tuple[list[str], list[str]]:
    """The package's ranges while a graph is captured, and how the calls went."""
    state, model = made(256)
    forward_backward = T.forward_backward(model, loss_of)
    calls: list[str] = []

    def train_step(state: fsdp.State, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        calls.append("captured" if runtime_of(state.spec.mesh).capturing else "eager")
        with torch.profiler.record_function(calls[-1]):
            state, loss = forward_backward(state, x)
            return fsdp.step(state), loss

    step = T.cuda_graph(train_step)
    x = torch.randn(32, 256, device="cuda", dtype=torch.bfloat16)
    with recorded() as traces:
        for _ in range(8):
            state, _ = step(state, x)
    (trace,) = traces
    begin, end = trace.marks["captured"][-1]
    inside = {name: some for name, some in trace.marks.items() if name.startswith("fsdp ")}
    return [name for name, some in inside.items() if any(begin <= a and b <= end for a, b in some)], calls


def test_there_are_names_while_a_graph_is_captured() -> None:
    for names, calls in launch(names_in_a_capture, nprocs=RANKS):
        assert "captured" in calls
        assert {"fsdp unshard 0", "fsdp gather 1", "fsdp reduce gradients of 0", "fsdp forward 0", "fsdp step"} <= {
            *names
        }


@own_gpus
def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    for found in launch(observed, (True, str(tmp_path)), nprocs=RANKS):
        worst = found["late"][0]
        assert worst.rank == 1, found["late"][:5]
        assert 0.75 * SLOW < worst.seconds < 2 * SLOW, found["late"][:5]
