"""Several optimizers, each of which has the leaves of its labels, beside torch's own on the same leaves."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from support.presets import PRESETS
from support.problems import mesh_and_placement
from support.ranks import launch
from support.tables import FULL, marked

import functional_fsdp as fsdp
from functional_fsdp import Optimizer, Spec, SpecError

Tree = dict[str, Any]
SHAPES = {"a.w": (9, 40), "a.bias": (130,), "a.v": (20, 3), "b.w": (4, 4), "b.bias": (1,), "c.bias": (7,), "norm": (9,)}
LABELS = {"*.bias": "bias", "norm": "norm"}
STEPS = 5


def tree(seed: int) -> Tree:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in SHAPES.items()}


def momentum() -> Optimizer:
    """Somebody else's pair, which writes to whole tensors, and makes new ones of what it keeps."""

    def update(grads: Tree, opt: Tree, main: Tree, count: torch.Tensor) -> tuple[Tree, Tree]:
        new = pytree.tree_map(lambda m, g: 0.9 * m + g, opt, grads)
        return pytree.tree_map(lambda p, m: p.sub_(0.05 * m).add_(0.0), main, new), new

    return Optimizer(lambda main: pytree.tree_map(torch.zeros_like, main), update)


Torchs = Callable[..., torch.optim.Optimizer]
KINDS: dict[str, tuple[Callable[[], Any], Torchs]] = {
    "adamw": (lambda: fsdp.adamw(lr=0.05), lambda ps: torch.optim.AdamW(ps, lr=0.05)),
    "sgd": (lambda: fsdp.sgd(lr=0.05, momentum=0.9), lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9)),
    "plain": (lambda: fsdp.sgd(lr=0.05), lambda ps: torch.optim.SGD(ps, lr=0.05)),
    "nadam": (lambda: fsdp.from_torch(torch.optim.NAdam, lr=0.05), lambda ps: torch.optim.NAdam(ps, lr=0.05)),
    "pair": (momentum, lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9)),
}
PAIRS = (("adamw", "sgd"), ("nadam", "adamw"), ("pair", "adamw"), ("plain", "pair"))


def several(kinds: tuple[str, str]) -> Any:
    return fsdp.partition({"bias": KINDS[kinds[0]][0](), "default": KINDS[kinds[1]][0]()})


def misses(name: str, step: int) -> bool:
    """Whether a leaf gets no gradient on any rank."""
    return (name, step) in {("a.bias", 1), ("a.w", 2), ("b.w", 1), ("b.w", 2), ("norm", 0)}


def grads_of(step: int, lacking: bool) -> Tree:
    return {name: None if lacking and misses(name, step) else g for name, g in tree(step + 1).items()}


def plainly(kinds: tuple[str, str], steps: int = STEPS, lacking: bool = False) -> Tree:
    params = {name: torch.nn.Parameter(p) for name, p in tree(0).items()}
    parts = [[p for name, p in params.items() if ("bias" in name) == bias] for bias in (True, False)]
    optimizers = [KINDS[kind][1](some) for kind, some in zip(kinds, parts, strict=True)]
    for step in range(steps):
        for name, grad in grads_of(step, lacking).items():
            params[name].grad = grad
        for optimizer in optimizers:
            optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def spec(preset: str, units: Any = ("a", "b", "c", "norm"), **more: Any) -> Spec:
    mesh, placement = mesh_and_placement(preset)
    return Spec(mesh, placement, units=list(units), **{"labels": LABELS, **more})


def stepped(state: fsdp.State, steps: range, lacking: bool = False) -> fsdp.State:
    for step in steps:
        state = fsdp.step(fsdp.reduce(state, grads_of(step, lacking)))
    return state


def apart(found: Tree, wanted: Tree) -> float:
    return max(float((found[name] - p).abs().max()) for name, p in wanted.items())


def beside_torch(kinds: tuple[str, str]) -> float:
    """How far weights are from torch's, at most; of all placements, or, unless all rows are asked for, of two."""
    worst, presets = 0.0, PRESETS if FULL else ("zero3", "zero1")
    for lacking in (False, True):
        wanted = plainly(kinds, lacking=lacking)
        for preset in presets:
            state = stepped(fsdp.shard(tree(0), spec(preset), several(kinds)), range(STEPS), lacking)
            worst = max(worst, apart(fsdp.full_params(state), wanted))
    return worst


