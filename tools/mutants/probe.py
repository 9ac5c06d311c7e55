"""Probe: what the blocks of a probed copy call, in the tests' process and in their ranks; and a plugin of pytest, which
says on a board that all of them share which test is running. `cover.py` puts it in a folder as `mutants_probe`.

| in the folder `$MUTANTS_PROBE` | what it has                                  |
|--------------------------------|----------------------------------------------|
| `board`                        | the running test's number, four bytes        |
| `hits`                         | lines: a test's number, a block              |
| `tests`                        | lines: a test's number, how it went, seconds, name |
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(os.environ["MUTANTS_PROBE"])
_file = os.open(FOLDER / "board", os.O_RDWR)
_board = mmap.mmap(_file, 4)
os.close(_file)
_hits = os.open(FOLDER / "hits", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_seen: set[str] = set()
_test = b""


def hit(block: str) -> None:
    global _test
    now = _board[:]
    if now != _test:
        _seen.clear()
        _test = now
    if block not in _seen:
        _seen.add(block)
        line = f"{int.from_bytes(now, 'little')} {block}\n".encode()
        try:
            os.write(_hits, line)
        except OSError:  # a worker that has closed what it did not open
            with (FOLDER / "hits").open("ab") as file:
                file.write(line)


class _Watched:
    number = 0
    good = True
    seconds = 0.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _Watched.number += 1
    _Watched.good, _Watched.seconds = True, 0.0
    _board[:] = _Watched.number.to_bytes(4, "little")
    result = yield
    with (FOLDER / "tests").open("a") as file:
        file.write(f"{_Watched.number} {int(_Watched.good)} {_Watched.seconds:.3f} {item.nodeid}\n")
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _Watched.good &= report.passed
    _Watched.seconds += report.duration
