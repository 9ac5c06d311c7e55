"""Play: one mutant in a copy of a checkout, against the tests that run its block; and many mutants, some at a time.

each mutant   the fast tests    one fails: killed
what is left  the other tests   one fails: killed; none does in `LONGER` seconds of tests: survived
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from queue import Empty, SimpleQueue

from mutants import blocks, copies
from mutants.cover import Cover
from mutants.operators import Mutant

FAST, LONGER = 10.0, 60.0  # seconds of tests, as measured without a mutant
APIECE = 6  # fast tests of one file
PATIENCE = 90  # seconds for a test that passed in less, and twice that for pytest's own start
LEFT = ("survived", "unreached")


@dataclass(frozen=True)
class Played:
    """verdict: killed, timeout, survived, or unreached: no test runs the block, those of the file all pass."""

    mutant: Mutant
    verdict: str
    tests: int
    seconds: float
    by: str = ""

    def after(self, before: Played | None) -> Played:
        if before is None:
            return self
        return replace(self, tests=self.tests + before.tests, seconds=round(self.seconds + before.seconds, 1))

    def plain(self) -> dict[str, object]:
        one = self.mutant
        place = {"file": one.file, "line": one.line, "function": one.function, "operator": one.operator}
        change = {"before": one.before, "after": one.after, "nth": one.nth}
        return place | change | {"verdict": self.verdict, "tests": self.tests, "seconds": self.seconds, "by": self.by}


def chosen(mutant: Mutant, source: str, cover: Cover) -> tuple[list[str], list[str], bool]:
    """The tests to run first, those to run then, and whether they run the very block."""
    places = [f"{mutant.file}:{line}" for line in around(source, mutant)]
    reached = bool(places) and places[0] in cover.tests
    names = cover.tests.get(places[0], []) if reached else []
    if not reached:  # what Dynamo follows is in nobody's list: those that run what is nearest
        names = next((cover.tests[place] for place in places if place in cover.tests), [])
        names = names or [n for block, ns in cover.tests.items() if block.startswith(f"{mutant.file}:") for n in ns]
    left = sorted({*names}, key=lambda name: ("ranks" in name or "laws" in name, cover.seconds[name], name))
    turns, seen = {}, Counter[str]()
    for name in left:
        turns[name] = seen[file_of(name)]
        seen[file_of(name)] += 1
    first = _within(FAST, [name for name in left if turns[name] < APIECE], cover)
    rest = sorted({*left} - {*first}, key=lambda name: (turns[name], cover.seconds[name], name))
    then = _within(LONGER, rest, cover)  # of each file one, then of each another one
    return first, then, reached


def file_of(test: str) -> str:
    return test.partition("::")[0]


def _within(seconds: float, names: Sequence[str], cover: Cover) -> list[str]:
    ends = accumulate(cover.seconds[name] for name in names)
    return [name for name, end in zip(names, ends, strict=True) if end - cover.seconds[name] < seconds]


def around(source: str, mutant: Mutant) -> list[int]:
    return blocks.around(blocks.blocks_of(source), mutant.line)


def play(folder: Path, mutant: Mutant, cover: Cover, longer: bool = False) -> Played:
    """In that copy, which is as before afterwards."""
    file = folder / "functional_fsdp" / mutant.file
    source = file.read_text()
    first, then, reached = chosen(mutant, source, cover)
    names = then if longer else first
    verdict, by, code, text = "survived" if reached else "unreached", "", 0, ""
    begun = time.monotonic()
    if names:
        file.write_text(mutant.applied(source))
        try:
            limit = 2 * PATIENCE + 6 * sum(cover.seconds[name] for name in names)
            code, text = copies.pytest_in(folder, ["-x", "--timeout", str(PATIENCE), *by_file(names)], limit)
        finally:
            file.write_text(source)
    if code:
        late = code == copies.TIMEOUT or "Timeout" in text
        verdict, by = "timeout" if late else "killed", failed(text)
    return Played(mutant, verdict, len(names), round(time.monotonic() - begun, 1), by)


def by_file(names: Sequence[str]) -> list[str]:
    """In the order of their files, so that each file has its ranks once."""
    files = [*map(file_of, names)]
    return sorted(names, key=lambda name: files.index(file_of(name)))


def failed(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[-1][:300] if lines else text[-300:]


def play_all(
    checkout: Path, mutants: Sequence[Mutant], cover: Cover, processes: int, said: Callable[[Played], None]
) -> list[Played]:
    """In the order of `mutants`; `said` hears of each as it is done."""
    done: dict[Mutant, Played] = {}
    waiting: SimpleQueue[tuple[Mutant, bool]] = SimpleQueue()
    lock = threading.Lock()

    def work() -> None:
        with copies.copied(checkout) as folder:
            copies.compiled(folder)
            while not waiting.empty():
                try:
                    mutant, longer = waiting.get_nowait()
                except Empty:
                    return
                played = play(folder, mutant, cover, longer)
                with lock:
                    done[mutant] = played.after(done.get(mutant))
                    said(done[mutant])

    for longer in (False, True):
        for mutant in mutants:
            if mutant not in done or done[mutant].verdict in LEFT:
                waiting.put((mutant, longer))
        threads = [threading.Thread(target=work) for _ in range(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [done[mutant] for mutant in mutants]
