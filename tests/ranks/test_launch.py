"""`local_mesh` and `launch`: order, persistence, code from anywhere, and what failures look like."""

from __future__ import annotations

import enum
import functools
import linecache
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.commands import ROOT, run_script
from support.tables import FULL

import functional_fsdp as fsdp
from functional_fsdp import LaunchError, launch, local_mesh
from functional_fsdp._launch import launch as _launch
from functional_fsdp._launch import pool as _pool
from functional_fsdp._launch import transfer as _transfer
from functional_fsdp._launch import worker as _worker


def rank_and_sum() -> tuple[int, float]:
    rank = local_mesh().get_rank()
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    return rank, total.item()


# ---------------------------------------------------------------------------------------------------- results, workers


def test_results_come_in_rank_order() -> None:
    assert launch(rank_and_sum, nprocs=3) == [(0, 6.0), (1, 6.0), (2, 6.0)]


def test_arguments_and_environment() -> None:
    def work(a: int, *, b: str) -> tuple[int, str, dict[str, str]]:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", _worker.TIMEOUT)
        return a, b, {name: os.environ[name] for name in names}

    for rank, (a, b, env) in enumerate(launch(work, (1,), kwargs={"b": "x"}, nprocs=2, timeout=77)):
        assert (a, b) == (1, "x")
        assert env["RANK"] == env["LOCAL_RANK"] == str(rank)
        assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "2"
        assert (env["MASTER_ADDR"], float(env[_worker.TIMEOUT])) == ("127.0.0.1", 77)


kept = 0


def keep() -> int:
    global kept
    kept = os.getpid()
    local_mesh()
    return kept


def look() -> tuple[int, bool]:
    return kept, dist.is_initialized()


def test_workers_and_their_state_are_kept_and_sizes_live_side_by_side() -> None:
    two = launch(keep, nprocs=2)
    three = launch(os.getpid, nprocs=3)
    assert launch(look, nprocs=2) == [(pid, True) for pid in two]
    assert not set(two) & set(three)


def test_a_mesh_is_made_once() -> None:
    def work() -> bool:
        return local_mesh(a=2, b=-1) is local_mesh(a=2, b=1)

    assert launch(work, nprocs=2) == [True, True]


