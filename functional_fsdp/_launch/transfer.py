"""Transfer: objects on their way to workers and back, as bytes.

What can be imported goes by name. Functions and classes that cannot (of a notebook, of `__main__`, lambdas, closures)
go by value, through cloudpickle, with the globals that they name and the source lines that tracebacks show. In a worker
those globals are a module's, see below.

Two directions. `dumps(x)` leaves the caller. `dumps(x, home=True)` brings a result back: a class that came from the
caller is named, not copied, so instances come back as instances of the class that the caller wrote, and GPU tensors
arrive on the CPU.

torch.compile looks a function's globals up in the module that `import` finds under their `__name__`. A worker's
`__main__` is another module than the caller's, and the functions of two calls may name two values alike. So globals
that come are those of a module of their own, `__main__N`, which can be imported as long as a function of it is left.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import linecache
import os
import pickle
import re
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._common.device import on_host
from .._common.torch_names import forget_imports

__all__ = ["Namespaces", "dumps", "loads", "namespaces"]

MAIN = "__main__"
OWN = "__functional_fsdp_module__"  # among the globals: their module, which lives as long as they do


class Namespaces:
    """The modules of a worker; a finder and loader of them, as `sys.meta_path` has. In a process that is no worker
    globals stay as they come."""

    def __init__(self) -> None:
        self.serving = False
        self.count = itertools.count(1)
        self.modules: weakref.WeakValueDictionary[str, types.ModuleType] = weakref.WeakValueDictionary()

    def of(self, came: dict[str, Any]) -> dict[str, Any]:
        """The globals for functions whose globals `came`: the same ones each time for the same dict."""
        if not re.fullmatch(rf"{MAIN}\d*", came.get("__name__", "")):  # those of a module that can be imported here
            return came
        came["__name__"] = MAIN  # as the caller's code has it, where this one goes home
        if not self.serving:
            return came
        if OWN not in came:
            came[OWN] = module = types.ModuleType(f"{MAIN}{next(self.count)}")
            vars(module).update(came | {"__name__": module.__name__})
            self.modules[module.__name__] = module
            self.exec_module(module)
        return vars(came[OWN])

    def enter(self) -> None:
        """A call begins."""
        self.serving = True
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def leave(self) -> None:
        """A call has ended: what only its functions referred to is let go."""
        self.serving = False
        if self.modules:
            forget_imports()
        for name, module in [*self.modules.items()]:
            if sys.modules.pop(name, None):
                _cloudpickle().unregister_pickle_by_value(module)
            if _referrers(module) == ALONE:  # else the garbage collector finds it
                vars(module).pop(OWN, None)

    # ---- as `import` calls it

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in self.modules else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return self.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """What is defined in it goes by value, since it can be imported nowhere else."""
        sys.modules[module.__name__] = module
        _cloudpickle().register_pickle_by_value(module)


def _cloudpickle() -> Any:
    """A function that came by value came through it."""
    import cloudpickle  # type: ignore[import-untyped]

    return cloudpickle


def _referrers(module: types.ModuleType) -> int:
    """How many there are of its dict. (Functions refer to that, and not to the module.)"""
    found = vars(module)
    return sys.getrefcount(found)


ALONE = _referrers(types.ModuleType(MAIN))


CloudPickler: Any = None  # what can be imported works without it
with contextlib.suppress(ImportError):
    from cloudpickle import CloudPickler  # type: ignore[no-redef]


namespaces = Namespaces()

_classes: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()  # the caller's, sent by value
_numbers: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()
_count = itertools.count()
_Base: Any = CloudPickler or pickle.Pickler


def dumps(obj: Any, home: bool = False, special: Mapping[type, Callable[[Any], Any]] | None = None) -> bytes:
    """`obj` as bytes for `loads` in another process.

    Args:
        home: whether it goes back to the process that sent the code.
        special: by type, how objects are reduced (as by `object.__reduce__`).

    Raises:
        TypeError, pickle.PicklingError: something in it is bound to this process (a lock, an open file, a mesh), or
            takes cloudpickle, which is not installed.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, home, special or {})
    for part in (obj, pickler.sent, pickler.sources):  # filled by the first one
        pickler.dump(part)
    return file.getvalue()


def loads(data: bytes) -> Any:
    """The object that `dumps` wrote."""
    unpickler = pickle.Unpickler(io.BytesIO(data))
    obj, sent, sources = (unpickler.load() for _ in range(3))
    for number, cls in sent.items():
        _numbers[cls] = number
    linecache.cache.update(sources)
    return obj


class _Pickler(_Base):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, home: bool, special: Mapping[type, Callable[[Any], Any]]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.home, self.special = home, special
        self.sent: dict[int, type] = {}
        self.sources: dict[str, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in self.special:
            return self.special[type(obj)](obj)
        if isinstance(obj, torch.Tensor) and self.home and (copied := on_host(obj)) is not obj:
            return copied.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(obj, DeviceMesh) and dist.is_initialized():
            instead = (
                "return tensors, not a State, Spec or mesh" if self.home else "call local_mesh() inside the function"
            )
            raise TypeError(f"{obj} belongs to this process and its group; {instead}")
        if isinstance(obj, types.ModuleType) and sys.modules.get(obj.__name__) is obj and obj.__name__ != "__main__":
            return importlib.import_module, (obj.__name__,)  # torch has modules of classes of their own
        if not isinstance(obj, type | types.FunctionType):
            return super().reducer_override(obj) if CloudPickler else NotImplemented
        if self.home and isinstance(obj, type) and obj in _numbers:
            return _class_of_the_caller, (_numbers[obj], obj.__qualname__)
        if not CloudPickler:
            return _by_name(obj)
        reduced = super().reducer_override(obj)
        if isinstance(reduced, tuple) and len(reduced) > 2:  # by value
            if isinstance(obj, types.FunctionType):
                self._source(obj.__code__.co_filename)
                return _function, (reduced[0], *reduced[1]), *reduced[2:]
            if not self.home:
                self.sent[number := _numbers.setdefault(obj, next(_count))] = obj
                _classes[number] = obj
        return reduced

    def _source(self, filename: str) -> None:
        entry = linecache.cache.get(filename)
        if entry and len(entry) == 4 and not os.path.exists(filename):  # a notebook's cell
            self.sources[filename] = entry


def _function(make: Callable[..., Any], code: Any, came: dict[str, Any], *rest: Any) -> Any:
    """A function that came by value, made by cloudpickle's `make`."""
    return make(code, namespaces.of(came), *rest)


def _class_of_the_caller(number: int, name: str) -> type:
    try:
        return _classes[number]
    except KeyError:
        raise pickle.UnpicklingError(
            f"the class {name} that it was made from is gone, as it was defined anew. Make the value again, by a call "
            "with the class as it is now; or fetch what is in it, as in w(vars, value).get()"
        ) from None


def _by_name(obj: Any) -> Any:
    """Without cloudpickle: refuse what workers cannot import, instead of letting them fail to."""
    module = sys.modules.get(obj.__module__ or "")
    try:
        if obj.__module__ != "__main__" and attrgetter(obj.__qualname__)(module) is obj:
            return NotImplemented
    except AttributeError:
        pass
    if isinstance(obj, type) and obj.__module__ == "builtins":
        return NotImplemented
    raise TypeError(
        f"{obj.__qualname__} of {obj.__module__} cannot be imported by the workers, and to send it by value takes "
        "cloudpickle, which is not installed. pip install 'functional-fsdp[launch]', or define it in a module"
    )
