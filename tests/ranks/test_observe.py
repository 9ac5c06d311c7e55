"""Steps that are observed, on processes: the table, the picture, and a rank that is slow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from support.chains import mean_square as loss_of

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

SLOW = 0.02  # seconds


class Layer(nn.Module):
    def __init__(self, slow: bool) -> None:
        super().__init__()
        self.linear, self.slow = nn.Linear(64, 64), slow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.slow and fsdp.local_mesh().get_rank() == 1:
            time.sleep(SLOW)
        return self.linear(x).tanh()


def made(slow: bool = False) -> tuple[fsdp.State, Any, torch.Tensor]:
    params, model = fsdp.functionalize(nn.Sequential(Layer(False), Layer(slow), Layer(False)))
    spec = fsdp.Spec(fsdp.local_mesh(), units=["0", "1", "2"])
    return fsdp.shard(params, spec, fsdp.adamw(lr=0.01)), model, torch.ones(4, 64)


def observed(folder: Path, slow: bool, compiled: bool = False) -> Any:
    state, model, x = made(slow)
    forward_backward = T.forward_backward(model, loss_of)

    def train_step(state: fsdp.State) -> fsdp.State:
        return fsdp.step(forward_backward(state, x)[0])

    if compiled:
        train_step = T.compile(train_step, backend="aot_eager")
    step = fsdp.observe(train_step, steps=7, skip=2)
    for _ in range(10):
        assert step.report is None
        state = step(state)
    report = step.report
    assert report is not None
    state = step(state)  # is not measured
    assert step.report is report
    path = folder / f"{report.rank} {compiled}.svg"
    report.draw(path)
    waits = [sum(w.end - w.begin for w in one.waits) for one in report.steps]
    return {
        "rows": report.rows, "late": report.late, "text": repr(report), "exposed": dict(report.exposed),
        "seconds": report.ranks[report.rank].seconds, "waits": waits, "drawn": "<svg" in path.read_text(),
    }  # fmt: skip


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    found = fsdp.launch(observed, (tmp_path, True), nprocs=2)
    for one in found:
        worst = one["late"][0]
        assert worst.rank == 1
        assert worst.seconds > 0.75 * SLOW
        assert one["late"] == found[0]["late"]  # the same on both
        assert "rank 1 came to the" in one["text"]
    assert sum(found[0]["exposed"].values()) > 0.75 * SLOW  # its peer waits for it


def test_each_use_has_a_row(tmp_path: Path) -> None:
    for one in fsdp.launch(observed, (tmp_path, False), nprocs=2):
        assert one["drawn"]
        rows = one["rows"]
        assert [(row.unit, row.backward) for row in rows] == [
            ("0", False), ("1", False), ("2", False), ("2", True), ("1", True), ("0", True),
        ]  # fmt: skip
        assert all(row.compute > 0 and row.host > 0 and row.planned is not None for row in rows)
        assert [row.gather is not None for row in rows] == [True, True, True, False, True, True]  # 2 stays gathered
        assert [row.reduce is not None for row in rows] == [False, False, False, True, True, True]
        assert {row.gather_bytes for row in rows} == {0, (64 * 64 + 256) * 4 // 2}
        total = sum(row.compute + row.host + row.waited for row in rows)
        assert total <= 1.01 * one["seconds"]
        assert sum(one["exposed"].values()) == pytest.approx(sum(one["waits"]) / len(one["waits"]))


def test_steps_that_run_no_python(tmp_path: Path) -> None:
    for one in fsdp.launch(observed, (tmp_path, False, True), nprocs=2):
        assert one["rows"] == ()
        assert one["seconds"] > 0
        assert one["exposed"]["gather"] > 0
        assert one["exposed"]["reduce"] > 0
        assert "exposed communication " in one["text"]


def test_a_step_that_raises_ends_the_profile() -> None:
    state, _, _ = made()

    def fails(state: fsdp.State) -> Any:
        raise ValueError("on purpose")

    step = fsdp.observe(fails, skip=0)
    with pytest.raises(ValueError, match="on purpose"):
        step(state)
    assert step._profile is None
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True),
        pytest.raises(fsdp.ScheduleError, match="a profiler runs already"),
    ):
        fsdp.observe(lambda state: state, skip=0)(state)
    with pytest.raises(TypeError, match="the first argument is a State, not str"):
        step("")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected whole numbers, at least 1 step"):
        fsdp.observe(fails, steps=0)


def test_a_loop_that_ends_too_early_leaves_no_profiler() -> None:
    state, _, _ = made()
    for wrong in (False, True):
        step: Any = fsdp.observe(lambda state: state, skip=0)
        step(state)
        if wrong:
            with pytest.raises(TypeError, match="the first argument is a State, not str"):
                step("")
            assert step._profile is None
        del step
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
            pass


def test_simulated_ranks_have_no_time() -> None:
    def once() -> None:
        state, _, _ = made()
        fsdp.observe(lambda state: state, skip=0)(state)

    with pytest.raises(fsdp.LaunchError, match="simulated ranks take turns in one process"):
        fsdp.launch(once, nprocs=2, simulate=True)


@pytest.mark.parametrize("wrong", [{"steps": 1.5}, {"skip": "x"}, {"steps": 0}, {"gather": 0}, {"reduce": -1.0}])
def test_numbers_that_never_give_a_report_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"observe\((steps|gather|reduce)=.*expected"):
        fsdp.observe(lambda state: state, **wrong)
