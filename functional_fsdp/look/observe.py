"""observe: a train step that is measured: what each use took, what compute waited for, which rank came late."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import update_wrapper
from os import PathLike
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

from .._common.calls import ranged
from .._common.errors import ScheduleError, expect
from .._common.torch_names import profiler, pytree
from .._common.tree import bytes_text, table
from .._plan.plan import Plan
from .._runtime.runtime import Runtime, runtime_of
from .._shared.device import count_peak, peak_of
from .._state.state import State
from .draw import FAINT, INK, Page, colours_of
from .timeline import STEP, Arrival, Measured, Timeline, draw_lanes, length, measured, recorded, time_scale, timeline_of

CLOCK = "clock"
EXCHANGES = 9  # by which clocks are compared
Key = tuple[int, str, str, int]  # of a collective: step, lane, unit, which of these


class Late(NamedTuple):
    """A rank came to a collective after the others.

    Attributes:
        rank: in order of the mesh.
        lane, unit, nth: the collective: the `nth` of this lane and unit in a step. Lane "vote": where `step` votes.
        seconds: after the middle one of the others; the median over steps, by one clock.
    """

    rank: int
    lane: str
    unit: str
    nth: int
    seconds: float

    def __repr__(self) -> str:
        what = f"the {self.lane} of {self.unit!r}" if self.unit else f"the {self.lane}"
        return f"rank {self.rank} came to {what} {1e3 * self.seconds:,.1f} ms after the others"


class RankTimes(NamedTuple):
    """Of one rank, seconds a step: all of it, compute, what compute waited for communication, and that by lane.

    Lanes that run at once count once in `waited`, and each in `exposed`.
    """

    seconds: float
    compute: float
    waited: float
    exposed: dict[str, float]


class Row(NamedTuple):
    """One use of a step, in order; the mean over steps, seconds. None: there is nothing, or no plan.

    Attributes:
        unit, backward: which unit, and whether its gradient comes there.
        compute, waited, host: measured; host: in verbs, without waits. waited_for: (lane, unit) of most of it.
        gather, reduce: of the lane's work that was given in this use, for whatever unit.
        gather_bytes, reduce_bytes: that this rank receives by it.
        planned: seconds of compute, gather and reduce by the plan.
    """

    unit: str
    backward: bool
    compute: float
    waited: float
    waited_for: tuple[str, str] | None
    host: float
    gather: float | None
    reduce: float | None
    gather_bytes: int
    reduce_bytes: int
    planned: tuple[float, float, float] | None


def observe(
    train_step: Callable[..., Any], steps: int = 5, *, skip: int = 3, gather: float | None = None,
    reduce: float | None = None,
) -> Observed:  # fmt: skip
    """The same train step, which is measured under torch.profiler: what each use took, and what compute waited for.

    Args:
        train_step: `train_step(state, *args, **kwargs)`, in any of the three ways, also a compiled or a captured one.
        steps: how many calls are measured.
        skip: how many go before them: compilation, captures, orders that are recorded. One more begins the profile.
        gather, reduce: what the links give, bytes of a whole unit a second, as `timeline` has them. None: that of the
            best step that was measured. The plan goes by these and by what compute was measured to take.

    Returns:
        a function that is called as `train_step`. After `skip + steps + 1` calls its `report` is an `Observation`;
        before, it is None. Further calls are not measured.

    On the CPU a lane's work lasts until the host has seen its end, and compute waits where the host does. On GPUs
    times are those of kernels. Of steps that run no Python there are seconds, exposed communication and, by the plan's
    order, gathers and reductions.

    Raises (from it):
        TypeError: the first argument is no State. ScheduleError: on simulated ranks, which share one process; or
        another profiler runs. Whatever `train_step` raises: if it is being measured, that ends, without a report; so it
        does where the function is let go of before its last call.

    Collective: those of `train_step`; in the last call ten small gathers on the host, by which clocks are compared.

    Example: `step = fsdp.observe(train_step)`; `state, loss = step(state, batch)` nine times; `print(step.report)`.
    """
    expect("observe(train_step)", train_step, Callable, "a function of (state, ...)")
    if type(steps) is not int or type(skip) is not int or steps < 1 or skip < 0:
        raise ValueError(
            f"observe(steps={steps!r}, skip={skip!r}): expected whole numbers, at least 1 step, and no fewer than 0 "
            "before."
        )
    for lane, rate in (("gather", gather), ("reduce", reduce)):
        if rate is not None and not (isinstance(rate, int | float) and 0 < rate < float("inf")):
            raise ValueError(f"observe({lane}={rate!r}): expected bytes a second, above 0, or None.")
    return Observed(train_step, steps, skip, gather, reduce)


class Observed:
    """What `observe` returns."""

    def __init__(
        self, train_step: Callable[..., Any], steps: int, skip: int, gather: float | None, reduce: float | None
    ) -> None:
        self.train_step = train_step
        self.report: Observation | None = None
        self._steps, self._skip, self._rates = steps, skip, (gather, reduce)
        self._calls = 0
        self._profile: Any = None
        self._clock = 0.0
        update_wrapper(self, train_step, updated=())

    def __call__(self, state: State, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise self._given_up(TypeError(f"observe: the first argument is a State, not {type(state).__name__}."))
        number = self._calls - self._skip  # the first one under the profiler is left out
        self._calls += 1
        if not 0 <= number <= self._steps:
            return self.train_step(state, *args, **kwargs)
        run = runtime_of(state.spec.mesh)
        try:
            if number == 0:
                self._begin(run)
            out = ranged(self.train_step, STEP)(state, *args, **kwargs)
        except BaseException as error:
            self._given_up(error)
            raise
        if number == self._steps:
            self._end(run, state_in(out) or state)
        return out

    def _given_up(self, error: BaseException) -> BaseException:
        """It measures no more, since this came."""
        self._calls = self._skip + self._steps + 1
        self._stop()
        return error

    def _stop(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def __del__(self) -> None:
        self._stop()  # of a loop that was shorter

    def _begin(self, run: Runtime) -> None:
        if run.medium.lanes is not None:
            raise ScheduleError(
                "observe: simulated ranks take turns in one process, so no time of theirs says anything. Observe ranks "
                "that are processes: fsdp.launch(...) without simulate=True."
            )
        if profiler._is_profiler_enabled:
            raise ScheduleError(
                "observe: a profiler runs already. End it first, or let go of the function of an observe that has no "
                "report yet; observe begins one of its own."
            )
        activities = [ProfilerActivity.CPU]
        if count_peak(run.device):
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.start()
        self._clock = ranged(time.time, CLOCK)()
        run.everyone(0, "observe")  # all ranks are here

    def _end(self, run: Runtime, state: State) -> None:
        peak = peak_of(run.device)
        self._profile.stop()
        with TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            found = recorded(json.loads(path.read_text()))
        self._profile = None
        plan = state.cursor.plan
        units = {bucket.name: bucket.unit for bucket in state.layout.buckets.values()}
        gathers, reductions = [g.unit for g in plan.gathers], [r.unit for r in plan.reductions]
        steps = measured(found, units, gathers, reductions)[1:]
        begun = next((r.begin for r in found.ranges if r.name == CLOCK), 0.0)
        clock = begun - self._clock  # of the trace, less the host's
        left = []
        for _ in range(EXCHANGES):
            run.everyone(0, "clocks")
            left.append(time.time() + clock)
        times = RankTimes(
            fmean(one.seconds for one in steps),
            fmean(sum(use.compute for use in one.uses) for one in steps),
            fmean(one.waited for one in steps),
            {lane: fmean(one.exposed.get(lane, 0.0) for one in steps) for lane in steps[0].exposed},
        )
        arrivals = [arrival for one in steps for arrival in one.arrivals]
        every = run.everyone((times, arrivals, left, peak), "observations")
        late = lateness([came for _, came, *_ in every], [left for *_, left, _ in every], bool(found.kernels))
        rows = _rows(steps, plan, _received(state, run), self._rates)
        peaks = tuple(one[-1] for one in every)
        self.report = Observation(run.rank, tuple(one[0] for one in every), rows, late, peaks, plan, steps, self._rates)


def state_in(out: Any) -> State | None:
    """The first State of what a train step returned."""
    leaves = pytree.tree_leaves(out, is_leaf=lambda x: isinstance(x, State))
    return next((leaf for leaf in leaves if isinstance(leaf, State)), None)


def lateness(arrivals: list[list[Arrival]], left: list[list[float]], ended: bool) -> tuple[Late, ...]:
    """By how much each rank came last, worst first.

    Args:
        arrivals: of each rank, on its own clock.
        left: when each rank left some exchanges, on that clock; ended: whether collectives end on all ranks at once, so
            that clocks can be compared by that.
    """
    came: list[dict[Key, Arrival]] = [{(a.step, a.lane, a.unit, a.nth): a for a in some} for some in arrivals]
    shared = [key for key in came[0] if all(key in other for other in came)]
    offsets = []
    for rank, mine in enumerate(came):
        pairs = [mine[key].end - came[0][key].end for key in shared] if ended and len(shared) > 2 else []
        pairs = pairs or [a - b for a, b in zip(left[rank], left[0], strict=True)]
        offsets.append(median(pairs))
    found: dict[tuple[int, str, str, int], list[float]] = {}
    for key in shared:
        at = [mine[key].begin - offset for mine, offset in zip(came, offsets, strict=True)]
        for rank, mine_at in enumerate(at):
            others = at[:rank] + at[rank + 1 :]
            if others:
                found.setdefault((rank, *key[1:]), []).append(mine_at - median(others))
    every = [Late(*key, median(some)) for key, some in found.items()]
    return tuple(sorted((one for one in every if one.seconds > 0), key=lambda one: -one.seconds))


def _received(state: State, run: Runtime) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that this rank receives by a gather, and by a reduction, of each unit."""
    gather: dict[str, int] = {}
    reduce: dict[str, int] = {}
    for bucket in state.layout.buckets.values():
        ways = state._executor.reductions.staging.records(bucket)
        for found, route in ((gather, ways.unshard), (reduce, ways.reduce[True])):
            some = sum(one.received(run.sizes.get(one.axis, run.size)) for one in route.collectives)
            found[bucket.unit] = found.get(bucket.unit, 0) + (some if found is gather or bucket.trainable else 0)
    return gather, reduce


