"""Chain: stages read off a module whose units run one after another, and the loss function of the third way.

    model, loss_fn      x ─▶ embed ─▶ · ─▶ blocks.0 ─▶ · ─▶ blocks.1 ─▶ · ─▶ head ─▶ · ─▶ loss
    stage of blocks.1   x ─▶ (no value) · ─▶ h ──────▶ · ─▶ blocks.1 ─▶ as far as here
    the dots            what the module's own code, and the loss function, do between units

A stage runs the loss function on a private copy of the module. Calls of units before are skipped: the last of them
returns what the stage is given, those before it a `NoValue`, which has a shape and no elements. What is made of one has
none either, so that a module that is no chain (its later code uses what an earlier unit returned) is found out.

Stages: a model that was cut into pure functions by hand, one for each unit, and the walk over them.

    {"embed": fn, "blocks.0": fn, ..., "head": fn}      fn(weights, h, batch) -> h, in order of use

    forward     h = None ──embed──▶ h ──blocks.0──▶ h ── ... ──head──▶ loss
    backward    the other way round

The first stage gets None for `h`; from stage to stage goes a pytree of floating tensors, and the last returns the loss.
A key that is a tuple of units is a stage that uses them at once, `weights` is then `{unit: weights}`; a tied leaf is a
unit that several stages name. Of a module that is a chain they are made by `_drive.chain`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn as nn

from functional_fsdp import Layout, ScheduleError, SpecError, State, TreeError, release, unshard
from functional_fsdp._seams import torch_private
from functional_fsdp.extend import Session, skeleton_of

from .._modules.unit_modules import UnitModule, find_unit_modules, slots_of
from .._seed import seeded
from .buffers import Buffers
from .placeholders import cast_inputs, dtypes_of, precisions
from .settings import Settings
from .unit_calls import entered

__all__ = ["Chain", "Key", "Stage", "Stages", "dims", "rows", "stages_of"]

Key = str | tuple[str, ...]
Weights = dict[str, dict[str, torch.Tensor]]  # by unit and key


class Stage:
    """One function, and the units whose weights it gets.

    Attributes:
        opens: of its units, those that no earlier stage uses: in the backward their gradients are complete here.
    """

    def __init__(self, key: Key, fn: Callable[..., Any]) -> None:
        self.key = key
        self.fn = fn
        self.units = (key,) if isinstance(key, str) else tuple(key)
        if len(set(self.units)) != len(self.units):
            raise SpecError(f"stages: the key {key!r} names a unit twice; expected each once.")
        self.opens: tuple[str, ...] = ()

    def gather(self, state: State) -> tuple[State, Weights]:
        if isinstance(self.key, str):
            state, w = unshard(state, self.key)
            return state, {self.key: w}
        return unshard(state, self.units)

    def release(self, state: State) -> State:
        return release(state, self.key)

    def given(self, w: Weights) -> Any:
        """Weights as the function gets them."""
        return w[self.key] if isinstance(self.key, str) else w

    def run(self, w: Weights, trained: Weights, h: Any, batch: Any) -> Any:
        """The function of these weights, some of which are replaced: those that are differentiated."""
        return self.fn(self.given({unit: {**w[unit], **trained[unit]} for unit in w}), h, batch)


class Stages:
    """All of them, in order of use. `verb` is whose they are, for errors."""

    def __init__(self, verb: str, stages: Mapping[Any, Callable[..., Any]]) -> None:
        if not isinstance(stages, Mapping) or not stages or not all(map(callable, stages.values())):
            raise TreeError(
                f"{verb}: stages is {stages!r}; expected {{unit: function of (weights, h, batch)}}, at least 1, in "
                "order of use."
            )
        self.verb = verb
        self.put([Stage(key, fn) for key, fn in stages.items()])

    def put(self, stages: list[Stage]) -> None:
        """These are the stages."""
        self.forward = stages
        seen: set[str] = set()
        for stage in self.forward:
            stage.opens = tuple(unit for unit in stage.units if unit not in seen)
            seen.update(stage.units)
        self.backward = self.forward[::-1]
        self.checked: Hashable = None

    @contextmanager
    def running(self, state: State) -> Iterator[Session]:
        """Within, a walk goes on from this state.

        Raises:
            ScheduleError: a unit that is not there, or one that trains and that no stage uses.
        """
        layout = state.layout
        if layout is not self.checked:
            used = {unit for stage in self.forward for unit in stage.units}
            trains = [unit.name for unit in layout.units if unit.trained]
            unknown = [unit for unit in used if unit not in layout.by_name]
            missing = [unit for unit in trains if unit not in used]
            if unknown or missing:
                what = f"there is no unit {unknown[0]!r}" if unknown else f"no stage uses the unit {missing[0]!r}"
                raise ScheduleError(
                    f"{self.verb}: {what}. Give a stage for each of the {len(trains)} units that train: "
                    f"{', '.join(map(repr, trains))}."
                )
            self.checked = layout
        yield Session(state, self.verb)

    def samples(self, batch: Any) -> Any:
        """A batch [B, ...] as vmap takes it: of each sample what the functions are given."""
        return batch

    def trained(self, state: State, w: Weights) -> Weights:
        """Of weights, those that train."""
        units = state.layout.by_name
        return {
            name: {
                key: some[key]
                for key, shape in zip(units[name].keys, units[name].trains, strict=True)
                if shape is not None
            }
            for name, some in w.items()
        }


def dims(tree: Any) -> Any:
    """`in_dims` of vmap: 0 for each tensor with a dim, None for all else."""
    return torch_private.pytree.tree_map(lambda t: 0 if isinstance(t, torch.Tensor) and t.dim() else None, tree)


def rows(verb: str, *trees: Any) -> int:
    """How many samples there are: the size of dim 0, the same for all tensors that have one.

    Raises:
        TreeError: there is none, or two that differ.
    """
    sizes = [tuple(t.shape) for t in torch_private.pytree.tree_leaves(trees) if isinstance(t, torch.Tensor) and t.dim()]
    if not sizes:
        raise TreeError(f"{verb}: nothing in the batch has a leading dim of samples. Give tensors of shape [B, ...].")
    for shape in sizes:
        if shape[0] != sizes[0][0]:
            raise TreeError(
                f"{verb}: tensors of the batch have shapes {sizes[0]} and {shape}; expected the same number of samples "
                f"in dim 0, got {sizes[0][0]} and {shape[0]}."
            )
    if not sizes[0][0]:
        raise TreeError(f"{verb}: a batch without samples: a tensor of shape {sizes[0]}; expected at least 1 in dim 0.")
    return sizes[0][0]


pytree = torch_private.pytree
ABSENT = object()


def stages_of(verb: str, model: Any, loss_fn: Callable[..., Any] | None) -> Stages:
    """The walk over stages that are given, or over those of a module."""
    if isinstance(model, nn.Module):
        if not callable(loss_fn):
            raise TreeError(
                f"{verb}(model, loss_fn): loss_fn is {loss_fn!r}; with a module expected a function of (model, batch) "
                "that returns the loss, as for forward_backward."
            )
        return Chain(verb, model, loss_fn)
    if loss_fn is not None:
        raise TreeError(
            f"{verb}(stages, loss_fn): expected a module, got a {type(model).__name__}. Of stages that are cut by hand "
            "the last returns the loss: leave loss_fn out."
        )
    return Stages(verb, model)


class NoValue(torch.Tensor):
    """What a unit returned that was skipped: a tensor on the meta device that says it is on the other's. What is
    computed from one is one."""

    home: torch.device  # of the tensor that it stands for

    @staticmethod
    def like(shape: tuple[int, ...], dtype: torch.dtype, home: torch.device) -> NoValue:
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(NoValue)
        made.home = home
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        home = next(t.home for t in given if isinstance(t, cls))
        if getattr(getattr(func, "__self__", None), "__name__", "") == "device":
            return home

        def bare(t: torch.Tensor) -> torch.Tensor:
            with torch_private.NoTorchFunction():
                return t.as_subclass(torch.Tensor) if isinstance(t, cls) else t.to("meta")

        def without(t: torch.Tensor) -> torch.Tensor:
            made = t.as_subclass(cls)
            made.home = home
            return made

        args, kwargs = pytree.tree_map_only(torch.Tensor, bare, (args, kwargs or {}))
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("meta"), (args, kwargs))
        with torch_private.NoTorchFunction():
            return pytree.tree_map_only(torch.Tensor, without, func(*args, **kwargs))


class Reached(BaseException):
    """A stage's unit has been called: the rest of the loss function is for later stages."""

    def __init__(self, out: Any) -> None:
        self.out = out


