"""Metrics across ranks: the mean and the sum of a pytree over the data ranks (JAX's `pmean` and `psum`)."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.utils._pytree as pytree

from ._lanes import Issued
from ._runtime import runtime_of
from ._state import State
from ._verbs import verb

__all__ = ["over_ranks", "pmean", "psum"]

Op = Literal["mean", "sum"]


@verb
def pmean(state: State, tree: Any) -> tuple[State, Any]:
    """Average a pytree of metrics over the data ranks. Numbers become tensors, integers float32.

    One all-reduce an axis and dtype, on a lane of its own; the state is not consumed.

    Example: `state, loss = fsdp.pmean(state, loss)`.
    """
    return _metrics(state, tree, "pmean", "mean")


@verb
def psum(state: State, tree: Any) -> tuple[State, Any]:
    """Add up a pytree over the data ranks, as `pmean` averages one.

    Example, of losses that are sums over tokens (`Spec(average="sum")`): `state, n = fsdp.psum(state, tokens)`;
    `state = T.divide(state, n)`.
    """
    return _metrics(state, tree, "psum", "sum")


def _metrics(state: State, tree: Any, name: str, op: Op) -> tuple[State, Any]:
    state.token.ledger.enter(state.token.serial, name)
    device = runtime_of(state.spec.mesh).device
    leaves, treedef = pytree.tree_flatten(tree)
    tensors = [torch.as_tensor(leaf, device=device).detach() for leaf in leaves]
    return state, treedef.unflatten(over_ranks(state, [t if t.is_floating_point() else t.float() for t in tensors], op))


def over_ranks(state: State, tensors: list[torch.Tensor], op: Op, what: str = "") -> list[torch.Tensor]:
    """Tensors averaged or added up over the data ranks: one all-reduce an axis and dtype."""
    run = runtime_of(state.spec.mesh)
    done = list(tensors)
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        which = [i for i, t in enumerate(tensors) if t.dtype is dtype]
        flat = torch.cat([tensors[i].reshape(-1) for i in which])
        for axis in state.spec.data:
            run.now(Issued("side", axis, "all_reduce", flat.numel(), dtype, op, what), flat, flat)
        for i, part in zip(which, flat.split([tensors[i].numel() for i in which]), strict=True):
            done[i] = part.view(tensors[i].shape)
    return done
