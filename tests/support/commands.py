"""The examples as commands, and scripts, in processes of their own."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

import functional_fsdp as fsdp

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
#: installed apart by `make`, since transformers imports it wherever it finds it: slower, and it has much to say
#: (or beside another interpreter, where the checkout was copied to it)
_PLACES = [Path(sys.prefix) / "float8", ROOT / ".venv" / "float8"]
TORCHAO = next(filter(Path.exists, _PLACES), _PLACES[0])


def code_under(heading: str, of: str = "CONTRIBUTING.md") -> str:
    """The first block of Python below a heading of a document."""
    _, below = (ROOT / of).read_text().split(f"## {heading}\n", 1)
    found = re.search(r"```python\n(.*?)```", below, re.DOTALL)
    assert found, f"{of} has no code below {heading!r}"
    return found[1]


def command(*line: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    """The command with more in its environment."""
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    # CPU on every machine, so that the figures are the same; a process of its own knows nothing of pytest's ranks
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **more}
    return subprocess.run([*map(str, line)], env=env, capture_output=True, text=True, timeout=250)


def here(script: str, *flags: object) -> str:
    """What an example prints that runs as `__main__` of this process, as a command would but for GPUs, on simulated
    ranks."""
    printed, simulated = io.StringIO(), partial(fsdp.launch, simulate=True)
    with (
        patch.object(sys, "argv", [script, *map(str, flags)]),
        patch.object(fsdp, "launch", simulated),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return printed.getvalue()


def as_command(script: str, *flags: object) -> str:
    """What it prints in a process of its own, which must end well, with warnings as errors."""
    done = command(sys.executable, "-W", "error", EXAMPLES / script, *map(str, flags))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_script(text: str, *command: str, path: Path = ROOT) -> str:
    """What a script prints, in a process of its own (from stdin unless a command is given)."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = f"{path}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-W", "error", *(command or ("-",))],
        input=textwrap.dedent(text),
        capture_output=True,
        text=True,
        timeout=250,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


#: how an example is run: `make test-all` does it as a user does, too
run_as = pytest.mark.parametrize("run", [here, pytest.param(as_command, marks=pytest.mark.large)])
