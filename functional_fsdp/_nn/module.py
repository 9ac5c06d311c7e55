"""Modules as functions: `functionalize` splits a module into parameters and a skeleton, `bind` puts weights back in.

Your module is not touched: a skeleton (see `_nn.skeleton`) is a copy without weights.

What a bound call puts in the place of a module's buffers stays, or is an error. A transform may look after the modules
that `bind` calls on its thread: `around_bound_calls`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import is_
from types import FunctionType, MethodType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn

from .._common.calls import frames_from, refuse, tracing, uninterruptible
from .._common.errors import SpecError, TreeError, expect
from .._common.torch_names import FakeTensor, func_interpreter
from .._shared.torch_names import autograd_node, is_wrapped, parametrize, parametrized_anew, reparametrize_module
from .._storage import changed
from .skeleton import Placeholder, aliases_among, every_buffer, form_of, needs_module, skeleton_of, tied

Slot = tuple[dict[str, Any], str]  # a dict of parameters or buffers, and a name in it


def stays(t: torch.Tensor) -> bool:
    """Whether a tensor has values after the call: not one of a torch.func transform, of a graph, or without values."""
    if torch.compiler.is_dynamo_compiling():
        return not _transformed()
    return not (isinstance(t, FakeTensor) or is_wrapped(t) or t.is_meta)


def _transformed() -> bool:
    """Whether a transform of torch.func runs this. Dynamo runs it for real, while it is within one itself."""
    return func_interpreter() is not None


_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch._dynamo.assume_constant_result


def keep(module: nn.Module, own: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> None:
    """Of a module's buffers those stay that a call has put in the place of others."""
    lost = []
    for path, buffer in own.items():
        new = now[path]
        if new is not buffer:
            owner, _, name = path.rpartition(".")
            held = module.get_submodule(owner)._buffers
            if stays(new):
                held[name] = new.detach().clone()
            else:
                lost.append((held, name))
    if lost:
        refuse_lost(module, lost)


def refuse_lost(module: nn.Module, lost: list[Slot]) -> None:
    """Raise for buffers that cannot stay; but for caches, and where only shapes are asked for."""
    if not _transformed() and not tracing():
        return
    for path, held, name in every_buffer(module, persistent=True):
        if any(held is place and name == key for place, key in lost):
            said = (
                f"bind: the forward put another tensor in the place of the buffer {path!r}, under torch.func or where "
                "a graph is made, and it would be lost. Buffers must not change there. Use T.forward_backward, by "
                "which they ride in the state; or return the new value."
            )
            refuse("SpecError", said)


def refuse_meta(path: str) -> None:
    """Raise the SpecError for a buffer, at this path, that has no values: its module was built on the meta device."""
    raise SpecError(
        f"the buffer {path!r} is on the meta device and has no values: its module was built there. Build the model by "
        "init(lambda: Model(config), spec), whose skeleton has real buffers, or functionalize one that was built on a "
        "real device; persistent ones may come from the state: shard(params, spec, optimizer, buffers={path: tensor})."
    )


Around = Callable[[nn.Module], AbstractContextManager[None]]


class _Here(threading.local):
    around: Around | None = None


_HERE = _Here()


@contextmanager
def around_bound_calls(around: Around | None) -> Iterator[Around | None]:
    """Within, on this thread, each call of a module by `bind` is made in `with around(module):`.

    Args:
        around: a function of the skeleton that is called; None for nothing.

    Returns:
        what was there before, for who wants to call it, too.

    Collective: none. Not so in compiled code, nor under torch.func, where a module must not change.

    Example: `with around_bound_calls(note_buffers): stage(w, h)`.
    """
    before, _HERE.around = _HERE.around, around
    try:
        yield before
    finally:
        _HERE.around = before


M = TypeVar("M", bound=nn.Module)


ASSIGNED = "by assignment"