def _rows(
    steps: list[Measured], plan: Plan, received: tuple[dict[str, int], dict[str, int]],
    rates: tuple[float | None, float | None],
) -> tuple[Row, ...]:  # fmt: skip
    count = max((len(one.uses) for one in steps), default=0)
    steps = [one for one in steps if len(one.uses) == count]
    planned = _planned(steps, plan, rates) if count == len(plan.uses) else None
    rows = []
    for k in range(count):
        waits = [[w for w in one.waits if w.use == k] for one in steps]
        total: dict[tuple[str, str], float] = {}
        for w in (w for some in waits for w in some):
            total[w.lane, w.unit] = total.get((w.lane, w.unit), 0.0) + w.end - w.begin
        lanes: dict[str, tuple[float | None, int]] = {}
        for lane, of in zip(("gather", "reduce"), received, strict=True):
            spans = [[s for s in one.spans if (s.lane, s.use) == (lane, k)] for one in steps]
            some = [sum(s.seconds for s in found) for found in spans if found]
            lanes[lane] = (fmean(some) if some else None, sum(of.get(u, 0) for u in {s.unit for s in spans[-1]}))
        row_plan = None
        if planned is not None:
            of_use = [s for s in planned.spans if s.use == k]
            by_lane = [sum(s.seconds for s in of_use if s.lane == lane) for lane in ("compute", "gather", "reduce")]
            row_plan = (by_lane[0], by_lane[1], by_lane[2])
        rows.append(
            Row(
                steps[0].uses[k].unit,
                count == len(plan.uses) and plan.uses[k].reduces,
                fmean(one.uses[k].compute for one in steps),
                fmean(length((w.begin, w.end) for w in some) for some in waits),
                max(total, key=lambda what: total[what]) if total else None,
                fmean(one.uses[k].host for one in steps),
                lanes["gather"][0],
                lanes["reduce"][0],
                lanes["gather"][1],
                lanes["reduce"][1],
                row_plan,
            )
        )
    return tuple(rows)


