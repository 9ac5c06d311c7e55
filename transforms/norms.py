"""Norms and products of trees of FlatBuffers (gradients, main weights): each element once, whatever the placement.

global_norm    state                        one number, of all gradients
norms          state, tree                  one a leaf, or one a unit
dot            state, tree, tree            one number
wire_error     state                        two a leaf, of what gradient wires in a codec owe to it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, prod
from typing import Any, Literal, NamedTuple

import torch

from functional_fsdp import FlatBuffer, Partial, ScheduleError, Sharded, SpecError, State, TreeError, finish_reductions
from functional_fsdp._seams import clear_padding, expect, torch_private
from functional_fsdp.extend import all_reduce, leaf_shards, over_shards, shards, total

__all__ = ["Buffers", "WireError", "check_tree", "dot", "global_norm", "norms", "widest", "wire_error"]

Buffers = Mapping[str, FlatBuffer]  # by bucket


def check_tree(state: State, tree: Any, what: str, names: Iterable[str]) -> None:
    """Raise TreeError unless `tree` has a buffer like that of the main weights for each of these buckets.

    Args:
        what: the function, and what the tree is to it, for errors.
    """
    for name in names:
        want, got = state.main.get(name), tree.get(name) if isinstance(tree, Mapping) else None
        if want is not None and want.local.dtype is torch.uint8 and want.bucket.packed:
            raise TreeError(
                f"{what} has the bucket {name!r}, whose leaves are packed ({want.bucket.leaves[0].path!r}): bytes are "
                "no numbers of theirs. Leave it out: {name: state.main[name] for name in state.layout.trainable}."
            )
        if want is None:
            raise TreeError(f"{what} has the bucket {name!r}; the state has {', '.join(map(repr, state.main))}.")
        if not isinstance(got, FlatBuffer) or got.local.shape != want.local.shape or got.states != want.states:
            text = f"{tuple(got.local.shape)} elements, {got.states}" if isinstance(got, FlatBuffer) else f"{got!r}"
            raise TreeError(
                f"{what} has {text} for the bucket {name!r}; expected {tuple(want.local.shape)} elements, "
                f"{want.states}. Give whole gradients, fsdp.finish_reductions(state).grads, or the `main` of "
                "a state of the same layout."
            )


def widest(*trees: Buffers) -> torch.dtype:
    """The dtype to compute with: float32, or float64 if one of their buffers is."""
    dtype = torch.float32
    for tree in trees:
        for buffer in tree.values():
            dtype = torch.promote_types(dtype, buffer.local.dtype)
    return dtype


@torch.no_grad()
def global_norm(state: State, ord: float = 2) -> tuple[State, torch.Tensor]:
    """The norm of all gradients, a tensor [] (float32, or float64 if they are): shards -> one number.

    Each element is counted once, however it is sharded or replicated; tied leaves are one. Ranks that train apart
    (along an axis that no placement names) have a norm of their own. It does not wait for the device.

    Args:
        ord: 2, Euclidean; 1, the sum of the absolute values; or inf, the largest of them. A NaN makes any of them NaN.

    Raises:
        ScheduleError: the state has no gradients. SpecError: another `ord`.

    Collective: what `finish_reductions` issues; one all-reduce of a few numbers for each axis that shards gradients.

    Example: `state, norm = T.global_norm(state)`.
    """
    _check_ord("global_norm", ord)
    state = finish_reductions(state)
    dtype = widest(state.grads)
    values = {
        axes: _joined(_powers(state, [buffer.local for buffer in buffers], ord, dtype), ord)
        for axes, buffers in shards(state).items()
    }
    if ord == inf:
        return state, torch.stack([*over_shards(state, values, "max").values()]).amax()
    return state, _root(total(state, values), ord)


@torch.no_grad()
def norms(
    state: State, tree: Buffers | None = None, ord: float = 2, *, by: Literal["leaf", "unit"] = "leaf"
) -> tuple[State, dict[str, torch.Tensor]]:
    """The norm of each leaf, or of each unit: `state, {path or unit: tensor []}`. It does not wait for the device.

    Args:
        tree: `{bucket: FlatBuffer}`, sharded as main weights: `state.main`, or what an optimizer keeps for it; it may
            lack buckets. None: the gradients of the state, finished.
        ord: 2, 1 or inf, as for `global_norm`.
        by: "leaf" or "unit".

    Returns:
        the state, and norms in the order of the tree, float32 or wider, the same on every rank. Tied leaves are one,
        under the first of their paths. Where ranks have leaves of their own (experts), a path is those of all ranks
        together.

    Raises:
        ScheduleError: the state has no gradients, and there is no `tree`. TreeError: a tree of another layout,
        sharded otherwise, or with leaves that are packed. SpecError: another `ord` or `by`.

    Collective: one all-reduce for each axis that shards something, of the numbers of all leaves together; without
    `tree` what `finish_reductions` issues.

    Example, a ratio as LAMB takes it:
        >>> state, loss = forward_backward(state, batch)
        >>> state, of_grads = T.norms(state)
        >>> state, of_weights = T.norms(state, state.main)
        >>> ratio = of_weights["head.weight"] / of_grads["head.weight"]
    """
    _check_ord("norms", ord)
    if by not in ("leaf", "unit"):
        raise SpecError(f"norms(by={by!r}): expected 'leaf' or 'unit'.")
    if tree is None:
        state = finish_reductions(state)
        tree = state.grads
    elif not isinstance(tree, Mapping) or not tree:
        raise TreeError(f"norms: the tree is {tree!r:.500}; expected {{bucket: FlatBuffer}}, as state.main.")
    else:
        check_tree(state, tree, "norms: the tree", tree)
    names: dict[Any, list[str]] = {}
    values: dict[Any, torch.Tensor] = {}
    dtype = widest(tree)
    for axes, buffers in shards(state, tree).items():
        parts = [
            (buffer.bucket.unit if by == "unit" else leaf.path, local)
            for buffer in buffers
            for leaf, _, local in leaf_shards(buffer)
        ]
        names[axes] = [name for name, _ in parts]
        values[axes] = _powers(state, [local for _, local in parts], ord, dtype)
    found: dict[str, list[torch.Tensor]] = {}
    for axes, numbers in over_shards(state, values, "max" if ord == inf else "sum").items():
        for name, number in zip(names[axes], numbers.unbind(), strict=True):
            found.setdefault(name, []).append(number)
    order = [unit.name for unit in state.layout.units] if by == "unit" else dict.fromkeys(state.layout.source)
    return state, {name: _root(_joined(torch.stack(found[name]), ord), ord) for name in order if name in found}


@torch.no_grad()
def dot(state: State, a: Buffers, b: Buffers) -> tuple[State, torch.Tensor]:
    """The sum of the products of the elements of two trees, each element once: `state, product`, a tensor [].

    It does not wait for the device. For a moment there is the product of a bucket's shards beside them. What
    `tree_map(torch.randn_like, state.main)` puts between leaves does not count.

    Args:
        a, b: `{bucket: FlatBuffer}`, sharded as main weights: gradients that are whole, `state.main`, what `T.hvp`
            returns. A frozen bucket that only one of them has counts as zero there, as in gradients.

    Returns:
        the state, and the product in float32, or in float64 if one of them is, the same on every rank.

    Raises:
        TreeError: a tree of another layout, sharded otherwise, or with leaves that are packed.

    Collective: one all-reduce of a few numbers for each axis that shards something.

    Example, how the loss changes along the weights:
        >>> state, loss = forward_backward(state, batch)
        >>> state = fsdp.finish_reductions(state)
        >>> state, product = T.dot(state, state.grads, state.main)
    """
    expect("dot(state)", state, State, "a State", TypeError)
    for name, tree in (("a", a), ("b", b)):
        if not isinstance(tree, Mapping):
            raise TreeError(f"dot: {name} is a {type(tree).__name__}; expected {{bucket: FlatBuffer}}, as state.main.")
        check_tree(state, tree, f"dot: {name}", {**state.layout.trainable, **tree})
    both = [name for name in a if name in b]
    dtype = widest(a, b)
    values = {}
    for axes, buffers in shards(state, {name: a[name] for name in both}).items():
        values[axes] = torch.stack([_product(x, b[x.bucket.name], dtype) for x in buffers]).sum()
    return state, total(state, values)


def _product(a: FlatBuffer, b: FlatBuffer, dtype: torch.dtype) -> torch.Tensor:
    """The sum over this rank's elements of leaves: []."""
    each = a.but(a.local.to(dtype).mul(b.local))
    clear_padding([each])
    return each.local.sum()


