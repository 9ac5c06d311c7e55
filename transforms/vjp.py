"""vjp with the weights as an argument of the pullback, as in mathematics.

A unit's weights are gathered for its forward, released, and gathered again for its backward. A pullback that closed
over the first gather would keep those bytes alive. So here it is a function of the weights:

    out, pullback = vjp(fn, w, h)        residuals point into w
    dw, dh = pullback(w, dout)           the same tensors, gathered again: the residuals are good and are used;
                                         with any other tensor in w fn is run again, from this w

The same means the same objects: `unshard` gives a unit the same tensors each time. An address proves nothing, since
units of equal structure take turns at one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import compress
from operator import is_
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import optree
import torch

from functional_fsdp import ScheduleError, TreeError
from functional_fsdp._seams import residuals_kept, torch_private
from functional_fsdp.extend import Loan, loan_of, traced_as

Pullback = Callable[..., Any]
Out = TypeVar("Out")
func_interpreter, pytree = torch_private.func_interpreter, torch_private.pytree


def _in_graph(fn: Callable[..., Any], weights: Any, *primals: Any) -> tuple[Any, Pullback]:
    """As torch.func has it; but where no transform is around it, nothing that leaves `vjp` has an autograd graph."""
    if isinstance(func_interpreter(), torch_private.CInterpreter):  # what the compiler can tell
        return _under_transforms(fn, weights, primals)
    if residuals_kept():
        out, pull = functional_vjp(fn, (weights, *primals))
        return _detached(out), lambda w, dout: _detached(pull(_marked(dout, weights, w)))
    out, again = _under_transforms(fn, weights, primals)
    return _detached(out), lambda w, dout: _detached(again(w, dout))


@traced_as(_in_graph)
def vjp(fn: Callable[..., Out], weights: Any, *primals: Any) -> tuple[Out, Pullback]:
    """Run `fn(weights, *primals)` and return its output and its pullback.

    Args:
        fn: pure; weights, primals and output are pytrees of tensors (other leaves pass through).
        weights: what `unshard(state, unit)` gave, or any pytree.
        primals: the activations that need gradients.

    Returns:
        `(out, pullback)`; `pullback(weights, dout) -> (dweights, *dprimals)`, each with the structure of its argument,
        None for leaves without a gradient (integers, None, numbers, what `fn` did not use). Residuals live until the
        first call of the pullback with the tensors of the forward, or until it is dropped; every other call runs `fn`
        again.

    Raises:
        ScheduleError: weights that were released and not gathered again; `torch.inference_mode`.
        TreeError: `pullback` with weights or cotangents of another structure than before.

    In eager mode this is autograd's graph, so that `fn` may contain compiled modules and activation checkpointing.
    Under torch.func transforms and when traced it is torch.func.vjp, run from the weights that the pullback is given:
    `fn` runs twice, with other random numbers, so with dropout compile the step by `T.compile`, where it runs once.

    Example:
        >>> out, pullback = vjp(lambda w, x: w["a"] * x, {"a": torch.tensor(3.0)}, torch.tensor(2.0))
        >>> pullback({"a": torch.tensor(3.0)}, torch.tensor(1.0))
        ({'a': tensor(2.)}, tensor(3.))
    """
    if func_interpreter() is not None:
        return _under_transforms(fn, weights, primals)
    loan = loan_of(next(iter(weights.values()), None)) if type(weights) is dict else None
    if loan is not None and _PLAIN.issuperset(map(type, primals)) and not any(map(loan_of, primals)):
        unit = _unit_of(loan)
        if unit is not None and [*weights] == unit.keys and all(map(is_, weights.values(), unit.leaves)):
            return _of_unit(fn, loan, unit, primals)
    return _of_trees(fn, weights, primals)


# ---------------------------------------------------------------- a unit's weights, and tensors: the short way

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})


class UnitWeights(NamedTuple):
    """A unit's weights as they are lent, each time the same, and as they enter graphs: made once, they cost nothing."""

    keys: list[str]
    leaves: list[torch.Tensor]
    inputs: list[torch.Tensor]


_UNITS: WeakKeyDictionary[Loan, UnitWeights | None] = WeakKeyDictionary()


def _unit_of(loan: Loan) -> UnitWeights | None:
    """None where leaves have no gradient, and under a dispatch mode, whose tensors are not for keeping."""
    if torch_private.dispatch_modes():
        return None
    try:
        return _UNITS[loan]
    except KeyError:
        keys, leaves = [*loan.weights], [*loan.weights.values()]
        plain = all(map(_differentiable, leaves))
        unit = UnitWeights(keys, leaves, [t.detach().requires_grad_() for t in leaves]) if plain else None
        _UNITS[loan] = unit
        return unit


