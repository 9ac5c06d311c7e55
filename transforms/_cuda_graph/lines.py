"""Lines: which line of the program, or of a library it uses, does something in the middle of a step."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable
from types import CodeType, FrameType, TracebackType

__all__ = ["line_of_error", "root_of", "running_line"]

PASSED = {"torch", "functional_fsdp", "contextlib", "functools", "threading", "triton"}  # who does it for others
OURS = "functional_fsdp"


def root_of(frame: FrameType) -> str:
    """The package that the frame's code is in; "torch" for what Inductor has written."""
    if "torchinductor" in frame.f_code.co_filename:
        return "torch"
    name: str = frame.f_globals.get("__name__") or ""
    return name.partition(".")[0]


def running_line() -> tuple[str, bool]:
    """The innermost line that runs outside torch and this library, "" if there is none; and whether this library is
    between it and torch."""
    frame, ours = sys._getframe(1), False
    found: FrameType | None = frame
    asking = frame.f_globals.get("__name__")
    while found is not None and found.f_globals.get("__name__") == asking:
        found = found.f_back
    while found is not None:
        root = root_of(found)
        if root not in PASSED:
            return _text(found.f_code, found.f_lineno), ours
        ours |= root == OURS
        found = found.f_back
    return "", ours


def line_of_error(error: BaseException) -> str:
    """The innermost line outside torch and this library in an error's traceback, "" if there is none."""
    frames = [one for one in _each(error.__traceback__) if root_of(one.tb_frame) not in PASSED]
    return _text(frames[-1].tb_frame.f_code, frames[-1].tb_lineno) if frames else ""


def _each(traceback: TracebackType | None) -> Iterable[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _text(code: CodeType, number: int) -> str:
    return f"{code.co_filename}:{number} ({linecache.getline(code.co_filename, number).strip()})"
