"""A gradient for each sample, and what is made of them.

Per-sample gradients: `vjp` of a function of one sample, over a batch, and their norms, one unit at a time.

    vjp              out [B, ...]     dw [...]       the sum over the batch
    per_sample_vjp   out [B, ...]     dw [B, ...]    of each sample

A rank's samples are its own, so per-sample gradients are never reduced: they are used where they are, and dropped.

clipped_gradients: each sample's gradient cut down to a norm, and noise on their sum (DP-SGD).

    pass 1    forward, backward     the norm of each sample's gradient over all units; the gradients are dropped
    pass 2    forward, backward     of the samples' losses, each times min(1, max_norm / norm): one gradient, reduced

No rank ever holds the gradients of a batch's samples for more than a unit. What that costs is a second pass.

Noise is one normal draw an element of a leaf, whatever the placement and however many ranks there are. A leaf is cut
into blocks, and a block's draws follow from (state.rng, step, path, block) alone. A rank draws the blocks that its
shard touches, so replicas draw the same, shards draw what is theirs, and padding stays zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import inf, prod
from numbers import Real
from typing import Any

import torch
import torch.nn as nn

from functional_fsdp import SpecError, State, TreeError, finish_reductions, reduce
from functional_fsdp._seams import expect, torch_private
from functional_fsdp.extend import (
    Session,
    alone,
    begin_round,
    change,
    end_round,
    evolve,
    leaf_shards,
    over_shards,
    ranks_of,
    seeds,
)

from ._drive.driver import eager_only
from ._drive.forward_backward import Forward, forward_backward
from ._drive.jvp import Samples, each_in
from ._drive.stages import Stage, Stages, Weights, check_given, check_loss, dims, rows
from ._drive.unit_uses import values
from .vjp import Pullback, functional_vjp, lent, vjp

pytree = torch_private.pytree
vmap: Any = torch.func.vmap


def per_sample_vjp(fn: Callable[..., Any], weights: Any, *primals: Any) -> tuple[Any, Pullback]:
    """As `vjp`, of a function of one sample: run it on a batch, and return its output and its pullback.

    Args:
        fn: pure, written for one sample; vmap runs it, so it draws no random numbers.
        weights: what `unshard(state, unit)` gave, or any pytree.
        primals: pytrees of tensors with a leading dim of B samples (0-dim tensors and what is no tensor go to each).

    Returns:
        `(out [B, ...], pullback)`; `pullback(weights, dout [B, ...]) -> (dweights [B, ...], *dprimals [B, ...])`, None
        for leaves without a gradient. Nothing is kept but the primals: the pullback runs `fn` again.

    Raises:
        TreeError: primals of different numbers of samples.
        ScheduleError: weights that were released and not gathered again.

    Example:
        >>> w, x = {"a": torch.tensor(3.0)}, torch.tensor([1.0, 2.0])
        >>> out, pullback = per_sample_vjp(lambda w, x: w["a"] * x, w, x)
        >>> pullback(w, torch.ones(2))
        ({'a': tensor([1., 2.])}, tensor([3., 3.]))
    """
    n = rows("per_sample_vjp", primals)
    lent("per_sample_vjp", weights, primals)
    with _alone():
        out = vmap(fn, in_dims=(None, *dims(primals)))(weights, *primals)

    def pullback(w: Any, dout: Any) -> Any:
        lent("pullback", w, primals)
        if rows("pullback", dout) != n:
            raise TreeError(f"pullback: cotangents of {rows('pullback', dout)} samples; the forward had {n}.")
        structure: Any = None

        def one(dout: Any, *primals: Any) -> list[torch.Tensor]:
            nonlocal structure
            grads, structure = pytree.tree_flatten(functional_vjp(fn, (w, *primals))[1](dout))
            structure = structure.unflatten([grad is not None for grad in grads])
            return [grad for grad in grads if grad is not None]

        with _alone():
            found = iter(vmap(one, in_dims=(dims(dout), *dims(primals)))(dout, *primals))
        return pytree.tree_map(lambda there: next(found) if there else None, structure)

    return out, pullback


def per_sample_norms(
    model: nn.Module | Mapping[Any, Callable[..., Any]],
    loss_fn: Callable[..., torch.Tensor] | None = None,
    *,
    chunk: int | None = None,
) -> Callable[[State, Any], tuple[State, tuple[torch.Tensor, torch.Tensor]]]:
    """A function that gives the norm of each sample's gradient over all units, gathered and released one at a time.

    Args:
        model: any module, as for `forward_backward`. Or stages cut by hand: `{unit: fn(weights, h, sample)}` in order
            of use, each pure and for one sample. The first gets None for `h`, the others what the one before returned,
            floating tensors; the last returns the sample's loss, a tensor []. A key that is a tuple of units is a stage
            that uses them at once: its weights are `{unit: weights}`. Every unit that trains has a stage; a tied one
            has several.
        loss_fn: with a module, `loss_fn(model, batch)`, as for `forward_backward`. It is given each sample as a batch
            of one, tensors [1, ...], under vmap, and returns its loss, a tensor []. No random numbers: dropout has to
            be in evaluation mode; nor BatchNorm in training mode.
        chunk: how many samples' gradients there are at once (None: B). A rank holds `chunk` × the elements of a unit.
            A module runs once for each chunk: then every rank has as many.

    Returns:
        `f(state, batch) -> state, (losses [B], norms [B])`, of this rank's samples, norms in float32 or more. Between
        steps the state is as good afterwards as before; in the middle of a step the step goes on from the new one.

    Of gradients nothing is reduced. Frozen leaves do not count, tied leaves are one. Of leaves that are cut along an
    axis of the model's own each rank has its part, and all have the norm of the whole. In a module each sample has
    weights of its own, which are the same bytes, so autograd gives a unit's gradients by sample; they are squared, and
    dropped, when all of the unit's are there.

    Raises:
        TreeError: stages of the wrong kind, a loss that is no scalar, a batch without samples; by the name of the unit,
        what vmap refuses (random numbers, BatchNorm in training mode, an operation without a batching rule).
        ScheduleError (from f): a unit without a stage, or the other way round; a weight that is given to an
        autograd.Function outside of the module that holds it. SpecError (from f): a leaf whose gradient a rank does not
        have by sample: `Along(grads="sum")`, or cut along an axis of the data (experts).

    Collective: as `unshard` for each use of a unit, forward and backward; an all-reduce of [B] numbers for each axis of
    the model's own along which leaves are cut.

    Example:
        >>> norms_of = T.per_sample_norms(model, loss_fn)
        >>> state, (losses, norms) = norms_of(state, batch)
    """
    norms = norms_by("per_sample_norms", model, loss_fn, chunk)

    def f(state: State, batch: Any) -> tuple[State, tuple[torch.Tensor, torch.Tensor]]:
        session = Session(state, "per_sample_norms")
        state, losses, found = norms(state, batch)
        return session.rest(state), (losses, found)

    return alone(f, "per_sample_norms", traced=eager_only("per_sample_norms"))


Norms = Callable[[State, Any], tuple[State, torch.Tensor, torch.Tensor]]


def norms_by(verb: str, model: Any, loss_fn: Any, chunk: int | None) -> Norms:
    """A function that gives the new state, losses [B] and norms [B]."""
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise SpecError(f"{verb}(chunk={chunk!r}): expected a number of samples of at least 1, or None.")
    check_given(verb, model, loss_fn)
    if isinstance(model, nn.Module):
        return partial(norms_of_module, Forward(verb, model), loss_fn, chunk)
    return partial(norms_of_stages, Stages(verb, model), chunk)


def samples(batch: Any) -> Any:
    """[B, ...] -> [B, 1, ...]: of each sample a batch."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.unsqueeze(1) if t.dim() else t, batch)


