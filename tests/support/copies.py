"""Steps by the copy_engine transport, on any device."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as pytree
from support.problems import LOOPS, Stack, batch, net, through_the_stack

import functional_fsdp as fsdp
from functional_fsdp import Precision, Schedule, Spec
from functional_fsdp import transforms as T

COPIES: Any = {"schedule": Schedule(debug=True), "transport": "copy_engine"}


def ones(state: fsdp.State) -> torch.Tensor:
    return torch.ones(2, 32, device=state.count.device)


def on_two_axes(transport: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Three steps of a stack whose layers are sharded over one axis and over the other, by turns; and the axes read."""
    mesh = fsdp.local_mesh(a=2, b=2)
    rules = {"layers.[02]*": fsdp.zero3("a"), "*": fsdp.zero3("b")}
    params, _ = fsdp.functionalize(Stack(32, 4))
    generator = torch.Generator().manual_seed(0)
    params = {path: torch.randn(p.shape, generator=generator) for path, p in params.items()}
    state = fsdp.shard(params, Spec(mesh, rules, transport=transport), fsdp.sgd(lr=0.1))
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(1 + dist.get_rank())).to(state.count.device)
    for _ in range(3):
        state = fsdp.step(through_the_stack(state, x)[0])
    carrier: Any = state._executor.carrier
    read = sorted(carrier.reading.last) if carrier.read else []
    return {path: p.cpu() for path, p in fsdp.full_params(state).items()}, read


def gradients(transport: Any, times: int) -> list[dict[str, torch.Tensor]]:
    """The main gradients of one step in bfloat16, several times, as the bits of this rank's shards."""
    params, _ = fsdp.functionalize(Stack(32, 3))
    precision = Precision(compute=torch.bfloat16, sum="fp32" if transport == "collective" else "auto")
    spec = Spec(fsdp.local_mesh(), precision=precision, transport=transport)
    torch.manual_seed(0)
    params = {path: torch.randn_like(p) for path, p in params.items()}
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1))
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    x = x.bfloat16().to(state.count.device)
    seen = []
    for _ in range(times):
        middle = fsdp.finish_reductions(through_the_stack(state, x)[0])
        seen.append({name: buffer.local.clone() for name, buffer in middle.grads.items()})
    return seen


def other_weights() -> list[float]:
    """Other main weights (an average, say) for an evaluation, and back; and changed in place."""
    params, _ = fsdp.functionalize(Stack(32, 3))
    state = fsdp.shard(params, Spec(fsdp.local_mesh(), **COPIES), fsdp.sgd(lr=0.1))
    predict = T.apply(Stack(32, 3), lambda model, x: sum(F.linear(x, m.weight).sum() for m in model.layers))
    x = ones(state)
    seen = []

    def look(state: fsdp.State) -> float:
        _, out = predict(state, x)
        return float(out)

    for _ in range(3):
        seen.append(look(state))
        doubled = fsdp.replace_params(state, pytree.tree_map(lambda t: t * 2, state.main))
        seen.append(look(doubled) / 2)
        seen.append(look(state))
    for buffer in state.main.values():
        buffer.local.mul_(4)  # powers of two: no rounding
    seen.append(look(state) / 4)
    for buffer in state.main.values():
        buffer.local.data.mul_(2)  # which no version tells
    seen.append(look(state) / 8)
    with torch.inference_mode():
        seen.append(look(state) / 8)
    return seen


def abandoned(transport: Any) -> tuple[int, bool, bool]:
    """Rank 1 gives up in the middle of four steps, at several places; all go on from the state before it."""
    params, model = fsdp.functionalize(net(torch.float32))
    spec = Spec(fsdp.local_mesh(), schedule=Schedule(debug=True), transport=transport)
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-2))
    plain = fsdp.shard(params, Spec(fsdp.local_mesh()), fsdp.adamw(lr=1e-2))
    met = 0
    for step in range(4):
        data = batch(step, dist.get_rank())
        if dist.get_rank() == 1:
            middle = state
            for unit in state.units[: step + 1]:
                middle, _ = fsdp.unshard(middle, unit)
                middle = fsdp.release(middle, unit)
            if step == 3:
                LOOPS["by_unit"](model, state, data, True)
            met += 1
        while True:
            try:
                after, _ = LOOPS["by_unit"](model, state, data, True)
                state = fsdp.step(after)
                break
            except fsdp.RestartError:
                met += 1
        plain = fsdp.step(LOOPS["by_unit"](model, plain, data, True)[0])
    mine, theirs = fsdp.full_params(state), fsdp.full_params(plain)
    return met, all(torch.allclose(mine[path], theirs[path], atol=1e-4) for path in mine), state.between_steps


def copied(folder: str) -> list[float]:
    """A copy and a loaded state are lineages with memories of their own."""
    params, _ = fsdp.functionalize(Stack(32, 3))
    state = fsdp.shard(params, Spec(fsdp.local_mesh(), **COPIES), fsdp.adamw(lr=1e-2))
    twin = copy.deepcopy(state)
    loaded = fsdp.load(fsdp.save(state, folder), like=state)
    seen = []
    for one in (state, twin, loaded):
        for _ in range(3):
            one, loss = through_the_stack(one, ones(one))
            one = fsdp.step(one)
        seen.append(loss.item())
    return seen
