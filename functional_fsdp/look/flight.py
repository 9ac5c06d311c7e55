"""flight_record: where each rank stands when ranks time out or lose one of them, asked of all that can be reached.

A thread of each rank looks once a second whether a rank has asked, and then says where its own stands: that works
while the main thread waits, sleeps or computes. The rank that meets the error first asks, waits a little for the
others, prints a table and keeps it in a file.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from operator import attrgetter
from os import PathLike
from pathlib import Path
from types import FrameType
from typing import Any

from .._common.calls import users_line
from .._common.errors import as_path
from .._common.tree import table
from .._runtime import runtime
from .._runtime.agreement import ON_LOSS
from .._runtime.runtime import Runtime

FORMAT = 1
PERIOD = 1.0  # seconds between looks
PATIENCE = 4 * PERIOD  # for the answers of others
LAST = 5  # collectives of each lane
ASKED, CLAIMED = "flight/asked", "flight/claimed"
NAME = "functional_fsdp flight record"


class Recorder:
    """The one of this process: where files go, and its thread."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.thread: threading.Thread | None = None
        self.main = threading.main_thread().ident
        self.pid = 0

    def start(self, folder: Path) -> None:
        self.folder = folder
        if self.record not in ON_LOSS:
            ON_LOSS.append(self.record)
        if self.thread is None or self.pid != os.getpid():  # threads do not come through a fork
            self.pid, self.main = os.getpid(), threading.main_thread().ident
            self.thread = threading.Thread(target=self._listen, name=NAME, daemon=True)
            self.thread.start()

    def stop(self) -> None:
        self.folder = None
        if self.record in ON_LOSS:
            ON_LOSS.remove(self.record)

    def _listen(self) -> None:
        answered: set[str] = set()
        while self.folder is not None:
            time.sleep(PERIOD)
            for _, run in [*runtime._RUNTIMES.values()]:
                with suppress(Exception):  # the store may be gone; then nobody asks
                    if run.size > 1 and run.place not in answered and run.store.check([ASKED]):
                        answered.add(run.place)
                        run.store.set(f"flight/{run.rank}", json.dumps(self._status(run)))
        self.thread = None

    def record(self, run: Any, why: str) -> None:
        """The communicators of a mesh are of no more use."""
        if self.folder is None or run.medium.lanes is not None:
            return
        mine = self._status(run)
        answers: dict[int, Any] = {run.rank: mine}
        with suppress(Exception):
            run.store.set(f"flight/{run.rank}", json.dumps(mine))
            if run.store.check([CLAIMED]):
                return  # another rank asks
            run.store.set(CLAIMED, str(run.rank))
            run.store.set(ASKED, "1")
            self._collect(run, answers)
        gone = [run.ranks.index(rank) for rank in run.gone()]
        found = {
            "format": FORMAT, "why": why, "by": run.rank, "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "ranks": [answers.get(rank, {"gone": rank in gone}) for rank in range(run.size)],
        }  # fmt: skip
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"flight_{time.strftime('%Y%m%d_%H%M%S')}_rank{run.rank}.json"
            path.write_text(json.dumps(found, indent=1))
            print(f"{said_of_flight(found, stacks=False)}\nkept in {path}", file=sys.stderr, flush=True)

    def _collect(self, run: Any, answers: dict[int, Any]) -> None:
        gone = {run.ranks.index(rank) for rank in run.gone()}
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and len(answers) + len(gone) < run.size:
            for rank in range(run.size):
                if rank not in answers and run.store.check([f"flight/{rank}"]):
                    answers[rank] = json.loads(run.store.get(f"flight/{rank}"))
            time.sleep(0.05)

    def _status(self, run: Runtime) -> dict[str, Any]:
        """Where this rank stands; from any thread of it."""
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        main = frames.get(self.main or 0)
        lanes = {}
        for name, log in run.issued.items():
            last = [[f"{hop.kind} {hop.bucket}" for hop in hops] for hops in [*log.tail][-LAST:]]
            lanes[name] = {"issued": log.count, "last": last}
        return {
            "rank": run.rank,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "lanes": lanes,
            "states": [_state(lineage) for lineage in sorted(run.lineages, key=attrgetter("number"))],
            "line": "" if main is None else users_line(traceback.walk_stack(main)),
            "stacks": {
                names.get(ident, str(ident)): _stack(frame)
                for ident, frame in frames.items()
                if names.get(ident) != NAME
            },
        }


