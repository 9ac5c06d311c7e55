"""Units compiled one by one, and compiled code that is kept.

    compile_units, Compiler, Compiled      units by torch.compile
    through_inductor, graph_pass           graphs through Inductor, in the order that they have
    with_late_copies, mark_copies          what a backward wants of a weight in another order, copied there
    Code                                   a template with a cache of its own
    Names                                  what a compiled step issues, in profiles

`Code`: a template with a code object of its own, compiled, so that its cache and its limit are its own, too.

first calls    of each module, in each mode: layers may differ, so as many compilations as they need
later calls    as many more as torch's recompile limit says

`mark_copies`: what a backward wants of a weight in float8 in another order is copied in the backward.

    forward    y = x @ w.t()                              saved: w, which lies in the arena and is gathered again
    backward   copy = w.t().contiguous().t()  ─▶  dx = dy @ copy

The copy depends on inputs alone, and a product reads it. So Inductor's partitioner would have the forward make it:
copies of the weights of all layers would then be there between forward and backward, whole on each rank. Here such
nodes are marked before the graph is cut in two, as checkpointed regions mark theirs. So is all that is computed of the
bytes of one packed weight: a backward reads the bytes, which are gathered again, and unpacks them once more.

`Names`: what a compiled step issues, in profiles, where no Python of the package runs.

While a profiler runs, the step's collectives are seen as its code calls them; which is which follows from their order.
Without one, the step runs as it is.

`compile_units`: units by torch.compile, each distinct one once, for all the layers that are like it.

    blocks.0 ┐                                    ┌ one code object a class; Dynamo's guards say which
    blocks.1 ├─ weights in their slots, called as ┤ layers are alike: those that differ in something that
    blocks.2 ┘                                    └ the code reads (a dropout rate) get a graph of their own

Weights and buffers are inputs of the graph, so gathers, releases and reductions stay outside.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import count
from types import FunctionType
from typing import Any, TypeVar, overload

import torch
import torch.fx as fx
import torch.nn as nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy

from functional_fsdp import SpecError
from functional_fsdp._seams import ranged, torch_private, tracing_now
from functional_fsdp.extend import Collective

from .._modules import NEVER_CALLED, UnitModule, copy_of, once_a_class, outermost, subclass
from .startup import Clock, finish_start, waiting

#: the step's own order is the plan's: gathers one use ahead, reductions waited for when the next one comes
ORDERED = {"reorder_for_peak_memory": False, "reorder_for_locality": False}


def through_inductor(
    module: fx.GraphModule, inputs: list[torch.Tensor], config: dict[str, Any], change: Callable[[fx.Graph], Any],
    *key: Any,
) -> Callable[..., Any]:  # fmt: skip
    """A function that does what the module does.

    Args:
        config: Inductor's settings.
        change: made to the graph before it is lowered; one of this package's functions.
        key: what it goes by, beside the graph, for caches on disk.
    """
    settings = ORDERED | config | {"post_grad_custom_pre_pass": graph_pass(change, *key)}
    compiled: Callable[..., Any] = torch_private.inductor().compile_fx.compile_fx(
        module, inputs, config_patches=settings
    )
    return compiled


def graph_pass(change: Callable[[fx.Graph], Any], *key: Any) -> Any:
    """A pass of Inductor's that makes a change to graphs; one of this package's functions.

    Args:
        key: what it goes by, beside its module's code, for caches on disk.
    """
    passes = torch_private.inductor().custom_graph_pass
    files = (str(sys.modules[change.__module__].__file__),)

    class Pass(passes.CustomGraphPass):  # type: ignore[misc, name-defined]
        def __call__(self, graph: torch.fx.Graph) -> None:
            change(graph)

        def uuid(self) -> Any:
            return passes.get_hash_for_files(files, repr(key))

    return Pass()


PASS = "joint_custom_pre_pass"  # of Inductor's settings
VIEWS = (torch.ops.aten.permute.default, torch.ops.aten.t.default, torch.ops.aten.transpose.int)


def with_late_copies(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of torch.compile, with the pass where Inductor compiles and nobody has another one."""
    mode, own = options.get("mode"), options.get("options")
    named = [name.replace("-", "_") for name in own or ()]
    if options.get("backend", "inductor") != "inductor" or (mode and own) or PASS in named:
        return {**options}
    inductor = torch_private.inductor()
    if getattr(inductor.config, PASS, None) is not None:
        return {**options}
    asked = inductor.list_mode_options(mode, options.get("dynamic")) if mode else own or {}
    return {**{name: value for name, value in options.items() if name != "mode"}, "options": {**asked, PASS: _pass()}}


