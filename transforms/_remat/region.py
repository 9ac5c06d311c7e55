"""Regions: a forward whose backward runs it again, and what it keeps for that.

    DrawPoint, generators_in                   random numbers, which come again
    Product, KeepProducts, ReuseProducts       products that do not run again, while what is between them does
    Habits                                     what is known of a module or a function from its first calls
    PartRecord, RegionRecord                   what is kept of a forward
    RegionForward, Recomputation, Region       the forward, running it again, and one call of both

`DrawPoint`: where random numbers of a call stand, so that they come again in a recomputation.

    torch's default generators    of the host and of the device: `_seed.DrawPosition`
    other generators              that the call brings along: `generators_in`
    Python's and numpy's          of functions; of modules whose first call has drawn from them, since to ask takes long

Others are not known, as one in a global variable.

`generators_in`: those that a call brings along, torch's, numpy's and Python's, wherever they are at hand.

among what is given          arguments, also within containers
of a function                what is in its closure, its defaults and `partial`s, and what its method belongs to;
                             of functions in these, too
of a module                  its attributes, and its parts'

Products: matrix products and attention kernels of a region that do not run again, while what is between them does.

forward         [x] norm ─▶ product ─▶ gelu ─▶ product     autograd's hooks are the checkpoint's; of each product the
                                │                │         output is kept
its end                       kept            let go       nothing that comes after it is needed
recomputation   [x] norm ─▶ its output ─▶ gelu             below autograd, so what a product's backward needs of its
                                                           inputs is what was computed again

A product whose output is changed in place runs again, and so does one that draws random numbers.

`RegionForward`: its parts are noted, and what they save is no matter of torch's checkpoint.

hooks    ... the checkpoint's, which count │ none, or those of moves │ the checkpoint's ...
         ─── between parts ────────────────┴───── in a part ─────────┴─── between parts ───

`Recomputation`: a region's code runs again, and its parts return what they returned.

It finds inputs, the module's state and random numbers as the forward found them, and leaves the latter two as they are.
It may come before the forward is over, where a gradient is taken in it.

`Region`: one call of something that recomputes, and the calls in it that are not run again.

    forward     [x] norm ─▶ attn ─▶ + ─▶ norm ─▶ mlp ─▶ +          torch's checkpoint keeps x
                            └── a part: autograd keeps for it what it always does, and the region its output
    backward    [x] norm ─▶ its output ─▶ + ─▶ norm                as far as something is needed

The nodes of autograd's graph are those of the forward, so a part's own backward is in it already. That its output was
kept lets what comes after it be computed again. Where nothing that comes after it keeps a tensor, the output is let go.
"""

from __future__ import annotations

import pickle
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn as nn
from torch.utils.flop_counter import flop_registry

from functional_fsdp import ScheduleError
from functional_fsdp._seams import around_bound_calls, objects, torch_private, written_by

from .._drive.buffers import version
from .._drive.unit_uses import USES
from .._modules import contents_by_id, each_leaf, map_tensors, written
from .._seed import DrawPosition
from .module_state import ModuleState, StatePlace
from .moves import MoveGroup, storage_of
from .parts import (
    LOST,
    RUNNING,
    GivenInputs,
    KeptOutput,
    KeptPart,
    Owner,
    PartCall,
    Running,
    differentiable,
    running,
    storages_in,
)

MOST, DEEP = 64, 3  # items and levels of containers that are looked into


def _is_generator(x: Any) -> bool:
    if isinstance(x, torch.Generator | random.Random):
        return not isinstance(x, random.SystemRandom)  # which has no state
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.random.Generator | numpy.random.RandomState)


def state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def generators_in(value: Any, deep: int = DEEP) -> Iterator[Any]:
    """A generator, or those in a small container."""
    if _is_generator(value):
        yield value
    elif deep and isinstance(value, list | tuple | dict) and len(value) <= MOST:
        for x in value.values() if isinstance(value, dict) else value:
            yield from generators_in(x, deep - 1)


