"""The small net in stages, and what the plain module makes of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from support.problems import Tree, mesh_and_placement, net
from torch.func import functional_call

import functional_fsdp as fsdp

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
HEAD = ("embed.weight", "tail")
PLAIN = net()


def start(preset: str, **spec: Any) -> tuple[fsdp.State, Any]:
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net())
    schedule = spec.pop("schedule", fsdp.Schedule(debug=True))
    return fsdp.shard(params, fsdp.Spec(mesh, placement, schedule=schedule, **spec), fsdp.sgd(lr=0.1)), model


def loss_fn(model: Callable[..., torch.Tensor], data: Any) -> torch.Tensor:
    """Of a batch, or of one sample: the mean over samples is the loss of the batch."""
    return F.cross_entropy(model(data[0]).flatten(0, -2), data[1].flatten())


def stages(model: Any) -> dict[Any, Callable[..., Any]]:
    """The awkward model cut into units, the tied leaf in the first and in the last; for a batch or for one sample."""

    def block(w: Tree, h: torch.Tensor, data: Any, i: int) -> Any:
        return fsdp.bind(model.blocks[i], w)(h)

    def head(w: dict[str, Tree], h: torch.Tensor, data: Any) -> torch.Tensor:
        logits = fsdp.bind(model.tail, w["tail"])(fsdp.bind(model.head, w["embed.weight"])(h))
        return F.cross_entropy(logits.flatten(0, -2), data[1].flatten())

    return {
        "embed.weight": lambda w, h, data: F.embedding(data[0], w["weight"]),
        **{name: partial(block, i=i) for i, name in enumerate(BLOCKS)},
        HEAD: head,
    }


def noted(state: fsdp.State, cut: dict[Any, Callable[..., Any]], most: list[int]) -> dict[Any, Callable[..., Any]]:
    """Stages that note how many units with sharded weights are gathered while they run."""

    def noting(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            progress = state._executor.progress
            most.append(sum(bool(progress.plan.by_name[unit].parts) for unit in progress.cursor.live))
            return fn(*args)

        return run

    return {key: noting(fn) for key, fn in cut.items()}


def weights() -> tuple[Tree, Tree]:
    """Of the plain module: those that train, and those that do not. Tied ones once."""
    named = dict(PLAIN.named_parameters())
    return ({k: p.detach() for k, p in named.items() if p.requires_grad},
            {k: p.detach() for k, p in named.items() if not p.requires_grad})  # fmt: skip


def plain(trained: Tree, data: Any) -> torch.Tensor:
    """The loss as a function of what trains."""
    return loss_fn(lambda tokens: functional_call(PLAIN, {**trained, **weights()[1]}, (tokens,)), data)
