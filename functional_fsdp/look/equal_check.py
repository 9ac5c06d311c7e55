"""EqualCheck: in debug mode, whether gradients of leaves that are equal along an axis of the model's own are what
`Spec(own=)` says of them, in the first step.

    rank 0 of tp   gradient of norm.weight ── norm, two projections ──┐  largest and smallest of each along tp
    rank 1 of tp   gradient of norm.weight ── norm, two projections ──┴─ alike: "equal" is right, and "sum" is not

Numbers are taken of what `reduce` is given, before anything is added up. Microbatches add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .._common.calls import provide
from .._common.errors import SpecError
from .._common.record import Collective
from .._plan.layout import Layout
from .._runtime.runtime import Runtime

NUMBERS = 3  # of each gradient
CLOSE = 1e-2  # of its norm: what kernels that add up in any order may differ by


class Rule(NamedTuple):
    path: str
    axis: str
    summed: bool


class EqualCheck:
    """Of the first step of one lineage."""

    def __init__(self, layout: Layout, run: Runtime) -> None:
        self.layout, self.run = layout, run
        self.rules = [
            Rule(leaf.path, axis, summed)
            for bucket in layout.trainable.values()
            for summed, axes in ((False, bucket.equal), (True, bucket.summed))
            for axis in axes
            if run.sizes[axis] > 1
            for leaf in bucket.leaves
            if leaf.numel
        ]
        self.wanted = {rule.path for rule in self.rules}
        self.found: dict[str, torch.Tensor] = {}

    def note(self, unit: str, values: Sequence[torch.Tensor | None]) -> None:
        """Gradients of a unit came, in the order of its paths."""
        for path, value in zip(self.layout.by_name[unit].paths, values or (), strict=False):
            if path in self.wanted and value is not None:
                before = self.found.get(path)
                self.found[path] = _numbers(value) if before is None else before + _numbers(value)

    def compare(self) -> bool:
        """Compare along each axis; every rank calls it, and all raise where a rule is wrong. Returns whether all were
        compared: a leaf that is not finite on a rank, as in a step that will be skipped, says nothing.

        Raises:
            SpecError: naming the first leaf of which this is so.
        """
        none = torch.zeros(NUMBERS, dtype=torch.float64, device=self.run.device)
        mine = torch.stack([self.found.get(rule.path, none) for rule in self.rules])
        self.found.clear()
        strange = (~mine.isfinite()).any(1)
        mine[strange] = 0.0
        largest, smallest = mine.clone(), (-mine).clone()
        for axis in dict.fromkeys(rule.axis for rule in self.rules):
            which = [i for i, rule in enumerate(self.rules) if rule.axis == axis]
            both = self._most(axis, torch.stack([largest[which], smallest[which]]))
            largest[which], smallest[which] = both[0], both[1]
        spread = (largest + smallest).abs().amax(1)
        scale = largest[:, 0].sqrt()
        alike = spread <= CLOSE * scale.clamp(min=1e-300)
        summed = torch.tensor([rule.summed for rule in self.rules], device=self.run.device)
        judged = torch.stack([torch.where(summed, alike & (scale > 0), ~alike), strange]).double()
        for axis in self.run.sizes:
            judged = self._most(axis, judged)
        wrong, unknown = judged.bool()
        bad = (wrong & ~unknown).nonzero().flatten().tolist()
        if bad:
            self._refuse(bad[0])
        return not unknown.any()

    def _most(self, axis: str, numbers: torch.Tensor) -> torch.Tensor:
        if self.run.sizes[axis] == 1:
            return numbers
        flat = numbers.reshape(-1).contiguous()
        hop = Collective("all_reduce", axis, flat.numel(), flat.dtype, "max", "side", "")
        self.run.now(hop, flat, flat)
        return flat.view(numbers.shape)

    def _refuse(self, i: int) -> None:
        path, axis, summed = self.rules[i]
        if summed:
            raise SpecError(
                f"Spec(own): gradients of {path!r} are to be summed along {axis!r}, and ranks came to the same one "
                f"in the first step: the sum is {self.run.sizes[axis]} times what it should be. Say {axis!r} in the "
                f"place of Along({axis!r}, grads='sum'). The step was not taken."
            )
        raise SpecError(
            f"Spec(own): {path!r} is equal along {axis!r}, and ranks came to different gradients in the first step. If "
            f"each has a summand (it meets what is cut along the axis), say Along({axis!r}, grads='sum'). If not, "
            "the model lacks T.collectives.pvary where equal values meet a cut leaf, or psum after one. The step was "
            "not taken."
        )


def _numbers(value: torch.Tensor) -> torch.Tensor:
    """The square of the norm, and two projections on fixed directions: [3], float64."""
    flat = value.detach().reshape(-1).double()
    place = torch.arange(flat.numel(), dtype=torch.float64, device=flat.device)
    return torch.stack([flat @ flat, flat @ (place * 12.9898).sin(), flat @ (place * 78.233).cos()])


def equal_check(layout: Layout, run: Runtime) -> EqualCheck | None:
    """The check of a lineage in debug mode; None where there is nothing to compare."""
    check = EqualCheck(layout, run)
    return check if check.rules else None


provide("look", equal_check)
