"""compile_units: units by torch.compile, each distinct one once, for all the layers that are like it.

    blocks.0 ┐                                    ┌ one code object a class; Dynamo's guards say which
    blocks.1 ├─ weights in their slots, called as ┤ layers are alike: those that differ in something that
    blocks.2 ┘                                    └ the code reads (a dropout rate) get a graph of their own

Weights and buffers are inputs of the graph, so gathers, releases and reductions stay outside.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, overload

import torch
import torch.nn as nn

from functional_fsdp import SpecError
from functional_fsdp._seams import torch_private, tracing_now

from .._modules.unit_modules import NEVER_CALLED, UnitModule, copy_of, once_a_class, outermost, subclass
from .code import Code, with_late_copies
from .startup import Clock, finish_start

__all__ = ["Compiled", "Compiler", "Options", "called", "compile_units", "own_class", "refuse_around"]

M = TypeVar("M", bound=nn.Module)
F = TypeVar("F", bound=Callable[..., Any])

Options = Mapping[str, Any]
KNOWN = ("backend", "dynamic", "fullgraph", "mode", "options")


@overload
def compile_units(what: M, *patterns: str, **options: Any) -> M: ...
@overload
def compile_units(what: F, **options: Any) -> F: ...
def compile_units(what: Any, *patterns: str, **options: Any) -> Any:
    """Compile some of a model's modules, or a function, and use one compilation for all layers that are alike.

    Args:
        what: a model, as `init` or `functionalize` gave it; or a function, as a stage that goes to `T.vjp`.
        patterns: of a model, the paths of the modules to compile (`"blocks.*"`; the outermost that match). Without any
            it is compiled as a whole.
        options: of torch.compile: `backend`, `mode`, `options`, `fullgraph` (here True), `dynamic` (here False).

    Returns:
        a copy of the model (a skeleton) whose modules are compiled where they are called, by `bind`, by `T.apply` or
        by `T.forward_backward`; or the function, compiled.

    Layers of one class share a graph unless something that the code reads differs: a dropout rate, a flag, a hook,
    training mode, whether the input has a gradient. Then each gets its own, however many there are. Every later
    compilation, for inputs of other shapes, counts towards torch's recompile limit, and past it is an error. Of
    functions, what differs between layers should be an argument: what one closes over is part of the graph.

    Random numbers: Inductor draws others than eager code does, with the same seeds the same again; for eager's give
    `options={"fallback_random": True}`. `T.remat` works inside and around it.

    Under torch.func transforms torch compiles nothing: there the module runs eagerly, with a RuntimeWarning. In
    `T.vjp` and `T.forward_backward` it is compiled.

    Raises:
        SpecError: a pattern that matches no module; an option that torch.compile does not have; when it is called, code
            that is not one graph, or the recompile limit.

    Example:
        >>> model = T.compile_units(model, "blocks.*")  # doctest: +SKIP
        >>> h, pullback = T.vjp(lambda w, h: fsdp.bind(model.blocks[0], w)(h), w, h)  # doctest: +SKIP
    """
    compiler = Compiler(options)
    if not isinstance(what, nn.Module):
        if patterns:
            raise SpecError(
                f"compile_units: {', '.join(map(repr, patterns))} are paths in a model, and this is a function."
            )
        unit = Compiled(compiler, getattr(what, "__qualname__", repr(what)))
        return partial(unit.function, what)
    model = copy_of(what)
    for path, module in outermost("compile_units", model, patterns) if patterns else [("", model)]:
        if isinstance(module, NEVER_CALLED):
            where, inner = (repr(path), f"{path}.*") if path else ("this", "*")
            raise SpecError(
                f"compile_units: {where} is a {type(module).__name__}, which nobody calls. Name what is in it: "
                f"{inner!r}."
            )
        module.__dict__["_compiled"] = Compiled(compiler, path, type(module))
        module.__class__ = _compiled(type(module))
    return model


class Compiler:
    """The compiled code of one model: a code object for each class, so that each has a cache and a limit of its own."""

    def __init__(self, options: Options) -> None:
        unknown = [name for name in options if name not in KNOWN]
        if unknown:
            raise SpecError(f"compile: torch.compile has no option {unknown[0]!r} here; there are {', '.join(KNOWN)}.")
        finish_start()
        if options.get("backend", "inductor") == "inductor":
            torch_private.start_compilers()  # while the rest is imported, and the step rehearsed and traced
        self.dynamo: Any = torch_private.dynamo()
        self.options = {"fullgraph": True, "dynamic": False, **options}
        _check(self.options)
        self.codes: dict[Any, Code] = {}
        self.clock: Clock | None = None  # while modules are timed

    @classmethod
    def of(cls, compile: bool | Options) -> Compiler | None:
        """From the argument `compile=`: True, or options."""
        if compile is False:
            return None
        if compile is not True and not isinstance(compile, Mapping):
            raise SpecError(
                f"compile={compile!r}: expected True, or options of torch.compile, as {{'backend': 'inductor'}}."
            )
        return cls({} if compile is True else compile)

    @staticmethod
    def chosen(modules: Sequence[nn.Module]) -> set[nn.Module]:
        """Of a model's parts, those that are compiled where nobody says which: parts of a class that comes again, since
        one compilation serves all of them; where none does, all. One of torch's own layers alone is one kernel, which
        compilation makes no faster."""
        some = [part for part in modules if [*part.children()] or not type(part).__module__.startswith("torch.nn.")]
        times = Counter(own_class(type(part)) for part in some)
        return {part for part in some if times[own_class(type(part))] > 1} or set(some)

    def within(self, module: nn.Module, path: str) -> list[nn.Module]:
        """Compile what a module that recomputes or moves runs within that: all of its own code; or, where parts of it
        are kept, moved or recomputed, the innermost of these, since no graph goes over their borders. Returns the
        modules that are compiled so."""
        inner = {name: part for name, part in module.named_modules() if name and {"_part", "_remat"} & {*vars(part)}}
        found = {n: part for n, part in inner.items() if not any(other.startswith(f"{n}.") for other in inner)}
        for name, part in (found or {"": module}).items():
            part.__dict__["_within"] = Compiled(self, f"{path}.{name}".strip("."), own_class(type(part)))
        return [*found.values()] or [module]

    def code(self, what: Any, template: Callable[..., Any]) -> Code:
        """The template, compiled, with a code object of its own for this class (or function)."""
        key = (what, template)
        if key not in self.codes:
            self.codes[key] = Code(template, getattr(what, "__name__", "stage"), self.options)
        return self.codes[key]


class Uncompiled(dict[type[nn.Module], nn.Module]):
    """A module as an instance of its own class, without a unit call, not compiled, by that class. Kept in the module
    itself, since guards know it, and it holds all that the module does. A copy of the module has none."""

    def __reduce__(self) -> Any:
        return Uncompiled, ()

    @staticmethod
    def of(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
        """This module's."""
        held = module.__dict__
        views = held.get("_uncompiled")
        if views is None:
            views = held["_uncompiled"] = Uncompiled()
        view: nn.Module | None = views.get(cls)
        if view is None:
            view = views[cls] = object.__new__(cls)
            object.__setattr__(view, "__dict__", held)
        return view


