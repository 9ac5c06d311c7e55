"""Several optimizers, each of which has the leaves of its labels: what is kept, and what is refused. What they compute,
and what becomes of it, is beside torch's own in `test_optimizers_together`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.problems import mesh_and_placement

import functional_fsdp as fsdp
from functional_fsdp import Optimizer, Spec, SpecError

Tree = dict[str, Any]
SHAPES = {"a.w": (9, 40), "a.bias": (130,), "a.v": (20, 3), "b.w": (4, 4), "b.bias": (1,), "c.bias": (7,), "norm": (9,)}
LABELS = {"*.bias": "bias", "norm": "norm"}


def tree(seed: int) -> Tree:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in SHAPES.items()}


KINDS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: fsdp.adamw(lr=0.05),
    "sgd": lambda: fsdp.sgd(lr=0.05, momentum=0.9),
    "nadam": lambda: fsdp.from_torch(torch.optim.NAdam, lr=0.05),
    "pair": lambda: Optimizer(lambda main: (), lambda grads, opt, main, count: (main, opt)),
}


def several(kinds: tuple[str, str]) -> Any:
    return fsdp.partition({"bias": KINDS[kinds[0]](), "default": KINDS[kinds[1]]()})


def spec(preset: str, units: Any = ("a", "b", "c", "norm"), **more: Any) -> Spec:
    mesh, placement = mesh_and_placement(preset)
    return Spec(mesh, placement, units=list(units), **{"labels": LABELS, **more})


def stepped(state: fsdp.State, steps: range) -> fsdp.State:
    for step in steps:
        state = fsdp.step(fsdp.reduce(state, tree(step + 1)))
    return state


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


# ---------------------------------------------------------------- a step that cannot be taken


SETTINGS = ["adamw", "packed", "muon", "partition", "torch", "both torch", "whole", "both whole", "labels"]


@pytest.mark.parametrize("last", [*SETTINGS, "whole labels"])
def test_a_setting_that_raises_comes_before_any_member_has_written(last: str) -> None:
    """A later member's function raises: the earlier one's leaves are as they were, and the state is good."""

    def rate(count: torch.Tensor) -> torch.Tensor:
        if wrong:
            raise ValueError("no rate")
        return count * 0.0 + 0.1

    makes: dict[str, Any] = {
        "adamw": lambda: fsdp.adamw(weight_decay={"default": rate, "first": 0.0}),
        "packed": lambda: fsdp.adamw(betas=(0.9, rate), moments=fsdp.dynamic8),
        "muon": lambda: fsdp.muon(lr=rate),
        "partition": lambda: fsdp.partition({"default": fsdp.sgd(lr=rate)}),
        "torch": lambda: fsdp.from_torch(torch.optim.NAdam, lr=rate),
        "whole": lambda: fsdp.from_torch(torch.optim.NAdam, by="leaf", lr=rate),
    }
    wrong, matrices = [], {"a.w": torch.ones(4, 4), "b.w": torch.ones(3, 3)}
    both, by = last.removeprefix("both "), "leaf" if "whole" in last else None
    if "labels" in last:  # of one optimizer
        optimizer: Any = fsdp.from_torch(torch.optim.NAdam, by=by, lr={"first": 0.1, "default": rate})
    else:
        first = fsdp.from_torch(torch.optim.NAdam, by=by, lr=0.1) if both != last else fsdp.sgd(lr=0.1)
        optimizer = fsdp.partition({"first": first, "default": makes[both]()})
    labels = {"a.w": "first"}
    state, other = (fsdp.shard(matrices, spec("zero3", ["a", "b"], labels=labels), optimizer) for _ in range(2))
    wrong.append(True)
    with pytest.raises(ValueError, match="no rate"):
        fsdp.step(fsdp.reduce(state, matrices))
    wrong.clear()
    after, right = (fsdp.full_params(fsdp.step(fsdp.reduce(one, matrices))) for one in (state, other))
    assert all(torch.equal(leaf, right[path]) for path, leaf in after.items())
    assert not torch.equal(after["a.w"], matrices["a.w"])
