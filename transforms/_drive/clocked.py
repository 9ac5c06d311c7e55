"""Clocked: a forward and a backward of a driven model on this device, by one rank, with the seconds of each use.

Weights are random numbers (on zeros a GPU is faster), in the compute dtype. Units whose leaves are alike have the same
ones, so that a model that no device holds can be measured; what it keeps for its backward has to fit.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import torch

from functional_fsdp import Layout, ScheduleError, State
from functional_fsdp._seams import steps_on
from functional_fsdp.extend import every_buffer

from .driver import Driver
from .forward_backward import ForwardBackward
from .rehearsal import Rehearsal

__all__ = ["clocked"]

WARM = 2  # passes before the clock counts


class Clock:
    """`lap()` gives the seconds since the last one, when the device is done."""

    def __init__(self, device: torch.device) -> None:
        self.probe = torch.zeros((), device=device)
        self.since = perf_counter()

    def lap(self) -> float:
        self.probe.item()
        before, self.since = self.since, perf_counter()
        return self.since - before


def clocked(
    forward_backward: ForwardBackward[Any], state: State, args: Any, kwargs: Any, rounds: int
) -> tuple[float, ...]:
    """Seconds of each use, the median over rounds."""
    driver = forward_backward.driver
    if not isinstance(driver, Driver):
        raise ScheduleError("measure_compute: of forward_backward(second_order=True) it is not known. Leave that out.")
    where, holds = steps_on(state)
    rehearsal = Rehearsal(driver.bare(), where, _weights(state.layout, where), holds)
    rehearsal.counter = Clock(where)
    for _, held, name in every_buffer(rehearsal.model):
        held[name] = held[name].to(where)
    found: list[list[float]] = []
    for _ in range(WARM + rounds):
        rehearsal.laps, rehearsal.gathered = [], ()
        with rehearsal.running(state, "measure_compute", trains=True):
            rehearsal.counter.lap()
            forward_backward.rehearse(rehearsal, args, kwargs)
            rehearsal.lap()
        found.append([lap.work for lap in rehearsal.laps])
    return tuple(median(some) for some in zip(*found[WARM:], strict=True))


def _weights(layout: Layout, device: torch.device) -> dict[str, dict[str, torch.Tensor]]:
    """Random weights of every unit, those of units that are alike the same."""
    generator = torch.Generator(device).manual_seed(0)
    made: dict[Any, dict[str, torch.Tensor]] = {}
    found = {}
    for unit in layout.units:
        leaves = {leaf.path: (leaf.shape, b.compute) for b in unit.buckets for leaf in b.leaves}
        alike = tuple((key, *leaves[path]) for key, path in zip(unit.keys, unit.paths, strict=True))
        if alike not in made:
            made[alike] = {
                key: torch.randn(shape, device=device, generator=generator).mul_(max(shape[-1:], default=1) ** -0.5)
                .to(dtype) for key, shape, dtype in alike
            }  # fmt: skip
        found[unit.name] = made[alike]
    return found