def generators_of(fn: Any, leaves: Iterable[Any]) -> list[Any]:
    """The generators among these leaves, and those that a function brings along. Each once."""
    found = [x for x in leaves if _is_generator(x)]
    _of_function(fn, found, set())
    return [*{id(x): x for x in found}.values()]


def _of_function(fn: Any, found: list[Any], seen: set[int]) -> None:
    if id(fn) in seen:
        return
    seen.add(id(fn))
    if isinstance(fn, partial):
        held = [fn.func, fn.args, fn.keywords]
    elif isinstance(fn, MethodType):
        held = [fn.__func__, *getattr(fn.__self__, "__dict__", {}).values()]
    elif isinstance(fn, FunctionType):
        closed_over = [value for cell in fn.__closure__ or () for value in objects.contents_of(cell)]
        held = [fn.__defaults__, fn.__kwdefaults__, getattr(fn, "__wrapped__", None), *closed_over]
    else:  # an object that can be called
        held = [] if isinstance(fn, type | torch.nn.Module) else [*getattr(fn, "__dict__", {}).values()]
    for value in held:
        if callable(value) and not _is_generator(value):
            _of_function(value, found, seen)
        else:
            found += generators_in(value)


class DrawSources:
    """From where a call may draw.

    Args:
        python: whether from Python's or numpy's generators.
    """

    def __init__(self, device: torch.device, generators: list[Any], python: bool) -> None:
        self.device, self.generators, self.python = device, generators, python

    def states(self) -> list[Any]:
        """Of all but the default generators."""
        return [*map(state_of, self.generators), *(_python_states() if self.python else ())]

    def set(self, states: list[Any]) -> None:
        for generator, state in zip(self.generators, states, strict=False):
            set_state(generator, state)
        if self.python:
            _set_python(states[len(self.generators) :])


class DrawPoint:
    """Where the random numbers of a call stand now."""

    def __init__(self, sources: DrawSources) -> None:
        self.sources = sources
        self.default = DrawPosition(sources.device)
        self.states = sources.states()

    def end(self) -> None:
        """Numbers that are drawn from now on do not count."""
        self.default.end()

    def keep(self) -> None:
        """Numbers may be drawn from here again, whether some were so far or not."""
        self.default.keep()

    def go(self) -> None:
        """Draw from here again. On a device within `resumed`."""
        self.default.go()
        self.sources.set(self.states)

    def python_moved(self) -> bool:
        """Whether Python's or numpy's generators stand elsewhere now."""
        then = self.states[len(self.sources.generators) :]
        return pickle.dumps(then) != pickle.dumps(_python_states())

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Within, numbers come from here on; afterwards generators go on where they were."""
        before = self.sources.states()
        with self.default.resumed():
            self.sources.set(self.states)
            try:
                yield
            finally:
                self.sources.set(before)


def _python_states() -> list[Any]:
    numpy = sys.modules.get("numpy")
    return [random.getstate(), numpy and numpy.random.get_state(legacy=False)]


def _set_python(states: list[Any]) -> None:
    random.setstate(states[0])
    if states[1]:
        sys.modules["numpy"].random.set_state(states[1])


pytree = torch_private.pytree


class Product:
    """One product of a forward: which operation, its outputs, and how many tensors had been saved before it."""

    def __init__(self, func: Any, out: Any, packed: int) -> None:
        self.func, self.packed = func, packed
        self.out: Any = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, out)
        outputs = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.storages = {*map(storage_of, outputs)}
        self.seen: list[tuple[torch.Tensor, int]] = []  # what a module returned of it, with versions
        self.outputs = [(weakref.ref(t), version(t)) for t in outputs]  # as they leave a module in other ways

    def let_go(self) -> None:
        """It will not be needed, or is not what it was."""
        self.out, self.storages, self.seen, self.outputs = None, set(), [], []

    def again(self) -> Any:
        """The outputs once more; None if they are not there as they were."""
        there = [*self.seen, *((t, before) for ref, before in self.outputs if (t := ref()) is not None)]
        if any(version(t) != before for t, before in there):
            self.let_go()
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, self.out)


class KeepProducts(torch_private.OperationMode):
    """Within, products of a region's forward are kept.

    Args:
        call: the forward, which has counted what was saved in it so far: `packed()`.
    """

    def __init__(self, call: Running, region: RegionRecord, packed: Callable[[], int]) -> None:
        super().__init__()
        self.call, self.region, self.packed = call, region, packed

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if RUNNING.calls[-1] is self.call:
            if func._schema.is_mutable:
                storages = {*map(storage_of, written_by(func, args, kwargs))}
                for one in self.region.products:
                    if one.storages & storages:
                        one.let_go()
            elif _is_product(func, args, kwargs):
                self.region.products.append(Product(func, out, self.packed()))
        return out

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self:
            out = fn(*args, **kwargs)
        for t in each_leaf(out):
            if isinstance(t, torch.Tensor):
                for one in self.region.products:
                    if storage_of(t) in one.storages:
                        one.seen.append((t.detach(), version(t)))
        return out


class ReuseProducts(torch_private.OperationMode):
    """Within, products of a region's recomputation are what they were in its forward."""

    def __init__(self, call: Running, region: RegionRecord) -> None:
        super().__init__()
        self.call, self.region, self.at = call, region, 0

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        if RUNNING.calls[-1] is not self.call or not _is_product(func, args, kwargs):
            return func(*args, **kwargs)
        products, found = self.region.products, None
        if self.at < len(products):
            product = products[self.at]
            if product.func is not func:
                raise ScheduleError(
                    f"remat: when its module was computed again, product {self.at + 1} was {func}, and in the forward "
                    f"{product.func}. Have the module do the same each time."
                )
            found = product.again()
        self.at += 1
        return func(*args, **kwargs) if found is None else found

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self:
            return fn(*args, **kwargs)


