"""Random driven programs on GPUs, beside the plain module on the CPU: the attack's, see `attack.driven`."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
from attack import driven
from gpu.machine import own_gpus

from functional_fsdp import launch
from functional_fsdp._launch.launch import stop_workers

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("fresh_workers")]

RANKS = 2


def played(first: int, count: int, transport: str) -> list[tuple[int, str]]:
    """Cases for two ranks that did not come out as the plain module's."""
    warnings.simplefilter("ignore")
    rank = int(os.environ["RANK"])
    found: list[tuple[int, str]] = []
    index, done = first, 0
    while done < count:
        case: dict[str, Any] = driven.draw(11, index)
        if case["world"] == RANKS and (transport == "collective" or driven.fixed(case)):
            verdict = driven.play({**case, "transport": transport}, rank, "")
            if verdict.column != "right":
                found.append((index, verdict.text))
            done += 1
        index += 1
    return found


@pytest.fixture(scope="module", params=["collective", "copy_engine", pytest.param("symmetric", marks=own_gpus)])
def transport(request: pytest.FixtureRequest) -> str:
    """Workers of its own each: a process has one kind of symmetric memory."""
    stop_workers()
    return str(request.param)


@pytest.mark.parametrize("first", [0, 100, 200, 300])
def test_driven_programs_are_the_plain_modules(first: int, transport: str) -> None:
    """Also where one rank leaves something out in the first step, whose order is only guessed."""
    assert launch(played, (first, 20, transport), nprocs=RANKS, timeout=20) == [[], []]
