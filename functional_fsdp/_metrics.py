"""Metrics across ranks: the mean and the sum of a pytree over the data ranks (JAX's `pmean` and `psum`)."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.utils._pytree as pytree

from ._lanes import Issued
from ._runtime import runtime_of
from ._state import State
from ._verbs import verb

__all__ = ["pmean", "psum"]


@verb
def pmean(state: State, tree: Any) -> tuple[State, Any]:
    """Average a pytree of metrics over the data ranks. Numbers become tensors, integers float32.

    One all-reduce an axis and dtype, on a lane of its own; the state is not consumed.

    Example: `state, loss = fsdp.pmean(state, loss)`.
    """
    return _over_ranks(state, tree, "pmean", "mean")


@verb
def psum(state: State, tree: Any) -> tuple[State, Any]:
    """Add up a pytree over the data ranks, as `pmean` averages one.

    Example, of losses that are sums over tokens (`Spec(average="sum")`): `state, n = fsdp.psum(state, tokens)`;
    `state = T.divide(state, n)`.
    """
    return _over_ranks(state, tree, "psum", "sum")


def _over_ranks(state: State, tree: Any, name: str, op: Literal["mean", "sum"]) -> tuple[State, Any]:
    state.token.ledger.enter(state.token.serial, name)
    run = runtime_of(state.spec.mesh)
    leaves, treedef = pytree.tree_flatten(tree)
    tensors = [torch.as_tensor(leaf, device=run.device).detach() for leaf in leaves]
    tensors = [t if t.is_floating_point() else t.float() for t in tensors]
    axes = [axis for axis in run.sizes if any(axis in placement.data for _, placement in state.spec.placements)]
    done: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        which = [i for i, t in enumerate(tensors) if t.dtype is dtype]
        flat = torch.cat([tensors[i].reshape(-1) for i in which])
        for axis in axes:
            run.now(Issued("side", axis, "all_reduce", flat.numel(), dtype, op, ""), flat, flat)
        parts = flat.split([tensors[i].numel() for i in which])
        done |= {i: part.view(tensors[i].shape) for i, part in zip(which, parts, strict=True)}
    return state, pytree.tree_unflatten([done[i] for i in range(len(tensors))], treedef)
