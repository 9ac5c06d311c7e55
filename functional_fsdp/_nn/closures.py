"""Functions of a module, copied along with it: what they close over goes where the copy's own parts go.

`copy.deepcopy` takes a function for an atom, so a hook of the copy would go on with the objects of the original:

    feats = module.feats = {}                      the copy has a dict of its own,
    lambda part, args, out: feats.update(a=out)    and the copied hook must write into that one

An object is *owned* if it was copied with the module. A function (or a method, a partial, a callable object) that
reaches an owned object is copied, with the same memo; one that reaches none is shared with the original: what it writes
into is the user's.
"""

from __future__ import annotations

import copy
import dis
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.nn as nn

from .._common.errors import TreeError
from .._common.torch_names import FakeTensor

__all__ = ["HOOKS", "Functions", "global_names"]

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
ENOUGH = 10_000  # objects to look at, in search of one that is owned
REMEDY = (
    "Make it a method, in a subclass, or types.MethodType(function, module), and let it read what the module holds."
)


class Functions:
    """The functions of one module that is being copied.

    Args:
        module: the original.
        memo: of `copy.deepcopy`, after the module was copied but for its hooks: what is in it is owned.
    """

    def __init__(self, module: nn.Module, memo: dict[int, Any]) -> None:
        self.memo = memo
        self.path = ""
        self.kept: list[Any] = []  # ids stay theirs while they live
        self.cells: dict[int, CellType] = {}
        self.tensors = {
            id(t): f"the {kind} {path!r}"
            for kind, named in (("parameter", module.named_parameters), ("buffer", module.named_buffers))
            for path, t in named(remove_duplicate=False)
        }
        self.globals: dict[int, set[str]] = {}
        self.copies = set(map(id, memo.values()))

    def of(self, value: Any, path: str) -> Any:
        """What stands for this function of the module at `path`, or hook, in the copy.

        Raises:
            TreeError: it closes over a parameter or buffer, or reads a global variable that is a part of the module.
        """
        self.path = path
        return self._of(value)

    def attributes(self, path: str, copied: nn.Module) -> None:
        """Put in place the functions that a part of the copy has in attributes, and in containers in them."""
        self.path = path
        self._fill(copied)

    def methods(self, path: str, cls: type) -> None:
        """Refuse a class whose methods close over what the module holds: a class is not copied."""
        self.path = path
        for base in cls.__mro__:
            if base.__module__.split(".")[0] in ("torch", "builtins"):
                continue
            for value in vars(base).values():
                function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if isinstance(function, FunctionType):
                    self._global(function)
                    if any(self._owns(x) for x in _contents(function)):
                        raise self._error(function, "closes over a part of the model, and classes are not copied")

    # ---------------------------------------------------------------- one value

    def _of(self, value: Any) -> Any:
        if id(value) in self.copies:
            return value
        if id(value) in self.memo:
            if id(value) in self.tensors:
                raise self._error(value, f"closes over {self.tensors[id(value)]}, whose values come from a state")
            return self.memo[id(value)]
        if isinstance(value, FunctionType):
            self._global(value)
            return self._function(value) if self._reaches(value) else value
        if type(value) is MethodType:
            owner, function = self._of(value.__self__), self._of(value.__func__)
            same = owner is value.__self__ and function is value.__func__
            return value if same else MethodType(function, owner)
        if type(value) is partial:
            held = (value.func, *value.args, *value.keywords.values())
            parts = [self._of(x) for x in held]
            if all(new is old for new, old in zip(parts, held, strict=True)):
                return value
            n = 1 + len(value.args)
            bound: Any = partial(parts[0], *parts[1:n], **dict(zip(value.keywords, parts[n:], strict=True)))
            vars(bound).update({name: self._of(x) for name, x in vars(value).items()})
            return bound
        if not self._reaches(value):
            return value
        if isinstance(value, nn.Module):
            raise self._error(value, "is another module that shares a part with this model")
        self.kept.append(value)
        made = self.memo[id(value)] = copy.deepcopy(value, self.memo)
        self.copies.update(map(id, self.memo.values()))
        self._fill(made)
        return made

    def _fill(self, start: Any) -> None:
        """Copies of the functions in what was copied."""
        left, seen = [start], set[int]()
        while left:
            owner = left.pop()
            if id(owner) in seen or id(owner) not in self.copies:  # what is shared is left alone
                continue
            seen.add(id(owner))
            place: Any = owner
            items: Iterable[tuple[Any, Any]] = ()
            if isinstance(owner, dict):
                items = [*owner.items()]
            elif isinstance(owner, list):
                items = [*enumerate(owner)]
            elif hasattr(owner, "__dict__") and not isinstance(owner, ATOMS):
                place = vars(owner)
                items = [(k, v) for k, v in place.items() if k not in TABLES]
            for key, value in items:
                if isinstance(value, CALLABLES):
                    place[key] = self._of(value)
                elif isinstance(value, tuple | set | frozenset):
                    if any(isinstance(one, CALLABLES) and self._of(one) is not one for one in value):
                        raise self._error(value, "is a tuple or set of functions that use a part of the model", "list")
                elif not isinstance(value, nn.Module | torch.Tensor):
                    left.append(value)

    def _function(self, function: FunctionType) -> FunctionType:
        self.kept.append(function)
        fresh = []
        cells = []
        for cell in function.__closure__ or ():
            if not self._reaches(*_inside(cell)):
                cells.append(cell)  # a counter, say, that others count with
                continue
            if id(cell) not in self.cells:
                self.kept.append(cell)
                self.cells[id(cell)] = CellType()
                fresh.append(cell)
            cells.append(self.cells[id(cell)])
        new = FunctionType(function.__code__, function.__globals__, function.__name__, None, tuple(cells))
        self.memo[id(function)] = new  # it may close over itself
        for cell in fresh:
            self.cells[id(cell)].cell_contents = self._of(cell.cell_contents)
        new.__defaults__ = tuple(self._of(x) for x in function.__defaults__) if function.__defaults__ else None
        if function.__kwdefaults__:
            new.__kwdefaults__ = {name: self._of(x) for name, x in function.__kwdefaults__.items()}
        for name in ("__qualname__", "__module__", "__doc__", "__annotations__"):
            setattr(new, name, getattr(function, name))
        vars(new).update({name: self._of(x) for name, x in vars(function).items()})
        return new

    def _owns(self, value: Any) -> bool:
        return id(value) in self.memo and not isinstance(value, str | int | float | tuple | type | None)

    def _reaches(self, *values: Any) -> bool:
        """Whether an owned object can be reached from here."""
        left, seen = deque(values), set[int]()
        while left and len(seen) < ENOUGH:
            value = left.popleft()
            if id(value) in seen or isinstance(value, str | int | float | type | ModuleType | None):
                continue
            if id(value) in self.memo or isinstance(value, FakeTensor):  # by `init`, which made it
                return True
            seen.add(id(value))
            if isinstance(value, nn.Module):
                left.extend(part for part in value.modules() if id(part) in self.memo)
                left.extend(p for p in value.parameters() if id(p) in self.memo)
            elif isinstance(value, FunctionType):
                left.extend(_contents(value))
            elif isinstance(value, MethodType):
                left.extend((value.__self__, value.__func__))
            elif isinstance(value, partial):
                left.extend((value.func, *value.args, *value.keywords.values()))
            elif isinstance(value, dict):
                left.extend(value.values())
            elif isinstance(value, list | tuple | set | frozenset | deque):
                left.extend(value)
            elif not isinstance(value, torch.Tensor):
                left.extend(vars(value).values() if hasattr(value, "__dict__") else ())
        return False

    def _global(self, function: FunctionType) -> None:
        """Refuse a function that reads a global variable which the module holds: globals are not copied."""
        there = function.__globals__
        if id(there) not in self.globals:
            self.globals[id(there)] = {name for name, x in there.items() if self._owns(x)}
        if self.globals[id(there)]:
            for name in global_names(function.__code__):
                if name in self.globals[id(there)]:
                    raise self._error(function, f"reads the global variable {name!r}, which is a part of the model")

    def _error(self, value: Any, what: str, remedy: str = "") -> TreeError:
        name = getattr(value, "__qualname__", type(value).__name__)
        said = f"Put them into a {remedy}." if remedy else REMEDY
        return TreeError(
            f"the module {self.path!r} has a function or hook of which {name!r} {what}: a copy of the module would go "
            f"on with the original's. {said}"
        )


TABLES = ("_parameters", "_buffers", "_modules", *HOOKS)
CALLABLES = (FunctionType, MethodType, partial)
ATOMS = (type, ModuleType, torch.dtype, torch.device, torch.Size, FunctionType, MethodType, partial)


def _inside(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # empty
        return ()


def _contents(function: FunctionType) -> Iterator[Any]:
    """What a function closes over, and its defaults."""
    for cell in function.__closure__ or ():
        yield from _inside(cell)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()


def global_names(code: CodeType) -> Iterator[str]:
    """The globals that `code` and the code inside it read (an attribute of the same name is none)."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            yield instruction.argval
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from global_names(const)
