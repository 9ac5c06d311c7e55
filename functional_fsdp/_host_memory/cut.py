"""Cuts of FlatBuffers: some elements in a row, as a FlatBuffer, for updates that go element by element.

cuts(numel, width, nbytes)      [start, stop) of each part
cut(buffer, local, start)       the part as a FlatBuffer
"""

from __future__ import annotations

from collections.abc import Container

import torch

from .._common.tree import register
from .._plan.layout import ALIGN, aligned
from .._plan.route import States
from .._storage import FlatBuffer


class Cut(FlatBuffer):
    """The elements from `first` on of what a rank holds of a bucket."""

    first: int

    def __init__(self, local: torch.Tensor, like: FlatBuffer, first: int) -> None:
        super().__init__(local, like.bucket, like.states, like.mesh)
        self.__dict__["first"] = first

    def but(self, local: torch.Tensor, states: States | None = None) -> Cut:
        return Cut(local, self, self.first)

    def only(self, labels: Container[str]) -> FlatBuffer | None:
        found = super().only(labels)
        return found if found is None or found is self else Cut(self.local, found, self.first)

    def span(self) -> tuple[int, int]:
        start = super().span()[0] + self.first
        return start, start + self.local.numel()


register(
    Cut,
    lambda b: ((b.local,), (b.bucket, b.states, b.mesh, b.first)),
    ("local",),
    lambda context, children: Cut(children[0], FlatBuffer(children[0], *context[:3]), context[3]),
)


def cut(buffer: FlatBuffer, local: torch.Tensor, first: int) -> FlatBuffer:
    """The buffer with `local` in the place of its elements from `first` on, which may be all of them."""
    return Cut(local, buffer, first) if local.numel() < buffer.local.numel() else buffer.but(local)


def cuts(numel: int, width: int, nbytes: int) -> list[tuple[int, int]]:
    """[start, stop) of parts in a row, of so many bytes each but for the last one: `numel` elements of `width` bytes.

    >>> cuts(700, 4, 1024)
    [(0, 256), (256, 512), (512, 700)]
    """
    most = aligned(max(1, nbytes // width), ALIGN)
    return [(start, min(start + most, numel)) for start in range(0, max(1, numel), most)]
