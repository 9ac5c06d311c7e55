"""Functional collectives: each is an operation in a graph, issued by `start` and waited for by `finished`.

They name their group by a string and need no process group while they are traced.
"""

from __future__ import annotations

import torch

from ._recipes import Exchange
from ._torch import functional_collectives

__all__ = ["finished", "run", "start"]


def start(exchange: Exchange, local: torch.Tensor, op: str) -> torch.Tensor:
    """Issue one collective; its result must be waited for."""
    ops = functional_collectives
    if exchange.kind == "gather":
        return ops.all_gather_into_tensor(local, exchange.ranks, exchange.group)
    if exchange.kind == "scatter":
        return ops.reduce_scatter_tensor(local, op, exchange.ranks, exchange.group)
    if exchange.kind == "sum":
        cuts = [local.numel() // exchange.ranks] * exchange.ranks
        return ops.all_to_all_single(local, cuts, cuts, exchange.group)
    return ops.all_reduce(local, op, exchange.group)


def finished(exchange: Exchange, local: torch.Tensor, op: str) -> torch.Tensor:
    """Wait for what `start` issued."""
    done: torch.Tensor = functional_collectives.wait_tensor(local)
    if exchange.kind != "sum":
        return done
    parts = done.view(exchange.ranks, -1)
    total = parts[0].float()
    for rank in range(1, exchange.ranks):  # in the order of ranks: ((r0 + r1) + r2) + ...
        total = total + parts[rank]
    if op == "avg":
        total = total / exchange.ranks
    if exchange.whole:
        return run(Exchange("gather", exchange.ranks, exchange.group, torch.float32, False), total)
    return total


def run(exchange: Exchange, local: torch.Tensor, op: str = "sum") -> torch.Tensor:
    return finished(exchange, start(exchange, local, op), op)
