"""States that are redistributed, loaded or filled from elsewhere: nothing is taken for something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from support.torch_optimizers import ByParameter

import functional_fsdp as fsdp
from functional_fsdp import Spec, SpecError, TreeError

LABELS = {"*v*": "other"}
BY_LABEL = {"other": 0.0, "default": 0.1}


def spec(units: Any = None, **options: Any) -> Spec:
    return Spec(fsdp.local_mesh(), units=units, **options)


def stepped(state: fsdp.State, *gradients: dict[str, Any]) -> fsdp.State:
    for tree in gradients:
        state = fsdp.step(
            fsdp.reduce(state, {path: g if g is None else torch.full((4,), g) for path, g in tree.items()})
        )
    return state


def moved_by(state: fsdp.State, gradient: float = 0.5) -> dict[str, float]:
    before = {path: w.clone() for path, w in fsdp.full_params(state).items()}
    after = fsdp.full_params(stepped(state, dict.fromkeys(before, gradient)))
    return {path: round(float((after[path] - w)[0]), 4) for path, w in before.items()}


# ---------------------------------------------------------------- other units


@pytest.mark.parametrize("kind", ["adamw", "partition", "partition in a partition"])
def test_counts_of_missed_steps_find_their_leaves_in_units_of_several_labels(kind: str) -> None:
    optimizer: Any = fsdp.adamw(lr=0.1, weight_decay=BY_LABEL)
    if kind != "adamw":
        optimizer = fsdp.partition({"default": optimizer})
    if kind == "partition in a partition":
        optimizer = fsdp.partition({"default": optimizer, "third": fsdp.sgd(0.1)})
    params = {"m.u": torch.ones(4), "m.v": torch.ones(4), "n": torch.ones(4)}
    missing: dict[str, Any] = {"m.u": 1.0, "m.v": None, "n": 1.0}
    later = [{**missing, "m.u": 0.5}, {**missing, "m.u": 2.0}]
    labels = {**LABELS, "n": "third"}
    apart, together = (spec(units, labels=labels) for units in (["m.*", "n"], ["m", "n"]))
    state = stepped(fsdp.shard(params, apart, optimizer), *[missing] * 3)
    found = stepped(fsdp.redistribute(state, together), *later)
    wanted = stepped(stepped(fsdp.shard(params, apart, optimizer), *[missing] * 3), *later)
    for path, w in fsdp.full_params(wanted).items():
        assert torch.equal(fsdp.full_params(found)[path], w)


# ---------------------------------------------------------------- optimizers that begin late


def test_an_optimizer_that_begins_anew_counts_from_there(tmp_path: Path) -> None:
    state = fsdp.shard({"w": torch.ones(4)}, spec(), fsdp.sgd(1e-3))
    fsdp.save(stepped(state, *[{"w": 0.5}] * 50), tmp_path / "there")
    adamw = fsdp.adamw(lr=0.1, weight_decay=0.0)
    loaded = fsdp.load(tmp_path / "there", spec(), adamw, allow=["optimizer"])
    assert loaded.steps == 50
    assert moved_by(loaded) == {"w": -0.1}  # as in a first step


def test_a_count_is_that_of_all_leaves() -> None:
    state = fsdp.shard({"u": torch.ones(4), "v": torch.ones(4)}, spec(), fsdp.adamw(lr=0.1, weight_decay=0.0))
    kept = {"u": {"mean": torch.full((4,), 0.5), "square": torch.full((4,), 0.25)}}
    with pytest.raises(TreeError, match=r"'mean.v' and 1 others are not there and would stay as they are"):
        fsdp.load_optimizer_state(state, kept, steps=10_000, partial=True)
    every = dict.fromkeys("uv", kept["u"])
    assert moved_by(fsdp.load_optimizer_state(state, every, steps=10_000, partial=True)) == {"u": -0.1, "v": -0.1}
    assert set(fsdp.load_optimizer_state(state, kept, partial=True).opt.mean) == {*state.main}


def test_counts_of_missed_steps_come_back_in_units_where_few_leaves_have_one() -> None:
    params = {"m.u": torch.ones(4), "m.v": torch.ones(4)}
    optimizer = fsdp.adamw(lr=0.1)
    state = stepped(fsdp.shard(params, spec(["m.*"]), optimizer), *[{"m.u": 1.0, "m.v": None}] * 3)
    kept = fsdp.optimizer_state(state)
    assert "missed" in kept["m.v"]
    assert "missed" not in kept["m.u"]
    other = fsdp.load_weights(fsdp.shard(params, spec(["m"]), optimizer), fsdp.full_params(state))
    other = fsdp.load_optimizer_state(other, kept, steps=3)
    assert moved_by(other) == moved_by(state)


class Counts(ByParameter):
    """Keeps a number and a tensor, or the tensor only."""

    number = True

    def one(self, p: Any, g: Any, s: Any, group: Any) -> None:
        if not s:
            s["sq"] = torch.zeros_like(p)
            if self.number:
                s["step"] = torch.zeros(())
        s["sq"].add_(g * g)
        if self.number:
            s["step"] += 1
        p.add_(g, alpha=-group["lr"])


class CountsNothing(Counts):
    number = False


def test_numbers_that_a_checkpoint_lacks_are_zero(tmp_path: Path) -> None:
    fsdp.save(
        stepped(fsdp.shard({"w": torch.ones(4)}, spec(), fsdp.from_torch(CountsNothing)), {"w": 1.0}), tmp_path / "a"
    )
    like = fsdp.shard({"w": torch.ones(4)}, spec(), fsdp.from_torch(Counts))
    with pytest.warns(UserWarning, match="optimizer"):
        loaded = fsdp.load(tmp_path / "a", like=like)
    assert fsdp.optimizer_state(loaded)["w"]["step"].tolist() in ([0.0], 0.0)


# ---------------------------------------------------------------- weights from elsewhere


def test_a_tied_leaf_with_two_values_is_refused() -> None:
    w = torch.ones(3)
    tied = fsdp.shard({"emb": w, "head": w}, spec())
    for other in (torch.full((3,), 7.0), torch.full((5, 2), 7.0)):
        with pytest.raises(TreeError, match=r"'emb' and 'head' .*are one leaf of the model"):
            fsdp.load_weights(tied, {"emb": torch.zeros(3), "head": other})
    loaded = fsdp.full_params(fsdp.load_weights(tied, {"emb": torch.zeros(3), "head": torch.zeros(3)}))
    assert loaded["head"].tolist() == [0, 0, 0]


def test_elements_that_are_taken_twice_count_once() -> None:
    state = fsdp.shard({name: torch.ones(2) for name in "qkv"}, spec())

    def cut(q: int, k: int, v: int) -> fsdp.State:
        convert = {name: fsdp.Sliced("qkv", at, of=6) for name, at in zip("qkv", (q, k, v), strict=True)}
        return fsdp.load_weights(state, {"qkv": torch.arange(6.0)}, convert=convert)

    assert fsdp.full_params(cut(0, 2, 4))["k"].tolist() == [2, 3]
    for wrong in ((0, 0, 4), (0, 1, 4)):
        with pytest.raises(TreeError, match="has 'qkv' with 6 elements, the model 4 of them"):
            cut(*wrong)


def test_weights_of_which_no_name_fits_are_refused() -> None:
    state = fsdp.shard({"q": torch.ones(2)}, spec())
    none = {"model.z": torch.zeros(2)}
    with pytest.raises(TreeError, match="weights: no name in the mapping is one of the model's"):
        fsdp.load_weights(state, none, partial=True)
    with pytest.raises(TreeError, match="weights: no name in the mapping is one of the model's"):
        fsdp.init(lambda: nn.Linear(2, 2), spec(), weights=none, partial=True)


def test_leaves_that_may_be_missing_are_named_by_patterns() -> None:
    def make() -> nn.Module:
        return nn.ModuleDict({"base": nn.Linear(2, 2, bias=False), "lora_A": nn.Linear(2, 1, bias=False)})

    base = {"w": torch.full((2, 2), 3.0)}
    rename = {"base.weight": "w"}
    state, _ = fsdp.init(make, spec(), weights=base, rename=rename, partial="*lora_*", seed=1)
    plain, _ = fsdp.init(make, spec(), seed=1)
    assert torch.equal(fsdp.full_params(state)["base.weight"], base["w"])
    assert torch.equal(fsdp.full_params(state)["lora_A.weight"], fsdp.full_params(plain)["lora_A.weight"])
    state = fsdp.load_weights(plain, base, rename=rename, partial=["*lora_*"])
    assert torch.equal(fsdp.full_params(state)["base.weight"], base["w"])
    with pytest.raises(TreeError, match=r"lacks 'base\.weight'; it has 'w', which the model has not"):
        fsdp.init(make, spec(), weights=base, partial="*lora_*")  # a name that is wrong is no leaf that is missing
    with pytest.raises(SpecError, match=r"partial: the pattern '\*loar\*' matches nothing"):
        fsdp.init(make, spec(), weights=base, rename=rename, partial="*loar*")


def test_integers_must_fit() -> None:
    state = fsdp.shard({"i": torch.ones(2, dtype=torch.int8)}, spec())
    with pytest.raises(TreeError, match=r"has 'i' as torch.int64, the model torch.int8"):
        fsdp.load_weights(state, {"i": torch.tensor([300, 5])})
    loaded = fsdp.load_weights(state, {"i": torch.tensor([3, 5], dtype=torch.int8)})
    assert fsdp.full_params(loaded)["i"].tolist() == [3, 5]


def test_a_buffer_of_any_strides_is_filled() -> None:
    state = fsdp.shard({"w": torch.ones(2)}, spec(), buffers={"b": torch.zeros(3, 2).t()})
    loaded = fsdp.load_weights(state, {"w": torch.ones(2), "b": torch.arange(6.0).view(2, 3)})
    assert loaded.buffers["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
