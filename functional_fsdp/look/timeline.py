"""What each lane does when: predicted, and measured.

    Timeline, timeline_of, timeline       predicted from bytes and bandwidths, and drawn
    Recorded, recorded                    a trace of torch.profiler, as far as `observe` reads it
    UseTimes, Measured, measured          what the uses of a step took, from such a trace

`Timeline`: what each lane does when, and what lies where in the arena.

gather   [a][ b ][ c ]      [ b ]    [a]           one at a time, in plan order; waits for the bytes it reuses
compute     [ a ][ b ][ c ][ c      ][ b     ][ a     ]     waits for its own gather only
reduce                              [ c ]     [ b ]  [ a ]  one at a time; compute waits if both slots are taken

arena    addresses over time: pale while a unit is being gathered, half full while it waits, full while it computes

`measured`: on the CPU a lane's work lasts from where it is given, or the work before it has ended, to where the host
has seen its end, and compute waits where the host does. On a GPU both are kernels: compute waits where communication
runs and no other kernel of the compute stream does.

`recorded`: the package's ranges on the host, kernels on a GPU; in seconds, on the trace's clock, which host and device
share. Pure: a dict in, values out.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from os import PathLike
from typing import Any, NamedTuple

from .._common.errors import SpecError, expect
from .._common.tree import PathIndex, bytes_text
from .._plan.plan import REDUCTIONS_AT_ONCE, Plan, PlannedUnit
from .draw import EXPOSED, FAINT, INK, Page, Panel, binary_scale, colours_of


def time_scale(seconds: float) -> tuple[float, str]:
    """By what seconds are multiplied where the longest are so many, and the unit that they are told in then."""
    scales = ((1.0, "s"), (1e3, "ms"), (1e6, "µs"))
    return next((one for one in scales if seconds * one[0] >= 1), scales[-1])


@dataclass(frozen=True)
class Span:
    """What a lane does from `begin` to `end` (seconds), for which unit and which use."""

    lane: str
    unit: str
    use: int
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Timeline:
    """A predicted step: every lane's spans in order of time. Of several ranks each has a lane "compute 0", ...; their
    collectives are on the lanes that all share."""

    spans: tuple[Span, ...]

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes, as a picture has them from above."""
        computes = {span.lane for span in self.spans if span.lane.startswith("compute")} or {"compute"}
        return "gather", *sorted(computes, key=lambda lane: (len(lane), lane)), "reduce"

    @property
    def seconds(self) -> float:
        """When the last lane is done."""
        return max((span.end for span in self.spans), default=0.0)

    def lane(self, name: str) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.lane == name)

    def busy(self, name: str) -> float:
        """Seconds during which a lane works."""
        return sum(span.seconds for span in self.lane(name))

    def hidden(self, name: str) -> float:
        """The share of a lane's seconds during which compute works too, the first rank's: 1.0 is all of it."""
        spans, compute, i, both = self.lane(name), self.lane(self.lanes[1]), 0, 0.0
        for span in spans:
            while i and compute[i - 1].end > span.begin:
                i -= 1
            while i < len(compute) and compute[i].begin < span.end:
                both += max(0.0, min(span.end, compute[i].end) - max(span.begin, compute[i].begin))
                i += 1
        return both / self.busy(name) if self.busy(name) else 1.0


