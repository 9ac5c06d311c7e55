"""`State`: everything that training owns, as one frozen pytree; and its `Lineage`, which makes a step a transaction.

A lineage knows which of its states is the newest (by `Version`), and whether a verb was stopped:

    base ──unshard──▶ ◦ ──reduce──▶ ◦ ──step──▶ base'
      ▲                                          (base is consumed)
      └── stays valid until step commits: using it again drops what was in flight and starts the step anew

Every verb takes the newest state of a step, or the base; anything else raises `StaleStateError`, naming the call that
consumed it.

A traced step runs no Python. What a compiler carries over from it is which objects it makes and what constants it
writes: it marks the version that came in as spent, gives out a new one without a serial, and puts GRAPHED into the
lineage. It reads nothing that changes from step to step, so nothing recompiles. `follow` does the rest when the lineage
is next looked at.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import torch

from .._common.calls import alone, guard, leave, ordinary, provided, tracing_now
from .._common.device import clone_as
from .._common.errors import FsdpError, StaleStateError
from .._common.torch_names import pytree
from .._common.tree import register
from .._engine.executor import Executor
from .._plan.cursor import Cursor, InFlight
from .._plan.layout import Bucket, Layout
from .._runtime.runtime import Runtime, runtime_of
from .._spec.spec import Spec
from .._storage import FlatBuffer, LentTree, Stored, at_home, changed, spoilt

_graph_plan = provided("graph.graph_plan")


S = TypeVar("S")
GRAPHED = -1  # in the place of an epoch: a traced step was taken, and this lineage has not followed it yet
SPENT = -1  # the serial of what a traced step made, and a later one consumed
REMEMBER = 256  # how many consumed states, at least, a lineage can name the consumer of


class Savepoint(NamedTuple):
    """Where a lineage stood, to roll back to; see `Lineage` for what each is."""

    base: int
    head: int
    steps: int
    commits: int
    epoch: int
    broken: str
    taken: dict[str, Any] | None
    history: int


class Lineage:
    """The mutable side of one lineage of states (a `shard` and all steps from it): which state is the newest.

    `executor` has what the lineage has in flight, `graph_plan` what traced steps go by; each is made when it is first
    needed. Of use to transforms that capture or trace (`extend.lineage_of`): commits, how many steps were taken, as far
    as the host knows (of compiled ones in a row it knows one); broken, why its states are of no more use, or "";
    moved_by, the verb that took what they held, or ""; offset; `follow` and `stepped`; beside_backward and
    keeps_gradients, see `_engine.sink`; local_buffers, the paths of buffers that may differ by rank; src, the rank that
    had the values where only one of them had (`shard(src=)`); activations, by path of a module what becomes of what it
    saves, where a transform has chosen that for the run.
    """

    def __init__(
        self, runtime: Runtime, layout: Layout, spec: Spec, steps: int = 0, count: torch.Tensor | None = None,
        local_buffers: Iterable[str] = (), src: int | None = None, history: int = 0,
    ) -> None:  # fmt: skip
        self.runtime, self.layout, self.spec = runtime, layout, spec  # as `State.spec`: both change together
        self.local_buffers, self.src = frozenset(local_buffers), src
        self.graph_plan: Any = None
        self.busy = False  # whether lanes may be at work on what the state owns: an eager step is under way
        self.steps = steps
        self.counted = True  # whether `steps` is right; traced steps count on the device
        with torch.inference_mode(False):
            #: int64 []: steps that the state's count leaves out
            self.offset = None if count is None else steps - count.clone()
        self.commits = 0  # steps that were taken, and runs of traced ones
        self.base = self.head = self.latest = 0
        self.number = 0  # the same on every rank for one lineage; 0 for copies
        #: the same on every rank, and another one after each step and each change of weights: of a copy as of what it
        #: was made of, until one of them takes a step. Negative after traced steps, which nobody counts
        self.history = history
        self.epoch = runtime.epoch
        #: by what: in words, or a verb and its unit
        self.consumed: dict[int, str | tuple[str, Any]] = {}
        self.executor: Executor | None = None
        self.broken = ""
        self.moved_by = ""
        self.activations: Mapping[str, str] = {}
        self.successor: Lineage | None = None  # of the state that this verb returned
        self.lent: LentTree | None = None  # the whole tree that the step has handed out last
        self.open_calls = 0  # that work on it; one that was stopped stays
        self.call_changed_nothing = False
        self.reads: Any = None  # the mark up to which a lane reads weights beside compute
        self.taken: dict[str, Any] | None = None  # what the last step, or this verb, returned, but for the version
        if count is not None:  # else it stands in for one, see there
            runtime.lineages.add(self)

    def heir(self, run: Runtime, layout: Layout, spec: Spec, steps: int, count: torch.Tensor) -> Lineage:
        """The lineage of states that are made of this one's, perhaps on another mesh."""
        new = Lineage(run, layout, spec, steps, count, self.local_buffers, self.src, self.history)
        new.activations = self.activations
        return new

    def stand_in(self, run: Runtime, spec: Spec, steps: int, graph_plan: Any, offset: torch.Tensor) -> Lineage:
        """In this one's place while a function of its state is traced, so that this one stays as it is."""
        new = Lineage(run, self.layout, spec, steps, local_buffers=self.local_buffers)
        new.graph_plan, new.offset = graph_plan, offset
        new.busy, new.broken = self.busy, self.broken
        return new

    def enroll(self) -> None:
        """Let restarts compare this lineage's step count across ranks. Called in the same order on every rank."""
        self.number = self.history = self.runtime.enroll()

    @property
    def identity(self) -> int:
        """By which ranks compare that they have the same state of the same lineage."""
        return zlib.crc32(f"{self.number} {self.history}".encode())

    def note_activations(self, ways: Mapping[str, str]) -> None:
        """What becomes of what modules save, in words by path: checkpoints of the run say it. The same on all ranks."""
        self.activations = ways

    # ---------------------------------------------------------------- the newest state

    def advance(self, state: S, verb: str | tuple[str, Any], grads: Any = None, busy: bool = True) -> S:
        """The state after a verb, in words or with its units, perhaps with other gradients. Consumes `state`, which has
        entered.

        Args:
            busy: whether lanes may still be at work on it.
        """
        version: Version = state.version  # type: ignore[attr-defined]  # of any State
        self.busy |= busy
        self.latest = self.head = serial = self.latest + 1
        if version.serial != self.base:
            self.consumed[version.serial] = verb
            if not serial % REMEMBER:
                self._forget()
        new = object.__new__(type(state))
        fields = new.__dict__
        fields.update(state.__dict__)
        cursor = None if self.executor is None else self.executor.progress.position.cursor
        fields["version"] = Version(self, serial, version.origin or state, cursor)
        if grads is not None:
            fields["grads"] = grads
        return new

    def valid(self, serial: int | None, verb: str) -> None:
        """Check that what the state `serial` (None: the base) owns still has its values: no step consumed it, none was
        cut short."""
        self.follow()
        if self.broken:
            raise StaleStateError(f"{verb}: {self.broken}")
        if serial is not None and serial < self.base:
            raise self._stale(serial, verb)

    def consumer(self, serial: int) -> str:
        """What consumed the state `serial`, in words."""
        by = self.consumed.get(serial, "a compiled step()" if serial == SPENT else "an earlier call")
        if isinstance(by, str):
            return by
        units = (by[1],) if isinstance(by[1], str) else by[1]
        return f"{by[0]}({', '.join(map(repr, units))})"

    def _stale(self, serial: int, verb: str) -> StaleStateError:
        by = self.consumer(serial)
        other = ", or begin again from the state before the step"
        if "step()" in by:  # compiled steps keep nothing
            other = " (fsdp.newest gives it)" if self.taken else ""
        return StaleStateError(
            f"{verb}: this State was consumed by {by}. Use the State that that call returned{other}; to keep an "
            "old one, copy.deepcopy it between steps."
        )

    def _consume(self, serial: int, what: str) -> None:
        self.consumed[serial] = what
        self._forget()

    def _forget(self) -> None:
        if len(self.consumed) > 2 * REMEMBER:
            self.consumed = dict(list(self.consumed.items())[-REMEMBER:])

    # ---------------------------------------------------------------- a call

    def enter(self, serial: int, verb: str) -> None:
        """Check that the state `serial` may be used; begin the step anew if it is the base of an abandoned one.

        What the verb then does, it does in `with lineage:`. If it is stopped there, what is in flight is ahead of
        every state, and whoever enters next abandons the step.
        """
        if (
            serial == self.head != self.base
            and self.epoch == self.runtime.epoch
            and not (self.open_calls or self.broken)
        ):
            return  # nearly always
        self.valid(serial, verb)
        if serial not in (self.base, self.head):
            raise self._stale(serial, verb)
        self.runtime.usable(verb)
        if serial == self.base:
            guard()
            if self.begun:
                self._abandon(verb)
            self.runtime.meet(verb)
            self._rest_at_base()
            self.epoch = self.runtime.epoch  # last: whoever is interrupted before that meets nobody twice
        elif self.epoch != self.runtime.epoch or self.runtime.parted:
            self._consume(serial, "the restart of its step (a rank abandoned it)")
            self.runtime.meet(verb)
            if self.executor is not None:
                self.executor.reset()
            self._rest_at_base()
            raise self._stale(serial, verb)
        elif self.open_calls:
            self._consume(serial, "a call that was stopped")
            raise self._stale(serial, verb)

    def _abandon(self, verb: str) -> None:
        """Drop the step that is under way: its base is used again. Ranks meet, if some of them may not abandon it."""
        self.check_lent()
        self.lent = None
        if self.executor is not None:
            self.executor.sink.check_anew()
        self._meet()
        self.runtime.meet(verb)  # before what is in flight is waited for
        if self.head != self.base:
            self._consume(self.head, "the restart of its step (the state before the step was used again)")
        if self.executor is not None:
            self.executor.reset()

    def _meet(self) -> None:
        """The step that is under way may have been abandoned on some ranks only. (Unless they have met since.)"""
        if self.epoch == self.runtime.epoch:
            self.runtime.restart(self.number)

    def _rest_at_base(self) -> None:
        """Nothing is under way: the base is the newest state."""
        self.head, self.open_calls, self.busy = self.base, 0, False

    def __enter__(self) -> None:
        """A call works on the lineage. If it is stopped, it stays open."""
        self.open_calls += 1

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None or self.call_changed_nothing:
            if self.open_calls:  # else it has ended with the step
                self.open_calls -= 1
            self.call_changed_nothing = False

    def unchanged(self) -> None:
        """The call is about to raise, and nothing has changed by it."""
        self.call_changed_nothing = True

    @property
    def begun(self) -> bool:
        """Whether a step is under way, if only because a verb was stopped."""
        return self.head != self.base or self.open_calls > 0

    @property
    def place(self) -> tuple[bool, int]:
        """How far the step under way is, as ranks compare it: whether a verb was stopped, and what was issued."""
        return self.open_calls > 0, 0 if self.executor is None else self.executor.digest

    def others_begun(self) -> bool:
        """Whether steps of other lineages are under way."""
        return any(other.begun for other in self.runtime.lineages if other is not self)

    # ---------------------------------------------------------------- who only looks

    def come(self, serial: int) -> None:
        """Before ranks exchange something about the base outside a step: they meet if one of them may have abandoned
        it. Others hear of that in the exchange, and begin it again."""
        self.follow()
        self.runtime.usable("a look at this state")
        if serial == self.base and self.begun:
            self._meet()
        self.runtime.meet("a look at this state")

    def looked(self) -> None:
        """Whoever looked is done: unless a step is under way, the program's own handler of interrupts is back."""
        if not self.begun and not self.others_begun():
            leave()

    def off_plan(self, state: Any) -> AbstractContextManager[None]:
        """What ranks communicate within is no part of a plan; see `Executor.off_plan`."""
        return nullcontext() if self.executor is None else self.executor.off_plan(state)

    def rest(self, verb: str) -> None:
        """The step so far only looked at weights: back to the base, which every rank goes on from."""
        if self.head != self.base:
            self._consume(self.head, verb)
        self.head, self.busy = self.base, False

    def touched(self) -> None:
        """Compute reads what the state owns, perhaps in the middle of a step, whose updates have to wait for that."""
        if self.executor is not None:
            self.executor.sink.touched()

    def note_reads(self, mark: Any) -> None:
        """Up to this mark a lane reads weights beside compute."""
        self.reads = mark

    def end_reads(self) -> None:
        """Weights are about to change: who changes them waits for what a lane reads of them: compute, and the lane of
        updates that go beside it. (A graph waits for all lanes when it runs, and it may never.)"""
        if self.reads is not None and not self.runtime.capturing:
            self.runtime.lanes.wait(self.reads)
            self.runtime.lanes.enqueue("update", iter(()), after=self.reads)
            self.reads = None

    # ---------------------------------------------------------------- what was lent

    def lend(self, tree: LentTree) -> None:
        """The step hands out the whole tree."""
        self.lent = tree

    def check_lent(self) -> None:
        """What the step has handed out is what it was: the whole tree, and units of which the executor has noted it.

        Raises:
            ScheduleError: an operation has written into it. Where it is the state's own, the lineage is of no more use.
        """
        buckets = self.lent.changed if self.lent else []
        if self.executor is not None and (written := self.executor.gathers.written):
            buckets += [bucket for unit in written for bucket in self.layout.by_name[unit].buckets]
            written.clear()
        if buckets:
            self.lent = None
            self.spoil(buckets, spoilt())
            raise changed([leaf.path for bucket in buckets for leaf in bucket.leaves], "in place")

    def spoil(self, buckets: Iterable[Bucket], why: str) -> None:
        """What was lent of these buckets was changed. Where it is the state's own (replicated weights), the lineage is
        of no more use, and every use says why."""
        if not all(bucket.gathers(self.spec.schedule.debug) for bucket in buckets):
            self.broken = why

    # ---------------------------------------------------------------- the end of a step

    def commit(self, version: Version, new: Any) -> None:
        """The step that ends with `version` is taken: its result is the new base."""
        self.renew(version, new, f"step() number {self.steps + 1}", "step")
        self.steps += 1
        self.commits += 1

    def renew(self, version: Version, new: Any, by: str, what: str) -> None:
        """The base is consumed, and what came of it up to `version`: `new` is the base now, as the serial after the
        latest. `what` has come between them, in words that are the same on every rank."""
        self.history = zlib.crc32(f"{self.history} {self.runtime.votes} {what}".encode())
        (version.origin.version if version.origin else version).spent = True
        self.taken = _without_version(new)
        self._consume(self.base, by)
        self._consume(version.serial, by)
        self.lent = None
        torch.clear_autocast_cache()  # its casts are kept by tensor, and tensors that are lent come again
        self.latest += 1
        self.base = self.head = self.latest
        self.open_calls, self.busy = 0, False

    def give_up(self, why: str) -> None:
        """States of this lineage are of no more use: every use says why."""
        self.broken = why

    def savepoint(self) -> Savepoint:
        """Where the lineage stands, for `roll_back`."""
        return Savepoint(
            self.base, self.head, self.steps, self.commits, self.epoch, self.broken, self.taken, self.history
        )

    def roll_back(self, to: Savepoint) -> None:
        """The step that began there was only captured, or replayed, and not taken, on any rank."""
        self.base, self.head, self.steps, self.commits, self.epoch, self.broken, self.taken, self.history = to
        self.open_calls, self.busy = 0, False

    # ---------------------------------------------------------------- traced steps

    @property
    def graphed(self) -> bool:
        """Whether traced steps were taken that nobody has followed yet."""
        return self.epoch == GRAPHED

    def stepped(self, version: Version) -> Version:
        """The version after a traced step that began with this one. Reads nothing that changes from step to step, and
        is called where no Python runs, too: for a step that is replayed."""
        version.spent, self.epoch = True, GRAPHED
        return Version(self)

    def follow(self) -> None:
        """If traced steps were taken, the state that the last one returned is the base. An eager step that was under
        way is left as abandoned."""
        if not self.graphed:
            return
        abandoned = self.busy and self.begun
        self._consume(self.base, "a compiled step()")
        if self.head != self.base and not abandoned:
            self._consume(self.head, "a compiled step()")
        self.latest += 1
        self.base = self.latest
        if not abandoned:
            self.head = self.base
        self.epoch = self.runtime.epoch
        self.taken, self.counted = None, False
        self.history = -abs(self.history)
        self.commits += 1

    def recount(self, count: torch.Tensor) -> int:
        """How many steps were taken. After traced ones it waits for the device, where the state's count is."""
        self.follow()
        if not self.counted:
            self.steps, self.counted = int(count if self.offset is None else count + self.offset), True
        return self.steps

    def for_graphs(self) -> tuple[str, str]:
        """Have what traced verbs go by. Compilers run it when they trace, as a function whose result is constant.

        Returns the kind of an error and its text, which compilers would wrap; both are "" if all is well.

        Collective where there is none yet: on CPUs a group of one thread for each axis.
        """
        try:
            self.graph_plan = self.graph_plan or _graph_plan(self.layout, self.spec, self.runtime)
        except FsdpError as error:
            return type(error).__name__, str(error)
        return "", ""

    for_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch._dynamo.assume_constant_result's mark

    # ---------------------------------------------------------------- what is under way

    def have_executor(self, layout: Layout, spec: Spec, residual: Any) -> Executor:
        """What carries out this lineage's schedule, made when it is first asked for."""
        if self.executor is None:
            self.executor = Executor(self.runtime, layout, spec, residual)
            if self.activations:
                self.executor.note_activations((*self.activations.items(),))
        return self.executor

    def drop_executor(self) -> None:
        """Give back what it keeps between steps. Compute has waited for all that was under way."""
        self.executor = None

    @property
    def beside_backward(self) -> tuple[str, ...]:
        """The buckets that the last eager step reduced once, and updated beside its backward."""
        return self.executor.sink.updated_beside if self.executor else ()

    @property
    def keeps_gradients(self) -> bool:
        """Whether the step keeps all main gradients: none is used up where it comes."""
        return self.executor is None or self.executor.sink.keeps_all

    # ---------------------------------------------------------------- what another lineage has from here on

    def moves(self, verb: str) -> None:
        """A verb begins to take what the states hold. If it is stopped, nothing has it whole."""
        self.end_reads()
        self.moved_by, self.taken = verb, None
        self.broken = f"{verb}() was stopped while it was moving what this state held. Load the last checkpoint."

    def moved_to(self, new: Any) -> None:
        """The verb is about to return `new`, a state of another lineage. Whoever holds a state of this one keeps the
        newest state of that one."""
        self.successor = new.version.lineage
        self.successor.taken = _without_version(new)
        self.broken = (
            f"{self.moved_by}() has taken what this state held. Use the State that it returned (fsdp.newest gives it)."
        )

    @property
    def successors(self) -> list[Lineage]:
        """The lineages that what this one held has come to, one after the other."""
        found: list[Lineage] = []
        following = self.successor
        while following is not None:
            found.append(following)
            following = following.successor
        return found