def test_workers_follow_the_callers_folder_and_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(os.getcwd, nprocs=2)
    (tmp_path / "module_written_later.py").write_text("def answer():\n    return 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert launch(os.getcwd, nprocs=2) == [str(tmp_path)] * 2
    from module_written_later import answer  # type: ignore[import-not-found]

    assert launch(answer, nprocs=2) == [42, 42]


@pytest.mark.large
def test_threads_after_a_parallel_caller() -> None:
    """A fork of a process that computed in parallel hangs in OpenMP, and one that ran a backward cannot run another."""
    run_script("""
        import torch
        from functional_fsdp import launch

        def work(threads):
            torch.set_num_threads(threads)
            x = torch.randn(700, 700, requires_grad=True)
            (grad,) = torch.autograd.grad((x @ x).exp().relu().sum(), x)
            return grad.shape

        torch.set_num_threads(4)
        work(4)
        assert launch(torch.get_num_threads, nprocs=2) == [2, 2]
        for threads in (1, 4):
            assert launch(work, (threads,), nprocs=2) == [(700, 700)] * 2
    """)


def test_a_caller_that_compiled_leaves_its_ranks_able_to() -> None:
    def compiled() -> int:
        from torch._inductor import config
        from torch._inductor.async_compile import AsyncCompile

        with config.patch(compile_threads=2):
            return AsyncCompile.pool().submit(int, "4").result(timeout=10)

    assert compiled() == 4
    _launch.stop_workers()
    try:
        assert launch(compiled, nprocs=2) == [4, 4]
    finally:
        _launch.stop_workers()


def test_a_world_of_one_needs_no_set_up_and_workers_no_cloudpickle(tmp_path: Path) -> None:
    """Groups stay with the caller; a rank has imported what the caller has of this library."""
    (tmp_path / "cloudpickle.py").write_text("raise ImportError('not here')")
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
        import sys, functional_fsdp as fsdp

        class Box:
            pass

        def double(x):
            return 2 * x

        def look():
            return "functional_fsdp.transforms.vjp" in sys.modules, fsdp.local_mesh().size()
    """)
    )
    printed = run_script(
        """
        import os, sys, torch, torch.distributed as dist
        import functional_fsdp as fsdp
        import functional_fsdp.transforms
        from functional_fsdp import launch, local_mesh
        import mine

        before = dict(os.environ)
        mesh, deep = local_mesh(), local_mesh(replica=1, shard=-1)
        dist.all_reduce(torch.ones(1), group=deep["shard"].get_group())
        assert before == dict(os.environ)
        print(mesh.mesh_dim_names, mesh.size(), mesh.device_type)
        state = fsdp.shard({"w": torch.ones(4)}, fsdp.Spec(mesh), fsdp.sgd(lr=1.0))
        state = fsdp.step(fsdp.reduce(state, {"w": torch.ones(4)}))
        print(fsdp.full_params(state)["w"].tolist())
        assert launch(mine.look, nprocs=2) == [(True, 2)] * 2
        assert mesh.size() == local_mesh().size() == 1 and dist.get_world_size() == 1

        def here():
            return 1

        with fsdp.workers(nprocs=2) as w:
            assert w(mine.double, w(int, 3)).get() == [6, 6]
            assert type(w(mine.Box).get()[0]) is mine.Box
            for fn in (here, lambda: 1):
                try:
                    w(fn)
                except TypeError as error:
                    assert "cannot be imported by the workers" in str(error), error
                    assert "cloudpickle, which is not installed. pip install 'functional-fsdp[launch]'" in str(error)
                else:
                    raise AssertionError
        """,
        path=tmp_path,
    )
    assert printed.split()[:2] == ["('data',)", "1"]
    assert printed.endswith("[0.0, 0.0, 0.0, 0.0]\n")


# ------------------------------------------------------------------------------------------------------ code by value

SCRIPT = """
import torch
import functional_fsdp as fsdp
from functional_fsdp import transforms as T

scale = 1.0

def scaled(x):
    return scale * torch.tanh(x)

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return scaled(self.linear(x))

def main(compile):
    state, model = fsdp.init(
        lambda: torch.nn.Sequential(Block(), Block()), fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.sgd(lr=0.1), seed=0
    )
    step = T.forward_backward(model, lambda model, x: model(x).square().mean(), compile=compile)
    return step(state, torch.ones(2, 8))[1].item()

def define():
    global Made, scale
    class Made:
        pass
    scale = 7.0  # its own: the next call begins with the caller's
    return Made(), define

def scale_now():
    return scale
"""


def test_units_of_a_script_are_compiled_as_the_script_has_them_now() -> None:
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, found)
    compiled = {"backend": "aot_eager"}
    before = launch(found["main"], (False,), nprocs=1)
    assert launch(found["main"], (compiled,), nprocs=1) == pytest.approx(before)
    found["scale"] = 2.0  # as a cell of a notebook that was edited and run
    after = launch(found["main"], (compiled,), nprocs=1)
    assert after == pytest.approx(launch(found["main"], (False,), nprocs=1))
    exec("def scaled(x):\n    return 3 * x", found)
    last = launch(found["main"], (compiled,), nprocs=1)
    assert last == pytest.approx(launch(found["main"], (False,), nprocs=1))
    assert before[0] < after[0] / 2 < last[0] / 2


def test_functions_of_two_scripts_keep_the_names_of_each() -> None:
    one, two = {"__name__": "__main__", "number": 1}, {"__name__": "__main__", "number": 2}
    for found in (one, two):
        exec("import torch\ndef add(x):\n    return x + number", found)

    def both(first: Any, second: Any) -> list[float]:
        compiled = torch.compile(lambda x: first(x) + 10 * second(x), backend="eager", fullgraph=True)
        return [float(compiled(torch.zeros(()))), float(first(0))]

    assert launch(both, (one["add"], two["add"]), nprocs=1) == [[21.0, 1.0]]


def test_what_a_script_defines_in_a_worker_comes_home() -> None:
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, found)
    [(made, define)] = launch(found["define"], nprocs=1)
    assert type(made).__name__ == "Made"
    assert define.__globals__["__name__"] == "__main__"
    assert launch(found["scale_now"], nprocs=1) == [1.0]


def test_the_source_of_a_cell_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's cells are files that only linecache has."""
    name, text = "<cell 1>", "def broken():\n    raise ValueError('in a ' + 'cell')\n"
    monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name))
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), found)
    with pytest.raises(LaunchError, match=r"raise ValueError\('in a ' \+ 'cell'\)\n(.*\n)*.*ValueError: in a cell"):
        launch(found["broken"], nprocs=2)


