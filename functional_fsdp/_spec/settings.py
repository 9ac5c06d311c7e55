"""Settings in words: what an optimizer, a schedule or a Spec was given, as lines that ranks or runs can compare.

    describe_settings(adamw(lr=partial(warm_up, peak=3e-4)), "optimizer")

    optimizer: functional_fsdp._optim.adamw.AdamW
    optimizer.lr: functools.partial
    optimizer.lr.func: function train.warm_up
    optimizer.lr.func.code: 5d0c1e8fa7b2
    optimizer.lr.keywords['peak']: 0.0003
    optimizer.betas: (0.9, 0.999)

A line says one thing, and says the same in every process: no addresses, no order of hashing. Functions are compared by
qualified name, code, constants, defaults, what they close over, and the globals of their module that they read; objects
by their class and their attributes; tensors and arrays by content. An object may say itself what counts, by a method
`__fsdp_settings__()`, whose result is described in its place.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import random
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from collections.abc import Set as AnySet
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._common.device import checksum
from .._common.objects import contents_of, global_names, is_standard, slots_in
from .._common.torch_names import OpOverload, OpOverloadPacket

PLAIN = (type(None), bool, int, float, complex, str, bytes)
LONG = 80  # characters of a value; of a longer one the beginning and a digest
MOST = 10_000  # lines of one value
DEEP = 100  # levels of one value
NAMED = (
    *(type, types.ModuleType, torch.dtype, torch.memory_format, torch.layout, logging.Logger),
    *(OpOverload, OpOverloadPacket),
)
OPAQUE = (torch.Generator, random.Random, dist.ProcessGroup, weakref.ReferenceType, types.GeneratorType)
MACHINERY = ("torch._", "triton.", "functools")  # modules whose objects change by themselves
INSIDE = ("_orig_mod", "__wrapped__", "fn")  # of a compiled module, a cache of results, a kernel: what the user wrote


def describe_settings(value: Any, name: str = "") -> list[str]:
    """What `value` is made of, a line each: equal settings give equal lines in every process.

    Args:
        value: numbers, strings, tensors, containers, dataclasses, functions, partials, methods, other objects.
        name: what the lines begin with.

    >>> describe_settings({"lr": 0.1, "betas": (0.9, 0.95)}, "sgd")
    ['sgd: dict of 2', "sgd['betas']: (0.9, 0.95)", "sgd['lr']: 0.1"]
    """
    return _Walk(name, value).lines


def opaque_settings(value: Any, name: str = "") -> list[str]:
    """What of `value` `describe_settings` cannot look into, a line each: where it is, and its type.

    >>> opaque_settings({"lr": 0.1, "lock": __import__("threading").Lock()}, "sgd")
    ["sgd['lock']: _thread.lock"]
    """
    return _Walk(name, value).opaque


class _Walk:
    """One way through a value, depth first. `under`: the objects that it is inside of, so that cycles end."""

    def __init__(self, name: str, value: Any) -> None:
        self.lines: list[str] = []
        self.opaque: list[str] = []
        self.under: dict[int, str] = {}
        self.visit(name, value)

    def say(self, where: str, text: str) -> None:
        self.lines.append(f"{where}: {text}" if where else text)

    def hide(self, where: str, what: str) -> None:
        """This cannot be compared, but that there is one of its type can."""
        self.say(where, what)
        self.opaque.append(f"{where}: {what}" if where else what)

    def visit(self, where: str, value: Any) -> None:
        if len(self.lines) >= MOST:
            if len(self.lines) == MOST:
                self.hide(where, f"what follows {MOST} settings")
        elif (text := _plain(value)) is not None:
            self.say(where, text)
        elif id(value) in self.under:
            self.say(where, f"the same as {self.under[id(value)] or 'the whole'}")
        elif len(self.under) >= DEEP:
            self.hide(where, f"{_name(type(value))}, {DEEP} levels deep")
        else:
            self.under[id(value)] = where
            self._one(where, value)
            del self.under[id(value)]

    def _one(self, where: str, value: Any) -> None:
        for kinds, describe in _KINDS:
            if isinstance(value, kinds):
                describe(self, where, value)
                return
        if (said := getattr(type(value), "__fsdp_settings__", None)) is not None:
            self.say(where, _name(type(value)))
            self.visit(where, said(value))
        elif dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
            self._object(where, value, {name: getattr(value, name) for name in names})
        elif all(hasattr(value, name) for name in ("dtype", "shape", "tobytes")):  # numpy's
            self.say(where, _short(f"{_name(type(value))} {tuple(value.shape)} {value.dtype} {value.tobytes()!r}"))
        elif isinstance(value, OPAQUE) or type(value).__module__.startswith(MACHINERY):
            inside = [getattr(value, name) for name in INSIDE if callable(getattr(value, name, None))]
            if inside:
                self.say(where, _name(type(value)))
                self.visit(where, inside[0])
            else:
                self.hide(where, _name(value) if callable(value) else _name(type(value)))
        elif hasattr(value, "__dict__") or slots_in(value):
            self._object(where, value, slots_in(value))
        elif " at 0x" not in (text := repr(value)):
            self.say(where, _short(f"{_name(type(value))} {text}"))  # a fraction, a range, a date
        else:
            self.hide(where, _name(type(value)))

    # ---- each kind of thing

    def _object(self, where: str, value: Any, fields: Mapping[str, Any]) -> None:
        self.say(where, _name(type(value)))
        self._class(where, type(value))
        own = {k: v for k, v in getattr(value, "__dict__", {}).items() if k not in fields and not _cached(value, k)}
        for name, one in (*fields.items(), *sorted(own.items(), key=lambda pair: str(pair[0]))):
            self.visit(f"{where}.{name}", one)

    def _class(self, where: str, cls: type) -> None:
        """The methods of a class and its bases: two scripts may give one name to different ones."""
        found = [
            f"{name} {_code(fn.__code__)}"
            for one in cls.__mro__
            if not is_standard(one)
            for name, fn in sorted(vars(one).items())
            if isinstance(fn, types.FunctionType) and (not name.startswith("__") or name == "__call__")
        ]
        if found:
            self.say(f"{where}.methods", _digest("\n".join(found)))

    def _tensor(self, where: str, value: torch.Tensor) -> None:
        text = f"tensor {tuple(value.shape)} {value.dtype}"
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        if not plain or value.device.type == "meta":
            self.hide(where, f"{text} of type {_name(type(value))} on {value.device.type}")
            return
        shown = value.detach().flatten()[:4]
        first = [str(x) for x in (shown.view(torch.uint8) if value.dtype is torch.float4_e2m1fn_x2 else shown).tolist()]
        dots = ["..."] if value.numel() > 4 else []
        self.say(where, f"{text} [{', '.join(first + dots)}] {int(checksum(value)) % (1 << 64):016x}")

    def _class_or_name(self, where: str, value: Any) -> None:
        self.say(where, f"{type(value).__name__} {_name(value)}")
        if isinstance(value, type):
            self._class(where, value)

    def _enum(self, where: str, value: Enum) -> None:
        self.say(where, f"{_name(type(value))}.{value.name}")

    def _device(self, where: str, value: torch.device) -> None:
        self.say(where, f"device {value.type}")  # each rank has a number of its own

    def _text(self, where: str, value: Any) -> None:
        self.say(where, _short(f"{_name(type(value))} {str(value)!r}"))

    def _mesh(self, where: str, value: DeviceMesh) -> None:
        axes = ", ".join(f"{n} {s}" for n, s in zip(value.mesh_dim_names or (), value.mesh.shape, strict=False))
        self.say(where, _short(f"mesh on {value.device_type}, {axes}, ranks {value.mesh.flatten().tolist()}"))

    def _sequence(self, where: str, value: Any) -> None:
        fields = getattr(value, "_fields", None)  # of a NamedTuple
        kind = "" if type(value) in (list, tuple) else _name(type(value))
        if not fields and (text := _literal(list(value))) is not None:
            self.say(where, _short(f"{kind}{text}"))
            return
        self.say(where, f"{kind or type(value).__name__} of {len(value)}")
        for i, item in enumerate(value):
            self.visit(f"{where}.{fields[i]}" if fields else f"{where}[{i}]", item)

    def _set(self, where: str, value: AnySet[Any]) -> None:
        self.say(where, _short(f"set {{{', '.join(sorted(map(_whole, value)))}}}"))

    def _mapping(self, where: str, value: Mapping[Any, Any]) -> None:
        self.say(where, f"{type(value).__name__} of {len(value)}")
        items = [(_whole(key), item) for key, item in value.items()]
        if not isinstance(value, OrderedDict):  # the only one that is equal by order
            items.sort(key=lambda pair: pair[0])
        for key, item in items:
            self.visit(f"{where}[{key}]", item)

    def _partial(self, where: str, value: functools.partial[Any]) -> None:
        self.say(where, "functools.partial")
        self.visit(f"{where}.func", value.func)
        for name, given in (("args", value.args), ("keywords", value.keywords)):
            if given:
                self.visit(f"{where}.{name}", given)

    def _method(self, where: str, value: types.MethodType) -> None:
        self.say(where, "method")
        self.visit(f"{where}.__func__", value.__func__)
        self.visit(f"{where}.__self__", value.__self__)

    def _builtin(self, where: str, value: Any) -> None:
        owner = getattr(value, "__self__", None)
        self.say(where, f"builtin {_name(value)}")
        if owner is not None and not isinstance(owner, types.ModuleType | type):
            self.visit(f"{where}.__self__", owner)

    def _function(self, where: str, fn: types.FunctionType) -> None:
        original = getattr(fn, "_torchdynamo_orig_callable", None)
        if original is not None:  # the rest of torch.compile(f) is the compiler's
            self.say(where, "torch.compile")
            self.visit(where, original)
            return
        self.say(where, f"function {_name(fn)}")
        names = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        if not is_standard(fn):  # else its name says it
            self.say(f"{where}.code", _code(fn.__code__))
            given = fn.__defaults__ or ()
            arguments = fn.__code__.co_varnames[: fn.__code__.co_argcount]
            defaults = dict(zip(arguments[len(arguments) - len(given) :], given, strict=True))
            for name, value in {**defaults, **(fn.__kwdefaults__ or {})}.items():
                self.visit(f"{where}.{name}", value)
            for name in dict.fromkeys(global_names(fn.__code__)):
                if name in fn.__globals__:
                    self._global(f"{where}.{name}", fn, fn.__globals__[name])
        for name, cell in names.items():
            held = contents_of(cell)
            if held:
                self.visit(f"{where}.{name}", *held)
            else:
                self.say(f"{where}.{name}", "not set yet")

    def _global(self, where: str, fn: types.FunctionType, value: Any) -> None:
        """What a function reads from its module: numbers, tensors and functions that are written there. Of anything
        else the kind must do: a module's objects are those of a whole program."""
        here = isinstance(value, types.FunctionType) and value.__globals__ is fn.__globals__
        short = isinstance(value, list | tuple | dict | frozenset) and len(value) <= LONG
        if here or short or _plain(value) is not None or isinstance(value, torch.Tensor | functools.partial):
            self.visit(where, value)
        elif isinstance(value, (*NAMED, types.FunctionType, types.BuiltinFunctionType)):
            self.say(where, f"{type(value).__name__} {_name(value)}")
        else:
            self.hide(where, _name(type(value)))