def _of_unit(fn: Callable[..., Any], loan: Loan, unit: UnitWeights, primals: tuple[Any, ...]) -> tuple[Any, Pullback]:
    """As `_of_trees`, with as little as possible on the way: this is what a train step calls for each unit."""
    keys, leaves, inputs = unit
    if not loan.held:
        _refuse("vjp", loan)
    try:
        others = [t if t is None else t.detach().requires_grad_() for t in primals]
    except RuntimeError:  # integers among them
        return _of_trees(fn, dict(zip(keys, leaves, strict=True)), primals)
    if torch.is_grad_enabled():
        out = fn(dict(zip(keys, inputs, strict=True)), *others)
    else:
        with _recording():
            out = fn(dict(zip(keys, inputs, strict=True)), *others)
    detached, outs, structure = (out.detach(), [out], None) if isinstance(out, torch.Tensor) else _output(out)
    residual = [(others, outs)]  # used once

    def pullback(w: Any, dout: Any) -> Any:
        if type(w) is not dict or [*w] != keys:
            w = _arranged(w, keys)
        if not residual or not all(map(is_, w.values(), leaves)):
            return _again(fn, w, primals, dout)
        if not loan.held:
            _refuse("pullback", loan)
        others, outs = residual.pop()
        grads = iter(_gradients(outs, structure, dout, inputs + [t for t in others if t is not None]))
        return dict(zip(keys, grads, strict=False)), *[None if t is None else next(grads) for t in others]

    return detached, pullback


def _recording() -> AbstractContextManager[Any]:
    """Within, autograd records, whatever the caller turned off."""
    if torch.is_inference_mode_enabled():
        raise ScheduleError(
            "vjp under torch.inference_mode: autograd records nothing there, and all gradients would be None. Call it "
            "outside, or within torch.inference_mode(False)."
        )
    return torch.enable_grad()


def _arranged(w: Any, keys: list[str]) -> dict[str, Any]:
    """A dict of leaves in the order of these keys."""
    found, want = _flatten(w)[1], _flatten(dict.fromkeys(keys))[1]
    if found != want:
        raise TreeError(f"pullback: weights of structure {found}; the forward had {want}.")
    return {key: w[key] for key in keys}


# ---------------------------------------------------------------- any trees


def _of_trees(fn: Callable[..., Any], weights: Any, primals: tuple[Any, ...]) -> tuple[Any, Pullback]:
    """From any pytrees. What the pullback needs of the forward is in `residual`, so that it can be let go."""
    leaves, structure = _flatten(weights)
    others, rest = _flatten(primals)
    loans = _loans("vjp", leaves, others)
    n, every = len(leaves), leaves + others
    active = [_differentiable(leaf) for leaf in every]
    inputs = [leaf.detach().requires_grad_() if on else leaf for leaf, on in zip(every, active, strict=True)]
    with _recording():
        out = fn(structure.unflatten(inputs[:n]), *rest.unflatten(inputs[n:]))
    detached, outs, out_structure = _output(out)
    residual = [(leaves, loans, outs, [*compress(inputs, active)])]

    def pullback(w: Any, dout: Any) -> Any:
        given, found = _flatten(w)
        if found != structure:
            raise TreeError(f"pullback: weights of structure {found}; the forward had {structure}.")
        if not residual or not all(map(is_, given, residual[0][0])):
            return _again(fn, w, primals, dout)
        _check("pullback", *residual[0][1])
        _, _, outs, wanted = residual.pop()
        grads = iter(_gradients(outs, out_structure, dout, wanted))
        full = [next(grads) if on else None for on in active]
        return structure.unflatten(full[:n]), *rest.unflatten(full[n:])

    return detached, pullback


def _again(fn: Callable[..., Any], weights: Any, primals: tuple[Any, ...], dout: Any) -> Any:
    """The pullback without residuals."""
    _loans("pullback", _flatten(weights)[0], _flatten(primals)[0])
    return vjp(fn, weights, *primals)[1](weights, dout)


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure, by optree, in C++; by torch's pytree where the tree has nodes that only torch knows."""
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
    return (leaves, structure) if all(map(pytree.tree_is_leaf, leaves)) else pytree.tree_flatten(tree)


def _output(out: Any) -> tuple[Any, list[Any], Any]:
    """The output without its graph, its leaves, and its structure: None for one tensor."""
    if isinstance(out, torch.Tensor):
        return out.detach(), [out], None
    outs, structure = _flatten(out)
    for leaf in outs:
        held = () if isinstance(leaf, torch.Tensor) else getattr(leaf, "__dict__", {}).values()
        if any(isinstance(t, torch.Tensor) and t.requires_grad for t in held):
            raise TreeError(
                f"vjp: the function returned a {type(leaf).__name__}, which is no tree, and has tensors with gradients "
                "in it: they would be lost. Return tensors in tuples, lists or dicts; or have torch know the class: "
                "torch.utils._pytree.register_pytree_node."
            )
    return structure.unflatten([o.detach() if isinstance(o, torch.Tensor) else o for o in outs]), outs, structure