def test_what_a_call_of_a_script_named_is_let_go_after_it() -> None:
    class Large:
        pass

    found: dict[str, Any] = {"__name__": "__main__", "large": Large(), "sys": sys, "weakref": weakref}
    exec("def use():\n    sys.large = weakref.ref(large)", found)
    exec("def gone():\n    return sys.large() is None, [n for n in sys.modules if n[:8] == '__main__' != n]", found)
    with fsdp.workers(nprocs=1) as w:
        w(found["use"])
        dropped, modules = w(found["gone"])
        assert dropped.get() == [True]
        assert len(modules.get()[0]) == 1  # that of this call


def test_a_class_of_the_callers_comes_home_as_itself() -> None:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

        def double(self) -> int:
            return 2 * self.x

    class Color(enum.Enum):
        RED = "r"

    double = Point.double
    for point, color, cls in launch(lambda: (Point(3), Color.RED, Point), nprocs=2):
        assert type(point) is cls is Point
        assert color is Color.RED
        assert point.double() == 6
    assert Point.double is double  # and is the caller's still


def test_autograd_functions_by_value() -> None:
    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 3

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * 3

    def work() -> float:
        x = torch.ones((), requires_grad=True)
        return torch.autograd.grad(Triple.apply(x), x)[0].item()

    assert launch(work, nprocs=2) == [3.0, 3.0]


def test_what_can_be_imported_goes_by_name() -> None:
    for obj in (rank_and_sum, torch.nn.Linear, launch, functools.reduce, type(None), Path):
        assert _transfer.loads(_transfer.dumps(obj)) is obj


def test_only_globals_that_the_code_names_travel() -> None:
    scope = {"lock": threading.Lock(), "__name__": "__main__"}
    exec("def f(x):\n    return x.lock", scope)
    assert _transfer.loads(_transfer.dumps(scope["f"]))(types.SimpleNamespace(lock=1)) == 1


def test_what_cannot_be_sent() -> None:
    lock = threading.Lock()
    with pytest.raises(
        TypeError, match=r"<lambda>\) cannot be sent to the workers: cannot pickle .*lock.* inside the function"
    ):
        launch(lambda: lock, nprocs=2)
    with pytest.raises(LaunchError, match=r"what it returned cannot be sent back: cannot pickle"):
        launch(threading.Lock, nprocs=2)


# ------------------------------------------------------------------------------------------------------------- output


def test_output_of_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        print("one", 1)
        print("two", end="")
        print("err", file=sys.stderr)

    launch(work, nprocs=2)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[rank 1] one 1", "[rank 1] two", "one 1", "two"]
    assert sorted(err.splitlines()) == ["[rank 1] err", "err"]


# ----------------------------------------------------------------------------------------------------------- failures


