"""Timelines: what each lane does when, and what lies where in the arena, predicted from bytes and bandwidths.

gather   [a][ b ][ c ]      [ b ]    [a]           one at a time, in plan order; waits for the bytes it reuses
compute     [ a ][ b ][ c ][ c      ][ b     ][ a     ]     waits for its own gather only
reduce                              [ c ]     [ b ]  [ a ]  one at a time; compute waits if both slots are taken

arena    addresses over time: pale while a unit is being gathered, half full while it waits, full while it computes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from os import PathLike
from typing import Any

from .._common.errors import SpecError, expect
from .._common.tree import PathIndex, bytes_text
from .._plan.plan import REDUCTIONS_AT_ONCE, Plan, PlannedUnit
from .draw import EXPOSED, FAINT, INK, Page, Panel, binary_scale, colours_of

__all__ = ["SCALES", "Span", "Timeline", "draw_lanes", "draw_timeline", "predict", "timeline"]

SCALES = ((1.0, "s"), (1e3, "ms"), (1e6, "µs"))


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


def predict(
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
    found = predict(plan, gather=gather, reduce=reduce, compute=compute, backward=backward, ranks=ranks)
    draw_timeline(plan, found, path)
    return found


def draw_timeline(plan: Plan, timeline: Timeline, path: str | PathLike[str]) -> None:
    """Write the picture: lanes over time above, arena addresses over time below, one colour a unit.

    Raises:
        ImportError: matplotlib is missing; the text names the extra to install.
    """
    page = Page()
    scale, unit_of_time = next(((s, name) for s, name in SCALES if timeline.seconds * s >= 1), SCALES[-1])
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
