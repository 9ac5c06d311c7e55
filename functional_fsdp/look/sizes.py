"""Sizes: the bytes of a state on a rank, by field, on the device and in the host's memory; and what its steps keep."""

from __future__ import annotations

import math
from typing import Any

import torch

from .._common.device import best_device, in_host_memory, keeps_released
from .._common.torch_names import pytree
from .._plan.plan import Plan, make_plan, staging_slots
from .._spec.spec import Schedule
from .._state.state import State
from .._storage import FlatBuffer

__all__ = ["plan_for", "state_bytes", "steps_on"]

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
            if _far(node, name):
                host += tensor.nbytes
            else:
                kind = NAMES.get(name, name)
                near[kind] = near.get(kind, 0) + tensor.nbytes
    return near, host


def _far(node: Any, field: str) -> bool:
    if not isinstance(node, FlatBuffer):
        return False
    if node.local.device.type != "meta":
        return in_host_memory(node.local)
    bucket = node.bucket
    return not bucket.by_leaf and (bucket.copy_on_host if field == "weights" else bucket.on_host)