class Link:
    """A unit module of the copy, and its number in the chain. It is called as a `UnitCall` is."""

    watcher = None

    def __init__(self, chain: Chain, number: int, unit_module: UnitModule, state: State) -> None:
        self.chain, self.number = chain, number
        self.path, self.leaves = unit_module.path, unit_module.leaves
        self.units = unit_module.units
        self.inputs = dtypes_of(unit_module, precisions(state))[1]
        self.module = chain.model.get_submodule(self.path)
        self.own_class = type(self.module)
        self.inside = False
        self.returned: Any = None  # in this walk, without values
        self.kept: list[tuple[dict[str, Any], str, Any]] = []  # attributes that hold tensors: what was there
        self.module.__class__ = entered(self.own_class)
        self.module.__dict__["_unit_call"] = self

    def remove(self) -> None:
        """The module as it was."""
        self.module.__class__ = self.own_class
        del self.module.__dict__["_unit_call"]

    def enter(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of the module in a stage: skipped, the one that the stage is about, or too late."""
        chain = self.chain
        if self.inside or chain.target < 0:
            return function(self.module, *args, **kwargs)
        if self.number != chain.called:
            chain.refuse(f"{self.path!r} was called after {chain.called} other units; as they lie in it, it is number "
                         f"{self.number + 1}")  # fmt: skip
        chain.called += 1
        if self.number < chain.target:
            return chain.given if self.number == chain.target - 1 else self.returned
        chain.refuse_missing((args, kwargs), f"{self.path!r} was called with")
        if self.inputs is not None:
            args, kwargs = cast_inputs(args, kwargs, self.inputs)
        begin = len(self.path) + 1 if self.path else 0
        tensors = {path: buffer.clone() for path, buffer in self.module.named_buffers(remove_duplicate=False)}
        tensors |= {path[begin:]: chain.weights[unit][key] for path, (unit, key) in self.leaves}
        self.inside = True
        self._put_back()
        before = [(part, {**part.__dict__}) for part in self.module.modules()]
        try:
            lent = torch_private.reparametrize_module(self.module, tensors, tie_weights=False, stack_weights=True)
            with lent, torch_private.parametrized_anew():
                out = function(self.module, *args, **kwargs)
        finally:
            self.inside = False
            self.kept = [one for part, then in before for one in _kept(part, then)]
        if self.number == len(chain.links) - 1:
            return out
        for leaf in pytree.tree_leaves(out):
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
                what = leaf.dtype if isinstance(leaf, torch.Tensor) else type(leaf).__name__
                chain.refuse(f"{self.path!r} returned a {what}; from unit to unit go floating tensors")
        self.returned = pytree.tree_map(_no_value, out)
        for held, name, _ in self.kept:
            held[name] = pytree.tree_map_only(torch.Tensor, _no_value, held[name])
        raise Reached(out)

    def end(self) -> None:
        """The walk is over: nothing of it stays."""
        self._put_back()
        self.returned = None

    def _put_back(self) -> None:
        """Attributes as they were before the module was called in this walk."""
        for held, name, was in self.kept:
            if was is ABSENT:
                held.pop(name, None)
            else:
                held[name] = was
        self.kept = []


def _no_value(t: torch.Tensor) -> NoValue:
    return NoValue.like(tuple(t.shape), t.dtype, t.device)


def _kept(part: nn.Module, before: dict[str, Any]) -> list[tuple[dict[str, Any], str, Any]]:
    """The attributes in which a module keeps tensors that it did not before, with what was there. Later stages would
    take them for constants."""
    return [
        (part.__dict__, name, before.get(name, ABSENT))
        for name, value in part.__dict__.items()
        if value is not before.get(name, ABSENT)
        and any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
    ]


class Chain(Stages):
    """The stages of a module; see the top of this file. Its batches for one sample are batches of one."""

    def __init__(self, verb: str, model: nn.Module, loss_fn: Callable[..., Any]) -> None:
        self.verb, self.loss_fn = verb, loss_fn
        self.model = skeleton_of(model)
        self.settings = Settings(verb, model, self.model)
        self.buffers = Buffers(self.model, "local")
        self.layout: Layout | None = None
        self.links: list[Link] = []
        self.state: Any = None  # that the walk began with
        self._rest()

    def _rest(self) -> None:
        """No stage runs."""
        self.target, self.called = -1, 0  # which link the stage is about, and how many were called
        self.given: Any = None  # what the stage was given
        self.weights: Weights = {}

    @contextmanager
    def running(self, state: State) -> Iterator[Session]:
        self.settings.follow()
        if state.layout is not self.layout:
            self._cut(state)
        self.state = state
        self.buffers.lend(state, state.count.device, collects=False)
        try:
            with super().running(state) as session:
                yield session
        finally:
            self.buffers.restore()
            self.state = None
            for link in self.links:
                link.end()

    def samples(self, batch: Any) -> Any:
        """[B, ...] -> [B, 1, ...]: of each sample a batch."""
        return pytree.tree_map_only(torch.Tensor, lambda t: t.unsqueeze(1) if t.dim() else t, batch)

    def _cut(self, state: State) -> None:
        for link in self.links:
            link.remove()
        self.links, self.layout = [], None
        unit_modules = find_unit_modules(self.model, state.layout)
        held = {path for unit_module in unit_modules for path, _ in unit_module.leaves}
        if loose := [path for path, _, _ in slots_of(self.model) if path not in held]:
            self.refuse(f"the weight {loose[0]!r} is used by a module that holds several units")
        self.links = [Link(self, i, unit_module, state) for i, unit_module in enumerate(unit_modules)]
        keys = [link.units if len(link.units) > 1 else link.units[0] for link in self.links]
        self.put([Stage(key, partial(self._run, i)) for i, key in enumerate(keys)])
        self.layout = state.layout

    def _run(self, number: int, w: Any, h: Any, batch: Any) -> Any:
        """A stage: the loss function, as far as this link's output; of the last one, as far as the loss."""
        key = self.forward[number].key
        self.weights = {key: w} if isinstance(key, str) else w
        self.target, self.given = number, h
        try:
            with seeded(self.state, number):  # in each pass the same
                out = self.loss_fn(self.model, batch)
        except Reached as reached:
            return reached.out
        except (RuntimeError, NotImplementedError) as error:
            if "meta" in str(error):
                self.refuse("what an earlier unit returned has no value any more, and was asked for it", error)
            raise
        finally:
            called = self.called
            self._rest()
        if called <= number:
            self.refuse(f"loss_fn called {called} of its {len(self.links)} units, and not {self.links[called].path!r}")
        self.refuse_missing(out, "the loss was made of")
        return out

    def refuse_missing(self, tree: Any, what: str) -> None:
        """An error if there is a tensor without a value in this tree."""
        if any(isinstance(leaf, NoValue) for leaf in pytree.tree_leaves(tree)):
            self.refuse(f"{what} what a unit before the last one returned")

    def refuse(self, why: str, error: Exception | None = None) -> NoReturn:
        raise TreeError(
            f"{self.verb}: {type(self.model).__name__} is no chain of units, in which each is called once, in the "
            f"order in which they lie in it, and uses what the one before returned: {why}. Cut it by hand, "
            f"{self.verb}({{unit: function of (weights, h, batch)}}), or choose other units: Spec(units=...)."
        ) from error
