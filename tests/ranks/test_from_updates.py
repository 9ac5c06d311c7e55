"""Optax-style pairs whose state is tensors in lists: sharded, saved, read elsewhere, and moved, as FlatBuffers are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.utils._pytree as pytree
from support.problems import mesh_and_placement
from support.ranks import each_rank

import functional_fsdp as fsdp
from functional_fsdp import Spec

Tree = dict[str, Any]
SHAPES = {"z.w": (9, 40), "z.bias": (130,), "a.w": (4, 4), "a.bias": (1,), "m": (300,)}
STEPS = 5


class Kept(NamedTuple):
    trace: Any
    largest: Any
    seen: torch.Tensor


class Pair:
    """Momentum over a running maximum. `form`: list and tuple in torch's order, dict by bucket, sorted in optree's."""

    def __init__(self, form: str) -> None:
        self.form = form

    def flat(self, params: Any) -> list[torch.Tensor]:
        if self.form == "sorted":
            return optree.tree_leaves(params)
        return pytree.tree_leaves(params)

    def packed(self, tensors: list[torch.Tensor], params: Any) -> Any:
        if self.form == "dict":
            return dict(zip(params, tensors, strict=True))
        return tuple(tensors) if self.form == "tuple" else tensors

    def init(self, params: Any) -> Kept:
        some = [[torch.zeros_like(p) for p in self.flat(params)] for _ in range(2)]
        return Kept(self.packed(some[0], params), self.packed(some[1], params), torch.zeros((), dtype=torch.int64))

    def update(self, grads: Any, opt: Kept, *, params: Any) -> tuple[Any, Kept]:
        trace, largest = (list(t.values()) if self.form == "dict" else list(t) for t in opt[:2])
        trace = [0.9 * t + g for t, g in zip(trace, self.flat(grads), strict=True)]
        largest = [torch.maximum(m, g.abs()) for m, g in zip(largest, self.flat(grads), strict=True)]
        updates = [-0.01 * t / (m + 1) for t, m in zip(trace, largest, strict=True)]
        if self.form == "sorted":
            tree = optree.tree_unflatten(optree.tree_structure(params), updates)
        else:
            tree = pytree.tree_unflatten(updates, pytree.tree_structure(params))
        return tree, Kept(self.packed(trace, params), self.packed(largest, params), opt.seen + 1)


def tree(seed: int) -> Tree:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


def spec(preset: str, units: Any = ("z", "a", "m")) -> Spec:
    mesh, placement = mesh_and_placement(preset)
    return Spec(mesh, placement, units=list(units))


def stepped(state: fsdp.State, steps: range) -> fsdp.State:
    for step in steps:
        state = fsdp.step(fsdp.reduce(state, tree(step + 1)))
    return state


def plainly() -> Tree:
    """The pair on the parameters themselves."""
    params, pair = tree(0), Pair("list")
    opt = pair.init(params)
    for step in range(STEPS):
        updates, opt = pair.update(tree(step + 1), opt, params=params)
        params = {name: p + updates[name] for name, p in params.items()}
    return params


def same(found: Tree, wanted: Tree) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], p) for name, p in wanted.items())


def optimizer(form: str) -> Any:
    return fsdp.from_updates(Pair(form))


@each_rank(2)
def saved(form: str, folder: Path) -> None:
    """Bits of the weights after the last step: from the checkpoint, elsewhere, straight on."""
    state = stepped(fsdp.shard(tree(0), spec("zero3"), optimizer(form)), range(3))
    path = fsdp.save(state, folder)
    kept = fsdp.optimizer_state(state)
    assert sorted(kept["z.w"]) == ["largest.leaves", "trace.leaves"]
    assert kept["z.w"]["trace.leaves"].shape == (9, 40)
    units = ["m", ("a.w", "z.w"), ("a.bias", "z.bias")]
    for one in (
        fsdp.load(path, like=fsdp.shard(tree(9), spec("zero3"), optimizer(form))),
        fsdp.load(path, spec("ddp", units), optimizer(form)),
        fsdp.redistribute(fsdp.load(path, spec("zero3"), optimizer(form)), spec("zero2", units)),
        state,
    ):
        assert same(fsdp.full_params(stepped(one, range(3, STEPS))), plainly())


@each_rank(4)
def read(form: str, folder: Path) -> None:
    state = fsdp.load(folder, spec("hsdp", ("a", "m", "z")), optimizer(form))
    assert same(fsdp.full_params(stepped(state, range(3, STEPS))), plainly())


@pytest.mark.parametrize(
    "form", ["list", "sorted", *(pytest.param(x, marks=pytest.mark.large) for x in ("tuple", "dict"))]
)
def test_state_in_lists_goes_on_to_the_same_bits_in_any_world(form: str, tmp_path: Path) -> None:
    saved(form=form, folder=tmp_path / "saved")
    read(form=form, folder=tmp_path / "saved")


@pytest.mark.parametrize("form", ["list", "sorted"])
def test_leaves_without_gradients_keep_their_state(form: str) -> None:
    """Which was not known of lists: they warned."""
    state = stepped(fsdp.shard(tree(0), spec("zero3"), optimizer(form)), range(1))
    before = fsdp.optimizer_state(state)
    state = fsdp.step(fsdp.reduce(state, {**tree(2), "z.w": None}))
    after = fsdp.optimizer_state(state)
    assert same(after["z.w"], before["z.w"])
    assert not torch.equal(after["z.bias"]["trace.leaves"], before["z.bias"]["trace.leaves"])


def test_a_structure_that_changes_is_refused() -> None:
    class Growing(Pair):
        def update(self, grads: Any, opt: Kept, *, params: Any) -> tuple[Any, Any]:
            updates, new = super().update(grads, opt, params=params)
            return updates, [new]

    state = fsdp.shard(tree(0), spec("zero3"), fsdp.from_updates(Growing("list")))
    with pytest.raises(fsdp.TreeError, match="step: the optimizer's update returned another structure for opt"):
        stepped(state, range(1))


class ClipsByNorm:
    """As torchopt.chain(clip_grad_norm(0.1), sgd(0.1)): each rank would clip by the norm of its own shards."""

    def init(self, params: Any) -> Any:
        return ()

    def update(self, grads: Any, opt: Any, params: Any = None) -> Any:
        norm = torch.stack([g.square().sum() for g in pytree.tree_leaves(grads)]).sum().sqrt()
        return pytree.tree_map(lambda g: -0.1 * g * torch.clamp(0.1 / norm, max=1.0), grads), opt


class CountsInPython:
    def init(self, params: Any) -> Any:
        return {"steps": 0}

    def update(self, grads: Any, opt: Any, params: Any = None) -> Any:
        return pytree.tree_map(lambda g: -0.1 * g / (1 + opt["steps"]), grads), {"steps": opt["steps"] + 1}


@pytest.mark.parametrize(
    ("pair", "text"),
    [
        (ClipsByNorm(),
         r"\(ClipsByNorm\): the pair is not elementwise, and .* sum is not .*test_from_updates\.py:\d+: "),
        (CountsInPython(),
         r"\(CountsInPython\): the pair keeps the Python number 1, 0 a step before; no State saves it"),
    ],
)  # fmt: skip
def test_a_pair_that_shards_cannot_follow_is_refused(pair: Any, text: str) -> None:
    with pytest.raises(fsdp.SpecError, match=f"from_updates{text}"):
        fsdp.shard(tree(0), fsdp.Spec(fsdp.local_mesh()), fsdp.from_updates(pair))