def _without_version(state: Any) -> dict[str, Any]:
    """The fields of a state, but for what holds its lineage."""
    return {name: value for name, value in state.__dict__.items() if name != "version"}


class Version:
    """Which state of which lineage this is. Outside equality: trees of two states of one spec compare equal.

    serial: by which the lineage knows it; one that a traced step made has none until it is asked for. origin: the state
    that the step began with; None between steps. cursor: where the program stood when the state was returned; None
    where nothing is begun. spent: whether a step has consumed it, for traced verbs, which know no serials.
    """

    __slots__ = ("cursor", "lineage", "origin", "serial", "spent")

    def __init__(
        self, lineage: Lineage, serial: int | None = None, origin: Any = None, cursor: Cursor | None = None
    ) -> None:
        self.lineage = lineage
        if serial is not None:
            self.serial = serial
        self.origin = origin
        self.cursor = cursor
        self.spent = False

    def __getattr__(self, name: str) -> Any:
        if name != "serial":  # here is what there is not
            raise AttributeError(f"a State's version has no {name!r}")
        self.lineage.follow()
        self.serial = SPENT if self.spent else self.lineage.base
        return self.serial


_state_table = provided("look.state_table")


class Context:
    """The static side of a State's tree: compared by (spec, layout, optimizer); the version rides along."""

    __slots__ = ("key", "layout", "optimizer", "spec", "treedef", "version")

    def __init__(self, state: State) -> None:
        self.spec, self.layout, self.optimizer = state.spec, state.layout, state.optimizer
        self.treedef, self.version = state.treedef, state.version
        self.key = (self.spec, self.layout, self.optimizer)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and self.key == other.key

    def __hash__(self) -> int:
        return hash((self.layout.hash, type(self.optimizer)))

    def __repr__(self) -> str:
        return f"Context(layout={self.layout.hash})"


