"""Regions: one call of something that recomputes, and the calls in it that are not run again.

    forward     [x] norm ─▶ attn ─▶ + ─▶ norm ─▶ mlp ─▶ +          torch's checkpoint keeps x
                            └── a part: autograd keeps for it what it always does, and the region its output
    backward    [x] norm ─▶ its output ─▶ + ─▶ norm                as far as something is needed

The nodes of autograd's graph are those of the forward, so a part's own backward is in it already. That its output was
kept lets what comes after it be computed again. Where nothing that comes after it keeps a tensor, the output is let go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from .given import GivenInputs
from .habits import Habits
from .records import RegionRecord
from .region_forward import Recomputation, RegionForward

__all__ = ["Region"]


class Region:
    """One call of `fn`, for torch's checkpoint: called once for the forward, and again for each recomputation.

    Args:
        module: whose code `fn` is.
        habits: of it, or of the function.
        generators: from which it draws, beside the default ones; None if random numbers do not come again.
    """

    def __init__(
        self, fn: Callable[..., Any], module: nn.Module | None, habits: Habits,
        generators: list[Any] | None,
    ) -> None:  # fmt: skip
        self.fn, self.module, self.habits, self.generators = fn, module, habits, generators
        self.record: RegionRecord | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.fn(*args, **kwargs)
        if self.record is not None:
            try:
                return Recomputation(self.record).run(args, kwargs)
            except RuntimeError as error:  # checkpoint ends it by an exception, of which TorchScript loses all but this
                if str(error).rstrip().endswith("RuntimeError:"):
                    return None
                raise
        given = GivenInputs(args, kwargs)
        self.record = RegionRecord(self.fn, self.module, self.habits, self.generators, given)
        out = RegionForward(self.record).run(args, kwargs)
        self.record.over = True
        return out