def mark_copies(graph: fx.Graph) -> None:
    """In a graph of a forward with its backward, have the backward make the copies of inputs in float8, and unpack
    bytes: what depends on one input of them, [n] in uint8, and on constants."""
    of: dict[Any, Any] = {}  # of what depends on constants, or on one packed weight: on which
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "placeholder":
            value = node.meta.get("val")
            if getattr(value, "dtype", None) is torch.uint8 and value.dim() == 1:
                of[node] = node
        elif node.op == "get_attr":
            of[node] = None
        elif node.op == "call_function" and all(one in of for one in inputs) and not _draws(node.target):
            sources = {of[one] for one in inputs} - {None}
            if len(sources) <= 1:
                of[node] = next(iter(sources), None)
        unpacks = node.op == "call_function" and of.get(node) is not None
        if unpacks or (node.target is torch.ops.aten.clone.default and _is_view_of_input(node.args[0])):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _draws(target: Any) -> bool:
    """Whether an operation draws random numbers: done again, it gives others."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _is_view_of_input(node: Any) -> bool:
    while node.op == "call_function" and node.target in VIEWS:
        node = node.args[0]
    dtype = getattr(node.meta.get("val"), "dtype", torch.bool)
    return node.op == "placeholder" and bool(dtype.is_floating_point) and dtype.itemsize == 1


@cache
def _pass() -> Any:
    return graph_pass(mark_copies)


NUMBERS = count()
LOWERS = "force_non_lazy_backward_lowering"
LIMITS = ("recompile_limit", "accumulated_recompile_limit")
NO_LIMIT = dict.fromkeys(LIMITS, 1 << 20)


class Code:
    """A template, compiled under a name.

    Args:
        template: a function without a closure. options: of torch.compile, `fullgraph` among them.
    """

    def __init__(self, template: Callable[..., Any], name: str, options: Mapping[str, Any]) -> None:
        assert isinstance(template, FunctionType)
        code = template.__code__
        code = code.replace(co_name=name, co_consts=(*code.co_consts, next(NUMBERS)))  # equal to no other one, by which
        own = FunctionType(code, template.__globals__)  # torch finds what it notes
        self.dynamo: Any = torch_private.dynamo()
        self.frame = own.__code__
        self.run = torch.compile(own, **with_late_copies(options))
        self.whole = bool(options["fullgraph"])
        self.firsts = 0  # compilations that first calls made
        self.raised = not self.whole  # whether torch's limit, which counts those too, is raised by them in later calls

    def call(self, first: bool, args: Any, kwargs: Any) -> Any:
        """Run it. While it is compiled torch notes for which hooks, which it would leave out: a module without a hook
        and one with it would take each other's code."""
        config = self.dynamo.config
        skips = config.skip_nnmodule_hook_guards
        config.skip_nnmodule_hook_guards = False
        try:
            if first:
                return self._first(args, kwargs)
            if not self.raised:
                try:
                    return self.run(*args, **kwargs)
                except self.dynamo.exc.FailOnRecompileLimitHit:  # before anything ran
                    self.raised = True
            with config.patch({name: self.firsts + getattr(config, name) for name in LIMITS}):
                return self.run(*args, **kwargs)
        finally:
            config.skip_nnmodule_hook_guards = skips

    def _first(self, args: Any, kwargs: Any) -> Any:
        config, before = self.dynamo.config, self.graphs()
        try:
            with waiting(), config.patch(NO_LIMIT), torch_private.functorch_config().patch(with_backward()):
                return self.run(*args, **kwargs)
        finally:
            self.firsts += max(self.graphs() - before, 0)
            self.raised = self.raised or self.graphs() >= config.recompile_limit

    def graphs(self) -> int:
        """How many compilations there are."""
        return torch_private.compilations_of(self.frame)

    def why(self) -> str:
        """What was other than in the compilations that there are, as Dynamo says it of the last."""
        return torch_private.recompile_reason(self.frame) or "torch does not say what"