def _check_ord(what: str, ord: float) -> None:
    if isinstance(ord, bool | torch.Tensor) or ord not in (1, 2, inf):
        raise SpecError(f"{what}(ord={ord!r}): expected 1, 2 or math.inf.")


def _powers(state: State, tensors: Sequence[torch.Tensor], ord: float, dtype: torch.dtype) -> torch.Tensor:
    """Of each tensor the sum of the powers |x| ** ord, or for infinity the largest |x|: [n]. Of empty ones 0."""
    zero = torch.zeros((), dtype=dtype, device=state.count.device)
    found = [zero] * len(tensors)
    alike: dict[torch.dtype, list[int]] = {}  # as one call for many takes them
    for i, tensor in enumerate(tensors):
        if tensor.numel():
            alike.setdefault(tensor.dtype, []).append(i)
    for kind, which in alike.items():
        some = [tensors[i] if kind.is_floating_point else tensors[i].to(dtype) for i in which]
        for i, norm in zip(which, torch_private.foreach_norm(some, ord, dtype=dtype), strict=True):
            found[i] = norm
    stacked = torch.stack(found)
    return stacked.square() if ord == 2 else stacked


def _joined(powers: torch.Tensor, ord: float) -> torch.Tensor:
    """One of several: [n] -> []."""
    return powers.amax() if ord == inf else powers.sum()


