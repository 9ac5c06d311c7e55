"""tune: the settings of a run, searched on paper: placements by axis, what stays gathered, what is recomputed or moved.

rehearsals      of the model as it is, and of each way in which its blocks may keep less; whatever the mesh
candidates      meshes × placements × prefetch × keep × transports: layout, plan, lanes, peak of each
too large       of those the cheapest ways of blocks that free enough, as `T.budget` chooses them
the front       what no other candidate beats in time, peak and traffic at once
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from .._common.errors import SpecError
from .._common.torch_names import pytree
from .._common.tree import bytes_text, table
from .._spec.placement import Placement, ddp, hfsdp, hsdp, zero2, zero3
from .._spec.precision import Precision
from .._spec.spec import Schedule, Spec
from ..look.draw import INK, Page
from .hardware import Hardware, Link
from .prediction import Prediction, above, predicted, prepared, rehearsal_of

SHOWN = 12  # rows of a printed table
LIMIT = 45.0  # seconds of search, and of rehearsals, after which what was found is what there is
ROOM = 0.94  # of the device's memory, where no budget is given


@dataclass(frozen=True)
class Candidate:
    """A setting and its prediction.

    Attributes:
        spec: of the run. microbatches: of a step. batch: rows by which the given batch is multiplied.
        ways: by path of a block what becomes of what it saves, where that is not all kept.
        why: why it is not the best, in words; "" for the best.
        freed, longer: bytes and seconds by which the ways change the prediction, where they were not rehearsed
            together: such a candidate is an estimate.
    """

    spec: Spec
    prediction: Prediction
    ways: Mapping[str, str]
    microbatches: int = 1
    batch: int = 1
    why: str = ""
    freed: int = 0
    longer: float = 0.0

    @property
    def seconds(self) -> float:
        """Of a step, for each time the given batch."""
        return (self.prediction.seconds + self.longer) / (self.batch * self.microbatches)

    @property
    def peak(self) -> int:
        return self.prediction.peak - self.freed

    @property
    def estimated(self) -> bool:
        return bool(self.freed)

    @property
    def received(self) -> int:
        """Bytes that a rank receives, for each time the given batch."""
        return sum(self.prediction.traffic.values()) // (self.batch * self.microbatches)

    def __str__(self) -> str:
        placement = self.spec.placements[0][1]
        schedule = self.spec.schedule
        words = [str(placement), " × ".join(map(str, self.spec.axes.values()))]
        words += [f"prefetch {schedule.prefetch}"] * (schedule.prefetch != 1)
        words += ["kept gathered"] * (schedule.keep == "all")
        words += [repr(self.spec.transport)] * (self.spec.transport.stays)
        words += [f"batch × {self.batch}"] * (self.batch > 1)
        groups: dict[str, int] = {}
        for way in self.ways.values():
            groups[way] = groups.get(way, 0) + 1
        words += [f"{n} blocks {way}" for way, n in groups.items() if way != "kept"]
        return ", ".join(words)


@dataclass(frozen=True, repr=False)
class Tuned:
    """What `tune` found. Printing it gives the front, and why each neighbour of the best loses.

    Attributes:
        best: the candidate that was asked for. front: those that no other beats in time, peak and traffic at once.
        others: neighbours of the best (one setting changed), each with the reason why it loses.
        model: the skeleton to drive, with `T.remat` and `T.offload` where the best has them.
        tried: how many candidates were looked at; seconds: how long that took.
        depth: of `goal="model"`.
    """

    best: Candidate
    front: tuple[Candidate, ...]
    others: tuple[Candidate, ...]
    model: nn.Module
    tried: int
    seconds: float
    budget: int
    depth: int | None = None

    @property
    def spec(self) -> Spec:
        return self.best.spec

    @property
    def prediction(self) -> Prediction:
        return self.best.prediction

    def on(self, mesh: DeviceMesh) -> Spec:
        """The spec on the ranks of a mesh.

        Raises:
            SpecError: the mesh has other axes, or other sizes.

        Example: `state = fsdp.shard(params, found.on(fsdp.local_mesh()), optimizer)`.
        """
        spec = self.best.spec
        made = spec._but("mesh", mesh)
        if made.axes != spec.axes:
            raise SpecError(f"on(mesh): these settings are for a mesh of {spec.axes}, and this one is {made.axes}.")
        return made

    def __repr__(self) -> str:
        head = ("setting", "ms", "peak", "received", "")
        rows = [self._row(one, "best" if one is self.best else "front") for one in self.front[:SHOWN]]
        rows += [self._row(one, one.why) for one in self.others[:SHOWN]]
        depth = f", depth {self.depth}" if self.depth is not None else ""
        return (
            f"{self.best}{depth}: {1e3 * self.best.seconds:.1f} ms, bound by {self.prediction.bound}\n"
            f"{table(head, rows)}\n"
            f"{self.tried} candidates in {self.seconds:.1f} s on {self.prediction.hardware.name}, "
            f"at most {bytes_text(self.budget)} a rank"
        )

    def _row(self, one: Candidate, why: str) -> tuple[str, ...]:
        about = "about " if one.estimated else ""
        return str(one), f"{about}{1e3 * one.seconds:.1f}", bytes_text(one.peak), bytes_text(one.received), why

    def draw(self, path: str) -> None:
        """Draw the front: milliseconds over the peak, larger where more is received. Needs matplotlib."""
        page = Page(7.0)
        most = max(one.peak for one in self.front) / 2**30
        slowest = max(one.seconds for one in self.front) * 1e3
        panel = page.panel(3.0, (1.1 * most, 1.1 * slowest), 0.6)
        for one in self.front:
            x, y = one.peak / 2**30, 1e3 * one.seconds
            panel.axes.plot([x], [y], "o", color=INK, markersize=9 if one is self.best else 5)
        panel.ticked = "xy"
        panel.axes.set_xlabel("peak, GiB a rank", fontsize=9)
        panel.axes.set_ylabel("ms", fontsize=9)
        page.save(path)


def tune(
    model: nn.Module | Callable[[int], nn.Module],
    loss_fn: Callable[..., Any],
    batch: Any,
    *,
    mesh: Mapping[str, int] | None = None,
    gpus: int | None = None,
    budget: int | None = None,
    goal: Literal["time", "tokens", "gpus", "model"] = "time",
    optimizer: Any = None,
    hardware: str | Hardware = "H100",
    precision: Precision | None = None,
    units: Any = None,
    graph: bool = True,
    compiled: bool = False,
    microbatches: int = 1,
    moves: bool = True,
    transports: Sequence[str] = ("collective", "copy_engine"),
    links: Mapping[str, Link] | None = None,
) -> Tuned:
    """Search the settings of a run on paper. Needs no GPU and no ranks.

    Args:
        model, loss_fn, batch, optimizer, hardware, graph, compiled, microbatches, links: as for `fsdp.predict`. With
            `goal="model"` a function from a depth to a model.
        mesh: axes and sizes to keep; `gpus`: how many there are, for meshes of one axis and of replica × shard. One of
            them.
        budget: the most bytes that a step may take on a rank; default: 0.94 of the hardware's memory.
        goal: "time": the least for this batch. "tokens": the least for each row of the batch, which may grow by powers
            of two. "gpus": the fewest on which it fits, at most `gpus`. "model": the largest depth that fits.
        precision: default: compute in bfloat16. units: as for `Spec`.
        moves: whether to consider the host's memory for activations.
        transports: to consider; copies need all ranks that share a bucket in one host.

    Returns:
        a `Tuned`: `.on(mesh)` and `.model`, ready for `shard` or `init` and `T.forward_backward`; `.front`; printing
        it gives a table with the reason why each neighbour of the best loses.

    Searched are: placements by axis, prefetch, `keep`, the transport, and for each block what is kept, recomputed or
    moved. Dtypes are not changed: they are the caller's. Where not all fits, each way of a block is rehearsed first,
    then settings, the best estimate first. None is begun after 45 seconds of the latter, so a slower machine may find
    other settings: search once, and give all ranks what was found. A rehearsal of a large model that looks at values of
    tensors, or of one that moves activations, takes seconds, and there are some ten to thirty: minutes in all.

    Collective: none.

    Raises:
        SpecError: neither a mesh nor a number of GPUs; a budget that is no number of bytes; nothing fits, with the
        least that is taken and what to do.

    Example: `found = fsdp.tune(model, loss_fn, batch, gpus=64, budget=70 * 2**30)`; `print(found)`; on 64 ranks
    `state = fsdp.shard(params, found.on(mesh), optimizer)` and `T.forward_backward(found.model, loss_fn)`.
    """
    if (mesh is None) == (gpus is None):
        raise SpecError("tune: expected mesh={axis: ranks} or gpus=, one of them.")
    machine = Hardware.named(hardware)
    given: Any = ROOM * machine.memory if budget is None else budget
    if not isinstance(given, Real) or not 1 <= float(given) < math.inf:
        raise SpecError(f"tune(budget={budget!r}): expected bytes, more than 0, as 70 * 2**30.")
    most = int(ROOM * machine.memory if budget is None else budget)
    asked = _Asked(
        loss_fn, batch, mesh, most, optimizer, machine, precision or Precision(compute=torch.bfloat16), units, graph,
        compiled, microbatches, moves, tuple(transports), links,
    )  # fmt: skip
    if goal == "model":
        return _largest(asked, model, gpus)
    if not isinstance(model, nn.Module):
        raise SpecError(f"tune: expected a module, not {type(model).__name__}; a function is for goal='model'.")
    search = _Search(asked, model)
    begun = time.perf_counter()
    if goal == "gpus":
        limit = gpus or math.prod((mesh or {}).values())
        n, found = 1, search.run([{"data": 1}])
        while not found and n < limit:
            n *= 2
            found = search.run(meshes(n))
        best = search.verified(found)
    else:
        where = [dict(mesh)] if mesh is not None else meshes(gpus or 1)
        found = search.run(where)
        grows = 2
        while goal == "tokens" and found and grows <= 64 and time.perf_counter() - begun < LIMIT:
            more = search.run(where, grows)
            if not more:
                break
            found, grows = found + more, 2 * grows
        best = search.verified(found)
    if best is None:
        raise search.nothing(most)
    return search.tuned(best, found, begun)


@dataclass(frozen=True)
class _Asked:
    loss_fn: Any
    batch: Any
    mesh: Mapping[str, int] | None
    budget: int
    optimizer: Any
    hardware: Hardware
    precision: Precision
    units: Any
    graph: bool
    compiled: bool
    microbatches: int
    moves: bool
    transports: tuple[str, ...]
    links: Mapping[str, Link] | None


def meshes(gpus: int) -> list[dict[str, int]]:
    """One axis; and replica × shard, with shards of 8 ranks and more."""
    found: list[dict[str, int]] = [{"data": gpus}]
    shard = 8
    while shard < gpus:
        if gpus % shard == 0 and (shard in (8, 16, 32, 64, 128, 256) or shard * 2 >= gpus):
            found.append({"replica": gpus // shard, "shard": shard})
        shard *= 2
    return found


def placements(axes: Mapping[str, int]) -> list[Placement]:
    names = tuple(axes)
    if len(names) == 2:
        return [hsdp(*names), hfsdp(*names), zero3(*names)] if names == ("replica", "shard") else [zero3(*names)]
    return [zero3(*names), zero2(*names), ddp(*names)] if math.prod(axes.values()) > 1 else [zero3(*names)]


class _Search:
    """Candidates of one model: what was rehearsed, and what was found."""

    def __init__(self, asked: _Asked, model: nn.Module) -> None:
        self.asked, self.model = asked, model
        self.budgets = above("budget")
        self.tried = 0
        self.least: tuple[int, str] | None = None
        self.trials: dict[int, Any] = {}
        self.unlikely: list[Candidate] = []  # over the budget, if estimates are right: rehearsed if nothing else fits
        self.left = 0  # settings that there was no time to rehearse

    def trial(self, times: int) -> Any:
        """The rehearsals of the batch so many times."""
        if times not in self.trials:
            asked = self.asked
            one = Spec({"data": 1}, precision=asked.precision, units=asked.units)
            args = grown(asked.batch, times)
            forward_backward, state, args = prepared(self.model, asked.loss_fn, args, one, asked.optimizer)
            paths = tuple(self.budgets.blocks_of(self.model))
            settings = self.budgets.Budget(asked.budget, paths, asked.moves, asked.hardware)
            self.trials[times] = self.budgets.Trial(settings, forward_backward, state, args, {}, True, asked.compiled)
        return self.trials[times]

    def run(self, where: Sequence[Mapping[str, int]], times: int = 1) -> list[Candidate]:
        """All candidates that fit, as far as is known; others are `unlikely`."""
        found: list[Candidate] = []
        for spec in self.specs(where):
            one = self.candidate(spec, times)
            if one is not None:
                (found if one.peak <= self.asked.budget else self.unlikely).append(one)
        return found

    def specs(self, where: Sequence[Mapping[str, int]]) -> Iterator[Spec]:
        asked = self.asked
        for axes in where:
            for placement in placements(axes):
                for schedule in schedules(placement):
                    for transport in asked.transports:
                        ranks = math.prod(axes.values())
                        if transport != asked.transports[0] and (ranks == 1 or ranks > asked.hardware.node):
                            continue
                        yield Spec(
                            axes, placement, precision=asked.precision, units=asked.units, schedule=schedule,
                            transport=transport,
                        )  # fmt: skip

    def candidate(self, spec: Spec, times: int) -> Candidate | None:
        """With the cheapest ways of blocks that fit, if there are any."""
        asked, trial = self.asked, self.trial(times)
        self.tried += 1
        plain = trial.all(self.budgets.KEPT)
        one = self.predicted(spec, times, plain)
        if one.peak <= asked.budget:
            return Candidate(spec, one, {}, asked.microbatches, times)
        self.note(one.peak, str(spec.placements[0][1]))
        return self.fitted(spec, times, one)

    def fitted(self, spec: Spec, times: int, plain: Prediction) -> Candidate | None:
        """An estimate, from what each way frees of a block."""
        asked, trial = self.asked, self.trial(times)
        if not trial.budget.paths:
            return None
        ways = trial.cheapest(plain.peak - asked.budget) or min(map(trial.all, trial.frugal()), key=trial.longer)
        freed = int(sum(trial.costs[way].freed for way in ways))
        times_all = asked.microbatches
        longer = times_all * trial.longer(ways)
        return Candidate(spec, plain, trial.in_words(ways), times_all, times, freed=freed, longer=longer)

    def verified(self, found: list[Candidate]) -> Candidate | None:
        """The best of them, rehearsed as it is; what then does not fit is taken off the list."""
        asked, begun = self.asked, time.perf_counter()
        while time.perf_counter() - begun < LIMIT:
            best = min(found, key=_order, default=None)
            if best is None and self.unlikely:
                found += self.unlikely
                self.unlikely = []
                continue
            if best is None or not best.estimated:
                break
            found.remove(best)
            trial, spec, times = self.trial(best.batch), best.spec, best.batch
            before = best.prediction.peak
            ways, least, its = trial.fitting(before, asked.budget, partial(self.peak, spec, times))
            self.note(least, f"{spec.placements[0][1]}, {its[0]}")
            if ways is not None:
                one = self.predicted(spec, times, ways)
                found.append(Candidate(spec, one, trial.in_words(ways), asked.microbatches, times))
        self.left = sum(one.estimated for one in (*found, *self.unlikely))
        found[:] = [one for one in found if one.peak <= asked.budget]
        return min((one for one in found if not one.estimated), key=_order, default=None)

    def predicted(self, spec: Spec, times: int, ways: tuple[Any, ...]) -> Prediction:
        asked = self.asked
        found = rehearsal_of(self.trial(times).rehearsed(ways), self.model)
        return predicted(
            found, spec, asked.optimizer, asked.hardware, asked.graph, asked.compiled, asked.microbatches, asked.links
        )

    def peak(self, spec: Spec, times: int, ways: tuple[Any, ...]) -> int:
        return self.predicted(spec, times, ways).peak

    def note(self, peak: int, said: str) -> None:
        if self.least is None or peak < self.least[0]:
            self.least = peak, said

    def nothing(self, most: int) -> SpecError:
        peak, said = self.least or (0, "")
        late = f", and {self.left} settings were not rehearsed within {LIMIT:g} s" if self.left else ""
        return SpecError(
            f"tune: nothing fits in {bytes_text(most)} a rank; the least that was found is {bytes_text(peak)} "
            f"({said}){late}. Take more GPUs, a smaller batch, or Placement(memory_kind='pinned_host')."
        )

    def tuned(self, best: Candidate, found: Sequence[Candidate], begun: float) -> Tuned:
        """The front, and the neighbours of the best."""
        front = tuple(one for one in sorted(found, key=_order) if not any(_beats(other, one) for other in found))
        others = [replace(one, why=_why(one, best)) for one in found if one is not best and one not in front]
        others.sort(key=lambda one: (_distance(one, best), one.seconds))
        trial = self.trial(best.batch)
        model = trial.changed(self.ways_of(best))
        return Tuned(best, front, tuple(others), model, self.tried, time.perf_counter() - begun, self.asked.budget)

    def ways_of(self, one: Candidate) -> tuple[Any, ...]:
        trial = self.trial(one.batch)
        kept = self.budgets.KEPT
        if not one.ways:
            return tuple(trial.all(kept))
        by_name = {str(way): way for way in (kept, *trial.costs)}
        return tuple(by_name[one.ways[path]] for path in trial.budget.paths)


def schedules(placement: Placement) -> list[Schedule]:
    """What may matter: without sharded weights nothing is gathered in the forward."""
    if not placement.weights:
        return [Schedule(overlap_update=True)]
    return [
        Schedule(overlap_update=True), Schedule(prefetch=2, overlap_update=True),
        Schedule(keep="all", overlap_update=True),
    ]  # fmt: skip


def grown(batch: Any, times: int) -> Any:
    """The batch with so many times the rows of each tensor's first dim."""

    def more(t: torch.Tensor) -> torch.Tensor:
        shape = (t.shape[0] * times, *t.shape[1:]) if t.dim() else t.shape
        return torch.empty(shape, dtype=t.dtype, device="meta")

    return pytree.tree_map_only(torch.Tensor, more, batch)