def timeline_of(
    plan: Plan, *, gather: float, reduce: float, compute: float | Mapping[str, float], backward: float = 2.0,
    ranks: Sequence[float] = (1.0,),
) -> Timeline:  # fmt: skip
    """Run a plan on three lanes, each one thing at a time; with several ranks a collective begins when all are there.

    A use that reduces is a backward. Gathers are issued as the plan says, when compute comes to the use that starts
    them; a host that runs ahead of the device does no worse.

    Args:
        gather, reduce: bandwidths, in bytes of the whole unit (of its staging) a second.
        compute: seconds of a unit's forward, for all, or by names and patterns of units (0 where none matches).
        backward: seconds of a backward for each second of the forward.
        ranks: seconds of each rank's compute for each second of the times above.

    Raises:
        SpecError: a bandwidth that is not positive, times that are negative, or no ranks.
    """
    expect("timeline(plan)", plan, Plan, "what make_plan gives")
    rates: dict[str, Any] = {"gather": gather, "reduce": reduce}
    for what, rate in rates.items():
        if not isinstance(rate, Real) or not float(rate) > 0:
            raise SpecError(f"timeline({what}={rate!r}): expected bytes a second, more than 0, as 300e9 for 300 GB/s.")
    given = compute if isinstance(compute, Mapping) else {"*": compute}
    times = _seconds(given, [*plan.by_name])
    factors = {f"ranks[{i}]": factor for i, factor in enumerate(ranks)}
    slow = {name: time for name, time in {**given, **times, "backward": backward, **factors}.items() if not time >= 0}
    if slow:
        raise SpecError(f"timeline(compute): {slow} is negative; expected seconds of at least 0.")
    if not ranks:
        raise SpecError("timeline(ranks=()): expected a number for each rank, as (1.0, 1.0, 1.5) for a slow third one.")
    spans: list[Span] = []
    computes = ["compute"] if len(ranks) == 1 else [f"compute {rank}" for rank in range(len(ranks))]
    free = dict.fromkeys(("gather", *computes, "reduce"), 0.0)
    ready: dict[int, float] = {}
    reduced: list[float] = []  # when each reduction is done
    for k, use in enumerate(plan.uses):
        here = max(free[lane] for lane in computes)
        for item in plan.gathers[len(ready) : plan.due[k]]:
            begin = max(here, free["gather"])
            ready[item.first] = free["gather"] = begin + plan.by_name[item.unit].nbytes / gather
            spans.append(Span("gather", item.unit, item.first, begin, ready[item.first]))
        factor = backward if use.reduces else 1.0
        for lane, rank in zip(computes, ranks, strict=True):
            begin = max(free[lane], ready.get(k, 0.0))
            free[lane] = begin + times[use.unit] * factor * rank
            spans.append(Span(lane, use.unit, k, begin, free[lane]))
        done = max(free[lane] for lane in computes)
        while len(reduced) < len(plan.reductions) and plan.reductions[len(reduced)].use <= k:
            reduction = plan.reductions[len(reduced)]
            if len(reduced) >= REDUCTIONS_AT_ONCE:  # the copy into staging waits for the bytes of the last but one
                free |= {lane: max(free[lane], reduced[-REDUCTIONS_AT_ONCE]) for lane in computes}
                done = max(free[lane] for lane in computes)
            begin = max(done, free["reduce"])
            free["reduce"] = begin + reduction.nbytes / reduce
            reduced.append(free["reduce"])
            spans.append(Span("reduce", reduction.unit, k, begin, free["reduce"]))
    order = [*free]
    return Timeline(tuple(sorted(spans, key=lambda span: (span.begin, span.end, order.index(span.lane)))))


def _seconds(times: Mapping[str, float], units: Sequence[str]) -> dict[str, float]:
    """Each unit's own time, else that of the first pattern that matches it."""
    rules = [*times.items()]
    first = PathIndex(units).first_rules(rules)
    by_pattern = {unit: 0.0 if n is None else rules[n][1] for unit, n in zip(units, first, strict=True)}
    return {unit: times.get(unit, by_pattern[unit]) for unit in units}


def timeline(
    plan: Plan,
    path: str | PathLike[str],
    *,
    gather: float,
    reduce: float,
    compute: float | Mapping[str, float],
    backward: float = 2.0,
    ranks: Sequence[float] = (1.0,),
) -> Timeline:
    """Draw the predicted step of a plan: lanes over time above, arena addresses over time below. Needs no GPU.

    Args:
        path: a PNG, or what its ending says: .svg, .pdf.
        gather, reduce: bandwidths, in bytes of the whole unit (of its staging) a second.
        compute: seconds of a unit's forward, for all units, or by name or pattern: `{"blocks.*": 2e-3, "*": 1e-4}`.
        backward: seconds of a backward for each second of the forward.
        ranks: seconds of each rank's compute for each second of the times above: `(1, 1, 1, 1.5)` for a slow fourth
            one. Each rank has a lane of its own for compute; a gather or reduction begins when all ranks are there.

    Returns:
        The `Timeline` that was drawn: its spans in seconds, and how much of each lane compute hides.

    Raises:
        SpecError: a bandwidth that is not above 0, a time below it, or no ranks. ImportError: matplotlib is missing:
        `pip install "functional-fsdp[plots]"`.

    Example: `fsdp.timeline(plan, "step.png", gather=200e9, reduce=200e9, compute=2e-3)`.
    """
    found = timeline_of(plan, gather=gather, reduce=reduce, compute=compute, backward=backward, ranks=ranks)
    draw_timeline(plan, found, path)
    return found


