"""Session: one call that drives the units of a state for its caller, and tells the schedule what verbs do not say.

Session(state, verb, order)    the call may use this state; the plan goes by its order
begin                          a forward that trains begins
  unshard, release             the verbs, for each unit; `Session.unshard` where the schedule shall know nothing of it
turn                           the forward is over; is a microbatch to follow?
expect, skip                   which gradients will come, and which will not
  unshard, reduce, release
all_done, end                  the backward is over
rest                           in the place of all from `begin` on: weights were only looked at

Also here, what a transform sees of who computes with a state: its mesh, this rank, the lineage, and random numbers.

Rounds: gradients that a transform adds for the user are those of one step, once.

    forward_backward(last_microbatch=False)   forward_backward(last_microbatch=False)   forward_backward()   step
    └── adds ──────────────────────── adds ──────────────────────── whole ────────────┘
                                                                      └── once more: an error, they would count twice

`reduce` by hand knows no rounds: its calls add up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .._common.calls import refuse, traced_as, verb
from .._common.device import default_generator
from .._common.errors import ScheduleError
from .._plan.plan import DefaultOrder, Program
from .._runtime.runtime import Runtime, runtime_of
from .._spec.spec import Order
from .._state.lineage import Lineage
from .._state.state import State
from .._verbs import no_unit
from .agreed import all_done, differ
from .orders import GuessedOrder
from .residuals import copy_to_fallback


class Ranks:
    """The ranks of a state's mesh, and which of them this one is.

    Attributes:
        device: where this rank's tensors are.
        size: how many ranks there are; index: which of them this is; rank: its number in torch.distributed.
        drawer: the index of the rank whose random numbers this one draws in driven steps: its own; along axes of the
            model's own (`Spec(own=)`) that are no axes of the data ranks draw the same, those of the first of them.
        coordinate: {axis: this rank's place along it}.
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

    @property
    def generator(self) -> Any:
        """The torch.Generator that a GPU draws from by default; None on the CPU, which draws from the host's."""
        return default_generator(self.device)

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
