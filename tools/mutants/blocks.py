"""Blocks: the parts of a source that run whole or not at all, each named by the line of its first statement."""

from __future__ import annotations

import ast
from collections.abc import Iterator

Block = tuple[int, int]  # first and last line
HEADER = "from torch.compiler import is_compiling as _ic_; from mutants_probe import hit as _hit_"


def blocks_of(source: str) -> list[Block]:
    """Of functions, branches, loops and handlers, and what follows a statement that may leave one; a function's comes
    without its docstring."""
    found, lines = [], source.splitlines()
    for node in ast.walk(ast.parse(source)):
        for body in (part for whole in _bodies(node, lines) for part in _ends(whole)):
            first, last = _first_line(body[0]), body[-1].end_lineno
            assert last is not None
            if not lines[first - 1][: body[0].col_offset].strip():  # else it stands behind a colon
                found.append((first, last))
    return sorted(found)


def _bodies(node: ast.AST, lines: list[str]) -> Iterator[list[ast.stmt]]:
    match node:
        case ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body):
            rest = body[1:] if ast.get_docstring(node) is not None else body
            if rest:
                yield rest
        case ast.If(body=body, orelse=orelse) | ast.For(body=body, orelse=orelse) | ast.While(body=body, orelse=orelse):
            yield body
            if orelse and not lines[orelse[0].lineno - 1].lstrip().startswith("elif"):
                yield orelse
        case ast.ExceptHandler(body=body):
            yield body
        case ast.Match(cases=cases):
            yield from (case.body for case in cases)


def _ends(body: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """All of it, and what comes after each statement in which one may jump."""
    yield body
    for k, statement in enumerate(body[:-1]):
        if any(isinstance(part, ast.Return | ast.Raise | ast.Break | ast.Continue) for part in ast.walk(statement)):
            yield body[k + 1 :]


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])


def around(blocks: list[Block], line: int) -> list[int]:
    """The names of the blocks that a line is in, the innermost one first."""
    return sorted((first for first, last in blocks if first <= line <= last), reverse=True)


def probed(source: str, file: str) -> str:
    """The source, in which each block of a function says when it begins. What Dynamo follows does not see it."""
    lines = source.splitlines()
    tree = ast.parse(source)
    inside = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for line in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
    }
    for first in sorted({first for first, _ in blocks_of(source) if first in inside}, reverse=True):
        indent = lines[first - 1][: len(lines[first - 1]) - len(lines[first - 1].lstrip())]
        lines.insert(first - 1, f"{indent}_ic_() or _hit_({f'{file}:{first}'!r})")
    head = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    if head and inside:
        lines.insert(head[-1].lineno, HEADER)
    return "\n".join(lines) + "\n"
