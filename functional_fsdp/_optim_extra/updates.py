"""Optax-style pairs as optimizers: `update(grads, opt, params=)` returns what is to be added.

    the pair has       Moments(mean=[tensor, tensor], count=tensor)              lists in the order of the parameters
    State.opt has      Moments(mean=Mirrored({bucket: FlatBuffer}), count=tensor)

So what a pair keeps for each parameter is known as such, whether it keeps FlatBuffers or the tensors in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .._common.errors import SpecError, TreeError
from .._common.torch_names import pytree
from .._common.tree import register
from .._optim.optimizer import Tree
from .._storage import FlatBuffer
from .prove import Watch, numbers_like


class Mirrored:
    """Tensors that a pair keeps in a list, a tuple or a dict, one for each bucket, as FlatBuffers.

    Attributes:
        leaves: {bucket: FlatBuffer}, as main weights.
        form: the pair's own container, and whether its order is that of sorted names: optree's, not torch's.
    """

    __slots__ = ("form", "leaves")

    def __init__(self, leaves: Tree, form: tuple[type, bool]) -> None:
        self.leaves, self.form = leaves, form

    def __repr__(self) -> str:
        return f"Mirrored({self.leaves!r})"

    def plain(self) -> Any:
        """As the pair has it."""
        container, by_name = self.form
        tensors = {name: self.leaves[name].local for name in _names(self.leaves, by_name)}
        return tensors if container is dict else container([*tensors.values()])

    def holding(self, plain: Any) -> Mirrored:
        """The same with other tensors."""
        container, by_name = self.form
        names = _names(self.leaves, by_name)
        tensors = plain if container is dict else dict(zip(names, plain, strict=True))
        return Mirrored({name: buffer.but(tensors[name]) for name, buffer in self.leaves.items()}, self.form)


register(Mirrored, lambda m: ((m.leaves,), m.form), ("leaves",), lambda form, children: Mirrored(children[0], form))


def _names(tree: Mapping[str, Any], by_name: bool) -> list[str]:
    return sorted(tree) if by_name else [*tree]


def _is_mirrored(node: Any) -> bool:
    return isinstance(node, Mirrored)


def _tensors_in(node: Any) -> list[torch.Tensor]:
    """The tensors of a list, a tuple or a dict that has nothing else."""
    values = [*node.values()] if type(node) is dict else node if type(node) in (list, tuple) else []
    return [*values] if all(isinstance(one, torch.Tensor) for one in values) else []


def _forms(pair: Any, main: Tree) -> dict[Any, tuple[type, bool]]:
    """Where in the pair's state there is a tensor for each parameter: found by two parameters of 2 and 3 elements."""
    like = next(iter(main.values()))
    sizes = {"b": 2, "a": 3}  # in another order than that of their names
    state = pair.init({name: like.but(like.local.new_zeros(size)) for name, size in sizes.items()})
    found = {}
    pairs, _ = pytree.tree_flatten_with_path(state, is_leaf=lambda node: bool(_tensors_in(node)))
    for path, node in pairs:
        shapes = [tuple(one.shape) for one in _tensors_in(node)]
        if shapes in ([(2,), (3,)], [(3,), (2,)]):
            found[path] = (type(node), shapes[0] == (3,))
    return found