ROWS = [(ranks, kinds) for ranks in (1, 2, 4) for kinds in PAIRS]


@pytest.mark.parametrize(("ranks", "kinds"), marked(ROWS, [(2, PAIRS[0]), (2, PAIRS[1]), (2, PAIRS[2]), (1, PAIRS[3])]))
def test_each_has_its_leaves(ranks: int, kinds: tuple[str, str]) -> None:
    assert max(launch(beside_torch, (kinds,), nprocs=ranks)) < 1e-12


# ---------------------------------------------------------------- what is kept


def test_what_is_kept_is_by_label_and_of_the_labels_own_leaves_only() -> None:
    state = stepped(fsdp.shard(tree(0), spec("zero3"), several(("nadam", "adamw"))), range(2))
    assert [*state.opt] == ["bias", "default"]
    assert {name: [*trees] for name, trees in state.opt["bias"].items()} == {
        name: ["a", "b", "c"] for name in ("step", "mu_product", "exp_avg", "exp_avg_sq")
    }
    assert [*state.opt["default"].mean] == ["a", "b", "norm"]  # the bucket c has biases only
    kept = fsdp.optimizer_state(state)
    assert {path: sorted(of) for path, of in kept.items()} == {
        path: [f"bias.{name}" for name in ("exp_avg", "exp_avg_sq", "mu_product", "step")]
        if "bias" in path
        else ["default.mean", "default.square"]
        for path in SHAPES
    }
    mean = state.opt["default"].mean["a"]
    assert [leaf.path for leaf in mean.bucket.leaves] == ["a.w", "a.v"]
    assert [(label, view.numel()) for label, view in mean.by_label()] == [("default", 512)]  # they lie side by side


def saved(kinds: tuple[str, str], folder: str) -> list[bool]:
    state = stepped(fsdp.shard(tree(0), spec("zero3"), several(kinds)), range(3), lacking=True)
    path = fsdp.save(state, f"{folder}/{kinds[0]}")
    kept = fsdp.optimizer_state(state)
    units = ["*"], [("a.w", "b.w"), ("a.bias", "b.bias"), "a.v", "c", "norm"]
    others = [
        fsdp.load(path, like=fsdp.shard(tree(9), spec("zero3"), several(kinds))),
        fsdp.load(path, spec("ddp", units[0]), several(kinds)),
        fsdp.load(path, spec("zero2", units[1]), several(kinds)),
        fsdp.redistribute(fsdp.load(path, spec("zero3"), several(kinds)), spec("zero1", units[1])),
    ]
    others.append(fsdp.redistribute(fsdp.load(path, spec("zero2", units[1]), several(kinds)), spec("zero3", units[0])))
    found = []
    for other in others:
        mine = fsdp.optimizer_state(other)
        found.append(
            all(
                torch.equal(mine[p][name], t)
                for p, of in kept.items()
                for name, t in of.items()
                if "missed" not in name
            )
        )
    straight = fsdp.full_params(stepped(state, range(3, STEPS)))
    return [*found, *(apart(fsdp.full_params(stepped(other, range(3, STEPS))), straight) == 0 for other in others)]


def read(kinds: tuple[str, str], folder: str) -> float:
    state = fsdp.load(f"{folder}/{kinds[0]}", spec("hfsdp", ["b", "a", "c", "norm"]), several(kinds))
    return apart(fsdp.full_params(stepped(state, range(3, STEPS), lacking=True)), plainly(kinds, lacking=True))


@pytest.mark.parametrize("kinds", [*(pytest.param(x, marks=pytest.mark.large) for x in PAIRS[:2]), PAIRS[2]])
def test_checkpoints_go_on_in_any_world_and_units(kinds: tuple[str, str], tmp_path: Path) -> None:
    assert launch(saved, (kinds, str(tmp_path)), nprocs=2) == [[True] * 10] * 2
    assert max(launch(read, (kinds, str(tmp_path)), nprocs=4)) < 1e-12


# ---------------------------------------------------------------- skipped and compiled steps


@pytest.mark.parametrize("kinds", PAIRS)
def test_a_skipped_step_changes_nothing(kinds: tuple[str, str]) -> None:
    state = fsdp.shard(tree(0), spec("zero3"), several(kinds))
    for step, skip in ((0, False), (7, True), (1, False)):
        grads = {name: torch.full_like(g, torch.nan) if skip else g for name, g in tree(step + 1).items()}
        state = fsdp.step(fsdp.reduce(state, grads), skip=torch.tensor(skip))
    assert apart(fsdp.full_params(state), plainly(kinds, 2)) < 1e-12


