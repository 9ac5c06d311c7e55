"""Medium: by what the ranks of a mesh reach each other before they have communicators, and how they wait. Processes
have this one; a process group that is something else brings its own, as an attribute `medium`."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from .._common.torch_names import default_store
from .groups import forget, level, new_group
from .host_vote import HostVote
from .lanes import gloo
from .watch import ProcessWatch

__all__ = ["Processes", "medium_of"]


class Processes:
    """Ranks that are processes.

    Attributes:
        lanes: the class of lanes, of a Runtime; None: as the device has them.
        exchange: collectives of the control lane, see `_distributed.lanes`.
        level, forget: before ranks communicate, and after, see `_distributed.groups`.
        group: makes a communicator. watch: which of {place: process} have ended. vote: for ranks on one host.
        now: seconds. rest: waits for so many.
    """

    lanes: Any = None
    exchange = staticmethod(gloo)
    level = staticmethod(level)
    forget = staticmethod(forget)
    group = staticmethod(new_group)
    watch: Any = staticmethod(ProcessWatch)
    vote: Any = staticmethod(HostVote.of)
    now = staticmethod(time.monotonic)
    rest = staticmethod(time.sleep)

    def store(self, place: str) -> Any:
        """What ranks tell each other lies there."""
        return dist.PrefixStore(f"{place}/run", default_store())  # type: ignore[attr-defined]

    def until_done(self, future: Any) -> None:
        """Wait for what this rank's own process does beside it."""
        Future.exception(future)


_PROCESSES = Processes()


def medium_of(world: Any) -> Any:
    """That of all ranks' group."""
    return getattr(world, "medium", _PROCESSES)