def test_every_failing_rank_is_shown_and_the_workers_live_on(tmp_path: Path) -> None:
    def deep(rank: int) -> None:
        raise ValueError(f"boom {rank}")

    def work(first: Path) -> None:
        rank = int(os.environ["RANK"])
        if rank:
            first.touch()
        else:
            while not first.exists():
                time.sleep(0.01)
            time.sleep(0.3)  # the other has told its error
        deep(rank)

    pids = launch(os.getpid, nprocs=2)
    with pytest.raises(LaunchError, match=r"launch\(.*work\): rank 1 of 2 failed: ValueError: boom 1\n") as caught:
        launch(work, (tmp_path / "first",), nprocs=2)
    assert caught.value.rank == 1
    assert list(caught.value.reports) == [1, 0]
    for rank, report in caught.value.reports.items():
        assert report.startswith("Traceback")
        assert "in deep" in report
        assert report.endswith(f"ValueError: boom {rank}")
        assert report in str(caught.value)
    assert launch(os.getpid, nprocs=2) == pids


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_leaving_is_a_failure_too(stop: type[BaseException]) -> None:
    def work() -> None:
        raise stop

    with pytest.raises(LaunchError, match=stop.__name__):
        launch(work, nprocs=2)


def takes_two_steps() -> list[str]:
    """One rank raises between the steps of two states, and goes on."""
    one, two = (fsdp.shard({"a": torch.ones(4)}, fsdp.Spec(local_mesh("cpu")), fsdp.sgd(lr=0.1)) for _ in range(2))
    said = []
    for number in range(2):
        try:
            state, params = fsdp.unshard(one)
            other, others = fsdp.unshard(two)
            state, other = fsdp.reduce(state, params), fsdp.reduce(other, others)
            one = fsdp.step(state)
            if number == 0 and local_mesh("cpu").get_rank() == 1:
                raise ValueError("between the steps")
            two = fsdp.step(other)
        except (fsdp.ScheduleError, ValueError) as error:
            said.append(str(error))
            if isinstance(error, fsdp.ScheduleError):
                break
    return said


def test_an_error_between_the_steps_of_two_states_is_explained() -> None:
    zero, one = launch(takes_two_steps, nprocs=2)
    hint = "There are 2 states on this mesh: if a rank raised after the step of one of them"
    assert [hint in said for said in zero] == [True]
    assert [hint in said for said in one] == [False, True]


def test_a_rank_that_fails_while_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pool, "GRACE", 0.5)
    monkeypatch.setattr(_pool, "STOPPED", 0.5)

    def work() -> None:
        if local_mesh().get_rank() == 1:
            raise ValueError("boom")
        dist.barrier()

    pids = launch(os.getpid, nprocs=2)
    with pytest.raises(LaunchError, match=r"(?s)rank 1 of 2 failed.*still running: rank 0.*starts new ones"):
        launch(work, nprocs=2)
    assert not set(launch(os.getpid, nprocs=2)) & set(pids)


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os._exit(3), "exited with code 3"),
    ],
)
def test_a_rank_that_dies(end: Any, text: str) -> None:
    def work() -> None:
        if local_mesh().get_rank() == 1:
            end()
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(LaunchError, match=rf"rank 1 of 2 failed: the process {text}"):
        launch(work, nprocs=2)
    assert time.monotonic() - start < 60  # a collective waits ten times as long
    assert launch(rank_and_sum, nprocs=2) == [(0, 3.0), (1, 3.0)]


def test_a_worker_that_dies_between_calls_is_replaced() -> None:
    pids = launch(os.getpid, nprocs=2)
    os.kill(pids[0], signal.SIGKILL)
    deadline = time.monotonic() + 60
    pool = _launch._kept[os.getpid(), 2, False]._pool
    while pool is not None and pool.alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(launch(os.getpid, nprocs=2)) & set(pids)


