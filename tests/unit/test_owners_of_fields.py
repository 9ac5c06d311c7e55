"""Whoever has a running part's fields assigns them: nobody sets one from outside its class."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from support.source import ALL, CORE, found_in, nodes, place

#: the classes, by the names or paths under which their instances are used
OWNERS = {
    "Executor": ("executor", "_executor"),
    "Progress": ("self.progress", "executor.progress"),
    "Gathers": ("self.gathers", "executor.gathers"),
    "Reductions": ("reductions",),
    "GradientSink": ("self.sink", "executor.sink"),
    "Staging": ("staging",),
    "Runtime": ("run", "_run", "runtime", "runtime_of()"),
    "Agreement": (),
    "Lineage": ("lineage", "_lineage", "lineage_of()"),
    "Driver": ("driver", "_driver"),
}
CALLED = {name for names in OWNERS.values() for name in names}
#: assignments from outside that are still there: none may be added
LEFT: dict[str, set[str]] = {}


def path_of(node: ast.expr) -> str:
    """An expression's names, without what calls and items are given: "states.version.lineage" of a lineage."""
    if isinstance(node, ast.Call):
        return f"{path_of(node.func)}()"
    if isinstance(node, ast.Subscript):
        return path_of(node.value)
    return f"{path_of(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_owner(node: ast.expr) -> bool:
    """Whether an expression is called as instances of owners are."""
    return f".{path_of(node)}".endswith(tuple(f".{name}" for name in CALLED))


def assigned(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns or deletes, one by one; of an item, what has it."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = [*node.targets]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr):
        targets = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        targets = [node.optional_vars]
    found: list[ast.expr] = []
    while targets:
        target = targets.pop()
        if isinstance(target, ast.Tuple | ast.List):
            targets += target.elts
        elif isinstance(target, ast.Starred | ast.Subscript):
            targets.append(target.value)
        else:
            found.append(target)
    return found


def classes(found: Iterable[ast.AST]) -> Iterator[ast.ClassDef]:
    return (node for node in found if isinstance(node, ast.ClassDef))


@cache
def fields(owner: ast.ClassDef) -> set[str]:
    """What a class assigns of `self`, or declares."""
    found = {
        node.target.id for node in owner.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(owner):
        targets = [t for t in assigned(node) if isinstance(t, ast.Attribute)]
        found |= {t.attr for t in targets if path_of(t.value) == "self"}
    return found


@cache
def of_owners_alone() -> frozenset[str]:
    """Names of fields that only owners have, whatever their instances are called somewhere."""
    who = defaultdict(set)
    for file in ALL:
        for owner in classes(nodes(file)):
            for name in fields(owner):
                who[name].add(owner.name)
    return frozenset(name for name, owners in who.items() if owners <= OWNERS.keys())


def from_outside(found: list[ast.AST], alone: frozenset[str]) -> Iterator[str]:
    """Assignments to fields of owners that are not made by their own class, of a tree's nodes."""
    own = {id(node): owner for owner in classes(found) if owner.name in OWNERS for node in ast.walk(owner)}
    for node in found:
        calls = [node] if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" else []
        if any(is_owner(call.args[0]) for call in calls):
            yield ast.unparse(node)
        for target in assigned(node):
            if not isinstance(target, ast.Attribute) or path_of(target.value) == "self":
                continue
            inside = id(node) in own and target.attr in fields(own[id(node)])
            if (is_owner(target.value) or target.attr in alone) and not inside:
                yield ast.unparse(target)


def test_nobody_assigns_a_field_from_outside() -> None:
    found = {place(file): {*from_outside(nodes(file), of_owners_alone())} for file in ALL}
    assert {file: these for file, these in found.items() if these} == LEFT


def test_an_assignment_from_outside_is_seen() -> None:
    source = """
class Lineage:
    def moved(self, new):
        self.successor, self.taken = new.lineage, None
        self.successor.taken = {}
        self.runtime.epoch += 1
        del state.executor.grads["a"]
class Other:
    def look(self, known):
        known.base, self.mine = 1, 2
        with noted() as self.run.logs[0]:
            setattr(lineage_of(state), "broken", "")
"""
    found = [*from_outside([*ast.walk(ast.parse(source))], frozenset({"base", "epoch"}))]
    assert sorted(found) == [
        "known.base",
        "self.run.logs",
        "self.runtime.epoch",
        "setattr(lineage_of(state), 'broken', '')",
        "state.executor.grads",
    ]


TAKE_PART = ("arrival", "veto", "streamed", "remat")  # in steps, through the gradient sink or the runtime's gate
KNOW = ("_engine/", "_verbs.py", "_runtime/runtime.py", "_runtime/agreement.py")


def test_the_engine_and_the_verbs_know_nobody_who_takes_part_in_a_step() -> None:
    def known(file: Path) -> list[str]:
        names = {getattr(node, key, None) for node in nodes(file) for key in ("id", "attr", "arg", "module", "name")}
        words = {name for name in names if isinstance(name, str) and name != "arrivals"}
        return [name for name in words if any(part in name.lower() for part in TAKE_PART)]

    files = [file for file in CORE if place(file).startswith(KNOW)]
    assert len(files) > 3
    assert not found_in(files, known)


def test_every_owner_is_there() -> None:
    there = {owner.name for file in ALL for owner in classes(nodes(file))}
    assert OWNERS.keys() <= there
