"""Pictures of plans: what each lane does when, and what lies where in the arena, predicted from bytes and bandwidths.

gather   [a][ b ][ c ]      [ b ]    [a]           one at a time, in plan order; waits for the bytes it reuses
compute     [ a ][ b ][ c ][ c      ][ b     ][ a     ]     waits for its own gather only
reduce                              [ c ]     [ b ]  [ a ]  one at a time; compute waits if both slots are taken

arena    addresses over time: pale while a unit is being gathered, full from then until it is released
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from .._common.errors import SpecError
from .._common.tree import bytes_text
from .plan import SLOTS, Plan, PlannedUnit

__all__ = ["Span", "Timeline", "draw", "predict", "timeline"]

LANES = ("gather", "compute", "reduce")
INK, FAINT, EXPOSED = "#22262e", "#e4e6eb", "#c9414b"


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
    """A predicted step: every lane's spans in order of time."""

    spans: tuple[Span, ...]

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
        """The share of a lane's seconds during which compute works too: 1.0 is all of it."""
        spans, compute, i, both = self.lane(name), self.lane("compute"), 0, 0.0
        for span in spans:
            while i and compute[i - 1].end > span.begin:
                i -= 1
            while i < len(compute) and compute[i].begin < span.end:
                both += max(0.0, min(span.end, compute[i].end) - max(span.begin, compute[i].begin))
                i += 1
        return both / self.busy(name) if self.busy(name) else 1.0


def predict(
    plan: Plan, *, gather: float, reduce: float, compute: float | Mapping[str, float], backward: float = 2.0
) -> Timeline:
    """Run a plan on three lanes, each one thing at a time.

    A use that reduces is a backward. Gathers are issued as the plan says, when compute comes to the use that starts
    them; a host that runs ahead of the device does no worse.

    Args:
        gather, reduce: bandwidths, in bytes of the whole unit (of its staging) a second.
        compute: seconds of a unit's forward, for each unit (0 where a unit is missing) or for all.
        backward: seconds of a backward for each second of the forward.

    Raises:
        SpecError: a bandwidth that is not positive, or times that are negative.
    """
    for what, rate in (("gather", gather), ("reduce", reduce)):
        if not rate > 0:
            raise SpecError(f"timeline({what}={rate!r}): expected bytes a second, more than 0, as 300e9 for 300 GB/s.")
    times = compute if isinstance(compute, Mapping) else {unit.name: compute for unit in plan.units}
    slow = {name: time for name, time in {**times, "backward": backward}.items() if not time >= 0}
    if slow:
        raise SpecError(f"timeline(compute): {slow} is negative; expected seconds of at least 0.")
    spans: list[Span] = []
    free = dict.fromkeys(LANES, 0.0)
    ready: dict[int, float] = {}
    reduced: list[float] = []  # when each reduction is done
    for k, use in enumerate(plan.uses):
        here = free["compute"]
        for item in plan.gathers[len(ready) : plan.due[k]]:
            begin = max(here, free["gather"])
            ready[item.first] = free["gather"] = begin + plan.by_name[item.unit].nbytes / gather
            spans.append(Span("gather", item.unit, item.first, begin, ready[item.first]))
        begin = max(here, ready.get(k, 0.0))
        factor = backward if use.reduces else 1.0
        free["compute"] = done = begin + times.get(use.unit, 0.0) * factor
        spans.append(Span("compute", use.unit, k, begin, done))
        for reduction in plan.reductions[len(reduced) :]:
            if reduction.use > k:
                break
            if len(reduced) >= SLOTS:  # the copy into staging waits for the bytes of the last but one
                free["compute"] = done = max(done, reduced[-SLOTS])
            begin = max(done, free["reduce"])
            free["reduce"] = begin + reduction.nbytes / reduce
            reduced.append(free["reduce"])
            spans.append(Span("reduce", reduction.unit, k, begin, free["reduce"]))
    return Timeline(tuple(sorted(spans, key=lambda span: (span.begin, span.end, LANES.index(span.lane)))))


def _colour(i: int, count: int) -> tuple[float, float, float]:
    """One hue a unit, in forward order, neighbours apart in lightness too."""
    hue = 0.58 + 0.72 * i / max(count - 1, 1)
    return colorsys.hls_to_rgb(hue % 1.0, 0.56 if i % 2 else 0.68, 0.52)


def _matplotlib() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError(
            'drawing a plan needs matplotlib, which is not installed: pip install "functional-fsdp[plots]".'
        ) from error
    return Figure, Rectangle


class _Canvas:
    """Boxes with labels that fit, and nothing else."""

    def __init__(self, axes: Any, rectangle: Any, inches: tuple[float, float], extent: tuple[float, float]) -> None:
        self.axes, self.rectangle = axes, rectangle
        self.inches = inches[0] / extent[0], inches[1] / extent[1]  # of a unit of x, of y

    def box(self, x: float, y: float, w: float, h: float, label: str = "", **style: Any) -> None:
        width, height = w * self.inches[0] * 72, h * self.inches[1] * 72  # in points
        line = min(0.6, width / 8)
        self.axes.add_patch(self.rectangle((x, y), w, h, **{"linewidth": line, "edgecolor": "white", **style}))
        for text, least in ((label, 7.5), (label.rsplit(".", 1)[-1], 5.0)):
            size = min(9.0, height * 0.7, width / (0.62 * max(len(text), 1) + 0.6))
            if text and size >= least:
                self.axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=size, color=INK)
                return


