"""Operators: small mistakes in the source of a function, each as a cut in its text, so that all other lines stay.

A mutant is found again in another version of the source, under another path, by its `key`: the function's qualified
name, the operator, the line, and which such place of that line it is.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath

COMPARED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: (r"not\s+in", "in"),
    ast.Is: ("is", "is not"), ast.IsNot: (r"is\s+not", "is"),
}  # fmt: skip
COUNTED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"), ast.Sub: ("-", "+"), ast.Mult: (r"\*", "//"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
}  # fmt: skip
TEXTS = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)  # what `+` joins: another sign is no mistake anybody makes
INSIDES_KEPT = (ast.Assert, ast.Raise, ast.JoinedStr, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom)

Cut = tuple[int, int, str]  # bytes of the source from, to, and what stands there instead


@dataclass(frozen=True)
class Mutant:
    """file: from the package's folder on. function: qualified. nth: of its kind on lines of that text in `function`."""

    file: str
    line: int
    function: str
    operator: str
    before: str
    after: str
    nth: int
    cuts: tuple[Cut, ...]

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.function, self.operator, self.before, self.nth

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.operator} {self.nth}"

    def applied(self, source: str) -> str:
        return _cut(source.encode(), self.cuts).decode()


def _cut(data: bytes, cuts: Sequence[Cut]) -> bytes:
    for start, end, new in sorted(cuts, reverse=True):
        data = data[:start] + new.encode() + data[end:]
    return data


class _Finder:
    """Walks one source; `found` has operator, line and cuts, function by function."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        lines = data.splitlines(keepends=True)
        self.starts = [0]
        for line in lines:
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[tuple[str, str, int, tuple[Cut, ...]]] = []

    def span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Cut | None:
        """The first `old` between two expressions, which may have parentheses and line ends around it."""
        start, end = self.span(left)[1], self.span(right)[0]
        word = rf"\b{old}\b" if old[0].isalpha() else old
        place = re.search(word.encode(), self.data[start:end])
        return place and (start + place.start(), start + place.end(), new)

    def scope(self, body: Sequence[ast.AST], names: tuple[str, ...], inside: bool) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                rest = node.body[1:] if ast.get_docstring(node) is not None else node.body
                self.scope(rest, (*names, node.name), True)
            elif isinstance(node, ast.ClassDef):
                self.scope(node.body, (*names, node.name), False)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            elif inside:
                self.visit(node, names)
            elif isinstance(node, ast.If | ast.Try):
                self.scope([*ast.iter_child_nodes(node)], names, False)

    def visit(self, node: ast.AST, names: tuple[str, ...]) -> None:
        if isinstance(node, ast.stmt | ast.expr):
            for operator, cuts in self.changes(node):
                self.found.append((".".join(names), operator, node.lineno, cuts))
        if isinstance(node, INSIDES_KEPT):
            return
        if isinstance(node, ast.Lambda):
            self.visit(node.body, names)
            return
        if isinstance(node, ast.AnnAssign):
            self.scope([node.value] if node.value else [], names, True)
            return
        self.scope([*ast.iter_child_nodes(node)], names, True)

    def changes(self, node: ast.stmt | ast.expr) -> Iterator[tuple[str, tuple[Cut, ...]]]:
        start, end = self.span(node)
        cut: Cut | None
        match node:
            case ast.Compare():
                for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                    if cut := self.between(left, right, *COMPARED[type(op)]):
                        yield "compare", (cut,)
            case ast.BoolOp():
                words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                cuts = [self.between(left, right, *words) for left, right in pairwise(node.values)]
                yield "and/or", tuple(cut for cut in cuts if cut)
            case ast.UnaryOp(op=ast.Not()):
                yield "not", ((start, start + len("not "), ""),)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in COUNTED:
                texts = [one for one in (left, right) if isinstance(one, TEXTS) or _is(one, str)]
                cut = self.between(left, right, *COUNTED[type(op)])
                if cut and not texts:
                    yield "arithmetic", (cut,)
            case ast.AugAssign(target=target, op=ast.Add() | ast.Sub() as op, value=value):
                cut = self.between(target, value, *COUNTED[type(op)])
                if cut and not isinstance(value, TEXTS):
                    yield "arithmetic", (cut,)
            case ast.Constant(value=bool(value)):
                yield "true/false", ((start, end, str(not value)),)
            case ast.Constant(value=int(number) | float(number)):
                yield "constant", ((start, end, str(number + 1)),)
            case ast.Return(value=ast.expr() as value) if not _is(value, type(None)):
                yield "return", ((start, end, "return None"),)
            case ast.Break():
                yield "break/continue", ((start, end, "continue"),)
            case ast.Continue():
                yield "break/continue", ((start, end, "break"),)
        if _deletable(node):
            yield "delete", ((start, end, "pass"),)


def _is(node: ast.expr, kind: type) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, kind)


def _deletable(node: ast.AST) -> bool:
    """Statements without which the rest still makes sense: a local name stays bound."""
    match node:
        case ast.Expr(value=value):
            return not isinstance(value, ast.Constant | ast.Yield | ast.YieldFrom)
        case ast.Assign(targets=targets):
            return all(isinstance(target, ast.Attribute | ast.Subscript) for target in targets)
        case _:
            return isinstance(node, ast.AugAssign | ast.Raise | ast.Delete)


def mutants_of_text(source: str, file: str) -> list[Mutant]:
    """All of them, in the order of the source."""
    data = source.encode()
    finder = _Finder(data)
    finder.scope(ast.parse(source).body, (), False)
    seen: Counter[tuple[str, str, str]] = Counter()
    mutants = []
    for function, operator, line, cuts in sorted(finder.found, key=lambda one: (one[3], one[1])):
        first = min(cut[0] for cut in cuts)
        shown = max(start for start in finder.starts if start <= first)
        mutated = _cut(data, cuts)
        before = data[shown:].split(b"\n")[0].strip().decode()
        after = mutated[shown:].split(b"\n")[0].strip().decode()
        kind = (function, operator, before)
        mutants.append(Mutant(file, line, function, operator, before, after, seen[kind], cuts))
        seen[kind] += 1
    return mutants


def mutants_of(package: Path, without: Sequence[str] = ("transforms", "_launch")) -> list[Mutant]:
    """Of the package in a folder."""
    files = {file.relative_to(package).as_posix(): file for file in sorted(package.rglob("*.py"))}
    kept = {name: file for name, file in files.items() if name.split("/")[0].removesuffix(".py") not in without}
    return [mutant for name, file in kept.items() for mutant in mutants_of_text(file.read_text(), name)]


def found_again(mutant: Mutant, others: Sequence[Mutant]) -> Mutant | None:
    """The same mutant among those of another version: in the file of the same name, or where only one is like it."""
    alike = [other for other in others if other.key == mutant.key]
    named = [other for other in alike if _stem(other.file) == _stem(mutant.file)]
    return named[0] if named else alike[0] if len(alike) == 1 else None


def in_both(mutants: Sequence[Mutant], others: Sequence[Mutant]) -> list[Mutant]:
    """Those of `mutants` that the other version has too."""
    alike: dict[tuple[str, str, str, int], list[Mutant]] = {}
    for other in others:
        alike.setdefault(other.key, []).append(other)
    return [mutant for mutant in mutants if found_again(mutant, alike.get(mutant.key, []))]


def _stem(file: str) -> str:
    return PurePosixPath(file).stem.lstrip("_")


def draw(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """So many of them, the same ones for the same seed, in the order of the source."""
    chosen = random.Random(seed).sample(range(len(mutants)), min(count, len(mutants)))
    return [mutants[index] for index in sorted(chosen)]
