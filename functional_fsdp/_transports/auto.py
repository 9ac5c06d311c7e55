"""The transport "auto": which one a state gets where the spec leaves it open.

    collective    less than 1 GiB to gather: a step has many small transfers then, and NCCL launches each as one kernel
    copy_engine   else GPUs that read each other's memory along every axis that shards
    symmetric     else NCCL 2.27 or newer, with memory to be had that it can register
    collective    else, and without GPUs

It is tried with a few bytes on every rank, and the first one that all of them can have is taken. That happens in
`shard` and `init`; a layout or a plan made without ranks is that of "collective".

The transports there are: a line makes one known by its name.
"""

from __future__ import annotations

import logging

from .._common.errors import SpecError
from .._engine.gathers import CollectiveTransport
from .._plan.layout import Layout
from .._runtime.runtime import Runtime
from .._spec.spec import NAMES, Transport
from .copy_engine import Copies, CopyEngine
from .peer_memory import check_reach
from .symmetric import Symmetric, registered, symmetric

__all__ = ["Auto", "symmetric"]

log = logging.getLogger(__name__)
TRIED = 1024  # bytes
LARGE = 1 << 30  # bytes of gathered weights


class Auto(Transport):
    """See the top of this file."""

    name = "auto"

    def resolve_transport(self, run: Runtime, layout: Layout) -> Transport:
        """What was taken, and why, is logged once for each such choice."""
        large = sum(bucket.nbytes("weights") * bucket.slices("weights") for bucket in layout.buckets.values()) >= LARGE
        axes = Copies(run, layout).axes() if large else []

        def choose() -> Transport:
            found, why = _choose(run, axes) if large else (CollectiveTransport(), "there is little to gather")
            log.info("Spec(transport='auto'): %s (%s)", found.name, why)
            return found

        return run.choose(large, tuple(axes), choose)


def _choose(run: Runtime, axes: list[str]) -> tuple[Transport, str]:
    """The transport, and why."""
    collective = CollectiveTransport()
    gpus = run.device.type == "cuda"
    if not gpus or run.size == 1:
        return collective, "there is one rank" if gpus else "there are no GPUs"
    try:
        check_reach(run, axes)
        for axis in axes:
            run.lanes.signalling(axis)
        return CopyEngine(), "the GPUs can read each other's memory"
    except SpecError as error:
        why = str(error)
    try:
        registered(run, TRIED, [group for (lane, _), group in run.groups.items() if lane == "gather"])
        return Symmetric(), f"copy_engine cannot be had: {why}"
    except SpecError as error:
        return collective, f"copy_engine cannot be had: {why}; neither can symmetric: {error}"


NAMES.update({one.name: one for one in (CollectiveTransport(), Symmetric(), CopyEngine(), Auto())})
