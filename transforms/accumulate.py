"""accumulate: the gradients of a batch from microbatches, one after another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree

from functional_fsdp import SpecError, State, TreeError

from ._outputs import map_tensors

__all__ = ["accumulate"]

Step = Callable[..., tuple[State, Any]]


def accumulate(forward_backward: Step, n: int) -> Step:
    """The same function on batches that are cut into `n` microbatches along dim 0.

    Args:
        forward_backward: `f(state, *args, last=, scale=, **kwargs) -> state, loss`, as `T.forward_backward` makes it:
            `last` says that no microbatch follows, `scale` multiplies the gradients.
        n: how many microbatches.

    Returns:
        `f(state, *args, **kwargs) -> state, loss`. Every tensor in the arguments is cut (0-dim ones and what is no
        tensor go to each microbatch); the loss is the mean; of `(loss, aux)`, aux is a list with one entry each.
        The gradients are those of the mean of the microbatches' losses.

    Raises:
        TreeError: a tensor that cannot be cut into `n` equal parts, before anything runs.

    Example:
        >>> forward_backward = T.accumulate(T.forward_backward(model, loss_fn), 4)  # doctest: +SKIP
        >>> state, loss = forward_backward(state, batch)  # doctest: +SKIP
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise SpecError(f"accumulate(n={n!r}): expected a number of microbatches of at least 1.")

    def accumulated(state: State, *args: Any, last: bool = True, scale: Any = 1.0, **kwargs: Any) -> tuple[State, Any]:
        leaves, treedef = pytree.tree_flatten((args, kwargs))
        parts = [[map_tensors(partial(_cut, n, i), leaf) for i in range(n)] for leaf in leaves]
        total: Any = None
        auxes = []
        has_aux = False
        for i in range(n):
            some, more = treedef.unflatten([part[i] for part in parts])
            state, out = forward_backward(state, *some, last=last and i == n - 1, scale=scale / n, **more)
            has_aux = isinstance(out, tuple)
            loss, aux = out if has_aux else (out, None)
            total = loss if total is None else total + loss
            auxes.append(aux)
        return state, (total / n, auxes) if has_aux else total / n

    return accumulated


def _cut(n: int, i: int, leaf: torch.Tensor) -> torch.Tensor:
    if not leaf.dim():
        return leaf
    if leaf.shape[0] % n:
        raise TreeError(
            f"accumulate: a tensor of shape {tuple(leaf.shape)} cannot be cut along dim 0 into {n} equal microbatches. "
            f"Give {leaf.shape[0] // n * n or n} rows, or another n."
        )
    return leaf.chunk(n)[i]
