"""Code: a template with a code object of its own, compiled, so that its cache and its limit are its own, too.

first calls    of each module, in each mode: layers may differ, so as many compilations as they need
later calls    as many more as torch's recompile limit says
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch

from functional_fsdp._verbs.seams import torch_private

from .late_copies import with_late_copies

__all__ = ["Code", "with_backward"]

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
            with config.patch(NO_LIMIT), torch_private.functorch_config().patch(with_backward()):
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
