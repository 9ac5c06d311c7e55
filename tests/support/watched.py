"""A script: an example whose data is written down, and one of whose ranks may be killed. The example knows of neither.

torchrun ... tests/support/watched.py EXAMPLE FLAGS...

WATCHED=folder     one file a process, one line a window: the step, and a hash of what a rank was given for it
KILLED="1 5"       rank 1 is killed when it asks for the data of step 5, unless torchrun has started it again
KILLED="0 6 save"  rank 0 is killed in the middle of the save after step 6
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__)


def hashes(batch: Any) -> Counter[str]:
    """Of the windows of a batch [b, t + 1]."""
    return Counter(str(zlib.crc32(row.numpy().tobytes())) for row in batch)


def windows(folder: Path) -> dict[int, Counter[str]]:
    """What all ranks together were given, by step."""
    found: dict[int, Counter[str]] = {}
    for line in (line for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()):
        step, window = line.split()
        found.setdefault(int(step), Counter())[window] += 1
    return found


def _killed(rank: str, step: str, where: str = "data") -> Any:
    """A function that kills this process if it is this rank's, started for the first time, and has come there."""
    mine = os.environ["RANK"] == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def look(now: int, place: str) -> None:
        if mine and (now, place) == (int(step), where):
            os.kill(os.getpid(), signal.SIGKILL)

    return look


def main() -> None:
    example = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(example.parent))
    corpus: Any = importlib.import_module("_corpus")
    checkpoint: Any = importlib.import_module("functional_fsdp._io.checkpoint")
    look = _killed(*os.environ.get("KILLED", "none 0").split())
    real, write = corpus.batch, checkpoint.write_tensors
    given = Path(os.environ["WATCHED"], f"{os.getpid()}")

    def batch(text: Any, size: int, context: int, seed: int, step: int, *place: int) -> Any:
        look(step, "data")
        found = real(text, size, context, seed, step, *place)
        with given.open("a") as file:
            file.writelines(f"{step} {window}\n" for window in hashes(found).elements())
        return found

    def write_tensors(path: Path, *args: Any) -> Any:
        written = write(path, *args)
        look(int(path.name.split(".")[0].removeprefix("step_")), "save")
        return written

    corpus.batch, checkpoint.write_tensors = batch, write_tensors
    runpy.run_path(str(example), run_name="__main__")


if __name__ == "__main__":
    main()
