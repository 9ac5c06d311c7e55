"""The law of ways: a row a transform, an eager step and compiled ones; the same results, by the same collectives.

`make laws` runs every transform with every placement and way; `make test` a few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.presets import PRESETS, ranks_of
from support.problems import LOOPS, batch, loss_fn, mesh_and_placement, net, on
from support.ranks import launch
from support.tables import FULL, marked
from support.traced import BLOCKS

import functional_fsdp as fsdp
from functional_fsdp import extend
from functional_fsdp import transforms as T
from functional_fsdp._common.record import Collective

STEPS = 5 if FULL else 3
FORWARD = ("embed.weight", "blocks.0", "blocks.1")
ORDER = (*FORWARD, ("embed.weight", "tail"), *reversed(FORWARD))  # of `problems.by_unit`


def by_verbs(loop: str, model: Any) -> Callable[..., Any]:
    """The first or the second way, as `T.accumulate` takes a function."""

    def forward_backward(
        state: fsdp.State, tokens: Any, targets: Any, last_microbatch: bool = True, scale: Any = 1.0
    ) -> Any:
        return LOOPS[loop](model, state, (tokens, targets), last_microbatch)

    return forward_backward


def driven(model: Any) -> Callable[..., Any]:
    """The third way."""
    return T.forward_backward(model, lambda model, tokens, targets: loss_fn(model, (tokens, targets)))


def doubled(state: fsdp.State) -> fsdp.State:
    """A transform of somebody's own: a factor that all ranks have, in the extras, and gradients times that."""
    state = fsdp.finish_reductions(state)  # what `state.grads` has before may not be all
    (factor,) = extend.all_reduce(state, [torch.ones((), device=state.count.device)], "sum", what="factor")

    def work() -> None:
        for buffer in state.grads.values():
            buffer.local.mul_(factor)

    return fsdp.replace_extras(extend.change(state, "doubled()", work), factor=factor)


def skipped(state: fsdp.State) -> fsdp.State:
    """Every second step has a gradient of infinity."""
    infinite = torch.where(state.count % 2 == 1, torch.inf, 1.0)
    return T.skip_nonfinite(fsdp.step)(T.divide(state, 1 / infinite))


def measured(state: fsdp.State) -> fsdp.State:
    """Gradients divided by what all of the norms make."""
    state, of_leaves = T.norms(state)
    state, of_units = T.norms(state, state.main, torch.inf, by="unit")
    state, product = T.dot(state, state.grads, state.main)
    state, largest = fsdp.pmax(state, of_units)
    state, norm = T.clip_by_global_norm(state, 0.1)
    state, absolute = T.global_norm(state, 1)
    by = torch.stack([norm, absolute, product.square(), *of_leaves.values(), *largest.values()]).sum()
    return fsdp.replace_extras(fsdp.step(T.divide(state, by)), leaves=of_leaves, units=of_units, product=product)


#: (what becomes of forward_backward, what takes the step)
TRANSFORMS: dict[str, tuple[Callable[[Any], Any], Callable[[fsdp.State], fsdp.State]]] = {
    "step": (lambda f: f, fsdp.step),
    "accumulate": (lambda f: T.accumulate(f, 2), fsdp.step),
    "clip_by_global_norm": (lambda f: f, lambda state: fsdp.step(T.clip_by_global_norm(state, 0.1)[0])),
    "clip_by_value": (lambda f: f, lambda state: fsdp.step(T.clip_by_value(state, 1e-3))),
    "divide": (lambda f: f, lambda state: fsdp.step(T.divide(state, 7.0))),
    "skip_nonfinite": (lambda f: f, skipped),
    "norms": (lambda f: f, measured),
    "one of one's own": (lambda f: f, lambda state: fsdp.step(doubled(state))),
}
COMPILED = ("T.compile", "torch.compile")
WAYS = (*COMPILED, "graph", "lower")
ROWS = [
    (transform, preset, how, way)
    for transform in TRANSFORMS for preset in PRESETS for how in (*LOOPS, "driven") for way in WAYS
    if (how, way) != ("driven", "torch.compile")
]  # fmt: skip
ONCE = [(transform, "zero3", "whole", "graph") for transform in TRANSFORMS]
# a step with `norms` has what these four do: nothing, a clipped norm, clipped values, a factor
ONCE += [(t, "zero3", "whole", "lower") for t in ("accumulate", "skip_nonfinite", "norms", "one of one's own")]
ONCE.append(("norms", "zero3", "whole", "torch.compile"))  # T.compile is traced as that is


def taken(transform: str, preset: str, how: str, way: str) -> Any:
    """Losses and weights after each step, and what one step issues: of an eager step what the lanes have logged."""
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net(torch.float64, 2 if how == "by_unit" else BLOCKS))
    order = ORDER if how == "by_unit" else None  # a use that does not come is gathered eagerly, and in no graph
    spec = fsdp.Spec(mesh, placement, schedule=fsdp.Schedule(order))
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1, momentum=0.9))  # AdamW makes much of gradients that are noise
    before, after = TRANSFORMS[transform]
    forward_backward = before(driven(model) if how == "driven" else by_verbs(how, model))

    def train_step(state: fsdp.State, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        state, loss = forward_backward(state, tokens, targets)
        state, loss = fsdp.pmean(state, loss)
        return after(state), loss

    if way in COMPILED:
        torch._dynamo.reset()
    ways: dict[str, Any] = {
        "eager": lambda step: step,
        "torch.compile": lambda step: torch.compile(step, fullgraph=True, backend="aot_eager" if FULL else "eager"),
        "T.compile": lambda step: T.compile(step, "aot_eager"),
        "graph": lambda step: T.cuda_graph(step, pass_through=True),
    }
    if way == "lower":
        return Counter(fsdp.lower(train_step, state, *on(state, batch(0, 0, 0))).collectives)
    step, seen = ways[way](train_step), []
    logs = {lane: log for lane, log in state.version.lineage.runtime.issued.items() if lane != "control"}
    for i in range(STEPS):
        if i == STEPS - 1:
            counts = {lane: log.count for lane, log in logs.items()}
        state, loss = step(state, *on(state, batch(i, dist.get_rank(), 0)))
        seen.append(loss.item())
    issued: Counter[Collective] = Counter()
    for lane, log in logs.items():
        jobs = list(log.tail)[len(log.tail) - (log.count - counts[lane]) :]
        issued.update(one for job in jobs for one in job)
    return seen, fsdp.full_params(state), int(state.count), issued, state.extras


@cache
def eagerly(transform: str, preset: str, how: str, ranks: int) -> list[Any]:
    return launch(taken, (transform, preset, how, "eager"), nprocs=ranks)


@pytest.mark.parametrize(("transform", "preset", "how", "way"), marked(ROWS, ONCE))
def test_a_step_is_the_same_every_way(transform: str, preset: str, how: str, way: str) -> None:
    ranks = ranks_of(preset) if FULL or way not in COMPILED else 1  # each traces the same; `lower` has what they send
    eager = eagerly(transform, preset, how, ranks)
    found = launch(taken, (transform, preset, how, way), nprocs=ranks, processes=way in COMPILED)
    for mine, right in zip(found, eager, strict=True):
        if way == "lower":
            assert mine == right[3]
            continue
        torch.testing.assert_close(mine[0], right[0], rtol=1e-10, atol=0)
        torch.testing.assert_close(mine[1], right[1], rtol=1e-9, atol=1e-11)
        assert mine[2] == right[2] == (STEPS if transform != "skip_nonfinite" else 1)  # it skips from the second on
        torch.testing.assert_close(mine[4], right[4])
