"""Gradients, from a backward to the main gradients: whose turn it is, where they are staged, what reduces them.

    Reductions   gradients come in any order, and are reduced in the plan's
    Staging      each reduction's bytes and its job; when a reduction waits for bytes that others still have
    StagedReduction, StagedBucket, Part      one reduction there; a bucket in it; that bucket on its way

    reduce ──▶ its turn has not come: `Reductions.early`, kept as it is
       └─────▶ due, in the plan's order ──▶ Staging.reduce

    gradients ──copy and cast──▶ staging [n] ──reduce-scatter, in place──▶ own slice ──(outer axis)──▶ main gradients
    compute lane   reduce lane                reduce lane                              outer lane

The last arrow copies or adds, or an update uses the sum up where it arrives. Two kinds of sums have other collectives
in the place of the first reduce-scatter: exact ones (`_exact_sums`), and those that travel in a codec
(`codecs.packed_reductions`). `Staging._steps` chooses. The first reduction of a step lands in the main
gradients, which are allocated then; later ones are added, in their dtype. What was announced with
`last_microbatch=False` may stay partial (see `Placement`); `Staging.complete` reduces the rest.

Gradients are cast in two places: `StagedBucket.write` here, and `_flat` in `_graph/traced.py` (compiled steps).

Where reductions are staged follows from two rules. `_plan_reductions` in `_plan/plan.py` gives addresses, and says how
many in a row have bytes of their own (`Plan.slots`). `Staging._stage` waits until there is room: bytes are given back
oldest first, so that a reduction may take those of the last but one. How many reductions have bytes at once (on GPUs
never more bytes than the plan says):

| lanes and transport                              | at once | where                                          |
|--------------------------------------------------|---------|------------------------------------------------|
| GPUs, collectives, one collective a reduction    | 1       | allocated for each; the gradients are a second |
| GPUs, collectives, else                          | 2       | allocated for each                             |
| CPUs, collectives                                | all     | allocated for each                             |
| a transport keeps it, one lane does it all       | 1       | the same bytes for all                         |
| a transport keeps it, else                       | 2       | at the plan's addresses (`Reduction.address`)  |

On GPUs the copy runs beside compute, too; the gradients live until compute has waited for it, which it does when the
next ones come. Staging is there from its copy until compute has waited for the reduction, at the latest when it needs
the room. How many have bytes at once is `reductions_at_once` in `_plan/plan.py`, also for predictions of a step's time
and memory; `look/timeline.py`, which has a plan only, draws two.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._common.calls import provided, ranged
from .._common.device import in_host_memory
from .._common.record import Mark, Steps, check_kinds, together
from .._common.torch_names import foreach_copy_, foreach_zero_, profiler, unflatten_dense_tensors
from .._plan.cursor import Move
from .._plan.layout import STAGED, Bucket, Unit, aligned
from .._plan.plan import REDUCTIONS_AT_ONCE, Plan, Records, records, reductions_at_once
from .._plan.route import Route, states_of
from .._runtime.agreement import GradientMask
from .._runtime.runtime import Runtime
from .._spec.spec import Spec
from .._storage import FlatBuffer, owned, refuse_meta, templates
from .gathers import Carrier, Gathers
from .sink import GradientSink

if TYPE_CHECKING:
    from .executor import Progress

LARGE = 1 << 23  # bytes of a gradient that a kernel of its own copies faster than one for all of a unit
OLD = 2  # uses, after which compute lets gradients go that are staged
TAIL = 2  # reductions: the last ones of a step have little backward beside which they could travel

_packed_sum, _exact_sum = provided("codecs.packed_sum"), provided("exact_sums.exact_sum")
_used_up = provided("exact_sums.used_up")
_equal_check, _error_feedback = provided("look.equal_check"), provided("codecs.ErrorFeedback")

Tensors = list[torch.Tensor]
Values = Sequence[torch.Tensor | None]  # a unit's gradients, in the order of `Unit.paths`; None means zeros


class StagedBucket(NamedTuple):
    """A bucket's staging in one reduction: the whole, in the wire's dtype, its leaves, which of a unit's gradients they
    are, and the gaps.

    ways: how it gets to the main gradients; True: to their final place, False: as far as it needs be now.
    differs: whether these send something else.
    """

    bucket: Bucket
    whole: torch.Tensor
    spare: torch.Tensor  # bytes that an exact sum needs beside it
    leaves: list[torch.Tensor]
    which: tuple[int, ...]
    gaps: list[torch.Tensor]
    ways: dict[bool, Route]
    differs: bool
    large: bool  # whether there are large leaves, and they are copied beside compute

    def on(self, whole: torch.Tensor) -> StagedBucket:
        """The same with other bytes of as many elements."""
        leaves, gaps = leaves_and_gaps(self.bucket, whole)
        return self._replace(whole=whole, leaves=leaves, gaps=gaps)

    def write(self, values: Values) -> None:
        """Copy and cast a unit's gradients; no values means zeros."""
        leaves, tensors = self.leaves, [value for i in self.which if (value := values[i]) is not None] if values else []
        if len(tensors) < len(leaves):
            leaves = [leaf for leaf, i in zip(leaves, self.which, strict=True) if values and values[i] is not None]
            self.whole.zero_()
        elif self.gaps:
            foreach_zero_(self.gaps)
        if self.large:
            leaves, tensors = copy_large(leaves, tensors)
        if leaves:
            try:
                foreach_copy_(leaves, tensors)
            except NotImplementedError:  # looking at each before would take time
                filled = (leaf.path for leaf in self.bucket.leaves if leaf.numel)
                refuse_meta(zip(filled, [values[i] for i in self.which], strict=True))
                raise


