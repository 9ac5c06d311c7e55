"""Staging: gradients on their way from a backward to the main gradients.

    gradients ──copy and cast──▶ staging [n] ──reduce-scatter, in place──▶ own slice ──(outer axis)──▶ main gradients
    compute lane   reduce lane                reduce lane                              outer lane

On GPUs the copy runs beside compute, too; the gradients live until compute has waited for it, which it does when the
next ones come. They are as many bytes as one staging more, so where a reduction is one collective there is one staging
at a time, and not two.

Where a transport keeps the staging, on GPUs, and one lane does it all, every reduction lies on the same bytes: it is
copied there by that lane, after the reduction before it.

A reduction's staging is there from its copy until compute has waited for it, which it does at the latest when the next
but one needs some: two at a time, and no more bytes than the plan says. The first reduction of a step lands in the main
gradients, which are allocated then; later ones are added, in their dtype. What was announced with
`last_microbatch=False` may stay partial (see `Placement`); `complete` reduces the rest.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable
from itertools import chain

import torch

from .._common.device import in_host_memory
from .._common.record import check_kinds
from .._distributed.lanes import Mark, Steps, together
from .._plan.layout import STAGED, Bucket, Unit, aligned
from .._plan.plan import SLOTS, Plan
from .._plan.records import Records, records
from .._plan.route import Route, states_of
from .._runtime.runtime import Runtime
from .._storage.flat import FlatBuffer, write_leaves
from .._transports.carrier import Carrier
from .reduction_steps import ReductionSteps
from .sink import GradientSink
from .stage import LARGE, Slot, StagingPlace, Values, differ, leaves_and_gaps

__all__ = ["Staging"]

OLD = 2  # uses
TAIL = 2  # reductions: the last ones of a step have little backward beside which they could travel


class Staging:
    """Every reduction's stage, and those that are under way, oldest first.

    Args:
        sink: where the gradients end.

    Attributes:
        digest: of how far reductions went in this step, where they may stay partial. Votes compare it, since on GPUs
            nobody else sees that ranks send other collectives.
        unshared: whether each reduction has bytes of its own, so that compute waits for none.
    """

    def __init__(
        self, run: Runtime, plan: Plan, average: str, carrier: Carrier, sink: GradientSink, digest: int = 0
    ) -> None:
        self.run = run
        self.plan = plan
        self.carrier = carrier
        self.average = average
        self.tail = len(plan.reductions) - TAIL  # the index of the first of those
        self.digest = digest
        self.sink = sink
        self.stages: dict[int, StagingPlace] = {}
        self.busy: deque[StagingPlace] = deque()
        self.completing = False  # whether something beside them is under way
        self.unshared = False
        self.marks: dict[str, Mark] = {}  # the end of what is newest, and of all before it, by the lane that it ends on
        self.steps = ReductionSteps(run, carrier, average, self.marks)
        #: buckets whose gradients came in this step: whether more than once, be it that some were put aside meanwhile
        self.seen: dict[str, bool] = {}

    def reduce(
        self, index: int, unit: Unit, values: Values, grads: dict[str, FlatBuffer], last: bool, mesh: object,
        relents: bool,
    ) -> bool:  # fmt: skip
        """Stage a unit's gradients for reduction number `index` of the plan and start reducing them into `grads`.

        With `relents` it may leave it (False), because there is no staging before peers have what they wait for.
        """
        if self.unshared:
            self._reduce_unshared(unit, values, grads, last, mesh)
            return True
        stage = self.stages.get(index) or self._make(index, unit)
        room = 1 if self.run.lanes.copies_on_lanes and stage.span is None and stage.short else SLOTS
        apart = self.plan.slots > 1 and stage.span is not None  # else they follow each other on one lane
        while len(self.busy) >= room or stage in self.busy or (apart and any(map(stage.overlaps, self.busy))):
            if not self.run.lanes.wait(self.busy[0].done, relents):
                return False
            self.busy.popleft().free()
        if self.run.lanes.copies_on_lanes:
            self._let_go(self.busy)
        jobs: list[Steps] = []
        ways: list[Route] = []
        partial: list[Bucket] = []
        slots: list[Slot] = []
        for slot in stage.slots:
            bucket = slot.bucket
            have = grads.get(bucket.name)
            whole = last if have is None else have.states == slot.ways[True].states
            way = slot.ways[whole]
            direct = not way.steps and way.divisor == 1 and bucket.wire is bucket.grads and not bucket.grads_on_host
            if have is None and direct:
                self.seen[bucket.name] = bucket.name in self.seen
                slot = slot.on(torch.empty(bucket.numel, dtype=bucket.grads, device=self.run.device))
                grads[bucket.name] = FlatBuffer(slot.whole, bucket, way.states, mesh)
                jobs.append(iter(()))  # it is not sent
            else:
                stage.allocate()
                beside = stage.single and index >= self.tail  # two at once would use one room at once
                jobs.append(self._into(grads, bucket, way, slot.whole, slot.spare, mesh, beside))
            slots.append(slot)
            ways.append(way)
            if last and not whole:
                partial.append(bucket)
            if slot.parts:
                self._note(bucket, whole)
        first = None
        if self.run.lanes.copies_on_lanes:
            stage.values, stage.age, stage.ready = values, 0, self.run.lanes.mark(stage.ready)
            first = stage.copied(self.run, slots, values)
        else:
            for slot in slots:
                slot.write(values)
        stage.done = self._submit(jobs, ways, stage.ready, stage.done, first=first)
        if self.plan.schedule.overlap_update:
            self.sink.there([slot.bucket for slot in stage.slots], stage.done)
        self.busy.append(stage)  # not before: if issuing it is interrupted, its bytes may be written to, and must stay
        for bucket in partial:
            self.complete(bucket, grads)
        return True

    def _note(self, bucket: Bucket, whole: bool) -> None:
        self.digest = zlib.crc32(f"{bucket.name} {whole}".encode(), self.digest)

    def zeros(self, bucket: Bucket, grads: dict[str, FlatBuffer], mesh: object) -> None:
        """Main gradients of a bucket for which no rank has one: nothing is sent."""
        self.seen[bucket.name] = bucket.name in self.seen
        local = self.sink.memory.make(bucket, bucket.numel // bucket.slices("main"))
        if bucket.grads_on_host and not self.run.lanes.waits_on_host:
            for mark in self.marks.values():  # lanes may still read there what was partial in this step
                self.run.lanes.wait(mark)
        local.zero_()
        grads[bucket.name] = FlatBuffer(local, bucket, states_of(bucket, "main"), mesh)

    def age(self) -> None:
        """A unit is asked for. Gradients that were staged some uses ago are let go: it may be a forward, and long."""
        for stage in self.busy:
            stage.age += 1
        self._let_go(stage for stage in self.busy if stage.age > OLD)

    def _let_go(self, stages: Iterable[StagingPlace]) -> None:
        """Compute waits until their values were copied, which then are free."""
        for stage in stages:
            if stage.values is not None:
                self.run.lanes.wait(stage.staged)
                stage.values = None

    def _into(
        self, grads: dict[str, FlatBuffer], bucket: Bucket, way: Route, stage: torch.Tensor, spare: torch.Tensor,
        mesh: object, beside: bool = False,
    ) -> Steps:  # fmt: skip
        """What is staged on its way into the main gradients: the first one allocates them, later ones are added.
        `beside`: they may be used up on the update lane."""
        name = bucket.name
        have = grads.get(name)
        self.seen[name] = name in self.seen
        if have is not None:
            return self.steps.of(way, stage, spare, have.local, True)
        consumer = self.sink.consumers.get(name) if self.sink.consumers else None
        if consumer is not None and way.states == states_of(bucket, "main"):
            sums = way.exact or bucket.wire is not bucket.grads  # else they are used as they lie
            beside = beside and consumer.sums and way.alone
            grads[bucket.name] = FlatBuffer(consumer.begin(way.ends, sums, beside), bucket, way.states, mesh)
            return self.steps.of(way, stage, spare, None, False, consumer)
        same = stage.dtype is bucket.grads and not bucket.grads_on_host  # a call without keywords takes half the time
        local = stage.new_empty(way.numel) if same else self.sink.memory.make(bucket, way.numel)
        grads[bucket.name] = FlatBuffer(local, bucket, way.states, mesh)
        return self.steps.of(way, stage, spare, local, False)

    def outside(self, unit: Unit, values: Values, grads: dict[str, FlatBuffer], last: bool, mesh: object) -> None:
        """Reduce the gradients of a unit that no plan names. Compute waits for it."""
        self.settle()
        self._reduce_unshared(unit, values, grads, last, mesh)
        self.settle()

    def _reduce_unshared(
        self, unit: Unit, values: Values, grads: dict[str, FlatBuffer], last: bool, mesh: object
    ) -> None:
        """Reduce a unit's gradients, or zeros, from bytes of their own."""
        self.completing = True
        given = dict(zip(unit.paths, values or [None] * len(unit.paths), strict=True))
        for bucket in unit.buckets:
            if not bucket.trainable:
                continue
            have = grads.get(bucket.name)
            ways = self.records(bucket).reduce
            whole = have.states == ways[True].states if have is not None else last
            way = ways[whole]
            if differ(ways):
                self._note(bucket, whole)
            stage = torch.empty(bucket.numel, dtype=bucket.wire, device=self.run.device)
            write_leaves(bucket, stage, given)
            spare = stage.new_empty(bucket.received if way.exact else 0, dtype=torch.uint8)
            job = self._into(grads, bucket, way, stage, spare, mesh)
            done = self._submit([job], [way], self.run.lanes.mark())
            self.run.lanes.keep(stage, spare)
            if self.plan.schedule.overlap_update:
                self.sink.there([bucket], done)
            if last:
                self.complete(bucket, grads)

    def complete(self, bucket: Bucket, grads: dict[str, FlatBuffer]) -> None:
        """Reduce what is still partial of a bucket's main gradients. Nothing to do when nothing is."""
        have = grads[bucket.name]
        final = states_of(bucket, "main")
        if have.states == final:
            return
        self.seen[bucket.name] = True
        self.completing = True
        way = self.records(bucket).finish
        if way.collectives:
            self._note(bucket, True)
        local = self.sink.memory.make(bucket, way.numel)
        grads[bucket.name] = FlatBuffer(local, bucket, way.states, have.mesh)
        job = self._complete(bucket, way, have.local, local)
        done = self._submit([job], [way], self.run.lanes.mark(), ordered=True)
        if self.plan.schedule.overlap_update:
            self.sink.there([bucket], done)

    def _complete(self, bucket: Bucket, way: Route, have: torch.Tensor, out: torch.Tensor) -> Steps:
        if not self.run.lanes.waits_on_host:
            self.run.lanes.wait(self.marks.get("outer"))  # the lane does: what is partial may have ended there
        wire = have.to(way.collectives[0].dtype, copy=in_host_memory(have)) if way.collectives else have
        spare = wire.new_empty(bucket.received if way.exact else 0, dtype=torch.uint8)
        yield from self.steps.of(way, wire, spare, out, False)
        self.run.lanes.keep(have, wire, spare)

    def _submit(
        self, jobs: list[Steps], ways: list[Route], after: Mark, mark: Mark = None, ordered: bool = False,
        first: Steps | None = None,
    ) -> Mark:  # fmt: skip
        if len(jobs) == 1:
            job, issued, single, ends = jobs[0], ways[0].collectives, ways[0].single, ways[0].ends
        else:
            job, issued = together(jobs), tuple(one for way in ways for one in way.collectives)
            single, ends = all(way.single for way in ways), max((way.ends for way in ways), key="outer".__eq__)
        if first is not None:
            job = chain(first, job)
        done = self.marks[ends] = self.run.lanes.submit("reduce", issued, job, after, single, ordered, mark)
        return done

    def records(self, bucket: Bucket) -> Records:
        """What the verbs do with a bucket."""
        return records(bucket, self.run.position, self.average, self.carrier.traits)

    def _make(self, index: int, unit: Unit) -> StagingPlace:
        reduction = self.plan.reductions[index]
        stays = self.carrier.staging(unit, self.plan.staging)
        span = None if stays is None else range(reduction.address, reduction.address + reduction.nbytes)
        beside = torch.empty(reduction.received, dtype=torch.uint8, device=self.run.device)
        own = [beside] if reduction.received else []
        if stays is None or span is None:
            memory = torch.empty(reduction.nbytes, dtype=torch.uint8, device=self.run.device)
            own.append(memory)
        else:
            memory = stays[span.start : span.stop]
        received = 0
        by_name = {bucket.name: bucket for bucket in unit.buckets}
        slots = []
        for part in reduction.parts:
            bucket = by_name[part.bucket]
            start = part.address - reduction.address
            sent = bucket.numel * bucket.wire.itemsize
            whole = memory[start : start + sent].view(bucket.wire)
            spare = beside[received : received + bucket.received]
            received += aligned(bucket.received, STAGED)
            ways = self.records(bucket).reduce
            if stays is not None:
                ways = {last: self.carrier.reduces(way) for last, way in ways.items()}
                check_kinds(one for way in ways.values() for one in way.collectives)
            which = tuple(unit.paths.index(leaf.path) for leaf in bucket.leaves if leaf.numel)
            leaves, gaps = leaves_and_gaps(bucket, whole)
            large = self.run.lanes.copies_on_lanes and any(leaf.nbytes >= LARGE for leaf in leaves)
            slots.append(Slot(bucket, whole, spare, leaves, which, gaps, ways, differ(ways), large))
        self.stages[index] = StagingPlace(own, slots, span)
        return self.stages[index]

    def late(self) -> set[str] | None:
        """Buckets whose newest reduction compute has not waited for; None: it is not known which."""
        return None if self.completing else {slot.bucket.name for stage in self.busy for slot in stage.slots}

    def ends(self, lane: str, mark: Mark) -> None:
        """What a lane was given beside reductions ends there: compute waits for that, too, when they settle."""
        self.marks[lane] = mark

    def share(self, unshared: bool = False) -> None:
        """Reductions share the plan's staging from here on; `unshared`: each has bytes of its own."""
        self.unshared = unshared

    def restart(self) -> None:
        """Back to the state between steps. Compute has waited for all."""
        self.unshared = False
        self.seen.clear()
        self.digest = 0

    def settle(self) -> None:
        """Compute waits for every reduction; their staging is given back."""
        for mark in [*self.marks.values()]:  # a job of the host may add one
            self.run.lanes.wait(mark)
        self.drop()

    def drop(self) -> None:
        """Forget what is under way."""
        for stage in self.stages.values():  # one may have been interrupted
            stage.values = None
        self.marks.clear()
        if self.sink.untouched:
            self.sink.drop()
        self.completing = False
        while self.busy:
            self.busy.popleft().free()
