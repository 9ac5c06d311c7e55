"""What it costs that a state lies in the host's memory, by plan: bytes each way, and seconds at a bandwidth.

forward, backward   compute shards ──▶ device, for each gather     main gradients ──▶ host
step                main weights, what the optimizer keeps, main gradients ──▶ device
                    main weights, what the optimizer keeps, compute shards ──▶ host
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .._common.provided import provide
from .._common.torch_names import pytree
from .._common.tree import bytes_text
from .._engine.progress import first_plan
from .._state.state import State
from .._storage.flat import FlatBuffer

__all__ = ["HostTransfer", "planned_transfer"]


class HostTransfer(NamedTuple):
    """What a step with one microbatch moves between the host's memory and the device, on this rank, in bytes.

    update: by `step`, to the device. stored: by `step`, back. beside: in the forward and the backward, to the device,
    for gathers. gradients: in the backward, to the host. bandwidth: bytes a second each way, both ways at once; NaN
    where nobody has measured it.
    """

    update: int
    stored: int
    beside: int
    gradients: int
    bandwidth: float = math.nan

    @property
    def to_device(self) -> int:
        """Bytes to the device."""
        return self.update + self.beside

    @property
    def to_host(self) -> int:
        """Bytes to the host's memory."""
        return self.stored + self.gradients

    @property
    def seconds(self) -> float:
        """What a step takes longer at most, where nothing is hidden by compute."""
        return (max(self.update, self.stored) + self.beside + self.gradients) / self.bandwidth

    def __repr__(self) -> str:
        if not any(self[:4]):
            return "a step moves nothing between the host's memory and the device"
        ways = f"{bytes_text(self.to_device)} to the device and {bytes_text(self.to_host)} to the host"
        within = (
            f"in step {bytes_text(self.update)} and {bytes_text(self.stored)}, "
            f"beside compute {bytes_text(self.beside)} and {bytes_text(self.gradients)}"
        )
        rate = f": at most {self.seconds:.3f} s at {self.bandwidth / 1e9:.1f} GB/s each way"
        return f"a step moves {ways} ({within}){'' if math.isnan(self.bandwidth) else rate}"


def planned_transfer(state: State) -> HostTransfer:
    """What a step of a state moves, by its plan. Nothing is measured."""
    layout, executor = state.layout, state.version.lineage.executor
    plan = first_plan(layout, state.spec.schedule) if executor is None else executor.progress.plan
    main, opt = state.main, state.opt
    far = {name: bucket for name, bucket in layout.trainable.items() if bucket.on_host}
    nodes = pytree.tree_leaves(opt, is_leaf=lambda x: isinstance(x, FlatBuffer))
    kept = [n for n in nodes if isinstance(n, FlatBuffer) and n.bucket.name in far and not n.bucket.by_leaf]
    once = {b.local.data_ptr() or id(b.local): b.local.nbytes for b in [*map(main.__getitem__, far), *kept]}
    moved = sum(once.values())
    gradients = sum(b.nbytes("main") // b.main.itemsize * b.grads.itemsize for b in far.values() if b.grads_on_host)
    sizes = {name: b.nbytes("weights") for name, b in layout.buckets.items() if b.copy_on_host}
    copies = sum(sizes.get(name, 0) for name in far)
    of_unit = {unit.name: sum(sizes.get(b.name, 0) for b in unit.buckets) for unit in layout.units}
    beside = sum(of_unit[gather.unit] for gather in plan.gathers)
    return HostTransfer(moved + gradients, moved + copies, beside, gradients)


provide("host_memory", planned_transfer)
