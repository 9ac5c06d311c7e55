"""Metrics across ranks: the mean and the sum of a pytree over the data ranks (JAX's `pmean` and `psum`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch

from . import _traced
from ._entry import verb
from ._errors import SpecError
from ._record import Collective
from ._runtime import runtime_of
from ._state import State
from ._torch import pytree
from ._tracing import tracing

__all__ = ["Op", "all_reduce", "axes_of", "over_axes", "pmean", "psum"]

Op = Literal["mean", "sum"]


@verb(lambda state, tree: _metrics(state, tree, "pmean", "mean"))
def pmean(state: State, tree: Any) -> tuple[State, Any]:
    """Average a pytree of metrics over the data ranks. Numbers become tensors, integers float32.

    One all-reduce an axis and dtype, on a lane of its own; the state is not consumed.

    Example: `state, loss = fsdp.pmean(state, loss)`.
    """
    return _metrics(state, tree, "pmean", "mean")


@verb(lambda state, tree: _metrics(state, tree, "psum", "sum"))
def psum(state: State, tree: Any) -> tuple[State, Any]:
    """Add up a pytree over the data ranks, as `pmean` averages one.

    Example, of losses that are sums over tokens (`Spec(average="sum")`): `state, n = fsdp.psum(state, tokens)`;
    `state = T.divide(state, n)`.
    """
    return _metrics(state, tree, "psum", "sum")


def _metrics(state: State, tree: Any, name: str, op: Op) -> tuple[State, Any]:
    if not tracing():
        state.token.ledger.enter(state.token.serial, name)
    device = state.count.device
    leaves, treedef = pytree.tree_flatten(tree)
    tensors = [
        torch.as_tensor(leaf, device=device).detach()
        if not isinstance(leaf, int | float)
        else torch.full((), leaf, dtype=torch.float32, device=device)  # made there: nothing waits, and graphs can too
        for leaf in leaves
    ]
    floats = [t if t.is_floating_point() else t.float() for t in tensors]
    with nullcontext() if tracing() else state.token.ledger.call:
        done = all_reduce(state, floats, op, structure=(name, treedef))
    return state, pytree.tree_unflatten(done, treedef)


def all_reduce(
    state: State,
    tensors: Sequence[torch.Tensor],
    op: Op = "sum",
    axes: Iterable[str] | None = None,
    what: str = "",
    structure: Any = (),
) -> list[torch.Tensor]:
    """Tensors [...] averaged or added up over mesh axes: the same shapes and dtypes, the same on every rank along them.

    Args:
        state: the newest state of a step, or one between steps; it is not consumed.
        op: "sum" or "mean".
        axes: of the mesh, by name. None: those of the data.
        what: what they are, in a word, for errors and for the vote of `step`.
        structure: what they are, for comparison with the other ranks, by equality.

    Raises:
        TreeError: on every rank, where ranks have other shapes, dtypes or another structure. SpecError: no such axis.

    Collective: one all-reduce an axis and dtype, on a lane of its own; before it, on the host, ranks compare what they
    give. Every rank of the mesh calls it.

    Example: `(total,) = extend.all_reduce(state, [count], "sum", ["data"])`.
    """
    data, every = axes_of(state)
    over = data if axes is None else tuple(axes)
    for axis in over:
        if axis not in every:
            known = ", ".join(map(repr, every))
            raise SpecError(f"all_reduce: there is no axis {axis!r}. The axes of the mesh are {known}.")
    if tracing():
        return _by_dtype(state, tensors, op, over, what)
    run, ledger = runtime_of(state.spec.mesh), state.token.ledger
    try:
        with ledger.beside(state):
            if run.size > 1:
                form = what or op, structure, [(t.shape, t.dtype) for t in tensors]
                run.forms.same(run, form, ledger)
            return _by_dtype(state, tensors, op, over, what)
    finally:
        run.form = ()


def _by_dtype(
    state: State, tensors: Sequence[torch.Tensor], op: Op, axes: tuple[str, ...], what: str
) -> list[torch.Tensor]:
    done = list(tensors)
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        which = [i for i, t in enumerate(tensors) if t.dtype is dtype]
        flat = over_axes(state, torch.cat([tensors[i].reshape(-1) for i in which]), axes, op, what)
        for i, part in zip(which, flat.split([tensors[i].numel() for i in which]), strict=True):
            done[i] = part.view(tensors[i].shape)
    return done


def axes_of(state: State) -> tuple[tuple[str, ...], dict[str, int]]:
    """The axes of the data, and the ranks along each axis of the mesh."""
    return _traced.axes_of(state) if tracing() else (state.spec.data, state.spec.axes)


def over_axes(state: State, flat: torch.Tensor, axes: Iterable[str], op: Op, what: str = "") -> torch.Tensor:
    """A flat tensor averaged or added up over mesh axes, perhaps in place."""
    if tracing():
        return _traced.over_axes(state, flat, axes, op, what)
    run, ledger = runtime_of(state.spec.mesh), state.token.ledger
    with ledger.call:  # who is stopped here is out of step with the other ranks
        for axis in axes:
            run.now(Collective("all_reduce", axis, flat.numel(), flat.dtype, op, "side", what), flat, flat)
    return flat