def timeline(
    plan: Plan,
    path: str | PathLike[str],
    *,
    gather: float,
    reduce: float,
    compute: float | Mapping[str, float],
    backward: float = 2.0,
) -> Timeline:
    """Draw the predicted step of a plan as a PNG: lanes over time above, arena addresses over time below. Needs no GPU.

    Args:
        gather, reduce: bandwidths, in bytes of the whole unit (of its staging) a second.
        compute: seconds of a unit's forward, for each unit or for all.
        backward: seconds of a backward for each second of the forward.

    Returns:
        The `Timeline` that was drawn: its spans in seconds, and how much of each lane compute hides.

    Raises:
        SpecError: a bandwidth or a time that is not above 0. ImportError: matplotlib is missing:
        `pip install "functional-fsdp[plots]"`.

    Example: `fsdp.timeline(plan, "step.png", gather=200e9, reduce=200e9, compute=2e-3)`.
    """
    found = predict(plan, gather=gather, reduce=reduce, compute=compute, backward=backward)
    draw(plan, found, path)
    return found


def draw(plan: Plan, timeline: Timeline, path: str | PathLike[str]) -> None:
    """Write a PNG: lanes over time above, arena addresses over time below, one colour a unit.

    Raises:
        ImportError: matplotlib is missing; the text names the extra to install.
    """
    figure_type, rectangle = _matplotlib()
    scale, unit_of_time = (1e3, "ms") if timeline.seconds < 10 else (1.0, "s")
    end = timeline.seconds * scale or 1.0
    size = next((s for s in (1 << 30, 1 << 20, 1 << 10) if plan.arena >= 2 * s), 1)
    unit_of_size = {1 << 30: "GiB", 1 << 20: "MiB", 1 << 10: "KiB", 1: "B"}[size]
    top = plan.arena / size or 1.0
    colours = {unit.name: _colour(i, len(plan.units)) for i, unit in enumerate(plan.units)}

    width, height = 13.0, 7.4
    figure = figure_type(figsize=(width, height), dpi=150, facecolor="white")
    left, right = 0.075, 0.975
    lanes = figure.add_axes((left, 0.595, right - left, 0.265))
    arena = figure.add_axes((left, 0.085, right - left, 0.435), sharex=lanes)
    across = (right - left) * width
    head = _Canvas(lanes, rectangle, (across, 0.265 * height), (end * 1.01, 3.0))
    body = _Canvas(arena, rectangle, (across, 0.435 * height), (end * 1.01, top * 1.04))

    rows = {"gather": 2.0, "compute": 1.0, "reduce": 0.0}
    for name, y in rows.items():
        head.box(0, y + 0.14, end, 0.72, facecolor="#f4f5f7", edgecolor="none")
        for span in timeline.lane(name):
            label = span.unit if span.seconds else ""
            x, w = span.begin * scale, span.seconds * scale
            head.box(x, y + 0.14, w, 0.72, label, facecolor=colours[span.unit])
    at = 0.0
    for span in timeline.lane("compute"):
        if span.seconds and span.begin - at > 1e-4 * timeline.seconds:
            wait = (at * scale, 1.14, (span.begin - at) * scale, 0.72)
            head.box(*wait, facecolor="none", edgecolor=EXPOSED, hatch="////")
        at = span.end if span.seconds else at
    lanes.set_yticks([y + 0.5 for y in rows.values()], list(rows), fontsize=11)
    lanes.set_ylim(0, 3)
    lanes.tick_params(axis="x", labelbottom=False)

    for unit in plan.units:
        for begin, loaded, done in _lives(unit, timeline):
            y, h = unit.address / size, unit.nbytes / size
            colour = colours[unit.name]
            body.box(begin * scale, y, (loaded - begin) * scale, h, facecolor=colour, alpha=0.32)
            body.box(loaded * scale, y, (done - loaded) * scale, h, unit.name, facecolor=colour)
    arena.axhline(top, color=INK, linewidth=0.9)
    arena.set_ylim(0, top * 1.04)
    arena.set_xlim(0, end * 1.01)
    arena.set_ylabel(f"arena address ({unit_of_size})", fontsize=10, color=INK)
    arena.set_xlabel(f"predicted time ({unit_of_time})", fontsize=10, color=INK)
    for axes in (lanes, arena):
        axes.set_axisbelow(True)
        axes.grid(axis="x", color=FAINT, linewidth=0.7)
        axes.tick_params(length=0, labelcolor=INK)
        for side in axes.spines.values():
            side.set_visible(False)

    title = f"One step: {timeline.seconds * scale:,.3g} {unit_of_time}, arena {bytes_text(plan.arena)}"
    figure.text(left, 0.945, title, fontsize=15, color=INK, weight="bold", va="center")
    shares = (f"{timeline.hidden(lane):.0%} of the {lane} lane" for lane in ("gather", "reduce"))
    hidden = f"compute hides {' and '.join(shares)}; it waits where hatched"
    figure.text(left, 0.9, hidden, fontsize=10.5, color="#5b6270", va="center")
    note = (
        f"pale: being gathered; full: ready, until released    ·    {plan.rule}, {plan.excess:+.1f} % over the lower "
        f"bound    ·    staging {bytes_text(plan.staging)} beside it"
    )
    figure.text(left, 0.545, note, fontsize=10.5, color="#5b6270", va="center")
    figure.savefig(path, format="png")


def _lives(unit: PlannedUnit, timeline: Timeline) -> list[tuple[float, float, float]]:
    """(gather begins, gather ends, bytes are free) in seconds, for each life of a unit."""
    gathers = [span for span in timeline.lane("gather") if span.unit == unit.name]
    done = {span.use: span.end for span in timeline.lane("compute")}
    return [(span.begin, span.end, done[end]) for span, (_, end) in zip(gathers, unit.lives, strict=True)]
