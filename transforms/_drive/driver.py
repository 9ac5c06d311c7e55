"""Driver: a private copy of a module, whose unit modules gather their weights when called. No hooks, no globals.

    unit modules    which modules use which units, and in what order, found from the module's structure (pure)
    UnitCall        a unit module's place: its slots, and how its own code is called with weights in them
    UnitUse         one call of it: what it was lent and given, and what the backward does there
    placeholders    what stands in a parameter's place while its weight is not there
    Driver          which units are gathered now, which gradients are to come, and the state as it goes on

A unit is released when the next one is gathered, so parts of one unit that are called in a row are one use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from operator import attrgetter, is_
from traceback import walk_tb
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.nn as nn

from functional_fsdp import Layout, ScheduleError, State, reduce, release, unshard
from functional_fsdp._seams import Collision, by_rules, changed, spoilt, torch_private
from functional_fsdp.extend import Session, lineage_of, refuse, skeleton_of

from .._compile.compile_units import Compiler, Options, refuse_around
from .._compile.startup import waiting
from .._modules import Leaf, copy_of, each_once, find_unit_modules, leaves_of, order_of, refuse_shapes, slots_of
from .buffers import clear
from .unit_calls import Levels, Slot, UnitCall, outside_levels
from .unit_uses import (
    USES,
    Gradients,
    Places,
    Start,
    UnitUse,
    Uses,
    Weights,
    no_output,
    note_place,
    precisions,
    refuse_transform,
    traced_by,
)

Units = Set[str]
Tensors = Sequence[torch.Tensor]
NONE: Units = frozenset()
AS_IT_IS = torch_private.AS_IT_IS
parametrize, run_backward = torch_private.parametrize, torch_private.run_backward
UNITS = attrgetter("units")  # of a unit call


def eager_only(verb: str) -> Callable[..., NoReturn]:
    """What a transform that decides in Python, as it runs, which verb is next does in a graph: it raises."""
    said = (
        f"{verb} drives the schedule from Python, as it runs, and cannot be traced. Inside a compiled step write "
        "the step in the first or second way (unshard, T.vjp, reduce), or use T.forward_backward and T.compile."
    )
    return lambda *args, **kwargs: refuse("ScheduleError", said)


def foreign_tracer() -> str:
    """Which of torch's tools traces the code that runs now, in this thread; "" where none does.

    What traces steps in this package uses a proxy mode, too: this is for code that it does not run.
    """
    if torch.compiler.is_dynamo_compiling():
        return "torch.export" if _exporting() else "torch.compile"
    if torch_private.jit_traces():
        return "torch.jit.trace"
    proxy = torch_private.dispatch_modes() and torch_private.dispatch_mode_of(torch_private.PROXY) is not None
    if proxy or torch_private.pre_dispatch_mode_of(0) is not None:
        return "torch.export" if _exporting() else "make_fx (or torch.func.linearize, which calls it)"
    return ""


def _exporting() -> bool:
    """Whether torch.export traces. Dynamo calls this for real: in torch 2.11 it takes `is_exporting` to be true."""
    return torch.compiler.is_exporting()


_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch._dynamo.assume_constant_result


def caller() -> FrameType:
    """The frame whose `with` a generator is the context manager of, as that one calls it."""
    return sys._getframe(3)  # of this function, the generator, contextlib's __enter__


def refuse_nesting(running: FrameType | None) -> None:
    """A model's copy computes with one state's weights at a time. Whether its last user still runs, the stack says: one
    that an interrupt has stopped may not have come to say so."""
    frame = sys._getframe() if running is not None else None
    while frame is not None and frame is not running:
        frame = frame.f_back
    if frame is not None:
        raise ScheduleError(
            "this transformed model is running: it was called again from within its own loss function. "
            "Use the model that the loss function is given."
        )


def in_backward(error: Exception) -> bool:
    """Whether autograd ran when this was raised."""
    return any(frame.f_code is torch_private.engine_code for frame, _ in walk_tb(error.__traceback__))


class NoSession:
    """A driver's session where no schedule is followed: all is gathered as it comes, and lies where it always does."""

    fallback = ()

    def spoil(self, state: State, units: Sequence[str], why: str) -> None:
        """Nothing was written."""