def _largest(asked: _Asked, make: Any, gpus: int | None) -> Tuned:
    """The largest depth that fits, by doubling and halving."""
    if isinstance(make, nn.Module):
        raise SpecError("tune(goal='model'): expected a function from a depth to a model.")
    where = [dict(asked.mesh)] if asked.mesh is not None else meshes(gpus or 1)
    begun, low, high, depth = time.perf_counter(), 0, 0, 8
    best: tuple[_Search, list[Candidate]] | None = None
    last = None
    while not high or high - low > max(1, low // 16):
        with torch.device("meta"):
            search = last = _Search(asked, make(depth))
        found = search.run(where)
        if found:
            low, best = depth, (search, found)
        else:
            high = depth
        depth = (low + high) // 2 if high else 2 * depth
        if depth in (low, high) or depth < 1 or depth > 4096:
            break
    if best is None:
        assert last is not None
        raise last.nothing(asked.budget)
    search, found = best
    one = search.verified(found)
    if one is None:
        raise search.nothing(asked.budget)
    return replace(search.tuned(one, found, begun), depth=low)


def _order(one: Candidate) -> tuple[float, int, int]:
    return round(one.seconds, 6), one.peak, one.received


def _beats(one: Candidate, other: Candidate) -> bool:
    a, b = (one.seconds, one.peak, one.received), (other.seconds, other.peak, other.received)
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))


def _distance(one: Candidate, best: Candidate) -> int:
    """How many settings are other ones."""
    a, b = one.spec, best.spec
    pairs = [
        (a.axes, b.axes), (a.placements[0][1], b.placements[0][1]), (a.schedule, b.schedule),
        (a.transport, b.transport), (one.batch, best.batch),
    ]  # fmt: skip
    return sum(x != y for x, y in pairs)


def _why(one: Candidate, best: Candidate) -> str:
    """Why it loses, by what it takes more of."""
    mine, its = best.prediction.parts, one.prediction.parts
    scale = best.batch * best.microbatches, one.batch * one.microbatches
    more = {name: its.get(name, 0) / scale[1] - mine.get(name, 0) / scale[0] for name in {*mine, *its}}
    late = one.seconds / best.seconds - 1
    if late <= 0.001:
        return f"no faster, {bytes_text(max(0, one.peak - best.peak))} more"
    worst = max(more, key=lambda name: more[name])
    what = {
        "compute": "more computed", "slowed": "slowed by what moves beside compute", "gather": "waits for gathers",
        "reduce": "waits for reductions", "update": "updates", "host": "the host",
    }.get(worst, worst)  # fmt: skip
    return f"{100 * late:+.1f} %: {what}"