_KINDS: tuple[tuple[Any, Callable[[_Walk, str, Any], None]], ...] = (
    (Enum, _Walk._enum),
    (NAMED, _Walk._class_or_name),
    (torch.Tensor, _Walk._tensor),
    (torch.device, _Walk._device),
    (DeviceMesh, _Walk._mesh),
    ((str, int, float, complex, PurePath), _Walk._text),
    ((list, tuple, deque), _Walk._sequence),
    (AnySet, _Walk._set),
    (Mapping, _Walk._mapping),
    (functools.partial, _Walk._partial),
    (types.MethodType, _Walk._method),
    (types.FunctionType, _Walk._function),
    ((types.BuiltinFunctionType, types.MethodWrapperType, types.MethodDescriptorType), _Walk._builtin),
)


def _plain(value: Any) -> str | None:
    """A number or a text as it reads; None for what has parts."""
    return _short(repr(value)) if type(value) in PLAIN else None


def _literal(value: Any, deep: int = 0) -> str | None:
    """Numbers and texts in lists of lists, as they read; None where there is anything else."""
    if type(value) not in (list, tuple) or deep > 4:
        return _plain(value)
    texts = [_literal(item, deep + 1) for item in value]
    return None if None in texts else f"({', '.join(map(str, texts))}{',' if len(texts) == 1 else ''})"


def _whole(value: Any) -> str:
    return "; ".join(describe_settings(value))


def _short(text: str) -> str:
    return text if len(text) <= LONG else f"{text[: LONG // 2]}... {len(text)} characters, {_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]


def _code(code: types.CodeType) -> str:
    """A digest of what the code does, wherever its file lies."""
    consts = [_code(c) if isinstance(c, types.CodeType) else _whole(c) for c in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return _digest(repr((code.co_code, code.co_exceptiontable, consts, names, counts)))


def _name(value: Any) -> str:
    """Where a class or function is defined, as its module says it; of other things what they are called."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or getattr(value, "name", None)
    module = getattr(value, "__module__", None)
    return f"{module}.{name}" if name and isinstance(module, str) and module != "builtins" else str(name or value)


def _cached(value: Any, name: Any) -> bool:
    """Whether an attribute is one that was worked out from the others."""
    return isinstance(getattr(type(value), str(name), None), functools.cached_property)