def _root(power: torch.Tensor, ord: float) -> torch.Tensor:
    return power.sqrt() if ord == 2 else power


class WireError(NamedTuple):
    """What is left of a leaf's gradients for the next step.

    Attributes:
        bias: float32 [], its mean over elements and ranks.
        norm: float32 [], its Euclidean norm over elements and ranks.
    """

    bias: torch.Tensor
    norm: torch.Tensor


@torch.no_grad()
def wire_error(state: State) -> dict[str, WireError]:
    """The bias and the norm of `state.residual`, by leaf: what packing has lost of gradients so far, and the next step
    adds. It does not wait for the device, nor consume the state.

    Returns:
        {path: (bias, norm)}, of leaves whose precision has `feedback=True`. Along axes that are not packed a rank's
        errors are those of the sum over these. All zero before the first step, and where
        there is one rank, which sends nothing.

    Raises:
        ScheduleError: no leaf has feedback.

    Collective: one all-reduce of two numbers a leaf for each axis of the data. Every rank calls it.

    Example: `print(T.wire_error(state)["blocks.0.up.weight"].norm)`.
    """
    expect("wire_error(state)", state, State, "a State", TypeError)
    if not state.residual:
        raise ScheduleError(
            "wire_error: no leaf of this state keeps what its wire loses. Give its precision a codec and feedback: "
            "Precision(wire=fsdp.fp8_block, feedback=True)."
        )
    shards = [shard for buffer in state.residual.values() for shard in leaf_shards(buffer)]
    found = [torch.stack((x.sum(), x.square().sum())) for x in (shard.local.to(torch.float32) for shard in shards)]
    ranks = torch.ones((), dtype=torch.float32, device=state.count.device)
    *sums, count = all_reduce(state, [*found, ranks], "sum", what="wire errors")
    parts = [_held(buffer, state.spec.axes) for buffer in state.residual.values() for _ in buffer.bucket.leaves]
    each = zip(shards, sums, parts, strict=True)
    return {
        leaf.path: WireError(one[0] * cut / count / max(leaf.numel, 1), (one[1] / same).sqrt())
        for (leaf, _, _), one, (cut, same) in each
    }


def _held(buffer: FlatBuffer, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Among how many ranks a buffer is cut, and how many hold the same."""
    kinds = {axis: placed for axis, placed in buffer.states if placed is not Partial}
    cut = prod(sizes[axis] for axis, placed in kinds.items() if placed is Sharded)
    return cut, prod(sizes[axis] for axis in kinds) // cut