@dataclass(frozen=True, eq=False, repr=False)
class State(Stored):
    """Parameters, gradients and optimizer state, sharded. A pytree; frozen; verbs return a new one.

    Below, b is a bucket's name and n_b its elements, padding included. All tensors are flat local shards. Where there
    is nothing, a dict is empty.

    Attributes:
        main: {b: FlatBuffer}, main weights, [n_b / ranks of main] elements of `Precision.main`.
        weights: {b: FlatBuffer}, compute copies that persist between steps, [n_b / ranks of weights] elements of
            `Precision.compute`, or `gather`; only where the placement needs one, or what is gathered is float8.
        scales: {b: tensor} of buckets that are gathered in float8, float32 [leaves of b]: by what main weights were
            multiplied before they were cast.
        grads: {b: FlatBuffer} of trainable buckets, elements of `Precision.grads`.
        opt: whatever the optimizer's `init` returned; `{}` without one.
        buffers: {path: tensor}, what modules keep beside parameters.
        count: int64 tensor [], steps taken.
        rng: int64 tensor [], the seed that everything random derives from.
        extras: {name: pytree}, what transforms carry along.
        residual: {b: FlatBuffer} of trainable buckets with `Precision(feedback=True)`: what packing has lost of this
            rank's gradients, [n_b] elements of `Precision.compute`, a summand on each rank. Changed by `step` only.
        spec, layout, optimizer, treedef: static.
        version: which state of its lineage this is.

    Printing a State gives a table. Between steps it can be pickled and deep-copied (the copy is a lineage of its own).
    """

    opt: Any
    buffers: dict[str, torch.Tensor]
    count: torch.Tensor
    rng: torch.Tensor
    extras: dict[str, Any]
    residual: dict[str, FlatBuffer]
    spec: Spec = field(metadata={"static": True})
    layout: Layout = field(metadata={"static": True})
    optimizer: Any = field(metadata={"static": True})
    treedef: pytree.TreeSpec = field(metadata={"static": True})
    version: Version = field(metadata={"static": True})

    def _evolve(self, **changes: Any) -> State:
        """A State with some fields replaced, unchecked (dataclasses.replace, without its cost): for packages only."""
        new = object.__new__(State)
        made, own = new.__dict__, self.__dict__
        for name in FIELDS:  # one by one: compilers of torch 2.11 cannot read the whole `__dict__`
            made[name] = changes[name] if name in changes else own[name]
        return new

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units, in order of use in a forward."""
        return tuple(unit.name for unit in self.layout.units)

    @property
    def steps(self) -> int:
        """How many steps were taken. Waits for the device after compiled steps, which count there.

        In a step that drives a module and is compiled or lowered it is a ScheduleError: compute with `count`.
        """
        graph = tracing_now()
        if graph is not None:
            graph.note_count()
        return self._steps

    @property
    def _steps(self) -> int:
        """As `steps`; where a graph is made, those that were taken before."""
        if tracing_now() is not None:
            return self._lineage.steps
        return self.version.lineage.recount(self.count)

    @property
    def local_buffers(self) -> frozenset[str]:
        """The paths of buffers that may differ by rank, as `shard(local_buffers=)` said."""
        return self._lineage.local_buffers

    @property
    def _lineage(self) -> Lineage:
        """The lineage, also in the middle of a traced step, where the version has a base."""
        base: Version = getattr(self.version, "base", self.version)
        return base.lineage

    @property
    def _executor(self) -> Executor:
        """What carries out this lineage's schedule."""
        lineage = self.version.lineage
        return lineage.executor or lineage.have_executor(self.layout, self.spec, self.residual)

    def _prepared(self) -> State:
        """This state, with what its ranks share made: for whoever makes it while all are there. Collective."""
        if self.spec.transport.stays:
            self._executor.share()
        return self

    @property
    def shared_bytes(self) -> int:
        """Bytes on this rank that a transport keeps beside the state's own: what other ranks read, or NCCL knows."""
        executor = self.version.lineage.executor
        return executor.carrier.nbytes if executor else 0

    @property
    def cursor(self) -> Cursor:
        """Where the program stood when this state was returned: the plan, the use that is expected next, what is
        issued, live, held and awaited. Printing it gives a table.

        A value: it never changes, nor does looking at it wait for anything, or keep anything alive. That of an old
        state shows what stood then, and does not make that state usable.
        """
        self.version.lineage.follow()
        if self.version.serial == self.version.lineage.head:
            return self._executor.progress.cursor  # peers may have had it start more since
        if self.version.cursor is None:
            self.version.cursor = self._executor.progress.positions.start.cursor
        return self.version.cursor

    @property
    def in_flight(self) -> InFlight:
        """What this lineage's lanes have not done yet: units that are being gathered, and how many reductions. Waits
        for nothing. Of the newest state only; of others nothing is in flight.
        """
        lineage = self.version.lineage
        if lineage.executor is None or self.version.serial != lineage.head:
            return InFlight((), 0)
        return lineage.executor.in_flight

    @property
    def between_steps(self) -> bool:
        """Whether this is a base: nothing gathered, nothing in flight, no gradients."""
        if tracing_now() is not None:  # in the middle of a step its version has a base
            return not (hasattr(self.version, "base") or self.version.spent or self.grads)
        lineage = self.version.lineage
        lineage.follow()
        return self.version.serial == lineage.base and not self.grads

    def _valid(self, what: str) -> None:
        """Raise StaleStateError if a step has consumed this state."""
        self.version.lineage.valid(self.version.serial, what)

    def _resting(self, what: str) -> None:
        """Raise StaleStateError unless this is a valid state between steps, as whoever copies or saves it needs; an
        update comes after what is read from here on."""
        self._valid(what)
        if not self.between_steps:
            raise StaleStateError(
                f"{what}: this State is in the middle of a step. Use the state before the step, or after step()."
            )
        self.version.lineage.touched()

    # ---- copies

    @alone
    def __getstate__(self) -> dict[str, Any]:
        self._resting("pickle")
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "version"}
        example = self.treedef.unflatten(range(self.treedef.num_leaves))  # torch warns when it unpickles a TreeSpec
        plain = {n: b.but(b.local.view(torch.uint8)) if n in self.scales else b for n, b in self.weights.items()}
        return {**kept, "treedef": example, "steps": self.steps, "weights": plain,  # torch pickles no float8
                "local_buffers": self.local_buffers, "history": self.version.lineage.history}  # fmt: skip

    def __setstate__(self, kept: dict[str, Any]) -> None:
        spec = kept["spec"]
        steps, local, history = kept.pop("steps"), kept.pop("local_buffers", ()), kept.pop("history", 0)
        run = runtime_of(spec.mesh)
        version = Version(Lineage(run, kept["layout"], spec, steps, kept["count"], local, history=history), 0)
        kept["treedef"] = pytree.tree_structure(kept["treedef"])
        for name in kept["scales"]:
            kept["weights"][name] = (buffer := kept["weights"][name]).but(buffer.local.view(buffer.bucket.gather))
        kept.update(main=at_home(kept["main"]), opt=at_home(kept["opt"]), weights=at_home(kept["weights"], True))
        for name, value in {**kept, "version": version}.items():
            object.__setattr__(self, name, ordinary(value) if name in CHILDREN else value)

    @alone
    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        self._resting("copy")

        def clone(x: Any) -> Any:
            return clone_as(x) if isinstance(x, torch.Tensor) else copy.deepcopy(x, memo)

        trees = {name: pytree.tree_map(clone, getattr(self, name)) for name in CHILDREN}
        lineage = self.version.lineage
        new = lineage.heir(lineage.runtime, self.layout, self.spec, self.steps, trees["count"])
        return self._evolve(**trees, version=Version(new, 0))

    def __copy__(self) -> State:
        return copy.deepcopy(self)  # two lineages must not share buffers: step reuses them

    def __fsdp_settings__(self) -> Any:
        """What counts of it where a setting refers to it (an optimizer that closes over a State, say)."""
        return "State", self.layout.hash

    # ---- pictures

    def _status(self) -> str:
        """Where it is in its step, or why it is of no more use; in a few words."""
        lineage, serial = self.version.lineage, self.version.serial
        lineage.follow()
        if lineage.broken and serial >= lineage.base:
            return f"taken by {lineage.moved_by}()" if lineage.moved_by else "of no more use"
        if self.between_steps:
            return "between steps"
        return "in the middle of a step" if serial == lineage.head else f"consumed by {lineage.consumer(serial)}"

    def __repr__(self) -> str:
        return _state_table(self)


FIELDS = tuple(f.name for f in fields(State))
CHILDREN = tuple(f.name for f in fields(State) if not f.metadata)


def _unflatten(context: Context, children: tuple[Any, ...]) -> State:
    static = (context.spec, context.layout, context.optimizer, context.treedef, context.version)
    return State(*children, *static)  # type: ignore[call-arg]


register(State, lambda s: (tuple(getattr(s, name) for name in CHILDREN), Context(s)), CHILDREN, _unflatten)
