"""Per-sample gradients: `vjp` of a function of one sample, over a batch, and their norms, one unit at a time.

    vjp              out [B, ...]     dw [...]       the sum over the batch
    per_sample_vjp   out [B, ...]     dw [B, ...]    of each sample

A rank's samples are its own, so per-sample gradients are never reduced: they are used where they are, and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from functional_fsdp import SpecError, State, TreeError
from functional_fsdp._seams import torch_private
from functional_fsdp.extend import alone

from .._drive.chain import Stage, Stages, Weights, dims, rows, stages_of
from .._drive.driver import eager_only
from ..vjp import Pullback, functional_vjp, lent

__all__ = ["batched", "norms_of", "per_sample_norms", "per_sample_vjp"]

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
        model: a module that is a chain, as for `hvp`. Or stages cut by hand: `{unit: fn(weights, h, sample)}` in order
            of use, each pure and for one sample. The first gets None for `h`, the others what the one before returned,
            floating tensors; the last returns the sample's loss, a tensor []. A key that is a tuple of units is a stage
            that uses them at once: its weights are `{unit: weights}`. Every unit that trains has a stage; a tied one
            has several.
        loss_fn: with a module, `loss_fn(model, batch)`, as for `forward_backward`. It is given each sample as a batch
            of one, tensors [1, ...], under vmap, and returns its loss, a tensor []. No random numbers: dropout has to
            be in evaluation mode.
        chunk: how many samples' gradients there are at once (None: B). A rank holds `chunk` × the elements of a unit.

    Returns:
        `f(state, batch) -> state, (losses [B], norms [B])`, of this rank's samples, norms in float32 or more. Between
        steps the state is as good afterwards as before; in the middle of a step the step goes on from the new one.

    Nothing is reduced. Frozen leaves do not count, tied leaves are one.

    Raises:
        TreeError: stages of the wrong kind, a module that is no chain, a loss that is no scalar, a batch without
        samples.
        ScheduleError (from f): a unit without a stage, or the other way round.

    Collective: as `unshard` for each stage, forward and backward.

    Example:
        >>> norms_of = T.per_sample_norms(model, loss_fn)
        >>> state, (losses, norms) = norms_of(state, batch)
    """
    walk = stages_of("per_sample_norms", model, loss_fn)
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise SpecError(f"per_sample_norms(chunk={chunk!r}): expected a number of samples of at least 1, or None.")

    def f(state: State, batch: Any) -> tuple[State, tuple[torch.Tensor, torch.Tensor]]:
        rows(walk.verb, batch)
        with walk.running(state) as session:
            state, losses, norms = norms_of(walk, state, walk.samples(batch), chunk)
        return session.rest(state), (losses, norms)

    return alone(f, "per_sample_norms", traced=eager_only("per_sample_norms"))


def _alone() -> AbstractContextManager[Any]:
    """No autograd graph, as of `vjp`; but a torch.func transform around it is to see through it."""
    inside = isinstance(torch_private.func_interpreter(), torch_private.CInterpreter)  # what a compiler can tell
    return nullcontext() if inside else torch.no_grad()


@contextmanager
def one_sample_at_a_time(verb: str, stage: Stage) -> Iterator[None]:
    """Within, what vmap refuses is an error that names the stage and what to do.

    Raises:
        TreeError: the stage draws random numbers, or uses an operation that vmap does not know.
    """
    try:
        yield
    except RuntimeError as error:
        if "called random operation" in str(error):
            raise TreeError(
                f"{verb}: the stage {stage.key!r} draws random numbers (dropout), and runs for one sample at a time "
                "under vmap, which does not draw. Put the model in evaluation mode: model.eval(), or dropout=0."
            ) from error
        if "Batching rule not implemented" in str(error):
            raise TreeError(
                f"{verb}: the stage {stage.key!r} uses an operation that torch's vmap cannot run for each sample "
                f"(nn.LSTM, nn.GRU and nn.RNN are of this kind). Write it with operations that vmap knows, such as a "
                f"loop over time with nn.LSTMCell's formulas. torch says: {str(error).splitlines()[0]}"
            ) from error
        raise


def batched(stage: Stage) -> Callable[..., Any]:
    """A stage's function, for a batch."""

    def run(w: Any, h: Any, batch: Any) -> Any:
        return vmap(stage.fn, in_dims=(None, dims(h), dims(batch)))(w, h, batch)

    return run


@torch.no_grad()
def norms_of(walk: Stages, state: State, batch: Any, chunk: int | None) -> tuple[State, torch.Tensor, torch.Tensor]:
    """The new state, losses [B] and norms [B], in a walk that has begun."""
    n = rows(walk.verb, batch)
    h: Any = None
    inputs: list[Any] = []
    for stage in walk.forward:
        state, w = stage.gather(state)
        inputs.append(h)
        with one_sample_at_a_time(walk.verb, stage):
            h = batched(stage)(stage.given(w), h, batch)
        state = stage.release(state)
    if not isinstance(h, torch.Tensor) or h.shape != (n,):
        got = f"a tensor of shape {tuple(h.shape[1:])}" if isinstance(h, torch.Tensor) else type(h).__name__
        raise TreeError(
            f"{walk.verb}: for one sample the last stage, {walk.forward[-1].key!r}, returned {got}; expected its loss, "
            "a tensor []. Reduce it, as with .mean()."
        )

    losses, dh = h, torch.ones_like(h)
    squares = torch.zeros_like(losses, dtype=torch.promote_types(losses.dtype, torch.float32))
    tied: Weights = {}  # per-sample gradients of units that an earlier stage uses as well
    for stage in walk.backward:
        state, w = stage.gather(state)
        own = {unit: tied.pop(unit) for unit in stage.units if unit in tied}
        trained, h = walk.trained(state, w), inputs.pop()
        if h is not None or any(trained.values()):
            pull = partial(_of_one, stage, w, trained, squares.new_zeros(()))
            dh, square, more = vmap(pull, in_dims=dims((h, batch, dh, own)), chunk_size=chunk)(h, batch, dh, own)
            squares += square
            tied |= more
        state = stage.release(state)
    return state, losses, squares.sqrt()


def _of_one(stage: Stage, w: Weights, trained: Weights, square: torch.Tensor, *sample: Any) -> Any:
    """Of a sample: dh, the squared norm of the gradients that are complete here, and those that are not yet."""
    h, data, dh, own = sample
    dw, back = functional_vjp(lambda trained, h: stage.run(w, trained, h, data), (trained, h))[1](dh)
    for unit, before in own.items():
        dw[unit] = {key: before[key] + grad for key, grad in dw[unit].items()}
    for unit in stage.opens:
        for grad in dw[unit].values():
            square = square + grad.to(square.dtype).square().sum()
    return () if h is None else back, square, {unit: grads for unit, grads in dw.items() if unit not in stage.opens}
