"""Capture: what the ledger and the log must know of a step that is captured once and replayed (`T.cuda_graph`).

    capture    the verbs run as always, on the host; on the device nothing runs, so nothing is logged as issued
    replay     enter, vote, launch, log, commit: a transaction like any step, whose verbs are not called again

Where the step was captured, the device's part is the caller's: `launch` puts it in motion.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ._lanes import Issued, Log
from ._state import State, Token

__all__ = ["Capture"]

POSITION = ("base", "head", "latest", "steps", "epoch", "broken")


class Capture:
    """One step as it was captured: the collectives it issues by lane, and what it votes with.

    Attributes:
        ended: steps that were taken while it was captured, which should be 1.
    """

    def __init__(self, state: State) -> None:
        self.ledger = state.token.ledger
        self.run = self.ledger.runtime
        self.traced = self.ledger.recipes is not None  # then nothing is logged, and ranks do not vote
        self.executor = None if self.traced else state.executor  # has the bytes that a replay writes
        self.before = {name: getattr(self.ledger, name) for name in POSITION}
        self.jobs: dict[str, list[tuple[Issued, ...]]] = {}
        self.digest = self.sides = self.ended = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within, the verbs are captured."""
        run = self.run
        if self.traced:
            yield
            return
        logs = {name: Log() for name in run.issued}
        run.logs = {**logs, "control": run.issued["control"]}
        run.capturing = True
        try:
            yield
        except BaseException:
            if self.executor:
                self.executor.drop()
            raise
        finally:
            run.logs, run.capturing = run.issued, False
        self.jobs = {name: list(log.tail) for name, log in logs.items() if log.count}
        self.digest, self.sides = run.voted
        self.ended = self.ledger.steps - self.before["steps"]

    def forget(self) -> None:
        """What was captured will not run: the step has not been taken."""
        for name, value in self.before.items():
            setattr(self.ledger, name, value)

    def log(self) -> None:
        """The step that was captured is launched for the first time: it is issued now."""
        for name, jobs in self.jobs.items():
            self.run.issued[name].extend(jobs)

    def again(self, state: State, launch: Callable[[], None]) -> State:
        """Take the step from `state`: every rank votes, then `launch()` puts it in motion. Consumes `state`.

        A step that was compiled as a whole has no votes, here as there.

        Raises:
            StaleStateError, ScheduleError, RestartError, CommError: as `step`; nothing was launched then.
        """
        ledger, run = state.token.ledger, self.run
        serial = state.token.serial
        state.resting("cuda_graph")
        if self.traced:
            launch()
            return state
        ledger.enter(serial, "cuda_graph")
        sides = self.jobs.get("side", [])
        self._sides(sides[: self.sides])
        vote = run.vote(self.digest)
        run.compare(vote)
        run.confirm()
        launch()
        self._sides(sides[self.sides :])
        self.log()
        return state.evolve(token=Token(ledger, ledger.commit(serial)))

    def _sides(self, jobs: list[tuple[Issued, ...]]) -> None:
        """What the votes compare beside the plan's own collectives."""
        for (hop,) in jobs:
            self.run.digest = zlib.crc32(f"{hop.kind} {hop.axis} {hop.what}".encode(), self.run.digest)
