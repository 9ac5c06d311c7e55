"""Places: where a gathered unit lies in the arena, and the job that fills it.

main shard ──cast──▶ own slice of the unit's place ──all-gather, in place──▶ the unit's weights, as views
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from .._common.record import Collective
from .._distributed.lanes import Mark, Steps
from .._plan.layout import Bucket
from .weights import Loan, poison

__all__ = ["BucketPlace", "Filling", "Place", "span_of", "without"]

Filling = tuple[tuple[Collective, ...], Steps, bool]  # what a job issues, the job, and whether all starts at once


class BucketPlace(NamedTuple):
    """A bucket's place: where this rank's slice goes, and the gathers that complete the whole, with where each one
    lands."""

    bucket: Bucket
    whole: torch.Tensor
    own: torch.Tensor
    steps: tuple[tuple[Collective, torch.Tensor], ...]


class Place:
    """A unit's place: its parts, and the tensors that are handed out."""

    def __init__(
        self,
        loan: Loan,
        parts: tuple[BucketPlace, ...],
        resident: tuple[tuple[Bucket, torch.Tensor], ...],
        aliases: list[torch.Tensor],
        scales: tuple[tuple[str, torch.Tensor], ...] = (),
    ) -> None:
        self.loan = loan
        self.parts = parts
        self.resident = resident
        self.scales = scales  # of buckets in float8: of the state that the weights are of
        self.aliases = aliases  # the bases of what is handed out, with their version counters
        self.issued = tuple(one for part in parts for one, _ in part.steps)
        self.key = loan.unit.encode()  # for the digest that ranks compare
        self.single = all(len(part.steps) <= 1 for part in parts) and all(o.kind != "all_reduce" for o in self.issued)
        self.spans = [span_of(part.whole) for part in parts]
        self.cast: Mark = None  # on GPUs: the point in its last gather from which on it only communicates
        self.gathered: Mark = None  # the end of its last gather
        self.released: Mark = None  # the point on compute where it was last given back

    def poison(self, spared: Iterable[range] = ()) -> None:
        """So that a use past the release shows; but for these bytes."""
        for part, span in zip(self.parts, self.spans, strict=True):
            size = part.whole.element_size()
            for free in without(span, spared):
                poison(part.whole[(free.start - span.start) // size : (free.stop - span.start) // size])

    def ready(self, behind: Mapping[str, Place], newest: Mark) -> Mark:
        """What compute waits for before it uses the unit: see the top of `_engine.arena`.

        Args:
            behind: the other units that are being gathered.
            newest: the end of the gather that was started last.
        """
        if len(behind) == 1 and self.single:
            (other,) = behind.values()
            if other.single and other.cast is not None and other.gathered is newest:
                return other.cast
        return self.gathered


def without(span: range, holes: Iterable[range]) -> list[range]:
    """What is left of a span."""
    left = [span]
    for hole in holes:
        pieces = [(range(s.start, min(s.stop, hole.start)), range(max(s.start, hole.stop), s.stop)) for s in left]
        left = [piece for both in pieces for piece in both if piece]
    return left


def span_of(tensor: torch.Tensor) -> range:
    """The bytes of its storage on which a contiguous tensor lies."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return range(begin, begin + tensor.numel() * tensor.element_size())
