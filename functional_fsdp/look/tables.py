"""What a state occupies, what its steps keep, and what `print` says.

    state_bytes               bytes on a rank, by field, on the device and in the host's memory
    StepMemory, find_peak     the largest moment of a step
    spec_table, layout_table, plan_table, cursor_table, state_table     what `print` says

`find_peak`: what the largest moment of a step is made of, from a plan and from what a model keeps alive. Pure.

    stretches    forward and loss ──▶ head ──▶ blocks.2 ──▶ blocks.1 ──▶ ... ──▶ the step's end
                 each ends where the gradients of a unit are complete

In every stretch there are the state, the arena, the staging of the reductions before it, the main gradients that they
made, and the most bytes of activations and gradients that are alive in it. The peak is the largest sum. An arena that
comes and goes and has two sides is as large as the units that live at the stretch's end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from .._common.calls import provide
from .._common.device import in_host_memory, keeps_released
from .._common.torch_names import pytree
from .._common.tree import bytes_text, table
from .._host_memory import planned_transfer
from .._plan.cursor import Cursor
from .._plan.layout import Bucket, Layout
from .._plan.plan import Plan, PlannedUnit, make_plan, records, reductions_at_once, staging_slots
from .._shared.device import best_device
from .._spec.settings import opaque_settings
from .._spec.spec import Schedule, Spec, Traits
from .._state.state import State
from .._storage import FlatBuffer

NAMES = {"main": "main weights", "weights": "compute copies", "opt": "optimizer state"}


def steps_on(state: State) -> tuple[torch.device, bool]:
    """The device that computes a state's steps, a GPU for an `abstract_state` where there is one; and whether what a
    step has released goes back to the allocator there, as on GPUs.

    Example: `steps_on(state)` gives `(device(type='cpu'), False)`.
    """
    own = next((buffer.local.device for buffer in state.main.values()), state.count.device)
    device = best_device() if own.type == "meta" else own
    return device, not keeps_released(device)


def plan_for(state: State, schedule: Schedule, forward: int | None = None) -> tuple[Plan, bool]:
    """The plan that steps of a state follow by this schedule, and whether its transport keeps arena and staging between
    them. `forward`: as for `make_plan`.

    Collective: none.

    Example: `plan, keeps_memory = plan_for(state, state.spec.schedule)`.
    """
    spec = state.spec
    keeps = spec.transport.stays and math.prod(spec.axes.values()) > 1
    first = tuple((axis, 0) for axis in spec.axes)  # lanes are the same for every rank
    kept = keeps and steps_on(state)[1]
    slots = staging_slots(state.layout, first, spec.average, spec.transport.traits, kept)
    return make_plan(state.layout, schedule, forward, slots), keeps


def state_bytes(state: State) -> tuple[dict[str, int], int]:
    """What a state takes on this rank: bytes on the device, by what it is, and bytes in the host's memory. Of an
    `abstract_state`, what a state of its kind would take. Gradients, which come and go, are left out.

    Collective: none.

    Example: `extend.state_bytes(state)` gives `({"main weights": 4096, "optimizer state": 8192}, 0)`.
    """
    near: dict[str, int] = {}
    host = 0
    for name in ("main", "weights", "opt", "buffers", "extras", "residual"):
        for node in pytree.tree_leaves(getattr(state, name), is_leaf=lambda x: isinstance(x, FlatBuffer)):
            tensor = node.local if isinstance(node, FlatBuffer) else node
            if not isinstance(tensor, torch.Tensor):
                continue
            if _is_far(tensor, node, name):
                host += tensor.nbytes
            else:
                kind = NAMES.get(name, name)
                near[kind] = near.get(kind, 0) + tensor.nbytes
    return near, host


def _is_far(tensor: torch.Tensor, node: Any, field: str) -> bool:
    """Whether a tensor lies in the host's memory; of an abstract state, whether it would. node: the FlatBuffer of which
    it is the local part, or itself."""
    if not tensor.is_meta or not isinstance(node, FlatBuffer):
        return in_host_memory(tensor)
    bucket = node.bucket
    there = {"weights": bucket.copy_on_host, "grads": bucket.grads_on_host}.get(field, bucket.on_host)
    return there and not bucket.by_leaf


ALWAYS = "always"


class Stretch(NamedTuple):
    """A part of a step. unit: whose gradients are complete at its end; "" for the last one. alive: the most bytes of
    activations and of gradients that are not reduced yet."""

    unit: str
    alive: int


@dataclass(frozen=True, repr=False)
class StepMemory:
    """What a step takes on a rank where it takes most, in bytes. Printing it gives a table.

    Attributes:
        parts: by name, what it is made of; parts of no bytes are left out.
        stays: the names of the parts that are there between steps, too.
        host: bytes of the state in the host's memory, which are not in `peak`.
        moved: bytes of activations that a step moves to the host's memory, and back.
        where: the moment of the peak, in words.
        stretches: what was found of the model, see `Stretch`.
        profile: what a step takes in each of them.
    """

    parts: Mapping[str, int]
    stays: frozenset[str]
    host: int
    moved: int
    where: str
    stretches: tuple[Stretch, ...]
    profile: tuple[int, ...]

    @property
    def peak(self) -> int:
        """Bytes on the device at the peak."""
        return sum(self.parts.values())

    @property
    def pool(self) -> int:
        """Bytes that come and go with a step: at the peak, what the memory pool of a CUDA graph of it holds."""
        return sum(size for name, size in self.parts.items() if name not in self.stays)

    def __repr__(self) -> str:
        rows = [
            (name, bytes_text(size), ALWAYS if name in self.stays else "in a step")
            for name, size in self.parts.items()
        ]  # fmt: skip
        far = f", and {bytes_text(self.host)} of the state in the host's memory" if self.host else ""
        far += f"; a step moves {bytes_text(self.moved)} of activations there and back" if self.moved else ""
        return (
            f"{table(('part', 'bytes', 'when'), rows)}\n"
            f"peak {bytes_text(self.peak)} a rank, {self.where}{far}; "
            f"{bytes_text(self.pool)} of it come and go with a step"
        )


def find_peak(
    layout: Layout,
    plan: Plan,
    state: Mapping[str, int],
    stretches: Sequence[Stretch],
    *,
    host: int = 0,
    moved: int = 0,
    keeps_memory: bool = False,
    gpu: bool = False,
) -> StepMemory:
    """Where a step takes most, and what it is made of there.

    Args:
        state: bytes a rank of the state on the device, by name of field.
        stretches: in order, as the model's backward completes gradients.
        host: bytes a rank of the state in the host's memory. moved: of activations that go there and come back.
        keeps_memory: whether the transport keeps arena and staging between steps.
        gpu: as on GPUs, where a reduction of one collective has the staging for itself, and what a smaller unit leaves
            free of the arena is given back.
    """
    sizes = {reduction.unit: reduction for reduction in plan.reductions}

    def room(unit: str) -> int:
        """Reductions that are in staging where this unit's is the newest; it is the same for all ranks."""
        buckets = [bucket for bucket in layout.by_name[unit].buckets if bucket.trainable] if unit else []
        ways = (records(b, tuple((axis, 0) for axis in b.placement.data), "mean", Traits()).reduce for b in buckets)
        return reductions_at_once(ways, keeps_memory or not gpu)

    comes_and_goes = gpu and not keeps_memory and plan.rule == "two sides"
    live = _live_bytes(plan)
    before: list[str] = []  # units whose gradients are complete, newest last
    made = 0  # bytes of their main gradients
    found: list[tuple[int, dict[str, int], str]] = []
    for unit, alive in stretches:
        busy = [sizes[name] for name in before[-room(before[-1]) :] if name in sizes] if before else []
        parts = {
            **state,
            "arena": live[sizes[unit].use if unit in sizes else -1] if comes_and_goes else plan.arena,
            "staging": plan.staging if keeps_memory else sum(one.nbytes for one in busy),
            "sums": sum(one.received for one in busy),
            "main gradients": made,
            "activations": alive,
        }
        done = f"after the gradients of {before[-1]!r}" if before else "in the forward, or where the backward begins"
        found.append((sum(parts.values()), parts, done))
        before.append(unit)
        trained = [b for b in layout.by_name[unit].buckets if b.trainable and not b.grads_on_host] if unit else []
        made += sum(bucket.nbytes("grads") + bucket.feedback * bucket.owed * bucket.wire.itemsize for bucket in trained)
    _, parts, where = max(found, key=lambda one: one[0])
    stays = frozenset(state) | (frozenset(("arena", "staging")) if keeps_memory else frozenset())
    profile = tuple(total for total, _, _ in found)
    return StepMemory({name: n for name, n in parts.items() if n}, stays, host, moved, where, tuple(stretches), profile)


def _live_bytes(plan: Plan) -> tuple[int, ...]:
    """Bytes of the units that are live, during each use."""
    changes = [0] * (len(plan.uses) + 1)
    for unit in plan.units:
        for first, last in unit.lives:
            changes[first] += unit.nbytes
            changes[last + 1] -= unit.nbytes
    return tuple(accumulate(changes[:-1]))


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
        locals_ = [(node.local if isinstance(node, FlatBuffer) else node, node) for node in nodes]
        far = sum(t.nbytes for t, node in locals_ if isinstance(t, torch.Tensor) and _is_far(t, node, name))
        states += f"; {bytes_text(far)} in host memory" if far else ""
        size = bytes_text(sum(t.numel() * t.element_size() for t in tensors))
        rows.append((name, len(tensors), size, dtypes or "-", states or "-"))
    return table(("field", "tensors", "bytes a rank", "dtype", "placed"), rows)


provide("look", spec_table, layout_table, plan_table, cursor_table, state_table, summary)
