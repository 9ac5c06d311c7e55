"""Steps that are captured once and replayed (`T.cuda_graph`): votes, vetoes, and updates where gradients arrive.

    Capture             what the lineage and the log must know of such a step
    Veto                who may take a replay back
    UpdatesOnArrival    which buckets are updated before the step's end
    Arrival             one of them: gradients that are used up piece by piece

`UpdatesOnArrival`: what a captured step does with gradients that the eager step before it updated beside the rest.

    eager      ── reduce 3 ─▶ main gradients ─┬─ reduce 2 ─▶ main gradients ─┬── ...    step: ranks vote, then update
                                              └─ (update 3)                  └─ (update 2)
    captured   ── reduce 3 ─▶ update 3 ── reduce 2 ─▶ update 2 ── ...                   replay: ranks vote, then all

An eager step votes before anything changes, so its main gradients wait. A captured one changes nothing: its replay
comes after a vote. So there each bucket is updated where its gradients arrive (see `Arrival`), with the same
bits, if the eager step before it has shown that nothing looks at gradients and weights in between.

`Arrival`: gradients that are used up where they arrive, piece by piece, so that there are no main gradients.

    reduce lane   copies of 3 ─ sum 3a ─ update 3a ─ sum 3b ─ update 3b ─ copies of 2 ─ sum 2a ─ ...

Each piece of the sum lies on the bytes of the one before, and its update reads it while the GPU's cache still has it:
so the sum goes through memory neither way. `Staging` ends a reduction like this where it has an `Arrival` for the
bucket, which steps that are captured have.

The last reductions of a step have little backward left beside which they could travel. Where a sum over one axis is all
that one does, and the copy engines bring it, each piece is used up while the next ones come; by collectives all pieces
come at once, and are used up while the next reduction travels:

    reduce lane   1a comes ─ 1b comes ──────────────┬─ 0a comes ─ 0b comes
    update lane              sum 1a ─ update 1a ─ sum 1b ─ update 1b ─ sum 0a ─ ...

`Capture`: the step as a transaction.

    capture    the verbs run as always, on the host; on the device nothing runs, so nothing is logged as issued
    replay     enter, vote, launch, log, commit: a transaction like any step, whose verbs are not called again

Where the step was captured, the device's part is the caller's: `launch` puts it in motion. Ranks may mix: one captures
or replays a step that another takes eagerly, with the same collectives and the same votes.

`Veto`: the device of any rank may take a replay back, after ranks have voted for it and before it changes anything.

    device   forward, backward ──▶ flag ──▶ largest of all ranks' flags ──▶ the update, where it is 0
    host     vote, confirm, launch                  └──▶ a copy on the host ──▶ commits, or goes back

All ranks replay such steps, or none does: one that reads from its device in the middle of a step would wait for peers
who wait for its vote.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ._common.calls import arrive, uninterruptible
from ._common.errors import ScheduleError
from ._common.record import Collective, Mark
from ._common.torch_names import make_wrapper, pytree
from ._exact_sums import ordered_sum
from ._host_memory import cut, cuts
from ._optim.optimizer import labels_of
from ._runtime.agreement import FIXED, FULL, GradientMask, NewCounts, Seats, agreed_row
from ._runtime.lanes import HostLanes
from ._runtime.runtime import Runtime
from ._state.state import Lineage, State, Version
from ._storage import FlatBuffer
from ._verbs import in_place, renew


class Rooms:
    """Memory for one piece from each lane, of each dtype. It is there until the step is captured."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.largest: dict[torch.dtype, int] = {}  # elements of a piece
        self.rooms: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def fit(self, dtype: torch.dtype, numel: int) -> None:
        """Pieces have so many elements. Said of all before the first begins: lanes still use what is there."""
        self.largest[dtype] = max(numel, self.largest.get(dtype, 0))

    def have(self, lane: str, dtype: torch.dtype) -> None:
        """Have one on a lane. Compute makes it: what is made on a lane is free for that lane's next work."""
        if (lane, dtype) not in self.rooms:
            self.rooms[lane, dtype] = torch.empty(self.largest[dtype], dtype=dtype, device=self.device)

    def at(self, lane: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return self.rooms[lane, dtype][:numel]


class Arrival:
    """What becomes of one bucket's gradients in a step in which they come once.

    Args:
        name: of the bucket. pieces: the elements [start, stop) of what this rank holds of it, in a row; at least one.
        update: uses a piece up: the optimizer's update of these main weights.

    Attributes:
        used: whether the gradients have come. sums: whether exact sums are made in its rooms. lane: which brings them.
            beside: whether they are used up on the update lane, while the rest comes.
    """

    used = beside = False

    def __init__(
        self, name: str, dtype: torch.dtype, pieces: Sequence[tuple[int, int]], rooms: Rooms,
        update: Callable[[int, int, torch.Tensor], None],
    ) -> None:  # fmt: skip
        self.name, self.dtype, self.pieces, self.rooms, self.update = name, dtype, pieces, rooms, update
        self.sums = dtype is torch.float32
        rooms.fit(dtype, max(stop - start for start, stop in pieces))

    def begin(self, lane: str, sums: bool, beside: bool) -> torch.Tensor:
        """They are on their way on this lane, if need be to be summed or cast in its room. Returns what stands for main
        gradients."""
        self.used = True
        self.lane, self.beside = lane, beside
        if sums:
            self.rooms.have(lane, self.dtype)
        return gone(self.name, self.pieces[-1][1], self.dtype, self.rooms.device)

    def add_up(
        self, came: torch.Tensor, ranks: int, mean: bool, own: tuple[int, torch.Tensor] | None, lanes: HostLanes,
        there: Sequence[Mark] = (),
    ) -> Mark:  # fmt: skip
        """They came as each rank sent them, or come, each piece by its point of `there`: add each up as `ordered_sum`
        does, and use it up. Returns the point from which on all are added up.

        Raises:
            ScheduleError: the transport said of another number of pieces that they are there.
        """
        if there and len(there) != len(self.pieces):
            raise ScheduleError(
                f"exchange of the transport's Carrier: portions.there has {len(there)} points, and portions.cuts has "
                f"{len(self.pieces)} portions. Append self.run.lanes.mark() once for each portion, in their order, "
                "after it has come from all ranks; or leave portions alone."
            )
        for (start, stop), came_in in zip(self.pieces, there or [None] * len(self.pieces), strict=True):
            lanes.wait(came_in)
            room = self.rooms.at(self.lane, self.dtype, stop - start)
            ordered_sum(came, ranks, room, mean, own, start)
            summed = lanes.mark() if stop == self.pieces[-1][1] else None
            self.update(start, stop, room)
        return summed

    def use(self, local: torch.Tensor) -> None:
        """They are there, added up: use them up."""
        for start, stop in self.pieces:
            piece = local[start:stop]
            if piece.dtype is not self.dtype:
                piece = self.rooms.at(self.lane, self.dtype, stop - start).copy_(piece)
            self.update(start, stop, piece)

    def refuse(self, what: str) -> None:
        """The step does something that cannot be, now that its weights are new."""
        raise ScheduleError(
            f"cuda_graph: {what} after the gradients of {self.name!r} had come. With "
            "Schedule(overlap_update=True) a captured step updates these weights where their gradients arrive, as the "
            "eager step before it let it; between reduce and step nothing may read them, replace gradients or add to "
            "them. Do the same in every step, or leave overlap_update out."
        )


class Gone(torch.Tensor):
    """Stands for main gradients that were used up: it has a shape and a dtype, and whoever reads it is told."""

    bucket: str

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        one = next((a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Gone)), None)
        raise ScheduleError(
            f"cuda_graph: state.grads[{'...' if one is None else repr(one.bucket)}] was read or changed in a captured "
            "step. With Schedule(overlap_update=True) such a step updates weights where their gradients arrive, and "
            "keeps none. Call state = fsdp.finish_reductions(state) in every step before gradients are read: "
            "then they are kept."
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Gone({self.bucket!r}, {self.numel():,} elements, {self.dtype})"


def gone(bucket: str, numel: int, dtype: torch.dtype, device: torch.device) -> Gone:
    made: Gone = make_wrapper(Gone, (numel,), dtype=dtype, device=device)
    made.bucket = bucket
    return made


LEAST = 1 << 20  # bytes of main gradients: smaller buckets share updates at the end of a step
PIECE = 1 << 25  # bytes: what the caches of GPUs hold beside other things, and not so few that launches take the time


class UpdatesOnArrival:
    """Takes part in a step that is captured: these buckets are updated where their gradients arrive, as far as they
    can be."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.changes: tuple[Any, ...] = ()  # what updates change

    def begin(self, state: Any) -> dict[str, Arrival]:
        """The first gradients of the step come: who uses up which bucket's. What a rate is computed from is read now,
        by compute."""
        self.changes = _changing(state)
        return _arrivals(state, self.names)

    def check(self, state: Any, used: Sequence[Arrival], skip: Any, lacking: Collection[str]) -> None:
        """Refuse to end a captured step that would have kept what it has updated already.

        Args:
            used: whose gradients were used up. skip: what the step was given. lacking: buckets in which leaves got no
                gradient, on any rank.

        Raises:
            ScheduleError: it may be taken back, or has another state than when its first gradients came. NewCounts:
                leaves got no gradient, which have one as a rule.
        """
        if skip is not None:
            used[0].refuse("step(skip=) was called")
        if state.version.lineage.runtime.gate is not None:
            used[0].refuse("ranks were asked whether they take the step")
        if any(a is not b for a, b in zip(_changing(state), self.changes, strict=True)):
            used[0].refuse("main weights, optimizer state, the optimizer or the count were replaced")
        for one in used:
            if one.name in lacking:
                raise NewCounts(
                    f"cuda_graph: leaves of {one.name!r} that got a gradient in the step before got none in the step "
                    "that is captured, which has updated them."
                )


def _changing(state: State) -> tuple[Any, ...]:
    return state.main, state.opt, state.optimizer, state.count


def _arrivals(state: State, names: Sequence[str]) -> dict[str, Arrival]:
    """Of these buckets, which the last eager step reduced once and updated beside the rest of its backward, those that
    a captured one can update on arrival."""
    optimizer = state.optimizer
    if getattr(optimizer, "communicates", False) or not getattr(optimizer, "elementwise", False):
        return {}
    buckets = [state.layout.buckets[name] for name in names]
    fixed = optimizer.for_step(state.count, labels_of(buckets)) if hasattr(optimizer, "for_step") else None
    if fixed is None:
        return {}
    nodes = pytree.tree_leaves(state.opt, is_leaf=lambda x: isinstance(x, FlatBuffer))
    by_leaf = {x.bucket.name for x in nodes if isinstance(x, FlatBuffer) and x.bucket.by_leaf}
    rooms = Rooms(state._executor.run.device)
    found: dict[str, Arrival] = {}
    for bucket in buckets:
        n, width = state.main[bucket.name].local.numel(), bucket.grads.itemsize
        if n * width < LEAST or bucket.on_host or bucket.grads_on_host:
            continue
        pieces = cuts(n, width, PIECE)
        if bucket.name in by_leaf and len(pieces) > 1:  # each piece would count a step
            continue
        update = _update(state._evolve(optimizer=fixed), bucket.name)
        found[bucket.name] = Arrival(bucket.name, bucket.grads, pieces, rooms, update)
    return found


def _update(state: State, name: str) -> Any:
    def update(start: int, stop: int, grad: torch.Tensor) -> None:
        def mine(x: Any) -> Any:
            here = isinstance(x, FlatBuffer) and x.bucket.name == name and not x.bucket.by_leaf
            return cut(x, x.local[start:stop], start) if here else x

        opt = pytree.tree_map(mine, state.opt, is_leaf=lambda x: isinstance(x, FlatBuffer))
        main = state.main[name]
        part = mine(main)
        in_place(state._evolve(opt=opt), {name: part}, grads={name: cut(main, grad, start)})
        renew(state, part)  # while the cache has it

    return update


class StepStart:
    """Where a lineage and its votes stood before a step, to go back to."""

    def __init__(self, state: State) -> None:
        self.lineage: Lineage = state.version.lineage
        self.run = self.lineage.runtime
        self.executor = state._executor
        self.version = state.version
        self.savepoint = self.lineage.savepoint()
        self.digest = self.run.digest

    def back(self) -> None:
        """The step, which was only captured, or replayed, was not taken, on any rank."""
        self.lineage.roll_back(self.savepoint)
        self.version.spent = False
        self.run.rewind(self.digest)
        self.executor.drop()  # what is under way was captured, and will never run
        self.executor.reset()


class Vetoed(BaseException):
    """The step was taken back, on every rank: nothing has changed. No error: whoever has set the veto takes the step
    another way. So `except Exception` lets it through."""


class Veto:
    """For a step that is captured from one state, see `holds`.

    Attributes:
        flag: int32 [1] on the state's device: 1 where this rank takes the step back. From `step` on, where any does.
        host: int32 [1] in the host's memory, pinned where the device is a GPU: what a replay says there, before it is
            done.
        asked: whether the step has come to it.
    """

    def __init__(self, state: State, flag: torch.Tensor, host: torch.Tensor) -> None:
        self.run = state.version.lineage.runtime
        self.executor = state._executor
        self.flag, self.host = flag, host
        self.asked = False

    @contextmanager
    def holds(self) -> Iterator[None]:
        """Within, `step` is captured so that it changes nothing where the flag of any rank is 1.

        Raises:
            ScheduleError: (in `step`) ranks still compare in which order they use the units.

        Collective: in `step`, an all-reduce of 4 bytes an axis of the mesh, on the compute lane's stream.
        """
        with self.run.gated(self):
            yield

    def join(self) -> None:
        """The gradients are whole: ranks combine their flags."""
        self.asked = True
        if self.executor.progress.order.open:  # a rank that waits for the device would not come to the end of its step
            raise ScheduleError(
                "a step that may be taken back cannot be captured: ranks have used the units in different orders so "
                "far. Give the order: Schedule(order=...)."
            )
        for axis, size in self.run.sizes.items():
            if size > 1:
                one = Collective("all_reduce", axis, 1, torch.int32, "max", "side", "veto")
                self.run.now(one, self.flag, self.flag)

    def decided(self, skip: torch.Tensor | None) -> torch.Tensor:
        """Whether the update changes nothing, given what the caller says of it."""
        self.host.copy_(self.flag, non_blocking=True)
        vetoed = self.flag[0] > 0
        return vetoed if skip is None else skip | vetoed

    def stands(self, skip: torch.Tensor) -> torch.Tensor:
        """Whether the step is skipped, and not vetoed: then it is taken again, and skipped there."""
        return skip & (self.flag[0] == 0)

    def kept(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """What a captured step leaves in the place of `old`."""
        return torch.where(self.flag[0] > 0, old, new)


def _same(state: State) -> State:
    return state


class Fixed(NamedTuple):
    """What a captured step takes for granted: this rank's row of gradients, and all ranks'. An empty one: all came."""

    seats: Seats
    row: bytes
    agreed: bytes

    @classmethod
    def of(cls, given: GradientMask) -> Fixed:
        """What the last step has found."""
        return cls(given.seats, given.row, given.agreed)

    @property
    def vote(self) -> int:
        """Of this rank."""
        return FIXED if self.agreed or self.row else FULL

    def again(self, run: Runtime, seen: tuple[int, int]) -> None:
        """Agree as an eager step would, in which other ranks may be.

        Raises:
            ScheduleError: on every rank, if other leaves have gradients now.
        """
        agreed_row(run, self.seats, seen, self.row, self.agreed)


class Capture:
    """One step as it was captured: the collectives it issues by lane, and what it votes with.

    Args:
        beside: buckets that an eager step like it updated beside its backward (`Lineage.beside_backward`): these are
            updated where their gradients arrive.
    """

    def __init__(self, state: State, beside: Iterable[str] = ()) -> None:
        self.beside = tuple(beside)
        self.lineage = state.version.lineage
        self.run = self.lineage.runtime
        self.traced = False  # whether what was captured is a compiled step: nothing is logged, and ranks do not vote
        self.executor = state._executor
        self.start = StepStart(state)
        self.votes = self.run.votes
        self.jobs: dict[str, list[tuple[Collective, ...]]] = {}
        self.digest = 0
        self.remarks: tuple[list[str], list[str]] = [], []  # for votes: before its own, and after it
        self.forms: list[tuple[Any, int]] = []  # of metrics, and after how many votes
        self.fixed: Fixed | None = None  # which leaves have gradients
        self.held: Any = None  # the bytes that a replay writes
        self.launched = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within, the verbs are captured."""
        run = self.run
        consumer = UpdatesOnArrival(self.beside) if self.beside else None
        with run.recording(self.forms) as logs:
            try:
                with self.executor.sink.consuming(consumer):
                    yield
            except BaseException:
                self.executor.drop()
                if run.host_vote is not None:
                    run.host_vote.forget()  # the numbers of its jobs are given out again
                raise
        self.traced = self.lineage.graphed or self.lineage.taken is None
        self.jobs = {name: list(log.tail) for name, log in logs.items() if log.count}
        self.digest, before = run.voted
        self.remarks = run.remarks[:before], run.remarks[before:]
        self.fixed = Fixed.of(self.executor.reductions.given)
        streamed = self.executor.sink.streams
        self.held = self.executor.gathers.arena, self.executor.reductions.staging, streamed and tuple(streamed.buffers)

    @property
    def voted(self) -> bool:
        """Whether ranks have agreed, while it was captured, to take the step."""
        return self.run.votes != self.votes

    def abandon(self) -> None:
        """The step could not be captured, or not launched.

        Before ranks have voted nothing is lost. After it, if no rank could capture it, it has not been taken, and the
        state before it is good; otherwise the others have taken it, and this rank's state is of no more use.
        """
        if not self.launched and self.run.host_vote is not None:
            self.run.host_vote.forget()  # what was captured is not issued, and its numbers are given out again
        if not self.voted or self.launched or self.traced:
            return
        half = _HALF.format(self.start.savepoint.steps + 1)
        try:
            alike = self.run.alike("a step that cannot be captured")
        except BaseException:
            self.lineage.give_up(half)
            raise
        if alike:
            self.start.back()
        else:
            self.lineage.give_up(half)

    def first(self, launch: Callable[[], None]) -> None:
        """The step that was captured, and voted for, is put in motion: it is issued now.

        Raises:
            Vetoed: as `launch`.
        """
        self._launched(self.lineage, launch, self.start)

    def again(self, state: State, launch: Callable[[], None], home: Callable[[State], State] = _same) -> State:
        """Take the step from `state`: every rank votes, then `launch()` puts it in motion. Consumes `state`.

        A step that was compiled as a whole has no votes, here as there.

        Args:
            launch: raises Vetoed where the device has said, on every rank, that the step is not taken after all.
            home: the state with the tensors in which the step leaves it.

        Raises:
            Vetoed: as `launch`; the state that came in is as it was.
            StaleStateError, ScheduleError, RestartError, CommError: as `step`; nothing was launched then. ScheduleError
            too, on every rank, if one that steps eagerly has gradients for other leaves than when this was captured.
        """
        lineage, run = state.version.lineage, self.run
        state._resting("cuda_graph")
        lineage.enter(state.version.serial, "cuda_graph")
        if self.traced:
            launch()
            return home(state._evolve(version=lineage.stepped(state.version)))
        start = StepStart(state)
        middle = lineage.advance(state, "cuda_graph()")  # from here on the step is under way: who abandons it says so
        self._compare(lineage, [form for form, votes in self.forms if votes == self.votes])
        before, after = self.remarks
        for said in before:
            run.remark(said)
        assert self.fixed is not None
        try:
            self.fixed.again(run, run.compare(run.vote(lineage.identity, self.digest, self.fixed.vote)))
            return self._take(start, middle, launch, home, after)
        except BaseException as error:
            run.withdraw(error)
            raise

    @uninterruptible
    def _take(
        self,
        start: StepStart,
        middle: State,
        launch: Callable[[], None],
        home: Callable[[State], State],
        after: list[str],
    ) -> State:
        """From the moment on in which ranks cannot take the step back. An interrupt waits."""
        lineage = middle.version.lineage
        self.run.confirm()
        self._launched(lineage, launch, start)
        for said in after:
            self.run.remark(said)
        new = home(middle._evolve(version=Version(lineage, lineage.latest + 1)))
        lineage.commit(middle.version, new)
        self._compare(lineage, [form for form, votes in self.forms if votes != self.votes])
        arrive(lineage.others_begun())
        return new

    def _compare(self, lineage: Lineage, forms: list[Any]) -> None:
        """As ranks do that take the step eagerly."""
        try:
            for form in forms:
                self.run.forms.begin(self.run, form, lineage)
        finally:
            self.run.forms.end()

    def _launched(self, lineage: Any, launch: Callable[[], None], start: StepStart) -> None:
        self.launched, vetoed = True, None
        try:
            launch()
        except Vetoed as error:
            vetoed = error
        except BaseException:
            lineage.give_up(_HALF.format(lineage.steps + 1))
            raise
        for name, jobs in self.jobs.items():
            self.run.issued[name].extend(jobs)
        if vetoed is not None:
            start.back()
            raise vetoed


_HALF = (
    "step() number {} was stopped on this rank after ranks had agreed to take it, so that its State may be half "
    "updated, and the others are ahead. Load the last checkpoint."
)
