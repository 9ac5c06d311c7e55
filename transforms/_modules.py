"""Unit modules of a driven module, and what containers hold.

Unit modules: the modules whose calls use a unit, found from a module's structure and a layout. Pure.

    model                      holds leaves of many units          no unit module: its parts are
    ├─ embed   (tied)          {embed.weight}                      unit module
    ├─ blocks                  a list, which nobody calls
    │  ├─ 0                    {blocks.0}                          unit module
    │  └─ 1                    {blocks.1}                          unit module
    ├─ scale   (a parameter)   {scale}                             no module of its own: taken where it is used
    └─ head    (tied, a bias)  {head, embed.weight}                unit module, of a group of units

A unit module is a largest module all of whose own leaves are of one unit; leaves tied to other modules join it as units
of the same group. In the order in which they are found unit modules are a guess at the order of use.

Also here: modules of a model by patterns of their paths.

Classes of modules whose calls a transform makes its own; tensors in whatever a module may return: nested containers,
named tuples, dataclasses, dict-like outputs.

Lists, mappings and dataclasses among a module's arguments, to which its code may write: outputs by layer, a cache.

Tensors in them are found as `map_tensors` finds them. What a container has is its `contents`, by place:

    list         [item, ...]
    mapping      {key: item}
    dataclass    {field: item}
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.nn as nn

from functional_fsdp import Layout, SpecError, TreeError
from functional_fsdp._seams import aliases_of, as_names
from functional_fsdp.extend import Placeholder, match, skeleton_of

M = TypeVar("M", bound=nn.Module)


def copy_of(model: M) -> M:
    """The skeleton of a model.

    Raises:
        TreeError: a model with some parameters of which only the shape is known and some with values, which a state has
            under the same paths, and of which nobody would see that they are not used. Also as `extend.skeleton_of`.
    """
    copied = skeleton_of(model)
    new = [path for path, p in model.named_parameters() if not isinstance(p, Placeholder)]
    if 0 < len(new) < len([*model.parameters()]):
        raise TreeError(
            f"the parameter {new[0]!r} has values, and others of the model have none: a part was put into a skeleton. "
            "Weights are the state's, so its values would not be used. Put it into the module before functionalize, or "
            "in the function that init is given; or change the state: fsdp.load_weights, fsdp.replace_params."
        )
    return copied


def outermost(verb: str, model: nn.Module, patterns: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    """(path, module) of the modules that match a pattern, without those that lie in another of them.

    Raises:
        SpecError: a pattern that matches no module.
    """
    chosen: dict[str, nn.Module] = {}
    for pattern in as_names(f"{verb}(*patterns)", patterns):
        before = len(chosen)
        for path, module in model.named_modules():
            if path and match(pattern, path) == path:
                chosen[path] = module
        if len(chosen) == before:
            raise SpecError(
                f"{verb}: the pattern {pattern!r} matches no module of {type(model).__name__}. Its parts are "
                f"{', '.join(repr(name) for name, _ in model.named_children())}, ..."
            )
    return [(path, module) for path, module in chosen.items() if not any(path.startswith(f"{o}.") for o in chosen)]


Make = TypeVar("Make", bound=Callable[..., type[nn.Module]])
Leaf = tuple[str, str]  # a unit and the key of one of its weights
NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class UnitModule:
    """A module that uses units: where it is, which units, and which of their leaves it holds under which path."""

    path: str
    units: tuple[str, ...]
    leaves: tuple[tuple[str, Leaf], ...]


def slots_of(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(path, dict of parameters, name in it) for each parameter of each module, shared ones at each of their paths."""
    for path, part in module.named_modules(remove_duplicate=False):
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield f"{path}.{name}" if path else name, part._parameters, name


def leaves_of(layout: Layout) -> dict[str, Leaf]:
    """For each path, tied ones included, the unit and the key that hold it."""
    held = {path: (unit.name, key) for unit in layout.units for path, key in zip(unit.paths, unit.keys, strict=True)}
    return {path: held[source] for path, source in zip(layout.paths, layout.source, strict=True)}


def find_unit_modules(module: nn.Module, layout: Layout) -> list[UnitModule]:
    """The unit modules of a module, in the order of its modules.

    Raises:
        TreeError: the module's parameters are not the leaves of the layout, or are tied where its leaves are not.
    """
    paths = [path for path, _, _ in slots_of(module)]
    if set(paths) != set(layout.paths):
        lacks, extra = sorted(set(layout.paths) - set(paths)), sorted(set(paths) - set(layout.paths))
        said = [f"{what} {names[0]!r}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
                for what, names in (("lacks", lacks), ("has besides", extra)) if names]  # fmt: skip
        raise TreeError(
            f"this state is of another model: {type(module).__name__} has {len(paths)} parameters, the state "
            f"{len(layout.paths)} leaves; the model {' and '.join(said)}. Give the model that the state was made from."
        )
    source = dict(zip(layout.paths, layout.source, strict=True))
    for path, first in aliases_of(module).items():
        if source[path] != source[first]:
            raise TreeError(
                f"the model has one weight at {first!r} and {path!r}, and in this state these are two leaves, which a "
                "step would make different. Where the model's ties are right: params = fsdp.full_params(state), "
                f"params[{path!r}] = params[{first!r}], then shard them; moments begin again. Where the state is "
                "right: make the model without the tie."
            )
    leaf = leaves_of(layout)
    users = Counter(layout.source)
    tied = {path for path, source in zip(layout.paths, layout.source, strict=True) if users[source] > 1}
    return list(_visit(module, "", {path: leaf[path] for path in paths}, tied))


