"""Harness: cases on ranks, under a watchdog.

      this process                         rank r (of `workers`)
        |---- a batch of cases ------------->|  for each case: say so on the board, play it, write the verdict to a file
        |  a thread looks at the board       |  then wait on the board until every rank has a verdict
        |  and kills ranks that are late     |  go on if all are clean, else end: fresh ranks do the rest

The board is a file mapped into memory: [case, done, clean, deadline, pid] of each rank. It is no part of the
package: ranks cannot be in different cases, whatever the package does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import functional_fsdp as fsdp

from . import forks
from .verdict import LATE, LIMIT, PATIENCE, SCALE, STARVED, Verdict, judged, worst

Case = dict[str, Any]
KINDS = (
    "specs",
    "driven",
    "functions",
    "objects",
    "buffers",
    "written",
    "remat",
    "interrupts",
    "kills",
    "files",
    "differ",
)
SIMULATED = ("specs", "driven")  # kinds that are played on simulated ranks, too
CELLS = 5


def module_of(kind: str) -> Any:
    """The module with a kind's `draw`, `play` and `smaller`."""
    return importlib.import_module(f"attack.{kind}")


def draw(kind: str, seed: int, index: int) -> Case:
    """A case, as a value."""
    case: Case = module_of(kind).draw(seed, index)
    known = os.environ.get("ATTACK_WITHOUT", "").split(",")
    case = getattr(module_of(kind), "without", lambda case, names: case)(case, known)
    return {**case, "name": f"{kind}:{seed}:{index}"}


class Board:
    """What every rank of a batch is doing."""

    def __init__(self, folder: str, world: int) -> None:
        path = os.path.join(folder, "board")
        if not os.path.exists(path):
            with open(path, "wb") as file:
                file.write(bytes(8 * CELLS * world))
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)
        self.cells = memoryview(self.memory).cast("q")
        self.world = world

    def close(self) -> None:
        self.cells.release()
        self.memory.close()

    def set(self, rank: int, cell: int, value: int) -> None:
        self.cells[CELLS * rank + cell] = value

    def get(self, cell: int) -> list[int]:
        return [self.cells[CELLS * rank + cell] for rank in range(self.world)]

    def late(self) -> bool:
        """Whether a rank is over its time."""
        now = time.monotonic_ns()
        case, done, deadline = self.get(0), self.get(1), self.get(3)
        return any(case[r] > done[r] and 0 < deadline[r] < now for r in range(self.world))


def _on_a_rank(cases: list[Case], folder: str) -> int:
    """Plays cases until one leaves the ranks unclean. Returns how many were played."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    board = Board(folder, world)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    stacks = open(os.path.join(folder, f"stack{rank}"), "w")  # noqa: SIM115 (open for as long as the handler is)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
    board.set(rank, 4, os.getpid())
    out_there = os.open(os.path.join(folder, f"said{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(out_there, descriptor)
    os.close(out_there)
    with (
        contextlib.redirect_stdout(open(os.devnull, "w")),
        contextlib.redirect_stderr(open(os.devnull, "w")),
        open(os.path.join(folder, f"verdicts{rank}"), "a") as out,
    ):
        for number, case in enumerate(cases, 1):
            begun, waited = time.monotonic(), _waited()
            board.set(rank, 3, time.monotonic_ns() + int(1e9 * SCALE * case.get("patience", LIMIT / SCALE)))
            board.set(rank, 0, number)
            inside = os.path.join(folder, f"case{number}")
            try:
                verdict = module_of(case["kind"]).play(case, rank, inside)
            except BaseException as error:
                verdict = judged(error, time.monotonic() - begun, 0.7 * PATIENCE)
            if verdict.column == "hang" and _waited() - waited > STARVED:
                verdict.text = f"{LATE}: waited {_waited() - waited:.1f} s for a core: {verdict.text}"
            out.write(json.dumps({**verdict.plain(), "seconds": time.monotonic() - begun}) + "\n")
            out.flush()
            board.set(rank, 2, int(verdict.clean))
            board.set(rank, 1, number)
            while min(board.get(1)) < number:
                time.sleep(0.0005)
            if not all(board.get(2)):
                return number
            shutil.rmtree(inside, ignore_errors=True)
    return len(cases)


def _waited() -> float:
    """Seconds that this thread could have run in, and had no core."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def play(cases: list[Case]) -> list[Verdict]:
    """The verdicts of cases of one kind and world, in order."""
    verdicts: list[Verdict] = []
    if orders := [*filter(None, os.environ.get("ATTACK_ORDERS", "").split(","))]:
        return [_in_orders(case, orders) for case in cases]
    if cases and getattr(module_of(cases[0]["kind"]), "ALONE", False):
        return [_alone(case) for case in cases]
    while len(verdicts) < len(cases):
        verdicts += _batch(cases[len(verdicts) :])
    return verdicts


