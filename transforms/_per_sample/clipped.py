"""clipped_gradients: each sample's gradient cut down to a norm, and noise on their sum (DP-SGD).

    pass 1    forward, backward     the norm of each sample's gradient over all units; the gradients are dropped
    pass 2    forward, backward     of the samples' losses, each times min(1, max_norm / norm): one gradient, reduced

No rank ever holds the gradients of a batch's samples for more than a unit. What that costs is a second pass.

Noise is one normal draw an element of a leaf, whatever the placement and however many ranks there are. A leaf is cut
into blocks, and a block's draws follow from (state.rng, step, path, block) alone. A rank draws the blocks that its
shard touches, so replicas draw the same, shards draw what is theirs, and padding stays zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import inf, prod
from numbers import Real
from typing import Any

import torch
import torch.nn as nn

from functional_fsdp import SpecError, State, finish_reductions, reduce
from functional_fsdp._seams import expect
from functional_fsdp.extend import alone, begin_round, change, end_round, evolve, leaf_shards, ranks_of, seeds

from .._drive.driver import eager_only
from .._drive.forward_backward import forward_backward
from .._drive.stages import Stages, Weights
from ..vjp import vjp
from .per_sample import batched, losses_of, norms_by, samples

__all__ = ["BLOCK", "add_noise", "clipped_gradients"]

BLOCK = 1 << 20  # elements


@torch.no_grad()
def add_noise(state: State, std: float | torch.Tensor) -> None:
    """Add normal draws of this standard deviation to the state's gradients, in place. They are whole.

    Where ranks have leaves of their own (experts), they draw their own. The caller's random numbers are left alone.
    """
    ranks, seed = ranks_of(state), seeds(state, "noise")
    generator = torch.Generator(device=ranks.device)
    for buffer in state.grads.values():
        same = (*buffer.bucket.placement.data, *buffer.bucket.equal)
        own = [(axis, i) for axis, i in ranks.coordinate.items() if axis not in same]
        wide = torch.float64 if buffer.local.dtype is torch.float64 else torch.float32
        for leaf, first, local in leaf_shards(buffer):
            last = first + local.numel()
            for at in range(first // BLOCK * BLOCK, last, BLOCK):
                end = min(at + BLOCK, leaf.numel)
                generator.manual_seed(seed(own, leaf.path, at))
                draws = torch.randn(end - at, generator=generator, dtype=wide, device=ranks.device).mul_(std)
                a, b = max(at, first), min(end, last)
                local[a - first : b - first].add_(draws[a - at : b - at])


HEAVIEST = "clipped_gradients"  # among a State's extras, during a round: the most that one sample's loss weighs


def clipped_gradients(
    model: nn.Module | Mapping[Any, Callable[..., Any]],
    loss_fn: Callable[..., torch.Tensor] | None = None,
    *,
    max_norm: float,
    noise: float = 0.0,
    chunk: int | None = None,
) -> Callable[..., tuple[State, torch.Tensor]]:
    """A function that adds the mean of the samples' clipped gradients to the state, unit by unit, and noise if asked.

    Args:
        model, loss_fn, chunk: as for `per_sample_norms`.
        max_norm: each sample's gradient g, over all units, becomes g · min(1, max_norm / |g|).
        noise: the noise multiplier: normal draws of standard deviation noise · max_norm are added to the sum of all
            clipped gradients, of the batch of all ranks. They follow from (state.rng, step) and the leaf, so they are
            the same whatever the placement and the number of ranks; parts of leaves that are cut along axes of the
            model's own have draws of their own. With noise every leaf has a gradient.

    Returns:
        `f(state, batch) -> state, losses [B]`, this rank's. The gradients are the mean over B and over the data ranks
        (with `Spec(average="sum")` their sum), so B is to be the same on every rank; with noise `step` compares it.
        Two keywords are its own, as of `forward_backward`: `last_microbatch=False` says that more microbatches follow,
        `scale` multiplies the gradients. Noise comes with the last one: once a step. It is that of the microbatch whose
        samples weigh most, by scale / B. (`T.accumulate` around it averages losses over microbatches, by position.)

    The norms are float32, or the compute dtype's where that is wider; with bfloat16 compute a sample's gradient is
    clipped to its rounding. A sample whose gradient is not finite makes the whole one so: see `T.skip_nonfinite`.

    This is the mechanism of DP-SGD. How much privacy it spends is for an accountant to say; that takes batches drawn at
    random, and a secret `seed`. On CPUs torch's generator has 32 bits, which somebody can try one by one.

    Raises:
        SpecError: max_norm not above 0, noise below 0. TreeError and ScheduleError as `per_sample_norms`; ScheduleError
            as `forward_backward`, where the gradients of a whole round are there; from `step`, with noise, where B,
        max_norm, noise or scale differ between ranks.

    Collective: as `unshard` for each stage twice, forward and backward; as `reduce` for each unit; with noise, what
    `finish_reductions` issues.

    Source: Abadi et al. 2016 (arXiv:1607.00133); norms first, then one weighted backward: Lee and Kifer 2020
    (arXiv:2009.03106), Li et al. 2021 (arXiv:2110.05679).

    Example:
        >>> clipped = T.clipped_gradients(model, loss_fn, max_norm=1.0, noise=1.1)
        >>> state, losses = clipped(state, batch)
        >>> state = fsdp.step(state)
    """
    norms_of = norms_by("clipped_gradients", model, loss_fn, chunk)
    weigh: Callable[..., tuple[State, Any]]
    if isinstance(model, nn.Module):
        weigh = forward_backward(model, partial(_weighed, loss_fn))
    else:
        weigh = partial(_weighted, Stages("clipped_gradients", model))
    for name, given in (("max_norm", max_norm), ("noise", noise)):
        expect(f"clipped_gradients({name})", given, (Real, torch.Tensor), "a number")
    if not 0 < max_norm < inf:
        raise SpecError(f"clipped_gradients(max_norm={max_norm!r}): expected a finite norm above 0.")
    if not 0 <= noise < inf:
        raise SpecError(f"clipped_gradients(noise={noise!r}): expected a finite multiplier of at least 0.")

    def f(
        state: State, batch: Any, *, last_microbatch: bool = True, scale: float | torch.Tensor = 1.0
    ) -> tuple[State, torch.Tensor]:
        begin_round(state, "clipped_gradients")
        rested = state.between_steps
        state, losses, norms = norms_of(state, batch)
        weights = max_norm / norms.clamp(min=max_norm)
        mean = scale / len(losses)
        heaviest = _larger(mean, None if rested else state.extras.get(HEAVIEST))
        weights = (weights * mean).to(losses.dtype)
        state, _ = weigh(state, batch, weights, last_microbatch=last_microbatch)
        if noise and last_microbatch:
            state = finish_reductions(state)
            ranks = prod(state.spec.axes[axis] for axis in state.spec.data) if state.spec.average == "mean" else 1
            blur = partial(add_noise, state, noise * max_norm * heaviest / ranks)
            alike = (max_norm, noise, "of a tensor" if isinstance(heaviest, torch.Tensor) else heaviest)
            state = change(state, "clipped_gradients()", blur, by=alike, every_leaf=True)
        if noise:
            others = {name: value for name, value in state.extras.items() if name != HEAVIEST}
            state = evolve(state, extras=others if last_microbatch else {**others, HEAVIEST: heaviest})
        end_round(state, last_microbatch)
        return state, losses

    return alone(f, "clipped_gradients", traced=eager_only("clipped_gradients"))


def _larger(a: float | torch.Tensor, b: float | torch.Tensor | None) -> float | torch.Tensor:
    if isinstance(a, torch.Tensor):
        return a if b is None else a.maximum(torch.as_tensor(b, dtype=a.dtype, device=a.device))
    return a if b is None else _larger(b, a) if isinstance(b, torch.Tensor) else max(a, b)


def _weighed(loss_fn: Any, model: Any, batch: Any, weights: torch.Tensor) -> torch.Tensor:
    """The losses [B] of a module, times weights [B]."""
    return (losses_of(loss_fn, "clipped_gradients", model, samples(batch)) * weights).sum()


def _weighted(
    walk: Stages, state: State, batch: Any, dlosses: torch.Tensor, last_microbatch: bool
) -> tuple[State, None]:
    """Gradients of the losses [B] of stages by these cotangents [B], reduced."""
    h: Any = None
    pullbacks = []
    for stage in walk.forward:
        state, w = stage.gather(state)
        h, pullback = vjp(partial(batched(stage), batch=batch), stage.given(w), h)
        pullbacks.append(pullback)
        state = stage.release(state)
    dh: Any = dlosses
    tied: Weights = {}
    for stage in walk.backward:
        state, w = stage.gather(state)
        dw, dh = pullbacks.pop()(stage.given(w), dh)
        for unit, grads in ({stage.key: dw} if isinstance(stage.key, str) else dw).items():
            total = _added(tied.pop(unit, {}), grads)
            if unit in stage.opens:
                state = reduce(state, total, unit, last_microbatch=last_microbatch)
            else:
                tied[unit] = total
        state = stage.release(state)
    return state, None


def _added(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    return {key: grad if a.get(key) is None else a[key] if grad is None else a[key] + grad for key, grad in b.items()}