def compiled(kinds: tuple[str, str], way: str) -> float:
    def train_step(state: fsdp.State, grads: Tree) -> fsdp.State:
        return fsdp.step(fsdp.reduce(state, grads))

    torch._dynamo.reset()
    step: Any = torch.compile(train_step, backend=way, fullgraph=True)
    state = fsdp.shard(tree(0), spec("zero3"), several(kinds))
    for i in range(2):
        state = step(state, tree(i + 1))
    return apart(fsdp.full_params(state), plainly(kinds, 2))


WAYS = [(way, kinds) for way in ("eager", "inductor") for kinds in (("nadam", "adamw"), ("pair", "sgd"))]


@pytest.mark.parametrize(("way", "kinds"), marked(WAYS, WAYS[:1]))
def test_a_compiled_step_does_the_same(way: str, kinds: tuple[str, str]) -> None:
    assert max(launch(compiled, (kinds, way), nprocs=2 if FULL else 1, processes=True)) < 1e-12


# ---------------------------------------------------------------- errors


def test_what_a_partition_is_made_of() -> None:
    for wrong in ({}, [fsdp.adamw()], {1: fsdp.adamw()}):
        with pytest.raises(SpecError, match=r"partition: expected \{label: optimizer\}, got"):
            fsdp.partition(wrong)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"the label 'norm' is None\. To leave leaves as they are freeze them"):
        fsdp.partition({"norm": None})
    with pytest.raises(SpecError, match=r"optimizer: expected a pair \(init, update\)"):
        fsdp.partition({"norm": 3})
    one = fsdp.partition({"bias": fsdp.sgd(0.1), "default": fsdp.adamw()})
    assert one == fsdp.partition({"bias": fsdp.sgd(0.1), "default": fsdp.adamw()})
    assert hash(one) == hash(fsdp.partition({"bias": fsdp.sgd(0.2), "default": fsdp.adamw()}))
    assert one.by_bucket
    assert not several(("pair", "adamw")).by_bucket


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (fsdp.partition({"nrom": fsdp.sgd(), "default": fsdp.adamw()}), "partition: no leaf has the label 'nrom'"),
        (
            fsdp.partition({"bias": fsdp.sgd()}),
            "partition: no optimizer for the label 'default'; there are some for 'bias'",
        ),
        (
            fsdp.partition({"bias": fsdp.sgd(), "default": fsdp.adamw(lr={"nrom": 1.0, "default": 1.0})}),
            "adamw(lr): no leaf has the label 'nrom'",
        ),
    ],
)
def test_labels_that_do_not_go_together(optimizer: Any, text: str) -> None:
    with pytest.raises(SpecError, match=re.escape(text)):
        fsdp.shard(tree(0), spec("zero3"), optimizer)


def test_settings_of_a_member_are_for_its_own_labels() -> None:
    """Nothing need be said for labels whose leaves another one has."""
    members = {"bias": fsdp.sgd(), "default": fsdp.adamw(lr={"norm": 1.0, "default": 0.1})}
    fsdp.shard(tree(0), spec("zero3"), fsdp.partition(members))
    members["bias"] = fsdp.sgd(lr={"bias": 0.1})
    fsdp.shard(tree(0), spec("zero3"), fsdp.partition(members))


def test_a_leaf_cannot_move_to_another_optimizer() -> None:
    state = fsdp.shard(tree(0), spec("zero3"), several(("sgd", "adamw")))
    with pytest.raises(SpecError, match=r"'a\.bias' has the label 'bias' in this state and 'default' by the spec, and"):
        fsdp.redistribute(state, spec("zero3", labels={"b.bias": "bias"}))
    fsdp.redistribute(state, spec("zero3", labels={"*.bias": "bias"}))  # norm becomes a default


def test_a_checkpoint_says_what_it_was_written_with(tmp_path: Path) -> None:
    path = fsdp.save(fsdp.shard(tree(0), spec("zero3"), several(("nadam", "adamw"))), tmp_path / "a")
    text = r"partition\(bias: from_torch\(NAdam\), default: AdamW\) there, partition\(bias: Sgd, default: AdamW\) here"
    with pytest.raises(SpecError, match=text):
        fsdp.load(path, spec("zero3"), several(("sgd", "adamw")))
