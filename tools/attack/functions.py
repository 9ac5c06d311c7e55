"""functions: programs of `driven` in which functions of torch.autograd are given weights, at any place.

    ["given", kind, i]      a function of this kind (`support.functions`) with a vector of part i; None: the loose one

Ranks leave out operations only where the function is alone in using its weight.
"""

from __future__ import annotations

import copy
from random import Random
from typing import Any

from support.functions import KINDS

from .driven import Case, Ops, play, smaller
from .driven import draw as driven

__all__ = ["draw", "play", "smaller"]


def draw(seed: int, index: int) -> Case:
    """The case of `driven` of this seed and index, with functions in it."""
    rng = Random(f"functions:{seed}:{index}")
    case = {**driven(seed, index), "kind": "functions"}
    parts = len(case["model"]["parts"])
    kinds, users = [*KINDS], [None, *range(parts)]
    some = [(rng.random(), ["given", rng.choice(kinds), rng.choice(users)]) for _ in range(rng.randint(1, 3))]
    for said in case["steps"]:
        for micro in said["micros"]:
            micro["ops"] = copy.deepcopy(micro["ops"])
            for where, op in some:
                flat = _flat(micro["ops"])
                at = round(where * len(flat))
                _insert(micro["ops"], at, op)
                micro["leave"] = [[n + (n >= at) for n in leave] for leave in micro["leave"]]
            if len(some) > 1 or some[0][1][2] is not None or ["scale"] in _flat(micro["ops"]):
                micro["leave"] = [[] for _ in micro["leave"]]  # a unit is used more than once
    return case


def _flat(ops: Ops) -> Ops:
    return [one for op in ops for one in (_flat(op[1]) if op[0] == "checkpoint" else [op])]


def _insert(ops: Ops, at: int, op: Any) -> None:
    """Put an operation in the place of this number."""
    for i, one in enumerate(ops):
        if at == 0:
            ops.insert(i, op)
            return
        inner = len(_flat([one]))
        if one[0] == "checkpoint" and at <= inner:
            _insert(one[1], at, op)
            return
        at -= inner
    ops.append(op)
