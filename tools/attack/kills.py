"""kills: SIGKILL of a rank, or of the process that launched the ranks, at a random moment.

The ranks are processes of this module's own (launch ends the others at once, and what they would meet is the question):
whoever is left must raise an error of the package within some seconds, and what they computed until then must be right.
With `launch` the caller must get a LaunchError, and nothing may stay behind: no process, file descriptor or folder.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

from . import interrupts, trained
from .forks import fork
from .verdict import SCALE, Verdict, documented

Case = dict[str, Any]
ALONE = True  # these cases make their own processes
SOON = 5.0 * SCALE  # seconds within which whoever is left has to say that a rank is gone
MAKING = 6.0 * SCALE  # the timeout while communicators are made, for which a rank that died before is waited for
AFTER = 3  # steps that whoever is left tries after what was killed
DURING = ("step",) * 6 + ("shard", "shard", "init", "local_mesh", "save", "load", "full", "eval")


def draw(seed: int, index: int) -> Case:
    """The case of this seed and index."""
    rng = Random(f"kills:{seed}:{index}")
    world = rng.choice((2, 2, 3, 4))
    whom = rng.choice(("rank",) * 7 + ("launched", "parent", "parent"))
    return {
        "kind": "kills", "world": world, "whom": whom, "during": rng.choice(DURING), "way": rng.choice(trained.WAYS),
        "preset": rng.choice(trained.PRESETS), "prefetch": rng.choice((0, 1, 2)), "micros": rng.choice((1, 2)),
        "transport": "copy_engine" if rng.random() < 0.35 else "collective", "victim": rng.randrange(world),
        "at": round(rng.random(), 4), "store": "tcp" if rng.random() < 0.25 else "file",
    }  # fmt: skip


def play(case: Case, rank: int, folder: str) -> Verdict:
    """In a process of the harness's, which has no process group: `harness.play_here`."""
    if case["whom"] == "rank":
        return _ranks(case, folder)
    return _launched(case, folder) if case["whom"] == "launched" else _parent(case, folder)


def smaller(case: Case) -> list[Case]:
    """Simpler cases."""
    plain = {"transport": "collective", "prefetch": 1, "micros": 1, "preset": "zero3", "store": "file", "world": 2}
    return [
        {**case, key: value, "victim": min(case["victim"], 1)} for key, value in plain.items() if case[key] != value
    ]


# ---------------------------------------------------------------- ranks that are forked here


def _ranks(case: Case, folder: str) -> Verdict:
    port = _free_port() if case["store"] == "tcp" else 0
    world, victim = case["world"], case["victim"]
    pids = [fork(lambda r=rank: _rank(case, r, folder, port)) for rank in range(world)]  # type: ignore[misc]
    ends: dict[int, tuple[int, float]] = {}
    limit = time.monotonic() + 45 * SCALE
    while len(ends) < world and time.monotonic() < limit:
        for rank, pid in enumerate(pids):
            if rank not in ends:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ends[rank] = status, time.monotonic()
                    if rank == victim and os.WIFSIGNALED(status):
                        limit = time.monotonic() + _soon(case) + 1
        time.sleep(0.01)
    left = [rank for rank in range(world) if rank not in ends]
    for sent, pause in ((signal.SIGUSR1, 0.2), (signal.SIGKILL, 0.0)):
        for rank in left:
            os.kill(pids[rank], sent)
        time.sleep(pause if left else 0)
    for rank in left:
        os.waitpid(pids[rank], 0)
    if victim not in ends:
        return Verdict(
            "hang", f"before the kill: {'; '.join(_stack(folder, rank) for rank in left)}"[:900], clean=False
        )
    if not os.WIFSIGNALED(ends[victim][0]):
        said = _said(folder, victim)
        if said.get("armed"):
            return Verdict("right", "the moment never came", {"missed": True})
        return Verdict("raw", f"before the kill: {said.get('error')}", clean=False)
    return _judged(case, folder, ends, left)