class Part(NamedTuple):
    """A bucket in a reduction: how it gets to the main gradients, and the job that brings it there."""

    bucket: Bucket
    way: Route
    job: Steps


class StagedReduction:
    """The staging of one reduction: its bytes, the buckets in them, and marks.

    Args:
        own: what comes and goes with each reduction: its bytes, if they are not `span`, and those beside it.
        span: the bytes of a peer memory or window, which stay.
    """

    def __init__(self, own: Sequence[torch.Tensor], buckets: list[StagedBucket], span: range | None = None) -> None:
        self.own = [(memory.untyped_storage(), memory.numel()) for memory in own]
        self.buckets = buckets
        self.single = len(buckets) == 1
        self.room = reductions_at_once((one.ways for one in buckets), span is not None)
        self.span = span
        self.values: Values | None = None  # what is being copied here
        self.age = 0  # how many units were asked for since
        self.ready: Mark = None  # they are there
        self.staged: Mark = None  # they were copied
        self.done: Mark = None

    def copied(self, run: Runtime, buckets: Sequence[StagedBucket], values: Values) -> Steps:
        """Copy and cast the values, on the lane that goes on with the reduction."""
        for one in buckets:
            one.write(values)
        self.staged = run.lanes.mark(self.staged)
        yield from ()

    def allocate(self) -> None:
        """Have the bytes. Views made on them come back to life."""
        for storage, nbytes in self.own:
            if not storage.nbytes():
                storage.resize_(nbytes)

    def free(self) -> None:
        """Give the bytes back: compute has waited for `done`."""
        self.values = None
        for storage, _ in self.own:
            storage.resize_(0)

    def overlaps(self, other: StagedReduction) -> bool:
        """Whether both lie in a peer memory or window, on the same bytes."""
        a, b = self.span, other.span
        return a is not None and b is not None and a.start < b.stop and b.start < a.stop


def staged(
    bucket: Bucket, paths: Sequence[str], whole: torch.Tensor, spare: torch.Tensor, ways: dict[bool, Route],
    beside: bool = False,
) -> StagedBucket:  # fmt: skip
    """A bucket's staging in these bytes, for a unit's gradients in the order of `paths`. `beside`: they are copied
    there beside compute."""
    which = tuple(paths.index(leaf.path) for leaf in bucket.leaves if leaf.numel)
    leaves, gaps = leaves_and_gaps(bucket, whole)
    differs = ways[True].collectives != ways[False].collectives
    large = beside and any(leaf.nbytes >= LARGE for leaf in leaves)
    return StagedBucket(bucket, whole, spare, leaves, which, gaps, ways, differs, large)


