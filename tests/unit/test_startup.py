"""startup: to which part a moment belongs, the line that says what is waited for, and the end of its thread."""

from __future__ import annotations

import gc
import importlib
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp._common.device import rows_at_once
from functional_fsdp._launch.launch import stop_workers
from functional_fsdp._seams import torch_private
from functional_fsdp.transforms._compile import compile_units, startup, whole_step
from functional_fsdp.transforms._compile.startup import LATER, OTHER, PARTS, Sampler, StartupReport, collect_later


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
        (["/a/functional_fsdp/_state/shard.py", "/a/model.py"], "weights and layout"),
        (["/a/functional_fsdp/_host_memory.py", "/a/functional_fsdp/_shared/device.py"], "weights and layout"),
        (["/a/functional_fsdp/transforms/_cuda_graph/graphed.py"], "graph capture"),
        (["/a/functional_fsdp/_verbs.py"], "steps"),
        (["/a/functional_fsdp/_verbs.py", "<frozen importlib._bootstrap>"], "imports"),
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
    """Its looks are given, three seconds apart."""

    looks: list[str]
    seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def wait(self) -> bool:
        self.seconds += 3.0
        return not self.looks

    def look(self) -> str:
        return self.looks.pop(0)


def test_what_takes_longer_than_five_seconds_is_said_and_the_line_is_cleared_at_the_end() -> None:
    shown, report = io.StringIO(), StartupReport()
    sampler = Stepped(report, 5.0, shown)
    sampler.looks = ["imports", "Dynamo", "Inductor: kernels", "Dynamo"]  # which take turns within moments
    sampler.run()
    _, *lines = shown.getvalue().split("\r")
    assert lines == [
        "Dynamo: 3 s, 6 s since the start",
        "Inductor: kernels: 3 s, 9 s since the start",
        "Dynamo: 6 s, 12 s since the start".ljust(len("Inductor: kernels: 3 s, 9 s since the start")),
        " " * len("Dynamo: 6 s, 12 s since the start"),
        "",
    ]
    assert report.seconds == {"Dynamo": 6.0, "imports": 3.0, "Inductor: kernels": 3.0}
    assert str(report).endswith(f"{report.total:7.2f} s")


def test_what_is_quick_is_not_said() -> None:
    shown = io.StringIO()
    sampler = Stepped(StartupReport(), 5.0, shown)
    sampler.looks = ["Dynamo"]
    sampler.run()
    assert shown.getvalue() == ""


class Terminal(io.StringIO):
    def __init__(self, terminal: bool = True) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def first_call(monkeypatch: pytest.MonkeyPatch, shown: io.StringIO, rank: int = 0, **options: Any) -> list[Any]:
    """Two calls of a driven model: who watched them, before the first look."""
    watched: list[Any] = []

    class Noted(Sampler):
        def start(self) -> None:
            watched.append(self.shows)
            super().start()

    monkeypatch.setattr(startup, "Sampler", Noted)
    monkeypatch.setattr(startup, "PATIENCE", float("inf"))  # a busy machine takes longer
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(startup, "dist", SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: rank))
    params, model = fsdp.functionalize(torch.nn.Sequential(Part(), Part()))
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()))
    run = T.forward_backward(model, lambda model, x: model(x).sum(), **options)
    for _ in range(2):
        state, _ = run(state, torch.ones(2, 2), last_microbatch=False)
    return watched


