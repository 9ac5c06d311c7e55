"""jvp, pullback, linearize: derivatives of a driven model by its weights, with vectors that are sharded as the weights.

    jvp         v  ─▶  J v       forward: beside each unit its part of v is gathered
    pullback    c  ─▶  Jᵀ c      forward and backward: each unit's part is reduced, as gradients are

Such a vector is `{bucket: FlatBuffer}`, as gradients and main weights are, so sums and products of vectors are those of
shards. J is of this rank's data, and Jᵀ c is averaged over the data ranks, as gradients are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from functional_fsdp import FlatBuffer, ScheduleError, State, TreeError
from functional_fsdp._seams import torch_private
from functional_fsdp.extend import Session, alone, lineage_of, separate_gradients

from ..norms import Buffers, check_tree
from .apply import apply
from .driver import eager_only
from .forward_backward import forward_backward
from .lifted import moved

__all__ = ["jvp", "linearize", "pullback"]

pytree = torch_private.pytree
Function = Callable[..., Any]  # of a model and what else it is given


def jvp(model: nn.Module, fn: Function | None = None) -> Callable[..., tuple[State, tuple[Any, Any]]]:
    """A function that computes with the model, and how the result moves as the weights move along a vector.

    Args:
        model: as for `forward_backward`: any module, copied, never touched; its modes are followed.
        fn: `fn(model, *args, **kwargs)` returns a tensor or a pytree of tensors; by default the model is called. It may
            use torch.func itself (`grad`, `jvp`, `vmap`, ..., nested), by inputs.

    Returns:
        `f(state, tangents, *args, **kwargs) -> state, (out, tangent of out)`, both of this rank. `tangents` is
        `{bucket: FlatBuffer}`, flat shards as those of main weights: whole gradients, or the `main` of a state of this
        layout. What is frozen does not move. The state is as good afterwards as before.

    A unit's tangents are there from its gather to its release. Buffers are the state's, and what the forward makes of
    them is dropped; dropout draws as in `apply`. Every operation needs a forward-mode derivative (for attention: the
    math backend), and modules that recompute (`remat`) are refused.

    Raises:
        TreeError: a vector that lacks a bucket, or is sharded otherwise. ScheduleError: in a graph.

    Collective: as `apply`, and for each gather of a unit an all-gather for each of its buckets that train, which
    compute waits for. Every rank uses the same units in the same order.

    Example:
        >>> along = T.jvp(model, loss_fn)
        >>> state, (loss, slope) = along(state, state.main, batch)  # how the loss changes as all weights grow
    """
    driven = apply(model, moved(_called if fn is None else fn), training=True)

    def f(state: State, tangents: Buffers, *args: Any, **kwargs: Any) -> tuple[State, tuple[Any, Any]]:
        check_tree(state, tangents, "jvp: the vector", state.layout.trainable)
        return driven(state, tangents, *args, **kwargs)

    return alone(f, "jvp", traced=eager_only("jvp"))


def pullback(
    model: nn.Module, fn: Function | None = None
) -> Callable[..., tuple[State, tuple[Any, dict[str, FlatBuffer]]]]:
    """A function that computes with the model, and pulls cotangents of the result back to the weights.

    Args:
        model: as for `forward_backward`.
        fn: as for `jvp`.

    Returns:
        `f(state, cotangents, *args, **kwargs) -> state, (out, product)`. `cotangents` are like `out`, this rank's (of
        a tensor [] a number);
        `product` is their sum with the derivatives of `out` by the weights, averaged over the data ranks: `{bucket:
        FlatBuffer}`, sharded as gradients are. The state is as good afterwards as before, with the gradients that it
        had; in the middle of a step this counts as one of its forwards, for dropout.

    Raises:
        TreeError: cotangents of another structure or shape than the result. ScheduleError: in a graph; what
        `forward_backward` refuses.

    Collective: as `forward_backward`, and twice what `finish_reductions` issues.

    Example: a Gauss-Newton product.
        >>> model_of = lambda model, batch: model(batch)
        >>> state, (out, along) = T.jvp(model, model_of)(state, state.main, batch)
        >>> state, (out, product) = T.pullback(model, model_of)(state, along / along.numel(), batch)
    """
    of = _called if fn is None else fn

    def paired(model: nn.Module, cotangents: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        out = of(model, *args, **kwargs)
        (ours, structure), (theirs, found) = pytree.tree_flatten(out), pytree.tree_flatten(cotangents)
        shapes = [[tuple(getattr(t, "shape", ())) for t in leaves] for leaves in (ours, theirs)]
        if structure != found or shapes[0] != shapes[1]:
            raise TreeError(
                f"pullback: cotangents of structure {found} and shapes {shapes[1]}; the function returned {structure} "
                f"and shapes {shapes[0]}. Give a tensor for each, of its shape."
            )
        return torch.stack([(c * t).sum() for c, t in zip(theirs, ours, strict=True)]).sum(), out

    backward = forward_backward(model, paired, has_aux=True)

    def f(state: State, cotangents: Any, *args: Any, **kwargs: Any) -> tuple[State, tuple[Any, dict[str, FlatBuffer]]]:
        session = Session(state, "pullback")
        state, (_, out), found = separate_gradients(
            state, "pullback", lambda state: backward(state, cotangents, *args, **kwargs)
        )
        return session.rest(state), (out, found)

    return alone(f, "pullback", traced=eager_only("pullback"))


def linearize(model: nn.Module, fn: Function | None = None) -> Callable[..., tuple[State, tuple[Any, Any]]]:
    """A function that computes with the model, and returns the result's linear map of tangents of the weights.

    Args:
        model, fn: as for `jvp`.

    Returns:
        `f(state, *args, **kwargs) -> state, (out, push)`, and `push(state, tangents) -> state, tangent of out`, for as
        long as no step has changed the weights. Nothing is kept for it but the arguments: each call gathers unit by
        unit and computes as `jvp` does, since a torch.func.linearize would keep all of the weights.

    Raises (from push):
        ScheduleError: the weights are not those of the call any more. What `jvp` raises.

    Collective: as `apply`; each `push` as `jvp`.

    Example:
        >>> state, (loss, push) = T.linearize(model, loss_fn)(state, batch)
        >>> state, slope = push(state, state.main)
    """
    driven, along = apply(model, fn, training=True), jvp(model, fn)

    def f(state: State, *args: Any, **kwargs: Any) -> tuple[State, tuple[Any, Any]]:
        state, out = driven(state, *args, **kwargs)
        lineage = lineage_of(state)
        base = lineage.base

        def push(state: State, tangents: Buffers) -> tuple[State, Any]:
            if lineage_of(state) is not lineage or lineage.base != base:
                raise ScheduleError(
                    "linearize: its linear map was called with a state of other weights than it was taken at. Take it "
                    "again: state, (out, push) = T.linearize(model, fn)(state, ...)."
                )
            state, (_, found) = along(state, tangents, *args, **kwargs)
            return state, found

        return state, (out, push)

    return alone(f, "linearize", traced=eager_only("linearize"))


def _called(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)
