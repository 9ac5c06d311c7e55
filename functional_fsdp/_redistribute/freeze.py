"""freeze and unfreeze: which leaves train, changed on a state that lives.

leaf            main weights    what the optimizer keeps
trains on       same bits       same bits
is frozen       same bits       dropped: no gradient, no update, no memory but for the weights
is unfrozen     same bits       as `optimizer.init` makes it; its count of steps begins at zero
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .._common.calls import alone
from .._common.errors import SpecError
from .._common.torch_names import pytree
from .._common.tree import match
from .._optim.optimizer import initial
from .._runtime.joint import Joint
from .._runtime.runtime import runtime_of
from .._state.state import State
from .._storage.flat import FlatBuffer, leaf_shards, nodes_of
from .redistribute import Mover, moved

__all__ = ["freeze", "unfreeze"]

Trees = dict[str, dict[str, FlatBuffer]]  # by the path in the optimizer's state, and by bucket


@alone
@torch.no_grad()
def freeze(state: State, *patterns: str) -> State:
    """The same state with these leaves frozen. Consumes `state`.

    Args:
        state: a state between steps. If this is stopped after ranks have agreed, it is lost.
        patterns: shell globs over leaf paths, as `Spec(trainable=)` takes them: "blocks.0.*".

    Returns:
        a State between steps, of its own lineage, with the same number of steps, whose spec says what trains. Weights
        and moments of leaves that train on keep their bits; what the optimizer kept for the frozen ones is dropped.
        Gradients for them are no longer reduced. A checkpoint of it is loaded with the same spec, `state.spec`.

    Memory: the state, two units, and another copy of what the optimizer keeps.

    Raises:
        SpecError: a pattern that matches no leaf, or none given. TreeError: extras that are kept for leaves that train
            only. StaleStateError: a consumed state, or one in the middle of a step. On every rank.

    Collective: as `redistribute`.

    Example, a head first and then everything:
        >>> state = fsdp.freeze(state, "blocks.*")
        >>> state = fsdp.unfreeze(state, "blocks.*")
    """
    return _changed("freeze", state, patterns, False)


@alone
@torch.no_grad()
def unfreeze(state: State, *patterns: str) -> State:
    """The same state with these leaves trained. Consumes `state`. All else is as for `freeze`.

    The optimizer begins with these leaves: their moments are what its `init` makes, and an optimizer that counts steps
    by leaf (`adamw`) corrects their bias from zero steps on. A learning rate goes by the state's count, as ever.

    Example: `state = fsdp.unfreeze(state, "blocks.0.*")`.
    """
    return _changed("unfreeze", state, patterns, True)


def _changed(verb: str, state: State, patterns: tuple[str, ...], trains: bool) -> State:
    state._resting(verb)
    with Joint(runtime_of(state.spec.mesh), verb) as joint:
        joint(partial(_check, verb, state, patterns), "the patterns")
    rules: dict[str, Any] = dict.fromkeys(patterns, trains)
    spec = state.spec.with_trainable({**rules, **{p: on for p, on in state.spec.trainable if p not in rules}})
    old = state
    opt: Any = state.opt
    new = moved(state._evolve(opt={}), spec, (), verb, trains=True)
    if new.optimizer is not None:
        mover = Mover(old, new.layout, new.spec, False, trains=True)
        with new.version.lineage.looking(new):
            new = new._evolve(opt=_optimizer_state(mover, new, opt, {*old.layout.trainable}))
    old.version.lineage.moved_to(new)
    return new


def _check(verb: str, state: State, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        if not isinstance(pattern, str) or all(match(pattern, path) is None for path in state.layout.paths):
            paths = ", ".join(map(repr, state.layout.paths[:4]))
            raise SpecError(f"{verb}: the pattern {pattern!r} matches no leaf. Paths look like {paths}, ...")
    if not patterns:
        raise SpecError(f"{verb}: expected patterns of leaves, got none. All leaves are '*'.")


def _optimizer_state(mover: Mover, new: State, old: Any, trained: set[str]) -> Any:
    """What the optimizer makes for what trains now, with what it kept for leaves that trained before."""
    main = {name: new.main[name] for name in new.layout.trainable}
    fresh = initial(new.optimizer, main)
    made = _trees(fresh)
    before = {leaf.path for name in trained for leaf in mover.old.buckets[name].leaves}
    if hasattr(new.optimizer, "counting"):
        counted = {leaf.path for name in new.optimizer.counted(old) for leaf in mover.old.buckets[name].leaves}
        names = [
            name for name, buffer in main.items()
            if any(leaf.path in counted or leaf.path not in before for leaf in buffer.bucket.leaves)
        ]  # fmt: skip
        fresh = new.optimizer.counting(fresh, main, names)
    trees, kept = _trees(fresh), _trees(old)
    for buffer in (buffer for path, tree in trees.items() if path not in made for buffer in tree.values()):
        for leaf, _, local in leaf_shards(buffer):  # counts of missed steps: here all so far
            if leaf.path not in before:
                local.copy_(new.count)
    for path, tree in kept.items():
        if path in trees:
            mover.move(tree, into=trees[path])
    plain = {node.keys: node.value for node in nodes_of(old) if not isinstance(node.value, FlatBuffer)}
    leaves, treedef = pytree.tree_flatten(fresh, is_leaf=lambda x: isinstance(x, FlatBuffer))
    nodes = nodes_of(fresh)
    return treedef.unflatten([plain.get(node.keys, leaf) for node, leaf in zip(nodes, leaves, strict=True)])


def _trees(opt: Any) -> Trees:
    found: Trees = {}
    for node in nodes_of(opt):
        if isinstance(node.value, FlatBuffer):
            found.setdefault(node.path, {})[node.value.bucket.name] = node.value
    return found