class Part(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


EAGER: dict[str, Any] = {"compile": {"backend": "eager"}}


def test_a_terminal_of_rank_0_has_one_line_in_the_first_call_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, before = Terminal(), threading.active_count()
    assert first_call(monkeypatch, terminal, **EAGER) == [terminal]
    assert threading.active_count() == before
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(("rank", "terminal", "options"), [(0, False, EAGER), (1, True, EAGER), (0, True, {})])
def test_no_thread_in_a_log_or_on_other_ranks_or_where_nothing_is_compiled(
    rank: int, terminal: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert first_call(monkeypatch, Terminal(terminal), rank, **options) == []


def test_functions_and_steps_that_are_compiled_have_the_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[Any] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        watched.append(1)
        yield

    for module in (compile_units, whole_step):
        monkeypatch.setattr(module, "waiting", waiting)
    x = torch.ones(2)
    T.compile_units(lambda x: x + 1, backend="eager")(x)
    assert len(watched) == 1
    state = fsdp.shard({"w": x}, fsdp.Spec(fsdp.local_mesh()))
    T.compile(lambda state: (state, x), backend="aot_eager")(state)
    assert len(watched) == 2


def test_one_line_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(startup, "_shows", lambda: True)
    before = threading.active_count()
    with T.startup(), startup.waiting():
        assert threading.active_count() == before + 1
    with startup.waiting(), startup.waiting():
        assert threading.active_count() == before + 1
    with pytest.raises(KeyError), startup.waiting():
        raise KeyError
    assert threading.active_count() == before
    assert not startup._watched.locked()


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


PROGRAM = """
import os, threading
from types import ModuleType, SimpleNamespace
import torch
from functional_fsdp import transforms as T
from functional_fsdp._seams import torch_private

log, come, go = [], threading.Event(), threading.Event()

def noted(name, first=False):
    def work():
        if first:
            come.set()
            go.wait(60)
        log.append((name, threading.current_thread().name))
    return work

key = noted("key")
torch_private.triton_key = lambda: (go.wait(60), key())
original = torch_private.dynamo
torch_private.dynamo = noted("dynamo", first=True)
torch_private.start_compilers = noted("processes")
torch_private.inductor = noted("inductor")
torch_private.import_late = noted("late")
T.start_compilers()
T.start_compilers()
assert log == []  # nothing is waited for here
come.wait(60)
torch_private.dynamo = original
go.set()
FINISH
there = {thread.name for thread in threading.enumerate()}
assert not any(name.startswith("start_compilers") for name in there), there
assert [name for name, who in log if who == "start_compilers"] == ["dynamo", "processes", "inductor", "late"], log
assert [name for name, who in log if who == "start_compilers: key"] == ["key"], log
"""
FINISHES = {
    "units": "T.compile_units(torch.nn.Linear(2, 2), backend='eager')",
    "a fork": "child = os.fork()\nif not child: os._exit(0)\nos.waitpid(child, 0)",
}


@pytest.mark.parametrize("finish", FINISHES)
def test_compilers_start_on_a_thread_which_what_compiles_waits_for(finish: str) -> None:
    """In a process of its own, where none has started yet."""
    stop_workers()
    fsdp.launch(exec, (PROGRAM.replace("FINISH", FINISHES[finish]), {}), nprocs=1)
    stop_workers()


def test_a_triton_that_fails_is_left_to_whoever_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a thread its error would be printed, and nobody could catch it."""
    asked = []

    def fails() -> None:
        asked.append(True)
        raise OSError("no file of libtriton.so")

    module = ModuleType("triton.runtime.cache")
    module.triton_key = fails  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch_private.triton_key()
    assert asked == [True]


FIRST = """
import gc, sys, torch, functional_fsdp as fsdp, functional_fsdp.transforms as T
from functional_fsdp.transforms._compile.startup import finish_start

class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return x @ self.w

of_all = []
gc.callbacks.append(lambda phase, info: of_all.append(info) if info["generation"] == 2 else None)
T.start_compilers()
finish_start()
params, model = fsdp.functionalize(torch.nn.Sequential(Part(), Part()))
state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()))
forward_backward = T.forward_backward(model, lambda model, x: model(x).square().mean(), compile=True)
before = len(sys.modules)
forward_backward(state, torch.ones(3, 4))
assert torch._dynamo.utils.counters["inductor"]["extern_calls"] > 0  # Inductor compiled it
print(len(sys.modules) - before, len(of_all))
"""


def test_what_a_first_compilation_would_import_is_there(tmp_path: Path) -> None:
    """It imports 115 modules where only Dynamo and Inductor are there, and 243 where there is more in the graph. With
    its code in the cache it needs less, and less is there. No garbage collection of all objects falls into it."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    program = f"{FIRST}print(sum('serialized_patterns' in x or 'sympy.physics' in x for x in sys.modules))\n"
    patterns: list[int] = []
    for _ in ("cold", "warm"):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment
        )
        assert done.returncode == 0, done.stderr
        late, collections, some = map(int, done.stdout.split())
        assert late < (25 if patterns else 50)  # 34 with a warm cache, without those that each compilation imports
        assert collections == 0
        patterns.append(some)
    assert patterns[0] > patterns[1] == 0  # of compilations that there are none of


