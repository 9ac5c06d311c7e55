"""Objects: what a Python object holds. One place for all that look into objects which are not theirs.

atom        numbers, texts, classes, modules of Python, dtypes, ...      holds nothing that can change
container   lists, tuples, sets, dicts, deques, and classes of these     its items
object      attributes, in `__dict__` and in `__slots__`                 their values
function    closures, defaults, attributes; methods, partials, caches    what they would use when they are called
weak        references, proxies, methods, weak dicts and sets            what they lead to
opaque      locks, iterators, files, whatever is written in C            what the garbage collector finds in it

policy      where
describe    `_spec.settings`: settings in words, to be compared by ranks and runs
copy        `_nn.copies`: a module with its functions and weak references
compare     `transforms/_drive/settings.py`: what a loop changes in a model after a transform was made of it
forbid      `_nn.copies`: what classes and globals hold, which no copy can have
find        tensors and generators, wherever they are: `within`
"""

from __future__ import annotations

import dis
import gc
import logging
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import lru_cache, partial
from pathlib import PurePath
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .torch_names import FakeTensor, FakeTensorMode, OpOverload, OpOverloadPacket

Cache: Any = type(lru_cache(int))
PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
BUILTINS = (types.BuiltinFunctionType, types.MethodWrapperType)
#: what holds nothing that can change, is one of its kind, or is shared by all
ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range, slice, Enum, PurePath),
    *(type, types.ModuleType, types.CodeType, logging.Logger, torch.Size, torch.dtype, torch.device, torch.layout),
    *(torch.memory_format, OpOverload, OpOverloadPacket, DeviceMesh, dist.ProcessGroup, FakeTensorMode),
)
GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size))
HOLDERS = frozenset((dict, OrderedDict, list, tuple, set, types.FunctionType, torch.nn.Parameter))  # no atoms
SEQUENCES = (list, tuple, deque, set, frozenset)
WEAK = (weakref.ReferenceType, weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet)
#: packages whose functions and classes are the same wherever their version is, and hold no part of a model; pytest's is
#: in each `assert` of a file that it rewrote
STANDARD = frozenset(sys.stdlib_module_names) - {"__main__"} | {"torch", "numpy", "functional_fsdp", "_pytest"}


class Part(NamedTuple):
    """Something that an object holds. `name`: how it reads after the object's own, as `.scale` or `[0]`."""

    name: str
    value: Any


def is_atom(value: Any) -> bool:
    """Whether a value has no parts."""
    kind = type(value)
    return kind in PLAIN or (kind not in HOLDERS and kind not in PROXIES and isinstance(value, ATOMS))


def is_weak(value: Any) -> bool:
    """Whether a value leads to objects that it does not keep alive."""
    kind = type(value)
    return kind not in HOLDERS and (kind in PROXIES or isinstance(value, WEAK))


def is_opaque(value: Any) -> bool:
    """Whether nothing is known of a value, but what the garbage collector finds in it."""
    return not is_atom(value) and _known(value) is None


def parts(value: Any) -> list[Part]:
    """What a value holds; see the top of this file. A part may be made for this call: keep it while its id is used."""
    if is_atom(value):
        return []
    found = _known(value)
    return _referents(value) if found is None else found


def _known(value: Any) -> list[Part] | None:
    kind = type(value)
    if kind is dict:
        return _items(value)
    if kind is OrderedDict and not value and not vars(value):  # as a module has for hooks, seven of them
        return []
    if kind is list or kind is tuple:
        return [Part(f"[{i}]", x) for i, x in enumerate(value)]
    if kind in PROXIES or isinstance(value, weakref.ReferenceType):
        return [Part("()", target(value))]
    if isinstance(value, torch.nn.Module) and not isinstance(value, (dict, *SEQUENCES)):
        return _attributes(value)
    if isinstance(value, types.FunctionType):
        return closed_over(value)
    if isinstance(value, types.MethodType):
        return [Part(".__self__", value.__self__), Part(".__func__", value.__func__)]
    if isinstance(value, BUILTINS):
        return [Part(".__self__", value.__self__)]
    if isinstance(value, Cache | staticmethod | classmethod):
        return [Part(".__wrapped__", value.__wrapped__), *_attributes(value)]
    if isinstance(value, property):
        return [Part(".fget", value.fget), Part(".fset", value.fset)]
    if isinstance(value, types.CellType):
        return [Part("", x) for x in contents_of(value)]
    if isinstance(value, torch.Tensor):
        return [] if isinstance(value, FakeTensor) else _attributes(value)
    held: list[Part] = []
    if isinstance(value, partial):
        held = [Part(".func", value.func), Part(".args", value.args), Part(".keywords", value.keywords)]
    elif isinstance(value, weakref.WeakValueDictionary | weakref.WeakKeyDictionary):
        return _items(dict(value))
    elif isinstance(value, weakref.WeakSet):
        return [Part("{}", x) for x in value]
    elif isinstance(value, dict):
        held = [*map(Part, map("[{!r}]".format, map(_short, dict.keys(value))), dict.values(value))]
        held += [Part(".keys", key) for key in dict.keys(value) if not is_atom(key)]
    elif isinstance(value, types.MappingProxyType):
        return _items(dict(value))
    elif isinstance(value, SEQUENCES):
        base: Any = next(b for b in SEQUENCES if isinstance(value, b))
        held = [Part(f"[{i}]", x) for i, x in enumerate(base.__iter__(value))]
    elif buffer_of(value) is not None:
        pass
    elif is_array(value):  # of objects
        held = [Part(f"[{i}]", x) for i, x in enumerate(value.flat)]
    elif not hasattr(value, "__dict__") and not _slot_names(kind):  # type: ignore[arg-type]  # to mypy a class has no hash
        return None
    return [*held, *_attributes(value)]


