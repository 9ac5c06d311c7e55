"""Lanes: a step on paper, event by event: the host issues, compute waits for its gather, others work beside it. Pure.

    host     [ a ][ b ][ c ]...               eager steps only: compute comes no earlier than the host
    gather   [a][ b ][ c ]      [ b ]  [a]    in plan order, each one after the other
    compute     [ a ][ b ][ c ][ c   ][ b  ][ a  ]   slower while memory is moved beside it
    reduce                            [ c ][ b ][ a ]
    update                                         [ a, b, c ]

The next step begins where the updates end; the host may be ahead of it. Of three steps the last one counts.

Traffic: what a unit's gather, its reduction and the refresh after an update send, and how long that takes. Pure.

The records of the collectives are those that the engine carries out (`_plan.plan`). An axis whose ranks are on one
host goes by the links within it, any other by those between hosts, and by as many of them as the group has ranks on a
host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from .._common.record import Collective
from .._plan.layout import Bucket, Layout, Unit
from .._plan.plan import Plan, Records, keeps_copy, records
from .._spec.spec import Spec
from ..look.timeline import Span
from .hardware import Hardware, Link

__all__ = ["Costs", "Run", "Traffic", "Transfer", "play"]


@dataclass(frozen=True)
class Transfer:
    """Something that a lane does beside compute.

    Attributes:
        legs: (lane, axis, seconds): its collectives in order.
        moved: bytes through this GPU's memory.
        received: bytes by axis.
    """

    legs: tuple[tuple[str, str, float], ...] = ()
    moved: int = 0
    received: tuple[tuple[str, int], ...] = ()

    @property
    def seconds(self) -> float:
        return sum(seconds for _, _, seconds in self.legs)


class Traffic:
    """What a spec's units send on this hardware. `gather`, `reduce` and `refresh` by unit."""

    def __init__(self, layout: Layout, spec: Spec, hardware: Hardware, links: Mapping[str, Link] | None = None) -> None:
        self.layout, self.spec, self.hardware, self.links = layout, spec, hardware, links or {}
        self.axes = spec.axes
        self.strides = {}
        stride = 1
        for axis in reversed([*self.axes]):
            self.strides[axis], stride = stride, stride * self.axes[axis]
        self.by_copies = spec.transport.exact and math.prod(self.axes.values()) > 1
        self._gathers: dict[str, Transfer] = {}
        self._reductions: dict[str, Transfer] = {}

    def records(self, bucket: Bucket) -> Records:
        here = tuple((axis, 0) for axis in self.axes)
        return records(bucket, here, self.spec.average, self.spec.transport.traits)

    def seconds(self, one: Collective) -> float:
        """Of a collective, alone."""
        ranks = self.axes[one.axis] if one.axis else math.prod(self.axes.values())
        if ranks == 1:
            return 0.0
        hardware = self.hardware
        link, hops = hardware.link(ranks, self.strides.get(one.axis, 1))
        if one.axis in self.links:
            link = replace(
                self.links[one.axis], latency=max(0.0, self.links[one.axis].latency - hardware.launch / hops)
            )
        if self.by_copies and link is hardware.inside:
            return one.received(ranks) / hardware.copies + hardware.launch
        if one.kind == "all_reduce":  # rings within a host, a tree between hosts
            hops = 2 * min(hops, hardware.node - 1 + math.ceil(math.log2(ranks)))
        return link.seconds(one.received(ranks), hops) + hardware.launch

    def gather(self, unit: str) -> Transfer:
        if unit not in self._gathers:
            buckets = [b for b in self.layout.by_name[unit].buckets if b.gathers(self.spec.schedule.debug)]
            some = [one for b in buckets for one in self.records(b).unshard.collectives]
            moved = sum(_cast(b) + self._through(self.records(b).unshard.collectives) for b in buckets)
            self._gathers[unit] = self._transfer(some, moved, [_cast(b) for b in buckets])
        return self._gathers[unit]

    def reduce(self, unit: str) -> Transfer:
        if unit not in self._reductions:
            buckets = [b for b in self.layout.by_name[unit].buckets if b.trainable]
            some = [one for b in buckets for one in self.records(b).reduce[True].collectives]
            staging = [b.numel * (b.compute.itemsize + b.wire.itemsize) + b.nbytes("grads") for b in buckets]
            moved = sum(staging) + sum(self._through(self.records(b).reduce[True].collectives) for b in buckets)
            self._reductions[unit] = self._transfer(some, moved, staging)
        return self._reductions[unit]

    @cached_property
    def refresh(self) -> Transfer:
        """What `step` sends so that compute copies are renewed."""
        buckets = [b for b in self.layout.trainable.values() if keeps_copy(b)]
        some = [one for b in buckets for one in self.records(b).step.collectives]
        moved = sum(self._through(self.records(b).step.collectives) for b in buckets)
        return self._transfer(some, moved, [])

    def update(self, unit: Unit, state_bytes: float) -> int:
        """Bytes that an update of a unit moves: main weights and optimizer state both ways, gradients, and the compute
        copy. `state_bytes`: of optimizer state for each byte of main weights."""
        found = 0
        for b in unit.buckets:
            if b.trainable:
                main = b.nbytes("main")
                grads = b.numel // b.slices("main") * b.grads.itemsize
                found += int(2 * main * (1 + state_bytes)) + grads
                found += b.gathered.numel // b.slices("main") * b.gather.itemsize if keeps_copy(b) else 0
        return found

    def _through(self, some: Iterable[Collective]) -> int:
        """Bytes of the device's memory that collectives read and write: what comes in and what goes out, and of sums
        what is read again."""
        found = 0
        for one in some:
            received = one.received(self.axes[one.axis] if one.axis else 1)
            found += (3 if one.op else 2) * received
        return found

    def _transfer(self, some: Sequence[Collective], moved: int, copies: Sequence[int]) -> Transfer:
        received: dict[str, int] = {}
        legs: list[tuple[str, str, float]] = []
        copied = sum(copies) / (self.hardware.bandwidth * self.hardware.moves)
        if copied:
            legs.append(("", "", copied))
        for one in some:
            ranks = self.axes[one.axis] if one.axis else 1
            if ranks > 1:
                received[one.axis] = received.get(one.axis, 0) + one.received(ranks)
                legs.append((one.lane, one.axis, self.seconds(one)))
        return Transfer(tuple(legs), moved, tuple(received.items()))


