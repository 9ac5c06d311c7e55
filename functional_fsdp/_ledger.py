"""Ledger: which state of a lineage is the newest, and whether a verb was stopped; it makes a step a transaction.

    base ──unshard──▶ ◦ ──reduce──▶ ◦ ──step──▶ base'
      ▲                                          (base is consumed)
      └── stays valid until step commits: using it again drops what was in flight and starts the step anew

Every verb takes the newest state of a step, or the base; anything else raises `StaleStateError`, naming the call that
consumed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from ._errors import ScheduleError, StaleStateError
from ._interrupts import guard
from ._layout import Layout
from ._recipes import recipes
from ._runtime import Runtime
from ._spec import Spec

if TYPE_CHECKING:
    from ._cursor import Cursor
    from ._executor import Executor
    from ._state import State

__all__ = ["Ledger", "Token"]

REMEMBER = 256  # how many consumed states, at least, a ledger can name the consumer of


class Call:
    """A call that works on a lineage, as a context. One that is stopped within it leaves `depth` behind."""

    __slots__ = ("depth", "kept")

    def __init__(self) -> None:
        self.depth = 0
        self.kept = False

    def unchanged(self) -> None:
        """The call is about to raise, and nothing has changed by it."""
        self.kept = True

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None or self.kept:
            if self.depth:  # else it has ended with the step
                self.depth -= 1
            self.kept = False


class Ledger:
    """The mutable side of one lineage of states (a `shard` and all steps from it): which state is the newest.

    `executor` has what the lineage has in flight; it is made when a state first needs it.
    """

    def __init__(self, runtime: Runtime, layout: Layout, spec: Spec, steps: int = 0) -> None:
        self.runtime = runtime
        self.recipes = recipes(layout, spec, runtime) if spec.schedule.transport == "traced" else None
        self.steps = steps
        self.base = self.head = self.latest = 0
        self.number = 0  # the same on every rank for one lineage; 0 for copies
        self.epoch = runtime.epoch
        self.consumed: dict[int, str | tuple[str, Any]] = {}  # by what: in words, or a verb and its unit
        self.executor: Executor | None = None
        self.broken = ""
        self.call = Call()
        self.taken: dict[str, Any] | None = None  # what the last step returned, but for the token

    def enroll(self) -> None:
        """Let restarts compare this lineage's step count across ranks. Called in the same order on every rank."""
        self.runtime.lineages += 1
        self.number = self.runtime.lineages
        self.runtime.ledgers[self.number] = self

    def advance(self, state: State, verb: str | tuple[str, Any], grads: Any = None) -> State:
        """The state after a verb, in words or with its units, perhaps with other gradients. Consumes `state`, which has
        entered."""
        token = state.token
        self.latest = self.head = serial = self.latest + 1
        if token.serial != self.base:
            self.consumed[token.serial] = verb
            if not serial % REMEMBER:
                self._forget()
        new = object.__new__(type(state))
        fields = new.__dict__
        fields.update(state.__dict__)
        cursor = None if self.executor is None else self.executor.position.cursor
        fields["token"] = Token(self, serial, token.origin or state, cursor)
        if grads is not None:
            fields["grads"] = grads
        return new

    def enter(self, serial: int, verb: str) -> None:
        """Check that the state `serial` may be used; begin the step anew if it is the base of an abandoned one.

        What the verb then does, it does within `call`. If it is stopped there, what is in flight is ahead of every
        state, and whoever enters next abandons the step.
        """
        if (
            serial == self.head != self.base
            and self.epoch == self.runtime.epoch
            and not (self.call.depth or self.broken)
        ):
            return  # nearly always
        self.valid(serial, verb)
        if serial not in (self.base, self.head):
            raise self._stale(serial, verb)
        if self.recipes is not None and verb not in ("pmean", "psum"):
            raise ScheduleError(
                f"{verb} ran eagerly, and this state's schedule says transport='traced'. Verbs belong inside "
                "torch.compile(train_step, fullgraph=True), without which torch may fall back to eager execution; for "
                "eager steps, and for what calls the verbs for you, shard with Schedule(transport='collective')."
            )
        self.runtime.usable(verb)
        if serial == self.base:
            guard()
            if self.begun:
                self._meet()
                self.runtime.meet(verb)  # before what is in flight is waited for
                if self.head != self.base:
                    self._consume(self.head, "the restart of its step (the state before the step was used again)")
                if self.executor is not None:
                    self.executor.reset()
            self.runtime.meet(verb)
            self.head, self.epoch = self.base, self.runtime.epoch
            self.call.depth = 0
        elif self.epoch != self.runtime.epoch or self.runtime.parted:
            self._consume(serial, "the restart of its step (a rank abandoned it)")
            self.runtime.meet(verb)
            if self.executor is not None:
                self.executor.reset()
            self.head, self.call.depth = self.base, 0
            raise self._stale(serial, verb)
        elif self.call.depth:
            self._consume(serial, "a call that was stopped")
            raise self._stale(serial, verb)

    @property
    def begun(self) -> bool:
        """Whether a step is under way, if only because a verb was stopped."""
        return self.head != self.base or self.call.depth > 0

    def others_begun(self) -> bool:
        """Whether steps of other lineages are under way."""
        return any(other.begun for other in self.runtime.ledgers.values() if other is not self)

    def valid(self, serial: int, verb: str) -> None:
        """Check that what the state `serial` owns still has its values: no step consumed it, none was cut short."""
        if self.broken:
            raise StaleStateError(f"{verb}: {self.broken}")
        if serial < self.base:
            raise self._stale(serial, verb)

    def consumer(self, serial: int) -> str:
        """What consumed the state `serial`, in words."""
        by = self.consumed.get(serial, "an earlier call")
        if isinstance(by, str):
            return by
        units = (by[1],) if isinstance(by[1], str) else by[1]
        return f"{by[0]}({', '.join(map(repr, units))})"

    def look(self, serial: int) -> None:
        """Before ranks communicate about the base outside a step: they meet if one of them may have abandoned it.

        Never consumes: where all ranks look from the same place, the step goes on afterwards.
        """
        self.runtime.usable("a look at this state")
        if serial == self.base and self.begun:
            self._meet()
        self.runtime.meet("a look at this state")

    @contextmanager
    def looking(self, state: State) -> Iterator[None]:
        """What ranks communicate within is about this state, and consumes nothing; who is stopped in it meets them."""
        self.look(state.token.serial)
        guard()
        with self.call, self.beside(state):
            yield

    def beside(self, state: State) -> AbstractContextManager[None]:
        """What ranks communicate within is no part of a plan; see `Executor.beside`."""
        return nullcontext() if self.executor is None else self.executor.beside(state)

    def _meet(self) -> None:
        """The step that is under way may have been abandoned on some ranks only. (Unless they have met since.)"""
        if self.epoch == self.runtime.epoch:
            self.runtime.restart(self.number)

    def touched(self) -> None:
        """Compute reads what the state owns, perhaps in the middle of a step, whose updates have to wait for that."""
        if self.executor is not None:
            self.executor.staging.touched()

    def rest(self, verb: str) -> None:
        """The step so far only looked at weights: back to the base, which every rank goes on from."""
        if self.head != self.base:
            self._consume(self.head, verb)
        self.head = self.base

    def commit(self, serial: int, new: Any) -> int:
        """The step that ends with `serial` is taken: its base is consumed, its result is the new base, as the serial
        after the latest."""
        self.taken = {**new.__dict__}
        del self.taken["token"]  # it holds this ledger
        self._consume(self.base, f"step() number {self.steps + 1}")
        self._consume(serial, f"step() number {self.steps + 1}")
        self.steps += 1
        self.latest += 1
        self.base = self.head = self.latest
        self.call.depth = 0
        return self.base

    def _consume(self, serial: int, what: str) -> None:
        self.consumed[serial] = what
        self._forget()

    def _forget(self) -> None:
        if len(self.consumed) > 2 * REMEMBER:
            self.consumed = dict(list(self.consumed.items())[-REMEMBER:])

    def _stale(self, serial: int, verb: str) -> StaleStateError:
        by = self.consumer(serial)
        return StaleStateError(
            f"{verb}: this State was consumed by {by}. Use the State that that call returned"
            f"{' (fsdp.newest gives it)' if 'step()' in by else ', or begin again from the state before the step'}; "
            f"to keep an old one, copy.deepcopy it between steps."
        )


class Token:
    """Which state of which lineage this is. Outside equality: trees of two states of one spec compare equal.

    origin: the state that the step began with; None between steps. cursor: where the program stood when the state was
    returned; None where nothing is begun.
    """

    __slots__ = ("cursor", "ledger", "origin", "serial")

    def __init__(self, ledger: Ledger, serial: int, origin: State | None = None, cursor: Cursor | None = None) -> None:
        self.ledger = ledger
        self.serial = serial
        self.origin = origin
        self.cursor = cursor
