"""Traffic: what a unit's gather, its reduction and the refresh after an update send, and how long that takes. Pure.

The records of the collectives are those that the engine carries out (`_plan.records`). An axis whose ranks are on one
host goes by the links within it, any other by those between hosts, and by as many of them as the group has ranks on a
host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .._common.record import Collective
from .._plan.layout import Bucket, Layout, Unit
from .._plan.records import Records, keeps_copy, records
from .._spec.spec import Spec
from .hardware import Hardware, Link

__all__ = ["Traffic", "Transfer"]


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