def _judged(case: Case, folder: str, ends: dict[int, tuple[int, float]], left: list[int]) -> Verdict:
    died = ends[case["victim"]][1] if case["victim"] in ends else 0.0
    problems: list[tuple[str, str]] = []
    for rank in range(case["world"]):
        said = _said(folder, rank)
        if rank == case["victim"]:
            continue
        if rank in left:
            problems.append(("hang", f"rank {rank} is in {_stack(folder, rank)}"))
        elif os.WIFSIGNALED(ends[rank][0]):
            problems.append(("crash", f"rank {rank} died of signal {os.WTERMSIG(ends[rank][0])}"))
        elif said.get("wrong"):
            problems.append(("wrong", f"rank {rank}: {said['wrong']}"))
        elif not said.get("error"):
            problems.append(("accepted", f"rank {rank} went on as if nothing had happened: {said}"))
        elif not said["documented"]:
            problems.append(("raw", f"rank {rank}: {said['error']}"))
        elif ends[rank][1] - died > _soon(case):
            problems.append(("hang", f"rank {rank} after {ends[rank][1] - died:.1f} s: {said['error']}"))
    if not problems:
        said = _said(folder, (case["victim"] + 1) % case["world"])
        return Verdict("right", str(said.get("error"))[:200])
    order = ("wrong", "crash", "hang", "raw", "accepted")
    column = min((column for column, _ in problems), key=order.index)
    return Verdict(column, "; ".join(text for _, text in problems)[:900], clean=False)


def _soon(case: Case) -> float:
    return SOON + (MAKING if case["during"] == "local_mesh" else 0)


def _said(folder: str, rank: int) -> dict[str, Any]:
    path = os.path.join(folder, f"rank{rank}.json")
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        return json.load(file)


def _stack(folder: str, rank: int) -> str:
    with open(os.path.join(folder, f"stack{rank}")) as file:
        lines = [line.split('"') for line in file if 'File "' in line]
    return " < ".join(f"{line[1].rsplit('/', 1)[-1]}:{line[2].split('line ')[-1].strip()}" for line in lines[:8])


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _rank(case: Case, rank: int, folder: str, port: int) -> None:
    """The life of a rank: an undisturbed run, then the one that is killed; a file says how it ended."""
    stacks = open(os.path.join(folder, f"stack{rank}"), "w")  # noqa: SIM115 (as long as the handler)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
    said = os.open(os.path.join(folder, f"said{rank}"), os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(said, descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    told: dict[str, Any] = {"rank": rank}

    def tell(**more: Any) -> None:
        told.update(more)
        path = os.path.join(folder, f"rank{rank}.json")
        with open(path + ".new", "w") as file:
            json.dump(told, file)
        os.replace(path + ".new", path)

    world, patience = case["world"], MAKING if case["during"] == "local_mesh" else 60.0
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    os.environ.pop("FUNCTIONAL_FSDP_STORE", None)
    try:
        if case["store"] == "tcp":
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            store: Any = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]
        else:
            store = dist.FileStore(os.path.join(folder, "store"), world)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=patience))
        _attacked(case, rank, folder, tell)
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno} {f.name}" for f in reversed(frames[-7:]))
        known = documented(error, *((OSError,) if case["during"] in ("save", "load") else ()))
        tell(error=f"{type(error).__name__}: {str(error)[:300]} | {where}", documented=known)


def _attacked(case: Case, rank: int, folder: str, tell: Callable[..., None]) -> None:
    mine, during = rank == case["victim"], case["during"]
    if during == "local_mesh":
        if mine:
            tell(armed=True)
            _timer(0.15 * case["at"])
        trained.make(case)
    counter = interrupts.Counter()
    state, model = trained.make(case)
    step = trained.steps_of(case, model, rank)
    want = []
    for number in range(AFTER):
        with counter if during == "step" and number == 1 else contextlib.nullcontext():
            state = step(state, number)
        want.append(trained.digest(state))
    if during != "step":
        with counter:
            _once(case, state, model, rank, folder, "warm")
    state, model = trained.make(case)
    step = trained.steps_of(case, model, rank)
    state = step(state, 0)
    trap: Any = contextlib.nullcontext()
    if mine:
        tell(armed=True)
        trap = Killer(1 + int(case["at"] * counter.count))
    with trap:
        state = step(state, 1) if during == "step" else _once(case, state, model, rank, folder, "killed")
    for number in range(2 if during == "step" else 1, AFTER):
        tell(**_right(state, want, number))
        state = step(state, number)
    tell(**_right(state, want, AFTER))
    for number in range(AFTER):
        state = step(state, number)


def _right(state: fsdp.State, want: list[str], steps: int) -> dict[str, str]:
    same = trained.digest(state) == want[steps - 1]
    return {} if same else {"wrong": f"after {steps} steps other bits than undisturbed"}


