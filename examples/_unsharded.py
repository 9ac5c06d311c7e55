"""References, unsharded: the training of `--check` with what torch has for it, and Muon for whole matrices.

One plain module sees every rank's batch in turn, gradients are averaged, `torch.optim.AdamW` steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Unsharded:
    """A plain copy of the model, trained beside the sharded one.

    Args:
        module, params: the module, and the weights that the sharded training started from.
        dtype: of compute; the weights keep their own.
        rate: learning rate as a function of the count tensor.
        decay: weight decay of norms (`no_decay`) and of everything else (`default`).
    """

    def __init__(
        self,
        module: nn.Module,
        params: Mapping[str, Tensor],
        dtype: torch.dtype,
        rate: Callable[[Tensor], Tensor],
        betas: tuple[float, float],
        decay: Mapping[str, float],
    ) -> None:
        like = next(iter(params.values()))
        self.module, self.dtype, self.rate = module.to(like), dtype, rate
        self.module.load_state_dict(dict(params))
        norms = [p for name, p in self.module.named_parameters() if "norm" in name]
        others = [p for name, p in self.module.named_parameters() if "norm" not in name]
        groups = [
            {"params": norms, "weight_decay": decay["no_decay"]},
            {"params": others, "weight_decay": decay["default"]},
        ]
        self.adamw = torch.optim.AdamW(groups, betas=betas)
        self.count = torch.zeros((), dtype=torch.int64, device=like.device)  # where cosines round as there
        self.largest = 0.0  # difference of a loss so far

    def step(self, loss_fn: Callable[..., Tensor], batches: Sequence[Tensor], sharded_loss: Tensor) -> None:
        """One step on all ranks' batches; `sharded_loss` is what the sharded step said."""
        total = 0.0
        self.adamw.zero_grad()
        for batch in batches:
            weights = {name: p.to(self.dtype) for name, p in self.module.named_parameters()}
            loss = loss_fn(lambda x, w=weights: torch.func.functional_call(self.module, w, (x,)), batch) / len(batches)
            loss.backward()
            total += loss.item()
        for group in self.adamw.param_groups:
            group["lr"] = self.rate(self.count).item()
        self.adamw.step()
        self.count += 1
        self.largest = max(self.largest, abs(total - sharded_loss.item()))

    def differences(self, params: Mapping[str, Tensor]) -> dict[str, float | str]:
        """Largest difference of the losses of all steps, and of the weights now, with the path where it is."""
        apart = {name: (p - params[name]).abs().max().item() for name, p in self.module.named_parameters()}
        where = max(apart, key=lambda name: apart[name])
        return {"losses": self.largest, "weights": apart[where], "where": where}


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon in the dtype of its matrices: torch's own multiplies in bfloat16."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.05)
                    change = orthogonalized(p.grad.lerp(momentum, 0.95))
                    ratio = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * ratio * change)


def orthogonalized(g: Tensor) -> Tensor:
    """Five steps of Newton-Schulz's iteration."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x
