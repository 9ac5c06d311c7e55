"""Classes as torch's optimizers, for `from_torch`."""

from __future__ import annotations

from typing import Any

import torch


class ByParameter(torch.optim.Optimizer):
    """Changes each parameter by itself, as a subclass says."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.change(p, group["lr"])

    def change(self, p: torch.Tensor, lr: float) -> None:
        raise NotImplementedError
