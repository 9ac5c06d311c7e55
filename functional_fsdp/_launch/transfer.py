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

Objects over torch.distributed on an installation without numpy.

torch sends objects (all_gather_object, its checkpoints' plans) as pickled bytes in a tensor, and turns the tensor back
into bytes with numpy, which is no dependency of torch or of this package. Where it is missing, the bytes are read
directly.

Results: what calls returned and stays on a worker, under the numbers that the caller's handles have.

After a call that failed, `renew` has the ranks of every mesh meet, and the States go to the last whole step.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import io
import itertools
import linecache
import os
import pickle
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._common.errors import FsdpError, RestartError, StaleStateError
from .._common.torch_names import pytree
from .._runtime.restart import ALL
from .._runtime.runtime import forget_runtime, runtimes
from .._shared.device import on_host
from .._shared.torch_names import forget_imports, read_objects_by, unpickler
from .._state.state import State
from .._verbs import newest

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


def without_numpy() -> bool:
    """Have torch's object collectives do without numpy, if there is none. Returns whether there is none."""
    try:
        missing = importlib.util.find_spec("numpy") is None
    except (ImportError, ValueError):
        missing = True
    if missing:
        read_objects_by(_to_object)
    return missing


def _to_object(tensor: torch.Tensor, size: int, group: Any) -> Any:
    """What torch's function of this name does: the object that the first `size` bytes of the tensor are."""
    there = tensor.cpu().contiguous()
    return unpickler(io.BytesIO(ctypes.string_at(there.data_ptr(), int(size)))).load()


WIDTH = 100  # characters of a value, where a handle is printed

Key = tuple[int, int | None]  # the number of a call, and a place in the tuple that it returned; None: all of it

_values: dict[Key, Any] = {}
_lengths: dict[int, int] = {}  # of results that are tuples, by call; their items lie one by one


def held(key: Key) -> Any:
    """The value of a handle."""
    number, place = key
    if place is None and number in _lengths:
        return tuple(_values[number, i] for i in range(_lengths[number]))
    return _values[key]


def keep(number: int, result: Any) -> int | None:
    """Keep a call's result. Returns its length if it is a tuple that is not empty."""
    if type(result) is tuple and result:
        _lengths[number] = len(result)
        _values.update(((number, i), item) for i, item in enumerate(result))
        return len(result)
    _values[number, None] = result
    return None


def drop(keys: Iterable[Key]) -> None:
    for number, place in keys:
        if place is None:
            for i in range(_lengths.pop(number, 0)):
                _values.pop((number, i), None)
        _values.pop((number, place), None)


def meshes(collect: bool) -> dict[str, int]:
    """After a call that failed or was stopped: the meshes on which this rank may have parted from others, each by a
    name that all of its ranks have for it, with the number of those.

    Args:
        collect: whether garbage is collected first: states of the call that failed, which need not be compared.
    """
    if collect:
        gc.collect()
    return {name: run.size for name, run in runtimes().items()}


def renew(keys: list[Key], common: list[str]) -> None:
    """After a call that failed or was stopped: the ranks of every mesh meet, since some may have been stopped in a step
    and others after it. Each State that the call was given is the one after the last whole step.

    Args:
        keys: of the handles that the call was given.
        common: the meshes that all of their ranks have, in the order in which they meet.
    """
    here = runtimes()
    for name in here.keys() - {*common}:
        forget_runtime(here.pop(name), "A call was stopped while its ranks made their communicators.")
    places = [place for key in keys for place in _places(key)]
    given = _lineages(places)
    met = {id(run) for run, _ in given.values() if run.size == 1}
    for name in common:
        if name in here and _meet(here[name], given.get(id(here[name]), (None, []))[1]):
            met.add(id(here[name]))

    def later(state: State) -> State:
        lineage = state.version.lineage
        return _newest(state) if lineage.successor is None or id(lineage.runtime) in met else state

    seen: set[int] = set()
    for place in places:
        _values[place] = _replaced(_values[place], later, seen)


def _places(key: Key) -> list[Key]:
    """Where in the table the values of a handle lie."""
    number, place = key
    return [(number, i) for i in range(_lengths[number])] if place is None and number in _lengths else [key]


def _lineages(places: list[Key]) -> dict[int, tuple[Any, list[Any]]]:
    """The lineages of all States there, by the id of their runtime."""
    found: dict[int, tuple[Any, list[Any]]] = {}
    for state in _states([_values[place] for place in places], set()):
        lineage = state.version.lineage
        found.setdefault(id(lineage.runtime), (lineage.runtime, []))[1].append(lineage)
    return found


def _states(value: Any, seen: set[int]) -> Iterator[State]:
    """The States in a pytree, and in attributes of the user's objects there."""
    for leaf in pytree.tree_leaves(value, is_leaf=_is_state):
        if isinstance(leaf, State):
            yield leaf
        for attribute in _attributes(leaf, seen).values():
            yield from _states(attribute, seen)


def _replaced(value: Any, later: Callable[[State], State], seen: set[int]) -> Any:
    """`value` with each such State replaced by what `later` says. Objects stay the ones they are."""

    def at(leaf: Any) -> Any:
        if isinstance(leaf, State):
            return later(leaf)
        for name, attribute in [*_attributes(leaf, seen).items()]:
            own = [one for one in pytree.tree_leaves(attribute, is_leaf=_is_state) if isinstance(one, State)]
            found = _replaced(attribute, later, seen)
            if any(later(one) is not one for one in own):
                vars(leaf)[name] = found
        return leaf

    return pytree.tree_map(at, value, is_leaf=_is_state)


def _attributes(x: Any, seen: set[int]) -> dict[str, Any]:
    """Those of an object of a class of the user's own, once."""
    package = type(x).__module__.partition(".")[0]
    if package in ("builtins", "torch", __name__.partition(".")[0]) or isinstance(x, type | torch.nn.Module):
        return {}
    if id(x) in seen:
        return {}
    seen.add(id(x))
    return getattr(x, "__dict__", {})


def _meet(run: Any, lineages: list[Any]) -> bool:
    """The ranks of a runtime meet. Returns whether these states went equally far on all of them: where one was stopped
    while a verb moved a state, and others after it, nobody has it whole."""
    try:
        if run.meeting is not None and run.meeting.number == run.meetings:
            run.restart(ALL)  # this rank was stopped in that one: its peers may be past it
        run.restart(ALL)
        told = None
        while told is None:
            with contextlib.suppress(RestartError):  # another rank has come to two meetings
                told = run.everyone(([len(lineage.successors) for lineage in lineages], run.lineage_count), "renew")
    except FsdpError:  # a state of it says so itself where it is used
        return False
    run.count_lineages(max(count for _, count in told))
    return all(gone == told[0][0] for gone, _ in told)


def _is_state(x: Any) -> bool:
    return isinstance(x, State)


def _newest(state: State) -> State:
    try:
        state._valid("a handle")
    except StaleStateError:
        with contextlib.suppress(StaleStateError):  # it says so itself where it is used
            return newest(state)
    return state


def same(value: Any) -> Any:
    """The value of a handle, sent to the caller."""
    return value


def short(value: Any) -> str:
    """A value in one line."""
    text = repr(value)
    text = " ".join(text.partition("\n")[0].split() if isinstance(value, State) else text.split())
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
