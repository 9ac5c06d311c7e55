"""Capture: what the lineage and the log must know of a step that is captured once and replayed (`T.cuda_graph`).

    capture    the verbs run as always, on the host; on the device nothing runs, so nothing is logged as issued
    replay     enter, vote, launch, log, commit: a transaction like any step, whose verbs are not called again

Where the step was captured, the device's part is the caller's: `launch` puts it in motion. Ranks may mix: one captures
or replays a step that another takes eagerly, with the same collectives and the same votes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .._common.interrupts import arrive, whole
from .._common.record import Collective
from .._runtime.given import Fixed
from .arrivals import UpdatesOnArrival
from .lineage import Lineage
from .state import State, Version
from .veto import StepStart, Vetoed

__all__ = ["Capture"]


def _same(state: State) -> State:
    return state


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
        self.fixed = self.executor.reductions.given.fixed
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
        half = _HALF.format(self.start.position.steps + 1)
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

    @whole
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
