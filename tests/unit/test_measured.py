"""What is read from a trace, from traces that are written here: on the host, of kernels, of replayed graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import functional_fsdp as fsdp
from functional_fsdp.look.observe import Late, RankTimes, lateness
from functional_fsdp.look.timeline import Arrival, Measured, measured, minus, overlap, recorded


def host(name: str, begin: float, end: float) -> dict[str, Any]:
    """A range, milliseconds."""
    at = {"ts": begin * 1e3, "dur": (end - begin) * 1e3, "tid": 1, "ph": "X"}
    return {"name": f"fsdp {name}", "cat": "user_annotation", **at}


def kernel(name: str, given: float, begin: float, end: float, stream: int, call: str = "cudaLaunchKernel") -> list[Any]:
    """A kernel, and the call that gave it."""
    which = kernel.count = getattr(kernel, "count", 0) + 1  # type: ignore[attr-defined]
    args = {"correlation": which, "stream": stream}
    at = {"ts": begin * 1e3, "dur": (end - begin) * 1e3, "tid": stream, "ph": "X"}
    gave = {"ts": given * 1e3, "dur": 1.0, "tid": 1, "ph": "X", "name": call, "cat": "cuda_runtime"}
    return [{"name": name, "cat": "kernel", "args": args, **at}, {**gave, "args": {"correlation": which}}]


STEP = [
    host("observed step", 0, 100),
    host("unshard a", 1, 11),
    host("gather a", 2, 3),
    host("gather b", 3, 4),
    host("wait gather a", 5, 10),
    host("release a", 20, 21),  # compute 11 to 20
    host("unshard b", 21, 31),
    host("wait gather b", 22, 30),
    host("reduce b", 50, 53),  # compute 31 to 50
    host("reduce gradients of b", 51, 52),
    host("release b", 55, 56),  # and 53 to 55
    host("step", 60, 99),  # and 56 to 60
    host("vote", 61, 70),
    host("wait control vote", 62, 69),
    host("wait reduce b:0", 71, 80),
]


def read(events: list[Any], **given: Any) -> list[Measured]:
    settings: dict[str, Any] = {"gathers": ["a", "b"], "reductions": ["b"], **given}
    return measured(recorded({"traceEvents": events}), {"a": "a", "b": "b", "b:0": "b"}, **settings)


def test_on_the_host_compute_waits_where_the_host_does() -> None:
    (one,) = read(STEP)
    assert one.seconds == pytest.approx(0.1)
    assert [use.unit for use in one.uses] == ["a", "b"]
    assert [use.compute for use in one.uses] == pytest.approx([0.009, 0.025])
    assert one.uses[0].host == pytest.approx(0.006)  # 10 and 1, less 5
    assert one.exposed == pytest.approx({"gather": 0.013, "reduce": 0.009, "control": 0.007})
    assert [(w.lane, w.unit, w.use) for w in one.waits] == [
        ("gather", "a", 0), ("gather", "b", 1), ("control", "", 1), ("reduce", "b", 1),
    ]  # fmt: skip
    lanes = {(s.lane, s.unit): (s.use, s.begin, s.end) for s in one.spans if s.lane != "compute"}
    assert lanes["gather", "a"] == pytest.approx((0, 0.002, 0.010))
    assert lanes["gather", "b"] == pytest.approx((1, 0.010, 0.030))  # given in use 0, behind a, for use 1
    assert lanes["reduce", "b"] == pytest.approx((1, 0.051, 0.080))
    came = {(a.lane, a.unit): a.begin for a in one.arrivals}
    assert came == pytest.approx(
        {("gather", "a"): 0.002, ("gather", "b"): 0.003, ("reduce", "b"): 0.051, ("vote", ""): 0.061}
    )


def kernels(launch: str = "cudaLaunchKernel") -> list[Any]:
    """Streams: 7 compute, 13 gather, 14 reduce. Gathers: 0 to 10 and 12 to 30; compute: 10 to 20, 25 to 50."""
    return [
        *kernel("ncclDevKernel_AllGather", 2.5, 0, 10, 13, launch),
        *kernel("ncclDevKernel_AllGather", 3.5, 12, 30, 13, launch),
        *kernel("cast", 3.4, 11, 12, 13, launch),
        *kernel("gemm", 12, 10, 20, 7, launch),
        *kernel("gemm", 35, 25, 50, 7, launch),
        *kernel("ncclDevKernel_ReduceScatter", 51.5, 45, 60, 14, launch),
        *kernel("adamw", 75, 60, 62, 7, launch),
    ]


def test_on_a_gpu_compute_waits_where_communication_runs_and_it_does_not() -> None:
    (one,) = read(STEP + kernels())
    assert one.seconds == pytest.approx(0.062)
    assert [use.compute for use in one.uses] == pytest.approx([0.010, 0.027])
    assert one.exposed == pytest.approx({"gather": 0.015, "reduce": 0.010, "other": 0.0})
    waits = [(round(1e3 * w.begin), round(1e3 * w.end), w.lane, w.unit, w.use) for w in one.waits]
    assert waits == [(0, 10, "gather", "a", 0), (20, 25, "gather", "b", 1), (50, 60, "reduce", "b", 1)]
    assert [(a.lane, a.unit) for a in one.arrivals] == [("gather", "a"), ("gather", "b"), ("reduce", "b")]


def test_lanes_that_run_at_once_count_once() -> None:
    """A reduction from 45 to 60 beside a gather from 52 to 58: compute waits from 50 to 60."""
    second = kernel("ncclDevKernel_AllGather", 3.6, 52, 58, 13, "cudaLaunchKernel")
    (one,) = read(STEP + kernels() + second)
    assert one.exposed == pytest.approx({"gather": 0.021, "reduce": 0.010, "other": 0.0})
    assert one.waited == pytest.approx(0.025)


def test_of_a_replayed_graph_the_plan_says_which_is_which() -> None:
    (one,) = read([host("observed step", 0, 5), *kernels("cudaGraphLaunch")])
    assert one.uses == []
    assert one.exposed == pytest.approx({"gather": 0.015, "reduce": 0.010, "other": 0.0})
    assert [(a.lane, a.unit) for a in one.arrivals] == [("gather", "a"), ("gather", "b"), ("reduce", "b")]


def test_steps_are_told_apart() -> None:
    later = [{**event, "ts": event["ts"] + 200e3} for event in STEP]
    first, second = read(STEP + later)
    assert [use.compute for use in first.uses] == pytest.approx([use.compute for use in second.uses])
    assert {a.step for a in second.arrivals} == {1}


def test_intervals() -> None:
    assert minus([(0, 10)], [(-1, 1), (4, 5), (9, 20)]) == [(1, 4), (5, 9)]
    assert minus([], [(0, 1)]) == []
    assert overlap([(0, 2), (1, 3)], [(2, 9)]) == 1


@pytest.mark.parametrize("ended", [False, True])
def test_who_is_late_by_clocks_that_differ(ended: bool) -> None:
    """Rank 1's clock is 5 s ahead, rank 2's 3 s behind; rank 2 comes 20 ms late to the reduction."""
    ahead, late = (0.0, 5.0, -3.0), (0.0, 0.0, 0.02)
    arrivals = [
        [
            Arrival(step, "gather", "a", 0, clock + step, clock + step + 0.01)
            for step in range(3)
        ] + [Arrival(step, "reduce", "a", 0, clock + step + 0.5 + by, clock + step + 0.6) for step in range(3)]
        for clock, by in zip(ahead, late, strict=True)
    ]  # fmt: skip
    left = [[clock + t + 1e-4 * i for t in range(9)] for i, clock in enumerate(ahead)]
    worst = lateness(arrivals, left, ended)[0]
    assert (worst.rank, worst.lane, worst.unit) == (2, "reduce", "a")
    assert worst.seconds == pytest.approx(0.02, abs=5e-4)
    assert repr(Late(1, "vote", "", 0, 0.0123)) == "rank 1 came to the vote 12.3 ms after the others"


def test_a_report_of_steps_without_python(tmp_path: Path) -> None:
    layout = fsdp.make_layout({"a": {"w": _meta()}, "b": {"w": _meta()}}, fsdp.Spec({"data": 2}, units=["a", "b"]))
    plan = fsdp.make_plan(layout, fsdp.Schedule())
    (one,) = read([host("observed step", 0, 5), *kernels("cudaGraphLaunch")])
    times = RankTimes(one.seconds, 0.0, one.waited, one.exposed)
    report = fsdp.Observation(0, (times, times), (), (), (1 << 30, 2 << 30), plan, [one])
    assert "exposed communication 25.00: gather 15.00, reduce 10.00" in repr(report)
    assert "memory at the peak: 1.0 GiB, 2.0 GiB" in repr(report)
    gathered, reduced = (plan.by_name["a"].nbytes + plan.by_name["b"].nbytes), plan.reductions[0].nbytes
    assert report.links == pytest.approx((gathered / 0.028, reduced / 0.015))
    report.rates = (None, 3e9)
    assert f"links, at best, of whole units: gather {gathered / 28e6:,.2f} GB/s, reduce 3.00 GB/s (given)" in repr(
        report
    )
    report.draw(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 0


def _meta() -> torch.Tensor:
    return torch.empty(64, 64, device="meta")