def functionalize(module: M, spec: Any = None) -> tuple[dict[str, torch.Tensor], M]:
    """Split a module into its parameters and a skeleton.

    Args:
        spec: where leaves are cut along axes of the model's own (`Spec(own=)`): parameters are whole, and the skeleton
            takes this rank's parts, as `unshard` gives them. Of parameters that are DTensors it takes parts in any
            case, and its code sees DTensors.

    Returns:
        `{path: parameter}`, the module's own tensors, tied ones at each of their paths; and the skeleton, for `bind`.

    Example:
        >>> params, model = functionalize(nn.Linear(2, 3))
        >>> bind(model, params)(torch.ones(1, 2)).shape
        torch.Size([1, 3])
    """
    model = skeleton_of(module, spec)
    return dict(module.named_parameters(remove_duplicate=False)), model


class Slots:
    """Where a skeleton keeps parameters and buffers: noted once, compared with what is there whenever weights go in.

    A slot is a dict of parameters and a name in it. `usable`: each has a placeholder and a path of its own.
    """

    def __init__(self, skeleton: nn.Module) -> None:
        modules, paths = [skeleton], [""]
        for module, path in zip(modules, paths, strict=True):  # breadth first; both grow as it goes
            parts = {name: part for name, part in module._modules.items() if part is not None}
            modules += parts.values()
            paths += [f"{path}{name}." for name in parts]
        found = [(m._parameters, path) for m, path in zip(modules, paths, strict=True)]
        held = [(params, path, name) for params, path in found for name, p in params.items() if p is not None]
        self.keys = [path + name for _, path, name in held]
        self.slots: list[Slot] = [(params, name) for params, _, name in held]
        self.placeholders = [params[name] for params, name in self.slots]
        self.shapes = [getattr(p, "part", None) or torch.Size(p.size()) for p in self.placeholders]
        self.forms = {key: form for key, p in zip(self.keys, self.placeholders, strict=True) if (form := form_of(p))}
        self.buffers: list[dict[str, Any]] = [m._buffers for m in modules]
        self.meta: list[tuple[str, dict[str, Any], str]] = [
            (f"{path}{name}", m._buffers, name)
            for m, path in zip(modules, paths, strict=True)
            for name, b in m._buffers.items()
            if b is not None and b.is_meta
        ]
        self.dicts: list[Any] = [m._modules for m in modules] + [m._parameters for m in modules]
        self.noted = [dict(d) for d in self.dicts]
        apart = len({(id(params), name) for params, name in self.slots}) == len(self.slots)
        self.aliases = aliases_among(skeleton.named_parameters(remove_duplicate=False))
        self.lent: list[Any] | None = None  # while weights are in the slots, the buffers that were there before
        self.usable = apart and all(type(p) is Placeholder for p in self.placeholders)

    def fit(self, weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor] | None:
        """The weights in the order of the slots, if they are tensors with the right keys and shapes."""
        weights = tied(weights, self.aliases) if self.aliases else weights
        if len(weights) != len(self.keys):
            return None
        try:
            given = [weights[key] for key in self.keys]
            return given if [*map(torch.Tensor.size, given)] == self.shapes else None
        except (KeyError, TypeError):  # TypeError: not a tensor
            return None

    @uninterruptible
    def restore(self, module: nn.Module, keeps: bool = False) -> list[Slot]:
        """Placeholders and buffers back in their places.

        Args:
            keeps: buffers that the call has put in the place of others stay. Returns those that cannot.
        """
        lost = []
        for (held, name), placeholder in zip(self.slots, self.placeholders, strict=True):
            if name in held:
                held[name] = placeholder
            else:
                _put(module, held, name, placeholder)
        for held, before in self.lent or ():
            for name, buffer in before.items():
                if buffer is not None:
                    new = held.get(name)
                    if keeps and new is not buffer and isinstance(new, torch.Tensor):
                        if stays(new):
                            buffer = new.detach().clone()  # it may be a part of a weight, which is borrowed
                        else:
                            lost.append((held, name))
                    _put(module, held, name, buffer)
        self.lent = None
        return lost

    def same(self) -> bool:
        """Whether the parts and the placeholders are those that were noted: identities, compared in C."""
        try:
            return self.dicts == self.noted
        except (TreeError, RuntimeError):  # a placeholder was compared, by value, with what is in its place
            return False


