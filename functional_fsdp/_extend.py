"""What `extend` gives to transforms: changes to a state, and sessions, which drive the units of one.

    GuessedOrder, combined         the order in which a driven module uses units
    take_turn, differ              a pass in which ranks agree on each use: its first step
    PlannedCopies                  residuals of a unit that is gathered elsewhere now
    ranks_of, seeds, lineage_of    who computes with a state
    Session                        one call that drives the units of a state
    begin_round, end_round         gradients that are added once
    shards, total                  this rank's elements of gradients, and sums of them
    change, change_weights         changes in place

Orders of use that driven modules come to: a guess, from a module's structure, and what ranks did in the first step.

    rank 0   a    c    | c    a          combined   a  b  c  | c  b  a
    rank 1   a  b      |    b a

Pure: from what each rank says to one order for all.

Passes in which ranks agree on each use: the first step of a driven module, whose order is a guess.

    rank 0   a          c   d        wants c: helps with b, then has c
    rank 1   a    b     c   d

Ranks may come to units in orders of their own, and to different ones. Each says what it wants next; of that, all gather
what comes first in the plan, until this rank has its own. The others wait meanwhile, or are done, and help.

`PlannedCopies`: a unit that driven modules use lies by the plan in one use, and off the plan in another one of the same
step. What autograd kept points at the bytes of the first one.

`Session`: one call that drives the units of a state for its caller, and tells the schedule what verbs do not say.

Session(state, verb, order)    the call may use this state; the plan goes by its order
begin                          a forward that trains begins
  unshard, release             the verbs, for each unit; `Session.unshard` where the schedule shall know nothing of it
turn                           the forward is over; is a microbatch to follow?
expect, skip                   which gradients will come, and which will not
  unshard, reduce, release
all_done, end                  the backward is over
rest                           in the place of all from `begin` on: weights were only looked at

Rounds: gradients that a transform adds for the user are those of one step, once.

    forward_backward(last_microbatch=False)   forward_backward(last_microbatch=False)   forward_backward()   step
    └── adds ──────────────────────── adds ──────────────────────── whole ────────────┘
                                                                      └── once more: an error, they would count twice

`reduce` by hand knows no rounds: its calls add up.

Changes: what a transform does to a state in place, as a verb would: the state that went in is consumed.

change               gradients, in the middle of a step
change_weights       main weights, between steps; compute copies follow
separate_gradients   gradients of a call's own, beside those that the state has

`shards` gives this rank's elements of the gradients (or of other trees of FlatBuffers), and sums that count each once:

mesh 2 × 2, hsdp       replica 0        replica 1          shards          {("shard",): [...]}: differ along that
  shard 0              g[:n/2]          g[:n/2]            total           summed over "shard", and not over
  shard 1              g[n/2:]          g[n/2:]                            "replica", where it is the same again
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch

from ._common.calls import arrive, guard, provide, refuse, traced_as, uninterruptible, verb
from ._common.errors import ScheduleError, TreeError
from ._common.record import over_each_axis
from ._distributed import Case
from ._engine.executor import Executor
from ._engine.gathers import LANE, Arena, Gathers
from ._graph.traced import change as traced_change
from ._graph.traced import change_weights as traced_change_weights
from ._metrics import Op, axes_of, over_axes
from ._plan.plan import Decision, DefaultOrder, KnownOrder, Plan, Program, names_of
from ._runtime.agreement import place_of
from ._runtime.runtime import Runtime, runtime_of
from ._spec.spec import Order
from ._state.state import Lineage, State, Version
from ._storage import FlatBuffer, Gathered, Stored, clear_padding, of_tree, of_unit, refresh
from ._verbs import finish_reductions, has_gradients, no_unit

Seen = tuple[Order, Order, Collection[str]]  # what a rank did: forward, backward, and units without a gradient


@dataclass(frozen=True)
class GuessedOrder(KnownOrder):
    """That of a module's structure. `seen`: what this rank did in the first step, once it is over."""

    open: ClassVar[bool] = True
    what: ClassVar[str] = "the order of use"
    seen: Seen | None = None

    @property
    def said(self) -> Any:
        return self.seen

    def decided(self, everyone: Sequence[Any], planned: Order, frozen: Collection[str]) -> Decision | None:
        """What some ranks did not use goes where others used it, and what none used stays between its neighbours."""
        forward, backward = combined(everyone, planned, frozen)
        if not forward:  # they used the same units in different orders, and may again
            return None
        return forward + backward, len(Program(forward).order)


