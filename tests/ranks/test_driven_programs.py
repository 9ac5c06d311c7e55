"""Driven programs that were once refused, or computed wrongly; the attack draws others (`make attack KIND=driven`)."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ.setdefault("ATTACK_PATIENCE", "3")  # other work may share the cores
from attack import harness
from support.tables import FULL

Ops = list[Any]


def use(*parts: int) -> Ops:
    return [["use", i] for i in parts]


def step(*ops: Any, leave: Any = (), more: Any = None, evaluate: bool = False) -> dict[str, Any]:
    """A step of one microbatch, or of another one with these ranks' omissions."""
    micros = [{"ops": [*ops], "leave": [*leave]}]
    if more is not None:
        micros.append({"ops": [*ops], "leave": [*more]})
    return {"micros": micros, "evaluate": evaluate}


def case(world: int, parts: str, *steps: Any, registered: Any = None, tied: Any = (), **settings: Any) -> Any:
    kinds = {"l": "linear", "b": "block", "n": "norm", "p": "pair"}
    model = {
        "parts": [kinds[letter] for letter in parts],
        "registered": registered or list(range(len(parts))),
        "tied": [*tied],
        "frozen": settings.pop("frozen", []),
    }
    for said in steps:
        for micro in said["micros"]:
            micro["leave"] += [[] for _ in range(world - len(micro["leave"]))]
    plain = {"preset": "zero3", "prefetch": 1, "keep": None, "order": None, "debug": True, "patience": 15}
    return {"kind": "driven", "world": world, "seed": 5, "model": model, "steps": [*steps]} | plain | settings


READS_NOTHING = ["given", "Untouched", None]  # and has a gradient of the weight that no other unit has
AROUND = ["checkpoint", use(0, 1, 2, 3)]
SKIPS = [*use(0), ["scale"], ["checkpoint", use(1, 2)], ["scale"]]
NO_GRAD = ["checkpoint", [*use(0, 1), ["nograd", 2]]]

CASES = {
    "a later step differentiates units again that the first step, which was recorded, only recomputed": case(
        1, "blnbbp", step(AROUND, ["detach"], *use(5)), step(*use(0, 1, 2, 3, 4), more=[]),
        frozen=[0, 1], prefetch=0, keep=["p5"], order="recorded",
    ),
    "the same of a unit that is whole on every rank, and tied": case(
        2, "lb", step(*use(0), ["detach"], *use(1, 0)), step(*use(0, 1, 0)), tied=[[1, 0]], preset="zero2"
    ),
    "an order that nobody can follow use by use": case(
        1, "bbblbn",
        step(["nograd", 0], ["scale"], *use(1, 2), ["scale"], *use(3), ["weight", 4], *use(5), more=[]),
        registered=[2, 5, 0, 1, 3, 4], tied=[[3, 4]], preset="zero1", keep=["p4"], order="recorded",
    ),
    "a rank leaves out a tied unit's own use before the one with another": case(
        2, "pnbnb", step(*use(0, 1, 2, 3, 4), ["scale"]), step(*use(0, 1, 2, 3, 4), ["scale"], leave=[[], [2, 3]]),
        registered=[2, 3, 1, 4, 0], tied=[[2, 4]], frozen=[3], prefetch=0, keep=[],
    ),
    "a rank leaves out the second use of a unit whose gradient is still to come": case(
        2, "lpn", step(*SKIPS), step(*SKIPS, leave=[[], [4]]), preset="zero2", keep=["p0"]
    ),
    "a rank's backward goes on where the first step's ended, in an order that was not guessed": case(
        2, "bnnp", step(*use(0, 1), ["scale"], ["detach"], *use(2, 3)),
        step(*use(0, 1), ["scale"], ["detach"], *use(2, 3), leave=[[3, 4], [0, 1, 4]]),
        registered=[1, 3, 2, 0], prefetch=3, keep="all",
    ),
    "and reaches a unit twice": case(
        2, "nnbl", step(*use(0), ["scale"], *use(1, 2, 2), ["detach"], *use(3)),
        step(*use(0), ["scale"], *use(1, 2, 2), ["detach"], *use(3), leave=[[], [5]]), preset="zero2", keep=[],
    ),
    "a recomputed unit would write over one that is frozen and done": case(
        1, "lpllb", step(NO_GRAD, *use(3), ["scale"], *use(4)), step(NO_GRAD, *use(3), ["scale"], *use(4), leave=[[3]]),
        frozen=[0, 4], keep=[],
    ),
    "zeros that come before any gradient of the last microbatch": case(
        4, "llbppb",
        step(*use(0, 1), ["loss"], *use(2, 3, 4, 5), ["scale"], leave=[[], [5, 7]], more=[[], [3, 4, 7], [0, 3, 6, 7]]),
        frozen=[0], preset="hfsdp", prefetch=3,
    ),
    "ranks that differentiate different units, none of them all": case(
        4, "lnlll",
        step(*use(0, 1), ["detach"], *use(2, 3, 4), leave=[[], [], [2, 3], [1, 3, 4]]),
        step(*use(0, 1), ["detach"], *use(2, 3, 4), leave=[[], [2], [2, 3, 5], [0, 3]], evaluate=True),
        preset="ddp", prefetch=3,
    ),
    "a unit of the first step that is registered last and used first, by one rank": case(
        4, "lbnl", step(*use(3, 0, 1, 2), leave=[[], [0], [0, 2], [0]]),
        step(*use(3, 0, 1, 2), leave=[[0], [], [0], [3]]),
    ),
    "a gradient of a weight that no forward reads": case(
        2, "ll", step(*use(1, 0), READS_NOTHING),
        step(*use(1, 0), READS_NOTHING, leave=[[], [0]], more=[[2]]), preset="zero2",
    ),
    "and on a rank nothing else": case(
        2, "lll", step(*use(0, 1), READS_NOTHING), step(*use(0, 1), READS_NOTHING, leave=[[0, 1]])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_program_is_the_plain_modules(name: str) -> None:
    """Losses, weights and evaluations; what the engine starts is what `advance` alone says. On ranks that take turns,
    in two orders; a sample, or with LAWS=full all, on processes, too."""
    some = [{**CASES[name], "name": name}]
    verdicts = [*harness.play_simulated(some), *harness.play_simulated(some, "random", len(name))]
    if FULL or [*CASES].index(name) % 8 == 0:
        verdicts += harness.play(some)
    assert [one.column for one in verdicts] == ["right"] * len(verdicts), [one.text for one in verdicts]