def _recomputing() -> bool:
    """Whether a backward runs this: activation checkpointing, which must not change buffers a second time."""
    return not torch.compiler.is_compiling() and autograd_node() is not None


Place = tuple[Slots, list[torch.Tensor]]
_NOTED: WeakKeyDictionary[nn.Module, Slots] = WeakKeyDictionary()


def _place(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> Place | None:
    """A skeleton's slots, and the weights that fit them. None where only the long way can tell, see `Bound._lend`."""
    if torch.compiler.is_compiling():
        return None
    slots = _NOTED.get(module)
    if slots is not None and slots.lent is not None and not _lending(slots):
        slots.restore(module)  # an interrupt came before it was
    if slots is None or not slots.same():  # first seen, changed, or weights are in it just now
        if type(next(module.parameters(), None)) is not Placeholder:
            return None
        slots = Slots(module)
        if not slots.usable:
            return None
        _NOTED[module] = slots
    given = slots.fit(weights)
    return None if given is None else (slots, given)


def _lending(slots: Slots) -> bool:
    """Whether a call has weights in these slots. The stack says: one that was stopped may not have come to say so."""
    calls = (frame for frame in frames_from(sys._getframe()) if frame.f_code is Bound._call.__code__)
    return any(frame.f_locals.get("slots") is slots for frame in calls)


def _put(module: nn.Module, held: dict[str, Any], name: str, tensor: Any) -> None:
    """Put a tensor back where it was held, also if the module's code deleted it, or put something else in its place."""
    if name not in held:
        for m in module.modules():
            if held is m._parameters or held is m._buffers:
                for place in (vars(m), m._parameters, m._buffers, m._modules):
                    place.pop(name, None)
    held[name] = tensor


OWN = ("_module", "_weights", "_place")


class Bound:
    """A module with weights: call it, call its methods, read its attributes and submodules. Made by `bind`."""

    _module: Any
    _weights: Mapping[str, torch.Tensor]
    _place: Place | None

    def __init__(self, module: nn.Module, weights: Mapping[str, torch.Tensor], place: Place | None = None) -> None:
        own = self.__dict__
        own["_module"], own["_weights"], own["_place"] = module, weights, place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._lend(type(self._module).__call__, args, kwargs)

    def _lend(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of the module while the module has these weights and its buffers (at each of their paths)."""
        if torch.compiler.is_compiling():
            return self._call(function, args, kwargs)
        around = None if _HERE.around is None or func_interpreter() is not None else _HERE.around(self._module)
        if around is None and not parametrize._cache_enabled:
            return self._call(function, args, kwargs)
        with around if around is not None else nullcontext(), parametrized_anew():
            return self._call(function, args, kwargs)

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """The short way is for skeletons whose slots are known. The long way, torch.func's, is for every module, for
        calls within calls that bind other weights, and for torch.compile.
        """
        module = self._module
        place = None if torch.compiler.is_compiling() else self._place or _place(module, self._weights)
        if place is None or not place[0].same():
            own = dict(module.named_buffers(remove_duplicate=False))
            again = len(own) > 0 and _recomputing()  # torch 2.11 does not trace `bool` of a dict
            if again:
                own = {path: buffer.clone() for path, buffer in own.items()}
            tensors = {**own, **self._weights}
            with reparametrize_module(module, tensors, tie_weights=False, strict=True, stack_weights=True):
                out = function(module, *args, **kwargs)
            if not torch.compiler.is_compiling():
                assigned = [path for path, weight in self._weights.items() if tensors[path] is not weight]
                if assigned:
                    raise changed(assigned, ASSIGNED)
            if own and not again:
                keep(module, own, tensors)
            return out
        slots, weights = place
        for path, held, name in slots.meta:
            if held[name].is_meta and not all(w.is_meta for w in weights):
                refuse_meta(path)
        slots.lent = [(held, held.copy()) for held in slots.buffers if held] if any(slots.buffers) else []
        again = bool(slots.lent) and _recomputing()
        done = False
        try:
            if again:
                for held, before in slots.lent:
                    held.update({name: buffer.clone() for name, buffer in before.items() if buffer is not None})
            for (held, name), weight in zip(slots.slots, weights, strict=True):
                held[name] = weight
            out = function(module, *args, **kwargs)
            now = [held.get(name) for held, name in slots.slots]
            if not all(map(is_, now, weights)):
                raise changed([key for key, a, b in zip(slots.keys, now, weights, strict=True) if a is not b], ASSIGNED)
            done = not again
        finally:
            lost = slots.restore(module, done)
        if lost:
            refuse_lost(module, lost)
        return out

    def _child(self, name: str) -> Bound:
        weights = {key[len(name) + 1 :]: w for key, w in self._weights.items() if key.startswith(name + ".")}
        return Bound(self._module._modules[name], weights)

    def __getattr__(self, name: str) -> Any:
        if name in OWN:  # made without `__init__`, as copiers and compilers do
            raise AttributeError(name)
        if name in self._weights:
            return self._weights[name]
        module = self._module
        if name in module._modules:
            return self._child(name)
        of_class = getattr(type(module), name, None)  # not by vars(): after a dict was changed Dynamo refuses that
        if isinstance(of_class, property):
            return self._lend(of_class.fget, (), {})
        own = isinstance(of_class, FunctionType) and of_class is not getattr(nn.Module, name, None)
        if own and isinstance(getattr(module, name), MethodType):  # else it is static
            return lambda *args, **kwargs: self._lend(of_class, args, kwargs)
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"cannot set {name!r} on a bound module: it is a pure function of its weights. Set it on the skeleton."
        )

    # containers: nn.ModuleList, nn.Sequential, nn.ModuleDict

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            part = self._module[index]
            names = list(self._module._modules)[index]
            weights = {new + key[len(old):]: w for new, old in zip(part._modules, names, strict=True)
                       for key, w in self._weights.items() if key.startswith(old + ".")}  # fmt: skip
            return Bound(part, weights)
        if isinstance(index, str):
            return self._child(index)
        self._module[index]  # raises IndexError
        return self._child(list(self._module._modules)[index])

    def __iter__(self) -> Any:
        if isinstance(self._module, nn.ModuleDict):
            return iter(self._module)
        return (self._child(name) for name in self._module._modules)

    def __len__(self) -> int:
        return len(self._module)

    def __bool__(self) -> bool:
        return True

    def __contains__(self, name: Any) -> bool:
        return name in self._module._modules

    def items(self) -> Any:
        """(name, bound submodule) pairs of an nn.ModuleDict."""
        return ((name, self._child(name)) for name in self._module._modules)

    def values(self) -> Any:
        """The bound submodules of an nn.ModuleDict."""
        return (self._child(name) for name in self._module._modules)

    def parameters(self, recurse: bool = True) -> Any:
        """The weights it is bound to."""
        return (weight for _, weight in self.named_parameters(recurse=recurse))

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = False) -> Any:
        """(path, weight) pairs."""
        start, seen = f"{prefix}." if prefix else "", set[int]()
        for path, weight in self._weights.items():
            if (recurse or "." not in path) and not (remove_duplicate and id(weight) in seen):
                seen.add(id(weight))
                yield f"{start}{path}", weight

    def __repr__(self) -> str:
        return f"Bound({self._module!r})"


def bind(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Bound:
    """A strict functional call that behaves as the module: `bind(model, params)(x)`, `bind(model.blocks[0], w)(h)`.

    Args:
        model: a skeleton, or a submodule of one (any module works; its own weights are never used).
        weights: `{path relative to the module: tensor}`, all of its parameters and nothing else: what `unshard` gives.
            A leaf that the module has tied is taken from the first of its paths, whatever is at the others: so it stays
            one leaf when weights are changed one by one (`{k: p - lr * g[k]}`, an inner step).

    Returns:
        a callable with the module's methods, attributes and submodules, all seeing these weights.

    Raises:
        TreeError: keys that are missing, unknown, or of another shape. SpecError, from a call: a buffer that it changes
            and that would be lost, see "Buffers" in the guide's page on train steps.
    """
    if isinstance(model, Bound):
        model = model._module
    needs_module("bind(model, weights)", model)
    if not isinstance(weights, Mapping):
        raise TreeError(f"bind: weights is a {type(weights).__name__}; expected {{path: tensor}}, as unshard gives.")
    place = _place(model, weights)
    if place is None:  # one walk over the module: where torch.compile looks it traces each
        wanted = dict(model.named_parameters(remove_duplicate=False))
        aliases, forms = aliases_among(wanted.items()), forms_among(wanted)
    else:
        aliases, forms = place[0].aliases, place[0].forms
    if aliases:
        weights = tied(weights, aliases)
    if place is None:
        validate(model, weights, wanted)
    if forms:
        weights = {key: forms[key](weight) if key in forms else weight for key, weight in weights.items()}
        place = place and (place[0], [weights[key] for key in place[0].keys])
    return Bound(model, weights, place)


def forms_among(params: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """By path, how weights lie that the module's own code sees as DTensors."""
    forms = {path: form_of(p) for path, p in params.items()}
    return {path: form for path, form in forms.items() if form is not None}


def validate(
    model: nn.Module,
    weights: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    verb: str = "bind",
) -> None:
    """Say what is wrong with the weights of a module with these parameters, if anything is."""
    missing, extra = [k for k in wanted if k not in weights], [k for k in weights if k not in wanted]
    if missing or extra:
        said = " and ".join(f"{what} {', '.join(map(repr, keys[:3]))}{'...' if len(keys) > 3 else ''}"
                            for what, keys in (("lacks", missing), ("has the unknown", extra)) if keys)  # fmt: skip
        raise TreeError(
            f"{verb}: {type(model).__name__} has {len(wanted)} parameters and was given {len(weights)} weights: it "
            f"{said}. Give exactly the weights of "
            f"this module, by paths relative to it (a tied weight is a unit of its own: add it under the module's key)."
        )
    for key, placeholder in wanted.items():
        weight: Any = weights[key]
        if not isinstance(weight, torch.Tensor):
            raise TreeError(f"{verb}: the weight {key!r} is a {type(weight).__name__}; expected a tensor.")
        if weight.shape != placeholder.shape and weight.shape != (part := getattr(placeholder, "part", None)):
            raise TreeError(
                f"{verb}: the weight {key!r} has shape {tuple(weight.shape)}; expected {tuple(placeholder.shape)}"
                f"{f', or {tuple(part)}, the part of a rank' if part else ''}."
            )


# ---------------------------------------------------------------- what a module tells of itself


def units(model: nn.Module, *types: type) -> list[str]:
    """The paths of the outermost submodules of `model` that are of one of `types`, for `Spec(units=...)`.

    Raises:
        SpecError: if there is none, naming the types that the model has.

    >>> units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), nn.Linear)
    ['0', '2']
    """
    needs_module("units(model, *types)", model)
    for one in types:
        try:
            isinstance(model, one)  # a class, a tuple or a union of them
        except TypeError:
            expect("units(model, *types)", one, type, "classes of modules, as nn.Linear")
    found: list[str] = []
    for path, module in model.named_modules():
        if path and isinstance(module, types) and not any(path.startswith(f + ".") for f in found):
            found.append(path)
    if not found:
        names = sorted({type(m).__name__ for m in model.modules()})
        wanted = ", ".join(t.__name__ for t in types)
        raise SpecError(f"units(model, {wanted}): the model has no such submodule. It has {', '.join(names)}.")
    return found


def buffers(module: nn.Module, *, every: bool = False) -> dict[str, torch.Tensor]:
    """Copies of the buffers of a module by path, for `shard(params, spec, optimizer, buffers=buffers(module))`.

    Args:
        every: those that are not persistent, too: what a forward makes of them then comes back in the new state, each
            rank's own, and is in checkpoints. For running counts; masks and tables would be copied in each forward.
    """
    needs_module("buffers(module)", module)
    return {path: held[name].detach().clone() for path, held, name in every_buffer(module, persistent=not every)}
