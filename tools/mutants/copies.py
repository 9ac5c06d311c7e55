"""Copies: a checkout in a folder of its own, where sources can be changed, and pytest in it."""

from __future__ import annotations

import compileall
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from py_compile import PycInvalidationMode

NOT_OURS = ("build", "dist", "runs")
TIMEOUT = 99  # what `pytest_in` returns for one


@contextmanager
def copied(checkout: Path) -> Iterator[Path]:
    """A copy, for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        for part in checkout.iterdir():
            if part.name.startswith(".") or part.name in NOT_OURS:
                continue
            if part.is_dir():
                shutil.copytree(part, folder / part.name, symlinks=True, ignore=ignored)
            else:
                shutil.copy(part, folder / part.name)
        yield folder


def compiled(folder: Path) -> None:
    """By hash: a source that changes twice a second is read again all the same."""
    for part in ("functional_fsdp", "transforms"):
        compileall.compile_dir(folder / part, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)


def pytest_in(
    folder: Path, args: Sequence[str], seconds: float, more: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """pytest's exit code in that folder, and the end of what it printed; `TIMEOUT` if it took longer."""
    more = dict(more or {})
    path = os.pathsep.join([str(folder), *filter(None, [more.pop("PYTHONPATH", "")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **more}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *args]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = TIMEOUT
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the ranks follow their caller
                process.wait()
        output.seek(0)
        return code, output.read()[-4000:]
