"""The files of the packages, and their syntax trees, for rules of the source itself."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CORE = sorted(f for f in (ROOT / "functional_fsdp").rglob("*.py") if "transforms" not in f.parts)
TRANSFORMS = sorted((ROOT / "transforms").rglob("*.py"))
ALL = CORE + TRANSFORMS


def place(file: Path) -> str:
    """Where a file of the packages lies, as `_plan/layout.py`."""
    return file.relative_to(ROOT / ("transforms" if file in TRANSFORMS else "functional_fsdp")).as_posix()


@cache
def nodes(file: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(file.read_text(), str(file)))]


def found_in(files: Iterable[Path], search: Callable[[Path], Iterable[Any]]) -> dict[str, list[Any]]:
    """What a search finds, by file: a rule is one test, which lists whatever breaks it."""
    return {place(file): found for file in files if (found := [*search(file)])}
