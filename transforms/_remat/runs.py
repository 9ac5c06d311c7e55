"""Buffers of a module that recomputes: what its forward makes of them is made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from .._drive.watch import version

__all__ = ["Runs"]


class Runs:
    """One call of a module that recomputes: its forward, and the same again, which leaves the buffers as they are.

    What the forward made of them (running statistics, the vectors of a power iteration) must not be made of them
    twice, and the recomputation must find them as the forward did.

    Args:
        call: its own code, with its weights.
    """

    def __init__(self, call: Callable[..., Any], module: nn.Module) -> None:
        self.call, self.module = call, module
        self.places = [(part._buffers, name, part.training) for part in module.modules() for name in part._buffers]
        self.before: list[torch.Tensor | None] | None = None  # the buffers as the forward found them

    def now(self) -> list[torch.Tensor | None]:
        """The buffers as they are."""
        return [held.get(name) for held, name, _ in self.places]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now = self.now()
        if self.before is None:
            return self._forward(now, args, kwargs)
        for t, old, (held, name, _) in zip(now, self.before, self.places, strict=True):
            held[name] = old.clone() if old is not None and old is not t else old
        try:
            return self.call(*args, **kwargs)
        finally:
            for t, (held, name, _) in zip(now, self.places, strict=True):
                held[name] = t

    def _forward(self, now: list[torch.Tensor | None], args: Any, kwargs: Any) -> Any:
        """Keeps copies of what may change: of all buffers in the module's first call, then of those that did change,
        and of floating ones in training mode, which kernels write without telling."""
        stays: set[int] = self.module.__dict__["_remat_stays"]
        self.before = [
            t if t is None or (i in stays and not (trains and t.is_floating_point())) else t.clone()
            for i, (t, (_, _, trains)) in enumerate(zip(now, self.places, strict=True))
        ]
        versions = [t if t is None else version(t) for t in now]
        first = not stays
        out = self.call(*args, **kwargs)
        for i, (t, before, (held, name, _)) in enumerate(zip(now, versions, self.places, strict=True)):
            if held.get(name) is not t or (t is not None and version(t) != before):
                stays.discard(i)
            elif first:
                stays.add(i)
        return out