def combined(seen: Sequence[Seen], planned: Order, frozen: Collection[str] = ()) -> tuple[Order, Order]:
    """One order for all ranks, forward and backward, from what each did, and from a plan for what none used.

    Where a unit is not used in the backward, that is because its gradient needs no weights; or because no rank had a
    gradient of it, which another step may have. Empty if ranks used the same units in different orders.

    >>> combined([(("a", "c"), ("c", "a"), ()), (("a", "b"), ("a",), ("b",))], tuple("abcddcba"))
    (('a', 'b', 'c', 'd'), ('d', 'c', 'b', 'a'))
    >>> combined([(("a", "b"), ("b", "a"), ()), (("a", "b", "c"), ("c", "a"), ("b",))], ())
    (('a', 'b', 'c'), ('c', 'b', 'a'))
    """
    half = len(planned) // 2
    forwards, backwards = ([*dict.fromkeys(some)] for some in ([s[0] for s in seen], [s[1][::-1] for s in seen]))
    forward, backward = max(forwards, key=len), max(backwards, key=len)
    for other in forwards:
        forward = _merged(forward, other)
    for other in backwards:
        backward = _merged(backward, other, (), forward)
    if not all(_within(one, forward) for one in forwards) or not all(_within(one, backward) for one in backwards):
        return (), ()
    used = _units(forward)
    forward = _merged(forward, planned[:half], used)
    given = {name for forth, _, skipped in seen for name in _units(forth) - set(skipped)}
    kept = {name for _, _, skipped in seen for name in skipped} - given
    first = next((i for i, call in enumerate(forward) if not kept.isdisjoint(names_of(call))), len(forward))
    back = _units(backward)  # a gradient of what comes before a frozen unit would go through it
    kept |= {name for name in _units(forward[first:]) if name in frozen and name not in back}
    return forward, _filled(backward, forward, kept, used)[::-1]


def _units(order: Order) -> set[str]:
    return {name for call in order for name in names_of(call)}


def _merged(order: Order, other: Order, but: Collection[str] = (), natural: Order = ()) -> Order:
    """An order with what only another one has put in, each after what comes before it there, or before what comes
    after it; of several places that which the natural order says; but not the units in `but`."""
    found = list(order)
    there = set(found)
    if there.issuperset(other):
        return order
    place = {call: i for i, call in reversed([*enumerate(natural)])}  # its first
    for i, call in enumerate(other):
        if call not in there and not all(name in but for name in names_of(call)):
            before = next((one for one in reversed(other[:i]) if one in there), None)
            after = next((one for one in other[i + 1 :] if one in there), None)
            low = found.index(before) + 1 if before is not None else 0
            high = len(found) - 1 - found[::-1].index(after) if after is not None else len(found)
            at = low if before is not None or after is None else high
            if call in place and low < high:
                at = next((k for k in range(low, high) if place.get(found[k], -1) > place[call]), high)
            found.insert(at, call)
            there.add(call)
    return tuple(found)


def _filled(order: Order, natural: Order, kept: set[str], used: set[str]) -> Order:
    """An order, and what it lacks of the natural one, each time where that has it: what is kept, and what none used."""
    places: dict[str | tuple[str, ...], list[int]] = {}
    for i, call in enumerate(order):
        places.setdefault(call, []).append(i)
    found: list[str | tuple[str, ...]] = []
    at = 0  # how much of the order is in `found`
    for call in natural:
        there = places.get(call, ())
        if not kept.isdisjoint(names_of(call)) or (not there and not used.issuperset(names_of(call))):
            found.append(call)
        elif (k := bisect_left(there, at)) < len(there):
            found += order[at : there[k] + 1]
            at = there[k] + 1
    return (*found, *order[at:])


def _within(some: Order, order: Order) -> bool:
    """Whether these uses come in this order, among others."""
    left = iter(order)
    return all(call in left for call in some)


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


def copy_to_fallback(gathers: Gathers, unit: str) -> None:
    """A unit that is gathered by the plan lies where it lay off the plan, too."""
    there = gathers.unplanned[unit]
    there.allocate()
    for part in gathers.arena.places[unit].parts:
        there.whole[part.bucket.name].copy_(part.whole)


