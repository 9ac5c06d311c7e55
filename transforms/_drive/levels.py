"""Levels: unit modules that are called inside torch.func's transforms, or with dual numbers, of their inputs.

A unit is gathered outside of all levels, once for each visit: a call of its module, or the passage of an inner backward
through what that call computed. Tangents and batches go through beside it: they are operations of the same visit.

    call                  Entry ──▶ the module's own code ──▶ Exit        at every level, down to the step's own graph
    inner backward        Exit  ──▶ a new visit: Entry ──▶ what the level recorded ──▶ Exit ──▶ Entry
    the step's backward   goes through all visits, the last one first; an Exit has the visit's units gathered again

So what an inner backward computes hangs on the step's graph as a call does, and may be differentiated again, at any
depth. Weights enter the step's graph once, at the call: their gradient is complete when that call's is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from functional_fsdp import PackedWeight, ScheduleError
from functional_fsdp._seams import torch_private

from .._modules.containers import on_copies
from .._modules.unit_modules import Leaf, map_tensors, tensors_in
from .placeholders import WeightPlaceholder
from .unit_uses import Gradients, Trained, UnitUse, no_output, refuse_second_order

if TYPE_CHECKING:
    from .driver import Driver
    from .unit_calls import UnitCall


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


def entered(unit_call: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
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
