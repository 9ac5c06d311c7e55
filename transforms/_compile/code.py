"""Code: a template with a code object of its own, compiled, so that its cache and its limit are its own, too.

first calls    of each module, in each mode: layers may differ, so as many compilations as they need
later calls    as many more as torch's recompile limit says

What a backward wants of a weight in float8 in another order is copied in the backward.

    forward    y = x @ w.t()                              saved: w, which lies in the arena and is gathered again
    backward   copy = w.t().contiguous().t()  ─▶  dx = dy @ copy

The copy depends on inputs alone, and a product reads it. So Inductor's partitioner would have the forward make it:
copies of the weights of all layers would then be there between forward and backward, whole on each rank. Here such
nodes are marked before the graph is cut in two, as checkpointed regions mark theirs. So is all that is computed of the
bytes of one packed weight: a backward reads the bytes, which are gathered again, and unpacks them once more.

Graphs through Inductor, in the order that they have.

Names: what a compiled step issues, in profiles, where no Python of the package runs.

While a profiler runs, the step's collectives are seen as its code calls them; which is which follows from their order.
Without one, the step runs as it is.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.fx as fx
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy

from functional_fsdp._seams import ranged, torch_private
from functional_fsdp.extend import Collective

from .startup import waiting

__all__ = ["Code", "graph_pass", "mark_copies", "named", "through_inductor", "with_backward", "with_late_copies"]

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
        own = FunctionType(template.__code__.replace(co_name=name), template.__globals__)
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
        config, before = self.dynamo.config, self._entries()
        try:
            with waiting(), config.patch(NO_LIMIT), torch_private.functorch_config().patch(with_backward()):
                return self.run(*args, **kwargs)
        finally:
            self.firsts += max(self._entries() - before, 0)
            self.raised = self.raised or self._entries() >= config.recompile_limit

    def _entries(self) -> int:
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