def losses_of(loss_fn: Any, verb: str, model: Any, batch: Any, lifting: Any = nullcontext) -> torch.Tensor:
    """[B], of samples [B, 1, ...]: the loss function, for each."""

    def of_one(sample: Any) -> Any:
        with lifting():
            loss = values(loss_fn(model, sample))
        check_loss(f"{verb}: for one sample", "loss_fn", loss)
        return loss

    with for_each_sample(verb):
        losses: torch.Tensor = vmap(of_one, in_dims=(dims(batch),))(batch)
        return losses


def norms_of_module(
    driven: Forward, loss_fn: Any, chunk: int | None, state: State, batch: Any
) -> tuple[State, torch.Tensor, torch.Tensor]:
    """By a driven forward and backward, of weights of which each sample has its own."""
    n = rows(driven.verb, batch)
    found: list[tuple[torch.Tensor, Squares]] = []
    for first in range(0, n, chunk or n):
        cut = partial(_rows, slice(first, first + (chunk or n)))
        state, losses, squares = _squares(driven, loss_fn, state, pytree.tree_map_only(torch.Tensor, cut, batch))
        found.append((losses, squares))
    losses = torch.cat([one for one, _ in found])
    return state, losses, _norms(state, {axes: torch.cat([one[axes] for _, one in found]) for axes in found[0][1]})


