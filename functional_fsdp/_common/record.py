"""The one record of what is communicated: planned by `route`, carried out by lanes and graphs, logged, and lowered; and
what a job on a lane is.

layout + plan ──▶ Collectives ──▶ lanes (eager)    each a job, or a part of one; the log keeps them for a restart
                             └──▶ graph (traced)   each an operation; `lower` lists them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .errors import ScheduleError

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "barrier")


class Collective(NamedTuple):
    """One collective.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "barrier".
        axis: of the mesh; "" for all its ranks.
        numel: elements of its larger side, on the rank that has most.
        dtype: of what travels.
        op: of reductions: "mean", "sum" or "max"; else "".
        lane: whose communicator it goes by.
        bucket: what is moved; or, where it is no bucket, what it is for.
        splits: of an all_to_all whose parts differ, the same object on every rank: `splits.at(coordinate)` gives the
            elements that come from, and that go to, each rank along the axis.
    """

    kind: str
    axis: str
    numel: int
    dtype: torch.dtype
    op: str
    lane: str
    bucket: str
    splits: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of its larger side."""
        return self.numel * self.dtype.itemsize

    def received(self, ranks: int) -> int:
        """Bytes that a rank receives, by an algorithm that sends no byte twice, along an axis of so many ranks."""
        if self.kind == "barrier":
            return 0
        if self.kind == "permute":  # of a model's own code
            return self.nbytes
        return self.nbytes * (ranks - 1) // ranks * (2 if self.kind == "all_reduce" else 1)


def check_kinds(some: Iterable[Collective]) -> None:
    """Refuse records, as a transport says them, that nobody can carry out.

    Raises:
        ScheduleError: naming the kind, and those that there are.
    """
    for one in some:
        if one.kind not in KINDS:
            raise ScheduleError(
                f"a collective of kind {one.kind!r} for {one.bucket!r}, on the lane {one.lane!r}: expected one of "
                f"{', '.join(map(repr, KINDS))}. A transport's `gathers` and `reduces` say records of these kinds only."
            )


def over_each_axis(
    tensors: Sequence[torch.Tensor],
    along: Sequence[tuple[str, ...]],
    axes: Iterable[str],
    reduced: Callable[[str, torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Tensors of one dtype, each reduced along axes of its own: one call of `reduced(axis, flat)` an axis, for all."""
    found = list(tensors)
    for axis in axes:
        mine = [i for i, some in enumerate(along) if axis in some]
        if mine:
            flat = reduced(axis, torch.cat([found[i].reshape(-1) for i in mine]))
            for i, part in zip(mine, flat.split([found[i].numel() for i in mine]), strict=True):
                found[i] = part.view(found[i].shape)
    return found


# ---- jobs

Call = Callable[[], Any]  # issues an asynchronous work
Steps = Iterator[list[Any] | str]  # calls to issue and to wait for, or the name of the lane to go on on
Mark = Any  # torch.cuda.Event, Job, or None: nothing to wait for
ARENA = "(arena)"  # in the place of a bucket: a barrier for all of a gather, before its buckets part
LANES = ("gather", "reduce", "outer", "side")  # with communicators on every axis
QUEUES = ("gather", "reduce", "side", "control")  # in which jobs are issued; a job of "reduce" may go on on "outer"


def together(jobs: list[Steps]) -> Steps:
    """Jobs side by side, as one: all issue their first collectives, then all their second ones."""
    while jobs:
        steps = [(job, next(job, None)) for job in jobs]
        calls = [call for _, step in steps if isinstance(step, list) for call in step]
        if calls:
            yield calls
        yield from dict.fromkeys(step for _, step in steps if isinstance(step, str))
        jobs = [job for job, step in steps if step is not None]
