"""Copies of modules, with all that they hold: what leads to a part of the module leads to the copy's part in the copy.

    what a module holds                       in the copy
    containers, objects, tensors, modules     copied, as by `copy.deepcopy`
    functions, methods, partials, hooks       copied with what they close over, where that leads to a part; else shared
    lru_cache of such                         an empty cache of the copy
    weak references, proxies, weak dicts      of the copy's parts where they led to parts; else shared
    parameters, wherever else they lie        placeholders that find the weight of their slot
    memory of a parameter                     refused: a copy would not follow what the state has
    locks, files, iterators, what is torch's  shared; refused where it leads to a part
    what classes and globals hold             refused where it leads to a part, and the module's code uses it

    feats = module.feats = {}                      the copy has a dict of its own,
    lambda part, args, out: feats.update(a=out)    and the copied hook must write into that one

An object is *owned* if the module holds it: by attributes, containers, and objects in these. A hook that reaches no
owned object is shared with the original: what it writes into is the user's.
"""

from __future__ import annotations

import copyreg
import re
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from functools import lru_cache, partial
from itertools import chain
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn as nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.spectral_norm import SpectralNorm

from .._common.errors import TreeError
from .._common.objects import (
    BUILTINS,
    PROXIES,
    Cache,
    Part,
    Walk,
    closed_over,
    global_names,
    is_array,
    is_atom,
    is_opaque,
    is_standard,
    is_weak,
    names_in,
    package_of,
    parts,
    target,
)
from .._common.torch_names import FakeTensor

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
LISTS = (list, deque, set)
DICTS = (dict, OrderedDict)
BUILDS = ("__init__", "__new__", "__init_subclass__")  # a copy does not run them
COPIED = [[name] for name in ("ao", "distributions", "fx", "nn", "optim", "utils")]  # torch's, as users' classes
REMEDY = (
    "Make it a method, in a subclass, or types.MethodType(function, module), and let it read what the module holds."
)
TORCHS = "what is torch's own"
FUNCTIONS = ("__func__", "__wrapped__", "func")  # of a method, a cache, a partial
MISSING: Any = object()
Path = Any  # None, or (path of the owner, the part's name): put together where it is said


class StrongRef(weakref.ref):  # type: ignore[type-arg]
    """A weak reference that keeps its target: of a placeholder, which nothing else may hold once a weight is lent."""

    __slots__ = ("kept",)

    def __init__(self, value: Any) -> None:
        super().__init__(value)  # type: ignore[call-arg]
        self.kept = value


class Span(NamedTuple):
    """Which bytes of a storage a tensor looks at, and whether at all from the first to the last."""

    storage: int
    first: int
    last: int
    dense: bool

    def meets(self, other: Span) -> bool:
        """Whether they have a byte in common; of two with gaps it is not known, and said to be none."""
        apart = self.storage != other.storage or self.last <= other.first or other.last <= self.first
        return not apart and (self.dense or other.dense)


