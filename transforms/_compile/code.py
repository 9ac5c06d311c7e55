"""Code: a template with a code object of its own, compiled, so that its cache and its limit are its own, too.

first calls    of each module, in each mode: layers may differ, so as many compilations as they need
later calls    as many more as torch's recompile limit says

What a backward wants of a weight in float8 in another order is copied in the backward.

    forward    y = x @ w.t()                              saved: w, which lies in the arena and is gathered again
    backward   copy = w.t().contiguous().t()  ─▶  dx = dy @ copy

The copy depends on inputs alone, and a product reads it. So Inductor's partitioner would have the forward make it:
copies of the weights of all layers would then be there between forward and backward, whole on each rank. Here such
nodes are marked before the graph is cut in two, as checkpointed regions mark theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from functional_fsdp._seams import torch_private

from .inductors import graph_pass
from .startup import waiting

__all__ = ["Code", "mark_copies", "with_backward", "with_late_copies"]

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
    """In a graph of a forward with its backward, have the backward make the copies of inputs in float8."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.clone.default and _is_view_of_input(node.args[0]):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


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
