"""Names: what a compiled step issues, in profiles, where no Python of the package runs.

While a profiler runs, the step's collectives are seen as its code calls them; which is which follows from their order.
Without one, the step runs as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from functional_fsdp._seams import ranges, torch_private
from functional_fsdp.extend import Collective

__all__ = ["named"]

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
            return ranges.ranged(run, "compiled step")(*args)

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
            return ranges.ranged(func, f"wait {name}".rstrip())(*args, **kwargs)
        kind = next((kind for kind in KINDS if op.startswith(kind)), "")
        name = self.left[kind].popleft() if kind and self.left[kind] else op
        out = ranges.ranged(func, name)(*args, **kwargs)
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