def _cast(bucket: Bucket) -> int:
    """Bytes of the copy of a rank's own shard into its place."""
    shard = bucket.gathered.numel // bucket.slices("weights")
    return shard * ((bucket.gather if keeps_copy(bucket) else bucket.main).itemsize + bucket.gather.itemsize)


LANES = ("host", "gather", "compute", "reduce", "outer", "update", "copies")
STEPS = 3


@dataclass(frozen=True)
class Costs:
    """What a plan's calls take. By call (a group of uses): `device` and `host` seconds. By unit: bytes of `updates`.

    Attributes:
        overlap: whether updates follow each reduction; else they come after the backward.
        microbatches: passes of the plan.
        stays: units that are gathered in the first pass only.
        to_host: bytes of activations that a pass moves to the host's memory and back.
        streamed: bytes of a state in the host's memory that a step moves, each way.
        last: seconds of the host for `step`.
    """

    device: Sequence[float]
    host: Sequence[float]
    updates: Mapping[str, int]
    overlap: bool = False
    microbatches: int = 1
    stays: frozenset[str] = frozenset()
    to_host: int = 0
    streamed: int = 0
    last: float = 0.0


@dataclass
class Run:
    """The last step. begin, end: seconds. waits: seconds that compute waited, by what for."""

    begin: float = 0.0
    end: float = 0.0
    spans: list[Span] = field(default_factory=list)
    waits: dict[str, float] = field(default_factory=dict)
    slowed: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def play(plan: Plan, traffic: Traffic, costs: Costs, hardware: Hardware) -> Run:
    """Carry a plan out, for three steps, and return the last."""
    lanes = _Lanes(plan, traffic, costs, hardware)
    for _ in range(STEPS):
        lanes.step()
    return lanes.played


