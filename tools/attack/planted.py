"""planted: cases that go wrong on purpose, to see that the harness finds it. No kind of the attack."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

import functional_fsdp as fsdp

from . import actor, specs
from .verdict import Verdict

Case = dict[str, Any]


def draw(seed: int, index: int) -> Case:
    """A case of `specs` on two ranks, that is right."""
    found = (specs.draw(seed, i) for i in range(index, index + 1000))
    case = next(c for c in found if c["world"] == 2 and "refuse" not in c and _plain(c))
    return {**case, "kind": "planted", "fault": "", "patience": 4}


def smaller(case: Case) -> list[Case]:
    """As those of `specs`, with the same fault."""
    return specs.smaller(case)


def _plain(case: Case) -> bool:
    ops = [op for model in case["models"] for op in model["program"]]
    plain = {"micro", "step", "finish", "full", "eval"}
    kinds = {model["settings"]["optimizer"]["kind"] for model in case["models"]}
    late = any(op.get("absent") or op.get("late") or op.get("skip") or op.get("inference") for op in ops)
    return {op["op"] for op in ops} <= plain and not late and kinds <= {"sgd", "adamw"} and len(ops) > 2


def play(case: Case, rank: int, folder: str) -> Verdict:
    """The case, with a fault of one rank where there is one."""
    fault = case["fault"]
    if fault:
        vars(actor)["fsdp"] = Faulty(fault, rank)
    try:
        return specs.play({**case, "kind": "specs"}, rank, folder)
    finally:
        vars(actor)["fsdp"] = fsdp


class Faulty:
    """The package, whose second rank makes a mistake in `step`."""

    def __init__(self, fault: str, rank: int) -> None:
        self.fault, self.rank = fault, rank

    def __getattr__(self, name: str) -> Any:
        return getattr(fsdp, name)

    def step(self, state: fsdp.State, **kwargs: Any) -> fsdp.State:
        state = fsdp.step(state, **kwargs)
        if self.rank == 1:
            if self.fault == "wrong":
                for name in state.layout.trainable:
                    state.main[name].local.add_(0.01)
            elif self.fault == "hang":
                time.sleep(1000)
            elif self.fault == "crash":
                os._exit(3)
            elif self.fault == "raw":
                torch.zeros(2) + torch.zeros(3)
            elif self.fault == "unfit":
                raise fsdp.ScheduleError("for no reason")
        return state
