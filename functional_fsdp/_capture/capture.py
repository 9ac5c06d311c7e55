"""Capture: what the lineage and the log must know of a step that is captured once and replayed (`T.cuda_graph`).

    capture    the verbs run as always, on the host; on the device nothing runs, so nothing is logged as issued
    replay     enter, vote, launch, log, commit: a transaction like any step, whose verbs are not called again

Where the step was captured, the device's part is the caller's: `launch` puts it in motion. Ranks may mix: one captures
or replays a step that another takes eagerly, with the same collectives and the same votes.

A captured step that the device of any rank may take back, after ranks have voted for it and before it changes
anything.

    device   forward, backward ──▶ flag ──▶ largest of all ranks' flags ──▶ the update, where it is 0
    host     vote, confirm, launch                  └──▶ a copy on the host ──▶ commits, or goes back

All ranks replay such steps, or none does: one that reads from its device in the middle of a step would wait for peers
who wait for its vote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .._common.calls import arrive, uninterruptible
from .._common.errors import ScheduleError
from .._common.record import Collective
from .._runtime.given import FIXED, FULL, GradientMask, Seats, agreed_row
from .._runtime.runtime import Runtime
from .._state.lineage import Lineage, Version
from .._state.state import State
from .arrivals import UpdatesOnArrival

__all__ = ["Capture", "StepStart", "Veto", "Vetoed"]


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
            self.fixed.again(run, run.compare(run.vote(self.digest, self.fixed.vote)))
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