def play_one(case: Case) -> Verdict:
    """A case alone, on fresh ranks."""
    _fresh(case["world"])
    return play([case])[0]


def _in_orders(case: Case, orders: list[str]) -> Verdict:
    """The verdict on simulated ranks, in orders of turns as "ranks" and "random:3": the first that is not fine."""
    if any(model["settings"]["traced"] for model in case.get("models", ())):
        return Verdict("right", "not played: simulated ranks do not wait for each other in a compiled step")
    verdict, begun = Verdict("right"), time.monotonic()
    for said in orders:
        order, _, seed = said.partition(":")
        (verdict,) = play_simulated([case], order, int(seed or 0))
        if not verdict.fine:
            verdict.text = f"in the order {said}: {verdict.text}"
            break
    verdict.notes["seconds"] = time.monotonic() - begun
    return verdict


def _alone(case: Case) -> Verdict:
    """A case that makes its own processes, by forking one that has no process group, which children would inherit."""
    begun = time.monotonic()
    folder = tempfile.mkdtemp(prefix="attack-")
    try:
        if forks.used:
            forks.wait(forks.fork(lambda: play_here(case, folder)))
        else:
            given = json.dumps([case, folder, sys.path])
            subprocess.run([sys.executable, "-c", PROGRAM, given], check=True)
        verdict = Verdict(**json.loads(Path(folder, "verdict").read_text()))
    except (OSError, subprocess.CalledProcessError) as error:
        verdict = Verdict("crash", f"the process that plays the case: {error}", clean=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    verdict.notes["seconds"] = time.monotonic() - begun
    return verdict


PROGRAM = """import json, sys
given = json.loads(sys.argv[1])
sys.path[:] = given.pop()
import attack.harness
attack.harness.play_here(*given)"""


def play_here(case: Case, folder: str) -> None:
    """Plays a case that makes its own processes in this one, and leaves the verdict in the folder."""
    begun = time.monotonic()
    try:
        verdict: Verdict = module_of(case["kind"]).play(case, 0, folder)
    except BaseException as error:
        verdict = judged(error, time.monotonic() - begun, PATIENCE)
    Path(folder, "verdict").write_text(json.dumps(verdict.plain()))


_ranks: dict[int, Any] = {}  # the ranks that play now, by world


def _fresh(world: int) -> None:
    """The next case of this world has new ranks."""
    if world in _ranks:
        _ranks.pop(world).close()


def _batch(cases: list[Case]) -> list[Verdict]:
    """The verdicts of the first cases, at least one: until the ranks have to be fresh."""
    world, folder = cases[0]["world"], tempfile.mkdtemp(prefix="attack-")
    board = Board(folder, world)
    if world not in _ranks:
        _ranks[world] = fsdp.workers(world, timeout=PATIENCE)
    over, hung = threading.Event(), threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            if board.late():
                hung.set()
                pids = [pid for pid in board.get(4) if pid]
                for pid in pids:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGUSR1)
                time.sleep(0.1)
                for pid in pids:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    death = ""
    try:
        _ranks[world](_on_a_rank, cases, folder)
    except fsdp.LaunchError as error:
        death = str(error)
    finally:
        over.set()
        watcher.join()
    done = min(board.get(1))
    clean = all(board.get(2)) and not death
    stuck, started = board.get(1), max(board.get(0))
    board.close()
    verdicts = _read(folder, world, done)
    if death:
        number = max(started, done + 1)
        if len(verdicts) < number <= len(cases):
            verdicts.append(_lost(folder, world, stuck, number, hung.is_set(), death))
    if not clean:
        _fresh(world)
    shutil.rmtree(folder, ignore_errors=True)
    return verdicts or [Verdict("crash", f"the ranks failed before the first case: {death[:300]}", clean=False)]