def _gradients(outs: list[Any], structure: Any, dout: Any, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
    """Of the inputs, from cotangents of the output; None where there is none."""
    if structure is None and isinstance(dout, torch.Tensor) and outs[0].requires_grad and inputs:
        return _grad(outs, inputs, [dout])
    douts, found = _flatten(dout)
    want = _flatten(None)[1] if structure is None else structure
    if found != want:
        raise TreeError(f"pullback: cotangents of structure {found}; the output has {want}.")
    pairs = [
        (o, d)
        for o, d in zip(outs, douts, strict=True)
        if isinstance(o, torch.Tensor) and o.requires_grad and d is not None
    ]
    if not pairs or not inputs:
        return (None,) * len(inputs)
    return _grad([o for o, _ in pairs], inputs, [d for _, d in pairs])


def _grad(outs: list[Any], inputs: list[torch.Tensor], douts: list[Any]) -> tuple[Any, ...]:
    """autograd, on this thread: a unit's backward is too short to be worth waking the device's thread."""
    with torch.autograd.set_multithreading_enabled(False):
        return torch.autograd.grad(outs, inputs, douts, allow_unused=True)


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


# ---------------------------------------------------------------- loans


def _loans(verb: str, weights: list[Any], primals: list[Any]) -> tuple[list[Loan], list[torch.Tensor]]:
    """The loans of these leaves, and the weights that have none; checked."""
    loans = [loan_of(leaf) for leaf in (*weights, *primals)]
    free = [t for t, loan in zip(weights, loans, strict=False) if loan is None and isinstance(t, torch.Tensor)]
    held = [loan for loan in dict.fromkeys(loans) if loan is not None]
    _check(verb, held, free)
    return held, free


def _check(verb: str, loans: list[Loan], free: list[torch.Tensor]) -> None:
    """Refuse what was released: a loan that is not held, a storage that is gone."""
    for loan in loans:
        if not loan.held:
            _refuse(verb, loan)
    for t in free:
        if t.numel() and not t.untyped_storage().size():
            raise ScheduleError(
                f"{verb}: these weights were released. Gather them first: state, w = unshard(state, unit)."
            )


def _refuse(verb: str, loan: Loan) -> None:
    raise ScheduleError(
        f"{verb}: the weights of the unit {loan.unit!r} were released. Gather them first: "
        f"state, w = unshard(state, {loan.unit!r})."
    )


# ---------------------------------------------------------------- under transforms


def _under_transforms(fn: Callable[..., Any], weights: Any, primals: tuple[Any, ...]) -> tuple[Any, Pullback]:
    lent("vjp", weights, primals)

    def pullback(w: Any, dout: Any) -> Any:
        lent("pullback", w, primals)
        return functional_vjp(fn, (w, *primals))[1](dout)

    return fn(weights, *primals), pullback


def _detached(tree: Any) -> Any:
    """Without what autograd knows of it, as everything that leaves `vjp`; under transforms it must stay."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, tree)


def _marked(dout: Any, first: Any, second: Any) -> Any:
    """The cotangents, with a mark: residuals of the first weights are to be read from the second ones."""
    leaves, treedef = pytree.tree_flatten(dout)
    at = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)), None)
    if at is not None:
        pairs = zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True)
        tensors = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and a.numel()]
        leaves[at] = torch.ops.functional_fsdp.again(leaves[at], [a for a, _ in tensors], [b for _, b in tensors])
    return pytree.tree_unflatten(leaves, treedef)


@traced_as(lambda verb, *trees: None)  # a graph's weights are its own
def lent(verb: str, *trees: Any) -> None:
    """Refuse borrowed weights that were released."""
    _check(verb, [loan for loan in map(loan_of, pytree.tree_leaves(trees)) if loan is not None], [])


def functional_vjp(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Pullback]:
    """`fn(*args)`, and torch.func's pullback `dout -> dargs`, with None for leaves that have no gradient."""
    leaves, treedef = pytree.tree_flatten(args)
    which = [i for i, leaf in enumerate(leaves) if _differentiable(leaf)]

    def pure(*tensors: torch.Tensor) -> Any:
        full = list(leaves)
        for i, tensor in zip(which, tensors, strict=True):
            full[i] = tensor
        return fn(*pytree.tree_unflatten(full, treedef))

    out, pull = torch.func.vjp(pure, *(leaves[i] for i in which))  # type: ignore[misc]

    def pullback(dout: Any) -> Any:
        grads = dict(zip(which, pull(dout), strict=True))
        return pytree.tree_unflatten([grads.get(i) for i in range(len(leaves))], treedef)

    return out, pullback