class _Lanes:
    def __init__(self, plan: Plan, traffic: Traffic, costs: Costs, hardware: Hardware) -> None:
        self.plan, self.traffic, self.costs, self.hardware = plan, traffic, costs, hardware
        self.free = dict.fromkeys(LANES, 0.0)
        self.busy: list[tuple[float, float, float]] = []  # (begin, end, seconds that compute loses in each second)
        self.played = Run()
        self.moving = hardware.bandwidth * hardware.moves
        self.taken = 0.0 if traffic.by_copies else hardware.taken
        self.done: list[float] = []  # reductions

    def step(self) -> None:
        played = self.played = Run(begin=self.played.end)
        for lane in LANES[1:]:
            self.free[lane] = max(self.free[lane], played.begin)  # main weights are new from there on
        updates: dict[str, float] = {}
        for i in range(self.costs.microbatches):
            self.microbatch(i, updates)
        ready = max(self.free["reduce"], self.free["outer"])
        host = self.free["host"] = self.free["host"] + self.costs.last
        if not self.costs.overlap:
            begin = max(self.free["compute"], ready, host if self.costs.last else 0.0)
            seconds = sum(self.costs.updates.values()) / self.moving
            self.span("compute", "update", len(self.plan.uses), begin, begin + seconds)
            self.free["update"] = begin + seconds
        else:
            self.free["update"] = max(self.free["update"], ready)
        end = max(self.free["update"], self.free["compute"], self.free["copies"])
        end = self.send("gather", "refresh", len(self.plan.uses), self.traffic.refresh, end)
        if self.costs.streamed:
            end = max(end, self.free["compute"] + self.costs.streamed / self.hardware.to_host)
        late = end - self.free["compute"]
        if late > 0:
            self.wait("reduce" if ready >= self.free["update"] else "update", late)
        played.end = max(end, host)
        if played.end > end:
            self.wait("host", played.end - end)
        self.busy = [one for one in self.busy if one[1] > played.end]

    def microbatch(self, number: int, updates: dict[str, float]) -> None:
        plan, costs = self.plan, self.costs
        ready: dict[int, float] = {}
        issued = 0
        reduced = 0
        self.done = []
        forward = max(1, plan.turn)
        half = costs.to_host / self.hardware.to_host / forward
        for n, (first, last) in enumerate(plan.groups):
            host = self.free["host"]
            here = max(self.free["compute"], host)
            for item in plan.gathers[issued : plan.due[last]]:
                if number and item.unit in costs.stays:
                    ready[item.first] = self.played.begin
                else:
                    ready[item.first] = self.send("gather", item.unit, item.first, self.traffic.gather(item.unit), here)
            issued = max(issued, plan.due[last])
            weights = max((ready.get(k, 0.0) for k in range(first, last + 1)), default=0.0)
            begin = max(self.free["compute"], weights, host)
            if begin > self.free["compute"]:
                self.wait("gather" if weights >= host else "host", begin - self.free["compute"])
            self.free["host"] = host + costs.host[n]
            end = self.slowed(begin, costs.device[n])
            if self.free["host"] > end:  # the last kernel is issued there
                self.wait("host", self.free["host"] - end)
                end = self.free["host"]
            if costs.host[n]:
                self.span("host", plan.uses[first].unit, first, host, self.free["host"])
            self.span("compute", plan.uses[first].unit, first, begin, end)
            if half:  # there in the forward, and back in the backward
                start = max(self.free["copies"], end if first < forward else begin)
                self.free["copies"] = start + half
                self.busy.append((start, start + half, self.hardware.beside * self.hardware.to_host / self.moving))
                end = max(end, self.free["copies"] - 2 * half)
            self.free["compute"] = end
            while reduced < len(plan.reductions) and plan.reductions[reduced].use <= last:
                reduction = plan.reductions[reduced]
                if reduced >= plan.slots and self.done[reduced - plan.slots] > self.free["compute"]:
                    self.wait("reduce", self.done[reduced - plan.slots] - self.free["compute"])
                    self.free["compute"] = self.done[reduced - plan.slots]
                transfer = self.traffic.reduce(reduction.unit)
                done = self.send("reduce", reduction.unit, reduction.use, transfer, self.free["compute"])
                self.done.append(done)
                reduced += 1
                if costs.overlap and number == costs.microbatches - 1:
                    seconds = costs.updates.get(reduction.unit, 0) / self.moving
                    start = max(done, self.free["update"])
                    self.free["update"] = start + seconds
                    self.busy.append((start, start + seconds, self.hardware.beside))
                    self.span("update", reduction.unit, reduction.use, start, start + seconds)

    def send(self, lane: str, unit: str, use: int, transfer: Transfer, earliest: float) -> float:
        """Put a transfer on its lanes; returns when it is done."""
        if not transfer.legs:
            return earliest
        at, seconds = earliest, transfer.seconds
        for named, _, leg in transfer.legs:
            where = named if named in LANES and named != "side" else lane
            begin = max(at, self.free[where])
            at = self.free[where] = begin + leg
            self.span(where, unit, use, begin, at)
            loss = self.hardware.beside * transfer.moved / self.moving / seconds if seconds else 0.0
            self.busy.append((begin, at, loss + (self.taken if named else 0.0)))
        return at

    def slowed(self, begin: float, seconds: float) -> float:
        """When so many seconds of compute are done that begin there, with what is moved beside them."""
        edges = sorted({t for a, b, _ in self.busy for t in (a, b) if t > begin})
        at, left = begin, seconds
        for edge in [*edges, float("inf")]:
            rate = 1.0 / (1.0 + sum(loss for a, b, loss in self.busy if a <= at < b))
            if left <= (edge - at) * rate:
                at += left / rate
                break
            left -= (edge - at) * rate
            at = edge
        self.played.slowed += at - begin - seconds
        self.busy = [one for one in self.busy if one[1] > begin]
        return at

    def wait(self, what: str, seconds: float) -> None:
        self.played.waits[what] = self.played.waits.get(what, 0.0) + seconds

    def span(self, lane: str, unit: str, use: int, begin: float, end: float) -> None:
        self.played.spans.append(Span(lane, unit, use, begin - self.played.begin, end - self.played.begin))
