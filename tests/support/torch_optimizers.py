"""Classes as torch's optimizers, for `from_torch`."""

from __future__ import annotations

from typing import Any

import torch


class ByParameter(torch.optim.Optimizer):
    """Changes each parameter that has a gradient by itself, as a subclass says."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.of_group([p for p in group["params"] if p.grad is not None], group)

    def of_group(self, params: list[Any], group: Any) -> None:
        """What is done to the parameters of a group that have gradients."""
        for p in params:
            self.one(p, p.grad, self.state[p], group)

    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        """p: the parameter. g: its gradient. s: what is kept of it."""
        raise NotImplementedError