def refuse_shapes(model: str, given: Mapping[str, torch.Tensor], layout: Layout) -> None:
    """Raise the TreeError for a model whose parameters have other shapes than the leaves, which have no part of a rank.
    A leaf may be a stack of some, as `T.vmap` takes it, or of stacks."""
    shapes = {path: leaf.seen_shape for path, leaf in layout.leaves.items()}
    source = dict(zip(layout.paths, layout.source, strict=True))
    for path, parameter in given.items():
        has, there = tuple(parameter.size()), tuple(shapes[source[path]])
        if has != there[max(0, len(there) - len(has)) :]:
            raise TreeError(
                f"this state is of another model: {path!r} is {[*there]} in the state, and {[*has]} in {model}. "
                "Give the model that the state was made from."
            )


def _visit(module: nn.Module, path: str, below: dict[str, Leaf], tied: set[str]) -> Iterator[UnitModule]:
    if not below:
        return
    own = dict.fromkeys(unit for leaf, (unit, _) in below.items() if leaf not in tied)
    if len(own) <= 1 and not isinstance(module, NEVER_CALLED):
        yield UnitModule(path, tuple(dict.fromkeys(unit for unit, _ in below.values())), tuple(below.items()))
        return
    start = len(path) + 1 if path else 0
    inside: dict[str, dict[str, Leaf]] = {}
    for leaf, where in below.items():
        inside.setdefault(leaf[start:].partition(".")[0], {})[leaf] = where
    for name, part in module._modules.items():
        if part is not None:
            yield from _visit(part, f"{path}.{name}" if path else name, inside.get(name, {}), tied)


def each_once(module: nn.Module, unit_modules: list[UnitModule]) -> list[UnitModule]:
    """One for each module object, at the first of its paths. One that holds another (a module that is also somewhere
    else) goes without what that holds, since that gathers it when it is called."""
    found: dict[nn.Module, UnitModule] = {}
    for unit_module in unit_modules:
        found.setdefault(module.get_submodule(unit_module.path), unit_module)
    once = []
    for part, unit_module in found.items():
        inner = {id(held) for other in part.modules() if other is not part and other in found
                 for held in (p._parameters for p in other.modules())}  # fmt: skip
        if inner:
            kept = {path for path, held, _ in slots_of(part) if id(held) not in inner}
            start = len(unit_module.path) + 1 if unit_module.path else 0
            leaves = tuple((path, leaf) for path, leaf in unit_module.leaves if path[start:] in kept)
            units = tuple(dict.fromkeys(unit for _, (unit, _) in leaves))
            unit_module = replace(unit_module, leaves=leaves, units=units)
        if unit_module.leaves:
            once.append(unit_module)
    return once


def order_of(unit_modules: list[UnitModule], layout: Layout) -> tuple[str | tuple[str, ...], ...]:
    """A schedule's order, if the model uses its unit modules one after another, forward and then backward.

    Leaves that are in no unit module come where their units come in the layout.
    """
    covered = {unit for unit_module in unit_modules for unit in unit_module.units}
    place = {unit.name: i for i, unit in enumerate(layout.units)}
    forward: list[tuple[str, ...]] = []
    loose = [unit.name for unit in layout.units if unit.name not in covered]
    for unit_module in unit_modules:
        while loose and place[loose[0]] < min(place[unit] for unit in unit_module.units):
            forward.append((loose.pop(0),))
        if forward[-1:] != [unit_module.units]:
            forward.append(unit_module.units)
    forward += [(name,) for name in loose]
    order = [*forward, *reversed(forward)]
    return tuple(units[0] if len(units) == 1 else units for units in order)


def once_a_class(make: Make) -> Make:
    """A function that makes a subclass of a module's class makes it once for each."""
    return cast(Make, cache(make))


