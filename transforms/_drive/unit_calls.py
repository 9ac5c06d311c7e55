"""How unit modules are called (`UnitCall`), also inside torch.func's transforms (`Levels`, `Visit`).

`Levels`: unit modules that are called inside torch.func's transforms, or with dual numbers, of their inputs.

A unit is gathered outside of all levels, once for each visit: a call of its module, or the passage of an inner backward
through what that call computed. Tangents and batches go through beside it: they are operations of the same visit.

    call                  Entry ──▶ the module's own code ──▶ Exit        at every level, down to the step's own graph
    inner backward        Exit  ──▶ a new visit: Entry ──▶ what the level recorded ──▶ Exit ──▶ Entry
    the step's backward   goes through all visits, the last one first; an Exit has the visit's units gathered again

So what an inner backward computes hangs on the step's graph as a call does, and may be differentiated again, at any
depth. Weights enter the step's graph once, at the call: their gradient is complete when that call's is.

`UnitCall`: how a unit module of a driven module is called.

    call of a unit module   unshard(state, units), weights into its slots, the module's own code, slots emptied

What the backward does when it comes to such a call is in `_drive.unit_uses`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
import torch.nn.modules.module as GLOBAL

from functional_fsdp import PackedWeight, ScheduleError
from functional_fsdp._seams import changed, local_part, ranged, torch_private

from .._compile.compile_units import Compiled, Compiler, own_class, refuse_shared
from .._modules import Leaf, UnitModule, map_tensors, on_copies, once_a_class, subclass, tensors_in
from .buffers import WriteWatch, clear, place, version
from .unit_uses import (
    Gradients,
    Inputs,
    Outputs,
    Trained,
    UnitUse,
    WeightPlaceholder,
    Weights,
    cast_to,
    dtypes_of,
    no_output,
    note_module,
    refuse_dtypes,
    refuse_second_order,
    traced_by,
)

if TYPE_CHECKING:
    from .driver import Driver


@contextmanager
def outside_levels() -> Iterator[tuple[bool, bool]]:
    """Within, no transform of torch's is under way, and gradients are recorded if the step's own graph records.

    Gives whether it does, and whether a level inside does so for itself.
    """
    before = torch.is_grad_enabled()
    modes = [level.prev_grad_mode() for level in torch_private.func_levels() if hasattr(level, "prev_grad_mode")]
    records = modes[0] if modes else before
    with torch_private.without_func_levels(), torch.set_grad_enabled(records):
        yield records, bool(modes)


class Levels:
    """What a driver keeps for levels of torch.func's, in one forward and its backward.

    Attributes:
        visits: of units that levels use; inner: those through which inner backwards go.
        lifts: what lies beside gathered weights for levels that are under way, outermost first; kept: for these, and
            for those that are over, to which a backward may come.
    """

    def __init__(self) -> None:
        self.visits: list[Visit] = []
        self.inner: list[Visit] = []
        self.lifts: list[Any] = []
        self.kept: list[Any] = []
        self._one_thread: Any = None

    def begin(self, visit: Visit) -> None:
        """A visit begins, through which inner backwards may go: these gather, and so run on this thread, also for a
        GPU."""
        self.visits.append(visit)
        if self._one_thread is None:
            self._one_thread = torch.autograd.set_multithreading_enabled(False)

    def leave(self, keep: Sequence[Any] = ()) -> None:
        """Inner backwards are over, but for passages through the unit calls in `keep`."""
        for visit in self.inner:
            if visit.unit_call not in keep:
                visit.left()
        self.inner = [visit for visit in self.inner if visit.unit_call in keep]

    def end(self) -> None:
        """Nothing runs any more."""
        if self._one_thread is not None:
            self._one_thread.__exit__(None, None, None)

    @contextmanager
    def lifting(self, lift: Any, units: Iterable[str]) -> Iterator[None]:
        """Within, weights enter a level in this way; these units are gathered already. What it gathers stays with them
        until all is over."""
        self.lifts.append(lift)
        self.kept.append(lift)
        try:
            lift.gather(tuple(units))
            yield
        finally:
            self.lifts.pop()

    def lift(self, tensors: list[torch.Tensor], leaves: Sequence[Leaf], copied: bool = False) -> list[torch.Tensor]:
        """Weights, as levels that are under way have them."""
        for lift in self.lifts:
            tensors = lift.lift(tensors, leaves, copied)
        return tensors

    def lent(self, t: torch.Tensor) -> bool:
        """Whether a tensor lies in bytes that levels which are under way have beside gathered weights."""
        return any(lift.lent(t) for lift in self.lifts)


class Visit(UnitUse):
    """A time for which a unit module's weights are there: a call, or an inner backward's passage through one.

    Attributes:
        call: the call that the weights came with; the visit itself, if it is one.
        passage: the newest passage of an inner backward through what this visit computed.
        anchor: of a call: a tensor [] that hangs on the newest `Exit` of its visits.
    """

    def __init__(self, driver: Driver, unit_call: UnitCall, trained: Trained, call: Visit | None = None) -> None:
        super().__init__(driver, unit_call, trained)
        self.call, self.session = call or self, driver.session
        self.passage: Visit | None = None
        self.anchor: torch.Tensor | None = None
        driver.levels.begin(self)

    def passed(self) -> Visit:
        """An inner backward comes to what this visit computed: its weights are needed."""
        driver, unit_call = self.driver, self.unit_call
        assert unit_call is not None
        if driver.session is not self.session:
            raise ScheduleError(
                f"a pullback through the module {unit_call.unit_module.path!r} was called after the loss function, or "
                "the function that T.apply was given, had returned: its weights are gone. Call it inside."
            )
        if self.passage is not None and self.passage in driver.levels.inner:
            return self.passage
        self.refuse_changed()
        visit = self.passage = Visit(driver, unit_call, {}, self.call)
        visit.parents += [around for around in self.parents if around not in driver.stack]
        visit.lent, visit.tensors, visit.off_plan = self.lent, self.tensors, self.off_plan
        driver.levels.leave(visit.parents)
        with outside_levels():
            driver.gather(unit_call.units, [*driver.busy, *visit.parents], self.off_plan)
            driver.regathered(visit)
        driver.levels.inner.append(visit)
        if not visit.in_backward:
            driver.calls.append(visit)
            driver.displaced.update(visit.off_plan)
        return visit

    def begin(self, grads: Gradients) -> Gradients:
        """The step's backward comes to this visit. It may be the only one of its call to which it comes."""
        if self.call is not self and self.call.idle and self not in self.driver.active:
            self.call.without_gradients()
        return super().begin(grads)

    def exit(self, tensors: Sequence[torch.Tensor | None]) -> Gradients:
        """Those that are there, out of the visit. The visits of a call before this one hang on it: what it computed may
        hang on what they did, and not on what came out of them."""
        there = [t for t in tensors if t is not None]
        if not there:
            return [*tensors]
        *passed, self.call.anchor = Exit.apply(self, at_this_level(self.call.anchor), *there)
        each = iter(passed)
        return [None if t is None else next(each) for t in tensors]

    def enter(self, tensors: Sequence[torch.Tensor | None]) -> Gradients:
        """Those that are there, into the visit."""
        there = [t for t in tensors if t is not None]
        each = iter(Entry.apply(self, *there) if there else ())
        return [None if t is None else next(each) for t in tensors]

    def left(self) -> None:
        """An inner backward has left the visit, perhaps by nothing that went in: by what other visits had kept."""
        with torch.enable_grad():
            (self.call.anchor,) = Exit.apply(self, at_this_level(self.call.anchor))
        if self.undo:
            with outside_levels():
                self.put_back()

    def clear(self) -> None:
        super().clear()
        self.anchor = self.passage = None