def _stack(frame: FrameType) -> list[str]:
    return [f"{one.filename}:{one.lineno} {one.name}" for one in traceback.extract_stack(frame)]


def _state(lineage: Any) -> dict[str, Any]:
    """Where the step of a state stands."""
    found: dict[str, Any] = {"steps": lineage.steps}
    if lineage.executor is not None:
        cursor = lineage.executor.progress.cursor
        at, uses = cursor.at, cursor.plan.uses
        found |= {
            "at": at,
            "uses": len(uses),
            "next": uses[at].unit if at < len(uses) else "",
            "gathers": f"{cursor.issued} of {len(cursor.plan.gathers)}",
            "reductions": f"{cursor.reduced} of {len(cursor.plan.reductions)}",
            "in flight": [*lineage.executor.gathers.flying],
        }
    return found


_RECORDER = Recorder()


def flight_record(folder: str | PathLike[str] | None) -> None:
    """From here on, when ranks time out or lose one of them, each rank that can be reached says where it stands.

    One rank prints a table and keeps it in `folder`, as `flight_....json`: of each rank where the step of each state
    stands (the cursor), how many collectives it has issued on each lane and which were the last, and where its Python
    stands. `python -m functional_fsdp.look FILE` prints the file again, with whole stacks. The error comes up to 4 s
    later for that. Simulated ranks say it in any case, when none can go on.

    Args:
        folder: where files go, made when it is needed. None: no more.

    It is one thread a process, which looks into the ranks' store once a second. It is not heard of a rank whose process
    has ended, or that holds Python's lock in a call of C.

    Collective: none. Call it on every rank, before or after states are made.

    Example: `fsdp.flight_record("flights")`.
    """
    if folder is None:
        _RECORDER.stop()
    else:
        _RECORDER.start(as_path("flight_record(folder)", folder, "a path, or None"))


def read_flight(path: str | PathLike[str]) -> dict[str, Any]:
    """What a file of `flight_record` has.

    Raises:
        ValueError: it is no such file.
    """
    try:
        found: dict[str, Any] = json.loads(Path(path).read_text())
        known = found["format"], found["ranks"], found["why"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no flight record: {error!r}. Give a file that fsdp.flight_record wrote.") from None
    if known[0] != FORMAT:
        raise ValueError(f"{path} is a flight record of format {known[0]}; this version reads format {FORMAT}.")
    return found


def said_of_flight(found: dict[str, Any], stacks: bool = True) -> str:
    """A flight record as a table, and where each thread stands.

    Raises:
        ValueError: it lacks something.
    """
    try:
        return _said(found, stacks)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise ValueError(
            f"the flight record is damaged: {error!r}. Give a file that fsdp.flight_record wrote."
        ) from None


def _said(found: dict[str, Any], stacks: bool) -> str:
    rows = []
    lanes = [*dict.fromkeys(lane for one in found["ranks"] for lane in one.get("lanes", ()))]
    most = {lane: max(one["lanes"][lane]["issued"] for one in found["ranks"] if "lanes" in one) for lane in lanes}
    for rank, one in enumerate(found["ranks"]):
        if "lanes" not in one:
            rows.append((rank, "its process has ended" if one.get("gone") else "no answer", *("-" for _ in lanes), "-"))
            continue
        states = [
            f"step {s['steps'] + 1}"
            + (f", use {s['at']} of {s['uses']} ({s['next'] or 'the end'})" if "at" in s else "")
            for s in one["states"]
        ]
        counts = []
        for lane in lanes:
            of = one["lanes"][lane]
            behind = of["issued"] - most[lane]
            last = f", {of['last'][-1][-1]}" if of["last"] else ""
            counts.append(f"{of['issued']}{f' ({behind})' if behind else ''}{last}")
        rows.append((rank, "; ".join(states) or "-", *counts, one["line"]))
    said = [f"flight record of {found['time']}, by rank {found['by']}: {found['why']}"]
    said.append(table(("rank", "stands at", *lanes, "Python"), rows))
    said.append("lanes: jobs issued (behind the furthest rank), the last collective")
    for rank, one in enumerate(found["ranks"] if stacks else ()):
        for name, stack in one.get("stacks", {}).items():
            said += [
                f"\nrank {rank}, {one['host']}, process {one['process']}, {name}:",
                *(f"  {line}" for line in stack),
            ]
    return "\n".join(said)
