"""Functions and classes that another process cannot import, pickled by value.

`pickle` writes a function or a class as a name, which means nothing to a worker that started before the notebook
cell that defines it ran. Here whatever cannot be imported travels as what it is made of, in two strokes, so that
recursion ends: first an empty shell, which pickle remembers, then its insides, which may refer to the shell.

| object   | shell                           | insides                                                             |
|----------|---------------------------------|---------------------------------------------------------------------|
| function | code, namespace, empty cells    | what the cells hold, the globals that the code names, its defaults  |
| class    | metaclass, name, bases, slots   | everything else in its body                                         |
| Enum     | the whole: members are values   |                                                                     |

Two directions. `dumps(x)` leaves home: globals go along, since the sender's definitions are the ones that count.
`dumps(x, home=True)` brings a result back: what came from home is named, not copied, so instances come back as
instances of the classes that the caller wrote, the caller's globals stay as they are, and GPU tensors arrive on the
CPU.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import enum
import functools
import importlib
import io
import itertools
import linecache
import marshal
import os
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["dumps", "global_names", "loads"]

Reduced = tuple[Any, ...]
Key = tuple[int, int]  # the process where a class was first pickled, and its number there

_classes: weakref.WeakValueDictionary[Key, type] = weakref.WeakValueDictionary()
_keys: weakref.WeakKeyDictionary[type, Key] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def dumps(obj: Any, home: bool = False) -> bytes:
    """`obj` as bytes for `loads` in another process; `home` when it goes back to the process that sent the code.

    Raises:
        TypeError, pickle.PicklingError: something in it is bound to this process (a lock, an open file, a mesh).
    """
    file = io.BytesIO()
    pickler = _Pickler(file, home)
    pickler.dump(obj)
    return pickle.dumps((pickler.sources, file.getvalue()))


def loads(data: bytes) -> Any:
    """The object that `dumps` wrote. The source lines of its functions come along, for tracebacks."""
    sources, body = pickle.loads(data)
    linecache.cache.update(sources)
    return pickle.loads(body)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, home: bool) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.home = home
        self.namespaces: dict[int, _Namespace] = {}
        self.sources: dict[str, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            return NotImplemented if _importable(obj) else self._class(obj)
        if isinstance(obj, types.FunctionType):
            return NotImplemented if _importable(obj) else self._function(obj)
        if isinstance(obj, torch.Tensor) and obj.is_cuda and self.home:
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(obj, DeviceMesh) and dist.is_initialized():
            instead = (
                "return tensors, not a State, Spec or mesh" if self.home else "call local_mesh() inside the function"
            )
            raise TypeError(f"{obj} belongs to this process and its group; {instead}")
        reduce = _REDUCE.get(type(obj))
        return reduce(obj) if reduce else NotImplemented

    def _function(self, fn: types.FunctionType) -> Reduced:
        scope = self.namespaces.setdefault(id(fn.__globals__), _Namespace(fn.__globals__))
        names = global_names(fn.__code__) if scope.travels(self.home) else ()
        values = {name: fn.__globals__[name] for name in names if name in fn.__globals__}
        cells = fn.__closure__ or ()
        held = [(cell.cell_contents,) if _filled(cell) else () for cell in cells]
        attributes = {name: getattr(fn, name) for name in _FUNCTION_ATTRIBUTES}
        self._source(fn.__code__.co_filename)
        return _new_function, (fn.__code__, scope, cells), (values, held, attributes), None, None, _fill_function

    def _class(self, cls: type) -> Any:
        if not cls.__flags__ & _HEAP_TYPE:
            return (getattr, (types, _NAMELESS[cls])) if cls in _NAMELESS else NotImplemented
        key = _keys.setdefault(cls, (os.getpid(), next(_numbers)))
        _classes[key] = cls
        if self.home and key[0] != os.getpid():
            return _known, (key, cls.__qualname__)
        body = {k: v for k, v in vars(cls).items() if k not in _MADE_ANEW and type(v) is not types.MemberDescriptorType}
        head = {k: body.pop(k) for k in ("__module__", "__qualname__", "__slots__", "__orig_bases__") if k in body}
        if issubclass(cls, enum.Enum):
            members = {name: member.value for name, member in cls.__members__.items()}
            methods = {k: v for k, v in body.items() if isinstance(v, _METHODS) and k not in _ENUM_MACHINERY}
            return _new_enum, (key, type(cls), cls.__name__, cls.__bases__, head, members, methods)
        return _new_class, (key, type(cls), cls.__name__, cls.__bases__, head), body, None, None, _fill_class

    def _source(self, filename: str) -> None:
        entry = linecache.cache.get(filename)
        if entry and not os.path.exists(filename):
            self.sources[filename] = entry


class _Namespace:
    """A function's globals as pickle sees them: the same module's over there, or a new dict if no module has them."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self.name = scope.get("__name__", "")
        module = sys.modules.get(self.name)
        self.importable = _can_import(module) and vars(module) is scope
        self.main = self.name == "__main__" and vars(module) is scope

    def travels(self, home: bool) -> bool:
        """Whether the globals go along: not if they are there already, nor into the caller's own `__main__`."""
        return not (self.importable or (self.main and home))

    def __reduce__(self) -> Reduced:
        return _namespace, (self.name, self.importable or self.main)


