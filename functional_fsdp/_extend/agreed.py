"""Passes in which ranks agree on each use: the first step of a driven module, whose order is a guess.

    rank 0   a          c   d        wants c: helps with b, then has c
    rank 1   a    b     c   d

Ranks may come to units in orders of their own, and to different ones. Each says what it wants next; of that, all gather
what comes first in the plan, until this rank has its own. The others wait meanwhile, or are done, and help.
"""

from __future__ import annotations

from .._common.calls import provide
from .._common.errors import ScheduleError
from .._distributed import Case
from .._engine.executor import Executor
from .._engine.gathers import LANE, Gathers
from .._runtime.agreement import place_of
from .._runtime.runtime import Runtime
from .._spec.spec import Order
from .._storage import Gathered, Stored


def take_turn(gathers: Gathers, state: Stored, name: str) -> None:
    """Wait until all gather this unit. The caller then gathers it."""
    plan = gathers.progress.plan
    if plan.by_name[name].parts:  # else it lies on every rank
        backward = gathers.progress.cursor.phase == "backward"
        _meet(gathers, state, _number(plan.index[name], len(plan.units), backward), f"unshard {name!r}")


def all_done(executor: Executor, state: Stored, backward: bool = True) -> None:
    """This rank has come to all that it uses in a forward, or in its backward. Helps the others until that is so for
    all."""
    progress = executor.progress
    if progress.plan.gathers:
        count = len(progress.plan.units)
        number, what = (2 * count + 1, "the end of the pass") if backward else (count, "the turn")
        with executor.off_plan(state):
            _meet(executor.gathers, state, number, what)


def differ(executor: Executor, state: Stored, forward: Order, trained: tuple[str, ...]) -> None:
    """Ranks tell each other which units their forwards used, and of which gradients will come. The backward has begun.

    Streams wait for each other unheard. Where ranks do different things, a gather may wait for compute, which waits
    for staging, and so for a peer's reduction; and the peer for the gather. So compute waits for no staging there.
    """
    if not executor.run.lanes.waits_on_host and executor.run.size > 1:
        all_done(executor, state, backward=False)
        seen = executor.run.everyone((forward, trained), "what is used")
        executor.reductions.staging.use_own_bytes(any(one != seen[0] for one in seen))


def _number(unit: int, count: int, backward: bool) -> int:
    """Where a use comes in a forward, the turn, and its backward, of so many units.

    >>> _number(1, 3, False), _number(1, 3, True), _number(2, 3, True)
    (1, 5, 4)
    """
    return 2 * count - unit if backward else unit


def _meet(gathers: Gathers, state: Stored, number: int, what: str) -> None:
    """Gather what peers want until all are here."""
    units, layout = gathers.progress.plan.units, gathers.progress.layout
    while (found := _next_of(gathers.run, number, gathers.names, what)) != number:
        name = units[min(found, 2 * len(units) - found)].name
        Gathered(state, layout.by_name[name], gathers.debug).gather(state, LANE)


def _next_of(run: Runtime, wanted: int, names: tuple[str, ...], what: str) -> int:
    """Which of the units that ranks want comes next: the smallest of every rank's number, see `_number`. Host, 16
    bytes.

    Raises:
        ScheduleError: a rank is elsewhere.
    """
    if run.size == 1:
        return wanted
    ballots = run.tally(run.ballot(Case.TURN, wanted, f"{what}, and a peer's next use"))
    if other := next((ballot for ballot in reversed(ballots) if ballot.case is not Case.TURN), None):
        raise ScheduleError(
            f"ranks came to {what}, and to {place_of(other, names)}. Make the same "
            "calls in the same order on every rank. The state before the step is valid."
        )
    return ballots[1].number


provide("extend", take_turn)