class PlannedCopies(dict[str, Any]):
    """Units that are gathered off the plan, and copied to their planned place: by name what ends that; None: the plan
    has come to the unit itself. Gathers have one, so it is given them."""

    def put(self, gathers: Gathers, unit: str) -> Callable[[], None] | None:
        """A unit that is gathered off the plan is needed where it lies by the plan, too. Returns what ends that; None
        if it cannot be."""
        if unit in self:
            return lambda: None  # it lies there for a call around this one
        outside = gathers.unplanned.get(unit)
        if unit not in gathers.arena.places or not outside or gathers.carrier.read or gathers.is_crowded(unit):
            return None
        for name, other in gathers.flying.items():
            if name == unit or gathers.progress.plan.overlap(unit, name):
                gathers.run.lanes.wait(other.gathered)
        self[unit] = overwrite(gathers.arena, unit, outside.whole)
        return partial(self._put_away, gathers, unit)

    def lie_over(self, plan: Plan, unit: str) -> bool:
        """Whether one of them lies where a unit would."""
        return unit in plan.crowded and any(plan.overlap(unit, name) for name in self)

    def make_way(self, gathers: Gathers, unit: str) -> list[str]:
        """A gather writes where they may lie: they are put away, and put there again once it is done. Nothing if it is
        the unit itself: it now lies there by the plan."""
        lying = [name for name in self if gathers.progress.plan.overlap(unit, name)]
        for name in lying:
            self._put_away(gathers, name)
        if unit in self:
            self[unit] = None
        return lying

    def _put_away(self, gathers: Gathers, unit: str) -> None:
        """What the plan has where a unit was copied to lies there again."""
        undo = self.pop(unit, None)
        if undo is not None:
            undo()
            gathers.fence_off()  # what is gathered there next comes after this


