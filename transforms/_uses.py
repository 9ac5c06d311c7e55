"""Uses: how far a driven pass is, for what goes by that. A driver says it at each use of a unit.

USES[device].used(driver, forward, backward, gradients)   the so many-th use of its forward, and of its backward
                                                          (0: not yet); bytes of main gradients that a use leaves
USES[device].used(driver, 0, 0, 0)                        the pass is over
USES[device].recomputes(keeps)                            in the use that runs a region does, which keeps this share

Only units that have at least half of the mean of weights count: what a norm keeps is no measure of what a block does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from functional_fsdp import Layout


class Listener(Protocol):
    """Who is told."""

    def used(self, driver: Any, forward: int, backward: int, gradients: int) -> None: ...

    def recomputes(self, keeps: float) -> None: ...


#: by the device that computes
USES: dict[torch.device, Listener] = {}


class Uses:
    """The uses of a driver's passes, on a device that is in `USES`."""

    def __init__(self, layout: Layout) -> None:
        sizes = {unit.name: sum(bucket.numel for bucket in unit.buckets) for unit in layout.units}
        self.large = {name for name, size in sizes.items() if 2 * size * len(sizes) >= sum(sizes.values())}
        trained = [b for b in layout.trainable.values() if b.unit in self.large and not b.grads_on_host]
        finished = sum(b.numel // b.slices("main") * b.grads.itemsize for b in trained)
        self.gradients = finished // max(len(self.large), 1)  # bytes that a large unit leaves on the device
        self.fresh = True
        self.passed = [0, 0]

    def begin(self, fresh: bool) -> None:
        """A pass begins. fresh: its gradients are the first of their step; later ones add to what there is."""
        self.fresh = fresh

    def count(self, driver: Any, units: Sequence[str], backward: bool) -> None:
        """These units are used, in the forward or in the backward."""
        if not self.large.isdisjoint(units):
            self.passed[backward] += 1
            forward, backwards = self.passed
            USES[driver.device].used(driver, forward, backwards, self.fresh * self.gradients)

    def end(self, driver: Any) -> None:
        """The pass is over."""
        self.passed = [0, 0]
        USES[driver.device].used(driver, 0, 0, 0)