def leaves_and_gaps(bucket: Bucket, whole: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Views of a whole bucket [numel]: its leaves that have elements, and what lies between leaves."""
    pieces, held = unflatten_dense_tensors(whole, templates(bucket)), set(bucket.leaf_pieces)
    leaves = [pieces[i] for i, leaf in zip(bucket.leaf_pieces, bucket.leaves, strict=True) if leaf.numel]
    return leaves, [piece for i, piece in enumerate(pieces) if i not in held]


def copy_large(leaves: Tensors, values: Tensors) -> tuple[Tensors, Tensors]:
    """Copy large gradients, each by a kernel of its own, and return what is left: beside matrix products that
    takes three quarters of the time of one kernel for all. (`copy_` would ask the copy engines, which may have gathers
    to do.)"""
    rest = []
    for leaf, value in zip(leaves, values, strict=True):
        if leaf.nbytes < LARGE or value.dtype is not leaf.dtype or value.device != leaf.device:
            rest.append((leaf, value))
        else:
            torch.mul(value, 1, out=leaf)
    return [leaf for leaf, _ in rest], [value for _, value in rest]


def _moved(staged: Sequence[StagedBucket], buckets: Sequence[StagedBucket]) -> Steps:
    """What is staged elsewhere, to where it is sent from."""
    for one, there in zip(staged, buckets, strict=True):
        there.whole.copy_(one.whole)
    yield from ()


class Staging:
    """Every reduction's stage, and those that are under way, oldest first.

    Args:
        sink: where the gradients end. feedback: what packing loses, see `codecs.packed_reductions`.

    Attributes:
        digest: of how far reductions went in this step, where they may stay partial. Votes compare it, since on GPUs
            nobody else sees that ranks send other collectives.
        unshared: whether each reduction has bytes of its own, so that compute waits for none.
    """

    def __init__(
        self, run: Runtime, plan: Plan, spec: Spec, carrier: Carrier, sink: GradientSink, digest: int = 0,
        feedback: Any = None,
    ) -> None:  # fmt: skip
        self.run = run
        self.plan = plan
        self.carrier = carrier
        self.average = spec.average
        self.tail = len(plan.reductions) - TAIL  # the index of the first of those
        self.digest = digest
        self.sink = sink
        self.feedback = feedback
        self.stages: dict[int, StagedReduction] = {}
        self.busy: deque[StagedReduction] = deque()
        self.completing = False  # whether something beside them is under way
        self.unshared = False
        self.marks: dict[str, Mark] = {}  # the end of what is newest, and of all before it, by the lane that it ends on
        #: buckets whose gradients came in this step: whether more than once, be it that some were put aside meanwhile
        self.seen: dict[str, bool] = {}

    # ---------------------------------------------------------------- a reduction of the plan

    def reduce(self, index: int, unit: Unit, values: Values, last: bool) -> None:
        """Stage a unit's gradients for reduction number `index` of the plan and start reducing them into the sink."""
        if self.unshared:
            self._reduce_unshared(unit, values, last)
            return
        stage = self._stage(index, unit)
        if self.run.lanes.copies_on_lanes:
            self._let_go(self.busy)
        parts: list[Part] = []
        partial: list[Bucket] = []
        buckets: list[StagedBucket] = []
        for one in stage.buckets:
            bucket = one.bucket
            have = self.sink.grads.get(bucket.name)
            whole = last if have is None else have.states == one.ways[True].states
            way = one.ways[whole]
            direct = not way.steps and way.divisor == 1 and bucket.wire is bucket.grads and not bucket.grads_on_host
            if have is None and direct:
                self.seen[bucket.name] = bucket.name in self.seen
                one = one.on(torch.empty(bucket.numel, dtype=bucket.grads, device=self.run.device))
                self.sink.hold(bucket, one.whole, way.states)
                job: Steps = iter(())  # it is not sent
            else:
                stage.allocate()
                beside = stage.single and index >= self.tail  # two at once would use one room at once
                job = self._into(bucket, way, one.whole, one.spare, beside)
            buckets.append(one)
            parts.append(Part(bucket, way, job))
            if last and not whole:
                partial.append(bucket)
            if one.differs:
                self._note(bucket, whole)
        first, waits = self._copied(stage, buckets, values)
        stage.done = self._submit(parts, stage.ready, stage.done, waits, first)
        if waits and stage in self.busy:
            self.busy.remove(stage)
        self.busy.append(stage)  # not before: if issuing it is interrupted, its bytes may be written to, and must stay
        for bucket in partial:
            self.complete(bucket)

    def _stage(self, index: int, unit: Unit) -> StagedReduction:
        """Where reduction number `index` is staged, once there is room. On the host nobody waits for room, as peers may
        wait for what this rank issues later: there each has bytes of its own, or is brought to the transport's bytes
        when those before it are done."""
        lanes, busy = self.run.lanes, self.busy
        stage = self.stages.get(index) or self._make(index, unit)
        if lanes.waits_on_host:
            while len(busy) >= REDUCTIONS_AT_ONCE and lanes.passed(busy[0].done):
                busy.popleft().free()
            return self._make(index, unit) if stage.span is None and stage in busy else stage
        side_by_side = self.plan.slots > 1 and stage.span is not None  # else they follow each other on one lane
        while len(busy) >= stage.room or stage in busy or (side_by_side and any(map(stage.overlaps, busy))):
            lanes.wait(busy[0].done)
            busy.popleft().free()
        return stage

    def _make(self, index: int, unit: Unit) -> StagedReduction:
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
        buckets = []
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
            buckets.append(staged(bucket, unit.paths, whole, spare, ways, self.run.lanes.copies_on_lanes))
        self.stages[index] = StagedReduction(own, buckets, span)
        return self.stages[index]

    def records(self, bucket: Bucket) -> Records:
        """What the verbs do with a bucket."""
        return records(bucket, self.run.position, self.average, self.carrier.traits)

    def _copied(self, stage: StagedReduction, buckets: list[StagedBucket], values: Values) -> tuple[Steps | None, bool]:
        """Have a unit's gradients copied to where they are staged. Returns what the reduction's job does before it
        communicates, and whether the job waits for those before it."""
        if self.run.lanes.copies_on_lanes:  # beside compute
            stage.values, stage.age, stage.ready = values, 0, self.run.lanes.mark(stage.ready)
            return stage.copied(self.run, buckets, values), False
        taken = stage.span is not None and len(self.busy) > 0  # those before it may be there still
        written = [one.on(torch.empty_like(one.whole)) for one in buckets] if taken else buckets
        for one in written:
            one.write(values)
        return _moved(written, buckets) if taken else None, taken

    def _submit(
        self, parts: Sequence[Part], after: Mark, mark: Mark = None, ordered: bool = False, first: Steps | None = None
    ) -> Mark:
        """Start a reduction, whose parts travel together, on the reduce lane; `first`: what it does before."""
        if len(parts) == 1:
            _, way, job = parts[0]
            issued, single, ends = way.collectives, way.single, way.ends
        else:
            job, ways = together([part.job for part in parts]), [part.way for part in parts]
            issued = tuple(one for way in ways for one in way.collectives)
            single, ends = all(way.single for way in ways), max((way.ends for way in ways), key="outer".__eq__)
        if first is not None:
            job = chain(first, job)
        done = self.marks[ends] = self.run.lanes.submit("reduce", issued, job, after, single, ordered, mark)
        if self.plan.schedule.overlap_update:
            self.sink.there([part.bucket for part in parts], done)
        return done

    # ---------------------------------------------------------------- into main gradients

    def _into(
        self, bucket: Bucket, way: Route, stage: torch.Tensor, spare: torch.Tensor,
        beside: bool = False,
    ) -> Steps:  # fmt: skip
        """What is staged on its way into the main gradients: the first one allocates them, later ones are added.
        `beside`: they may be used up on the update lane."""
        name = bucket.name
        have = self.sink.grads.get(name)
        self.seen[name] = name in self.seen
        feedback = None if way.codec is None else self.feedback.of(bucket.name)
        if have is not None:
            return self._steps(way, stage, spare, have.local, True, None, feedback)
        consumer = self.sink.consumers.get(name) if self.sink.consumers else None
        if consumer is not None and way.states == states_of(bucket, "main"):
            sums = way.exact or bucket.wire is not bucket.grads  # else they are used as they lie
            beside = beside and consumer.sums and way.alone
            self.sink.hold(bucket, consumer.begin(way.ends, sums, beside), way.states)
            return self._steps(way, stage, spare, None, False, consumer, feedback)
        same = stage.dtype is bucket.grads and not bucket.grads_on_host  # a call without keywords takes half the time
        local = stage.new_empty(way.numel) if same else self.sink.memory(bucket, way.numel)
        self.sink.hold(bucket, local, way.states)
        return self._steps(way, stage, spare, local, False, None, feedback, bucket.grads_on_host)

    def _steps(
        self, way: Route, stage: torch.Tensor, spare: torch.Tensor, out: torch.Tensor | None, add: bool,
        consumer: Any = None, feedback: Any = None, far: bool = False,
    ) -> Steps:  # fmt: skip
        """The steps, in place in `stage`, the last one straight into `out` if it can be; else copied or added. Or they
        are used up by a consumer. feedback: what a way with a codec loses is kept there. far: `out` is the host's
        memory, to which collectives do not write."""
        if consumer is not None and not consumer.beside:
            self.run.lanes.wait(self.marks.get("update"))  # which may use the same room
        if consumer is not None and consumer.sums and way.alone:  # the sum is all that is done
            yield from _used_up(self, way.steps[0].collectives, stage, spare, consumer)
            return
        local = stage
        lane = "reduce"
        for i, (kind, collectives, start, size) in enumerate(way.steps):
            if collectives[0].lane != lane:
                lane = collectives[0].lane
                yield lane
            last = out if not (add or self.carrier.inside or far) and i == len(way.steps) - 1 else None
            if way.codec is not None and i == way.packed:
                room = spare[way.room :]
                packed = _packed_sum(self.run, kind, collectives, local, room, last, way.codec, feedback)
                local = yield from packed
            elif way.exact and i == 0:
                local = yield from _exact_sum(self.run, self.carrier, kind, collectives, stage, spare, last)
            elif kind == "scatter":
                part = last if last is not None and last.dtype is local.dtype else local[start : start + size]
                yield from self.run.collective(collectives[0], part, local)
                local = part
            else:
                yield from self.run.collective(collectives[0], local, local)
        if way.divisor > 1:
            local.div_(way.divisor)
        if consumer is not None:
            consumer.use(local)
        elif out is not None and add:
            out.add_(local)
        elif out is not None and local is not out:
            out.copy_(local)

    def _note(self, bucket: Bucket, whole: bool) -> None:
        self.digest = zlib.crc32(f"{bucket.name} {whole}".encode(), self.digest)

    # ---------------------------------------------------------------- beside the plan

    def outside(self, unit: Unit, values: Values, last: bool) -> None:
        """Reduce the gradients of a unit that no plan names. Compute waits for it."""
        self.settle()
        self._reduce_unshared(unit, values, last)
        self.settle()

    def _reduce_unshared(self, unit: Unit, values: Values, last: bool) -> None:
        """Reduce a unit's gradients, or zeros, from bytes of their own."""
        self.completing = True
        for bucket in unit.buckets:
            if not bucket.trainable:
                continue
            have = self.sink.grads.get(bucket.name)
            ways = self.records(bucket).reduce
            whole = have.states == ways[True].states if have is not None else last
            way = ways[whole]
            stage = torch.empty(bucket.numel, dtype=bucket.wire, device=self.run.device)
            spare = stage.new_empty(bucket.received if way.exact or way.codec else 0, dtype=torch.uint8)
            one = staged(bucket, unit.paths, stage, spare, ways)
            if one.differs:
                self._note(bucket, whole)
            one.write(values)
            self._submit([Part(bucket, way, self._into(bucket, way, stage, spare))], self.run.lanes.mark())
            self.run.lanes.keep(stage, spare)
            if last:
                self.complete(bucket)

    def use_own_bytes(self, own: bool = True) -> None:
        """From here on each reduction has bytes of its own, or else the plan's, which they share."""
        self.unshared = own

    # ---------------------------------------------------------------- what is lacking, or partial

    def zeros(self, bucket: Bucket) -> None:
        """Main gradients of a bucket for which no rank has one: nothing is sent."""
        self.seen[bucket.name] = bucket.name in self.seen
        local = self.sink.memory(bucket, bucket.numel // bucket.slices("main"))
        if bucket.grads_on_host and not self.run.lanes.waits_on_host:
            for mark in self.marks.values():  # lanes may still read there what was partial in this step
                self.run.lanes.wait(mark)
        local.zero_()
        self.sink.hold(bucket, local, states_of(bucket, "main"))

    def complete(self, bucket: Bucket) -> None:
        """Reduce what is still partial of a bucket's main gradients. Nothing to do when nothing is."""
        have = self.sink.grads[bucket.name]
        final = states_of(bucket, "main")
        if have.states == final:
            return
        self.seen[bucket.name] = True
        self.completing = True
        way = self.records(bucket).finish
        if way.collectives:
            self._note(bucket, True)
        local = self.sink.memory(bucket, way.numel)
        self.sink.hold(bucket, local, way.states)
        feedback = None if way.codec is None else self.feedback.of(bucket.name)
        job = self._complete(bucket, way, have.local, local, feedback)
        self._submit([Part(bucket, way, job)], self.run.lanes.mark(), ordered=True)

    def _complete(self, bucket: Bucket, way: Route, have: torch.Tensor, out: torch.Tensor, feedback: Any) -> Steps:
        if not self.run.lanes.waits_on_host:
            self.run.lanes.wait(self.marks.get("outer"))  # the lane does: what is partial may have ended there
        dtype = way.collectives[0].dtype if way.collectives else have.dtype
        if way.packed == 0:  # else bytes
            dtype = torch.float32 if bucket.codec_axis else bucket.wire
        wire = have.to(dtype, copy=in_host_memory(have)) if way.collectives else have
        spare = wire.new_empty(bucket.received if way.exact or way.codec else 0, dtype=torch.uint8)
        yield from self._steps(way, wire, spare, out, False, None, feedback, bucket.grads_on_host)
        self.run.lanes.keep(have, wire, spare)

    # ---------------------------------------------------------------- what is under way

    def age(self) -> None:
        """A unit is asked for. Gradients that were staged some uses ago are let go: it may be a forward, and long."""
        for stage in self.busy:
            stage.age += 1
        self._let_go(stage for stage in self.busy if stage.age > OLD)

    def _let_go(self, stages: Iterable[StagedReduction]) -> None:
        """Compute waits until their values were copied, which then are free."""
        for stage in stages:
            if stage.values is not None:
                self.run.lanes.wait(stage.staged)
                stage.values = None

    def late(self) -> set[str] | None:
        """Buckets whose newest reduction compute has not waited for; None: it is not known which."""
        return None if self.completing else {one.bucket.name for stage in self.busy for one in stage.buckets}

    def ends(self, lane: str, mark: Mark) -> None:
        """What a lane was given beside reductions ends there: compute waits for that, too, when they settle."""
        self.marks[lane] = mark

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

    def restart(self) -> None:
        """Back to the state between steps. Compute has waited for all."""
        self.unshared = False
        self.seen.clear()
        self.digest = 0


class Reductions:
    """The gradients of one lineage on their way: those that have come, and those that are being reduced into the sink.

    Attributes:
        given: which leaves got one. final: how main gradients lie in the end.
        early: gradients whose turn has not come, by reduction.
        last: what the newest gradient came with: zeros in a unit's stead follow it.
        hollow: by unit, the buckets of those in which no trained leaf has elements.
        skipped: units that were used in this step, and get no gradient on this rank.
        digest: of the reductions that this step has issued.
    """

    def __init__(
        self, run: Runtime, progress: Progress, carrier: Carrier, gathers: Gathers, sink: GradientSink,
        residual: Mapping[str, FlatBuffer] | None = None,
    ) -> None:  # fmt: skip
        self.run, self.progress, self.carrier, self.gathers = run, progress, carrier, gathers
        self.sink, self.feedback = sink, _error_feedback(residual or {})
        self.layout = progress.layout
        trained = {unit.name: [b for b in unit.buckets if b.trainable] for unit in self.layout.units}
        self.hollow = {name: some for name, some in trained.items() if not any(bucket.numel for bucket in some)}
        self.final = {name: states_of(bucket, "main") for name, bucket in self.layout.trainable.items()}
        self.given = GradientMask(self.layout, run.sizes, run.coordinate)
        self.early: dict[int, Values] = {}
        self.last = True
        self.skipped: set[str] = set()
        self.digest = 0
        self.check: Any = _equal_check(self.layout, run) if progress.spec.schedule.debug else None
        self.prepare()

    def prepare(self, depth: int = 0) -> None:
        """Staging for the plan, in which there is nothing yet. `depth`: the digest of how far reductions went."""
        spec, plan = self.progress.spec, self.progress.plan
        self.sink.drop()
        self.staging = Staging(self.run, plan, spec, self.carrier, self.sink, depth, self.feedback)

    @property
    def complete(self) -> bool:
        """Whether every main gradient is there and whole."""
        cursor = self.progress.cursor
        if self.early or cursor.reduced or cursor.due or cursor.ahead:
            return False
        grads = self.sink.grads
        return all(name in grads and grads[name].states == final for name, final in self.final.items())

    def awaits(self, buffer: FlatBuffer) -> bool:
        """Whether these are gradients of the step that are partial, or that compute has not waited for."""
        found = self.sink.grads.get(buffer.bucket.name)
        if found is None or found.local is not buffer.local:
            return False
        return found.states != self.final[buffer.bucket.name] or len(self.staging.marks) > 0

    # ---------------------------------------------------------------- gradients that come

    def plan_reduce(self, unit: str, of: str = "") -> Move:
        """What follows where a gradient of this unit comes, perhaps of a " tree". Changes nothing."""
        return self.progress.position[("empty" if unit in self.hollow else "reduce") + of, (unit,)]

    def compare_equal(self) -> None:
        """In debug mode, at the first finite step: gradients that are to be equal along axes of the model's own are.

        Collective, where there are any.
        """
        if self.check is not None and self.check.compare():
            self.check = None

    def keep(self, index: int, unit: str, values: Values, last: bool) -> None:
        """The gradients of reduction number `index` of the plan have come, whose turn may come later."""
        self.last = last
        if self.check is not None:
            self.check.note(unit, values)
        self.early[index] = owned(values, self.gathers.arena.loan(unit)) if self.run.lanes.copies_on_lanes else values

    def set_last(self, last: bool) -> None:
        """Gradients that are to come have this flag: zeros may come before any."""
        self.last = last

    def keep_hollow(self, unit: str, last: bool) -> None:
        """Gradients without elements have come: nothing is sent."""
        self.last = last
        for bucket in self.hollow[unit]:
            if bucket.name not in self.sink.grads:
                self.staging.zeros(bucket)

    def own(self, index: int | None, unit: str, values: Values) -> None:
        """What of a unit's gradients still waits must not be borrowed: it may be released meanwhile."""
        if index in self.early:
            self.early[index] = owned(values, self.gathers.arena.loan(unit))

    def reduce_off_plan(self, unit: str, values: Values, last: bool, agreed: bool) -> None:
        """Reduce gradients that no plan expects. Compute waits for them. `agreed`: ranks come to them alike."""
        if not agreed:
            self.gathers.agree_off_plan(unit, "reduce")
        if self.check is not None:
            self.check.note(unit, values)
        self.staging.outside(self.layout.by_name[unit], values, last)
        self.read_while_gathered(unit)

    # ---------------------------------------------------------------- reductions that are due

    def issue(self, due: Iterable[tuple[int, bool]]) -> None:
        """Reduce what is due, in order: gradients that have come, or zeros."""
        for index, came in due:
            values = self.early.pop(index) if came else ()
            unit = self.layout.by_name[self.progress.plan.reductions[index].unit]
            reduce = self.staging.reduce
            if profiler._is_profiler_enabled:
                reduce = ranged(reduce, f"reduce gradients of {unit.name}")
            reduce(index, unit, values, self.last)
            if unit.name in self.gathers.flying:  # `read_while_gathered`, without a call
                self.sink.touched(unit)
            self.digest = zlib.crc32(unit.name.encode(), self.digest)

    def read_while_gathered(self, unit: str) -> None:
        """A gather for which compute has not waited when the gradient came may read main weights after that."""
        if unit in self.gathers.flying:
            self.sink.touched(self.layout.by_name[unit])

    # ---------------------------------------------------------------- the end of a step

    def finish(self) -> None:
        """Start what the main gradients still lack: what is partial, zeros where no plan names a unit."""
        for name, bucket in self.layout.trainable.items():
            if name in self.sink.grads:
                if self.sink.grads[name].states != self.final[name]:
                    self.staging.complete(bucket)
            else:  # of a unit that the plan does not name, and so no rank has a gradient
                self.staging.zeros(bucket)
        for unit in self.gathers.flying:
            self.read_while_gathered(unit)

    def restart(self) -> None:
        """Back to the state between steps. Compute has waited for all."""
        self.staging.restart()
        if self.feedback.errors:
            self.feedback.clear()
        self.digest = 0
        self.last = True
        if self.check is not None:
            self.check.found.clear()
        self.given.begin()
        self.early.clear()
        self.skipped.clear()
