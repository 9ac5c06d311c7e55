"""Tables: what `print` says of a spec, a layout, a plan, a cursor and a state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from .._common.calls import provide
from .._common.device import in_host_memory
from .._common.torch_names import pytree
from .._common.tree import bytes_text, table
from .._host_memory.copy_lane import planned_transfer
from .._plan.cursor import Cursor
from .._plan.layout import Bucket, Layout
from .._plan.plan import Plan, PlannedUnit
from .._spec.settings import opaque_settings
from .._spec.spec import Spec
from .._state.state import State
from .._storage import FlatBuffer

FOUND = "found by what repeats in the paths; small numbered layers joined, containers divided"


def spec_table(spec: Spec) -> str:
    """Each setting, in words."""

    def rules(pairs: Any) -> str:
        return ", ".join(f"{k}: {v}" for k, v in pairs)

    whole = len(spec.placements) == 1 and spec.placements[0][0] == "*"
    apart = [
        f"; {'' if whole else f'{pattern}: '}none over {', '.join(own)}, where ranks have weights of their own"
        for pattern, rule in spec.placements
        if (own := [axis for axis in rule.apart(spec.axes) if axis not in spec.own_axes])
    ]
    rows = [
        ("mesh", " × ".join(f"{axis} {size}" for axis, size in spec.axes.items())),
        ("placement", str(spec.placements[0][1]) if whole else rules(spec.placements)),
        ("precision", rules(spec.precisions) if spec.precisions[0][0] != "*" else str(spec.precisions[0][1])),
        ("units", FOUND if spec.units is None else str(spec.units)),
        ("labels", rules(spec.labels) or "default"),
        ("trainable", rules(spec.trainable) or "as given"),
        ("gradients", f"{spec.average} over data ranks{''.join(apart)}"),
        ("schedule", str(spec.schedule)),
        ("transport", repr(spec.transport)),
    ]
    rows[2:2] = [("own" if not i else "", f"{k}: {'; '.join(map(str, some))}") for i, (k, some) in enumerate(spec.own)]
    if any(rule.on_host for _, rule in spec.placements):
        rows.insert(2, ("host's memory", _kept_in_host_memory(spec, whole)))
    return table(("Spec", ""), rows)


def _kept_in_host_memory(spec: Spec, whole: bool) -> str:
    found = []
    for pattern, rule in spec.placements:
        kinds = ["main weights", "optimizer state"] if rule.on_host else []
        kinds += ["main gradients"] * ("grads" in rule.on_host) + ["compute shards"] * rule.copy_on_host
        if kinds:
            found.append(f"{'' if whole else f'{pattern}: '}{', '.join(kinds)}")
    return f"{'; '.join(found)} (bytes: print(layout); what a step moves: host_transfer(state))"


def layout_table(layout: Layout) -> str:
    """Each bucket: elements, placement, dtypes and bytes; how many units, and what lies in the host's memory."""
    rows = []
    for unit in layout.units:
        for bucket in unit.buckets:
            dtypes = dict.fromkeys(map(_short, (bucket.main, bucket.compute, bucket.gather, bucket.grads)))
            size = sum(leaf.numel for leaf in bucket.leaves)
            sizes = (bytes_text(bucket.nbytes(kind)) for kind in ("main", "weights"))
            grads = bytes_text(bucket.nbytes("grads")) if bucket.trainable else "frozen"
            kinds = "/".join(dtypes) + _codecs(bucket)
            pad = bucket.numel - size
            rows.append((bucket.name, len(bucket.leaves), size, pad, bucket.placement, kinds, *sizes, grads))
    sizes_of = ("main/rank", "weights/rank", "grads/rank")
    header = ("bucket", "leaves", "elements", "pad", "placement", "dtypes", *sizes_of)
    return table(header, rows) + _said_of_units(layout) + _said_in_host_memory(layout)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _said_of_units(layout: Layout) -> str:
    sizes = {unit.name: sum(leaf.numel for bucket in unit.buckets for leaf in bucket.leaves) for unit in layout.units}
    if not sizes:
        return ""
    largest = max(sizes, key=lambda name: sizes[name])
    share = sizes[largest] / max(sum(sizes.values()), 1)
    return f"\n{len(sizes)} unit{'s' * (len(sizes) > 1)}, the largest of {share:.0%} of all elements: {largest!r}"


def _said_in_host_memory(layout: Layout) -> str:
    sizes = {kind: layout.host_nbytes(kind) for kind in ("main", "weights", "grads")}
    if not any(sizes.values()):
        return ""
    said = ", ".join(f"{kind} {bytes_text(nbytes)}" for kind, nbytes in sizes.items() if nbytes)
    return (
        f"\nin the host's memory, on a rank: {said}, and what an optimizer keeps; host_transfer(state) says what a "
        "step moves, of an abstract_state, too"
    )


def _codecs(bucket: Bucket) -> str:
    """What a bucket's bytes are, where they are packed."""
    said = "".join(f" {codec}" for codec in dict.fromkeys(str(leaf.form.codec) for leaf in bucket.leaves if leaf.form))
    return said + f" gather {bucket.gather_codec}" * (bucket.gather_codec is not None)


