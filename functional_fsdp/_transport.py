"""Which transport a state gets where the schedule leaves it open: `Schedule(transport="auto")`.

    collective    less than 1 GiB to gather: a step has many small transfers then, and NCCL launches each as one kernel
    copy_engine   else GPUs that read each other's memory along every axis that shards
    symmetric     else NCCL 2.27 or newer, with memory to be had that it can register
    collective    else, and without GPUs

It is tried with a few bytes on every rank, and the first one that all of them can have is taken. That happens in
`shard` and `init`; a layout or a plan made without ranks is that of "collective".
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ._copies import Copies
from ._errors import SpecError
from ._layout import Layout, LeafInfo, plan_layout
from ._runtime import Runtime, runtime_of
from ._slab import check_reach
from ._spec import Spec
from ._symmetric import registered

__all__ = ["settled"]

log = logging.getLogger(__name__)
TRIED = 1024  # bytes
LARGE = 1 << 30  # bytes of gathered weights


def settled(spec: Spec, leaves: Sequence[LeafInfo], order: Sequence[str] | None = None) -> tuple[Spec, Layout]:
    """The spec with a transport in the place of "auto", the same on every rank, and its layout. Then collective.

    What was taken, and why, is logged once for each such choice.
    """
    layout = plan_layout(leaves, spec, order)
    if spec.schedule.transport != "auto":
        return spec, layout
    run = runtime_of(spec.mesh)
    large = sum(bucket.nbytes("weights") * bucket.slices("weights") for bucket in layout.buckets.values()) >= LARGE
    axes = Copies(run, layout).axes() if large else []
    key = large, tuple(axes)
    if key not in run.chosen:
        run.chosen[key], why = _choose(run, axes) if large else ("collective", "there is little to gather")
        log.info("Schedule(transport='auto'): %s (%s)", run.chosen[key], why)
    spec = spec.with_schedule(spec.schedule.by(run.chosen[key]))
    return spec, plan_layout(leaves, spec, order)


def _choose(run: Runtime, axes: list[str]) -> tuple[str, str]:
    """The transport, and why."""
    if not run.cuda or run.size == 1:
        return "collective", "there are no GPUs" if not run.cuda else "there is one rank"
    try:
        check_reach(run, axes)
        for axis in axes:
            run.signalling(axis)
        return "copy_engine", "the GPUs can read each other's memory"
    except SpecError as error:
        why = str(error)
    try:
        registered(run, TRIED, [group for (lane, _), group in run.groups.items() if lane == "gather"])
        return "symmetric", f"copy_engine cannot be had: {why}"
    except SpecError as error:
        return "collective", f"copy_engine cannot be had: {why}; neither can symmetric: {error}"
