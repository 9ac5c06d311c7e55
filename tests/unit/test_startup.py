"""startup: to which part a moment belongs, the line that says what is waited for, and the end of its thread."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from functional_fsdp import transforms as T
from functional_fsdp.transforms._compile.startup import OTHER, Sampler, StartupReport


def calling(file: str, inner: Callable[[], Any]) -> Any:
    """Call a function from code that says it lies in this file."""
    made: dict[str, Any] = {}
    exec(compile("def run(inner):\n    return inner()", file, "exec"), made)
    return made["run"](inner)


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ([], OTHER),
        (["/site/torch/_dynamo/convert_frame.py"], "Dynamo"),
        (["/site/torch/_dynamo/convert_frame.py", "/site/torch/_inductor/graph.py"], "Inductor: kernels"),
        (["/site/torch/_inductor/graph.py", "/site/sympy/core/add.py"], "Dynamo"),
        (["/a/functional_fsdp/_state/init.py", "/a/model.py"], "weights and layout"),
        (["/a/functional_fsdp/transforms/_cuda_graph/graphed.py"], "graph capture"),
        (["/a/functional_fsdp/_verbs/verbs.py"], "steps"),
        (["/a/functional_fsdp/_verbs/verbs.py", "<frozen importlib._bootstrap>"], "imports"),
    ],
)
def test_the_innermost_file_that_belongs_to_a_part_decides(files: list[str], part: str) -> None:
    sampler = Sampler(StartupReport(), 5.0, None)
    found: list[str] = []

    def inner() -> None:
        found.append(sampler.part_of(sys._getframe()))

    run: Callable[[], Any] = inner
    for file in reversed(files):
        run = partial(calling, file, run)
    thread = threading.Thread(target=run)  # whose stack is its own
    thread.start()
    thread.join()
    assert found == [part]


class Stepped(Sampler):
    """Its looks are given."""

    looks: list[str]

    def look(self) -> str:
        if len(self.looks) == 1:
            self.over.set()
        return self.looks.pop(0)


def test_what_takes_longer_is_said_and_the_line_is_cleared_at_the_end() -> None:
    shown, report = io.StringIO(), StartupReport()
    sampler = Stepped(report, 0.0, shown)
    sampler.looks = ["Dynamo", "Dynamo", "imports", "imports"]
    sampler.run()
    lines = [line.strip() for line in shown.getvalue().split("\r")]
    assert [line.partition(":")[0] for line in lines if line] == ["Dynamo", "imports"]
    assert lines[-1] == ""
    assert {*report.seconds} == {"Dynamo", "imports"}
    assert sum(report.seconds.values()) <= report.total
    assert "Dynamo" in str(report)
    assert str(report).endswith(f"{report.total:7.2f} s")


def test_nothing_is_shown_in_a_log_and_the_thread_ends(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with T.startup(patience=0.0) as report:  # pytest's stderr is no terminal
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    assert report.total > 0
    assert capsys.readouterr().err == ""


def test_a_thread_that_is_gone_is_elsewhere() -> None:
    sampler = Sampler(StartupReport(), 5.0, None)
    sampler.whose = -1
    assert sampler.look() == OTHER


@pytest.mark.parametrize(("compile", "times"), [(True, 1), ({"backend": "eager"}, 0), (False, 0)])
def test_the_processes_that_compile_kernels_start_before_the_first_step(
    compile: Any, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import async_compile

    started: list[bool] = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: started.append(True))
    T.forward_backward(torch.nn.Linear(2, 2), lambda model, x: model(x).sum(), compile=compile)
    assert len(started) == times