def plan_table(plan: Plan) -> str:
    """Each unit, where it lies and when; what a step issues; and bytes."""
    reduces = Counter(reduction.unit for reduction in plan.reductions)
    rows = []
    for unit in plan.units:
        kept = "yes" if unit.kept else "-"
        rows.append((unit.name, *_place(unit, "resident"), unit.gathers or "-", kept, reduces.get(unit.name) or "-"))
    depth, held = plan.schedule.prefetch, sum(unit.nbytes for unit in plan.units if unit.kept)
    ways = Counter(way for _, way in plan.activations)
    return "\n".join(
        (
            table(("unit", "bytes", "address", "gathered in uses", "gathers", "kept", "reduces"), rows),
            f"{len(plan.uses)} uses, {sum(u.gathers for u in plan.units)} gathers, {len(plan.reductions)} "
            f"reductions a step; prefetch {depth if isinstance(depth, int) else dict(depth)}"
            + (", debug" if plan.schedule.debug else ""),
            f"arena {bytes_text(plan.arena)} ({plan.rule}; lower bound {bytes_text(plan.bound)}, "
            f"{plan.excess:+.1f} %), "
            + (f"{bytes_text(held)} of it kept, " if plan.schedule.keep == "frozen" else "")
            + f"staging {bytes_text(plan.staging)}"
            + (f", exact sums {bytes_text(plan.received)}" if plan.received else ""),
            *([f"activations: {'; '.join(f'{n} modules {way}' for way, n in ways.items())}"] * bool(ways)),
        )
    )


def _place(unit: PlannedUnit, resident: str) -> tuple[str, str, str]:
    """Its bytes, its address, and in which uses it is gathered; of a unit that lies on every rank, `resident`."""
    lives = ", ".join(f"{a}–{b}" if a < b else str(a) for a, b in unit.lives)
    return (bytes_text(unit.nbytes), f"{unit.address:,}", lives) if unit.parts else (resident, "-", "-")


def cursor_table(cursor: Cursor) -> str:
    """Each unit of the plan, where it lies, and what it is now; and how far the step has come."""
    plan, count = cursor.plan, len(cursor.plan.uses)
    rows = []
    for unit in plan.units:
        rows.append((unit.name, *_place(unit, "-"), unit.gathers or "-", cursor.status(unit.name)))
    where = "nothing is begun" if cursor.idle else (
        f"use {cursor.at} of {count} comes next"
        + (f" ({plan.uses[cursor.at].unit})" if cursor.at < count else " (the program is through)")
    )  # fmt: skip
    waits = f", {cursor.early_bits.bit_count()} gradients wait for their turn" if cursor.early_bits else ""
    return (
        f"{table(('unit', 'bytes', 'address', 'gathered in uses', 'gathers', 'now'), rows)}\n"
        f"{where}; {cursor.issued} of {len(plan.gathers)} gathers and {cursor.reduced} of {len(plan.reductions)} "
        f"reductions of this pass issued{waits}"
    )


def state_table(state: State) -> str:
    """What a state is of, where it is in its step, and its trees."""
    axes = " × ".join(f"{axis} {n}" for axis, n in state.spec.axes.items())
    trees = {name: getattr(state, name) for name in ("main", "weights", "grads", "opt", "buffers", "extras")}
    trees |= {"residual": state.residual} if state.residual else {}
    what = f"State of {len(state.units)} units, {len(state.layout.paths)} leaves"
    hidden = opaque_settings(state.optimizer, "optimizer")
    more = f" and {len(hidden) - 2} more" if len(hidden) > 2 else ""
    unseen = f"\nranks cannot compare {', '.join(hidden[:2])}{more}" if hidden else ""
    moves = f"\n{planned_transfer(state)!r}; see host_transfer(state)" if state.layout.host_nbytes("main") else ""
    return f"{what}, mesh {axes}, step {state._steps}, {state._status()}\n{summary(trees)}{moves}{unseen}"


def summary(trees: Mapping[str, Any]) -> str:
    """A table with a row for each tree of tensors: how many, their bytes, their dtype, and how they lie."""
    rows: list[tuple[Any, ...]] = []
    for name, tree in trees.items():
        tensors = [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]
        dtypes = "/".join(dict.fromkeys(_short(t.dtype) for t in tensors))
        nodes = pytree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, FlatBuffer))
        buffer = next((node for node in nodes if isinstance(node, FlatBuffer)), None)
        states = ", ".join(f"{axis}: {s}" for axis, s in buffer.states) if buffer else ""
        far = sum(_far(node, name) for node in nodes)
        states += f"; {bytes_text(far)} in host memory" if far else ""
        size = bytes_text(sum(t.numel() * t.element_size() for t in tensors))
        rows.append((name, len(tensors), size, dtypes or "-", states or "-"))
    return table(("field", "tensors", "bytes a rank", "dtype", "placed"), rows)


def _far(node: Any, tree: str) -> int:
    """Bytes of a node of a tree that lie in the host's memory; of an abstract state, that would."""
    local = node.local if isinstance(node, FlatBuffer) else node
    if not isinstance(local, torch.Tensor):
        return 0
    there = in_host_memory(local)
    if local.is_meta and isinstance(node, FlatBuffer):
        bucket = node.bucket
        there = {"weights": bucket.copy_on_host, "grads": bucket.grads_on_host}.get(tree, bucket.on_host)
    return int(local.nbytes) if there else 0


provide("look", spec_table, layout_table, plan_table, cursor_table, state_table, summary)
