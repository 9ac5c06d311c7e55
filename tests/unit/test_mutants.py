"""What `make mutants` changes, and that a change is the same one wherever it is looked for."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from mutants import blocks
from mutants.cover import Cover
from mutants.operators import Mutant, draw, found_again, in_both, mutants_of, mutants_of_text
from mutants.play import by_file, chosen

ROOT = Path(__file__).parents[2]


def changes(body: str) -> list[tuple[str, str]]:
    """Operator and changed line of each mutant of a function with this body."""
    return [(one.operator, one.after) for one in mutants_of_text(f"def f(x, y):\n    {body}\n", "a.py")]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("z = x < y", [("compare", "z = x <= y")]),
        ("z = x == y", [("compare", "z = x != y")]),
        ("z = x is not y", [("compare", "z = x is y")]),
        ("z = (x) not in (y)", [("compare", "z = (x) in (y)")]),
        ("z = x < y > x", [("compare", "z = x <= y > x"), ("compare", "z = x < y >= x")]),
        ("z = x and y and x", [("and/or", "z = x or y or x")]),
        ("z = not x", [("not", "z = x")]),
        ("z = x + y", [("arithmetic", "z = x - y")]),
        ("x -= y", [("delete", "pass"), ("arithmetic", "x += y")]),
        ("z = x // y", [("arithmetic", "z = x * y")]),
        ("z = 'a' + x", []),
        ("z = [7, False]", [("constant", "z = [8, False]"), ("true/false", "z = [7, True]")]),
        ("return x", [("return", "return None")]),
        ("return None", []),
        ("return", []),
        ("x.y = y", [("delete", "pass")]),
        ("x(y)", [("delete", "pass")]),
        ("raise x(f'{y + 1}', 3)", [("delete", "pass")]),
        ("'''1 < 2'''", []),
        ("assert x < 1", []),
        ("z = f'{x + 1}'", []),
        ("z: 'x < 1' = y", []),
        ("z = lambda a=1: x < y", [("compare", "z = lambda a=1: x <= y")]),
    ],
)
def test_an_operator_changes_what_it_says(line: str, expected: list[tuple[str, str]]) -> None:
    assert changes(line) == expected


def test_loops_go_on_or_end() -> None:
    source = "def f(x):\n    for y in x:\n        if y:\n            break\n        continue\n"
    found = [(one.line, one.operator, one.after) for one in mutants_of_text(source, "a.py")]
    assert found == [(4, "break/continue", "continue"), (5, "break/continue", "break")]


def test_only_what_runs_in_functions_is_changed() -> None:
    source = (
        "from typing import TYPE_CHECKING\n__all__ = ['f', 1]\nLEAST = 1 < 2\nif TYPE_CHECKING:\n    import x\n"
        "class C:\n    size: int = 3\n    def f(self, x: int = 4) -> 'a < b':\n        '''5 < 6'''\n        return x\n"
    )
    found = mutants_of_text(source, "a.py")
    assert [(one.function, one.operator, one.line) for one in found] == [("C.f", "return", 10)]
    assert found[0].applied(source) == source.replace("return x", "return None")


def test_lines_stay_where_they_are_and_characters_of_several_bytes_count_once() -> None:
    source = "def f(x, y):\n    é = 'é'; return (\n        x\n        <\n        y\n    )\n"
    compare, back = sorted(mutants_of_text(source, "a.py"), key=lambda one: one.operator)
    assert compare.applied(source) == source.replace("<", "<=")
    assert (compare.line, compare.before, compare.after) == (3, "<", "<=")
    assert back.applied(source) == "def f(x, y):\n    é = 'é'; return None\n"


@cache
@cache
def of_the_package() -> list[Mutant]:
    return mutants_of(ROOT / "functional_fsdp")


def test_all_mutants_of_the_package_differ_and_parse() -> None:
    mutants = of_the_package()
    assert not [one.file for one in mutants if one.file.startswith(("transforms", "_launch"))]
    assert len({(one.file, one.key) for one in mutants}) == len(mutants) > 5000
    for one in mutants[::97]:
        source = (ROOT / "functional_fsdp" / one.file).read_text()
        mutated = one.applied(source)
        assert mutated != source
        ast.parse(mutated)


def test_a_seed_draws_the_same_ones_again() -> None:
    mutants = of_the_package()
    assert draw(mutants, 30, 0) == draw(mutants, 30, 0) != draw(mutants, 30, 1)
    assert len(draw(mutants[:7], 30, 0)) == 7


def test_a_mutant_is_found_again_under_another_path() -> None:
    source = "class C:\n    def f(self, x):\n        return x < 1\n"
    moved = "def g(x):\n    return x < 1\n\n\n" + source.replace("return", "x = 2\n        return")
    here, there = mutants_of_text(source, "_plan/order.py"), mutants_of_text(moved, "_order.py")
    for one in here:
        again = found_again(one, there)
        assert again is not None
        assert (again.line, again.function, again.after) == (8, "C.f", one.after)
    assert in_both(here, there) == here
    assert in_both(here, mutants_of_text(moved.replace("return x < 1", "return x < 3"), "_order.py")) == []
    assert found_again(here[0], [*there, *mutants_of_text(source, "_other.py")]) in there  # the file's name decides
    assert found_again(here[0], [*mutants_of_text(source, "a.py"), *mutants_of_text(source, "b.py")]) is None


SOURCE = '''"""A file."""

from __future__ import annotations


def f(x):
    """What it does."""
    if x:
        return 1
    elif x is None:
        x = 2
    else:
        @g
        def h():
            pass
        return h
    return x


def short(x): return x
'''


def test_blocks_begin_where_they_can_be_probed() -> None:
    assert blocks.blocks_of(SOURCE) == [(8, 17), (9, 9), (11, 11), (13, 16), (15, 15), (17, 17)]
    assert blocks.around(blocks.blocks_of(SOURCE), 15) == [15, 13, 8]
    lines = blocks.probed(SOURCE, "a.py").splitlines()
    assert lines[7:9] == ['    """What it does."""', "    _ic_() or _hit_('a.py:8')"]
    assert lines[15:18] == ["    else:", "        _ic_() or _hit_('a.py:13')", "        @g"]
    ast.parse("\n".join(lines))


def test_the_fast_tests_that_run_the_block_come_first() -> None:
    seconds = {"tests/ranks/test_a.py::t": 0.5, "tests/unit/test_b.py::t": 1.0, "tests/unit/test_c.py::t": 20.0}
    seconds |= {f"tests/unit/test_d.py::t{i}": 0.1 for i in range(8)}
    everyone = [*seconds]
    cover = Cover(seconds, {"a.py:8": everyone, "a.py:9": everyone[:3], "a.py:17": everyone})
    returned, elsewhere, last = [one for one in mutants_of_text(SOURCE, "a.py") if one.operator == "return"][:3]
    assert chosen(returned, SOURCE, cover) == ([everyone[1], everyone[2]], [everyone[0]], True)
    assert elsewhere.line == 16  # nobody runs its block: those that run the next one around it
    first, then, reached = chosen(elsewhere, SOURCE, cover)
    assert not reached
    assert {*first, *then} == {*everyone}
    assert first[:6] == [f"tests/unit/test_d.py::t{i}" for i in range(6)]
    assert chosen(last, SOURCE, cover) == (first, then, True)


def test_tests_of_a_file_run_together() -> None:
    assert by_file(["b::1", "a::1", "b::2", "c::1", "a::2"]) == ["b::1", "b::2", "a::1", "a::2", "c::1"]
