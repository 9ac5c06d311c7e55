"""Random trees, specs and schedules, and hashes of what is planned for them: layouts, plans, positions, owners, peaks.

`python tests/support/golden.py` prints the lines of `tests/unit/golden.txt`. They say what every rank of every version
computes alike: a change that is about speed changes none of them. (Checkpoints do not depend on them.)
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import torch

from functional_fsdp import Placement, Schedule, Spec, ddp, zero1, zero2, zero3
from functional_fsdp._common.errors import FsdpError
from functional_fsdp._extend import combined
from functional_fsdp._optim_extra.muon import Part, find_owners
from functional_fsdp._plan.cursor import Cursor, advance, nominal
from functional_fsdp._plan.layout import Bucket, Layout, Leaf, LeafInfo, plan_layout
from functional_fsdp._plan.plan import Plan, make_plan
from functional_fsdp.look.tables import Stretch, find_peak
from functional_fsdp.look.timeline import timeline_of

TREES = 100


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:10]


class Draw:
    """Random choices that are the same in every version of Python."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed).random

    def below(self, n: int) -> int:
        return int(self.random() * n)

    def among(self, some: Sequence[Any]) -> Any:
        return some[self.below(len(some))]

    def maybe(self, share: float) -> bool:
        return self.random() < share


def leaves_of(draw: Draw) -> list[LeafInfo]:
    """A tree as models have it: blocks, their stages, what comes before and after them, tied leaves, small layers."""
    width, found = draw.among((8, 24, 64)), list[LeafInfo]()
    names = draw.among(("blocks", "model.layers", "h", "encoder.stage"))
    parts = [("norm.weight", (width,)), ("attn.qkv.weight", (3 * width, width)), ("attn.qkv.bias", (3 * width,))]
    parts += [("mlp.up.weight", (4 * width, width)), ("mlp.down.weight", (width, 4 * width)), ("scale", ())]
    chosen = [part for part in parts if draw.maybe(0.7)] or parts
    half = draw.among((torch.float32, torch.bfloat16))
    if draw.maybe(0.8):
        tied = ("head.weight",) if draw.maybe(0.3) else ()
        found.append(LeafInfo("embed.weight", (draw.among((50, 1000)), width), half, True, tied))
    if draw.maybe(0.3):
        found += [LeafInfo(f"stem.{i}.weight", (width, 3 + i, 3, 3), torch.float32) for i in range(3)]
    count = 1 + draw.below(14)
    for i in range(count):
        if draw.maybe(0.1):
            found.append(LeafInfo(f"{names}.{i}.steps", (1,), torch.int64, False))
        for name, shape in chosen:
            dtype = torch.float32 if "norm" in name else half
            found.append(LeafInfo(f"{names}.{i}.{name}", shape, dtype, not draw.maybe(0.05)))
        if draw.maybe(0.3):
            found += [LeafInfo(f"{names}.{i}.experts.{e}.w", (width, width), half) for e in range(1 + draw.below(4))]
    if draw.maybe(0.3):
        found += [LeafInfo(f"decoder.{i}.conv.weight", (width, 2 + i), half) for i in range(1 + draw.below(12))]
    if draw.maybe(0.6):
        found.append(LeafInfo("norm.weight", (width,), torch.float32))
    if draw.maybe(0.6):
        found.append(LeafInfo("classifier.weight", (10, width), half))
    return sorted(found, key=lambda leaf: leaf.path) if draw.maybe(0.2) else found


def spec_of(draw: Draw, leaves: Sequence[LeafInfo], default_units: bool) -> Spec:
    two = draw.maybe(0.4)
    axes = {"replica": 2, "shard": draw.among((2, 4))} if two else {"data": draw.among((1, 2, 3, 8, 1024))}
    axis = "shard" if two else "data"
    placements: Any = draw.among((zero1, zero2, zero3, zero3, ddp))(axis)
    if two:
        every = Placement(weights=("shard",), grads=("replica", "shard"), main=("replica", "shard"))
        placements = draw.among((every, Placement(data=("replica", "shard"), main=("shard",), grads=("shard",))))
    if draw.maybe(0.2) and any("norm" in leaf.path for leaf in leaves):
        placements = {"*norm*": ddp(*axes), "*": placements}
    units: Any = None
    if not default_units:
        numbered = sorted({".".join(leaf.path.split(".")[:2]) for leaf in leaves if "." in leaf.path})
        choices = [[f"{part}"] for part in numbered] + [["*.0", "*.2"], ["*.experts.*"], {"big": ["*.1", "*.3"]}]
        units = draw.among((*choices, lambda path: path.split(".")[0], lambda path: path[:9] if "1" in path else None))
    labels = {"*weight": "muon"} if draw.maybe(0.5) else None
    with suppress(FsdpError):
        spec = Spec(axes, placements, units=units, labels=labels)
        plan_layout(leaves, spec)
        return spec
    return Spec(axes, placements)


