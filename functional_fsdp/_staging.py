"""Staging: gradients on their way from a backward to the main gradients.

    gradients ──copy and cast──▶ staging [n] ──reduce-scatter, in place──▶ own slice ──(outer axis)──▶ main gradients
    compute lane   reduce lane                reduce lane                              outer lane

On GPUs the copy runs beside compute, too; the gradients live until compute has waited for it, which it does when the
next ones come. They are as many bytes as one staging more, so where a reduction is one collective there is one staging
at a time, and not two.

An exact sum takes an all-to-all in the place of the reduction: what comes in, each rank's summand of the own slice, is
added up in float32 in the order of the ranks, in the bytes from which it was sent; and goes on in float32.

A reduction's staging is there from its copy until compute has waited for it, which it does at the latest when the next
but one needs some: two at a time, and no more bytes than the plan says. The first reduction of a step lands in the main
gradients, which are allocated then; later ones are added, in their dtype. What was announced with `last=False` may stay
partial (see `Placement`); `complete` reduces the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from itertools import chain
from typing import Any

import torch

from ._copies import Copies, exchange
from ._flat import FlatBuffer, templates, write_leaves
from ._lanes import Issued, Mark, Steps, together
from ._layout import STAGED, Bucket, Unit, aligned
from ._plan import SLOTS, Plan
from ._route import Hop, Partial, States, partial_states, route, states_of
from ._runtime import Runtime
from ._stage import LARGE, Move, Slot, Stage, Values
from ._sum import ordered_sum
from ._symmetric import Windows
from ._torch import unflatten_dense_tensors

__all__ = ["Staging"]

OLD = 2  # uses


class Staging:
    """Every reduction's stage, and those that are under way, oldest first."""

    def __init__(
        self, run: Runtime, plan: Plan, average: str, copies: Copies | None = None, windows: Windows | None = None
    ) -> None:
        self.run = run
        self.plan = plan
        self.copies = copies
        self.windows = windows
        self.average = average
        self.stages: dict[int, Stage] = {}
        self.busy: deque[Stage] = deque()
        self.completing = False  # whether something beside them is under way
        self.apart = False  # each reduction has bytes of its own, so that compute waits for none
        self.moves: dict[tuple[str, States, States, bool], Move] = {}
        self.marks: dict[str, Mark] = {}  # the end of what is newest, and of all before it, by the lane that it ends on
        #: by bucket, oldest first: from when on nothing but an update touches its main weights and gradients. Where
        #: updates do not overlap it stays empty
        self.reduced: dict[str, Mark] = {}

    def reduce(
        self, index: int, unit: Unit, values: Values, grads: dict[str, FlatBuffer], last: bool, mesh: object,
        relents: bool,
    ) -> bool:  # fmt: skip
        """Stage a unit's gradients for reduction number `index` of the plan and start reducing them into `grads`.

        With `relents` it may leave it (False), because there is no staging before peers have what they wait for.
        """
        if self.apart:
            self._apart(unit, values, grads, last, mesh)
            return True
        stage = self.stages.get(index) or self._make(index, unit)
        slots = 1 if self.run.cuda and stage.span is None and stage.short else SLOTS
        while len(self.busy) >= slots or stage in self.busy or (stage.span and any(map(stage.overlaps, self.busy))):
            if not self.run.wait(self.busy[0].done, relents):
                return False
            self.busy.popleft().give()
        if self.run.cuda:
            self._let_go(self.busy)
        stage.take()
        jobs: list[Steps] = []
        moves: list[Move] = []
        partial: list[Bucket] = []
        for slot in stage.slots:
            bucket = slot.bucket
            have = grads.get(bucket.name)
            whole = last if have is None else have.states == slot.moves[True].states
            move = slot.moves[whole]
            jobs.append(self._into(grads, bucket, move, slot.whole, slot.spare, slot.share, mesh))
            moves.append(move)
            if last and not whole:
                partial.append(bucket)
        first = None
        if self.run.cuda:
            stage.values, stage.age, stage.ready = values, 0, self.run.mark(stage.ready)
            first = stage.copied(self.run, values)
        else:
            stage.write(values)
        stage.done = self._submit(jobs, moves, stage.ready, stage.done, first=first)
        if self.plan.schedule.overlap_update:
            self._newest([slot.bucket for slot in stage.slots], stage.done)
        self.busy.append(stage)  # not before: if issuing it is interrupted, its bytes may be written to, and must stay
        for bucket in partial:
            self.complete(bucket, grads)
        return True

    def zeros(self, bucket: Bucket, grads: dict[str, FlatBuffer], mesh: object) -> None:
        """Main gradients of a bucket for which no rank has one: nothing is sent."""
        local = torch.zeros(bucket.numel // bucket.slices("main"), dtype=bucket.grads, device=self.run.device)
        grads[bucket.name] = FlatBuffer(local, bucket, states_of(bucket, "main"), mesh)

    def age(self) -> None:
        """A unit is asked for. Gradients that were staged some uses ago are let go: it may be a forward, and long."""
        for stage in self.busy:
            stage.age += 1
        self._let_go(stage for stage in self.busy if stage.age > OLD)

    def _let_go(self, stages: Iterable[Stage]) -> None:
        """Compute waits until their values were copied, which then are free."""
        for stage in stages:
            if stage.values is not None:
                self.run.wait(stage.staged)
                stage.values = None

    def _into(
        self, grads: dict[str, FlatBuffer], bucket: Bucket, move: Move, stage: torch.Tensor, spare: torch.Tensor,
        share: int, mesh: object,
    ) -> Steps:  # fmt: skip
        """What is staged on its way into the main gradients: the first one allocates them, later ones are added."""
        have = grads.get(bucket.name)
        if have is not None:
            return self._job(move, stage, spare, have.local, True, share)
        same = stage.dtype is bucket.grads  # a call without keywords takes half the time
        local = stage.new_empty(move.numel) if same else stage.new_empty(move.numel, dtype=bucket.grads)
        grads[bucket.name] = FlatBuffer(local, bucket, move.states, mesh)
        return self._job(move, stage, spare, local, False, share)

    def outside(self, unit: Unit, values: Values, grads: dict[str, FlatBuffer], last: bool, mesh: object) -> None:
        """Reduce the gradients of a unit that no plan names. Compute waits for it."""
        self.settle()
        self._apart(unit, values, grads, last, mesh)
        self.settle()

    def _apart(self, unit: Unit, values: Values, grads: dict[str, FlatBuffer], last: bool, mesh: object) -> None:
        """Reduce a unit's gradients, or zeros, from bytes of their own."""
        self.completing = True
        given = dict(zip(unit.paths, values or [None] * len(unit.paths), strict=True))
        for bucket in unit.buckets:
            if not bucket.trainable:
                continue
            have = grads.get(bucket.name)
            final, rest = states_of(bucket, "main"), states_of(bucket, "grads", Partial)
            whole = have.states == final if have is not None else last
            move = self.move(bucket, partial_states(bucket), final if whole else rest)
            stage = torch.empty(bucket.numel, dtype=bucket.wire, device=self.run.device)
            write_leaves(bucket, stage, given)
            spare = stage.new_empty(bucket.staged if move.exact else 0, dtype=torch.uint8)
            job = self._into(grads, bucket, move, stage, spare, self._share(bucket), mesh)
            done = self._submit([job], [move], self.run.mark(), ordered=True)
            self._outlives(stage, spare)
            if self.plan.schedule.overlap_update:
                self._newest([bucket], done)
            if last:
                self.complete(bucket, grads)

    def _outlives(self, *tensors: torch.Tensor) -> None:
        """These are given back while the lanes may still use them."""
        if self.run.streams is not None:
            for tensor in tensors:
                for lane in ("reduce", "outer"):
                    tensor.record_stream(self.run.streams.lanes[lane])

    def complete(self, bucket: Bucket, grads: dict[str, FlatBuffer]) -> None:
        """Reduce what is still partial of a bucket's main gradients. Nothing to do when nothing is."""
        have = grads[bucket.name]
        final = states_of(bucket, "main")
        if have.states == final:
            return
        self.completing = True
        move = self.move(bucket, have.states, final)
        local = torch.empty(move.numel, dtype=bucket.grads, device=self.run.device)
        grads[bucket.name] = FlatBuffer(local, bucket, move.states, have.mesh)
        job = self._complete(bucket, move, have.local, local)
        done = self._submit([job], [move], self.run.mark(), ordered=True)
        if self.plan.schedule.overlap_update:
            self._newest([bucket], done)

    def _complete(self, bucket: Bucket, move: Move, have: torch.Tensor, out: torch.Tensor) -> Steps:
        if self.run.streams is not None:
            self.run.wait(self.marks.get("outer"))  # the lane does: what is partial may have ended there
        wire = have.to(move.issued[0][0].dtype) if move.issued else have
        spare = wire.new_empty(bucket.staged if move.exact else 0, dtype=torch.uint8)
        yield from self._job(move, wire, spare, out, False)
        self._outlives(have, wire, spare)

    def _submit(
        self, jobs: list[Steps], moves: list[Move], after: Mark, mark: Mark = None, ordered: bool = False,
        first: Steps | None = None,
    ) -> Mark:  # fmt: skip
        if len(jobs) == 1:
            job, issued, single, ends = jobs[0], moves[0].all, moves[0].single, moves[0].ends
        else:
            job, issued = together(jobs), tuple(one for move in moves for one in move.all)
            single, ends = all(move.single for move in moves), max((move.ends for move in moves), key="outer".__eq__)
        if first is not None:
            job = chain(first, job)
        done = self.marks[ends] = self.run.submit("reduce", issued, job, after, single, ordered, mark)
        return done

    def _job(
        self, move: Move, stage: torch.Tensor, spare: torch.Tensor, out: torch.Tensor, add: bool, share: int = 1
    ) -> Steps:
        """The hops, in place in `stage`, the last one straight into `out` if that is possible; else copied or added."""
        local = stage
        lane = "reduce"
        for i, (hop, issued) in enumerate(zip(move.hops, move.issued, strict=True)):
            if issued[0].lane != lane:
                lane = issued[0].lane
                yield lane
            last = out if not (add or self.windows) and i == len(move.hops) - 1 else None  # a window is not left
            if move.exact and i == 0:
                local = yield from self._sum(move, stage, spare, last)
            elif hop.kind == "scatter":
                part = last if last is not None and last.dtype is local.dtype else _slice(local, hop)
                yield from self.run.collective(issued[0], part, local)
                local = part
            else:
                yield from self.run.collective(issued[0], local, local)
        if share * move.ranks > 1:
            local.div_(share * move.ranks)
        if add:
            out.add_(local)
        elif local is not out:
            out.copy_(local)

    def _share(self, bucket: Bucket) -> int:
        """What a mean over all data ranks divides by, beyond the ranks that this bucket is averaged over."""
        return bucket.share if self.average == "mean" else 1

    def _sum(
        self, move: Move, stage: torch.Tensor, spare: torch.Tensor, out: torch.Tensor | None
    ) -> Generator[Any, None, torch.Tensor]:
        """The exact sum over the first axis, float32: this rank's part of it, or all of it where it stays whole."""
        hop, issued = move.hops[0], move.issued[0]
        ranks, mine = self.run.sizes[hop.axis], self.run.coordinate[hop.axis]
        out = out if out is not None and out.dtype is torch.float32 else None
        came = spare[: stage.numel() * stage.element_size()].view(stage.dtype)
        n, own = stage.numel() // ranks, None
        if move.peers is not None:
            at = int(stage.storage_offset()) * stage.element_size()
            yield from exchange(self.run, issued, move.peers, at, came, mine)
            own = mine, stage[mine * n : (mine + 1) * n]
            if out is None:  # the sum may take its place
                own = mine, came[mine * n : (mine + 1) * n].copy_(own[1])
        else:
            yield from self.run.collective(issued[0], came, stage)
        if hop.kind == "scatter":
            whole = part = stage.view(torch.uint8)[: 4 * n].view(torch.float32) if out is None else out  # it was sent
        else:
            begin = aligned(came.numel() * came.element_size(), STAGED)
            whole = spare[begin : begin + 4 * ranks * n].view(torch.float32) if out is None else out
            part = whole[mine * n : (mine + 1) * n]
        ordered_sum(came, ranks, part, self.average == "mean", own)
        if hop.kind != "scatter":
            yield from self.run.collective(issued[-1], whole, part)
        return whole

    def move(self, bucket: Bucket, states: States, target: States, peers: list[torch.Tensor] | None = None) -> Move:
        """The hops from `states` to `target`; the first axis on the reduce lane, further ones on the outer lane."""
        key = (bucket.name, states, target, peers is not None)
        found = self.moves.get(key)
        if found is None:
            way = route(bucket, states, target, self.run.position)
            hops = tuple(hop for hop in way.hops if self.run.sizes[hop.axis] > 1)
            issued = []
            exact = bucket.exact and bool(hops) and states == partial_states(bucket)  # later hops carry float32
            ranks, op = 1, "sum" if self.windows else self.average
            for i, hop in enumerate(hops):
                lane = "outer" if i else "reduce"
                dtype = torch.float32 if bucket.exact and (i or not exact) else bucket.wire
                size = hop.size * self.run.sizes[hop.axis] if hop.kind == "scatter" else hop.size
                if exact and not i:
                    one = [Issued(lane, hop.axis, "all_to_all", size, dtype, "", bucket.name)]
                    if peers is not None:
                        one = [Issued(lane, hop.axis, "barrier", 1, torch.float32, "", bucket.name)] * 2
                    if hop.kind != "scatter":
                        one.append(Issued(lane, hop.axis, "all_gather", size, torch.float32, "", bucket.name))
                else:
                    kind = "reduce_scatter" if hop.kind == "scatter" else "all_reduce"
                    one = [Issued(lane, hop.axis, kind, size, dtype, op, bucket.name)]
                    ranks *= self.run.sizes[hop.axis] if op != self.average else 1
                issued.append(tuple(one))
            every = tuple(one for hop in issued for one in hop)
            kinds = [one.kind for one in every]
            single = len(kinds) <= 1 and kinds != ["all_reduce"]
            ends = "outer" if len(issued) > 1 else "reduce"
            found = Move(way.states, hops, tuple(issued), every, way.numel, exact, single, ends, peers, ranks)
            self.moves[key] = found
        return found

    def _make(self, index: int, unit: Unit) -> Stage:
        reduction = self.plan.reductions[index]
        shared = self.copies.staged(unit, self.plan.staging) if self.copies else None
        stays, peers = shared or (self.windows.staging(self.plan.staging) if self.windows else None, None)
        span = None if stays is None else range(reduction.address, reduction.address + reduction.nbytes)
        if stays is None or span is None:
            memory = torch.empty(reduction.nbytes, dtype=torch.uint8, device=self.run.device)
        else:
            memory = stays[span.start : span.stop]
        by_name = {bucket.name: bucket for bucket in unit.buckets}
        slots = []
        for part in reduction.parts:
            bucket = by_name[part.bucket]
            start = part.address - reduction.address
            sent = bucket.numel * bucket.wire.itemsize
            whole = memory[start : start + sent].view(bucket.wire)
            spare = memory[start + aligned(sent, STAGED) : start + part.nbytes]
            pieces = unflatten_dense_tensors(whole, templates(bucket))
            placed = zip(bucket.leaf_pieces, bucket.leaves, strict=True)
            chosen = [(pieces[i], unit.paths.index(leaf.path)) for i, leaf in placed if leaf.numel]
            gaps = [piece for i, piece in enumerate(pieces) if i not in set(bucket.leaf_pieces)]
            rest, final = states_of(bucket, "grads", Partial), states_of(bucket, "main")
            fresh = partial_states(bucket)
            moves = {done: self.move(bucket, fresh, final if done else rest, peers) for done in (True, False)}
            leaves, which = [piece for piece, _ in chosen], tuple(i for _, i in chosen)
            large = self.run.cuda and any(leaf.nbytes >= LARGE for leaf in leaves)
            slots.append(Slot(bucket, whole, spare, leaves, which, gaps, moves, self._share(bucket), large))
        self.stages[index] = Stage(memory, slots, span)
        return self.stages[index]

    def late(self) -> set[str] | None:
        """Buckets whose newest reduction compute has not waited for; None: it is not known which."""
        return None if self.completing else {slot.bucket.name for stage in self.busy for slot in stage.slots}

    def _newest(self, buckets: list[Bucket], mark: Mark) -> None:
        """The gradients of these are there from this mark on."""
        for bucket in buckets:
            self.reduced.pop(bucket.name, None)
            self.reduced[bucket.name] = mark

    def touched(self, unit: Unit | None = None) -> None:
        """The main weights of a unit, or all of the state, are read once more: an update has to wait for that, too."""
        if unit is None:
            self.reduced.clear()
        elif self.reduced:
            for bucket in unit.buckets:
                self.reduced.pop(bucket.name, None)

    def settle(self) -> None:
        """Compute waits for every reduction; their staging is given back."""
        for mark in self.marks.values():
            self.run.wait(mark)
        self.drop()

    def drop(self) -> None:
        """Forget what is under way."""
        for stage in self.stages.values():  # one may have been interrupted
            stage.values = None
        self.marks.clear()
        self.reduced.clear()
        self.completing = False
        while self.busy:
            self.busy.popleft().give()


def _slice(local: torch.Tensor, hop: Hop) -> torch.Tensor:
    return local[hop.start : hop.start + hop.size]