def strike(folder: Path, ranks: int) -> threading.Thread:
    """Ctrl-C in the caller, once all ranks have left a file in the folder."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while len(os.listdir(folder)) < ranks and time.monotonic() < deadline:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def asleep(folder: str) -> None:
    Path(folder, os.environ["RANK"]).touch()
    time.sleep(60)


@pytest.mark.parametrize("midway", [False, True], ids=["", "midway"])
def test_interrupting_the_caller_stops_the_call_and_keeps_the_workers(tmp_path: Path, midway: bool) -> None:
    """Also where the caller has a step of its own under way, during which the handler of SIGINT is another."""
    pids = launch(os.getpid, nprocs=2)
    state = fsdp.shard({"a": torch.ones(3)}, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    if midway:
        state, _ = fsdp.unshard(state)
    handler = signal.getsignal(signal.SIGINT)
    assert not midway or handler is not signal.default_int_handler
    thread = strike(tmp_path, 2)
    with pytest.raises(KeyboardInterrupt, match=r"launch\(asleep\): all 2 ranks have stopped"):
        launch(asleep, (str(tmp_path),), nprocs=2)
    thread.join()
    assert signal.getsignal(signal.SIGINT) is handler
    if midway:
        fsdp.step(fsdp.reduce(state, {"a": torch.ones(3)}))
    assert launch(os.getpid, nprocs=2) == pids
    assert launch(rank_and_sum, nprocs=2) == [(0, 3.0), (1, 3.0)]


def blocked(folder: str) -> None:
    """Waits where no interrupt comes through."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path(folder, os.environ["RANK"]).touch()
    time.sleep(600)


