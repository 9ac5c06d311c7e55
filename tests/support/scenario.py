"""Scenarios: a model, a spec, a loop and perturbations; what they make of a run on ranks, and of the plain module.

all_alike(case("resnet", preset="zero2", micro=2))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils._pytree as pytree
from support import problems
from support.models import CASES, batch_of, made
from support.ranks import launch

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp._common.record import Collective

Tree = dict[str, torch.Tensor]
#: (model, state, data, last microbatch) -> (state with gradients, loss)
Loop = Callable[[Any, fsdp.State, Any, bool], tuple[fsdp.State, torch.Tensor]]
ADAMW: Any = (lambda: fsdp.adamw(lr=1e-2, weight_decay=0.1)), lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)
SGD: Any = (lambda: fsdp.sgd(lr=0.1)), lambda p: torch.optim.SGD(p, lr=0.1)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Functions are a module's own where ranks may be processes; a lambda goes, too."""

    model: Callable[[], nn.Module] = problems.net  # begun with seed 0
    loss_fn: Callable[..., Any] = problems.loss_fn
    data: Callable[[int, int, int], Any] = problems.batch  # of a step, a rank and a microbatch
    preset: str = "zero3"
    spec: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Any = ADAMW  # (the package's, torch's)
    loop: str | Loop = "driven"  # or by hand: "whole", "by_unit", a function
    options: Mapping[str, Any] = field(default_factory=dict)  # of forward_backward
    change: Callable[[nn.Module], nn.Module] = lambda model: model  # of the skeleton: T.remat, T.compile_units
    compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None  # of the train step
    steps: int = 2
    micro: int = 1
    # perturbations
    before: Callable[[fsdp.State, int], fsdp.State] = lambda state, step: state  # a step: saved and loaded, moved, ...
    update: Callable[[fsdp.State], fsdp.State] = fsdp.step  # the step itself: clipped, skipped, ...
    plain_update: Callable[[nn.Module, torch.optim.Optimizer], Any] = lambda model, optimizer: optimizer.step()


@dataclass(frozen=True)
class Seen:
    """Of a rank. Losses of each microbatch; of each step: gradients, and weights and buffers after it; what the last
    step issued, and its order of uses."""

    losses: list[float]
    grads: list[Tree]
    weights: list[Tree]
    traffic: Counter[Collective] = field(default_factory=Counter)
    order: list[str] = field(default_factory=list)


def case(name: str, spec: Mapping[str, Any] = {}, **more: Any) -> Scenario:
    """A scenario of a model of `models.CASES`."""
    one = CASES[name]
    data = lambda step, rank, micro: batch_of(one, step, rank, micro)  # noqa: E731
    return Scenario(
        **{"model": lambda: made(one), "loss_fn": one.loss_fn, "data": data, **more}, spec={**one.spec, **spec}
    )


def begun(one: Scenario) -> tuple[fsdp.State, Any]:
    mesh, placement = problems.mesh_and_placement(one.preset)
    torch.manual_seed(0)
    module = one.model()
    params, skeleton = fsdp.functionalize(module)
    spec = fsdp.Spec(mesh, placement, **one.spec)
    return fsdp.shard(params, spec, one.optimizer[0](), buffers=fsdp.buffers(module)), one.change(skeleton)


def looped(one: Scenario, model: Any) -> Callable[..., Any]:
    """(state, data, last microbatch) -> (state, loss)."""
    if one.loop == "driven":
        forward_backward = T.forward_backward(model, one.loss_fn, **one.options)
        return lambda state, data, last: forward_backward(state, data, last_microbatch=last)
    loop: Any = problems.LOOPS[one.loop] if isinstance(one.loop, str) else one.loop
    return lambda state, data, last: loop(model, state, data, last)