def _check(options: Options) -> None:
    """Have torch look at options that are known by name.

    Raises:
        SpecError: a backend, a mode or options of the backend that it does not have.
    """
    backend = options.get("backend", "inductor")
    if not isinstance(backend, str) and not callable(backend):
        raise SpecError(f"compile: backend={backend!r}: expected a name, as 'inductor', or a function.")
    try:
        torch.compile(_call, **with_late_copies(options))
    except Exception as error:
        said = str(error).strip().partition(", known options")[0].splitlines()
        raise SpecError(f"compile: torch.compile does not take these options: {''.join(said[:1])}") from error


class Compiled:
    """One module that is compiled, where it is in the model, and in which modes it has been called."""

    def __init__(self, compiler: Compiler, path: str, cls: type | None = None) -> None:
        self.compiler, self.path, self.cls = compiler, path, cls
        self.seen: set[tuple[bool, bool]] = set()

    def __deepcopy__(self, memo: Any) -> Compiled:
        return self

    def __repr__(self) -> str:
        if self.cls is None:
            return f"the function {self.path}"
        return f"the module {self.path!r} ({self.cls.__name__})" if self.path else f"the module {self.cls.__name__}"

    def module(
        self, cls: type[nn.Module], function: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        """`function(module, *args, **kwargs)`, compiled: `cls.__call__` or `cls.forward`. Its weights are in it."""
        if tracing_now() or _transformed(self):  # a graph is made of all there is
            return function(module, *args, **kwargs)
        clock = self.compiler.clock
        if clock is not None:
            run = self._eager if clock.eager else self._compiled
            return clock.call(cls, self.path, run, cls, function, module, args, kwargs)
        return self._compiled(cls, function, module, args, kwargs)

    def _eager(self, cls: Any, function: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    def _compiled(
        self, cls: type[nn.Module], function: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        code = self.compiler.code(cls, _forward if function is cls.forward else _call)
        return self._run(code, module.training, Uncompiled.of(module, cls), args, kwargs)

    def function(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)`, compiled."""
        if torch.compiler.is_compiling() or tracing_now() or _transformed(self):
            return function(*args, **kwargs)
        return self._run(self.compiler.code(function, _call), False, function, args, kwargs)

    def _run(self, code: Code, training: bool, what: Any, args: Any, kwargs: Any) -> Any:
        dynamo = self.compiler.dynamo
        mode = (training, torch.is_grad_enabled())
        try:
            if mode in self.seen:
                return code.call(False, (self, what, *args), kwargs)
            out = code.call(True, (self, what, *args), kwargs)
            self.seen.add(mode)
            return out
        except dynamo.exc.FailOnRecompileLimitHit as error:
            raise SpecError(
                f"compile: {self!r} was called in another way than before, and {dynamo.config.recompile_limit} "
                f"compilations were made for such calls already, torch's limit. What differs: {code.why()}. Of inputs "
                "of other shapes, give equal ones, or dynamic=True; or raise the limit, "
                "torch._dynamo.config.recompile_limit."
            ) from error
        except (dynamo.exc.Unsupported, dynamo.exc.UserError) as error:
            raise SpecError(
                f"compile: {self!r} does not compile as one graph: {_why(error)}. Change its "
                "code, allow graph breaks with fullgraph=False, or compile other modules only: "
                "T.compile_units(model, 'blocks.*')."
            ) from error


def _why(error: Exception) -> str:
    """What Dynamo says in its first line, and the exception that the code itself raised, if it did."""
    lines = [line.strip().rstrip(".") for line in str(error).strip().splitlines()]
    found = [line.removeprefix("Developer debug context: ") for line in lines if "context: raised exception" in line]
    return ", ".join([lines[0], *found])


def _call(unit: Compiled, what: Any, /, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        _eager(unit)
    return what(*args, **kwargs)


def _forward(unit: Compiled, what: Any, /, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        _eager(unit)
    return what.forward(*args, **kwargs)


def _eager(unit: Compiled) -> None:
    """Python runs what was to be compiled."""
    warnings.warn(
        f"compile: {unit!r} runs eagerly: torch.compile is turned off, or its limit of "
        f"{unit.compiler.dynamo.config.recompile_limit} compilations was met with fullgraph=False. Give it inputs of "
        "equal shapes, or dynamic=True, or raise the limit, torch._dynamo.config.recompile_limit.",
        RuntimeWarning,
        stacklevel=2,
    )


def _transformed(unit: Compiled) -> bool:
    """Whether a torch.func transform is under way, or dual numbers, with which torch compiles nothing. Says so."""
    if torch_private.func_interpreter() is None and torch_private.forward_ad._current_level < 0:
        return False
    warnings.warn(
        f"compile: {unit!r} runs eagerly under a torch.func transform, in which torch compiles nothing. Take gradients "
        "by T.vjp or T.forward_backward, or leave T.compile_units out.",
        RuntimeWarning,
        stacklevel=3,
    )
    return True


def own_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a module below those that `T.remat` and `T.offload` gave it."""
    while "_around" in vars(cls):
        cls = vars(cls)["_around"]
    return cls


def called(cls: type[nn.Module], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """`cls.__call__(module, ...)`, compiled where that is to be so within what recomputes or moves."""
    within = vars(module).get("_within")
    if within is not None and within.cls is cls:
        return within.module(cls, cls.__call__, module, *args, **kwargs)
    return cls.__call__(module, *args, **kwargs)


def refuse_around(model: nn.Module, unit_modules: Iterable[UnitModule], chosen: Collection[nn.Module] = ()) -> None:
    """No graph goes over the border of a unit: units are gathered and released between.

    Args:
        chosen: modules that are going to be compiled, beside those of `compile_units`.

    Raises:
        SpecError: a module that is compiled and holds modules of several units, or one that is also somewhere else.
    """
    paths = {model.get_submodule(one.path): one.path for one in unit_modules}
    for path, module in model.named_modules():
        if "_compiled" not in vars(module) and module not in chosen:
            continue
        inside = [paths[part] for part in module.modules() if part is not module and part in paths]
        if inside:
            said = vars(module).get("_compiled") or Compiled(Compiler({}), path, type(module))
            several = len(inside) > 1
            held = f"{len(inside)} parts that are gathered on their own" if several else "a part that is gathered alone"
            remedy = ", or compile=True"
            if module in paths:  # a unit itself
                remedy = ", and not what holds them: the model has them elsewhere, too, and gathers them there"
            raise SpecError(
                f"compile: {said!r} is compiled and holds {held}: {', '.join(map(repr, inside[:3]))}"
                f"{', ...' if len(inside) > 3 else ''}. Compile those: T.compile_units(model, {inside[0]!r}){remedy}."
            )


# ---------------------------------------------------------------- classes


@once_a_class
def _compiled(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a module that is compiled."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return cls.__call__(self, *args, **kwargs)
        return self._compiled.module(cls, cls.__call__, self, *args, **kwargs)

    return subclass(cls, __call__=__call__)