def test_ranks_that_cannot_be_stopped_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pool, "GRACE", 0.5)
    monkeypatch.setattr(_pool, "STOPPED", 0.5)
    pids = launch(os.getpid, nprocs=2)
    thread = strike(tmp_path, 2)
    with pytest.raises(KeyboardInterrupt, match=r"rank 0, 1 did not stop in time, so the workers are gone"):
        launch(blocked, (str(tmp_path),), nprocs=2)
    thread.join()
    monkeypatch.undo()
    deadline = time.monotonic() + 20
    while any(running(str(pid)) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(running(str(pid)) for pid in pids)


ENDS = {
    "normal": "",
    "exception": "raise SystemExit(3)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGKILL in a call": "threading.Timer(1, os.kill, [os.getpid(), 9]).start(); f.launch(stuck, nprocs=2)",
    "SIGKILL of a worker": "os.kill(pids[0], signal.SIGKILL)",
}
if not FULL:  # each imports torch anew
    ENDS = {end: ENDS[end] for end in ("SIGKILL in a call", "SIGKILL of a worker")}
PROGRAMS = """  # forks of a process that has imported all and done nothing
import os, signal, sys, tempfile, threading, torch, torch.distributed as dist, functional_fsdp as f

def stuck():
    state = f.shard({"w": torch.ones(300)}, f.Spec(f.local_mesh(), transport="copy_engine"))
    if dist.get_rank():
        signal.pause()
    f.full_params(f.unshard(state, "w")[0])

for out, folder, how in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3]):
    if not os.fork():
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT), 1)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        pids = f.launch(os.getpid, nprocs=2)
        f.launch(lambda: f.shard({"w": torch.ones(300)}, f.Spec(f.local_mesh())).units, nprocs=2)
        print(*pids, *f.launch(os.getpid, nprocs=1), flush=True)
        exec(how)
        break
else:
    for _ in sys.argv[1::3]:
        os.wait()
"""


def running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nothing_stays_behind_however_the_caller_ends(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    folders = {end: tmp_path / end.replace(" ", "_") for end in ENDS}
    given: list[str] = []
    for end, folder in folders.items():
        folder.mkdir()
        given += [f"{folder}.out", str(folder), ENDS[end]]
    shared = set(os.listdir("/dev/shm"))
    subprocess.run(
        [sys.executable, "-c", PROGRAMS, *given], env=environment | {"PYTHONPATH": str(ROOT)}, check=True,
        stderr=subprocess.DEVNULL, timeout=250,
    )  # fmt: skip
    for end, folder in folders.items():
        pids = Path(f"{folder}.out").read_text().split()
        assert len(pids) == 3, end
        deadline = time.monotonic() + 60
        while any(map(running, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not list(filter(running, pids)), end
        assert not os.listdir(folder), end
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if "functional" in name]


# ---------------------------------------------------------------------------------------------------- threads, forks


def test_calls_from_several_threads_take_turns() -> None:
    def work(i: int, nproc: int) -> tuple[int, int, str]:
        time.sleep(0.05)
        if i == 2:
            raise ValueError("one of them")
        return i, int(os.environ["RANK"]), os.environ["WORLD_SIZE"]

    found: dict[int, Any] = {}

    def call(i: int) -> None:
        try:
            found[i] = launch(work, (i, 2 + i % 2), nprocs=2 + i % 2)
        except LaunchError as error:
            found[i] = str(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert "failed: ValueError: one of them" in found.pop(2)
    for i, results in found.items():
        assert results == [(i, rank, str(2 + i % 2)) for rank in range(2 + i % 2)]
    assert len(found) == 5


def test_a_worker_killed_under_one_thread_does_not_concern_another() -> None:
    found: dict[str, Any] = {}

    def die() -> None:
        try:
            launch(lambda: os.kill(os.getpid(), signal.SIGKILL), nprocs=2)
        except LaunchError as error:
            found["die"] = str(error)

    launch(os.getpid, nprocs=2)
    threads = [
        threading.Thread(target=die),
        threading.Thread(target=lambda: found.update(sum=launch(rank_and_sum, nprocs=2))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert "was killed by SIGKILL" in found["die"]
    assert found["sum"] == [(0, 3.0), (1, 3.0)]


def test_a_call_inside_a_call_is_refused() -> None:
    met: list[str] = []

    def again(*_: Any) -> None:
        with pytest.raises(RuntimeError, match=r"launch\(getpid\): this thread is inside launch\(sleep\)") as error:
            launch(os.getpid, nprocs=2)
        met.append(str(error.value))

    launch(os.getpid, nprocs=2)
    before = signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        launch(time.sleep, (0.8,), nprocs=2)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(met) == 1
    assert len(launch(os.getpid, nprocs=2)) == 2


@pytest.mark.large
def test_a_child_of_the_caller_has_workers_of_its_own() -> None:
    """Forked while another thread is inside launch, and so holds its lock; the child's end is not the workers' end."""
    printed = run_script("""
        import os, sys, threading, time, warnings
        from functional_fsdp import launch

        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads
        mine = launch(os.getpid, nprocs=2)
        slow = lambda: (time.sleep(2), os.getpid())[1]
        thread = threading.Thread(target=lambda: print(launch(slow, nprocs=2) == mine))
        thread.start()
        time.sleep(0.5)
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0
            thread.join()
            assert launch(os.getpid, nprocs=2) == mine
        else:
            print(len(set(launch(os.getpid, nprocs=2)) - set(mine)), flush=True)
            sys.exit()
    """)
    assert sorted(printed.split()) == ["2", "True"]


# ------------------------------------------------------------------------------------------------------------- numpy

WITHOUT_NUMPY = """
    import sys
    import warnings

    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    import torch
    import functional_fsdp as fsdp
    from functional_fsdp import transforms as T

    def train(folder):
        mesh = fsdp.local_mesh()
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 1))
        params, model = fsdp.functionalize(module)
        state = fsdp.shard(params, fsdp.Spec(mesh), fsdp.adamw(lr=1e-2), buffers=fsdp.buffers(module))
        forward_backward = T.forward_backward(model, lambda model, x: model(x).square().mean())
        for step in range(2):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(mesh.get_rank()))
            state, loss = forward_backward(state, x)
            state, norm = T.clip_by_global_norm(state, 1.0)
            state = fsdp.step(state)
            state, loss = fsdp.pmean(state, loss)
        fsdp.save(state, folder)
        again = fsdp.full_params(fsdp.load(folder, like=state))
        state, _ = fsdp.init(lambda: torch.nn.Linear(3, 3), fsdp.Spec(mesh, fsdp.ddp("data")), seed=0)
        return fsdp.full_params(state)["weight"].shape, again, loss

    (_, one, loss), (_, two, other) = fsdp.launch(train, (sys.argv[1],), nprocs=2)
    assert loss == other and all(torch.equal(one[key], two[key]) for key in one)
    assert "numpy" not in sys.modules
    print(len(one))
"""


@pytest.mark.large
def test_without_numpy(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('not here')")
    assert run_script(WITHOUT_NUMPY, "-", str(tmp_path / "saved"), path=tmp_path) == "6\n"


def test_a_rank_does_not_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"launch: this process already is rank 1 of 4. Call the function itself"):
        launch(rank_and_sum, nprocs=2)


def test_nprocs_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"launch: nprocs is 0; expected the number of ranks, at least 1"):
        launch(rank_and_sum, nprocs=0)


def test_the_number_of_ranks_is_no_argument() -> None:
    with pytest.raises(TypeError, match=r"args is 2; expected a tuple, .* The number of ranks is nprocs="):
        launch(rank_and_sum, args=2)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------------- local_mesh


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"a": 3}, r"local_mesh\(a=3\): the sizes multiply to 3, the world has 4 rank\(s\). Make it exactly that"),
        ({"a": 3, "b": -1}, r"local_mesh\(a=3, b=-1\): the sizes multiply to 3, the world has 4 .* a divisor"),
        ({"a": -1, "b": -1}, r"a and b are all -1"),
        ({"a": 0}, r"a=0 is no size"),
        ({"a": 2.0, "b": 2}, r"a=2.0 is no size"),
    ],
)
def test_sizes_that_do_not_fit(axes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _launch._sizes(axes, 4)


def test_axes_outermost_first() -> None:
    def work() -> tuple[Any, list[int], int, int]:
        mesh = local_mesh(replica=2, shard=-1)
        return mesh.mesh_dim_names, mesh.mesh.flatten().tolist(), mesh["replica"].get_local_rank(), mesh["shard"].size()

    names = ("replica", "shard")
    assert launch(work, nprocs=4) == [(names, [0, 1, 2, 3], rank // 2, 2) for rank in range(4)]


@pytest.mark.large
def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from functional_fsdp import local_mesh\n"
        "mesh = local_mesh(replica=2, shard=-1)\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total, group=mesh['replica'].get_group())\n"
        "print(f'rank {mesh.get_rank()} total {total.item()}\\n', end='')\n"
        "dist.destroy_process_group()\n"
    )
    printed = run_script("", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script))
    assert sorted(printed.splitlines()) == ["rank 0 total 2.0", "rank 1 total 2.0"]


def timeouts_of_axes() -> list[str]:
    mesh = fsdp.local_mesh(replica=2, shard=2)
    groups: Any = [mesh.get_group(axis) for axis in ("replica", "shard")]
    whole = fsdp.local_mesh(one=1, all=4)
    assert whole.get_group("all") is dist.group.WORLD
    return [str(group._get_backend(torch.device("cpu")).options._timeout) for group in groups]


def test_groups_of_a_meshs_axes_wait_as_long_as_that_of_all_ranks() -> None:
    """torch's own would wait for half an hour, for a rank that died while they were made."""
    _launch.stop_workers()  # else their group is there, with its own timeout
    assert launch(timeouts_of_axes, nprocs=4, timeout=77) == [["0:01:17"] * 2] * 4
    _launch.stop_workers()