def span_of(t: torch.Tensor) -> Span | None:
    """The bytes of a plain tensor; None where there are none, and of tensors of other classes."""
    if type(t) not in (torch.Tensor, nn.Parameter, FakeTensor) or t.layout is not torch.strided or not t.numel():
        return None
    room = 1 + sum(int(n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    first = int(t.storage_offset())
    return Span(t.untyped_storage()._cdata, first * t.itemsize, (first + room) * t.itemsize, room <= t.numel())


class Copier:
    """One copy of one module.

    Args:
        module: the original.
        memo: what stands for which object, by id: each parameter's placeholder.

    Attributes:
        met: ids of the parameters that lie elsewhere than in the module's slots, too.
    """

    def __init__(self, module: nn.Module, memo: dict[int, Any]) -> None:
        self.memo = memo
        self.met: set[int] = set()
        self.kept: list[Any] = []  # ids stay theirs while they live
        self.names = {id(part): path for path, part in module.named_modules()}
        modules = [*module.modules()]
        self.slots = {id(part._parameters) for part in modules}
        self.hooks = {id(table) for part in modules for name in HOOKS if (table := vars(part).get(name)) is not None}
        self.parameters = {*memo}
        self.buffers = {id(b): path for path, b in module.named_buffers(remove_duplicate=False)}
        self.spans: dict[int, list[tuple[str, Span]]] = {}  # of parameters, by their storages
        for path, p in module.named_parameters():
            if span := span_of(p):
                self.spans.setdefault(span.storage, []).append((path, span))
        normed = ((part, hook) for part in modules for hook in part._forward_pre_hooks.values())
        self.renewed = {id(vars(part).get(hook.name)) for part, hook in normed if isinstance(hook, SpectralNorm)}
        lends: dict[int, Any] = {}
        owning = Walk(lambda x: not self._lends(x) or bool(lends.update({id(x): x})))
        self.owned = {id(x) for _, x in owning([Part("", module)]) if not is_fixed(x)}
        self.owned -= lends.keys()
        self.held = owning.seen.keys()  # functions, too
        self.kept += owning.seen.values()
        full = [part for part in modules if any(True for _ in chain(part.parameters(), part.buffers()))]
        self.weights = {*memo, *self.buffers, *map(id, full)}
        self.barren: tuple[dict[int, Any], dict[int, Any]] = {}, {}  # objects that reach nothing owned, and no weight
        self.cells: dict[int, CellType] = {}
        self.busy: set[int] = set()
        self.read: dict[tuple[int, type | None], Any] = {}  # functions whose code was looked at
        self.looked: set[tuple[int, frozenset[str]]] = set()
        self.module = module

    def _lends(self, value: Any) -> bool:
        """Whether a value does not own what it leads to."""
        if type(value) in (dict, list, tuple, *DICTS):
            return id(value) in self.hooks
        if isinstance(value, StrongRef):
            return False
        return isinstance(value, (FunctionType, Cache)) or is_weak(value) or is_opaque(value)

    def run(self) -> Any:
        """The copy.

        Raises:
            TreeError: something in it can neither be copied nor shared; its path is said.
        """
        first = {type(part): part for part in reversed([*self.module.modules()])}
        for cls, part in reversed(first.items()):
            self._class(cls, (None, self.names[id(part)]))
        return self.copy(self.module, None)

    # ---------------------------------------------------------------- one value

    def copy(self, value: Any, path: Path, inside: bool = True) -> Any:
        """What stands for a value in the copy.

        Args:
            inside: it is copied wherever it leads to. Else, in a function, only where it leads to what is owned.
        """
        if is_atom(value):
            return value
        number = id(value)
        if not inside and number in self.buffers:
            self._refuse(
                path, value, f"closes over the buffer {self.buffers[number]!r}, whose values come from a state"
            )
        made = self.memo.get(number, MISSING)
        if made is not MISSING:
            if number in self.parameters:
                self.met.add(number)
            return made
        self._code(value, path)
        if not inside and number not in self.owned:
            if not self.reaches(value):
                return value
            if isinstance(value, nn.Module):
                self._refuse(path, value, "is another module that shares a part with this model")
        self.kept.append(value)
        made = self._make(value, path)
        self.memo[number] = made
        return made

    def _make(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if kind in DICTS:
            return self._dict(value, kind(), path)
        if kind is defaultdict:
            return self._dict(value, defaultdict(self.copy(value.default_factory, path, False)), path)
        if kind in LISTS:
            made: Any = deque(maxlen=value.maxlen) if kind is deque else kind()
            self.memo[id(value)] = made
            add = made.add if kind is set else made.append
            for i, x in enumerate(value):
                add(self.copy(x, (path, f"[{i}]")))
            return made
        if kind is tuple or kind is frozenset:
            items = [self.copy(x, (path, f"[{i}]")) for i, x in enumerate(value)]
            same = all(new is old for new, old in zip(items, value, strict=True))
            return self.memo.get(id(value), value if same else kind(items))
        if kind in PROXIES or is_weak(value):
            return self._weak(value, path)
        if isinstance(value, FunctionType):
            return self._function(value, path) if self.reaches(value) else value
        if kind is MethodType:
            function, owner = self.copy(value.__func__, path, False), self.copy(value.__self__, (path, ".__self__"))
            return value if function is value.__func__ and owner is value.__self__ else MethodType(function, owner)
        if isinstance(value, BUILTINS):
            owner = self.copy(value.__self__, (path, ".__self__"))
            return value if owner is value.__self__ else getattr(owner, value.__name__)
        if isinstance(value, Cache):
            if not self.reaches(value):
                return value
            return lru_cache(**value.cache_parameters())(self.copy(value.__wrapped__, path, False))
        if kind is partial:
            return self._partial(value, path)
        if kind is types.MappingProxyType:
            return kind({key: self.copy(x, (path, f"[{key!r}]")) for key, x in value.items()})
        if kind is threading.local:
            made = self.memo[id(value)] = threading.local()
            vars(made).update({name: self.copy(x, (path, f".{name}")) for name, x in vars(value).items()})
            return made
        if is_array(value) and value.dtype.hasobject:
            made = self.memo[id(value)] = value.copy()
            for i, x in enumerate(value.flat):
                made.flat[i] = self.copy(x, (path, f"[{i}]"))
            return made
        return self._object(value, path)

    def _dict(self, value: dict[Any, Any], made: Any, path: Path) -> Any:
        self.memo[id(value)] = made
        if id(value) in self.slots:
            made.update({name: None if p is None else self.memo[id(p)] for name, p in value.items()})
            return made
        inside = id(value) not in self.hooks
        for key, x in value.items():
            made[self.copy(key, path)] = self.copy(x, (path, f"[{key!r}]"), inside)
        return made

    def _partial(self, value: Any, path: Path) -> Any:
        function = self.copy(value.func, path)
        args = [self.copy(x, (path, f".args[{i}]")) for i, x in enumerate(value.args)]
        words = {name: self.copy(x, (path, f".{name}")) for name, x in value.keywords.items()}
        made = partial(function, *args, **words)
        vars(made).update({name: self.copy(x, (path, f".{name}")) for name, x in vars(value).items()})
        return made

    def _weak(self, value: Any, path: Path) -> Any:
        """What led to an owned object leads to its copy. Nothing may be copied that nothing but this would hold."""
        kind = type(value)
        if isinstance(value, weakref.WeakValueDictionary | weakref.WeakKeyDictionary):
            pairs = [(self._led(k, path), self._led(x, path)) for k, x in [*value.items()]]
            if all(new[0] is old[0] and new[1] is old[1] for new, old in zip(pairs, value.items(), strict=True)):
                return value
            made = self.memo[id(value)] = kind()
            made.update(pairs)
            return made
        if isinstance(value, weakref.WeakSet):
            items = [self._led(x, path) for x in value]
            return value if all(new is old for new, old in zip(items, value, strict=True)) else kind(items)
        led = target(value)
        if isinstance(value, weakref.WeakMethod):
            if led is None:
                return value
            owner = self._led(led.__self__, path)
            return value if owner is led.__self__ else kind(MethodType(led.__func__, owner))
        new = self._led(led, path)
        if new is led:
            return value
        if kind in PROXIES:
            return weakref.proxy(new)
        if isinstance(new, torch.Tensor):
            return StrongRef(new)
        return weakref.ref(new, self.copy(value.__callback__, path, False)) if kind is weakref.ref else kind(new)

    def _led(self, value: Any, path: Path) -> Any:
        """What stands for that to which a weak reference leads."""
        if id(value) in self.held or id(value) in self.memo:
            return self.copy(value, path)
        if not is_atom(value) and self.reaches(value):
            self._refuse(path, value, "leads to a part of the model, by a weak reference", "Keep a strong one to it.")
        return value

    def _object(self, value: Any, path: Path) -> Any:
        """A tensor, or an object of any other class, by what Python has for copies of it."""
        if isinstance(value, torch.Tensor):
            if (name := self._seen_in(value)) is not None:  # it sees the parameter change, as `weight.detach()` does
                what = f"has memory of the parameter {name!r}, whose values come from a state"
                self._refuse(path, value, what, "Read the parameter in the forward; or keep a clone, as it is now.")
            if place := getattr(value, "place", None):  # a placeholder outside of its slot
                self.copy(place[0], path)
        met: Exception | None = None
        if not _is_torchs(value):
            try:
                if (own := getattr(value, "__deepcopy__", None)) is not None:
                    return self._by_itself(value, own, path)
                reduce = copyreg.dispatch_table.get(type(value))
                return self._rebuilt(value, reduce(value) if reduce else value.__reduce_ex__(4), path)
            except (TreeError, RecursionError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # whatever the class says
                met = error
                self.memo.pop(id(value), None)
        if isinstance(value, torch.Tensor) or self.reaches(value, True):  # a tensor may be computed from weights
            why = TORCHS if met is None else (str(met).splitlines() or [type(met).__name__])[0]
            self._refuse(path, value, f"cannot be copied ({why}), and may lead to weights", "Leave it out.", met)
        return value

    def _seen_in(self, value: torch.Tensor) -> str | None:
        """The path of a parameter whose memory a tensor has, too, unless each call replaces the tensor. Also of a
        frozen one, which another spec may train, and another file may have other values of."""
        span = span_of(value) if self.spans and id(value) not in self.renewed else None
        there = self.spans.get(span.storage, ()) if span is not None else ()
        return next((name for name, weight in there if span is not None and span.meets(weight)), None)

    def _by_itself(self, value: Any, own: Any, path: Path) -> Any:
        """A class that copies itself, with what is in it copied before: it calls `copy.deepcopy`, which knows less."""
        if (
            isinstance(value, nn.Module)
            and not isinstance(value, torch.jit.ScriptModule)
            and id(value) not in self.busy
        ):
            self.busy.add(id(value))
            for name, x in parts(value):
                self.copy(x, (path, name))
            if id(value) in self.memo:
                return self.memo[id(value)]
        return own(self.memo)

    def _rebuilt(self, value: Any, said: Any, path: Path) -> Any:
        """An object again from what `__reduce_ex__` said."""
        if isinstance(said, str):
            return value
        make, args, state, items, pairs = (*said, None, None, None)[:5]
        made = self.memo[id(value)] = make(*[self.copy(x, path) for x in args])
        if state is not None:
            copied = self._state(state, path)
            if hasattr(made, "__setstate__"):
                made.__setstate__(copied)
            else:
                held, slots = copied if isinstance(copied, tuple) and len(copied) == 2 else (copied, None)
                if held:
                    vars(made).update(held)
                for name, x in (slots or {}).items():
                    object.__setattr__(made, name, x)
        for x in items or ():
            made.append(self.copy(x, path))
        for key, x in pairs or ():
            made[self.copy(key, path)] = self.copy(x, (path, f"[{key!r}]"))
        return made

    def _state(self, state: Any, path: Path) -> Any:
        if type(state) is dict:
            return {name: self.copy(x, (path, f".{name}")) for name, x in state.items()}
        if type(state) is tuple:
            return tuple([self._state(x, path) for x in state])
        return self.copy(state, path)

    def _function(self, function: FunctionType, path: Path) -> FunctionType:
        fresh = []
        cells = []
        for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
            if not any(self.reaches(x) for _, x in parts(cell)):
                cells.append(cell)  # a counter, say, that others count with
                continue
            if id(cell) not in self.cells:
                self.kept.append(cell)
                self.cells[id(cell)] = CellType()
                fresh.append((cell, name))
            cells.append(self.cells[id(cell)])
        new = FunctionType(function.__code__, function.__globals__, function.__name__, None, tuple(cells))
        self.memo[id(function)] = new  # it may close over itself
        for cell, name in fresh:
            self.cells[id(cell)].cell_contents = self.copy(cell.cell_contents, (path, f".{name}"), False)
        given = [self.copy(x, path, False) for x in function.__defaults__ or ()]
        new.__defaults__ = tuple(given) if function.__defaults__ else None
        if function.__kwdefaults__:
            new.__kwdefaults__ = {name: self.copy(x, path, False) for name, x in function.__kwdefaults__.items()}
        for name in ("__qualname__", "__module__", "__doc__", "__annotations__"):
            setattr(new, name, getattr(function, name))
        vars(new).update({name: self.copy(x, path, False) for name, x in vars(function).items()})
        return new

    # ---------------------------------------------------------------- what leads to a part

    def reaches(self, value: Any, weights: bool = False) -> bool:
        """Whether an owned object, or a weight, a buffer or a module with such, is reached from here, by any way; or
        memory of a weight."""
        goals, barren = self.weights if weights else self.owned, self.barren[weights]
        walk = Walk(lambda x: id(x) not in barren)
        for _, x in walk([Part("", value)]):
            if id(x) in goals or isinstance(x, FakeTensor):  # by `init`, which made it
                return True
            if isinstance(x, torch.Tensor) and self._seen_in(x) is not None:
                return True
        barren |= walk.seen
        return False

    # ---------------------------------------------------------------- what no copy can have

    def _class(self, cls: type, path: Path) -> None:
        """Refuse a class that holds a part of the model where its methods use it: a class is not copied."""
        for base in cls.__mro__:
            if package_of(base) in ("torch", "builtins"):
                continue
            for name, value in [*vars(base).items()]:
                function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if isinstance(function, FunctionType) and name not in BUILDS:
                    self._closure(function, path)
                    self._code(function, path, cls)

    def _closure(self, function: FunctionType, path: Path) -> None:
        defaults = {*map(id, function.__defaults__ or ()), *map(id, (function.__kwdefaults__ or {}).values())}
        for name, x in closed_over(function):
            if not is_atom(x) and self._holds(x, id(x) not in defaults):
                what = f"closes over a part of the model by {name[1:]!r}, and classes and globals are not copied"
                self._refuse(path, function, what)

    def _holds(self, value: Any, itself: bool = True) -> bool:
        """Whether what is not copied holds a weight, or is itself an object that the model holds, too."""
        return (itself and id(value) in self.owned) or self.reaches(value, True)

    def _code(self, function: Any, path: Path, cls: type | None = None) -> None:
        """Refuse a function that reads a part of the model from a global variable or a class: these are not copied."""
        while isinstance(function, (MethodType, partial, Cache)):
            function = next(getattr(function, name) for name in FUNCTIONS if hasattr(function, name))
        if not isinstance(function, FunctionType):
            return
        left: list[Any] = [function]
        while left:
            one = left.pop()
            key = id(one), cls if one is function else None
            if key in self.read:
                continue
            self.read[key] = one
            code = one.__code__
            if one is not function:
                self._closure(one, path)
            names = names_in(code)
            there = one.__globals__
            spaces = [(f"the global variable {name!r}", name, there[name]) for name in names if name in there]
            if cls is not None and one is function:
                spaces += self._inside(cls, names)
            while spaces:
                which, name, value = spaces.pop()
                value = value.__wrapped__ if isinstance(value, Cache) else value
                if isinstance(value, FunctionType):
                    if not is_standard(value):
                        left.append(value)
                elif isinstance(value, type | types.ModuleType):
                    spaces += self._inside(value, names)
                elif not is_atom(value) and self._holds(value, which.startswith("the global")):
                    if which.startswith("the global") and name not in global_names(code):
                        continue  # an attribute of that name
                    holds = "is" if id(value) in self.owned else "holds"
                    self._refuse(path, one, f"reads {which}, which {holds} a part of the model")

    def _inside(self, space: Any, names: frozenset[str]) -> list[tuple[str, str, Any]]:
        """What a class or a module of Python has under these names."""
        if (id(space), names) in self.looked or is_standard(space):
            return []
        self.looked.add((id(space), names))
        found = []
        for base in getattr(space, "__mro__", (space,)):
            held = {} if is_standard(base) else vars(base)
            which = f"of {base.__name__}"
            found += [(f"the attribute {name!r} {which}", name, held[name]) for name in names if name in held]
        return [
            (which, name, x) for which, name, x in found if not isinstance(x, property | staticmethod | classmethod)
        ]

    def _refuse(
        self, path: Path, value: Any, what: str, remedy: str = REMEDY, cause: Exception | None = None
    ) -> NoReturn:
        named = isinstance(value, FunctionType | MethodType | type)
        name, where = value.__qualname__ if named else type(value).__qualname__, ""
        while path is not None:
            path, part = path
            where = part + where
        where = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", where).lstrip(".")
        at = f"{where!r} in the module" if where else "the module"
        said = f"{at} ({name}) {what}: a copy of the module would go on with the original's. {remedy}"
        raise TreeError(said) from cause


def is_fixed(value: Any) -> bool:
    """Whether a value cannot be told from an equal one: a tuple, a range, a partial of a class."""
    return isinstance(value, (tuple, frozenset, partial, MethodType, *BUILTINS)) or is_atom(value)


def _is_torchs(value: Any) -> bool:
    """Whether a value is a part of torch's machinery, which may count on being the only one: a copy of a weak reference
    to a storage, say, would free it twice."""
    names = type(value).__module__.split(".")
    if names[0] != "torch" or isinstance(value, torch.Tensor | nn.Module | torch.Generator):
        return isinstance(value, StorageWeakRef)
    return names[1:2] not in COPIED or any(name[:1] == "_" for name in names)