@pytest.mark.parametrize("set_since", [False, True])
def test_one_collection_of_all_objects_is_put_off(set_since: bool) -> None:
    """After it they come as often as before, and as somebody has set since. What is young is collected as ever."""
    before, callbacks = gc.get_threshold(), [*gc.callbacks]
    try:
        gc.set_threshold(700, 10, 10)
        collect_later()
        collect_later()
        assert gc.get_threshold() == (700, 10, LATER)
        assert len(gc.callbacks) == len(callbacks) + 1
        gc.collect(1)
        assert gc.get_threshold() == (700, 10, LATER)
        if set_since:
            gc.set_threshold(900, 12, 7)
        gc.collect()
        assert gc.get_threshold() == ((900, 12, 7) if set_since else (700, 10, 10))
        assert set_since or gc.callbacks == callbacks
    finally:
        gc.callbacks[:] = callbacks
        gc.set_threshold(*before)


def test_what_somebody_sets_after_it_stays_and_callbacks_of_others_miss_nothing() -> None:
    before, callbacks = gc.get_threshold(), [*gc.callbacks]
    phases: list[str] = []
    try:
        gc.set_threshold(700, 10, 10)
        collect_later()
        gc.callbacks.append(lambda phase, info: phases.append(phase))
        gc.collect()
        gc.set_threshold(700, 10, LATER)
        gc.collect()
        assert gc.get_threshold() == (700, 10, LATER)
        assert phases == ["start", "stop"] * (len(phases) // 2)
    finally:
        gc.callbacks[:] = callbacks
        gc.set_threshold(*before)


def test_a_step_that_is_compiled_waits_for_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []
    monkeypatch.setitem(vars(sys.modules[T.compile.__module__]), "finish_start", lambda: waited.append(True))
    T.compile(lambda state: state, backend="aot_eager")
    assert waited == [True]


def test_each_file_that_stands_for_a_part_is_there() -> None:
    """A file that was renamed would count for another part, as waits for other ranks did for steps."""
    folders = [Path(fsdp.__file__).parent, Path(T.__file__).parent]
    files = [path.as_posix() for folder in folders for path in folder.rglob("*.py")]
    ours = [mark for part, marks in PARTS[4:-1] for mark in marks]
    assert [mark for mark in ours if not any(mark in file for file in files)] == []


@pytest.mark.parametrize(("free", "collections"), [(100, [1]), (99, [1, 2])])
def test_a_capture_collects_all_garbage_only_where_memory_is_short(
    free: int, collections: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than the capture itself."""
    graphed = importlib.import_module("functional_fsdp.transforms._cuda_graph.graphed")
    found: list[int] = []
    monkeypatch.setattr(graphed.gc, "collect", lambda generation=2: found.append(generation))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 1000))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 100)
    graphed._make_room(torch.device("cuda"))
    assert found == collections


def test_a_checksum_on_a_gpu_takes_few_launches() -> None:
    """A layer of 8 B, seven matrices, in at most 27 pieces, where there were 136; a large leaf in 33."""
    gpu, row = torch.device("cuda"), 1 << 14
    rows = [n * 4096 // row for n in (4096, 1024, 1024, 4096, 14336, 14336, 14336)]
    assert sum(-(-n // rows_at_once(gpu, n)) for n in rows) <= 27
    assert all(-(-n // rows_at_once(gpu, n)) <= 33 for n in range(1, 200_000, 997))
