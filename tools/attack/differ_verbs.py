"""What differs besides settings: metrics, folders, and the verbs that a rank calls."""

from __future__ import annotations

import os
from typing import Any

import torch

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

from .differ import DIFFERENCES, Settings, difference, train
from .verdict import Wrong

__all__: list[str] = []

# ---- metrics, folders, verbs


def _trees(name: str, mine: Any, theirs: Any) -> None:
    for verb in ("pmean", "psum"):

        def change(s: Settings, me: bool, rank: int, verb: str = verb) -> None:
            s.after = lambda state: train(getattr(fsdp, verb)(state, mine if me else theirs)[0])

        DIFFERENCES[f"{verb} {name}"] = change


_trees("shape", torch.ones(3), torch.ones(4))
_trees("same size", torch.ones(2, 3), torch.ones(3, 2))
_trees("dtype", torch.ones(3).double(), torch.ones(3))
_trees("keys", {"a": torch.ones(2), "b": torch.zeros(2)}, {"a": torch.ones(2), "c": torch.zeros(2)})
_trees("order", {"b": torch.ones(2), "a": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.ones(2)})
_trees("count", [torch.ones(2), torch.ones(2)], [torch.ones(2)])
_trees("number", [1.0, 2.0], [1.0])


@difference
def pmean_and_psum(s: Settings, me: bool, rank: int) -> None:
    s.after = lambda state: train((fsdp.psum if me else fsdp.pmean)(state, torch.ones(3))[0])


@difference
def pmean_on_one_rank_only(s: Settings, me: bool, rank: int) -> None:
    def after(state: fsdp.State) -> None:
        if me:
            state, _ = fsdp.pmean(state, torch.ones(3))
        train(state)

    s.slow, s.after = True, after


@difference
def saves_to_other_folders(s: Settings, me: bool, rank: int) -> None:
    s.after = lambda state: fsdp.save(state, os.path.join(s.folder, "here" if me else "there"))


@difference
def loads_other_checkpoints(s: Settings, me: bool, rank: int) -> None:
    def after(state: fsdp.State) -> None:
        first = fsdp.save(state, os.path.join(s.folder, "first"))
        state, params = fsdp.unshard(state)
        grads = torch.utils._pytree.tree_map(lambda t: t if t.is_floating_point() else None, params)
        state = fsdp.step(fsdp.reduce(state, grads))
        second = fsdp.save(state, os.path.join(s.folder, "second"))
        train(fsdp.load(second if me else first, like=state), 0)

    s.after = after


@difference
def loads_what_is_not_there(s: Settings, me: bool, rank: int) -> None:
    def after(state: fsdp.State) -> None:
        first = fsdp.save(state, os.path.join(s.folder, "first"))
        train(fsdp.load(os.path.join(s.folder, "nothing") if me else first, like=state), 0)

    s.after = after


@difference
def saves_and_loads(s: Settings, me: bool, rank: int) -> None:
    def after(state: fsdp.State) -> None:
        first = fsdp.save(state, os.path.join(s.folder, "first"))
        fsdp.save(state, os.path.join(s.folder, "second")) if me else fsdp.load(first, like=state)

    s.slow, s.after = True, after


@difference
def loads_with_another_average(s: Settings, me: bool, rank: int) -> None:
    """The same on all ranks: the checkpoint says mean, the template sum."""

    def after(state: fsdp.State) -> None:
        folder = fsdp.save(state, os.path.join(s.folder, "first"))
        s.spec["average"] = "sum"
        fsdp.load(folder, like=s.state())

    s.after = after


@difference
def grads_of_another_shape(s: Settings, me: bool, rank: int) -> None:
    def after(state: fsdp.State) -> None:
        state, params = fsdp.unshard(state)
        grads = torch.utils._pytree.tree_map(lambda t: t if t.is_floating_point() else None, params)
        if me:
            grads["head"]["w"] = torch.ones(8)
        try:
            state = fsdp.reduce(state, grads)
        except fsdp.TreeError:
            raise
        fsdp.step(state)

    s.slow, s.after = True, after


@difference
def units_in_another_order(s: Settings, me: bool, rank: int) -> None:
    def after(state: fsdp.State) -> None:
        names = sorted(state.units, reverse=me)
        for unit in [*names, *reversed(names)]:
            state, _ = fsdp.unshard(state, unit)
            state = fsdp.release(state, unit)
        train(state, 1)

    s.placement = fsdp.zero3("data")  # where nothing is gathered any order is right
    s.slow, s.after = True, after


@difference
def another_number_of_microbatches(s: Settings, me: bool, rank: int) -> None:
    def after(state: fsdp.State) -> None:
        for _ in range(2 if me else 1):
            state, params = fsdp.unshard(state)
            grads = torch.utils._pytree.tree_map(lambda t: t if t.is_floating_point() else None, params)
            state = fsdp.reduce(state, grads)
        fsdp.step(state)

    s.slow, s.after = True, after


@difference
def clips_or_not(s: Settings, me: bool, rank: int) -> None:
    def after(state: fsdp.State) -> None:
        state, params = fsdp.unshard(state)
        grads = torch.utils._pytree.tree_map(lambda t: t if t.is_floating_point() else None, params)
        state = fsdp.reduce(state, grads)
        if me:
            state, _ = T.clip_by_global_norm(state, 1.0)
        train(fsdp.step(state), 0)

    s.slow, s.after = True, after


@difference
def states_in_another_order(s: Settings, me: bool, rank: int) -> None:
    """Two trees, of which one rank shards the second first."""

    def after(state: fsdp.State) -> None:
        spec = fsdp.Spec(s.mesh())
        trees = [{"a": torch.ones(5)}, {"b": torch.ones(6)}]
        made = [fsdp.shard(tree, spec, fsdp.sgd()) for tree in (reversed(trees) if me else trees)]
        train(made[0])

    s.after = after


@difference
def own_experts(s: Settings, me: bool, rank: int) -> None:
    """What may differ: leaves that are not averaged over an axis."""
    world, s.may = s.case["world"], True
    s.mesh = lambda: fsdp.local_mesh(replica=world, shard=1)
    s.placement = {"head": fsdp.zero3("shard"), "*": fsdp.zero3("replica", "shard")}
    s.params["head"]["w"] = torch.full((7,), float(rank))

    def after(state: fsdp.State) -> None:
        state, params = fsdp.unshard(state)
        grads = torch.utils._pytree.tree_map(lambda t: t if t.is_floating_point() else None, params)
        state = fsdp.step(fsdp.reduce(state, grads))
        if not bool((fsdp.full_params(state)["head"]["w"].sign() == float(rank > 0)).all()):
            raise Wrong("leaves of each rank's own were mixed")

    s.after = after