def run(one: Scenario) -> Seen:
    """On this rank."""
    state, model = begun(one)
    forward_backward, seen = looped(one, model), Seen([], [], [])

    def train_step(state: fsdp.State, batches: list[Any]) -> Any:
        losses = []
        for k, data in enumerate(batches):
            state, loss = forward_backward(state, data, k == len(batches) - 1)
            losses.append(loss)
        if one.compile is None:
            state = fsdp.finish_reductions(state)
            seen.grads.append(problems.full_grads(state))
        return one.update(state), losses

    step = one.compile(train_step) if one.compile else train_step
    for i in range(one.steps):
        state = one.before(state, i)
        logs = {lane: log for lane, log in state.version.lineage.runtime.issued.items() if lane != "control"}
        counts = {lane: log.count for lane, log in logs.items()}
        batches = [one.data(i, dist.get_rank(), k) for k in range(one.micro)]
        state, losses = step(state, moved(batches, state.count.device))
        seen.losses.extend(float(loss) for loss in losses)
        jobs = [job for lane, log in logs.items() for job in [*log.tail][len(log.tail) - (log.count - counts[lane]) :]]
        seen.weights.append(copied(fsdp.state_dict(state)))
    order = [use.unit for use in state.cursor.plan.uses]
    return Seen(seen.losses, seen.grads, seen.weights, Counter(hop for job in jobs for hop in job), order)


def on_ranks(one: Scenario, ranks: int = 2, **settings: Any) -> list[Seen]:
    return launch(run, (one,), nprocs=ranks, **settings)


def plain(one: Scenario, ranks: int, device: Any = "cpu") -> list[Seen]:
    """The module itself on the data of each of so many ranks, gradients and buffers averaged over them."""
    torch.manual_seed(0)
    model, weight = one.model().to(device), ranks if one.spec.get("average", "mean") == "mean" else 1
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    optimizer = one.optimizer[1](trained.values())
    losses: list[list[float]] = [[] for _ in range(ranks)]
    grads, weights = [], []
    for step in range(one.steps):
        optimizer.zero_grad()  # a weight that no rank uses is left alone
        before, after = copied(dict(model.named_buffers())), []
        for rank in range(ranks):
            for key, b in model.named_buffers():
                b.copy_(before[key])
            for k in range(one.micro):
                loss = one.loss_fn(model, moved(one.data(step, rank, k), device))
                (loss / weight).backward()
                losses[rank].append(loss.item())
            after.append(copied(dict(model.named_buffers())))
        for key, b in model.named_buffers():
            if b.is_floating_point():
                b.copy_(torch.stack([one[key] for one in after]).mean(0))
        grads.append(copied({key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in trained.items()}))
        one.plain_update(model, optimizer)
        weights.append(copied(model.state_dict()))
    return [Seen(mine, grads, weights) for mine in losses]


def moved(data: Any, device: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), data)


def copied(tree: Mapping[str, torch.Tensor]) -> Tree:
    return {key: t.detach().to("cpu", copy=True) for key, t in tree.items()}


def alike(seen: Seen, want: Seen, within: float = 1e-9) -> None:
    """Losses, gradients if both have them, weights and buffers."""
    assert all(abs(a - b) <= within for a, b in zip(seen.losses, want.losses, strict=True))
    for found, wanted in zip(seen.grads, want.grads, strict=bool(seen.grads and want.grads)):
        assert apart(found, wanted) <= within
    for found, wanted in zip(seen.weights, want.weights, strict=True):
        assert apart(found, wanted) <= within


def apart(a: Tree, b: Tree) -> float:
    assert a.keys() == b.keys()
    wide = torch.complex128 if any(t.is_complex() for t in (*a.values(), *b.values())) else torch.float64
    far = ((a[key].to(wide) - b[key].to(wide)).abs() for key in a if a[key].numel())
    return max((one.nan_to_num(nan=torch.inf).max().item() for one in far), default=0.0)


def all_alike(one: Scenario, ranks: int = 2, within: float = 1e-9, other: Iterable[Seen] | None = None) -> list[Seen]:
    """What each rank sees, which is what the plain module does, or another scenario."""
    found = on_ranks(one, ranks)
    for seen, want in zip(found, plain(one, ranks) if other is None else other, strict=True):
        alike(seen, want, within)
    return found