Squares = dict[tuple[str, ...], torch.Tensor]  # squared norms [B], by the axes of the model's own that cut leaves


def _axes_of(verb: str, state: State) -> dict[tuple[str, str], tuple[str, ...]]:
    """The axes along which each leaf that trains is cut, as (unit, key).

    Raises:
        SpecError: a rank has no gradient of it by sample.
    """
    data, sizes, found = state.spec.data, state.spec.axes, {}
    for unit in state.layout.units:
        buckets = {leaf.path: bucket for bucket in unit.buckets if bucket.trainable for leaf in bucket.leaves}
        for key, path in zip(unit.keys, unit.paths, strict=True):
            if (bucket := buckets.get(path)) is not None:
                axes = found[unit.name, key] = tuple(axis for axis in bucket.cut if sizes[axis] > 1)
                mixed = [
                    axis for axis in (*bucket.summed, *axes) if sizes[axis] > 1 and axis in (*bucket.summed, *data)
                ]
                if mixed:
                    raise SpecError(
                        f"{verb}: what a rank has of the gradient of {path!r} is not of its own samples: along "
                        f"{mixed[0]!r} it is added up, or comes from the samples of other ranks."
                    )
    return found


def _norms(state: State, squares: Squares) -> torch.Tensor:
    """[B], of the squares of each rank's parts."""
    if [*squares] != [()]:
        squares = over_shards(state, squares)
    return torch.stack([*squares.values()]).sum(0).sqrt()


def _rows(which: slice, t: torch.Tensor) -> torch.Tensor:
    return t[which] if t.dim() else t


def _squares(driven: Forward, loss_fn: Any, state: State, batch: Any) -> tuple[State, torch.Tensor, Squares]:
    """The new state, losses [B], and squared norms."""
    axes_of = _axes_of(driven.verb, state)
    with driven.running(state) as driver, torch.enable_grad():
        driver.split_into(rows(driven.verb, batch))
        losses = losses_of(loss_fn, driven.verb, driver.model, samples(batch), lambda: each_in(driver, Samples()))
        zeros = torch.zeros(losses.shape, dtype=torch.promote_types(losses.dtype, torch.float32), device=losses.device)
        squares = {axes: zeros.clone() for axes in ((), *axes_of.values())}

        def add(state: State, grads: Mapping[str, torch.Tensor | None], unit: str, **_: Any) -> State:
            for key, grad in grads.items():
                if grad is not None and grad.numel():
                    square = grad.detach().reshape(len(grad), -1).to(zeros.dtype).square().sum(1)
                    squares[axes_of[unit, key]].add_(square)
            return state

        driver.deliver(add, None)
        if losses.requires_grad:
            driver.differentiate(losses.sum(), torch.ones_like(losses[0]), True)
        driver.release()
        return driver.state, losses.detach(), squares


def _alone() -> AbstractContextManager[Any]:
    """No autograd graph, as of `vjp`; but a torch.func transform around it is to see through it."""
    inside = isinstance(torch_private.func_interpreter(), torch_private.CInterpreter)  # what a compiler can tell
    return nullcontext() if inside else torch.no_grad()