def subclass(cls: type[nn.Module], **body: Any) -> type[nn.Module]:
    """A subclass of a module's class, of the same name, with this in it."""
    return type(cls.__name__, (cls,), {**body, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


PLAIN = (torch.Tensor, str, int, float, type(None))


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The value with `fn` applied to each tensor in it; the value itself where nothing changes.

    It looks into tuples, named tuples, lists, mappings and dataclasses; other objects (caches) stay what they are.
    Nothing is changed in place.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, tuple | list):
        items = [map_tensors(fn, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        changed = {}
        for key in list(value.keys()):
            old = value[key]
            new = map_tensors(fn, old)
            if new is not old:
                changed[key] = new
        if not changed:
            return value
        out = copy.copy(value)
        for key, new in changed.items():
            out[key] = new
        return out
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        before = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        after = {name: map_tensors(fn, old) for name, old in before.items()}
        if all(after[name] is before[name] for name in before):
            return value
        other: Any = copy.copy(value)
        for name, new in after.items():
            object.__setattr__(other, name, new)
        return other
    return value


def each_leaf(value: Any) -> Iterator[Any]:
    """What lies in the containers into which `map_tensors` looks, tensors and others."""
    if isinstance(value, PLAIN):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from each_leaf(item)
    elif isinstance(value, MutableMapping):
        for key in list(value.keys()):
            yield from each_leaf(value[key])
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from each_leaf(getattr(value, field.name, None))
    else:
        yield value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors to which `map_tensors` applies its function."""
    return [leaf for leaf in each_leaf(value) if isinstance(leaf, torch.Tensor)]


Contents = dict[Any, Any]  # by index, key or field
Before = Mapping[int, tuple[Any, Contents]]  # by id: a container, and what it had then


def contents(value: Any) -> Contents | None:
    """What a container has, a tuple too; None of anything else."""
    if isinstance(value, PLAIN):
        return None
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, MutableMapping):
        return {key: value[key] for key in list(value.keys())}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return None


def contents_by_id(*values: Any) -> dict[int, tuple[Any, Contents]]:
    """The containers in these that can be written to, and what each has now."""
    found: dict[int, tuple[Any, Contents]] = {}
    left = [*values]
    while left:
        value = left.pop()
        if id(value) not in found and (has := contents(value)) is not None:
            if not isinstance(value, tuple):
                found[id(value)] = value, has
            left += has.values()
    return found


def written(before: Before) -> set[int]:
    """The ids of containers that have other things than then."""
    return {key for key, (value, had) in before.items() if not _same(contents(value), had)}


class Remake:
    """Makes values with other things in their containers. What is there twice is made once.

    Args:
        new: what comes in the place of something that is no container.
        before: what containers are to have: what they had then.
        anew: the ids of containers of which copies are made in any case; of others where something in them is other.
    """

    def __init__(
        self, new: Callable[[Any], Any] = lambda item: item, before: Before | None = None, anew: Collection[int] = ()
    ) -> None:
        self.new, self.before, self.anew = new, before or {}, anew
        self.made: dict[int, tuple[Any, Any]] = {}  # by id: what was given, and what was made of it

    def __call__(self, value: Any) -> Any:
        """What is made of this."""
        if isinstance(value, PLAIN) and not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self.made:
            has = contents(value)
            self.made[id(value)] = value, self.new(value) if has is None else self._container(value, has)
        return self.made[id(value)][1]

    def of(self, value: Any) -> Any:
        """What was made of this, if it was; else it itself."""
        return self.made.get(id(value), (value, value))[1]

    def _container(self, value: Any, has: Contents) -> Any:
        _, had = self.before.get(id(value), (value, has))
        wanted = {key: self(item) for key, item in had.items()}
        if id(value) not in self.anew and _same(wanted, has):
            return value
        if isinstance(value, tuple):
            return type(value)(*wanted.values()) if hasattr(value, "_fields") else type(value)(wanted.values())
        made = copy.copy(value)
        _write(made, wanted)
        return made


def on_copies(
    run: Callable[[Any, Any], Any], fn: Callable[[torch.Tensor], torch.Tensor], args: Any, kwargs: Any
) -> Any:
    """`run(args, kwargs)` with `fn` applied to each tensor in these. Containers of such tensors are copies, and what
    `run` writes to them is carried over to the caller's own."""
    copies = Remake(lambda item: fn(item) if isinstance(item, torch.Tensor) else item)
    given = [copies(item) for item in args], {key: copies(item) for key, item in kwargs.items()}
    made = [*copies.made.values()]
    before = {id(new): (new, has) for old, new in made if new is not old and (has := contents(new)) is not None}
    out = run(*given)
    if before:
        own = Remake()
        own.made.update({id(new): (new, old) for old, new in made})
        for key in written(before):
            new, old = own.made[key]
            _write(old, {place: own(item) for place, item in (contents(new) or {}).items()})
    return out


def _same(some: Contents | None, others: Contents | None) -> bool:
    return some is not None and others is not None and [*some] == [*others] and all(
        item is others[key] or (isinstance(item, PLAIN[1:]) and (type(item), item) == (type(others[key]), others[key]))
        for key, item in some.items()
    )  # fmt: skip


def _write(value: Any, items: Contents) -> None:
    """Have a container have this, in this order."""
    if isinstance(value, list):
        value[:] = items.values()
        return
    now = contents(value) or {}
    if not isinstance(value, MutableMapping):
        for name, item in items.items():
            if item is not now[name]:
                object.__setattr__(value, name, item)
        return
    if [*now] != [*items][: len(now)]:  # it has others, or in another order
        value.clear()
        fields = getattr(value, "__dataclass_fields__", {})  # of transformers: a key that is not there is None
        for name in (now.keys() - items.keys()) & fields.keys():
            setattr(value, name, None)
        now = {}
    for key, item in items.items():
        if key not in now or now[key] is not item:
            value[key] = item
