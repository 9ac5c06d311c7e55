"""Measured steps: what the uses of a step took, from a trace. Pure.

On the CPU a lane's work lasts from where it is given, or the work before it has ended, to where the host has seen its
end, and compute waits where the host does. On a GPU both are kernels: compute waits where communication runs and no
other kernel of the compute stream does.

Traces of torch.profiler, as far as `observe` reads them: the package's ranges on the host, kernels on a GPU.

Seconds, on the trace's clock, which host and device share. Pure: a dict in, values out.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .timeline import Span

__all__ = [
    "Arrival", "Interval", "Kernel", "Measured", "Range", "Recorded", "UseTimes", "Wait", "length", "measured",
    "minus", "overlap", "recorded", "union",
]  # fmt: skip

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


REDUCES = "reduce gradients of "
VERBS = ("unshard", "release", "reduce", "step", "finish_reductions")


class Wait(NamedTuple):
    """Compute waits, before or in a use, for the work of a lane for a unit; "vote" has no unit. Seconds."""

    begin: float
    end: float
    lane: str
    unit: str
    use: int


class Arrival(NamedTuple):
    """When a rank came to a collective: the `nth` of its lane and unit in the step. Seconds, on its own clock."""

    step: int
    lane: str
    unit: str
    nth: int
    begin: float
    end: float


@dataclass
class UseTimes:
    """Of one use, seconds: compute; the host in verbs, without its waits."""

    unit: str
    compute: float = 0.0
    host: float = 0.0


@dataclass
class Measured:
    """One step. `spans` and `waits` are in seconds from its begin."""

    seconds: float
    uses: list[UseTimes] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    exposed: dict[str, float] = field(default_factory=dict)  # by lane: seconds that compute waited for it
    waited: float = 0.0  # seconds that compute waited for any of them: where two lanes run at once, they count once
    arrivals: list[Arrival] = field(default_factory=list)


def measured(
    found: Recorded, units: Mapping[str, str], gathers: Sequence[str], reductions: Sequence[str]
) -> list[Measured]:
    """Each step of a trace.

    Args:
        units: of each bucket.
        gathers, reductions: the units that the plan gathers and reduces in a step, in order: of kernels that a graph
            launches nothing else says which is which.
    """
    steps = [one for one in found.ranges if one.name == STEP]
    every = []
    for number, step in enumerate(steps):
        ranges = [
            r for r in found.ranges if r.thread == step.thread and step.begin <= r.begin < step.end and r is not step
        ]
        last = steps[number + 1].begin if number + 1 < len(steps) else float("inf")
        kernels = [k for k in found.kernels if step.begin <= k.given < last]
        one = Measured(step.end - step.begin)
        uses = [*_uses(ranges, step)]
        for use in uses:
            one.uses.append(UseTimes(use.unit, length(use.computes), use.host))
        if kernels:
            _on_device(one, uses, kernels, ranges, number, gathers, reductions)
        else:
            _on_host(one, uses, ranges, step, units, number)
        every.append(one)
    return every


class _Use(NamedTuple):
    unit: str
    computes: list[Interval]  # on the host, between its verbs
    host: float
    begin: float  # of its unshard


def _uses(ranges: list[Range], step: Range) -> Iterator[_Use]:
    """From each `unshard` to the next one, or to the step's end. What the host does outside of verbs is compute."""
    verbs, end = [], step.begin
    for one in ranges:
        if one.name.split(" ", 1)[0] in VERBS and one.begin > end - 1e-8:  # outermost
            verbs.append(one)
            end = one.end
    waits = [(r.begin, r.end) for r in ranges if r.name.startswith("wait ")]
    at = [i for i, one in enumerate(verbs) if one.name.split(" ", 1)[0] == "unshard"]
    for i, first in enumerate(at):
        stop = at[i + 1] if i + 1 < len(at) else len(verbs)
        mine = [(one.begin, one.end) for one in verbs[first:stop]]
        until = verbs[stop].begin if stop < len(verbs) else step.end
        final = next((one.begin for one in verbs[first:stop] if one.name in ("step", "finish_reductions")), until)
        computes = minus([(verbs[first].begin, min(until, final))], mine)
        yield _Use(verbs[first].name.partition(" ")[2], computes, length(minus(mine, waits)), verbs[first].begin)


def _for_use(uses: list[_Use], given: int, lane: str, unit: str) -> int:
    """The use that a lane's work is for: a gather that is given in one use may be for a later one."""
    later = (k for k in range(given, len(uses)) if unit in uses[k].unit.split(" "))
    return next(later, given) if lane == "gather" else given


def _named(name: str) -> tuple[str, str] | None:
    """The lane and the unit of a range within which work is given to a lane."""
    if name.startswith("gather "):
        return "gather", name.removeprefix("gather ")
    if name.startswith(REDUCES):
        return "reduce", name.removeprefix(REDUCES)
    return ("vote", "") if name == "vote" else None


