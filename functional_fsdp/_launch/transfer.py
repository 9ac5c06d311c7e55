"""Transfer: objects on their way to workers and back, as bytes.

What can be imported goes by name. Functions and classes that cannot (of a notebook, of `__main__`, lambdas, closures)
go by value, through cloudpickle, with the globals that they name and the source lines that tracebacks show. In a worker
those globals are a module's, see `_launch.namespaces`.

Two directions. `dumps(x)` leaves the caller. `dumps(x, home=True)` brings a result back: a class that came from the
caller is named, not copied, so instances come back as instances of the class that the caller wrote, and GPU tensors
arrive on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import linecache
import os
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._common.device import on_host
from .namespaces import Namespaces

CloudPickler: Any = None  # what can be imported works without it
with contextlib.suppress(ImportError):
    from cloudpickle import CloudPickler  # type: ignore[import-untyped, no-redef]

__all__ = ["dumps", "loads", "namespaces"]

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
