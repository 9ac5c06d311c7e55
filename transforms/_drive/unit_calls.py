"""Unit calls: how a unit module of a driven module is called.

    call of a unit module   unshard(state, units), weights into its slots, the module's own code, slots emptied

What the backward does when it comes to such a call is in `_drive.unit_uses`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
import torch.nn.modules.module as GLOBAL

from functional_fsdp import PackedWeight, ScheduleError
from functional_fsdp._seams import changed, local_part, ranged, torch_private

from .._compile.compile_units import Compiled, Compiler, own_class
from .._modules.containers import on_copies
from .._modules.unit_modules import Leaf, UnitModule, map_tensors, once_a_class, subclass
from . import levels
from .buffers import WriteWatch, clear, place, version
from .placeholders import WeightPlaceholder, cast_to, dtypes_of, note_module, refuse_dtypes
from .unit_uses import Inputs, Outputs, UnitUse, Weights, no_output, traced_by

if TYPE_CHECKING:
    from .driver import Driver


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
        with levels.outside_levels():
            tensors = [*map(local_part, map(torch_private.base_of, use.tensors))]
            before = [(t, t.detach()) for t in tensors]
        weights = {path: tensors[i] for i, path in self.paths.items()}
        with WriteWatch(weights, lambda: self.driver.gathering), self.saves(use):
            out = self.run(function, args, kwargs)
        for i, (t, same) in enumerate(before):
            if i not in self.rebound and place(t) != place(same):
                with levels.outside_levels():
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
            return levels.entered(self, function, args, kwargs)
        if driver.levels.inner:
            levels.leave_passages(driver)
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
