"""Ranks whose gradients come at other times and in another order, and that leave units out: all come to the same
collectives. Random programs, compared with arithmetic."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.presets import PRESETS, TWO_AXES
from support.ranks import each_rank
from support.tables import FULL

import functional_fsdp as fsdp
from functional_fsdp import Schedule, Spec

PLACEMENTS = PRESETS
Program = dict[str, Any]


def program(seed: int, ranks: int) -> Program:
    """What each rank does in a step: which units it uses, and how late, in which order, their gradients come."""
    draw = random.Random(seed)
    n = draw.randint(2, 7)
    names = [f"u{i}" for i in range(n)]
    sizes = {name: draw.choice((0, 7, 300, 300, 1000)) for name in names}
    if not any(sizes.values()):
        sizes[names[0]] = 3
    left_out = [{name for name in names if draw.random() < draw.choice((0, 0, 0.3))} for _ in range(ranks)]
    for some in left_out:
        if len(some) == n:
            some.remove(draw.choice(names))
    return {
        "sizes": sizes,
        "left out": left_out,
        "late": [draw.choice((0, 0, 1, 2, 3, n)) for _ in range(ranks)],
        "shuffled": [draw.random() < 0.3 for _ in range(ranks)],
        "prefetch": draw.randint(0, 3),
        "placement": draw.choice(PLACEMENTS),
        "transport": draw.choice(("collective", "copy_engine")),
        "sum": draw.choice(("auto", "fp32")),
        "lasts": draw.choice(((True,), (True,), (False, True), (True, True), (False, False))),
        "early release": draw.random() < 0.5,
        "seed": seed,
        "ranks": ranks,
    }


def as_arithmetic(case: Program) -> None:
    """Two steps of this program, on these ranks, are those of arithmetic."""
    two = case["placement"] in TWO_AXES or "rows" in case
    rows = case["rows"] if "rows" in case else case["ranks"] if case["seed"] % 3 == 0 else 1
    mesh = fsdp.local_mesh(replica=rows, shard=-1) if two else fsdp.local_mesh()
    rank, world = dist.get_rank(), case["ranks"]
    placement = getattr(fsdp, case["placement"])(*(("replica", "shard") if two else ("data",)))
    schedule = Schedule(prefetch=case["prefetch"], debug=True)
    spec = Spec(
        mesh, placement, schedule=schedule, precision=fsdp.Precision(sum=case["sum"]), average="sum",
        units=list(case["sizes"]), transport=case["transport"],
    )  # fmt: skip
    params = {name: torch.zeros(size) for name, size in case["sizes"].items()}
    state = fsdp.shard(params, spec, fsdp.sgd(lr=1.0))
    mine = [unit for unit in state.units if unit not in case["left out"][rank]]
    draw = random.Random(case["seed"] * 100 + rank)
    value = {name: float(i + 1) for i, name in enumerate(case["sizes"])}
    expected = dict.fromkeys(params, 0.0)
    for _ in range(2):
        for last in case["lasts"]:
            held: list[Any] = []

            def give(state: fsdp.State, last: bool = last, held: list[Any] = held) -> fsdp.State:
                unit, grads = held.pop(draw.randrange(len(held)) if case["shuffled"][rank] else 0)
                return fsdp.reduce(state, grads, unit, last_microbatch=last)

            for unit in mine:
                state, _ = fsdp.unshard(state, unit)
                state = fsdp.release(state, unit)
            for unit in reversed(mine):
                state, w = fsdp.unshard(state, unit)
                for key, weight in w.items():
                    assert (weight == expected[unit]).all(), case
                    held.append((unit, {key: torch.full_like(weight, value[unit] * (rank + 1))}))
                if case["early release"]:
                    state = fsdp.release(state, unit)
                while len(held) > case["late"][rank]:
                    state = give(state)
                if not case["early release"]:
                    state = fsdp.release(state, unit)
            while held:
                state = give(state)
        state = fsdp.step(state)
        for name in expected:
            users = sum(r + 1 for r in range(world) if name not in case["left out"][r])
            expected[name] -= len(case["lasts"]) * value[name] * users
        for path, leaf in fsdp.full_params(state).items():
            assert (leaf == expected[path]).all(), case


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.large), 3])
@each_rank("ranks", timeout=60)
def test_gradients_come_at_other_times_on_each_rank(ranks: int) -> None:
    for seed in range(24 if FULL else 12):
        as_arithmetic(program(seed, ranks))


@pytest.mark.parametrize(
    ("placement", "lasts", "late", "prefetch"),
    [
        ("zero3", (False,), [0, 3, 0, 0], 1),
        ("zero3", (True,), [3, 1, 0, 0], 1),
        ("hsdp", (False, True), [0, 1, 1, 2], 0),
    ],
)
@each_rank(4)
def test_ranks_of_two_axes_help_who_waits(placement: str, lasts: Any, late: list[int], prefetch: int) -> None:
    """Along two axes a collective takes ranks that are along neither with who waits; and several wait on one lane."""
    case = program(1, 4) | {
        "placement": placement, "lasts": lasts, "late": late, "prefetch": prefetch, "rows": 2, "early release": True,
        "sizes": {f"u{i}": 300 for i in range(5)}, "left out": [set()] * 4, "shuffled": [False] * 4,
        "transport": "collective", "sum": "auto",
    }  # fmt: skip
    as_arithmetic(case)