def _on_host(
    one: Measured, uses: list[_Use], ranges: list[Range], step: Range, units: Mapping[str, str], number: int
) -> None:
    begins = [use.begin for use in uses]
    seen: Counter[tuple[str, str]] = Counter()
    given: list[tuple[str, str, float]] = []
    for r in ranges:
        found = _named(r.name)
        if found is not None:
            one.arrivals.append(Arrival(number, *found, seen[found], r.begin, r.end))
            seen[found] += 1
            if found[0] != "vote":
                given.append((*found, r.begin))
    waits: list[Wait] = []
    for r in ranges:
        if r.name.startswith("wait "):
            _, lane, bucket = r.name.split(" ", 2)
            use = max(bisect_right(begins, r.begin) - 1, 0)
            waits.append(Wait(r.begin - step.begin, r.end - step.begin, lane, units.get(bucket, ""), use))
    free: dict[str, float] = {}
    for lane, unit, begin in given:  # it ends where the host has seen that, at the latest with the step
        ends = [w.end + step.begin for w in waits if (w.lane, w.unit) == (lane, unit) and w.end + step.begin > begin]
        end = min(ends, default=step.end)
        at = min(max(begin, free.get(lane, begin)), end)
        free[lane] = end
        use = _for_use(uses, max(bisect_right(begins, begin) - 1, 0), lane, unit)
        one.spans.append(Span(lane, unit, use, at - step.begin, end - step.begin))
    for k, use_of in enumerate(uses):
        for begin, end in use_of.computes:
            one.spans.append(Span("compute", use_of.unit, k, begin - step.begin, end - step.begin))
    one.waits = waits
    for lane in ("gather", "reduce", "control"):
        one.exposed[lane] = length((w.begin, w.end) for w in waits if w.lane == lane)
    one.waited = length((w.begin, w.end) for w in waits)


def _on_device(
    one: Measured, uses: list[_Use], kernels: list[Kernel], ranges: list[Range], number: int, gathers: Sequence[str],
    reductions: Sequence[str],
) -> None:  # fmt: skip
    lanes = [*_lanes(kernels, ranges, gathers, reductions)]
    time: dict[Any, float] = {}
    for kernel, found in zip(kernels, lanes, strict=True):
        if found is None:
            time[kernel.stream] = time.get(kernel.stream, 0.0) + kernel.end - kernel.begin
    apart = {k.stream for k, found in zip(kernels, lanes, strict=True) if found is not None and k.communicates}
    home = max({s: t for s, t in time.items() if s not in apart} or time, key=lambda stream: time[stream], default=None)
    compute = [k for k, found in zip(kernels, lanes, strict=True) if found is None and k.stream == home]
    busy = union((k.begin, k.end) for k in compute)
    start = min(k.begin for k in kernels)
    one.seconds = max(k.end for k in kernels) - start
    begins = [use.begin for use in uses]
    by_use: dict[int, list[Interval]] = {}
    for k in compute:
        use = max(bisect_right(begins, k.given) - 1, 0)
        by_use.setdefault(use, []).append((k.begin, k.end))
    for use, some in by_use.items():
        name = "(step)"
        if use < len(uses):
            one.uses[use].compute, name = length(some), uses[use].unit
        one.spans.append(Span("compute", name, use, min(some)[0] - start, max(e for _, e in some) - start))
    seen: Counter[tuple[str, str]] = Counter()
    for kernel, found in zip(kernels, lanes, strict=True):
        if found is None or not kernel.communicates:
            continue
        lane, unit = found
        one.arrivals.append(Arrival(number, lane, unit, seen[found], kernel.begin, kernel.end))
        seen[found] += 1
        use = max(bisect_right(begins, kernel.given) - 1, 0)
        use = _for_use(uses, use, lane, unit)
        one.spans.append(Span(lane, unit, use, kernel.begin - start, kernel.end - start))
        for begin, end in minus([(kernel.begin, kernel.end)], busy):
            later = [(min(times), k) for k, times in by_use.items() if max(times)[1] > begin]
            one.waits.append(Wait(begin - start, end - start, lane, unit, min(later)[1] if later else len(uses) - 1))
    for lane in ("gather", "reduce", "other"):
        of_lane = [(s.begin + start, s.end + start) for s in one.spans if s.lane == lane]
        one.exposed[lane] = length(of_lane) - overlap(of_lane, busy)
    one.waited = length((w.begin, w.end) for w in one.waits)


def _lanes(
    kernels: list[Kernel], ranges: list[Range], gathers: Sequence[str], reductions: Sequence[str]
) -> Iterator[tuple[str, str] | None]:
    """Of each kernel the lane and the unit, None: compute's."""
    given = [(r.begin, r.end, r.thread, _named(r.name)) for r in ranges if _named(r.name) not in (None, ("vote", ""))]
    starts = [begin for begin, *_ in given]
    count: Counter[str] = Counter()
    for kernel in kernels:
        if kernel.in_graph:
            if not kernel.communicates:
                yield None
                continue
            name = kernel.name.lower()
            lane = "gather" if "allgather" in name else "reduce" if "reducescatter" in name else "other"
            order = {"gather": gathers, "reduce": reductions}.get(lane, ())
            yield lane, order[count[lane] % len(order)] if order else ""
            count[lane] += 1
            continue
        i = bisect_right(starts, kernel.given) - 1
        found = None
        while i >= 0 and found is None:  # ranges of one thread: the newest that holds it
            begin, end, thread, what = given[i]
            if kernel.thread == thread and begin <= kernel.given < end:
                found = what
            elif begin < kernel.given - 1.0:
                break
            i -= 1
        yield found if found is not None else ("other", "") if kernel.communicates else None