def _namespace(name: str, shared: bool) -> dict[str, Any]:
    return vars(importlib.import_module(name)) if shared else {"__name__": name, "__builtins__": builtins}


def _can_import(module: types.ModuleType | None) -> TypeGuard[types.ModuleType]:
    return module is not None and module.__name__ != "__main__" and getattr(module, "__spec__", None) is not None


def _importable(obj: Any) -> bool:
    """Whether another process finds `obj` itself under its module and name."""
    module = sys.modules.get(obj.__module__ or "")
    try:
        return _can_import(module) and attrgetter(getattr(obj, "__qualname__", obj.__name__))(module) is obj
    except AttributeError:
        return False


def global_names(code: types.CodeType) -> Iterator[str]:
    """The globals that `code` and the code inside it read (an attribute of the same name is none)."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            yield instruction.argval
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from global_names(const)


def _filled(cell: types.CellType) -> bool:
    try:
        return bool((cell.cell_contents,))
    except ValueError:
        return False


def _new_function(code: types.CodeType, scope: dict[str, Any], cells: tuple[types.CellType, ...]) -> Any:
    return types.FunctionType(code, scope, None, None, cells)


def _fill_function(fn: types.FunctionType, state: tuple[dict[str, Any], list[Any], dict[str, Any]]) -> None:
    values, held, attributes = state
    fn.__globals__.update(values)
    for cell, content in zip(fn.__closure__ or (), held, strict=True):
        for value in content:
            cell.cell_contents = value
    for name, value in attributes.items():
        setattr(fn, name, value)


def _new_class(key: Key, meta: type, name: str, bases: tuple[type, ...], head: dict[str, Any]) -> type:
    if key not in _classes:
        return _remember(key, types.new_class(name, bases, {"metaclass": meta}, lambda body: body.update(head)))
    return _classes[key]


def _fill_class(cls: type, body: dict[str, Any]) -> None:
    for name, value in body.items():
        type.__setattr__(cls, name, value)


def _new_enum(
    key: Key,
    meta: Any,
    name: str,
    bases: tuple[type, ...],
    head: dict[str, Any],
    members: dict[str, Any],
    methods: dict[str, Any],
) -> type:
    if key in _classes:
        return _classes[key]
    body = meta.__prepare__(name, bases)
    for k, v in {**head, **members, **methods}.items():
        body[k] = v
    return _remember(key, meta(name, bases, body))


def _remember(key: Key, cls: type) -> type:
    _keys[cls], _classes[key] = key, cls
    return cls


def _known(key: Key, name: str) -> type:
    try:
        return _classes[key]
    except KeyError:
        raise pickle.UnpicklingError(f"the class {name} of a returned object no longer exists here") from None


def _cached(fn: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(fn)


def _cached_property(fn: Callable[[Any], Any], name: str) -> Any:
    found: functools.cached_property[Any] = functools.cached_property(fn)
    found.attrname = name
    return found


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement; the others are C's own
_NAMELESS = {cls: name for name, cls in vars(types).items() if isinstance(cls, type)}  # builtins that only types names
_FUNCTION_ATTRIBUTES = (
    *("__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__", "__dict__"),
    "__annotate__" if sys.version_info >= (3, 14) else "__annotations__",
)
_MADE_ANEW = ("__dict__", "__weakref__", "_abc_impl")
_ENUM_MACHINERY = ("_generate_next_value_", "__new__", "__new_member__")
_METHODS = (types.FunctionType, property, classmethod, staticmethod)
_REDUCE: dict[type, Callable[[Any], Any]] = {
    types.CodeType: lambda code: (marshal.loads, (marshal.dumps(code),)),
    types.CellType: lambda cell: (types.CellType, ()),
    types.ModuleType: lambda module: (importlib.import_module, (module.__name__,)),
    types.MappingProxyType: lambda proxy: (types.MappingProxyType, (dict(proxy),)),
    staticmethod: lambda method: (staticmethod, (method.__func__,)),
    classmethod: lambda method: (classmethod, (method.__func__,)),
    property: lambda p: (property, (p.fget, p.fset, p.fdel, p.__doc__)),
    functools.cached_property: lambda p: (_cached_property, (p.func, p.attrname)),
    functools._lru_cache_wrapper: lambda f: (
        f.__qualname__ if _importable(f) else (_cached, (f.__wrapped__, f.cache_parameters()))
    ),
    TypeVar: lambda v: (
        v.__name__
        if _importable(v)
        else (functools.partial(TypeVar, v.__name__, *v.__constraints__, bound=v.__bound__), ())
    ),
    # dataclasses compares these by identity, so they go by name.
    type(dataclasses.MISSING): lambda _: "MISSING",
    type(dataclasses.KW_ONLY): lambda _: "KW_ONLY",
    type(dataclasses._FIELD): lambda kind: kind.name,  # type: ignore[attr-defined]
}