@dataclass(frozen=True)
class Updates:
    """An optax-style pair as an optimizer. A class, so that a State that has one can be pickled."""

    pair: Any

    def init(self, main: Tree) -> Any:
        if main:
            _check(self.pair, main)
        state = self.pair.init(main)
        forms = _forms(self.pair, main) if main and _plain_tensors(state) else {}

        def fits(node: Any) -> bool:
            shapes = [one.shape for one in _tensors_in(node)]
            return bool(shapes) and sorted(shapes) == sorted(b.local.shape for b in main.values())

        def one(path: Any, node: Any) -> Any:
            if path not in forms or not fits(node):
                return node
            names = _names(main, forms[path][1])
            empty = Mirrored({name: main[name] for name in main}, forms[path])
            same = type(node) is not dict or {*node} == {*names}
            return empty.holding(node) if same else node

        return pytree.tree_map_with_path(one, state, is_leaf=fits)

    def update(self, grads: Tree, opt: Any, main: Tree, count: torch.Tensor) -> tuple[Tree, Any]:
        plain = pytree.tree_map(lambda node: node.plain() if _is_mirrored(node) else node, opt, is_leaf=_is_mirrored)
        updates, after = self.pair.update(grads, plain, params=main)
        nodes, treedef = pytree.tree_flatten(opt, is_leaf=_is_mirrored)
        if any(map(_is_mirrored, nodes)):
            try:
                news = treedef.flatten_up_to(after)
            except ValueError as error:
                raise TreeError(
                    f"step: the optimizer's update returned another structure for opt: {error} Return the one that "
                    "init gave."
                ) from None
            kept = [old.holding(new) if _is_mirrored(old) else new for old, new in zip(nodes, news, strict=True)]
            after = pytree.tree_unflatten(kept, treedef)
        return pytree.tree_map(lambda p, u: p.add_(u), main, updates), after


def _check(pair: Any, main: Tree) -> None:
    """Refuse a pair that is not elementwise, by its operations in some steps with two parameters."""
    like = next(iter(main.values()))

    def tree(seed: int) -> Tree:
        found = {"b": numbers_like((2,), seed), "a": numbers_like((3,), seed + 1)}
        return {name: like.but(tensor.to(like.local.dtype)) for name, tensor in found.items()}

    params, name = tree(1), type(pair).__name__
    watch = Watch([2, 3])

    def touched(trees: Tree) -> Tree:
        for i, key in enumerate(trees):
            watch.touch(trees[key].local, i)
        return trees

    touched(params)
    with watch:
        state = pair.init(params)
    for step in range(8):
        grads = touched(tree(10 + 2 * step))
        before, structure = pytree.tree_flatten(state)
        with watch:
            updates, state = pair.update(grads, state, params=params)
            params = pytree.tree_map(lambda p, u: p + u, params, updates)
        after, new = pytree.tree_flatten(state)
        if new != structure:  # which the first real step refuses
            break
        counts = [(a, b) for a, b in zip(before, after, strict=False) if isinstance(b, int | float) and a != b]
        if counts:
            raise SpecError(
                f"from_updates({name}): the pair keeps the Python number {counts[0][1]!r}, {counts[0][0]!r} a step "
                "before; no State saves it. Keep a tensor []."
            )
    if watch.findings:
        found = next(iter(watch.findings.values()))
        raise SpecError(
            f"from_updates({name}): the pair is not elementwise, and a rank has shards only: {found}. Leave that part "
            "out; fsdp.transforms.clip_by_global_norm, for one, clips gradients over all ranks."
        )


def _plain_tensors(state: Any) -> bool:
    """Whether a pair keeps tensors with dims outside of FlatBuffers."""
    nodes = pytree.tree_leaves(state, is_leaf=lambda node: isinstance(node, FlatBuffer))
    return any(isinstance(node, torch.Tensor) and node.dim() for node in nodes)


def from_updates(pair: Any) -> Updates:
    """Adapt an optax-style pair (TorchOpt's too): its `update(grads, opt, params=)` returns what is to be added.

    Args:
        pair: an object with `init(params) -> opt` and `update(grads, opt, params=) -> updates, opt`.

    What it keeps for each parameter is sharded and saved as main weights are: FlatBuffers, where it uses tree_map over
    the parameters; or the tensors in them [n / ranks], in a list, a tuple or a dict, where it flattens them, as
    TorchOpt's ready-made optimizers do. To learn which those are, `init` is called once more, for two small parameters.
    What else it keeps (a count, say) has to be tensors, the same on every rank. Numbers of Python are not kept.

    The pair has to be elementwise, which is observed, operation by operation, in eight steps with the two parameters:
    see `from_torch`. A norm over gradients, as that of `torchopt.clip_grad_norm`, is refused with its line, and so is a
    count that is a Python number. Clip with `T.clip_by_global_norm` before `step`.

    Raises:
        SpecError: by `shard` and `init`: a pair that is not elementwise, or that keeps a Python number which changes.

    Example: `fsdp.from_updates(torchopt.adam(1e-3))`.
    """
    return Updates(pair)
