"""A fixed share of the attack (`make attack` has any size of it), and whether the attack finds what it should."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("ATTACK_PATIENCE", "3")  # other work may share the cores
from attack import harness, planted, players, shrink, trees
from attack.verdict import COLUMNS, LATE, Verdict, worst

SEED = 7
SHARE = {
    "specs": 2,
    "driven": 3,
    "functions": 4,
    "objects": 12,
    "buffers": 3,
    "written": 8,
    "remat": 4,
    "interrupts": 2,
    "files": 4,
    "differ": 4,
}
MORE = (("specs", 30), ("driven", 300), ("kills", 1), ("buffers", 5), ("interrupts", 4))
LARGE = [pytest.param(*row, marks=pytest.mark.large) for row in MORE]
KNOWN: set[str] = set()  # what the package still gets wrong, now and then; a name goes when it is right
FAULTS = {"wrong": "wrong", "hang": "hang", "crash": "crash", "raw": "raw", "unfit": "unfit"}


def played(kind: str, count: int) -> dict[str, Verdict]:
    cases = [harness.draw(kind, SEED, index) for index in range(count)]
    found: dict[str, Verdict] = {}
    for world in sorted({case["world"] for case in cases}):
        some = [case for case in cases if case["world"] == world]
        found |= {case["name"]: verdict for case, verdict in zip(some, harness.play(some), strict=True)}
    return found


@pytest.mark.parametrize(("kind", "count"), [*SHARE.items(), *LARGE])
def test_a_share_of_the_attack(kind: str, count: int) -> None:
    found = played(kind, count)
    assert len(found) == count
    bad = {name: (verdict.column, verdict.text) for name, verdict in found.items() if not verdict.fine}
    assert not {name: said for name, said in bad.items() if name not in KNOWN}


@pytest.mark.parametrize("order", ["ranks", "random"])
def test_a_share_is_right_on_simulated_ranks_in_two_orders(order: str) -> None:
    """Of driven programs `test_driven_programs` has both orders."""
    count = 5
    cases = [harness.draw("specs", SEED + 2, index) for index in range(count)]
    verdicts = harness.play_simulated(cases, order, SEED)
    assert len(verdicts) == count
    assert not [(case["name"], one.text) for case, one in zip(cases, verdicts, strict=True) if not one.fine]


@pytest.mark.parametrize("name", ["specs:0:369", "specs:1:973", "differ:1:99", "differ:0:84"])
def test_what_failed_once_is_right(name: str) -> None:
    """A tied unit whose gradient is late; a unit without elements beside one; one rank that clips; another order."""
    kind, seed, index = name.split(":")
    (verdict,) = harness.play([harness.draw(kind, int(seed), int(index))])
    assert verdict.column == ("refused" if kind == "differ" else "right"), verdict.text


@pytest.mark.parametrize(
    ("name", "column"), [("remat:8103:13", "right"), ("functions:8101:99", "right"), ("specs:8102:3", "refused")]
)
def test_what_failed_once_on_simulated_ranks(name: str, column: str) -> None:
    """A frozen unit that the backward uses last, twice in a step; and ranks that wait for each other in a circle, over
    two axes, which is said at once."""
    kind, seed, index = name.split(":")
    (verdict,) = harness.play_simulated([harness.draw(kind, int(seed), int(index))])
    assert verdict.column == column, verdict.text
    assert column == "right" or "waits for this one at" in verdict.text


def test_a_case_that_took_too_long_beside_others_is_what_comes_when_it_is_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[int, int]] = []

    def work(tasks: list[Any], players: int, limit: float) -> Any:
        given.append((len(tasks), players))
        for task in tasks:
            ((_, _, index),) = task[1]
            late = index == 3 or (index == 1 and len(given) == 1)
            yield task, [{"column": "hang", "text": f"{LATE}: rank 0 is here"} if late else {"column": "right"}]

    monkeypatch.setattr(players, "_work", work)
    monkeypatch.setattr(players, "BATCH", {"specs": 1})
    found = players.play_all({"specs": 5}, 0, 4)["specs"]
    assert given == [(5, 4), (2, 1)]
    assert [found.verdicts[f"specs:0:{i}"].column for i in range(5)] == ["right", "right", "right", "hang", "right"]


def test_the_same_seed_draws_the_same_cases() -> None:
    for kind in harness.KINDS:
        cases = [harness.draw(kind, 3, index) for index in range(30)]
        assert cases == [harness.draw(kind, 3, index) for index in range(30)]
        assert len({repr(case) for case in cases}) == 30


@pytest.mark.large
def test_what_goes_wrong_is_found_and_the_rest_of_the_batch_is_played() -> None:
    cases = [planted.draw(0, 0)]
    for fault in FAULTS:
        cases += [{**planted.draw(0, 0), "fault": fault}, planted.draw(0, 0)]
    verdicts = harness.play(cases)
    assert [v.column for v in verdicts[::2]] == ["right"] * 6
    assert [v.column for v in verdicts[1::2]] == list(FAULTS.values())
    wrong, hang, crash, raw, unfit = verdicts[1::2]
    assert "elements differ" in wrong.text
    assert "rank 1 is in planted.py" in hang.text
    assert "exited with code 3" in crash.text
    assert "The size of tensor a" in raw.text
    assert "rank 1: ScheduleError: for no reason" in unfit.text


@pytest.mark.large
@pytest.mark.parametrize("kind", ["kills", "differ"])
def test_players_fork_what_the_package_starts(kind: str) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "tools/attack", "--kind", kind, "--n", "3", "--players", "1", "--shrink", "0"]
    said = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert f"{kind:11}{3:6}" in said.stdout


@pytest.mark.large
def test_a_failure_is_shrunk_to_what_it_takes() -> None:
    case, verdict = shrink.shrunk({**planted.draw(0, 0), "fault": "wrong"}, "wrong", 250)  # it ends long before
    assert verdict is not None
    assert verdict.column == "wrong"
    text = shrink.described(case)
    assert text.count("  leaf ") == 1
    assert '"op": "step"' in text


def test_ranks_that_disagree_are_no_success() -> None:
    some = [Verdict("right", "", {"end": "right"}), Verdict("refused", "SpecError", {"end": "refused"})]
    assert worst(some).column == "accepted"
    assert worst([Verdict("right"), Verdict("wrong", "x"), Verdict("hang")]).text.startswith("rank 1: x")
    ended = [Verdict("refused", "half updated", {"ended": True}), Verdict("hang", "CommError: gone")]
    assert worst(ended).column == "refused"


def test_trees_come_back_as_they_were_built() -> None:
    kinds: Counter[str] = Counter()
    for index in range(200):
        for model in harness.draw("specs", 1, index)["models"]:
            leaves, numbers = model["leaves"], list(range(len(model["leaves"])))
            tree = trees.build(leaves, numbers)
            assert [trees.find(tree, leaf, leaves) for leaf in leaves] == numbers
            assert len(set(trees.paths_of(leaves))) == len(leaves)
            kinds.update(kind for leaf in leaves for kind, _ in leaf["keys"])
    assert set(kinds) == set("dlto")


def test_a_table_has_every_column() -> None:
    found = players.Found({"a:0:0": Verdict("right"), "a:0:1": Verdict("wrong", "x"), "a:0:2": Verdict("wrong", "x")})
    lines = players.table({"a": found}).splitlines()
    assert lines[0].split() == ["kind", "tried", *COLUMNS, "seconds"]
    assert dict(zip(lines[0].split(), lines[1].split(), strict=True))["wrong"] == "2"
    assert [(names, v.column) for _, names, v in players.groups({"a": found})] == [(["a:0:1", "a:0:2"], "wrong")]
