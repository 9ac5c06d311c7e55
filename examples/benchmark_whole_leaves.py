"""The optimizer's part of a step with classes that have whole leaves: owners beside gather-everything, in one run.

    python examples/benchmark_whole_leaves.py                             # CPU, 2 ranks, a tiny GPT's layers
    python examples/benchmark_whole_leaves.py --model 0.16b --ranks 2     # GPUs

| row               | what it is                                                                                |
|-------------------|-------------------------------------------------------------------------------------------|
| owners            | `fsdp.from_torch(cls)`: each leaf goes to one rank, and back                              |
| gather everything | `fsdp.from_torch(cls, by="all")`: each rank gathers all leaves, and has all of them        |

For LAMB (You et al. 2019) and SOAP (Vyas et al. 2024), both written here. Gradients are there already, random; the
matrices of the layers only. They take turns. Milliseconds on the slowest rank, medians of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from _benchmark_models import MODELS
from benchmark_muon import in_turns, ours

import functional_fsdp as fsdp


class Lamb(torch.optim.Optimizer):
    """Adam's direction, as long as the weights of the leaf."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                self.change(p, p.grad, self.state[p], group)

    def change(self, p: torch.Tensor, g: torch.Tensor, s: dict[str, Any], group: dict[str, Any]) -> None:
        if not s:
            s["mean"], s["square"] = torch.zeros_like(p), torch.zeros_like(p)
        slow, fast = group["betas"]
        s["mean"].lerp_(g, 1 - slow)
        s["square"].lerp_(g * g, 1 - fast)
        by = s["mean"] / (s["square"].sqrt() + group["eps"])
        p.sub_(by * (group["lr"] * p.norm() / by.norm()))


class Soap(Lamb):
    """Adam in the eigenbasis of Shampoo's smaller preconditioner, which one QR iteration a step keeps up."""

    def change(self, p: torch.Tensor, g: torch.Tensor, s: dict[str, Any], group: dict[str, Any]) -> None:
        side = 0 if p.shape[0] <= p.shape[1] else 1
        gram = (g @ g.mT if side == 0 else g.mT @ g).float()
        if not s:
            s["mean"], s["square"] = torch.zeros_like(p), torch.zeros_like(p)
            s["gram"], s["basis"] = torch.zeros_like(gram), torch.eye(len(gram), device=p.device)
        slow, fast = group["betas"]
        s["gram"].lerp_(gram, 1 - fast)
        s["basis"] = torch.linalg.qr(s["gram"] @ s["basis"])[0]
        q = s["basis"].to(p.dtype)
        s["mean"].lerp_(g, 1 - slow)
        turned, mean = (q.mT @ one if side == 0 else one @ q for one in (g, s["mean"]))
        s["square"].lerp_(turned * turned, 1 - fast)
        by = mean / (s["square"].sqrt() + group["eps"])
        p.sub_(q @ by if side == 0 else by @ q.mT, alpha=group["lr"])


def measured(name: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each row in each round, on this rank."""
    config, found = MODELS[name], dict[str, list[float]]()
    for cls in (Lamb, Soap):
        with torch.device(fsdp.local_mesh().device_type):
            torch.manual_seed(0)
            rows = {
                f"{cls.__name__}, owners": ours(config, fsdp.from_torch(cls, by="leaf")),
                f"{cls.__name__}, gather everything": ours(config, fsdp.from_torch(cls, by="all")),
            }
        found |= in_turns(rows, rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="LAMB and SOAP with owners beside gather-everything")
    parser.add_argument("--model", default="tiny", choices=[name for name, one in MODELS.items() if one.kind == "gpt"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    ranks = fsdp.launch(measured, (args.model, args.rounds), nprocs=args.ranks)
    slowest = {what: [max(times) for times in zip(*(rank[what] for rank in ranks), strict=True)] for what in ranks[0]}
    print("| | ms | spread | this row / owners |\n|---|---:|---:|---:|")
    for what, times in slowest.items():
        owners = statistics.median(slowest[what.split(",")[0] + ", owners"])
        middle = statistics.median(times)
        print(f"| {what} | {middle:.1f} | {min(times):.1f}–{max(times):.1f} | {middle / owners:.3f} |")


if __name__ == "__main__":
    main()
