"""Kept outputs: what one call of a part has returned, for recomputations of what comes after it.

forward          the part's output goes on, and is noted with its versions
its end          kept as it is, moved, or let go: nothing after it is computed again, or others have changed it
recomputation    the output once more, differentiable as it was; if it is not there, the part is run again
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from functional_fsdp import ScheduleError

from .._drive.watch import version
from .._modules.outputs import each_leaf, map_tensors
from .moves import MovedTensor, MoveGroup
from .parts import PartCall
from .storage_moves import copied

__all__ = ["LOST", "KeptOutput", "differentiable"]

LOST: Any = object()  # in the place of an output that is not there as it was


class Again(torch.autograd.Function):
    """Outputs of a part in a recomputation: they hang on its inputs, as in the forward, though no gradient comes
    through: the part's backward is in the forward's graph."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([out.detach() for out in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        raise ScheduleError(
            "remat: a gradient is taken inside of what is computed again, through a part that is saved or moved, and "
            "would have to be computed again too. Leave that part out of save= and offload= (T.saved, T.offload)."
        )


def differentiable(out: Any, trains: list[bool], call: PartCall) -> Any:
    """An output whose tensors have gradients where they had them, and hang on what the part was given."""
    which = iter(trains)
    outs = [t for t in each_leaf(out) if isinstance(t, torch.Tensor) and next(which)]
    if not outs:
        return out
    given = [t for t in each_leaf((call.args, call.kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    token = torch.zeros((), device="cpu", requires_grad=True)
    through: Iterator[torch.Tensor] = iter(Again.apply(token, len(outs), *outs, *given))
    which = iter(trains)
    return map_tensors(lambda t: next(through) if next(which) else t, out)


class KeptOutput:
    """The output of one call of a part.

    Args:
        out: as it came; until the forward's end it is held as it is.
        copies: whether to keep a copy, since others change it in place.
    """

    def __init__(self, out: Any, copies: bool = False) -> None:
        made: dict[int, torch.Tensor] = {}
        self.trains: list[bool] = []  # which of its tensors have gradients
        self.live: list[torch.Tensor] = []  # its tensors, in the forward
        for t in each_leaf(out):
            if isinstance(t, torch.Tensor):
                self.trains.append(t.requires_grad)
                self.live.append(copied(t, made) if copies else t)
        self.versions = [*map(version, self.live)]
        self.kept: list[torch.Tensor | MovedTensor] = []
        self.form = map_tensors(lambda t: torch.empty(0, device="cpu"), out)  # others may change its containers
        self.lost = False

    def changed(self) -> bool:
        """Whether others have changed it since it came."""
        return [*map(version, self.live)] != self.versions

    def keep(self, moves: MoveGroup | None) -> None:
        """At the end of the forward: keep it, or move it."""
        self.kept = [(moves and moves.take(t)) or t.detach() for t in self.live]
        self.live = []

    def let_go(self) -> None:
        """It will not be needed, or is of no use."""
        self.form, self.live, self.kept, self.lost = None, [], [], True

    def again(self, call: PartCall) -> Any:
        """The output once more, for this call; LOST if it is not there as it was."""
        values = [] if self.lost else self._values()
        if values is None or self.lost:
            return LOST
        left = iter(values)
        return differentiable(map_tensors(lambda t: next(left), self.form), self.trains, call)

    def _values(self) -> list[torch.Tensor] | None:
        values = []
        for one, before in zip(self.kept or self.live, self.versions, strict=True):
            t = one.value() if isinstance(one, MovedTensor) else one if version(one) == before else None
            if t is None:
                return None
            values.append(t.detach())
        return values