def _planned(steps: list[Measured], plan: Plan, rates: tuple[float | None, float | None]) -> Timeline:
    """The plan, with what compute took and what the links gave at best."""
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for k, use in enumerate(plan.uses):
        to = backward if use.reduces else forward
        to[use.unit] = to.get(use.unit, 0.0) + fmean(one.uses[k].compute for one in steps)
    times = {unit: forward.get(unit, 0.0) or 1e-9 for unit in plan.by_name}
    factor = sum(backward.values()) / (sum(forward.values()) or 1e-9) if backward else 2.0
    gather, reduce = (rate or 1e15 for rate in _links(steps, plan, rates))  # no lane that was not used takes time
    return timeline_of(plan, gather=gather, reduce=reduce, compute=times, backward=factor)


def _links(steps: list[Measured], plan: Plan, given: tuple[float | None, float | None]) -> tuple[float, float]:
    """Bytes of whole units a second: as given, or in the best step; 0 where nothing was sent."""
    sizes = {"gather": {u.name: u.nbytes for u in plan.units}, "reduce": {r.unit: r.nbytes for r in plan.reductions}}
    best = []
    for lane, rate in zip(sizes, given, strict=True):
        spans = [[s for s in one.spans if s.lane == lane and s.seconds] for one in steps]
        seen = (sum(sizes[lane].get(s.unit, 0) for s in some) / sum(s.seconds for s in some) for some in spans if some)
        best.append(rate or max(seen, default=0.0))
    return best[0], best[1]