def schedules_of(draw: Draw, layout: Layout) -> list[Schedule]:
    names = [unit.name for unit in layout.units]
    found = [Schedule(prefetch=depth) for depth in (0, 1, 1 + draw.below(4))]
    found.append(Schedule(keep=draw.among(("all", (), 1 << 14, 1 << 18, {draw.among(names)}))))
    order: list[Any] = [*names, *reversed(names)]
    for _ in range(draw.below(4)):
        order.insert(draw.below(len(order)), draw.among(names))
    if len(names) > 2 and draw.maybe(0.5):
        order.insert(draw.below(len(order)), (names[0], names[-1]))
    found.append(Schedule(order=order * draw.among((1, 1, 2)), prefetch={names[0]: 0, "*": 1 + draw.below(2)}))
    return found


def sharing_of(plan: Plan) -> list[tuple[str, list[str]]]:
    """By unit, those with which it shares bytes."""
    names = sorted(plan.by_name)
    return [(name, [other for other in names if plan.overlap(name, other)]) for name in names]


def walked(plan: Plan, draw: Draw) -> list[Any]:
    """What a program does that follows the plan, and one that leaves out and repeats some of it."""
    found: list[Any] = []
    for bounded, strict in ((False, True), (True, True), (draw.maybe(0.5), False)):
        cursor = Cursor(plan)
        for event in islice(nominal(plan, bounded), 400):
            if not strict and draw.maybe(0.15):
                event = draw.among((("unshard", (draw.among(plan.units).name,)), ("peer gathers", ()), event))
            elif not strict and draw.maybe(0.15):
                continue
            try:
                cursor, actions = advance(plan, cursor, event)
            except FsdpError as error:
                found.append(str(error))
                continue
            fields = [getattr(cursor, name) for name in ("at", "issued", "reduced", "phase", "live_bits", "held_bits")]
            found.append((event, actions, fields, cursor.used_bits, cursor.awaited_bits, cursor.seen_bits, cursor.due))
    return found


def parts_of(bucket: Bucket, leaf: Leaf) -> list[Part]:
    """What one rank owns of a leaf: each of its matrices."""
    if len(leaf.shape) < 2:
        return []
    rows, columns = leaf.shape[-2:]
    size = rows * columns
    return [Part((rows, columns), None, k * size, (rows, columns), 4 * size) for k in range(leaf.numel // size)]


def line_of(seed: int) -> str:
    """What is planned for one random tree, as a line of hashes."""
    draw = Draw(seed)
    leaves = leaves_of(draw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec = spec_of(draw, leaves, default_units=seed % 2 == 0)
        layout = plan_layout(leaves, spec)
    plans: list[str] = []
    walks: list[Any] = []
    shown: list[Any] = [repr(layout).rpartition("\n")[0]]  # its last line says the largest unit
    for k, schedule in enumerate(schedules_of(draw, layout)):
        plan = make_plan(layout, schedule, slots=1 + k % 2)
        plans.append(plan.hash)
        walks += walked(plan, draw)
        shown += [repr(plan), plan.turn, plan.due, plan.opens, sharing_of(plan)]
        shown.append(timeline_of(plan, gather=1e9, reduce=1e9, compute=1e-3))
        stretches = [*(Stretch(one.unit, i) for i, one in enumerate(plan.reductions)), Stretch("", 3)]
        shown += [repr(find_peak(layout, plan, {"main": 7}, stretches, gpu=gpu)) for gpu in (False, True)]
        back = tuple(unit.name for unit in reversed(layout.units))
        seen = [(back[:: draw.among((1, -1, 2))], back[draw.below(2) :], back[:1]) for _ in range(2)]
        shown.append(combined(seen, (*reversed(back), *back), back[:2]))
    trained, together = layout.trainable, [[*layout.trainable][k::3] for k in range(3)]
    owners = find_owners([*trained.values()], parts_of, together)
    here = tuple((axis, 0) for axis in spec.axes)
    few = [one for one in owners if one.ranks < 100]
    moves = [one.plan(tuple(b.name for b in one.buckets[::2]), (), here) for one in few]
    units = [(unit.name, unit.keys, unit.paths) for unit in layout.units]
    hashes = [*map(_digest, (units,)), layout.hash, *map(_digest, (plans, walks, shown, (owners, moves)))]
    return f"{seed} {len(leaves)} {len(units)} {' '.join(hashes)}"


if __name__ == "__main__":
    print("tree leaves units | units layout plans walks shown owners")
    for tree in range(TREES):
        print(line_of(tree))
