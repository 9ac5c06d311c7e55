"""Players: several processes that play cases side by side, and what they found, a line a kind.

Each is a session of its own, so that whatever a package leaves behind can be ended with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from . import forks, harness, shrink
from .verdict import COLUMNS, FINE, LATE, Verdict

BATCH = {
    "specs": 25,
    "driven": 25,
    "functions": 25,
    "objects": 50,
    "buffers": 25,
    "written": 25,
    "remat": 25,
    "interrupts": 24,
    "kills": 4,
    "files": 25,
    "differ": 10,
}
LONG = 600.0  # seconds after which a player that says nothing is given up


@dataclass
class Found:
    """What came out of all cases of a kind."""

    verdicts: dict[str, Verdict] = field(default_factory=dict)
    seconds: float = 0.0

    def count(self, column: str) -> int:
        return sum(v.column == column for v in self.verdicts.values())

    def bad(self) -> dict[str, Verdict]:
        return {name: v for name, v in self.verdicts.items() if v.column not in FINE}


def _live(pipe: connection.Connection) -> None:
    os.setsid()
    forks.use()
    while True:
        try:
            what, given = pipe.recv()
        except EOFError:
            os._exit(0)
        if what == "play":
            verdicts = [v.plain() for v in harness.play([harness.draw(*one) for one in given])]
            pipe.send(verdicts)
        else:
            name, column, seconds = given
            case, verdict = shrink.shrunk(harness.draw(*name), column, seconds)
            pipe.send((shrink.described(case), verdict and verdict.text))


class Player:
    """A process, and what it is doing."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_live, args=(theirs,))
        self.process.start()
        theirs.close()
        self.task: Any = None
        self.since = 0.0

    def give(self, task: Any) -> None:
        self.task, self.since = task, time.monotonic()
        self.pipe.send(task)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        self.pipe.close()


def _work(tasks: list[Any], players: int, limit: float) -> Any:
    """Gives tasks to players; yields each with its answer, None if the player was lost over it."""
    team, waiting = [Player() for _ in range(min(players, len(tasks)))], list(tasks)
    try:
        while waiting or any(player.task for player in team):
            for player in team:
                if player.task is None and waiting:
                    player.give(waiting.pop(0))
            ready = connection.wait([player.pipe for player in team], timeout=1.0)
            for i, player in enumerate(team):
                if player.task is None:
                    continue
                late = time.monotonic() - player.since > limit
                if player.pipe in ready or late:
                    answer, task = None, player.task
                    if not late:
                        with contextlib.suppress(EOFError, OSError):
                            answer = player.pipe.recv()
                    if answer is None:
                        player.end()
                        team[i] = Player()
                    player.task = None
                    yield task, answer
    finally:
        for player in team:
            player.end()


def play_all(counts: dict[str, int], seed: int, players: int) -> dict[str, Found]:
    """Plays the first `count` cases of each kind. One that took too long beside others, without an error, is played
    again alone in the end, and is what comes then: what waits for a peer that never comes is an error before that."""
    tasks: list[Any] = []
    for kind, count in counts.items():
        worlds: dict[int, list[Any]] = defaultdict(list)
        for index in range(count):
            name = (kind, seed, index)
            worlds[harness.draw(*name)["world"]].append(name)
        for names in worlds.values():
            size = BATCH[kind]
            tasks += [("play", names[i : i + size]) for i in range(0, len(names), size)]
    tasks.sort(key=lambda task: (task[1][0][2] // 100, task[1][0][0]))
    found = {kind: Found() for kind in counts}
    slow: list[Any] = []
    for (_, names), answer in _work(tasks, players, LONG):
        lost = [{"column": "hang", "text": "the player was lost"}] * len(names)
        for (kind, _, index), said in zip(names, answer or lost, strict=True):
            verdict = Verdict(**said)
            found[kind].verdicts[f"{kind}:{seed}:{index}"] = verdict
            if not verdict.fine:
                print(f"{kind}:{seed}:{index} {verdict.column}", flush=True)
            if verdict.column == "hang" and LATE in verdict.text:
                slow.append(("play", [(kind, seed, index)]))
            found[kind].seconds += float(verdict.notes.get("seconds", 0.0))
    for (_, [(kind, _, index)]), answer in _work(slow, 1, LONG):
        verdict = Verdict(**answer[0]) if answer else Verdict("hang", "the player was lost")
        found[kind].verdicts[f"{kind}:{seed}:{index}"] = verdict
        print(f"{kind}:{seed}:{index} was not done in time beside others; {verdict.column} alone", flush=True)
    return found


def table(found: dict[str, Found]) -> str:
    """A line a kind."""
    lines = [f"{'kind':11}{'tried':>6}" + "".join(f"{column:>9}" for column in COLUMNS) + f"{'seconds':>9}"]
    for kind, one in found.items():
        counts = "".join(f"{one.count(column):9}" for column in COLUMNS)
        lines.append(f"{kind:11}{len(one.verdicts):6}{counts}{one.seconds:9.0f}")
    return "\n".join(lines)


def groups(found: dict[str, Found]) -> list[tuple[str, list[str], Verdict]]:
    """Failures that look alike, the most frequent first: what they are, their cases, a verdict."""
    alike: dict[str, list[str]] = defaultdict(list)
    one: dict[str, Verdict] = {}
    for kind, verdicts in found.items():
        for name, verdict in verdicts.bad().items():
            frames = re.findall(r"(_?\w+\.py:\d+ \w+)", verdict.text)
            said = re.sub(r"rank [\d, ]+|'[^']*'|\([^)]*\)|[\d.+-]+|\w+ elements", "·", verdict.text)
            key = f"{kind} {verdict.column}: {said[:60]} {' < '.join(f.split()[-1] for f in frames[:3])}"
            alike[key].append(name)
            one.setdefault(key, verdict)
    ordered = sorted(alike.items(), key=lambda item: -len(item[1]))
    return [(key, sorted(names, key=lambda n: int(n.split(":")[2])), one[key]) for key, names in ordered]


def report(found: dict[str, Found], players: int, seconds: float) -> str:
    """Every group of failures: its cases, what came out, and the simplest case found within some seconds."""
    alike = groups(found)
    tasks = []
    for key, names, _ in alike if seconds else []:
        kind, seed, index = names[0].split(":")
        tasks.append(("shrink", ((kind, int(seed), int(index)), key.split()[1].rstrip(":"), seconds)))
    shrunk = {":".join(map(str, task[1][0])): answer for task, answer in _work(tasks, players, 5 * seconds + 60)}
    lines = []
    for _, names, verdict in alike:
        lines.append(f"\n{len(names)} × {verdict.column}: {' '.join(names[:8])}{' ...' if len(names) > 8 else ''}")
        lines.append(f"    {verdict.text[:700]}")
        description, again = shrunk.get(names[0]) or ("", None)
        if description:
            lines.append(f"  {names[0]} {'shrunk' if again else 'did not come again'}:")
            lines += [f"    {line}" for line in description.splitlines()]
    reasons = Counter(
        v.text.split(":")[0] for one in found.values() for v in one.verdicts.values() if v.column == "refused"
    )
    if reasons:
        lines.append("\nrefused: " + ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(12)))
    missed = sum(bool(v.notes.get("missed")) for one in found.values() for v in one.verdicts.values())
    if missed:
        lines.append(f"kills whose moment never came: {missed}")
    return "\n".join(lines)
