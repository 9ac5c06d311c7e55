"""Processes of this package's own, beside the caller's: fresh ones, never forks of it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterable

__all__ = ["started"]

CODE = "import sys; sys.path[:] = {path!r}; import {modules}; from {module} import serve; serve({fd})"


def started(module: str, preload: Iterable[str] = ()) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process that runs `serve(fd)` of a module, where fd is its end of a socket; and the caller's end.

    Args:
        preload: names of modules that it imports before it serves.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        given: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        flags = [flag for flag in given if not flag.startswith("-W")]
        code = CODE.format(path=sys.path, modules=", ".join([module, *preload]), module=module, fd=theirs.fileno())
        process = subprocess.Popen(
            [sys.executable, *flags, "-W", "ignore", "-c", code],  # the caller has seen what importing warns of
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the caller only, who decides what it means
        )
    return process, ours