def with_backward() -> dict[str, bool]:
    """Setting by which a backward is compiled with its forward, so that the next layer, if its graph is the same, finds
    both in torch's cache; else all forwards come first, and each of them is compiled."""
    return {LOWERS: True} if hasattr(torch_private.functorch_config(), LOWERS) else {}


NAMESPACE = "_c10d_functional::"
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def named(run: Callable[..., Any], issued: Iterable[Collective]) -> Callable[..., Any]:
    """A compiled function whose collectives, and waits for them, have names while a profiler runs.

    Args:
        issued: its collectives, in the order in which it was traced.
    """
    issued = tuple(issued)

    def call(*args: Any) -> Any:
        if not torch_private.profiler._is_profiler_enabled:
            return run(*args)
        with Names(issued):
            return ranged(run, "compiled step")(*args)

    return call


class Names(TorchFunctionMode):
    """Sees the operations that Python calls, and gives those that communicate their names."""

    def __init__(self, issued: Iterable[Collective]) -> None:
        super().__init__()
        self.left: dict[str, deque[str]] = {kind: deque() for kind in KINDS}
        for one in issued:
            if one.kind in self.left:
                self.left[one.kind].append(said(one))
        self.awaited: dict[int, tuple[torch.Tensor, str]] = {}  # by identity; held, so that nobody else gets it

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is None or not schema.name.startswith(NAMESPACE):
            return func(*args, **kwargs)
        op = schema.name.removeprefix(NAMESPACE)
        if op.startswith("wait_tensor"):
            _, name = self.awaited.pop(id(args[0]), (None, ""))
            return ranged(func, f"wait {name}".rstrip())(*args, **kwargs)
        kind = next((kind for kind in KINDS if op.startswith(kind)), "")
        name = self.left[kind].popleft() if kind and self.left[kind] else op
        out = ranged(func, name)(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            self.awaited[id(out)] = out, name.replace("reduce gradients of", "reduce")
        return out


def said(one: Collective) -> str:
    """As eager steps name it."""
    if one.kind == "all_gather" and one.lane in ("gather", "side"):
        return f"gather {one.bucket}"
    if one.lane in ("reduce", "outer"):
        return f"reduce gradients of {one.bucket}"
    return f"{one.kind} of {one.bucket}"


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
        except (dynamo.exc.Unsupported, dynamo.exc.UserError, dynamo.exc.UncapturedHigherOrderOpError) as error:
            refuse_shared(error, repr(self))
            raise SpecError(
                f"compile: {self!r} does not compile as one graph: {_why(error)}. {_instead(what, self.path)}Change "
                "its code, allow graph breaks with fullgraph=False, or compile other modules only: "
                "T.compile_units(model, 'blocks.*')."
            ) from error


def _why(error: Exception) -> str:
    """What Dynamo says in its first line, and the exception that the code itself raised, if it did."""
    lines = [line.strip().rstrip(".") for line in str(error).strip().splitlines()]
    lines = [line for line in lines if line and not line.endswith(":")] or lines
    found = [line.removeprefix("Developer debug context: ") for line in lines if "context: raised exception" in line]
    return ", ".join([lines[0], *found])


def _instead(what: Any, path: str) -> str:
    """What to write in the place of a checkpointing by transformers, whose code for it (T5) may be what is no graph."""
    if not any(getattr(part, "gradient_checkpointing", False) for part in getattr(what, "modules", tuple)()):
        return ""
    pattern = re.sub(r"\d+", "*", path)
    return f"It checkpoints: leave gradient_checkpointing_enable() out, and write T.remat(model, {pattern!r}). "


def refuse_shared(error: Exception, where: str) -> None:
    """Raise what an error means if it is torch's refusal of a higher-order operator that reads two weights of a buffer.

    Raises:
        SpecError: it is.
    """
    if "Input-to-input aliasing" in str(error):
        raise SpecError(
            f"{where} calls a higher-order operator, as torch.cond, whose functions read tensors that share memory, "
            "which torch refuses where gradients are recorded. Weights of a unit share it: they lie in one buffer. "
            "Give it copies, made before: w, b = layer.weight.clone(), layer.bias.clone(); torch.cond(..., (x, w, b))."
        ) from error


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
