"""A model of `models` trained plainly and driven, on any device."""

from __future__ import annotations

from typing import Any

import torch
from support.models import CASES, batch_of, made
from support.problems import full_grads, mesh_and_placement

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

Tree = dict[str, torch.Tensor]
Seen = list[tuple[float, Tree, Tree]]
RANKS = 2


def cast(batch: dict[str, Any], dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Any]:
    return {name: t.to(device, dtype if t.is_floating_point() else t.dtype) for name, t in batch.items()}


def copied(tree: Tree) -> Tree:
    return {key: t.detach().to("cpu", copy=True) for key, t in tree.items()}


def plain(name: str, steps: int, dtype: torch.dtype, device: str = "cpu") -> Seen:
    """The module itself on each rank's batches, gradients and buffers averaged: losses, gradients, weights a step."""
    case = CASES[name]
    model = made(case, dtype).to(device)
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.1)
    seen: Seen = []
    for step in range(steps):
        before = {key: b.clone() for key, b in model.named_buffers()}
        after: dict[str, list[torch.Tensor]] = {key: [] for key in before}
        for p in trained.values():
            p.grad = None  # a weight that no rank uses is left alone
        losses = []
        for rank in range(RANKS):
            for key, b in model.named_buffers():
                b.copy_(before[key])
            loss = case.loss_fn(model, cast(batch_of(case, step, rank), dtype, device))
            (loss / RANKS).backward()
            losses.append(loss.item())
            for key, b in model.named_buffers():
                after[key].append(b.clone())
        for key, b in model.named_buffers():
            if b.is_floating_point():
                b.copy_(torch.stack(after[key]).mean(0))
        grads = copied({key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in trained.items()})
        optimizer.step()
        seen.append((losses[0], grads, copied(model.state_dict())))
    return seen


def driven(name: str, preset: str, steps: int, dtype: torch.dtype, debug: bool = False) -> tuple[Seen, bool]:
    """The same, by forward_backward on this rank; and whether the user's module is what it was."""
    case = CASES[name]
    mesh, placement = mesh_and_placement(preset)
    module = made(case, dtype)
    before = {key: t.clone() for key, t in module.state_dict().items()}
    parts = [(part, type(part), sorted(vars(part))) for part in module.modules()]
    params, model = fsdp.functionalize(module)
    spec = fsdp.Spec(mesh, placement, schedule=fsdp.Schedule(debug=debug), **case.spec)
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-2, weight_decay=0.1), buffers=fsdp.buffers(module))
    forward_backward = T.forward_backward(model, case.loss_fn)
    seen = []
    for step in range(steps):
        state, loss = forward_backward(state, cast(batch_of(case, step, mesh.get_rank()), dtype, state.count.device))
        state = fsdp.finish_reductions(state)
        grads = full_grads(state)
        state = fsdp.step(state)
        seen.append((loss.item(), grads, copied(fsdp.state_dict(state))))
    same = all(torch.equal(before[key], t) for key, t in module.state_dict().items())
    same &= all(type(part) is kind and sorted(vars(part)) == names for part, kind, names in parts)
    return seen, same