REFUSED = {  # what torch says; what it means, and what to do
    "called random operation": (
        "draws random numbers (dropout), and runs for one sample at a time under vmap, which does not draw. Put the "
        "model in evaluation mode: model.eval(), or dropout=0."
    ),
    "Batching rule not implemented": (
        "uses an operation that torch's vmap cannot run for each sample (nn.LSTM, nn.GRU and nn.RNN are of this kind). "
        "Write it with operations that vmap knows, such as a loop over time with nn.LSTMCell's formulas."
    ),
    "Batch norm got a batched tensor": (
        "normalizes by the batch (BatchNorm in training mode), so no sample has a gradient of its own. Put it in "
        "evaluation mode, or use GroupNorm."
    ),
    "data-dependent control flow": "decides by a value, which differs from sample to sample. Use torch.where.",
    "calling .item()": "reads a value, which differs from sample to sample. Use torch.where.",
    "batching operators that can": "makes a tensor whose shape follows from values (nonzero, a mask). Use torch.where.",
    "vmap: inplace arithmetic": "changes a tensor of all samples in place, as a buffer. Have it make a new one.",
}


@contextmanager
def for_each_sample(verb: str, where: str = "") -> Iterator[None]:
    """Within, what vmap refuses is an error that names the stage or module and what to do.

    Raises:
        TreeError: it draws random numbers, or uses an operation that vmap does not know.
    """
    try:
        yield
    except RuntimeError as error:
        for text, means in REFUSED.items():
            if text in str(error):
                notes = getattr(error, "__notes__", None) or ["In loss_fn."]
                who = where or notes[0].removeprefix("In ").partition(",")[0].rstrip(".")
                raise TreeError(f"{verb}: {who} {means} torch says: {str(error).splitlines()[0]}") from error
        raise


def batched(stage: Stage) -> Callable[..., Any]:
    """A stage's function, for a batch."""

    def run(w: Any, h: Any, batch: Any) -> Any:
        return vmap(stage.fn, in_dims=(None, dims(h), dims(batch)))(w, h, batch)

    return run


@torch.no_grad()
def norms_of_stages(
    walk: Stages, chunk: int | None, state: State, batch: Any
) -> tuple[State, torch.Tensor, torch.Tensor]:
    """By a walk, forward and backward."""
    rows(walk.verb, batch)
    walk.fit(state)
    axes_of = _axes_of(walk.verb, state)
    h: Any = None
    inputs: list[Any] = []
    for stage in walk.forward:
        state, w = stage.gather(state)
        inputs.append(h)
        with for_each_sample(walk.verb, f"the stage {stage.key!r}"):
            h = batched(stage)(stage.given(w), h, batch)
        state = stage.release(state)
    one = h[0] if isinstance(h, torch.Tensor) else h
    check_loss(f"{walk.verb}: for one sample", f"the last stage, {walk.forward[-1].key!r},", one)

    losses, dh = h, torch.ones_like(h)
    zeros = torch.zeros_like(losses, dtype=torch.promote_types(losses.dtype, torch.float32))
    squares = dict.fromkeys(((), *axes_of.values()), zeros)
    tied: Weights = {}  # per-sample gradients of units that an earlier stage uses as well
    for stage in walk.backward:
        state, w = stage.gather(state)
        own = {unit: tied.pop(unit) for unit in stage.units if unit in tied}
        trained, h = walk.trained(state, w), inputs.pop()
        if h is not None or any(trained.values()):
            pull = partial(_of_one, stage, w, trained, axes_of, dict.fromkeys(squares, zeros.new_zeros(())))
            dh, some, more = vmap(pull, in_dims=dims((h, batch, dh, own)), chunk_size=chunk)(h, batch, dh, own)
            squares = {axes: square + some[axes] for axes, square in squares.items()}
            tied |= more
        state = stage.release(state)
    return state, losses, _norms(state, squares)


def _of_one(stage: Stage, w: Weights, trained: Weights, axes_of: Any, zeros: Squares, *sample: Any) -> Any:
    """Of a sample: dh, the squared norms of the gradients that are complete here, and those that are not yet."""
    h, data, dh, own = sample
    dw, back = functional_vjp(lambda trained, h: stage.run(w, trained, h, data), (trained, h))[1](dh)
    for unit, before in own.items():
        dw[unit] = {key: before[key] + grad for key, grad in dw[unit].items()}
    squares = {**zeros}
    for unit in stage.opens:
        for key, grad in dw[unit].items():
            axes = axes_of[unit, key]
            squares[axes] = squares[axes] + grad.to(zeros[axes].dtype).square().sum()
    return () if h is None else back, squares, {unit: grads for unit, grads in dw.items() if unit not in stage.opens}


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
