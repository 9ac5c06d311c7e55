"""A model of `models` trained plainly and driven, on any device."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from support import scenario
from support.models import CASES, batch_of, made

import functional_fsdp as fsdp

Tree = dict[str, torch.Tensor]
Seen = list[tuple[float, Tree, Tree]]  # of each step: the loss, gradients, weights and buffers
RANKS = 2


def trained(name: str, steps: int, dtype: torch.dtype, **more: Any) -> scenario.Scenario:
    def data(step: int, rank: int, micro: int) -> Any:
        batch = batch_of(CASES[name], step, rank, micro)
        return pytree.tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)

    return scenario.case(name, steps=steps, data=data, **{"model": lambda: made(CASES[name], dtype), **more})


def plain(name: str, steps: int, dtype: torch.dtype, device: str = "cpu") -> Seen:
    """The module itself on each rank's batches, gradients and buffers averaged; of losses the first rank's."""
    found = scenario.plain(trained(name, steps, dtype), RANKS, device)[0]
    return [*zip(found.losses, found.grads, found.weights, strict=True)]


def driven(name: str, preset: str, steps: int, dtype: torch.dtype, debug: bool = False) -> tuple[Seen, bool]:
    """The same, by forward_backward on this rank; and whether the user's module is what it was."""
    module = made(CASES[name], dtype)
    before = {key: t.clone() for key, t in module.state_dict().items()}
    parts = [(part, type(part), sorted(vars(part))) for part in module.modules()]
    spec = {"schedule": fsdp.Schedule(debug=debug)}
    found = scenario.run(trained(name, steps, dtype, preset=preset, spec=spec, model=lambda: module))
    same = all(torch.equal(before[key], t) for key, t in module.state_dict().items())
    same &= all(type(part) is kind and sorted(vars(part)) == names for part, kind, names in parts)
    return [*zip(found.losses, found.grads, found.weights, strict=True)], same