def in_products(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call of a module whose products are kept, within what recomputes. Elsewhere it is what it is."""
    call = RUNNING.calls[-1] if RUNNING.calls else None
    if call is None or torch_private.func_interpreter() is not None:
        return fn(*args, **kwargs)
    return call.products.run(fn, args, kwargs)


def _is_product(func: Any, args: Any, kwargs: Any) -> bool:
    product, place = _kind(func)
    if place is None:
        return product
    dropped = kwargs.get("dropout_p", args[place] if place < len(args) else 0.0)
    return product and not dropped


@lru_cache(maxsize=1024)
def _kind(func: Any) -> tuple[bool, int | None]:
    """Whether an operation is a product, and at which place it is given the share that it drops."""
    name = func.__name__
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("dropout_p") if "dropout_p" in names else None
    draws = torch.Tag.nondeterministic_seeded in func.tags and place is None
    if draws or func._schema.is_mutable or "backward" in name:
        return False, None
    return func._overloadpacket in flop_registry or "attention" in name or name.startswith("_grouped_mm"), place


class Habits:
    """Of a module, or a function.

    Attributes:
        owner: of its host buffers.
        keeps: the share of what it keeps, of what it would if it did not recompute, where that is known.
        python: by whether it trains, whether it draws random numbers from Python or numpy.
    """

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.keeps = 0.0
        self.python: dict[bool, bool] = {}
        self.holders: dict[bool, list[tuple[nn.Module, str]]] = {}  # attributes that hold generators

    def generators(self, module: nn.Module) -> list[Any]:
        """Those that a module holds, or its parts do."""
        if module.training not in self.holders:
            self.holders[module.training] = [
                (part, name) for part in module.modules() for name, value in vars(part).items()
                if any(generators_in(value))
            ]  # fmt: skip
        held = (vars(part).get(name) for part, name in self.holders[module.training])
        return [generator for value in held for generator in generators_in(value)]


class PartRecord:
    """One call of a part.

    Args:
        output: what it returned, and what it made of `places`, the module's state.
        fresh: whether the output lies where nothing else does.
        packed: how many tensors had been saved when it was over, to be computed again.
        before, after: from where random numbers were drawn before it, and are after it.
    """

    def __init__(
        self, call: PartCall, output: KeptOutput, places: list[StatePlace], fresh: bool, packed: int,
        before: DrawPoint | None, after: DrawPoint | None,
    ) -> None:  # fmt: skip
        self.part, self.who = call.part, call.who
        self.output, self.places, self.fresh, self.packed = output, places, fresh, packed
        self.before, self.after = before, after
        self.writes = False  # it changes what it is given in place
        self.states: list[ModuleState] = []  # of modules that it called by `bind`

    def run_again(self) -> None:
        """It changes its input in place, or others have changed its output: recomputations have to run it."""
        self.output.let_go()
        self.part.copies = self.fresh  # from the next call on
        if self.before is not None:
            self.before.keep()


class RegionRecord:
    """One call of `fn`.

    Args:
        module: whose code `fn` is.
        generators: from which it draws, beside the default ones; None if random numbers do not come again.

    Attributes:
        state: of the module. trains: whether it is in training mode. start: where random numbers stood. parts: the
            calls of parts, in their order. products: those that are kept, in their order. moves: what moves what parts
            keep. over: whether the forward is.
    """

    def __init__(
        self, fn: Callable[..., Any], module: nn.Module | None, habits: Habits,
        generators: list[Any] | None, given: GivenInputs,
    ) -> None:  # fmt: skip
        self.fn, self.habits, self.generators, self.given = fn, habits, generators, given
        self.state = ModuleState(module) if module is not None else None
        self.states: list[ModuleState] = []  # of modules that were called by `bind`, outside of parts
        self.trains = module is None or module.training
        self.start: DrawPoint | None = None
        self.parts: list[PartRecord] = []
        self.products: list[Product] = []
        self.moves: MoveGroup | None = None
        self.over = False

    def draws(self) -> DrawPoint | None:
        """Where random numbers stand now, if they come again."""
        if self.generators is None:
            return None
        python = self.state is None or self.habits.python.get(self.trains, True)  # a function may be another each time
        return DrawPoint(DrawSources(self.given.device, self.generators, python))

    def taken(self) -> set[int]:
        """The storages of inputs and buffers, which others keep."""
        buffers = self.state.buffers() if self.state is not None else ()
        return self.given.storages.union(map(storage_of, buffers))

    def moves_of(self, part: KeptPart) -> MoveGroup | None:
        """What moves what a part keeps, if that is its fate."""
        if part.fate != "offload":
            return None
        if self.moves is None:
            self.moves = MoveGroup(self.habits.owner.buffers, self.given.device, self.taken())
        return self.moves

    def forget(self) -> None:
        """The forward has failed: let go what its graph holds."""
        self.parts, self.products, self.states, self.moves, self.start = [], [], [], None, None


class RegionForward:
    """The forward of a region.

    Attributes:
        packed: how many tensors were saved so far, to be computed again.
        draws: where random numbers stood when it began, or when the last part was over.
    """

    def __init__(self, region: RegionRecord) -> None:
        self.region = region
        self.packed = 0
        self.products: Any = KeepProducts(self, region, lambda: self.packed)
        self.draws: DrawPoint | None = None
        self.hooks: Any = None
        self.taken: set[int] = set()  # storages of inputs, buffers and earlier outputs
        self.around: Any = None  # what was around bound calls before

    def run(self, args: Any, kwargs: Any) -> Any:
        region = self.region
        self._count()
        region.start = self.draws = region.draws()
        try:
            if region.state is not None:
                region.state.begin()
            bound = around_bound_calls(partial(self._bound, region.states))
            with torch_private.parametrized_anew(), running(self), bound as self.around:
                out = region.fn(*args, **kwargs)
            if region.state is not None:
                region.state.end()
            region.given.end()
            self._end_draws()
            self._keep_outputs()
        except BaseException:
            region.forget()
            raise
        finally:
            self.hooks = self.around = self.products = None  # they hold this
        return out

    @contextmanager
    def _bound(self, states: list[ModuleState], module: nn.Module) -> Iterator[None]:
        """A call of a module by `bind`: note in `states` what it finds in it, and what it changes."""
        with self.around(module) if self.around is not None else nullcontext():
            state = ModuleState(module)
            states.append(state)
            state.begin()
            yield
            state.end()

    def _count(self) -> None:
        """Have the checkpoint's hooks count what they are given."""
        found = torch_private.top_saved_hooks()
        assert found is not None
        pack, unpack = found
        given = self.region.given

        def counted(t: torch.Tensor) -> Any:
            self.packed += 1
            return pack(t)

        def computed_again(kept: Any) -> Any:
            try:
                return unpack(kept)
            except RuntimeError as error:  # the recomputation's own, or the checkpoint's, which compares what it saves
                given.refuse_caches(error)
                raise

        self.hooks = counted, computed_again
        torch_private.pop_saved_hooks()
        torch_private.push_saved_hooks(*self.hooks)

    def _end_draws(self) -> None:
        region = self.region
        if self.draws is not None and region.start is not None:
            self.draws.end()
            if region.trains not in region.habits.python:
                region.habits.python[region.trains] = region.start.python_moved()

    def _keep_outputs(self) -> None:
        """Of the outputs of parts keep what a recomputation will need."""
        region = self.region
        for record in region.parts:
            if record.packed == self.packed:  # it stops before
                record.output.let_go()
            elif record.writes or record.output.changed():
                record.run_again()
            else:
                record.output.keep(region.moves_of(record.part))
        for product in region.products:
            if product.packed == self.packed:
                product.let_go()
        if region.moves is not None:
            region.moves.end()
        elif region.given.device in USES:
            USES[region.given.device].recomputes(region.habits.keeps)

    # ---- parts

    def called(self, call: PartCall) -> Any:
        """Run a part, and note what came of it."""
        region = self.region
        if self.draws is not None:
            self.draws.end()
        moves = region.moves_of(call.part)
        before = region.state.look(call.module) if region.state is not None else None
        given = [(t, version(t)) for t in each_leaf((call.args, call.kwargs)) if isinstance(t, torch.Tensor)]
        containers = contents_by_id(call.args, call.kwargs)
        states: list[ModuleState] = []
        bound = around_bound_calls(partial(self._bound, states))
        with running(None), self._outside(), bound, moves.moving(call.module) if moves is not None else nullcontext():
            out = call()
        places = [found.place for found in before.changed()] if before is not None else []
        record = self._note(call, out, places)
        record.writes = bool(written(containers)) or any(version(t) != then for t, then in given)
        record.states = states
        return out

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """Inside, the checkpoint's hooks are not there. If others are on top of them, those have what is saved."""
        top = torch_private.top_saved_hooks()
        if top is None or top[0] is not self.hooks[0]:
            yield
            return
        torch_private.pop_saved_hooks()
        try:
            yield
        finally:
            torch_private.push_saved_hooks(*self.hooks)

    def _note(self, call: PartCall, out: Any, places: list[StatePlace]) -> PartRecord:
        if not self.region.parts:
            self.taken = self.region.taken()
        storages = storages_in(out)
        fresh = not storages & (self.taken | storages_in((call.args, call.kwargs)))
        self.taken |= storages
        output = KeptOutput((out, [place.copy() for place in places]), copies=call.part.copies and fresh)
        before, self.draws = self.draws, self.region.draws()
        record = PartRecord(call, output, places, fresh, self.packed, before, self.draws)
        self.region.parts.append(record)
        return record


class Recomputation:
    """One recomputation of a region."""

    def __init__(self, region: RegionRecord) -> None:
        self.region = region
        self.at = 0  # which of the forward's calls of parts comes next
        self.products: Any = ReuseProducts(self, region)

    def run(self, args: Any, kwargs: Any) -> Any:
        region = self.region
        made = region.given.again()
        args, kwargs = made(args), made(kwargs)
        if region.moves is not None:
            region.moves.arrive()
        draws = region.start.resumed() if region.start is not None else nullcontext()
        state = region.state.resumed(made.of) if region.state is not None else nullcontext()
        with running(self), draws, state, self._bound(region.states), torch_private.parametrized_anew():
            try:
                return region.fn(*args, **kwargs)
            finally:
                self.products = None  # it holds this

    @staticmethod
    def _bound(states: list[ModuleState]) -> AbstractContextManager[Any]:
        """Within, calls of modules by `bind` find in them what the forward's calls found, one after the other."""
        left = iter(states)

        def found(module: nn.Module) -> AbstractContextManager[None]:
            state = next(left, None)
            if state is None:  # the forward has not come so far
                return nullcontext()
            if state.module is not module:
                raise ScheduleError(
                    f"remat: a {type(module).__name__} was called by bind when its function was computed again, and in "
                    f"the forward it was a {type(state.module).__name__}. Have the function do the same each time."
                )
            return state.resumed()

        return around_bound_calls(found)

    def called(self, call: PartCall) -> Any:
        """A part's output once more. If it is not there, the part is run again."""
        record = self._next(call)
        if record is None:  # the forward has not come so far
            return _run(call)
        again = record.output.again(call)
        if again is LOST:
            with self._bound(record.states):
                out = differentiable(_run(call), record.output.trains, call)
        else:
            out, values = again
            for place, value in zip(record.places, values, strict=True):
                place.put(value)
        if record.after is not None:
            record.after.go()
        return out

    def _next(self, call: PartCall) -> PartRecord | None:
        parts = self.region.parts
        if self.at == len(parts):
            if not self.region.over:
                return None
            raise ScheduleError(
                f"remat: a part was called for the {self.at + 1}th time when its module was computed again, and in the "
                f"forward there were {self.at} calls. Have the module do the same each time."
            )
        record = parts[self.at]
        self.at += 1
        if record.who is not call.who:
            raise ScheduleError(
                f"remat: when its module was computed again, the {self.at}th part that was called was "
                f"{_name(call.who)}, and in the forward it was {_name(record.who)}. Have the module do the same each "
                "time."
            )
        return record


def _run(call: PartCall) -> Any:
    """Run a part as its forward did, with gradients, since some kernels are others without. Its graph is let go."""
    with running(None), torch.autograd.graph.saved_tensors_hooks(lambda t: (t.detach(), t._version), MoveGroup.unpack):
        out = call()
    return map_tensors(torch.Tensor.detach, out)


def _name(who: Any) -> str:
    return f"a {type(who).__name__}" if isinstance(who, torch.nn.Module) else getattr(who, "co_name", repr(who))


class Region:
    """One call of `fn`, for torch's checkpoint: called once for the forward, and again for each recomputation.

    Args:
        module: whose code `fn` is.
        habits: of it, or of the function.
        generators: from which it draws, beside the default ones; None if random numbers do not come again.
    """

    def __init__(
        self, fn: Callable[..., Any], module: nn.Module | None, habits: Habits,
        generators: list[Any] | None,
    ) -> None:  # fmt: skip
        self.fn, self.module, self.habits, self.generators = fn, module, habits, generators
        self.record: RegionRecord | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.fn(*args, **kwargs)
        if self.record is not None:
            try:
                return Recomputation(self.record).run(args, kwargs)
            except RuntimeError as error:  # checkpoint ends it by an exception, of which TorchScript loses all but this
                if str(error).rstrip().endswith("RuntimeError:"):
                    return None
                raise
        given = GivenInputs(args, kwargs)
        self.record = RegionRecord(self.fn, self.module, self.habits, self.generators, given)
        out = RegionForward(self.record).run(args, kwargs)
        self.record.over = True
        return out