# ---------------------------------------------------------------- a call


def enter_levels(unit_call: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a unit module's own code with its weights, inside levels. See `UnitCall.enter`, which does so without."""
    driver = unit_call.driver
    slots = zip(unit_call.slots, unit_call.placeholders, strict=True)
    if any(held[name] is not placeholder for (held, name, _), placeholder in slots):
        raise ScheduleError(
            f"the module {unit_call.unit_module.path!r} was given weights of its own inside of a transform of torch's "
            "(functional_call): a driven model is differentiated by its inputs there. For derivatives by weights: "
            "T.hvp, or T.forward_backward(model, loss_fn, second_order=True)."
        )
    leave_passages(driver)
    with outside_levels() as (records, differentiates):
        use = UnitUse(driver, unit_call, {}, False)
        if records or differentiates:
            use = Visit(driver, unit_call, unit_call.trained_keys if records else {})
        unit_call.lend(use, [*driver.busy, *(visit.unit_call for visit in driver.levels.inner)])
        storages = use.storages()
    if driver.levels.lifts:
        use.tensors[:] = driver.levels.lift(use.tensors, unit_call.leaves)
    unit_call.form(use.tensors)
    given = [Input(t) for t in tensors_in((args, kwargs)) if t.is_floating_point() or t.is_complex()]
    run = partial(unit_call.run_with, use, function)
    passed = enter_inputs(use, given) if isinstance(use, Visit) and differentiates else {}
    out = on_copies(run, lambda t: passed.get(id(t), t), args, kwargs) if passed else run(args, kwargs)
    return leave(use if isinstance(use, Visit) else None, unit_call, storages, given, out)


def leave_passages(driver: Driver) -> None:
    """A module is called: inner backwards are over, unless it is one that calls it."""
    if driver.levels.inner and torch_private.autograd_node() is None:
        driver.levels.leave()


class Input:
    """A tensor that a unit module is given and that can be differentiated: as it came, and as it went in."""

    def __init__(self, t: torch.Tensor) -> None:
        self.came = self.went = t
        self.base = torch_private.base_of(t)
        self.version = self.version_now

    @property
    def version_now(self) -> int:
        return 0 if self.base.is_inference() else self.base._version


def at_this_level(t: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor as the innermost level that is under way may have it: levels that it was in may be over."""
    here = torch_private.func_interpreter()
    most = 0 if here is None else here.level()
    while t is not None and torch_private.is_wrapped(t) and not 0 < torch_private.level_of(t) <= most:
        t = torch_private.unwrapped(t)
    return t


def enter_inputs(visit: Visit, given: list[Input]) -> dict[int, torch.Tensor]:
    """Inputs through `Entry`, by the id of what came, for levels that differentiate by them."""
    levelled = {id(one.came): one for one in given if one.came is not one.base}
    if levelled:
        passed = visit.enter([one.came for one in levelled.values()])
        for one, t in zip(levelled.values(), passed, strict=True):
            assert t is not None
            one.went = t
    return {key: one.went for key, one in levelled.items()}


def leave(visit: Visit | None, unit_call: Any, storages: list[int], given: list[Input], out: Any) -> Any:
    """What a unit module returns: copied where it is a weight itself, and through `Exit`. An input that it returns
    stays that input."""
    driver, path = unit_call.driver, unit_call.unit_module.path
    if any(one.went is not one.came and one.version_now != one.version for one in given):
        raise ScheduleError(
            f"the module {path!r} changes an input in place, inside of a gradient of torch.func's (grad, vjp, jacrev, "
            "hessian), which cannot follow that into a unit. Have it work on a copy: .clone(), inplace=False."
        )
    same = {id(one.went): one.came for one in given}
    found: list[torch.Tensor] = []

    def look(t: torch.Tensor) -> torch.Tensor:
        if id(t) in same:
            return same[id(t)]
        if type(t) is WeightPlaceholder:
            t = t.value()
        base = torch_private.base_of(t)
        lent = base.untyped_storage()._cdata in storages if base.layout is torch.strided else False
        if lent or isinstance(t, PackedWeight) or driver.levels.lent(t):
            t = t.clone()
        if visit is not None and (t.is_floating_point() or t.is_complex()):
            found.append(t)
        return t

    out = map_tensors(look, out)
    if visit is None or not found:
        return out
    passed: list[Any] = visit.exit(found)
    bases = [torch_private.base_of(t) for t in passed]
    places = [t.untyped_storage()._cdata for t in bases]
    theirs = {one.base.untyped_storage()._cdata for one in given}
    if len({*places}) < len(places) or not theirs.isdisjoint(places):
        visit.shared += [(t, t._version) for t in bases if not t.is_inference()]
    new = {id(t): through for t, through in zip(found, passed, strict=True)}
    return map_tensors(lambda t: new.get(id(t), t), out)


# ---------------------------------------------------------------- what the levels' graphs see


class Boundary(torch.autograd.Function):
    """One side of a visit: tensors as they are, at every level."""

    @staticmethod
    def forward(visit: Visit, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([t.detach() for t in tensors])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.visit = inputs[0]
        ctx.set_materialize_grads(False)
        ctx.like = [(t.shape, t.dtype, t.device) for t in output]
        ctx.in_level = torch_private.func_interpreter() is not None  # whether it is a node of a level


def moved(ctx: Any, tangents: Sequence[torch.Tensor | None]) -> Gradients:
    """Tangents, with zeros where there is none: torch wants one for each output."""
    return [
        torch.zeros(shape, dtype=dtype, device=device) if t is None else t
        for t, (shape, dtype, device) in zip(tangents, ctx.like, strict=False)
    ]


class Exit(Boundary):
    """What comes out of a visit, and an anchor. Its backward runs before that of anything in the visit."""

    @staticmethod
    def forward(visit: Visit, *tensors: Any) -> tuple[torch.Tensor, ...]:
        passed = tensors[1:]  # the first one is the anchor before
        return *Boundary.forward(visit, *passed), torch.zeros((), device="cpu")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        Boundary.setup_context(ctx, inputs, output)
        if not ctx.in_level and not ctx.visit.in_backward:
            ctx.visit.call.outs.append(ctx)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if ctx.in_level:
            return None, None, *ctx.visit.passed().enter(grads[:-1])
        if torch.is_grad_enabled():
            refuse_second_order()
        return None, None, *ctx.visit.begin([*grads[:-1]])

    @staticmethod
    def jvp(ctx: Any, visit: None, anchor: None, *tangents: torch.Tensor | None) -> Any:
        return *ctx.visit.exit(moved(ctx, tangents)), torch.zeros((), device="cpu")

    @staticmethod
    def vmap(info: Any, dims: Any, visit: Visit, anchor: Any, *tensors: torch.Tensor) -> Any:
        return Exit.apply(visit, anchor, *tensors), (*dims[2:], None)


class Entry(Boundary):
    """What goes into a visit. Its backward runs when all gradients that leave the visit by it are there."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        visit = ctx.visit
        if not ctx.in_level:
            if not visit.in_backward and visit not in visit.driver.active:
                raise no_output(visit.unit_call)
            return None, *grads
        passage = visit.passage
        if passage is None or passage not in visit.driver.levels.inner:
            raise no_output(visit.unit_call)
        return None, *passage.exit(grads)

    @staticmethod
    def jvp(ctx: Any, visit: None, *tangents: torch.Tensor | None) -> Any:
        return tuple(ctx.visit.enter(moved(ctx, tangents)))

    @staticmethod
    def vmap(info: Any, dims: Any, visit: Visit, *tensors: torch.Tensor) -> Any:
        return Entry.apply(visit, *tensors), tuple(dims[1:])


forward_ad = torch_private.forward_ad

Slot = tuple[dict[str, Any], str]  # a dict of parameters, and a name in it
VERSION = attrgetter("_version")


class UnitCall:
    """Where a unit module is called. Its class is a subclass of its own one, made here, on the copy only."""

    def __init__(
        self,
        driver: Driver,
        module: nn.Module,
        unit_module: UnitModule,
        slots: dict[str, Slot],
        buckets: dict[Leaf, str],
        compiler: Compiler | None,
    ) -> None:
        self.driver, self.module, self.unit_module = driver, module, unit_module
        self.path, self.units = unit_module.path, unit_module.units
        self.leaves = list(dict.fromkeys(leaf for _, leaf in unit_module.leaves))
        number = {leaf: i for i, leaf in enumerate(self.leaves)}
        found = {
            (id(slots[path][0]), slots[path][1]): (*slots[path], number[leaf]) for path, leaf in unit_module.leaves
        }
        self.slots = [*found.values()]  # each once, also of a module that lies in this one at two paths
        self.placeholders = [held[name] for held, name, _ in self.slots]
        self.trained = [i for i, leaf in enumerate(self.leaves) if driver.trains(leaf)]
        self.frozen = len(self.trained) < len(self.leaves)  # whether some are
        self.trained_keys = driver.positions([self.leaves[i] for i in self.trained])
        firsts = {buckets[leaf]: i for i, leaf in reversed([*enumerate(self.leaves)]) if leaf in buckets}
        self.firsts = list(firsts.values())  # a leaf of each bucket: they share its storage and its version counter
        self.paths = {number[leaf]: path for path, leaf in reversed(unit_module.leaves)}
        self.rebound = [number[leaf] for path, leaf in unit_module.leaves if _rebinds(module, unit_module.path, path)]
        self.dtypes, self.inputs = dtypes_of(unit_module, driver.precisions)
        forms = {number[leaf]: slots[path][0][slots[path][1]].form for path, leaf in unit_module.leaves}
        self.forms = [(i, form) for i, form in forms.items() if form is not None]  # of DTensors
        self.watched = False  # whether it was called, and what it does to its weights was looked at
        self.inside = 0
        self.use: UnitUse | None = None  # that is under way, in no level
        self.own_class = type(module)
        self.compiled: Compiled | None = None
        self.within: list[nn.Module] = []  # what is compiled within what recomputes or moves
        if compiler and own_class(self.own_class) is not self.own_class:
            self.within = compiler.within(module, unit_module.path)
        elif compiler:
            self.compiled = Compiled(compiler, unit_module.path, self.own_class)
        module.__class__ = entered(self.own_class)
        module.__dict__["_unit_call"] = self

    def remove(self) -> None:
        """The module as it was."""
        self.module.__class__ = self.own_class
        del self.module.__dict__["_unit_call"]
        for part in self.within:
            del part.__dict__["_within"]

    def put(self, tensors: Sequence[torch.Tensor]) -> None:
        """Weights into the slots."""
        self.inside += 1
        if self.inside > 1:
            for held, name, i in self.slots:
                held[name] = tensors[i]
            return
        i = 0
        try:
            for (held, name, i), placeholder in zip(self.slots, self.placeholders, strict=True):
                if held[name] is not placeholder:
                    raise KeyError
                held[name] = tensors[i]
        except KeyError:
            raise self.refuse([i], "by assignment, outside the module that holds it") from None

    def form(self, tensors: list[torch.Tensor]) -> None:
        """Weights as the module's own code sees them: DTensors where it had such."""
        for i, form in self.forms:
            tensors[i] = form(tensors[i])

    def take(self) -> None:
        """Weights out of the slots, once for each `put`."""
        if self.inside == 1:
            for (held, name, _), placeholder in zip(self.slots, self.placeholders, strict=True):
                held[name] = placeholder
        self.inside -= 1  # last: if this is interrupted, `empty` begins again

    def empty(self) -> None:
        """Weights out of the slots, whatever happened."""
        if self.inside:
            self.inside = 1
            self.take()

    def refuse(self, which: Sequence[int], how: str) -> ScheduleError:
        """The error for weights that were changed, with the slots as they were."""
        for held, name, _ in self.slots:
            clear(self.module, held, name)
        self.inside = max(self.inside, 1)
        self.empty()
        return changed([self.paths[i] for i in which], how)

    def check(self, use: UnitUse) -> None:
        """After a call: the weights are what they were.

        Raises:
            ScheduleError: they were changed. If they are the state's own, it is of no more use.
        """
        lent, tensors = use.lent, use.tensors
        now = [*map(VERSION, use.firsts)]
        if now != use.versions:
            moved = [i for i, a, b in zip(self.firsts, use.versions, now, strict=True) if a != b]
            storages = {lent[i].untyped_storage()._cdata for i in moved}
            which = [i for i, t in enumerate(lent) if t.numel() and t.untyped_storage()._cdata in storages]
            node = use.node
            sure = [i for i in which if node is not None and i in self.trained and tensors[i].grad_fn is not node]
            where = f"the module {self.unit_module.path!r}" if self.unit_module.path else "the model"
            self.driver.spoilt(self.units, where)
            raise self.refuse(sure or which, f"in place, in {where}")
        i = 0
        try:
            for held, name, i in self.slots:
                if held[name] is not tensors[i]:
                    raise KeyError
        except KeyError:
            raise self.refuse([i], "by assignment") from None

    def watch(self, use: UnitUse, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`run`, looking at each operation, and at what the backward reads of weights."""
        with outside_levels():
            tensors = [*map(local_part, map(torch_private.base_of, use.tensors))]
            before = [(t, t.detach()) for t in tensors]
        weights = {path: tensors[i] for i, path in self.paths.items()}
        with WriteWatch(weights, lambda: self.driver.gathering), self.saves(use):
            out = self.run(function, args, kwargs)
        for i, (t, same) in enumerate(before):
            if i not in self.rebound and place(t) != place(same):
                with outside_levels():
                    t.data = same
                raise self.refuse([i], "by .data =")
        self.watched = not self.driver.debug
        return out

    def saves(self, use: UnitUse) -> AbstractContextManager[Any]:
        """Within, frozen weights are saved for the backward so that they are read while they are there. Trained ones
        get gradients, by which `Driver.begin` knows. Not where others have hooks for what is saved."""
        if not (use.given and self.frozen) or self.compiled is not None or torch_private.top_saved_hooks():
            return nullcontext()
        storages = {*use.storages()}

        def pack(t: torch.Tensor) -> Any:
            return t.detach(), version(t)

        def unpack(saved: Any) -> torch.Tensor:
            t: torch.Tensor = saved[0]
            if version(t) != saved[1]:
                raise RuntimeError(
                    f"a tensor of shape {tuple(t.shape)} that the module {self.unit_module.path!r} needs for its "
                    "gradients was modified by an inplace operation."
                )
            if t.layout is torch.strided and t.untyped_storage()._cdata in storages and use not in self.driver.active:
                raise no_output(self)
            return t

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def enter(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the module's own code with its weights."""
        driver = self.driver
        if self.inside:
            if driver.backward:  # a recomputation, within its own backward, with the weights that this has
                for call in driver.active:
                    if call.unit_call is self:
                        driver.note_recomputed(self.units, call.off_plan)
            out = self.run(function, args, kwargs)
            use = self.use
            hooks = self.module._forward_hooks or GLOBAL._global_forward_hooks
            if use is not None and use.records and function is self.own_class.forward and hooks:
                return _out(out, use)  # what hooks keep may be what the loss uses
            return out
        if driver.state is None:
            return function(self.module, *args, **kwargs)
        driver.refuse_tracer()
        if self.inputs is None:
            return self.use_weights(function, args, kwargs)
        return on_copies(partial(self.use_weights, function), partial(cast_to, self.inputs), args, kwargs)

    def use_weights(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Gather the weights and run the module's own code with them: a use."""
        driver = self.driver
        if torch_private.func_interpreter() is not None or forward_ad._current_level >= 0:
            return enter_levels(self, function, args, kwargs)
        if driver.levels.inner:
            leave_passages(driver)
        records = torch.is_grad_enabled()
        use = UnitUse(driver, self, self.trained_keys, records)
        if records:
            use.given = _differentiated((*args, *kwargs.values()))
        self.lend(use, driver.busy)
        if self.forms:
            self.form(use.tensors)
        self.use = use
        try:
            return _out(self.run_with(use, function, args, kwargs), use)
        finally:
            self.use, use.given = None, {}
            if use.in_backward:  # the driver does not know it, and its node and its weights hold each other
                use.clear()

    def lend(self, use: UnitUse, keep: Sequence[UnitCall]) -> None:
        """Gather the weights for a use: they go through the step's graph, if they train and it is recorded. And note
        the use, unless it is one of a recomputation, with nothing to come of it."""
        driver = self.driver
        off_plan = driver.gather(self.units, keep, driver.had_off_plan(self.units) if driver.session.fallback else None)
        weights = driver.weights
        tensors = [weights[unit][key] for unit, key in self.leaves]
        use.lent, use.tensors, use.off_plan = tuple(tensors), tensors, off_plan
        use.firsts = [tensors[i] for i in self.firsts]
        use.versions = [*map(VERSION, use.firsts)]
        if self.rebound:
            self.rebind(tensors, use.lent)
        if driver.backward:
            driver.note_recomputed(self.units, off_plan)
        if not use.records:
            return
        if use.trained:
            some = [tensors[i] for i in self.trained] if self.frozen else tensors
            through = Weights.apply(driver.places.token, use, *(driver.spread(some) if driver.samples else some))
            if self.frozen:
                for i, tensor in zip(self.trained, through, strict=True):
                    tensors[i] = tensor
            else:
                tensors[:] = through
        if not use.in_backward:
            driver.calls.append(use)
            driver.displaced.update(off_plan)
            use.node = tensors[self.trained[0]].grad_fn if use.trained else None

    def run_with(self, use: UnitUse, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the module's own code while it has these weights, and look at what it did to them."""
        driver = self.driver
        driver.stack.append(self)
        self.put(use.tensors)
        try:
            watch = not self.watched and not driver.backward
            out = self.watch(use, function, args, kwargs) if watch else self.run(function, args, kwargs)
            self.check(use)
        except Exception as error:  # say what it means, or where it was raised
            path = self.path
            refuse_shared(error, f"the module {path!r}" if path else "the model itself")
            refuse_dtypes(error, (args, kwargs), self.dtypes, f"the module {path!r}", self.module, path)
            note_module(error, path, (args, kwargs))
            raise
        finally:
            driver.stack.pop()
            self.take()
        return out

    def rebind(self, tensors: list[torch.Tensor], lent: Sequence[torch.Tensor]) -> None:
        """Weights that their module has point to a copy of its own: the same bytes, another version counter."""
        for i in self.rebound:
            tensors[i] = torch.empty(0, dtype=lent[i].dtype, device=lent[i].device)
            tensors[i].data = lent[i]

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The module's own code, compiled if so wished; its weights are in it."""
        code = function if self.compiled is None else partial(self.compiled.module, self.own_class, function)
        if torch_private.parametrize._cache_enabled:
            with torch_private.parametrized_anew():
                return code(self.module, *args, **kwargs)
        return code(self.module, *args, **kwargs)


def _rebinds(module: nn.Module, path: str, leaf: str) -> bool:
    """Whether a leaf is of a recurrent module, which on GPUs has its weights point to a copy of its own."""
    inner = leaf[len(path) + 1 if path else 0 :].rpartition(".")[0]
    return isinstance(module.get_submodule(inner), nn.RNNBase)


def _differentiated(values: Sequence[Any]) -> Inputs:
    """The tensors among inputs that gradients go through, and their versions."""
    found: Inputs = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                found[id(value)] = value, value._version
        elif isinstance(value, list | tuple | dict):
            found |= _differentiated([*value.values()] if isinstance(value, dict) else value)
    return found


def _out(out: Any, use: UnitUse) -> Any:
    """A unit module's output: copied where it is a weight itself, and through `Outputs` where it is differentiated. An
    input that it returns stays that input, since who changes one of them in place changes the other."""
    found: list[torch.Tensor] = []
    storages, given = use.storages(), use.given

    def look(t: torch.Tensor) -> torch.Tensor:
        if type(t) is WeightPlaceholder:
            t = t.value()
        if t.layout is torch.strided and (t.untyped_storage()._cdata in storages or isinstance(t, PackedWeight)):
            t = t.clone()
        if use.records and t.requires_grad:
            came = given.get(id(t))
            if came is None or came[1] != t._version:
                found.append(t)
        return t

    out = map_tensors(look, out)
    if not found:
        return out
    through = Outputs.apply(use, *found)
    if not use.in_backward:
        use.outs.append(through[0].grad_fn)
    if given or len(found) > 1:
        places = [t.untyped_storage()._cdata for t in found]
        theirs = {t.untyped_storage()._cdata for t, version in given.values() if t._version == version}
        if len({*places}) < len(places) or not theirs.isdisjoint(places):
            use.shared += [(t, t._version) for t in through]
    if found[0] is out:
        return through[0]
    passed = {id(t): new for t, new in zip(found, through, strict=True)}
    return map_tensors(lambda t: passed.get(id(t), t), out)


# ---------------------------------------------------------------- classes


@once_a_class
def entered(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a module with a unit call: `enter(function, args, kwargs)` of its `_unit_call` is called instead."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        unit_call = self._unit_call
        enter, watcher = unit_call.enter, unit_call.driver.watcher
        if torch_private.profiler._is_profiler_enabled:
            enter = ranged(enter, f"forward {unit_call.path}")
        if watcher is not None:
            enter = partial(watcher, f"forward {unit_call.path}", enter)
        return enter(cls.__call__, args, kwargs)

    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._unit_call.enter(cls.forward, args, kwargs)

    def __prepare_scriptable__(self: Any) -> Any:
        raise ScheduleError(traced_by("torch.jit.script"))

    return subclass(cls, __call__=__call__, forward=forward, __prepare_scriptable__=__prepare_scriptable__)