class Driver:
    """A module's copy, and what it is doing: one forward, or one forward and its backward, at a time.

    Attributes:
        model: the copy, of the user's own class; weights are in it only while a unit module runs.
        state: the state as it is now; None when nothing runs.
    """

    def __init__(self, model: nn.Module, compile: bool | Options = False) -> None:
        self.compiler = Compiler.of(compile)
        self.watch: Callable[[str, Gradients], None] | None = None  # what sees gradients before they are reduced
        self.reduce: Callable[..., State] = reduce
        self.model = copy_of(model)
        self.given = {path: held[name] for path, held, name in slots_of(self.model)}  # in which no layout is yet
        self.layout: Layout | None = None
        self.unit_calls: list[UnitCall] = []
        self.device: Any = None
        self.state: Any = None
        self.session: Any = None  # of the call that runs
        self.watcher: Any = None  # what the forwards of units are called through, see `Session.watcher`
        self.caller: FrameType | None = None  # whose `with` it is that runs
        self.order: Any = None
        self.levels = Levels()  # of torch.func's, in which units are used
        self.operators = True  # whether the model may use operators of torch.library, see `jvp.Operators`
        self._clear()

    def note_operators(self, found: bool) -> None:
        """Whether a call had operators of torch.library, or did not come to its end."""
        self.operators = found

    def deliver(self, reduce: Callable[..., State], watch: Callable[[str, Gradients], None] | None) -> None:
        """Gradients of the backward that comes go to `reduce`; before that `watch` sees them."""
        self.reduce, self.watch = reduce, watch

    def _clear(self) -> None:
        self.weights: dict[str, dict[str, torch.Tensor]] = {}  # of the units that are gathered
        self.recomputed: dict[str, set[bool]] = {}  # units that a recomputation had: off the plan, by it, or both
        self.alone: set[Leaf] = set()  # weights that were used outside their unit modules
        self.stack: list[UnitCall] = []  # unit modules that are being called, outermost first
        self.calls: list[UnitUse] = []  # of this forward
        self.displaced: set[str] = set()  # units that these calls had off the plan
        self.active: list[UnitUse] = []  # whose backward is under way
        self.last = True  # whether no microbatch follows
        self.samples = 0  # how many samples have gradients of their own
        self.pending: dict[str, int] = {}  # gradients of a unit that are still to come
        self.sums: dict[str, Gradients | None] = {}
        self.trace: tuple[list[Any], list[Any]] = ([], [])  # the order of use, forward and backward
        self.gathering = False  # whether units are being gathered
        self.trains_now = False  # whether gradients are to come
        self.differentiating = False  # whether the forward is over
        self.backward = False  # whether the backward has begun
        self.copies: list[tuple[str, torch.Tensor, int]] = []  # of weights used outside their unit modules

    # ---------------------------------------------------------------- a state's layout

    def attach(self, state: State) -> None:
        """Fit the copy to a layout: unit calls where its unit modules are, placeholders in the place of parameters."""
        if state.layout is self.layout:
            return
        self.device = state.count.device
        found = find_unit_modules(self.model, state.layout)
        if not state.spec.own:
            refuse_shapes(type(self.model).__name__, self.given, state.layout)
        unit_modules = each_once(self.model, found)
        for unit_call in self.unit_calls:
            unit_call.remove()
        self.unit_calls, self.layout = [], None  # until it fits
        self.precisions = precisions(state)
        every = state.layout.buckets.items()
        buckets = {(b.unit, leaf.key): name for name, b in every for leaf in b.leaves if leaf.numel}
        self.trainable = {
            (unit.name, key) for unit in state.layout.units
            for key, shape in zip(unit.keys, unit.trains, strict=True) if shape is not None
        }  # fmt: skip
        self.keys = {unit.name: unit.keys for unit in state.layout.units}
        homes = leaves_of(state.layout)
        slots: dict[str, Slot] = {path: (held, name) for path, held, name in slots_of(self.model)}
        cut = {(b.unit, leaf.key): leaf for _, b in every for leaf in b.leaves if leaf.cuts}  # a rank sees its part
        shapes = {
            p: leaf.shape
            if (leaf := cut.get(homes[p])) and t.size() == leaf.whole and getattr(t, "form", None) is None
            else t.size()
            for p, t in self.given.items()
        }
        wanted = {p: (homes[p], shapes[p], self.precisions[p][0], t.requires_grad) for p, t in self.given.items()}
        self.places = Places(self, wanted)
        for path, (held, name) in slots.items():
            self.places.at[path].tie = getattr(self.given[path], "tie", None)
            self.places.at[path].form = by_rules(getattr(self.given[path], "form", None), state.spec.own, path)
            held[name] = self.places.at[path]
        modules = [self.model.get_submodule(unit_module.path) for unit_module in unit_modules]
        compiled = self.compiler.chosen(modules) if self.compiler else ()
        refuse_around(self.model, unit_modules, compiled)
        self.unit_calls = [
            UnitCall(self, module, unit_module, slots, buckets, self.compiler if module in compiled else None)
            for module, unit_module in zip(modules, unit_modules, strict=True)
        ]
        inside = {(id(slots[path][0]), slots[path][1]) for unit_module in found for path, _ in unit_module.leaves}
        self.loose = [(held, name, held[name]) for held, name in slots.values() if (id(held), name) not in inside]
        self.order = order_of(found, state.layout)
        self.uses = Uses(state.layout)
        self.layout = state.layout

    @contextmanager
    def running(self, state: State, verb: str, trains: bool = False) -> Iterator[int]:
        """Within, the model computes with this state's weights; `self.state` goes on from it.

        Gives the number of this forward in its step.
        """
        refuse_nesting(self.caller)
        if torch_private.func_interpreter() is not None:
            refuse_transform(verb)
        if self.caller is not None:  # it was stopped before it had cleared up
            self._stop()
        compiles = self.compiler is not None and state.layout is not self.layout
        self.attach(state)
        session = Session(state, verb, self.order)
        if trains:
            state = session.begin(state)  # gradients may have waited for this
        self.debug = state.spec.schedule.debug
        self.uses.begin(not state.grads and lineage_of(state).keeps_gradients)
        try:
            self.caller, self.state, self.session, self.trains_now = caller(), state, session, trains
            self.watcher = session.watcher
            anew = torch_private.parametrized_anew() if parametrize._cache_enabled else AS_IT_IS
            with anew, waiting() if compiles else AS_IT_IS:
                yield session.number
            self.look_back()
            self.release()
            if trains:
                session.end(self.state, tuple(self.trace[0]), tuple(self.trace[1]))
        except RuntimeError as error:
            paths = [use.unit_call.path for use in (*self.active, *self.levels.inner) if use.unit_call is not None]
            if paths and in_backward(error):
                note_place(error, f"In the backward of the module {paths[-1]!r}.")
            raise
        finally:
            self._stop()

    def _stop(self) -> None:
        """Nothing runs any more: everything that was lent is given back."""
        for unit_call in self.unit_calls:
            if unit_call.inside:
                unit_call.empty()
        for use in (*self.calls, *self.levels.visits):
            use.clear()
        if self.levels.visits or self.levels.kept:
            self.levels.end()
            self.levels = Levels()
        if self.state is not None and self.device in USES:
            self.uses.end(self)
        self._clear()
        self.state = self.session = self.watcher = self.caller = None  # the caller last: until then it begins again

    def bare(self) -> nn.Module:
        """A copy of the copy, as it was before it was fitted to a layout."""
        for unit_call in self.unit_calls:
            unit_call.remove()
        self.unit_calls, self.layout = [], None
        for path, held, name in slots_of(self.model):
            held[name] = self.given[path]
        return skeleton_of(self.model)

    # ---------------------------------------------------------------- weights

    def refuse_tracer(self) -> None:
        """Refuse what traces the model to run it later: it would keep weights that are lent for a call."""
        tool = foreign_tracer()
        if tool:
            refuse("ScheduleError", traced_by(tool))

    def gather(self, units: tuple[str, ...], keep: Sequence[UnitCall], off_plan: Units | None = None) -> Units:
        """Have these units gathered, and give back all others but those of the unit calls in `keep`.

        Args:
            off_plan: these are gathered off the plan, the others by it, as the backward of a use wants them where that
                had them. None: wherever they can be had.

        Returns: those that are gathered off the plan.
        """
        weights, session = self.weights, self.session
        if off_plan is not None and (off_plan or session.fallback):
            there = session.off_plan(weights)
            moved = [unit for unit in units if unit in weights and (unit in there) is not (unit in off_plan)]
            if moved:  # but for those that a call around this one reads where they are: see `regathered`
                used = {unit for unit_call in keep for unit in unit_call.units}
                self.release(tuple([unit for unit in moved if unit not in used]))
        if not all(map(weights.__contains__, units)):
            stale = {*weights}.difference(units, *map(UNITS, keep))
            if stale:
                self.release(tuple(filter(stale.__contains__, weights)))  # in the order in which they came
            self.trace[self.differentiating].append(units if len(units) > 1 else units[0])
            if self.device in USES:
                self.uses.count(self, units, self.differentiating)
            self.gathering = True
            self.fetch(units, off_plan or NONE)
            for lift in self.levels.kept:
                lift.gather(units)
            self.gathering = False
        return frozenset(session.off_plan(units)) if session.fallback else NONE

    def fetch(self, units: tuple[str, ...], off_plan: Units) -> None:
        """Gather these units: those in `off_plan` off the plan, the others by it."""
        by_plan = tuple([unit for unit in units if unit not in off_plan]) if off_plan else units
        others: Sequence[str] = [unit for unit in units if unit in off_plan] if off_plan else ()
        try:
            if by_plan:
                self.state, found = unshard(self.state, by_plan)
                self.weights.update(found)
        except Collision:  # of what is recomputed, or done and not known to be: what is held stays where it is
            others = units
        if others:
            self.state, found = self.session.unshard(self.state, others)
            self.weights.update(found)

    def had_off_plan(self, units: Sequence[str]) -> Units | None:
        """Of these units, those that calls of this forward had off the plan; None if they had none there."""
        return self.displaced.intersection(units) or None

    def regathered(self, call: UnitUse) -> None:
        """The backward has come to a call, and its units are gathered again. They lie wherever something reads them:
        where the forward had them, and where recomputations had them."""
        assert call.unit_call is not None
        if not self.session.fallback:  # all of the step's uses lie where the plan has them
            return
        if self.recomputed or not all(map(is_, self.tensors(call.unit_call.leaves), call.lent)):
            there = self.session.off_plan(call.unit_call.units)
            for unit in call.unit_call.units:
                for elsewhere in {unit in call.off_plan, *self.recomputed.get(unit, ())} - {unit in there}:
                    call.bring(unit, elsewhere)

    def note_recomputed(self, units: Sequence[str], off_plan: Units) -> None:
        """A recomputation has these units, some of them off the plan: what it saves lies there."""
        for unit in units:
            self.recomputed.setdefault(unit, set()).add(unit in off_plan)

    @property
    def busy(self) -> list[Any]:
        """Unit calls whose weights are in use: of the unit modules that are being called, or differentiated."""
        return [*self.stack, *[call.unit_call for call in self.active if call.unit_call]] if self.active else self.stack

    def positions(self, leaves: Sequence[Leaf]) -> dict[str, list[tuple[int, int]]]:
        """For each unit of these leaves: (which of them, which of its keys)."""
        found: dict[str, list[tuple[int, int]]] = {}
        for i, (unit, key) in enumerate(leaves):
            found.setdefault(unit, []).append((i, self.keys[unit].index(key)))
        return found

    def tensors(self, leaves: Sequence[Leaf]) -> list[torch.Tensor]:
        """Gathered weights."""
        return [self.weights[unit][key] for unit, key in leaves]

    def spread(self, weights: Tensors) -> Tensors:
        """For each sample one of each of these: so gradients are each sample's."""
        return [t.expand(self.samples, *t.shape) for t in weights]

    def release(self, units: tuple[str, ...] | None = None) -> None:
        """Give back units, by default all."""
        if self.levels.inner and units is None:
            self.levels.leave()
        names = tuple(self.weights) if units is None else units
        if names:
            for name in names:
                del self.weights[name]
            for lift in self.levels.kept:
                lift.release(names)
            self.state = release(self.state, names)

    def leaf(self, leaf: Leaf) -> torch.Tensor:
        """A copy of one weight, for a use outside its unit module."""
        self.refuse_tracer()
        if torch_private.func_interpreter() is not None:
            with outside_levels():
                found = [self.leaf(leaf)]
            return self.levels.lift(found, [leaf], copied=True)[0]
        if self.state is None:
            raise ScheduleError(f"the weight {leaf[1]!r} of the unit {leaf[0]!r} was used after the model had run.")
        unit, key = leaf
        self.alone.add(leaf)
        self.gather((unit,), self.busy)
        weight = self.weights[unit][key]
        if not torch.is_grad_enabled() or not self.trains(leaf):
            return weight.detach().clone()
        call = UnitUse(self, None, self.positions([leaf]))
        (through,) = Weights.apply(self.places.token, call, *(self.spread([weight]) if self.samples else [weight]))
        if not call.in_backward:
            call.node = through.grad_fn
            self.calls.append(call)
        copied: torch.Tensor = through.clone()
        return copied

    def note(self, path: str, copied: torch.Tensor) -> None:
        """Look back at this copy in the end: views of it may be changed."""
        if torch_private.func_interpreter() is not None:
            with outside_levels():
                return self.note(path, torch_private.base_of(copied))
        if not copied.is_inference():
            probe = copied.detach()  # has the same version counter, and below no memory
            probe.data = probe.new_empty(0)
            self.copies.append((path, probe, probe._version))

    def look_back(self) -> None:
        """Weights that were used, or are held, outside unit modules are what they were."""
        for path, probe, before in self.copies:
            if probe._version != before:
                raise changed([path], "in place, by a view of it")
        for held, name, placeholder in self.loose:
            if held.get(name) is not placeholder:
                clear(self.model, held, name)
                held[name] = placeholder
                raise changed([placeholder.path], "by assignment")

    def spoilt(self, units: Sequence[str], where: str) -> None:
        """Weights that were lent to a module were changed. Where they are the state's own it is of no more use."""
        self.session.spoil(self.state, units, spoilt(where))

    def trains(self, leaf: Leaf) -> bool:
        """Whether a weight is trained."""
        return leaf in self.trainable

    # ---------------------------------------------------------------- backward

    def differentiate(self, loss: torch.Tensor, scale: torch.Tensor, last: bool, inputs: Tensors = ()) -> Gradients:
        """Backward from the loss: gathers, reduces and releases unit by unit. Returns the gradients of the inputs."""
        self.last = last
        self.release()
        self.differentiating = True
        if self.trains_now:
            self.session.turn(self.state, last)
        with torch.enable_grad():  # the caller may have turned it off
            start = Start.apply(self, loss)
        on_this_thread = torch.autograd.set_multithreading_enabled(False)  # as everything that this drives
        anew = torch_private.parametrized_anew() if parametrize._cache_enabled else AS_IT_IS  # for what is recomputed
        needed = (self.places.token, *inputs)
        with on_this_thread, anew:  # `torch.autograd.grad` would compare sizes, for which torch imports sympy
            grads = run_backward((start,), (scale,), False, False, needed, True, accumulate_grad=False)
        self.end_others(())  # the last of a frozen unit: no gradient of its weights ends it
        if self.trains_now:
            self.session.all_done(self.state)
        return [*grads[1:]]

    def begin(self) -> None:
        """The backward begins: which gradients are to come is known now."""
        self.backward, self.watcher = True, None
        used: dict[str, int] = {}
        for call in self.calls:
            if call.node is None:
                continue  # frozen
            comes = torch_private.will_execute(call.node)
            out = any(map(torch_private.will_execute, call.outs))
            call.idle = not comes and out
            if comes and call.unit_call is not None and not out:
                raise no_output(call.unit_call)
            for unit in call.trained:
                used[unit] = used.get(unit, 0) + (comes or call.idle)
        given = self.places.given()
        for unit in given:
            used[unit] = used.get(unit, 0) + 1
        if self.trains_now:
            self.expect(used, given)
            return
        self.pending.update({unit: n for unit, n in used.items() if n})
        if given and self.samples:
            raise ScheduleError(
                f"a weight of the unit {given[0]!r} went into an autograd.Function outside of its module, where its "
                "gradient is that of all samples at once. Have the module that holds it call the Function."
            )

    def expect(self, used: dict[str, int], given: Sequence[str]) -> None:
        """How many gradients are to come for each unit that the forward used and that trains; and units of which a
        Function was given a weight, which it need not have read."""
        self.session.expect(self.state, tuple(self.trace[0]), [unit for unit in used if used[unit]])
        for unit in given:
            self.session.await_gradient(unit)
        if self.trainable and not self.state.grads and not any(used.values()):  # inputs alone get some; peers reduce
            unit, _ = min(self.trainable)
            self._reduce(unit, None)
        for unit in reversed(used):
            if used[unit]:
                self.pending[unit] = used[unit]
            elif not self.session.skip(unit):
                self._reduce(unit, None)
        trains = {unit for unit, _ in self.trainable}
        called = {unit for call in self.calls for unit in (call.unit_call.units if call.unit_call else call.trained)}
        for use in self.trace[0]:
            for unit in (use,) if isinstance(use, str) else use:
                if unit in trains and unit not in called and unit not in used:  # used without a graph only
                    self.session.skip(unit)

    def await_gradients(self, units: Sequence[str]) -> None:
        """One more gradient of each of these units is to come."""
        for unit in units:
            self.pending[unit] = self.pending.get(unit, 0) + 1

    def split_into(self, samples: int) -> None:
        """From here on this many samples have gradients of their own."""
        self.samples = samples

    def end_others(self, parents: Sequence[Any]) -> None:
        """The backward comes to a call within these unit calls: those of others are over."""
        for use in self.active:
            if use.unit_call not in parents:
                use.end()
        self.active = [use for use in self.active if use.unit_call in parents]

    def collect(self, unit: str, grads: Gradients | None) -> None:
        """Gradients of one call, None if it has none; a unit's are reduced when those of all of its calls are there."""
        before = self.sums.pop(unit, None)
        if before is not None:
            both = zip(before, grads or [None] * len(before), strict=True)
            grads = [b if a is None else a if b is None else a + b for a, b in both]
        self.pending[unit] -= 1
        if self.pending[unit]:
            self.sums[unit] = grads
        else:
            self._reduce(unit, grads)

    def finish(self) -> None:
        """No more gradients come: what there is of units that had some is reduced, and nothing of the others."""
        for unit in {unit: None for unit, _ in self.trainable}:
            if self.pending.get(unit, 1):
                self._reduce(unit, self.sums.pop(unit, None))
        self.release()

    def _reduce(self, unit: str, grads: Gradients | None) -> None:
        if grads is None:
            grads = [None] * len(self.keys[unit])
        if self.watch is not None:
            self.watch(unit, grads)
        given = dict(zip(self.keys[unit], grads, strict=True))
        self.state = self.reduce(self.state, given, unit, last_microbatch=self.last)