def overwrite(arena: Arena, unit: str, whole: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    """Have a unit lie in its place, from these buckets, for residuals that point there, although the plan may have
    something else there now. Returns what puts that back."""
    which, planned, _ = arena.where[unit]
    memory = arena.memory[which]
    size, parts = memory.nbytes(), arena.places[unit].parts
    there = [part.whole for part in parts]
    if size != planned:  # the bytes of another one, which may go
        there = [torch.empty(0, dtype=torch.uint8, device=arena.run.device).set_(memory)]
    kept = [some.clone() for some in there]
    arena.allocate(unit)
    for part in parts:
        part.whole.copy_(whole[part.bucket.name])

    def undo() -> None:
        if memory.nbytes() != size:
            memory.resize_(0)
            memory.resize_(size)
        for some, was in zip(there, kept, strict=True):
            some.copy_(was)

    return undo


provide("extend", PlannedCopies)


class Ranks:
    """The ranks of a state's mesh, and which of them this one is.

    Attributes:
        device: where this rank's tensors are.
        size: how many ranks there are; index: which of them this is; rank: its number in torch.distributed.
        drawer: the index of the rank whose random numbers this one draws in driven steps: its own; along axes of the
            model's own (`Spec(own=)`) that are no axes of the data ranks draw the same, those of the first of them.
        coordinate: {axis: this rank's place along it}.
        generator: the torch.Generator that a GPU draws from by default; None on the CPU, which draws from the host's.
        generators: {microbatch: torch.Generator} that captured steps draw from; draws: {(microbatch, place): offset}
            of what a step draws again, in a recomputation; again: generators for it. lanes: those of the mesh, which on
            GPUs have `joined` and `catch_up`. For what captures graphs.
    """

    def __init__(self, run: Runtime, alike: Sequence[str] = ()) -> None:
        self._run = run
        self.device, self.size, self.coordinate = run.device, run.size, run.coordinate
        self.index, self.rank = run.rank, run.ranks[run.rank]
        self.drawer = self.index
        if alike:
            first = run.grid[tuple(0 if axis in alike else at for axis, at in run.coordinate.items())]
            self.drawer = run.ranks.index(int(first))
        self.generators, self.draws, self.again = run.generators, run.draws, run.again
        self.lanes: Any = run.lanes
        self.generator: Any = run.lanes.generator

    @property
    def capturing(self) -> bool:
        """Whether a step is being captured into a CUDA graph."""
        return self._run.capturing

    def everyone(self, value: Any, what: str) -> list[Any]:
        """Every rank's value, by index: a small object that pickles.

        Args:
            what: what it is for, the same on every rank.

        Raises:
            CommError: a rank is gone, or never came. ScheduleError: a rank came with another exchange. RestartError: a
            rank was stopped in it.

        Collective: a gather on the host, which waits for all.
        """
        return self._run.everyone(value, what)

    def any(self, mine: bool, what: str) -> bool:
        """Whether it is so on any rank, where every rank asks `what`. As `everyone`, with 16 bytes.

        Collective: a vote on the host, which waits for all.
        """
        self._run.meet(what)
        return self._run.most(what, int(mine)) > 0


def ranks_of(state: State) -> Ranks:
    """The ranks of a state's mesh.

    Example: `extend.ranks_of(state).device`.
    """
    spec = state.spec
    alike = [axis for axis in spec.own_axes if axis not in spec.data] if spec.own else ()
    return Ranks(runtime_of(spec.mesh), alike)


NO_HOST = "reads state.rng on the host, which a compiled step cannot. Call it outside torch.compile."
OFF_PLAN = "Session.unshard gathers off the plan, which a compiled step cannot. Use fsdp.unshard in it."


@traced_as(lambda state, *what, step=None: refuse("ScheduleError", f"seeds: {NO_HOST}"))
def seeds(state: State, *what: Any, step: int | None = None) -> Callable[..., int]:
    """A function from names to seeds, the same whenever the step is taken again: from (what, state.rng, steps, names).

    A rank that is to draw numbers of its own has its index among the names. Reads `state.rng`, once, on the host.

    Args:
        step: how many steps were taken, where the lineage does not know.

    Raises:
        ScheduleError: in a compiled step.

    Example: `generator.manual_seed(extend.seeds(state, "noise")(leaf.path))`.
    """
    where = " ".join(map(str, (*what, int(state.rng), state.steps if step is None else step)))

    def seed(*names: Any) -> int:
        text = " ".join(map(str, (where, *names)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")

    return seed


def check_between_steps(state: State, what: str) -> None:
    """Raise StaleStateError unless this is a valid state between steps, as whoever copies or keeps it needs.

    Args:
        what: who asks, for the error.

    Example: `extend.check_between_steps(state, "my_capture")`.
    """
    state._resting(what)


def lineage_of(state: State) -> Lineage:
    """The lineage of a state: the same object for every state of it, and weakly referable.

    Example: `extend.lineage_of(state) is extend.lineage_of(fsdp.step(state))`.
    """
    return state.version.lineage


def note_activations(state: State, ways: Mapping[str, str]) -> None:
    """What becomes of what modules save, in words by path: the plan of the run says it, and so do its checkpoints. The
    same on every rank."""
    lineage = state.version.lineage
    if lineage.activations != ways:
        with torch.no_grad(), lineage:
            if state._executor.note_activations((*ways.items(),)):
                lineage.note_activations(ways)


class Session:
    """A call that uses a state's units by itself: a transform that drives a module, in whatever framework it is.

    Units are gathered, released and reduced by the verbs, which take the newest state and return the next one. A
    session tells the schedule what they do not say: where a pass begins, turns and ends, and what will not come. Every
    rank makes the same session; within it a rank may leave units out.

    Args:
        state: the newest state of a step, or one between steps.
        verb: what users call it by, for errors.
        order: units in order of use, forward and then backward, the same on every rank, for a schedule that leaves it
            open: a guess at first, which the first step corrects. A tuple in it is used at once.

    Attributes:
        number: how many forwards of this step began before; see `seeds`.
        fallback: the units that were gathered off the plan in this step; nearly always there are none.
        watcher: what forwards of units are called through, `watcher("forward blocks.3", fn, *args)`; None: nothing.

    Raises:
        StaleStateError: a consumed state. RestartError: a rank abandoned the step.

    Collective: none; the verbs are as they always are.

    Example, of two layers whose backward somebody else calls, last one first:

        session = extend.Session(state, "train", order=("a", "b", "b", "a"))
        state = session.begin(state)
        for unit in ("a", "b"):
            state, w = fsdp.unshard(state, unit)
            h = forward(unit, w, h)
            state = fsdp.release(state, unit)
        session.turn(state, last_microbatch=True)
        session.expect(state, ("a", "b"), ("a", "b"))
        for unit in ("b", "a"):
            state, w = fsdp.unshard(state, unit)
            dw, dh = backward(unit, w, dh)
            state = fsdp.reduce(state, dw, unit)
            state = fsdp.release(state, unit)
        session.all_done(state)
        session.end(state, ("a", "b"), ("b", "a"))
    """

    def __init__(self, state: State, verb: str, order: Order | None = None) -> None:
        lineage = state.version.lineage
        lineage.enter(state.version.serial, verb)
        self._lineage, self._executor = lineage, state._executor
        self.watcher: Any = lineage.runtime.watcher
        self._verb, self._before, self._resting = verb, state, state.between_steps
        if order is not None:
            with torch.no_grad(), lineage:
                self._follow(order)
        self.number = self._executor.begins
        self.fallback: Mapping[str, Any] = self._executor.gathers.unplanned

    def _follow(self, order: Order) -> None:
        """Go by this order, the same on every rank, if the schedule left it open and nothing is under way."""
        executor, progress = self._executor, self._executor.progress
        if isinstance(progress.order, DefaultOrder) and progress.cursor.idle and not executor.sink.grads:
            executor.follow(progress.plan_for(order, len(Program(order[: len(order) // 2]).order)))
            progress.know(GuessedOrder())  # last: if it is interrupted, it comes again
            executor.share()

    # ---------------------------------------------------------------- a pass that trains

    def begin(self, state: State) -> State:
        """A forward begins whose gradients will come: nothing in it, up to `end`, is taken for the next pass. Consumes
        the state."""
        executor = self._executor
        with torch.no_grad(), self._lineage:
            executor.count_forward()
            executor.reductions.staging.use_own_bytes(False)
            if not executor.progress.order.recording:
                # In the first step a guess may be wrong, on some ranks only: they agree on each use.
                agreed = isinstance(executor.progress.order, GuessedOrder) and not executor.run.capturing
                executor.happen(state, "begin agreed" if agreed else "begin")
            return self._lineage.advance(state, f"{self._verb}()")

    def count(self) -> None:
        """In the place of `begin`, for a forward that uses the whole tree: it counts as one of the step."""
        self._executor.count_forward()

    def turn(self, state: State, last_microbatch: bool) -> None:
        """The forward is over, the backward begins. Its gradients come with `last_microbatch`, see `reduce`."""
        executor, progress = self._executor, self._executor.progress
        executor.reductions.set_last(last_microbatch)
        if progress.order.recording:
            progress.know(progress.order.turned())
        else:
            executor.happen(state, "turn")

    def expect(self, state: State, forward: Order, units: Iterable[str]) -> None:
        """The backward has begun: these were used in the forward, in order, and gradients of these units will come.
        Ranks tell each other where the order is still a guess, and may differ. Else nothing happens."""
        if self._executor.progress.cursor.agreed:
            with torch.no_grad(), self._lineage:
                differ(self._executor, state, forward, tuple(units))

    def skip(self, unit: str) -> bool:
        """On this rank no gradient of this unit will come in this pass. False: the order is only being recorded, so say
        it by `reduce`, with None for each leaf."""
        progress = self._executor.progress
        self._executor.reductions.skipped.add(unit)
        if not progress.order.recording:
            progress.make(progress.position["skip", (unit,)])
        return not progress.order.recording

    def await_gradient(self, unit: str) -> None:
        """On this rank a gradient of this unit will come in this backward, which has begun, though nothing in the
        forward gathered it: what the gradient is computed from needs none of its weights."""
        progress = self._executor.progress
        if not progress.order.recording:
            progress.make(progress.position["await", (unit,)])

    def all_done(self, state: State) -> None:
        """This rank has come to all that it uses in the backward. Others may need it, while the order is a guess."""
        if self._executor.progress.cursor.agreed:
            with torch.no_grad(), self._lineage:
                all_done(self._executor, state)

    def end(self, state: State, forward: Order, backward: Order) -> None:
        """The pass is over, everything is released, and these were the orders of use: a guessed order follows them from
        the next step on. Starts what peers may still wait for."""
        self._lineage.enter(state.version.serial, self._verb)
        executor, progress = self._executor, self._executor.progress
        with torch.no_grad(), self._lineage:
            if not progress.order.recording:
                if progress.cursor.agreed:
                    executor.gathers.fence_off()
                executor.happen(state, "end")
                state.version.cursor = progress.cursor  # it goes to the caller now
            if progress.order == GuessedOrder():  # the step's first pass that ends
                progress.know(GuessedOrder((forward, backward, tuple(executor.reductions.skipped))))

    # ---------------------------------------------------------------- a pass that only looks

    def rest(self, state: State) -> State:
        """Weights were only looked at, on every rank, and everything is released: the state that the session began
        with, if that was between steps, as good as it was; else this one, in which the step goes on."""
        if not self._resting:
            return state
        with self._lineage:
            if not self._executor.progress.order.recording:
                self._executor.happen(state, "look")  # starts what peers started
            self._executor.reset()
            self._lineage.rest(f"{self._verb}()")
        self._lineage.looked()
        return self._before

    # ---------------------------------------------------------------- where weights lie

    @staticmethod
    @verb(lambda state, units: refuse("ScheduleError", OFF_PLAN))
    def unshard(state: State, units: Sequence[str]) -> tuple[State, dict[str, dict[str, torch.Tensor]]]:
        """As `fsdp.unshard`, but no use of the schedule, even if it expects one. The units are gathered into bytes of
        their own, the same ones each time, and compute waits for it; every rank must do the same.

        Raises:
            ScheduleError: a name that is no unit's; in a compiled step. As `fsdp.unshard`.
        """
        lineage, executor = state.version.lineage, state._executor
        for name in units:
            if name not in state.layout.by_name:
                raise no_unit(state, name, "Session.unshard")
        lineage.enter(state.version.serial, "unshard")
        with lineage:
            weights = executor.unshard(state, units, executor.gathers.move_off_plan(units))
            return lineage.advance(state, ("unshard", units), executor.sink.grads or state.grads), weights

    def off_plan(self, units: Iterable[str]) -> list[str]:
        """Of these units, those that are gathered off the plan."""
        return [unit for unit in units if self._executor.gathers.is_off_plan(unit)]

    def copy_to_fallback(self, unit: str) -> None:
        """A unit that is gathered by the plan is needed where it lay off the plan, too: residuals point there. Until it
        is released."""
        copy_to_fallback(self._executor.gathers, unit)

    def copy_to_planned(self, unit: str) -> Callable[[], None] | None:
        """The other way round: a unit that is gathered off the plan is needed where it lies by the plan, too.
        Returns what ends that; None if something else lies there."""
        gathers = self._executor.gathers
        return gathers.copied.put(gathers, unit)

    def spoil(self, state: State, units: Iterable[str], why: str) -> None:
        """What was lent of these units was changed. Where it is the state's own (replicated weights), its lineage is of
        no more use: from here on every use raises a StaleStateError that says why."""
        self._lineage.spoil((bucket for unit in units for bucket in state.layout.by_name[unit].buckets), why)


def begin_round(state: State, verb: str) -> None:
    """A transform is about to add gradients to the state, for a user who takes its call for the whole round.

    Args:
        verb: what users call the transform by, for errors.

    Raises:
        ScheduleError: those of a whole round are there, and no step was taken: they would count twice.
        StaleStateError: a consumed state.

    Collective: none.

    Example: `extend.begin_round(state, "my_backward")`, then the verbs, then
    `extend.end_round(state, last_microbatch)`.
    """
    lineage = state.version.lineage
    lineage.enter(state.version.serial, verb)
    if lineage.executor is not None and lineage.executor.round_complete:
        raise ScheduleError(
            f"{verb}: this State has the gradients of a whole round already (the call before had "
            "last_microbatch=True, the default), and no step has taken them: they would count twice. Take the step, or "
            "start over: state = fsdp.drop_gradients(state). Where microbatches add up, say last_microbatch=False in "
            "all calls but the last."
        )


def end_round(state: State, last_microbatch: bool) -> None:
    """A transform has added gradients; `last_microbatch`: no more follow before the step. See `begin_round`."""
    state._executor.end_round(last_microbatch)


Axes = tuple[str, ...]


def shards(state: State, tree: Mapping[str, FlatBuffer] | None = None) -> dict[Axes, list[FlatBuffer]]:
    """`{mesh axes along which they differ: FlatBuffers}`: what this rank holds, each bucket once.

    Args:
        tree: `{bucket: FlatBuffer}`, as `state.main`; compute waits for reductions under way, and updates for compute.
            None: the gradients of the state, which are whole after `finish_reductions`.

    Returns:
        buffers by the axes of more than one rank that shard them, along which their leaves are cut (`Spec(own=)`), or
        that are data of other leaves only, where ranks have leaves of their own (experts). Along other axes of data
        ranks hold the same. An axis that no placement names is in no key: ranks train apart along it, and each sums its
        own. The tensors are `.local`, flat [n_b / ranks of the axes]; padding is zero. To change them in place, see
        `change`.

    Collective: none.

    Example: `for axes, buffers in extend.shards(state).items(): ...`.
    """
    if tree is not None:
        _settle(state)
    found: dict[Axes, list[FlatBuffer]] = {}
    data, sizes = axes_of(state)
    for buffer in (state.grads if tree is None else tree).values():
        split = tuple(axis for axis in buffer.sharded() if sizes[axis] > 1)
        bucket = buffer.bucket
        own = (axis for axis in bucket.apart(sizes) if axis in data or axis in bucket.cut)
        axes = (*split, *own)
        found.setdefault(axes, []).append(buffer)
    return found


@traced_as(lambda state: None)
def _settle(state: State) -> None:
    """What is looked at may be gradients under way, which are there first, or what an update changes, after this."""
    state.version.lineage.touched()
    if state.grads:
        state._executor.look(state)


def over_shards(state: State, values: Mapping[Axes, torch.Tensor], op: Op = "sum") -> dict[Axes, torch.Tensor]:
    """A tensor [...] from each group of `shards`, added up (or its largest, "max") over the ranks whose shards differ.

    Args:
        values: `{axes: tensor}`, with the keys of `shards`, of one dtype; on every rank, of the same shapes.

    Returns:
        the same keys and shapes; each shard has counted once, and every rank of the data has the same.

    Raises:
        TreeError: a key that is no tuple of axes of the mesh.

    Collective: one all-reduce for each axis that shards something, of all tensors together. Nothing waits for the
    device.

    Example, the largest gradient of each bucket: `extend.over_shards(state, {axes: torch.stack([b.local.abs().amax()
    for b in buffers]) for axes, buffers in extend.shards(state).items()}, "max")`.
    """
    along, axes = [*values], axes_of(state)[1]
    for key in along:
        if not isinstance(key, tuple) or any(axis not in axes for axis in key):
            raise TreeError(
                f"over_shards: the key {key!r} is no tuple of axes of the mesh, which are {[*axes]}. Give the keys of "
                "extend.shards(state): {axes: ... for axes, buffers in extend.shards(state).items()}."
            )
    found = over_each_axis(
        [*values.values()], along, axes, lambda axis, flat: over_axes(state, flat, (axis,), op, "total")
    )
    return dict(zip(along, found, strict=True))


def total(state: State, values: Mapping[Axes, torch.Tensor]) -> torch.Tensor:
    """The sum, a tensor [], over all shards of a tensor [] from each group of `shards`: each element counts once.

    Args:
        values: `{axes: tensor []}`, with the keys of `shards`; on every rank.

    Raises:
        TreeError: as `over_shards`.

    Collective: as `over_shards`.

    Example, how many gradients are zero: `extend.total(state, {axes: sum((b.local == 0).sum() for b in buffers) for
    axes, buffers in extend.shards(state).items()})`, less the padding.
    """
    return torch.stack([*over_shards(state, values).values()]).sum()


def by_unit(state: State, what: str, grads: Any, unit: str | None = None) -> dict[str, list[torch.Tensor | None]]:
    """Gradients as `reduce` takes them, checked as it does: `{unit: a gradient or None for each of Unit.paths}`.

    Args:
        what: the transform's name, for errors.
        grads, unit: as for `reduce`. Those of tied leaves are added up; frozen leaves have None.

    Raises:
        TreeError: as `reduce`. ScheduleError: there is no such unit.

    Collective: none.

    Example: `extend.by_unit(state, "look", grads, "blocks.0")["blocks.0"]`.
    """
    if unit is None:
        values = of_tree(state.layout, grads)
        return {one.name: [values.get(path) for path in one.paths] for one in state.layout.units}
    if unit not in state.layout.by_name:
        raise no_unit(state, unit, what)
    one = state.layout.by_name[unit]
    return {unit: of_unit(one, grads)[0] or [None] * len(one.paths)}


R = TypeVar("R")


@traced_as(traced_change)
def change(
    state: State, what: str, work: Callable[[], None], by: Any = "", *, every_leaf: bool = False,
    keeps_zeros: bool = False,
) -> State:  # fmt: skip
    """The state after `work` has changed its gradients in place. Consumes `state`; if it is stopped in it, the step has
    to begin anew.

    Args:
        state: the newest state of a step, after `finish_reductions`: its gradients are whole. `work` begins when no
            reduction is under way.
        what: the transform's name, for errors and for the other ranks: the vote of `step` compares what ranks did.
        work: changes them, through `shards` or `leaf_shards`.
        by: a number that has to be the same on every rank; of a tensor only that it is one.
        every_leaf: every leaf has a gradient from here on (noise, say), and so is updated by `step`.
        keeps_zeros: zeros stay zeros, as in scaling; else what lies between leaves is set to zero again.

    Raises:
        StaleStateError: a consumed state. ScheduleError: the state has no gradients, or not all of them are whole.
        Whatever `work` raises.

    Collective: none but those of `work`. In a compiled step it is `work` alone.

    Example: `state = extend.change(fsdp.finish_reductions(state), "negate()", negate)`.
    """
    lineage, executor = state.version.lineage, state._executor
    lineage.enter(state.version.serial, what)
    has_gradients(state, what)
    executor.sink.set_gradients(state.grads)
    if not executor.reductions.complete:
        raise ScheduleError(f"{what}: not all gradients are whole. Call state = finish_reductions(state) first.")
    _remark(state, f"{what} after {executor.reduced}", by)
    with torch.no_grad(), lineage:
        executor.settle()  # what is under way would write over what `work` does
        work()
        if not keeps_zeros:
            clear_padding(state.grads.values())
        if every_leaf:
            executor.reductions.given.fill()
        return lineage.advance(state, what)


def _remark(state: State, what: str, by: Any) -> None:
    """The next vote compares this."""
    state.version.lineage.runtime.remark(f"{what} {'' if isinstance(by, torch.Tensor) else by}")


APART = "keeps gradients apart, which a compiled step cannot. Call it outside torch.compile."


@traced_as(lambda state, what, fn: refuse("ScheduleError", f"{what} {APART}"))
def separate_gradients(
    state: State, what: str, fn: Callable[[State], tuple[State, R]]
) -> tuple[State, R, dict[str, FlatBuffer]]:
    """Run `fn` on a state without gradients, and put those that the state had back: `state, out, grads`.

    Args:
        state: between steps, or in the middle of one.
        what: the transform's name, for errors.
        fn: `fn(state) -> state, out`. What it gives to `reduce` is its own.

    Returns:
        the state after it, with the gradients that it had before, finished; `out`; and the gradients that came in `fn`,
        `{bucket: FlatBuffer}`, whole, shards [n_b / ranks of grads].

    Raises:
        ScheduleError: nothing was reduced in `fn`; in a compiled step. StaleStateError: a consumed state.

    Collective: those of `fn`, and twice what `finish_reductions` issues.

    Example: `state, loss, grads = extend.separate_gradients(state, "penalty", penalty)`, where `penalty(state)` reduces
    gradients and returns `state, loss`.
    """
    state.version.lineage.enter(state.version.serial, what)
    executor = state._executor
    reductions = executor.reductions
    if state.grads or reductions.early:  # those whose turn has not come, too
        state = finish_reductions(state)
    grads, noted = state.grads, reductions.given.begin()
    round_complete = executor.end_round(False)
    executor.sink.set_gradients({})
    with reductions.feedback.aside():
        state, out = fn(state._evolve(grads={}))
        state = finish_reductions(state)
    found = dict(state.grads)
    executor.sink.set_gradients(grads)
    reductions.given.resume(noted)
    executor.end_round(round_complete)
    return state._evolve(grads=grads), out, found


@traced_as(traced_change_weights)
def change_weights(state: State, what: str, work: Callable[[], None], by: Any = "") -> State:
    """The state after `work` has changed its main weights in place, between steps. Consumes `state`.

    Args:
        state: between steps.
        what: the transform's name, for errors and for the other ranks: the next vote of `step` compares it.
        work: changes `state.main`, through `shards(state, state.main)` or `leaf_shards`; each rank what it holds.
            Replicas do the same.
        by: as for `change`.

    Returns:
        a state between steps, in the same buffers, whose compute copies are those of the new weights. Optimizer state
        and count stay.

    Raises:
        StaleStateError: a state in the middle of a step, or a consumed one. Whatever `work` raises: if it had changed
            something by then, the state is of no more use, and says so.

    Collective: an all-gather a bucket where weights are less sharded than main weights.

    Example: `state = extend.change_weights(fsdp.step(state), "clamp()", clamp)`.
    """
    state._resting(what)
    state.version.lineage.enter(state.version.serial, what)
    with torch.no_grad():
        return _changed(state, what, work, by)


@uninterruptible
def _changed(state: State, what: str, work: Callable[[], None], by: Any) -> State:
    """The change itself, which cannot be taken back. An interrupt waits (and one a second later does not)."""
    lineage = state.version.lineage
    guard()
    lineage.end_reads()
    owned = [buffer.local for buffer in state.main.values()]
    versions = [t._version for t in owned]
    try:
        with lineage.off_plan(state):
            work()
            clear_padding(state.main.values())
            refresh(state.main, state.weights, state.scales)
    except BaseException as error:
        if versions != [t._version for t in owned]:
            lineage.give_up(
                f"{what} was stopped by {type(error).__name__} while it changed the weights, so this State is half "
                "changed. Load the last checkpoint."
            )
        raise
    _remark(state, what, by)
    new = state._evolve(version=Version(lineage, lineage.latest + 1))
    lineage.renew(state.version, new, what, what)
    arrive(lineage.others_begun())
    return new
