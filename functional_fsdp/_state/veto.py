"""Veto: a captured step that the device of any rank may take back, after ranks have voted for it and before it changes
anything.

    device   forward, backward ──▶ flag ──▶ largest of all ranks' flags ──▶ the update, where it is 0
    host     vote, confirm, launch                  └──▶ a copy on the host ──▶ commits, or goes back

All ranks replay such steps, or none does: one that reads from its device in the middle of a step would wait for peers
who wait for its vote.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .._common.errors import ScheduleError
from .._common.record import Collective
from .lineage import Lineage
from .state import State

__all__ = ["StepStart", "Veto", "Vetoed"]


class StepStart:
    """Where a lineage and its votes stood before a step, to go back to."""

    def __init__(self, state: State) -> None:
        self.lineage: Lineage = state.version.lineage
        self.run = self.lineage.runtime
        self.executor = state._executor
        self.version = state.version
        self.position = self.lineage.position()
        self.digest = self.run.digest

    def back(self) -> None:
        """The step, which was only captured, or replayed, was not taken, on any rank."""
        self.lineage.go_back(self.position)
        self.version.spent = False
        self.run.rewind(self.digest)
        self.executor.drop()  # what is under way was captured, and will never run
        self.executor.reset()


class Vetoed(BaseException):
    """The step was taken back, on every rank: nothing has changed. No error: whoever has set the veto takes the step
    another way. So `except Exception` lets it through."""


class Veto:
    """For a step that is captured from one state, see `holds`.

    Attributes:
        flag: int32 [1] on the state's device: 1 where this rank takes the step back. From `step` on, where any does.
        host: int32 [1] in the host's memory, pinned where the device is a GPU: what a replay says there, before it is
            done.
        asked: whether the step has come to it.
    """

    def __init__(self, state: State, flag: torch.Tensor, host: torch.Tensor) -> None:
        self.run = state.version.lineage.runtime
        self.executor = state._executor
        self.flag, self.host = flag, host
        self.asked = False

    @contextmanager
    def holds(self) -> Iterator[None]:
        """Within, `step` is captured so that it changes nothing where the flag of any rank is 1.

        Raises:
            ScheduleError: (in `step`) ranks still compare in which order they use the units.

        Collective: in `step`, an all-reduce of 4 bytes an axis of the mesh, on the compute lane's stream.
        """
        with self.run.gated(self):
            yield

    def join(self) -> None:
        """The gradients are whole: ranks combine their flags."""
        self.asked = True
        if self.executor.progress.undecided:  # a rank that waits for the device would not come to the end of its step
            raise ScheduleError(
                "a step that may be taken back cannot be captured: ranks have used the units in different orders so "
                "far. Give the order: Schedule(order=...)."
            )
        for axis, size in self.run.sizes.items():
            if size > 1:
                one = Collective("all_reduce", axis, 1, torch.int32, "max", "side", "veto")
                self.run.now(one, self.flag, self.flag)

    def decided(self, skip: torch.Tensor | None) -> torch.Tensor:
        """Whether the update changes nothing, given what the caller says of it."""
        self.host.copy_(self.flag, non_blocking=True)
        vetoed = self.flag[0] > 0
        return vetoed if skip is None else skip | vetoed

    def stands(self, skip: torch.Tensor) -> torch.Tensor:
        """Whether the step is skipped, and not vetoed: then it is taken again, and skipped there."""
        return skip & (self.flag[0] == 0)

    def kept(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """What a captured step leaves in the place of `old`."""
        return torch.where(self.flag[0] > 0, old, new)
