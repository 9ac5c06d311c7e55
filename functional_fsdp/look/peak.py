"""Peak: what the largest moment of a step is made of, from a plan and from what a model keeps alive. Pure.

    stretches    forward and loss ──▶ head ──▶ blocks.2 ──▶ blocks.1 ──▶ ... ──▶ the step's end
                 each ends where the gradients of a unit are complete

In every stretch there are the state, the arena, the staging of the reductions before it, the main gradients that they
made, and the most bytes of activations and gradients that are alive in it. The peak is the largest sum. An arena that
comes and goes and has two sides is as large as the units that live at the stretch's end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from .._common.tree import bytes_text, table
from .._plan.layout import Layout
from .._plan.plan import REDUCTIONS_AT_ONCE, Plan

__all__ = ["StepMemory", "Stretch", "find_peak"]

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
    slots = 1 if gpu and not plan.received else REDUCTIONS_AT_ONCE
    comes_and_goes = gpu and not keeps_memory and plan.rule == "two sides"
    live = _live_bytes(plan)
    before: list[str] = []  # units whose gradients are complete, newest last
    made = 0  # bytes of their main gradients
    found: list[tuple[int, dict[str, int], str]] = []
    for unit, alive in stretches:
        busy = [sizes[name] for name in before[-slots:] if name in sizes]
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
