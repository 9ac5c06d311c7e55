"""accumulate: the gradients of a batch from microbatches, one after another; divide: gradients by a tensor.

The second is for losses that are sums over tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from functional_fsdp import SpecError, State, TreeError, finish_reductions
from functional_fsdp._seams import torch_private
from functional_fsdp.extend import change, shards

from ._splits import Split, cut

__all__ = ["accumulate", "divide"]


@torch.no_grad()
def divide(state: State, divisor: float | torch.Tensor) -> State:
    """Divide all gradients, in place, by a number or a tensor [] that is the same on every rank; use the new state.

    Where ranks have different numbers of tokens, a mean over tokens is a sum of sums over their total:

        spec = fsdp.Spec(mesh, average="sum")
        state, loss = forward_backward(state, batch)         # loss_fn adds up over tokens
        state, n = fsdp.psum(state, tokens)                  # how many there are on all ranks
        state = fsdp.step(T.divide(state, n))

    Raises:
        TreeError: a tensor with more than one element. ScheduleError: the state has no gradients.

    Collective: what `finish_reductions` issues.
    """
    if isinstance(divisor, torch.Tensor) and divisor.numel() != 1:
        raise TreeError(f"divide: the divisor has shape {tuple(divisor.shape)}; expected a number or a tensor [].")
    state = finish_reductions(state)
    by = divisor.reshape(()).to(state.count.device) if isinstance(divisor, torch.Tensor) else divisor

    def divide_all() -> None:
        tensors = [buffer.local for buffers in shards(state).values() for buffer in buffers]
        if isinstance(by, torch.Tensor):
            torch_private.foreach_div_(tensors, by)
        else:
            torch_private.foreach_div_(tensors, float(by))

    return change(state, "divide()", divide_all, by)


Aux = TypeVar("Aux")


@overload
def accumulate(
    forward_backward: Callable[..., tuple[State, torch.Tensor]], n: int, *, split: Split | None = None
) -> Callable[..., tuple[State, torch.Tensor]]: ...
@overload
def accumulate(
    forward_backward: Callable[..., tuple[State, tuple[torch.Tensor, Aux]]], n: int, *, split: Split | None = None
) -> Callable[..., tuple[State, tuple[torch.Tensor, list[Aux]]]]: ...
def accumulate(
    forward_backward: Callable[..., tuple[State, Any]], n: int, *, split: Split | None = None
) -> Callable[..., tuple[State, Any]]:
    """The same function on batches that are cut into `n` microbatches.

    Args:
        forward_backward: `f(state, *args, last_microbatch=, scale=, **kwargs) -> state, loss`, as `T.forward_backward`
            makes it: `last_microbatch` says that no microbatch follows, `scale` multiplies the gradients.
        n: how many microbatches.
        split: what is cut, and how. By default every tensor along dim 0, and all must be of the same length there. Else

            a tuple    for each positional argument an int (its tensors are cut along this dim), `list` (a list or tuple
                       of samples: its items are dealt out), or None (as it is to each microbatch); for a part of a
                       batch a dict, list or tuple of these
            a dict     the same by name, for keyword arguments
            a function `split(args, kwargs, n) -> [(args, kwargs), ...]`, n of them

    Returns:
        `f(state, *args, **kwargs) -> state, loss`. What is no tensor goes to each microbatch, as do tensors without
        dims; the loss is the mean; of `(loss, aux)`, aux is a list with one entry each. The gradients are those of the
        mean of the microbatches' losses. With `Spec(average="sum")` the loss is the sum over the microbatches, and the
        gradients are those of the sum: microbatches add up as ranks do.

    Raises:
        TreeError: a tensor that cannot be cut into `n` equal parts, tensors of different lengths, or a list, a tuple or
            an array that is as long as the batch (it may be one of samples), before anything runs. SpecError: a `split`
            of another kind.

    Example:
        >>> forward_backward = T.accumulate(T.forward_backward(model, loss_fn), 4)
        >>> state, loss = forward_backward(state, batch)
        >>> detect = T.accumulate(forward_backward, 4, split=(0, list))  # images, a dict for each
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise SpecError(f"accumulate(n={n!r}): expected a number of microbatches of at least 1.")
    if split is not None and not callable(split) and not isinstance(split, tuple | dict):
        raise SpecError(
            f"accumulate(split={split!r}): expected a tuple, as (0, None), with an entry for each argument; a dict by "
            "name of keyword arguments; or a function of (args, kwargs, n)."
        )

    def accumulated(
        state: State, *args: Any, last_microbatch: bool = True, scale: Any = 1.0, **kwargs: Any
    ) -> tuple[State, Any]:
        parts = cut(args, kwargs, n, split)
        share = 1 if state.spec.average == "sum" else n  # what sums and gradients of all microbatches are divided by
        total: Any = None
        auxes = []
        has_aux = False
        for i, (some, more) in enumerate(parts):
            state, out = forward_backward(
                state, *some, last_microbatch=last_microbatch and i == n - 1, scale=scale / share, **more
            )
            has_aux = isinstance(out, tuple)
            loss, aux = out if has_aux else (out, None)
            total = loss if total is None else total + loss
            auxes.append(aux)
        return state, (total / share, auxes) if has_aux else total / share

    return accumulated
