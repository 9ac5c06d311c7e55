"""Random programs of verbs: microbatches in either way, steps, looks at a state in between. Plain values, drawn once.

    {"op": "micro", "way": "tree" | "unit", "last": bool, "skip": {rank: [luck, share]}, "late": {rank: units}}
    {"op": "step"}, {"op": "finish"}, {"op": "norm"}, {"op": "full"}, {"op": "eval"}, ...

`Actor` (actor.py) carries them out; what differs by rank is a function of the rank.
"""

from __future__ import annotations

from random import Random
from typing import Any

Op = dict[str, Any]


def draw(rng: Random, world: int, settings: dict[str, Any], own: bool) -> list[Op]:
    """A random program of one to three steps."""
    ops: list[Op] = []
    recorded = settings["schedule"].get("order") == "recorded"
    recording = recorded  # whether the next step is the first one of a lineage, which ranks have to take alike
    steps = rng.choice((1, 2, 2, 3))
    if rng.random() < 0.15:
        ops.append(
            {"op": "eval", "way": rng.choice(("tree", "unit")), "on": "between", "inference": rng.random() < 0.15}
        )
    for _ in range(steps):
        if rng.random() < 0.2:
            ops.append(_look(rng, between=True))
            recording |= recorded and ops[-1]["op"] in ("copy", "saveload", "replace")
        if rng.random() < 0.06:
            ops.append({"op": "abandon", "micro": _micro(rng, world, recorded, True)})
        micros = rng.choice((1, 1, 1, 2, 3))
        skip, varied = (
            None,
            rng.random() < 0.03,
        )  # a rank leaves the same units out in all microbatches, or others in each
        if world > 1 and not own and (varied or rng.random() < 0.15):
            skip = {str(rng.randrange(world)): [rng.random(), 0.4]}
        absent = rng.randint(1, 99) if rng.random() < 0.25 else None  # which leaves get no gradient in this step
        for k in range(micros):
            last = k == micros - 1
            if rng.random() < 0.25:
                last = not last
            micro = _micro(rng, world, recording, last)
            if skip and micro["way"] == "unit" and not recording:
                other = {rank: [rng.random(), 0.4] for rank in skip}
                micro = {k: v for k, v in micro.items() if k not in ("shuffle", "pairs")}
                micro |= {"skip": other, "varied": True} if varied else {"skip": skip}
            ops.append({**micro, "absent": absent})
            if rng.random() < 0.08:
                ops.append(_look(rng, between=False))
        if rng.random() < 0.5:
            ops.append({"op": "finish"})
        if rng.random() < 0.2:
            ops.append({"op": "clip", "limit": rng.choice((0.5, 1e9))} if rng.random() < 0.6 else {"op": "norm"})
        skipped = rng.random() < 0.5 if rng.random() < 0.08 else None
        ops.append({"op": "step", "skip": skipped})
        recording = False
    ops.append({"op": "full"})
    return ops


def _micro(rng: Random, world: int, plain: bool, last: bool) -> Op:
    op: Op = {"op": "micro", "way": rng.choice(("tree", "unit", "unit")), "last": last, "form": rng.choice("pppptc")}
    if plain or op["way"] == "tree":
        return {**op, "way": "unit"} if plain else op
    if world > 1 and rng.random() < 0.3:
        late = {str(r): rng.choice((0, 0, 1, 2, 3)) for r in range(world)}
        op["late"] = late
    if "late" not in op:
        if rng.random() < 0.2:
            op["shuffle"] = rng.randint(0, 99)
        if rng.random() < 0.15:
            op["pairs"] = True
    return op


def _look(rng: Random, between: bool) -> Op:
    names = ("full", "shards", "pmean", "eval") + (("copy", "saveload", "replace", "base", "drop") if between else ())
    name = rng.choice(names)
    op: Op = {"op": name}
    if name == "pmean":
        op |= {"seed": rng.randint(0, 99), "sum": rng.random() < 0.4}
    if name == "eval":
        op |= {"way": rng.choice(("tree", "unit")), "on": "between" if between else "middle"}
        op["inference"] = between and rng.random() < 0.1
    return op