def draw_timeline(plan: Plan, timeline: Timeline, path: str | PathLike[str]) -> None:
    """Write the picture: lanes over time above, arena addresses over time below, one colour a unit.

    Raises:
        ImportError: matplotlib is missing; the text names the extra to install.
    """
    page = Page()
    scale, unit_of_time = time_scale(timeline.seconds)
    end = timeline.seconds * scale or 1.0
    size, unit_of_size = binary_scale(plan.arena)
    top = plan.arena / size or 1.0
    colours = colours_of([unit.name for unit in plan.units])

    title = f"One step: {timeline.seconds * scale:,.3g} {unit_of_time}, arena {bytes_text(plan.arena)}"
    page.text(title, 15, INK, 0.36, weight="bold")
    shares = (f"{timeline.hidden(lane):.0%} of the {lane} lane" for lane in ("gather", "reduce"))
    page.text(f"compute hides {' and '.join(shares)}; it waits where hatched")
    waits = []
    for lane in timeline.lanes[1:-1]:
        at = 0.0
        for span in timeline.lane(lane):
            if span.seconds and span.begin - at > 1e-4 * timeline.seconds:
                waits.append((lane, at, span.begin))
            at = span.end if span.seconds else at
    head = draw_lanes(page, timeline, end, scale, colours, waits)

    page.text(
        f"arena: pale, being gathered; half full, ready and waiting; full, in use    ·    {plan.rule}, "
        f"{plan.excess:+.1f} % over the lower bound    ·    staging {bytes_text(plan.staging)} beside it"
    )
    body = page.panel(3.2, (end * 1.01, top * 1.04), below=0.6)
    for unit in plan.units:
        for begin, loaded, done, spans in _lives(unit, timeline):
            y, h, colour = unit.address / size, unit.nbytes / size, colours[unit.name]
            body.box(begin * scale, y, (loaded - begin) * scale, h, facecolor=colour, alpha=0.25)
            body.box(loaded * scale, y, (done - loaded) * scale, h, facecolor=colour, alpha=0.55)
            for span in spans:
                body.box(span.begin * scale, y, span.seconds * scale, h, unit.name, facecolor=colour)
    body.axes.axhline(top, color=INK, linewidth=0.9)
    body.axes.set_ylabel(f"arena address ({unit_of_size})", fontsize=10, color=INK)
    body.axes.set_xlabel(f"predicted time ({unit_of_time})", fontsize=10, color=INK)
    head.ticked, body.ticked = "x", "xy"
    for panel in (head, body):
        panel.axes.grid(axis="x", color=FAINT, linewidth=0.7)
        panel.axes.tick_params(axis="x", labelbottom=panel is body)
    if body.unnamed or head.unnamed:
        page.key(colours)
    page.save(path)


def draw_lanes(
    page: Page, timeline: Timeline, end: float, scale: float, colours: Mapping[str, Any],
    waits: Sequence[tuple[str, float, float]], below: float = 0.15,
) -> Panel:  # fmt: skip
    """Lanes over time, up to `end` in units of 1 / `scale` seconds; hatched where a lane waits (seconds)."""
    count = len(timeline.lanes)
    head = page.panel(2.3 * count / 3, (end * 1.01, count), below)
    rows = {lane: count - 1.0 - i for i, lane in enumerate(timeline.lanes)}
    for name, y in rows.items():
        head.box(0, y + 0.14, end, 0.72, facecolor="#f4f5f7", edgecolor="none")
        for span in timeline.lane(name):
            label = span.unit if span.seconds else ""
            x, w = span.begin * scale, span.seconds * scale
            head.box(x, y + 0.14, w, 0.72, label, facecolor=colours[span.unit])
    for lane, begin, stop in waits:
        wait = (begin * scale, rows[lane] + 0.14, (stop - begin) * scale, 0.72)
        head.box(*wait, facecolor="none", edgecolor=EXPOSED, hatch="////")
    head.rows({name: y + 0.5 for name, y in rows.items()})
    return head


def _lives(unit: PlannedUnit, timeline: Timeline) -> list[tuple[float, float, float, list[Span]]]:
    """(gather begins, gather ends, bytes are free, what computes meanwhile), for each life of a unit; in seconds."""
    gathers = [span for span in timeline.lane("gather") if span.unit == unit.name]
    compute = [span for span in timeline.lane(timeline.lanes[1]) if span.unit == unit.name]
    done = {span.use: span.end for span in timeline.lane(timeline.lanes[1])}
    found = []
    for span, (first, end) in zip(gathers, unit.lives, strict=True):
        within = [one for one in compute if first <= one.use <= end and one.seconds]
        found.append((span.begin, span.end, done[end], within))
    return found


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