def buffer_of(value: Any) -> memoryview | None:
    """The numbers that an array has in memory, numpy's, Python's or C's; None of anything else."""
    try:
        view = memoryview(value)
        return view if "O" not in view.format else None
    except (TypeError, ValueError, BufferError):
        return None


def is_array(value: Any) -> bool:
    """Whether a value is an array of numpy's, which need not be installed."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _items(value: dict[Any, Any]) -> list[Part]:
    found = [Part(f"[{_short(key)!r}]", x) for key, x in value.items()]
    return found + [Part(".keys", key) for key in value if not is_atom(key)]


def _short(key: Any) -> Any:
    return key if isinstance(key, str | int) else type(key).__name__


def _attributes(value: Any) -> list[Part]:
    own = getattr(value, "__dict__", None)
    held = [*own.items()] if isinstance(own, dict) else []
    return [Part(f".{name}", x) for name, x in (*held, *slots_in(value).items())]


@lru_cache(10_000)
def _slot_names(cls: Any) -> tuple[str, ...]:
    found: list[str] = []
    for base in cls.__mro__:
        names = vars(base).get("__slots__", ())
        found += (names,) if isinstance(names, str) else names
    return tuple(name for name in dict.fromkeys(found) if name[:2] != "__")


def slots_in(value: Any) -> dict[str, Any]:
    """What is in the `__slots__` of an object, by name."""
    names = _slot_names(type(value))  # type: ignore[arg-type]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _referents(value: Any) -> list[Part]:
    if isinstance(value, GENERATORS):
        frame = getattr(value, "gi_frame", None) or getattr(value, "cr_frame", None) or getattr(value, "ag_frame", None)
        return [Part(f".{name}", x) for name, x in (frame.f_locals if frame else {}).items()]
    skip = (type, types.ModuleType, types.FrameType)
    return [Part(f".<{type(x).__name__}>", x) for x in gc.get_referents(value) if not isinstance(x, skip)]


def target(reference: Any) -> Any:
    """What a weak reference or a proxy leads to; None if it is gone."""
    if type(reference) not in PROXIES:
        return reference()
    try:
        return reference.__repr__.__self__
    except ReferenceError:
        return None


def contents_of(cell: types.CellType) -> tuple[Any, ...]:
    """What a cell of a closure holds, as a tuple of one; () where it is empty."""
    try:
        return (cell.cell_contents,)
    except ValueError:  # empty
        return ()


def closed_over(function: types.FunctionType) -> list[Part]:
    """What a function closes over, its defaults, and what is in its attributes."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = [Part(f".{name}", x) for name, cell in cells for x in contents_of(cell)]
    found += [Part(".__defaults__", x) for x in function.__defaults__ or ()]
    found += [Part(f".{name}", x) for name, x in (function.__kwdefaults__ or {}).items()]
    return found + [Part(f".{name}", x) for name, x in vars(function).items()]


class Walk:
    """A way through objects, breadth first, each of them once.

    Args:
        into: whether to go on into the parts of this object.
    """

    def __init__(self, into: Callable[[Any], bool] = lambda value: True) -> None:
        self.into = into
        self.seen: dict[int, Any] = {}  # kept alive: else an id may be another object's

    def __call__(self, start: Iterable[Part]) -> Iterator[Part]:
        left = deque(start)
        while left:
            path, value = left.popleft()
            if type(value) in PLAIN or id(value) in self.seen:
                continue
            self.seen[id(value)] = value
            yield Part(path, value)
            if self.into(value):
                left += [Part(path + name, x) for name, x in parts(value) if type(x) not in PLAIN]


def within(value: Any, into: Callable[[Any], bool] = lambda value: True) -> Iterator[Any]:
    """What can be reached from a value, itself among it: all but numbers, texts and classes, each once."""
    return (x for _, x in Walk(into)([Part("", value)]))


# ---------------------------------------------------------------- code


def package_of(value: Any) -> str:
    """The package of a class, a function or a module of Python."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return str(name or "builtins").partition(".")[0]


def is_standard(value: Any) -> bool:
    """Whether a class, a function or a module of Python is of a package of `STANDARD`."""
    return package_of(value) in STANDARD


@lru_cache(10_000)
def names_in(code: types.CodeType) -> frozenset[str]:
    """All names of globals and attributes in some code, and in the code inside it."""
    inner = [names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def global_names(code: types.CodeType) -> Iterator[str]:
    """The globals that `code` and the code inside it read (an attribute of the same name is none)."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            yield instruction.argval
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from global_names(const)
