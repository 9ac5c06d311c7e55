"""Traces of torch.profiler, as far as `observe` reads them: the package's ranges on the host, kernels on a GPU.

Seconds, on the trace's clock, which host and device share. Pure: a dict in, values out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["Interval", "Kernel", "Range", "Recorded", "length", "minus", "overlap", "recorded", "union"]

Interval = tuple[float, float]  # from, to
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
COLLECTIVE = re.compile(r"nccl|PtoP", re.IGNORECASE)  # copies between GPUs, too
PREFIX = "fsdp "
STEP = "observed step"


class Range(NamedTuple):
    """A range of the package on a thread of the host: its name without "fsdp "."""

    name: str
    begin: float
    end: float
    thread: Any


class Kernel(NamedTuple):
    """Work on the device: when and on which stream it ran, and when and where the host gave it, or its graph."""

    name: str
    stream: Any
    begin: float
    end: float
    given: float
    thread: Any
    in_graph: bool

    @property
    def communicates(self) -> bool:
        return COLLECTIVE.search(self.name) is not None


class Recorded(NamedTuple):
    """What was read: ranges in order of begin, outer ones first; kernels in order of begin."""

    ranges: list[Range]
    kernels: list[Kernel]


def recorded(trace: dict[str, Any]) -> Recorded:
    """Read a Chrome trace, as `profile.export_chrome_trace` writes it."""
    ranges, device, given = [], [], {}
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        name, begin, thread = str(event["name"]), float(event["ts"]) * 1e-6, event.get("tid")
        end, kind, args = begin + float(event.get("dur", 0)) * 1e-6, str(event.get("cat", "")), event.get("args", {})
        if kind == "user_annotation" and name.startswith(PREFIX):
            ranges.append(Range(name.removeprefix(PREFIX), begin, end, thread))
        elif kind in ("cuda_runtime", "cuda_driver"):
            given[args.get("correlation")] = begin, thread, name
        elif kind in ON_DEVICE:
            device.append((name, args.get("stream", thread), begin, end, args.get("correlation")))
    kernels = []
    for name, stream, begin, end, which in device:
        at, thread, call = given.get(which, (begin, None, "GraphLaunch"))
        kernels.append(Kernel(name, stream, begin, end, at, thread, "GraphLaunch" in call))
    return Recorded(
        sorted(ranges, key=lambda one: (one.begin, -one.end)), sorted(kernels, key=lambda one: (one.begin, one.end))
    )


# ---------------------------------------------------------------- intervals


def union(some: Iterable[Interval]) -> list[Interval]:
    """The same points, as disjoint intervals in order.

    >>> union([(2, 3), (0, 1), (1, 2.5)])
    [(0, 3)]
    """
    found: list[Interval] = []
    for begin, end in sorted(some):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif begin < end:
            found.append((begin, end))
    return found


def length(some: Iterable[Interval]) -> float:
    """
    >>> length([(0, 2), (1, 3)])
    3
    """
    return sum(end - begin for begin, end in union(some))


def minus(some: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """The points of `some` that are in none of `others`.

    >>> minus([(0, 4)], [(1, 2), (3, 9)])
    [(0, 1), (2, 3)]
    """
    found, holes = [], union(others)
    for begin, end in union(some):
        at = begin
        for a, b in holes:
            if b <= at or a >= end:
                continue
            if a > at:
                found.append((at, a))
            at = max(at, b)
        if at < end:
            found.append((at, end))
    return found


def overlap(some: Iterable[Interval], others: Iterable[Interval]) -> float:
    """
    >>> overlap([(0, 4)], [(1, 2), (3, 9)])
    2
    """
    some = union(some)
    return length(some) - length(minus(some, others))
