"""Cover: which tests run which blocks of the package, in their own process or in ranks, and how long each takes.

Each file of tests runs once in a probed copy. What came out is kept in a folder, by the text of the package and of the
file, so that a new test costs one file.
"""

from __future__ import annotations

import hashlib
import json
import queue
import shutil
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

from mutants import blocks, copies

FOLDERS = ("unit", "ranks", "laws", ".")  # of tests that run mutants; "." is for checkouts with one flat folder
LEFT_OUT = {  # tests of the source's text, of examples, of time, and those that take minutes to say little
    "test_package", "test_examples", "test_notebooks", "test_readme", "test_benchmark", "test_typed_use", "test_use",
    "test_host_overhead", "test_overhead", "test_attack", "test_traces", "test_mutants",
}  # fmt: skip
PATIENCE = 420.0  # seconds for a file of tests


@dataclass
class Cover:
    """seconds: of each test that passes. tests: by block, `file:line`."""

    seconds: dict[str, float] = field(default_factory=dict)
    tests: dict[str, list[str]] = field(default_factory=dict)

    def add(self, other: Cover) -> None:
        self.seconds |= other.seconds
        for block, names in other.tests.items():
            self.tests.setdefault(block, []).extend(names)


def test_files(checkout: Path) -> list[Path]:
    found = [file for folder in FOLDERS for file in sorted((checkout / "tests" / folder).glob("test_*.py"))]
    return [file for file in found if file.stem not in LEFT_OUT]


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def cover(checkout: Path, kept: Path, processes: int) -> Cover:
    """Of a checkout's own tests; from `kept` where it is known."""
    package = _digest(  # and of how it is probed
        Path(blocks.__file__),
        Path(__file__).with_name("probe.py"),
        *sorted((checkout / "functional_fsdp").rglob("*.py")),
        *sorted(checkout.glob("transforms/**/*.py")),
    )
    waiting: queue.SimpleQueue[tuple[Path, Path]] = queue.SimpleQueue()
    results = []
    for file in test_files(checkout):
        result = kept / package / f"{file.stem}.{_digest(file)}.json"
        results.append(result)
        if not result.exists():
            result.parent.mkdir(parents=True, exist_ok=True)
            waiting.put((file.relative_to(checkout), result))
    if not waiting.empty():
        print(f"{waiting.qsize()} files of tests are watched", flush=True)
        with copies.copied(checkout) as copy:
            for source in (copy / "functional_fsdp").rglob("*.py"):
                name = source.relative_to(copy / "functional_fsdp").as_posix()
                source.write_text(blocks.probed(source.read_text(), name))
            copies.compiled(copy)
            shutil.copy(Path(__file__).with_name("probe.py"), copy / "mutants_probe.py")
            threads = [threading.Thread(target=_watch, args=(copy, waiting)) for _ in range(processes)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    whole = Cover()
    for result in results:
        whole.add(Cover(**json.loads(result.read_text())))
    return whole


def _watch(copy: Path, waiting: queue.SimpleQueue[tuple[Path, Path]]) -> None:
    while not waiting.empty():
        try:
            file, result = waiting.get_nowait()
        except queue.Empty:
            return
        with tempfile.TemporaryDirectory(prefix="mutants-probe-") as name:
            folder = Path(name)
            (folder / "board").write_bytes(bytes(4))
            args = ["-p", "mutants_probe", "-m", "not large", str(file)]
            code, _ = copies.pytest_in(copy, args, PATIENCE, {"MUTANTS_PROBE": name})
            found = _read(folder)
        result.write_text(json.dumps({"seconds": found.seconds, "tests": found.tests}))
        print(f"  {file}: {len(found.seconds)} tests, {sum(found.seconds.values()):.0f} s, code {code}", flush=True)


def _read(folder: Path) -> Cover:
    found, names = Cover(), {}
    for line in (folder / "tests").read_text().splitlines() if (folder / "tests").exists() else []:
        number, good, seconds, name = line.split(" ", 3)
        if int(good):
            names[number] = name
            found.seconds[name] = float(seconds)
    for line in (folder / "hits").read_text().splitlines() if (folder / "hits").exists() else []:
        number, block = line.split(" ", 1)
        if number in names and names[number] not in (tests := found.tests.setdefault(block, [])):
            tests.append(names[number])
    return found
