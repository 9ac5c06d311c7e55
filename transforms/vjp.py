"""vjp with the weights as an argument of the pullback, as in mathematics.

A unit's weights are gathered for its forward, released, and gathered again for its backward. A pullback that closed
over the first gather would keep those bytes alive. So here it is a function of the weights:

    out, pullback = vjp(fn, w, h)        w lies at some address, residuals point there
    dw, dh = pullback(w, dout)           w has been gathered again: at the same address the residuals are
                                         good and are used; anywhere else fn is run again from the new w
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from functional_fsdp import ScheduleError, TreeError

__all__ = ["vjp"]

Pullback = Callable[..., Any]


def vjp(fn: Callable[..., Any], weights: Any, *primals: Any) -> tuple[Any, Pullback]:
    """Run `fn(weights, *primals)` and return its output and its pullback.

    Args:
        fn: pure; weights, primals and output are pytrees of tensors (other leaves pass through).
        weights: what `unshard(state, unit)` gave, or any pytree.
        primals: the activations that need gradients.

    Returns:
        `(out, pullback)`; `pullback(weights, dout) -> (dweights, *dprimals)`, each with the structure of its argument,
        None for leaves without a gradient (integers, None, numbers, what `fn` did not use). Residuals live until the
        first call of the pullback at the same place, or until it is dropped; every other call runs `fn` again.

    Raises:
        ScheduleError: `pullback` with weights that were released and not gathered again.
        TreeError: weights or cotangents of another structure than before.

    In eager mode this is autograd's graph, so that `fn` may contain compiled modules and activation checkpointing.
    Under torch.func transforms and when traced it is torch.func.vjp, run from the weights that the pullback is given.

    Example:
        >>> out, pullback = vjp(lambda w, x: w["a"] * x, {"a": torch.tensor(3.0)}, torch.tensor(2.0))
        >>> pullback({"a": torch.tensor(3.0)}, torch.tensor(1.0))
        ({'a': tensor(2.)}, tensor(3.))
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return fn(weights, *primals), lambda w, dout: _functional(fn, (w, *primals))(dout)
    out, pull = _eager(fn, (weights, *primals))
    residual: list[Pullback] = [pull]  # used once; autograd frees it then
    place = _place(weights)
    structure = pytree.tree_structure(weights)

    def pullback(w: Any, dout: Any) -> Any:
        if pytree.tree_structure(w) != structure:
            raise TreeError(f"pullback: weights of structure {pytree.tree_structure(w)}; the forward had {structure}.")
        here = _place(w)
        if any(isinstance(p, tuple) and p[-1] for p in here):
            raise ScheduleError(
                "pullback: these weights were released. Gather them first: state, w = unshard(state, unit)."
            )
        if residual and here == place:
            return residual.pop()(dout)
        return _eager(fn, (w, *primals))[1](dout)

    return out, pullback


def _place(weights: Any) -> list[Any]:
    """Where each leaf lies: (storage, offset, whether the storage is gone)."""
    return [
        (t.untyped_storage()._cdata, t.storage_offset(), t.numel() > 0 and not t.untyped_storage().size())
        if isinstance(t, torch.Tensor)
        else t
        for t in pytree.tree_leaves(weights)
    ]


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _eager(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Pullback]:
    leaves, treedef = pytree.tree_flatten(args)
    inputs = [leaf.detach().requires_grad_() if _differentiable(leaf) else leaf for leaf in leaves]
    with torch.enable_grad():
        out = fn(*pytree.tree_unflatten(inputs, treedef))
    outs, out_def = pytree.tree_flatten(out)
    wanted = [leaf for leaf in inputs if _differentiable(leaf)]

    def pullback(dout: Any) -> Any:
        douts, given = pytree.tree_flatten(dout)
        if given != out_def:
            raise TreeError(f"pullback: cotangents of structure {given}; the output has {out_def}.")
        pairs = [
            (o, d)
            for o, d in zip(outs, douts, strict=True)
            if isinstance(o, torch.Tensor) and o.requires_grad and d is not None
        ]
        grads: tuple[Any, ...] = (None,) * len(wanted)
        if pairs and wanted:
            grads = torch.autograd.grad([o for o, _ in pairs], wanted, [d for _, d in pairs], allow_unused=True)
        found = iter(grads)
        return pytree.tree_unflatten([next(found) if _differentiable(leaf) else None for leaf in inputs], treedef)

    detached = [o.detach() if isinstance(o, torch.Tensor) else o for o in outs]
    return pytree.tree_unflatten(detached, out_def), pullback


def _functional(fn: Callable[..., Any], args: tuple[Any, ...]) -> Pullback:
    leaves, treedef = pytree.tree_flatten(args)
    which = [i for i, leaf in enumerate(leaves) if _differentiable(leaf)]

    def pure(*tensors: torch.Tensor) -> Any:
        full = list(leaves)
        for i, tensor in zip(which, tensors, strict=True):
            full[i] = tensor
        return fn(*pytree.tree_unflatten(full, treedef))

    pull: Pullback = torch.func.vjp(pure, *(leaves[i] for i in which))[1]

    def pullback(dout: Any) -> Any:
        grads = dict(zip(which, pull(dout), strict=True))
        return pytree.tree_unflatten([grads.get(i) for i in range(len(leaves))], treedef)

    return pullback