@dataclass(repr=False)
class Observation:
    """What was measured. Printing it gives a table of the uses, and what ranks were late for.

    Attributes:
        rank: whose `rows` and `steps` they are.
        ranks: `RankTimes` of each: seconds a step, compute, the communication that compute waited for, and that by
            lane.
        rows: of each use, see `Row`; empty where no Python ran.
        late: see `Late`, worst first.
        peaks: of each rank, bytes of GPU memory at the peak; None on the CPU.
        plan: what was followed.
        steps: each step as it was measured, with spans on each lane.
    """

    rank: int
    ranks: tuple[RankTimes, ...]
    rows: tuple[Row, ...]
    late: tuple[Late, ...]
    peaks: tuple[int | None, ...]
    plan: Plan
    steps: list[Measured]
    rates: tuple[float | None, float | None] = (None, None)

    @property
    def links(self) -> tuple[float, float]:
        """Of gathers and reductions: bytes of whole units a second, as given, or in the best step; see `timeline`."""
        return _links(self.steps, self.plan, self.rates)

    @property
    def exposed(self) -> Mapping[str, float]:
        """By lane, seconds a step that compute waited for it on this rank."""
        return self.ranks[self.rank].exposed

    def __repr__(self) -> str:
        rows = []
        for k, row in enumerate(self.rows):
            compute, gather, reduce = row.planned or (None, None, None)
            rows.append(
                (
                    str(k),
                    f"{row.unit or '(all)'}{' (backward)' if row.backward else ''}",
                    _both(compute, row.compute),
                    _ms(row.waited),
                    " of ".join(part for part in row.waited_for or () if part) or "-",
                    _both(gather, row.gather),
                    _rate(row.gather_bytes, row.gather),
                    _both(reduce, row.reduce),
                    _rate(row.reduce_bytes, row.reduce),
                    _ms(row.host),
                )
            )
        head = ("use", "unit", "compute", "waited", "for", "gather", "GB/s", "reduce", "GB/s", "host")
        mine = self.ranks[self.rank]
        waits = ", ".join(f"{lane} {_ms(seconds)}" for lane, seconds in mine.exposed.items())
        lines = [
            f"rank {self.rank} of {len(self.ranks)}, {len(self.steps)} steps, ms: {_ms(mine.seconds)} a step, compute "
            f"{_ms(mine.compute)}, exposed communication {_ms(mine.waited)}: {waits or '-'}"
        ]
        if rows:
            lines.append(table(head, rows) + "\nplanned / measured, mean ms; GB/s received")
        rates = zip(("gather", "reduce"), self.links, self.rates, strict=True)
        links = [f"{lane} {rate / 1e9:,.2f} GB/s{' (given)' if given else ''}" for lane, rate, given in rates if rate]
        if links:
            lines.append(f"links, at best, of whole units: {', '.join(links)}")
        if any(self.peaks):
            lines.append(f"memory at the peak: {', '.join(bytes_text(peak or 0) for peak in self.peaks[:8])}")
        lines += [repr(one) for one in self.late[:3]]
        return "\n".join(lines)

    def draw(self, path: str | PathLike[str]) -> None:
        """Draw the planned step above the measured one, of this rank: lanes over time, hatched where compute waits.

        Args:
            path: a PNG, or what its ending says: .svg, .pdf.

        Raises:
            ImportError: matplotlib is missing.
        """
        page = Page()
        one = sorted(self.steps, key=lambda step: step.seconds)[len(self.steps) // 2]
        seen = Timeline(tuple(one.spans))
        planned = None
        if self.rows and len(self.rows) == len(self.plan.uses):
            planned = _planned([step for step in self.steps if len(step.uses) == len(self.rows)], self.plan, self.rates)
        longest = max(one.seconds, seen.seconds, planned.seconds if planned else 0.0)
        scale, name = time_scale(longest)
        end = longest * scale or 1.0
        colours = colours_of([*dict.fromkeys([*(u.name for u in self.plan.units), *(s.unit for s in one.spans)])])
        page.text(f"One step on rank {self.rank}: {one.seconds * scale:,.3g} {name}", 15, INK, 0.36, weight="bold")
        if planned is not None:
            page.text(f"planned, with compute as measured: {planned.seconds * scale:,.3g} {name}")
            draw_lanes(page, planned, end, scale, colours, ())
        waited = one.waited * scale
        page.text(f"measured; compute waits {waited:,.3g} {name}, where hatched")
        panel = draw_lanes(page, seen, end, scale, colours, [("compute", w.begin, w.end) for w in one.waits], below=0.6)
        panel.axes.set_xlabel(f"time ({name})", fontsize=10, color=INK)
        panel.ticked = "x"
        panel.axes.grid(axis="x", color=FAINT, linewidth=0.7)
        page.key(colours)
        page.save(path)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.2f}"


def _both(planned: float | None, seen: float | None) -> str:
    return _ms(seen) if planned is None else f"{_ms(planned)} / {_ms(seen)}"


def _rate(nbytes: int, seconds: float | None) -> str:
    return f"{nbytes / seconds / 1e9:,.2f}" if nbytes and seconds else "-"