def _once(case: Case, state: fsdp.State, model: Any, rank: int, folder: str, name: str) -> fsdp.State:
    during = case["during"]
    if during == "shard":
        trained.make(case)
    elif during == "init":
        mesh, placement = trained.mesh_of(case["preset"], case["world"])
        fsdp.init(trained.Net, fsdp.Spec(mesh, placement), fsdp.adamw())
    elif during == "save":
        fsdp.save(state, os.path.join(folder, name))
    elif during == "load":
        saved = os.path.join(folder, "saved")
        if name == "warm":
            fsdp.save(state, saved)
        fsdp.load(saved, like=state)
    elif during == "full":
        fsdp.full_params(state)
    elif during == "eval":
        T.apply(model)(state, trained.batch(case, 9, rank, 0))
    return state


class Killer(interrupts.Counter):
    """Kills this process at the line numbered `at`."""

    def __init__(self, at: int) -> None:
        super().__init__(at, None)

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.count >= self.at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._line


def _timer(seconds: float) -> None:
    timer = threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGKILL])
    timer.daemon = True
    timer.start()


# ---------------------------------------------------------------- ranks of `launch`


def _on_launched(case: Case, folder: str, killed: bool) -> None:
    rank = int(os.environ["RANK"])
    with open(os.path.join(folder, f"pid{rank}"), "w") as file:
        file.write(str(os.getpid()))
    state, model = trained.make(case)
    step = trained.steps_of(case, model, rank)
    state = step(state, 0)
    if killed and rank == case["victim"]:
        _timer(0.05 * case["at"])
    number = 0
    while True:
        state, number = step(state, number % 3), number + 1


def _launched(case: Case, folder: str) -> Verdict:
    fsdp.launch(os.getpid, nprocs=1)  # what starts workers stays
    before, begun = _descriptors(), time.monotonic()
    try:
        fsdp.launch(_on_launched, (case, folder, True), nprocs=case["world"], timeout=60)
    except fsdp.LaunchError as error:
        if "SIGKILL" not in str(error):
            return Verdict("raw", f"launch does not name what happened: {str(error)[:300]}", clean=False)
    if time.monotonic() - begun > 2 * SOON + 5:
        return Verdict(
            "hang", f"launch took {time.monotonic() - begun:.1f} s to say that a rank was killed", clean=False
        )
    kept = _left(_pids(case, folder))
    if kept:
        return Verdict("crash", f"launch left the processes {kept} behind", clean=False)
    if len(new := _descriptors() - before) > 0:
        return Verdict("crash", f"launch left descriptors behind: {sorted(new)[:5]}", clean=False)
    return Verdict("right")


def _descriptors() -> set[tuple[str, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


def _pids(case: Case, folder: str) -> list[int]:
    found = []
    for rank in range(case["world"]):
        path = os.path.join(folder, f"pid{rank}")
        if os.path.exists(path):
            with open(path) as file:
                found.append(int(file.read() or 0))
    return [pid for pid in found if pid]


def _left(pids: list[int]) -> list[int]:
    """Which processes are still there after some seconds; they are ended."""

    def there(pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    deadline = time.monotonic() + SOON
    while any(map(there, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    kept = [pid for pid in pids if there(pid)]
    for pid in kept:
        os.kill(pid, signal.SIGKILL)
    return kept


def _parent(case: Case, folder: str) -> Verdict:
    """A caller of launch that is killed while its ranks train, or wait for each other."""
    temporary = os.path.join(folder, "temporary")
    os.mkdir(temporary)

    def caller() -> NoReturn:
        os.environ["TMPDIR"] = temporary
        tempfile.tempdir = None
        try:
            fsdp.launch(_on_launched, (case, folder, False), nprocs=case["world"], timeout=60)
        finally:
            os._exit(1)

    pid = fork(caller)
    deadline = time.monotonic() + 15 * SCALE
    while len(_pids(case, folder)) < case["world"] and time.monotonic() < deadline:
        time.sleep(0.01)
    pids = _pids(case, folder)
    time.sleep(0.5 * case["at"])
    os.kill(pid, signal.SIGKILL if case["prefetch"] else signal.SIGTERM)
    os.waitpid(pid, 0)
    kept = _left(pids)
    if kept or len(pids) < case["world"]:
        return Verdict(
            "crash", f"{len(kept)} of {len(pids)} ranks outlived the process that launched them", clean=False
        )
    if files := os.listdir(temporary):
        return Verdict("crash", f"left in the temporary folder: {files}", clean=False)
    return Verdict("right")
