"""Namespaces: in a worker, what a caller's `__main__` is to the functions that came from there by value.

torch.compile looks a function's globals up in the module that `import` finds under their `__name__`. A worker's
`__main__` is another module than the caller's, and the functions of two calls may name two values alike. So globals
that come are those of a module of their own, `__main__N`, which can be imported as long as a function of it is left.
"""

from __future__ import annotations

import itertools
import re
import sys
import types
import weakref
from importlib.machinery import ModuleSpec
from typing import Any

from .._common.torch_names import forget_imports

__all__ = ["Namespaces"]

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