def _read(folder: str, world: int, done: int) -> list[Verdict]:
    """What ranks wrote of the cases that all of them ended."""
    lines = []
    for rank in range(world):
        path = os.path.join(folder, f"verdicts{rank}")
        written = Path(path).read_text().splitlines() if os.path.exists(path) else []
        lines.append([json.loads(line) for line in written[:done]])
    verdicts = []
    for said in zip(*lines, strict=False):
        seconds = max(one.pop("seconds") for one in said)
        verdict = worst([Verdict(**one) for one in said])
        verdict.notes["seconds"] = seconds
        verdicts.append(verdict)
    return verdicts


def _lost(folder: str, world: int, done: list[int], number: int, hung: bool, death: str) -> Verdict:
    """The verdict on a case in which processes were killed or died."""
    said = []
    for rank in range(world):
        path = os.path.join(folder, f"verdicts{rank}")
        if done[rank] >= number and os.path.exists(path):
            with open(path) as file:
                one = json.loads(file.read().splitlines()[number - 1])
            said.append(f"rank {rank} had {one['column']}: {one['text'][:200]}")
        elif hung and os.path.exists(os.path.join(folder, f"stack{rank}")):
            with open(os.path.join(folder, f"stack{rank}")) as file:
                lines = [line.split('"') for line in file if 'File "' in line]
            frames = [f"{a.rsplit('/', 1)[-1]}:{b.split('line ')[-1].strip()}" for _, a, b in lines]
            said.append(f"rank {rank} is in {' < '.join(frames[:8])}")
    if hung:
        return Verdict("hang", f"{LATE}: {'; '.join(said)}", clean=False)
    first = death.split("\n")[0]
    column = "crash" if "was killed by" in first or "exited with" in first else "raw"
    for rank in range(world):
        with contextlib.suppress(OSError), open(os.path.join(folder, f"said{rank}"), errors="replace") as file:
            said += [line.strip()[:200] for line in file if "what()" in line or "Fatal" in line][:2]
    return Verdict(column, "; ".join([first[:300], *said]), clean=False)


def play_simulated(cases: list[Case], order: str = "ranks", seed: int = 0) -> list[Verdict]:
    """The verdicts of cases, in order, on ranks that take turns in this process."""
    verdicts, sets = [], {}
    with contextlib.ExitStack() as stack, warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        for number, case in enumerate(cases):
            world = case["world"]
            if world not in sets:
                sets[world] = stack.enter_context(fsdp.simulate(data=world, order=order, seed=seed))
            inside = os.path.join(folder, str(number))
            _ended.clear()
            try:
                said = sets[world](_simulated, case, inside).get()
            except fsdp.LaunchError as error:
                ended = "".join(f"\n{one.column}: {one.text}" for one in _ended)
                column = "hang" if "no rank can go on" in str(error) else "raw"
                said = [Verdict(column, f"{error}{ended}", clean=False)]
            if not all(one.clean for one in said):
                del sets[world]
            verdicts.append(worst(said))
    return verdicts


def _simulated(case: Case, inside: str) -> Verdict:
    """A case, on one of those ranks."""
    try:
        verdict: Verdict = module_of(case["kind"]).play(case, int(os.environ["RANK"]), inside)
    except BaseException as error:
        verdict = judged(error, 0.0, PATIENCE)
    _ended.append(verdict)
    return verdict


_ended: list[Verdict] = []  # of simulated ranks: what those say for whom others wait
