"""State in a world of one: what it prints, how it copies, who may use it when, and what an error leaves behind."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.nn as nn
import torch.utils._pytree as pytree
from support.files import saved

import functional_fsdp as fsdp
from functional_fsdp import Optimizer, Precision, ScheduleError, Spec, StaleStateError, State, TreeError
from functional_fsdp import _redistribute as _freeze

# both libraries, as functions of anything
TORCH: Any = pytree
OPTREE: Any = optree
PRESETS = [fsdp.ddp("data"), fsdp.zero1("data"), fsdp.zero2("data"), fsdp.zero3("data")]


def tree(value: float | None = None) -> dict[str, Any]:
    """A dict, a list and a tie: w0 and w1 in blocks, an embedding that is also the head."""
    g = torch.Generator().manual_seed(0)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g) if value is None else torch.full(shape, value)

    shared = make(5, 3)
    return {"wte": shared, "blocks": [{"w": make(3, 3), "b": make(3)}, {"w": make(3, 3), "b": make(3)}], "head": shared}


def begin(optimizer: Any = None, placement: Any = None, **kwargs: Any) -> State:
    spec = Spec(fsdp.local_mesh(), placement, units=["blocks.*", "wte"], **kwargs)
    return fsdp.shard(tree(), spec, fsdp.adamw(lr=0.1) if optimizer is None else optimizer)


def one_step(state: State, value: float = 1.0) -> State:
    state, params = fsdp.unshard(state)
    return fsdp.step(fsdp.reduce(state, pytree.tree_map(lambda p: torch.full_like(p, value), params)))


def bits(state: State) -> list[list[float]]:
    trees = (state.main, state.weights, state.opt, state.count, state.rng, state.buffers, state.extras)
    return [t.flatten().tolist() for t in pytree.tree_leaves(trees) if isinstance(t, torch.Tensor)]


# -------------------------------------------------------------------------------- fields and pictures


def test_fields_between_steps() -> None:
    state = begin()
    assert state.units == ("wte", "blocks.0", "blocks.1")
    assert list(state.main) == ["wte", "blocks.0", "blocks.1"]
    assert state.weights == state.grads == state.buffers == state.extras == {}
    assert fsdp.local_shards(state, "grads") == fsdp.local_shards(state, "weights") == {}
    assert (state.count.dtype, state.count.shape, state.count.item()) == (torch.int64, (), 0)
    assert (state.rng.dtype, state.rng.item()) == (torch.int64, 0)
    assert state.between_steps
    assert fsdp.shard(tree(), state.spec, seed=7).rng.item() == 7


@pytest.mark.parametrize(
    ("placement", "precision", "kept"),
    [
        (fsdp.ddp("data"), Precision(), set()),
        (fsdp.ddp("data"), Precision(compute=torch.bfloat16), {"wte", "blocks.0", "blocks.1"}),
        (fsdp.zero1("data"), Precision(), {"wte", "blocks.0", "blocks.1"}),
        (fsdp.zero2("data"), Precision(), {"wte", "blocks.0", "blocks.1"}),
        (fsdp.zero3("data"), Precision(compute=torch.bfloat16), set()),
    ],
    ids=lambda x: str(sorted(x) if isinstance(x, set) else x),
)
def test_a_compute_copy_only_where_it_is_needed(placement: Any, precision: Precision, kept: set[str]) -> None:
    assert set(begin(placement=placement, precision=precision).weights) == kept


def test_a_state_prints_as_a_table() -> None:
    lines = repr(begin(placement=fsdp.zero1("data"))).splitlines()
    assert lines[0] == "State of 3 units, 6 leaves, mesh data 1, step 0, between steps"
    assert lines[1].split() == ["field", "tensors", "bytes", "a", "rank", "dtype", "placed"]
    rows = [" ".join(line.split()) for line in lines[3:]]
    size = "2.5 KiB"  # 128 + 256 + 256 elements of float32
    assert rows == [
        f"main 3 {size} float32 data: Sharded",
        f"weights 3 {size} float32 data: Replicated",
        "grads 0 0 B - -",
        "opt 6 5.0 KiB float32 data: Sharded",
        "buffers 0 0 B - -",
        "extras 0 0 B - -",
    ]


def test_the_head_line_follows_the_state() -> None:
    base = begin()
    middle, _ = fsdp.unshard(base)
    reduced = fsdp.reduce(middle, tree(1.0))
    assert repr(middle).splitlines()[0].endswith("step 0, consumed by reduce()")
    assert repr(reduced).splitlines()[0].endswith("step 0, in the middle of a step")
    assert "grads" in repr(reduced)
    assert " ".join(repr(reduced).splitlines()[5].split()).startswith("grads 3 2.5 KiB float32 data: Sharded")
    after = fsdp.step(reduced)
    assert repr(after).splitlines()[0].endswith("step 1, between steps")
    for old in (base, middle, reduced):
        assert "consumed by" in repr(old).splitlines()[0]
    assert repr(base).splitlines()[0].endswith("consumed by step() number 1")


def test_ranks_compare_every_state_and_none_that_stands_in_for_one() -> None:
    state = begin()
    lineage = state.version.lineage
    known = lineage.runtime.lineages
    before = len(known)
    more = [copy.deepcopy(state), pickle.loads(pickle.dumps(state)), fsdp.replace_params(state, tree(1.0)), begin()]
    assert len(known) == before + len(more)
    assert all(one.version.lineage in known for one in (state, *more))
    assert lineage.stand_in(lineage.runtime, state.spec, 0, None, torch.zeros(())) not in known


def test_a_state_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        begin().count = torch.tensor(3)  # type: ignore[misc]


# -------------------------------------------------------------------------------- weights in and out


class Layer(NamedTuple):
    w: Any
    extra: Any


@pytest.mark.parametrize("placement", PRESETS, ids=str)
def test_any_pytree_comes_back_as_it_went_in(placement: Any) -> None:
    params = {
        "layers": [Layer(torch.randn(3, 2), (torch.tensor(1.0), torch.empty(0, 2))), Layer(torch.randn(2), ())],
        "a.dotted": torch.arange(4),
        3: torch.tensor([True, False]),
        "double": torch.randn(3, dtype=torch.float64),
        "half": torch.randn(3).bfloat16(),
    }
    state = fsdp.shard(params, Spec(fsdp.local_mesh(), placement, units=["layers", "a", "3", "double", "half"]))
    for found in (fsdp.unshard(state)[1], fsdp.full_params(state)):
        assert pytree.tree_structure(found) == pytree.tree_structure(params)
        for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(params), strict=True):
            assert a.shape == b.shape
            assert torch.equal(a.to(b.dtype), b)
    assert fsdp.unshard(state)[1]["half"].dtype is torch.bfloat16
    assert fsdp.full_params(state)["half"].dtype is torch.float32


def test_a_single_tensor_is_a_tree() -> None:
    state = fsdp.shard(torch.ones(3), Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.5))
    state, w = fsdp.unshard(state)
    assert w.tolist() == [1.0, 1.0, 1.0]
    state = fsdp.step(fsdp.reduce(state, torch.ones(3)))
    assert fsdp.full_params(state).tolist() == [0.5, 0.5, 0.5]


def test_parameters_are_copied() -> None:
    params = {"w": torch.ones(3)}
    state = fsdp.shard(params, Spec(fsdp.local_mesh()), fsdp.sgd(lr=1.0))
    params["w"].zero_()
    assert fsdp.full_params(state)["w"].tolist() == [1.0, 1.0, 1.0]
    full = fsdp.full_params(state)
    full["w"].fill_(9)
    state = one_step(state)
    assert fsdp.full_params(state)["w"].tolist() == [0.0, 0.0, 0.0]
    assert full["w"].tolist() == [9.0, 9.0, 9.0]


def test_tied_leaves_are_one_tensor_at_both_paths() -> None:
    state = begin()
    _, params = fsdp.unshard(state)
    assert params["wte"] is params["head"]
    full = fsdp.full_params(state)
    assert full["wte"] is full["head"]
    assert "head" not in fsdp.local_shards(state)


def test_units_are_dicts_by_relative_key() -> None:
    state, w = fsdp.unshard(begin(), "blocks.0")
    assert list(w) == ["w", "b"]
    assert torch.equal(w["w"], tree()["blocks"][0]["w"])
    state, both = fsdp.unshard(state, ["wte", "blocks.1"])
    assert list(both) == ["wte", "blocks.1"]
    assert torch.equal(both["wte"]["wte"], tree()["wte"])


@pytest.mark.parametrize("placement", PRESETS, ids=str)
def test_reductions_add_up(placement: Any) -> None:
    wanted = bits(one_step(begin(placement=placement), 3.0))
    for flags in ((True, True), (False, True), (False, False), (True, False)):
        state = begin(placement=placement)
        for value, last in zip((1.0, 2.0), flags, strict=True):
            state = fsdp.reduce(state, tree(value), last_microbatch=last)
        assert bits(fsdp.step(state)) == wanted


# -------------------------------------------------------------------------------- pytrees


@pytest.mark.parametrize("library", [TORCH, OPTREE], ids=["torch", "optree"])
def test_tree_maps_reach_every_tensor_and_the_structure_stays(library: Any) -> None:
    states = [begin(placement=fsdp.zero1("data"))]
    for _ in range(2):
        states.append(one_step(states[-1]))
    specs = [library.tree_structure(state) for state in (*states, begin(placement=fsdp.zero1("data")))]
    assert len({*specs}) == 1
    twice = library.tree_map(lambda t: t * 2, states[-1])
    assert type(twice) is State
    assert twice.layout is states[-1].layout
    assert bits(twice) == [[2 * x for x in tensor] for tensor in bits(states[-1])]
    assert bits(one_step(library.tree_map(lambda t: t.clone(), begin()))) == bits(one_step(begin()))
    assert len({id(t) for t in library.tree_leaves(begin())}) == 3 + 6 + 2  # main, opt, count and rng


def test_the_structure_differs_with_the_layout_and_the_optimizer() -> None:
    base = pytree.tree_structure(begin())
    assert base != pytree.tree_structure(begin(placement=fsdp.zero2("data")))
    assert base != pytree.tree_structure(begin(fsdp.adamw(lr=0.2)))
    assert base != pytree.tree_structure(begin(average="sum"))


def test_children_are_named() -> None:
    paths = [
        ".".join(str(getattr(k, "name", getattr(k, "key", k))) for k in keys)
        for keys, _ in pytree.tree_flatten_with_path(begin())[0]
    ]
    assert paths[:3] == ["main.wte.local", "main.blocks.0.local", "main.blocks.1.local"]
    assert paths[-2:] == ["count", "rng"]


# -------------------------------------------------------------------------------- copies


def through_pickle(state: State) -> State:
    return pickle.loads(pickle.dumps(state))


def through_torch(state: State) -> State:
    return torch.load(saved(state), weights_only=False)


COPIES: list[Callable[[State], State]] = [copy.deepcopy, copy.copy, through_pickle, through_torch]


@pytest.mark.parametrize("again", COPIES)
@pytest.mark.parametrize("placement", [fsdp.zero1("data"), fsdp.zero3("data")], ids=str)
def test_a_copy_trains_to_the_same_bits_and_shares_nothing(again: Callable[[State], State], placement: Any) -> None:
    state = one_step(begin(placement=placement))
    other = again(state)
    assert type(other) is State
    assert other.layout == state.layout
    assert other.spec == state.spec
    assert pytree.tree_structure(other) == pytree.tree_structure(state)
    before = bits(state)
    ahead = one_step(one_step(other))
    assert bits(state) == before
    assert bits(one_step(one_step(state))) == bits(ahead)
    assert repr(ahead).splitlines()[0].endswith("step 3, between steps")


@pytest.mark.parametrize("again", COPIES)
def test_no_copies_in_the_middle_of_a_step_or_of_a_consumed_state(again: Callable[[State], State]) -> None:
    base = begin()
    middle, _ = fsdp.unshard(base)
    with pytest.raises(StaleStateError, match="this State is in the middle of a step"):
        again(middle)
    reduced = fsdp.reduce(middle, tree(1.0))
    with pytest.raises(StaleStateError, match="or after step"):
        again(reduced)
    after = fsdp.step(reduced)
    assert bits(again(after)) == bits(after)
    with pytest.raises(StaleStateError, match=r"consumed by step\(\) number 1"):
        again(base)


def test_the_base_may_be_copied_while_a_step_is_under_way() -> None:
    base = begin()
    fsdp.unshard(base)
    assert bits(one_step(copy.deepcopy(base))) == bits(one_step(base))


def test_a_state_of_shapes_may_be_copied() -> None:
    state = fsdp.abstract_state(tree(1.0), Spec({"data": 4}), fsdp.sgd())
    assert copy.deepcopy(state).layout == state.layout


def test_extras_and_named_tuples_of_parameters_survive_a_pickle() -> None:
    state = fsdp.shard({"l": [Layer(torch.ones(2), torch.ones(1))]}, Spec(fsdp.local_mesh()), fsdp.sgd())
    state = replace(state, extras={"ema": {"w": torch.ones(2)}, "skipped": 3})
    for again in (through_pickle(state), copy.deepcopy(state)):
        assert again.extras["skipped"] == 3
        assert again.extras["ema"]["w"].tolist() == [1.0, 1.0]
        assert type(fsdp.full_params(again)["l"][0]) is Layer


# -------------------------------------------------------------------------------- who may use it when


USES: dict[str, Callable[[State], Any]] = {
    "unshard": fsdp.unshard,
    "unshard(unit)": lambda s: fsdp.unshard(s, "wte"),
    "reduce": lambda s: fsdp.reduce(s, tree(1.0)),
    "step": lambda s: fsdp.step(replace(s, grads=s.main)),
    "full_params": fsdp.full_params,
    "local_shards": fsdp.local_shards,
    "pmean": lambda s: fsdp.pmean(s, 1.0),
    "release": lambda s: fsdp.release(s, "wte"),
}


@pytest.mark.parametrize("use", USES)
def test_a_state_that_step_consumed(use: str) -> None:
    base = one_step(begin())
    one_step(base)
    with pytest.raises(StaleStateError) as caught:
        USES[use](base)
    text = str(caught.value)
    assert text.startswith(use.split("(")[0])
    assert "this State was consumed by step() number 2. Use the State that that call returned" in text
    assert "copy.deepcopy it between steps" in text


@pytest.mark.parametrize(
    ("consume", "named"),
    [
        (lambda s: fsdp.unshard(s), "unshard()"),
        (lambda s: fsdp.unshard(s, "blocks.0"), "unshard('blocks.0')"),
        (lambda s: fsdp.unshard(s, ["wte", "blocks.1"]), "unshard('wte', 'blocks.1')"),
        (lambda s: fsdp.reduce(s, tree(1.0)), "reduce()"),
        (lambda s: fsdp.reduce(s, {"w": None, "b": None}, "blocks.1"), "reduce('blocks.1')"),
        (lambda s: fsdp.release(s, "blocks.1"), "release('blocks.1')"),
    ],
)
def test_a_state_in_the_middle_names_the_call_that_consumed_it(consume: Callable[[State], Any], named: str) -> None:
    middle, _ = fsdp.unshard(begin(), "blocks.1")
    consume(middle)
    for use in (lambda s: fsdp.unshard(s), lambda s: fsdp.reduce(s, tree(1.0)), lambda s: fsdp.release(s, "blocks.1")):
        with pytest.raises(StaleStateError) as caught:
            use(middle)
        text = str(caught.value)
        assert f"this State was consumed by {named}. Use the State that that call returned" in text
        assert "or begin again from the state before the step" in text


def test_the_base_may_be_used_again_and_drops_what_was_begun() -> None:
    base = begin()
    wanted = bits(one_step(begin()))
    middle, _ = fsdp.unshard(base)
    reduced = fsdp.reduce(middle, tree(100.0))
    again, _ = fsdp.unshard(base)
    with pytest.raises(
        StaleStateError, match=r"by the restart of its step \(the state before the step was used again\)"
    ):
        fsdp.step(reduced)
    assert bits(fsdp.step(fsdp.reduce(again, tree(1.0)))) == wanted


def test_weights_stay_valid_after_an_abandoned_step() -> None:
    base = begin(precision=Precision(compute=torch.float64))
    _, w = fsdp.unshard(base, "blocks.0")
    fsdp.unshard(base, "blocks.0")
    assert torch.equal(w["w"].float(), tree()["blocks"][0]["w"])


# -------------------------------------------------------------------------------- release


def test_released_bytes_are_poisoned_and_come_back_to_the_same_tensors() -> None:
    state = begin(precision=Precision(compute=torch.float64), schedule=fsdp.Schedule(debug=True))
    state, w = fsdp.unshard(state, "blocks.0")
    state = fsdp.release(state, "blocks.0")
    assert w["w"].isnan().all()
    state, again = fsdp.unshard(state, "blocks.0")
    assert again["w"] is w["w"]
    assert torch.equal(w["w"], tree()["blocks"][0]["w"].double())


def test_gathering_what_is_gathered_and_a_release_that_is_refused_change_nothing() -> None:
    state, w = fsdp.unshard(begin(precision=Precision(compute=torch.float64)), "blocks.0")
    state, again = fsdp.unshard(state, "blocks.0")
    assert again["w"] is w["w"]
    with pytest.raises(ScheduleError, match="is not gathered"):
        fsdp.release(state, ["blocks.0", "blocks.1"])
    state = fsdp.release(state, "blocks.0")
    with pytest.raises(ScheduleError, match=r"release: the unit 'blocks\.0' is not gathered\. .* unshard\(state, "):
        fsdp.release(state, "blocks.0")


@pytest.mark.parametrize("verb", ["unshard", "release", "reduce"])
@pytest.mark.parametrize("name", ["blocks.2", "nope", 3])
def test_a_unit_that_does_not_exist(verb: str, name: Any) -> None:
    base = begin()
    given: Any = ({}, name) if verb == "reduce" else ([name],)
    with pytest.raises(ScheduleError) as caught:
        getattr(fsdp, verb)(base, *given)
    assert f"{verb}: there is no unit {name!r}. The units are 'wte', 'blocks.0', 'blocks.1'." in str(caught.value)
    one_step(base)


# -------------------------------------------------------------------------------- gradients


ONES, NONE = torch.ones(3), pytree.tree_map(lambda p: None, tree())
GIVEN: list[tuple[Any, str | None, set[str]]] = [  # gradients, of which unit, and what they change: None means zero
    ({**NONE, "blocks": [{"w": None, "b": ONES}, {"w": None, "b": None}]}, None, {"blocks.0.b"}),
    ({**tree(0.0), "wte": None, "head": torch.ones(5, 3)}, None, {"wte"}),  # of two tied paths one has none
    ({"w": torch.ones(3, 3), "b": None}, "blocks.1", {"blocks.1.w"}),  # other units have none
]


@pytest.mark.parametrize(("grads", "unit", "changed"), GIVEN)
def test_what_has_no_gradient_stays(grads: Any, unit: str | None, changed: set[str]) -> None:
    base = begin(fsdp.sgd(lr=1.0))
    before = {path: part.clone() for path, part in fsdp.local_shards(base).items()}
    after = fsdp.local_shards(fsdp.step(fsdp.reduce(base, grads, unit)))
    for path, part in before.items():
        assert torch.equal(after[path], part) == (path not in changed)
        if path in changed:
            torch.testing.assert_close(after[path], part - 1)


def test_gradients_in_another_container_match_by_path() -> None:
    grads = tree(1.0)
    flat = {"head": grads["head"], "blocks.1.w": torch.ones(3, 3), "blocks.0.b": torch.ones(3)}
    flat |= {"blocks.0.w": torch.ones(3, 3), "blocks.1.b": torch.ones(3), "wte": grads["wte"]}
    assert bits(fsdp.step(fsdp.reduce(begin(), flat))) == bits(one_step(begin()))


def test_gradients_are_not_changed() -> None:
    grads = tree(1.0)
    state = fsdp.reduce(begin(), grads)
    state = fsdp.reduce(state, grads)
    fsdp.step(state)
    assert all((g == 1).all() for g in pytree.tree_leaves(grads))


def test_a_vector_that_the_given_weights_are_views_of_is_not_changed() -> None:
    module = torch.nn.Linear(3, 2)
    kept = torch.zeros(8)
    torch.nn.utils.vector_to_parameters(kept, module.parameters())
    params, _ = fsdp.functionalize(module)
    state = fsdp.shard(params, Spec(fsdp.local_mesh()), fsdp.sgd(lr=1.0))
    after = fsdp.step(fsdp.reduce(state, pytree.tree_map(torch.ones_like, params)))
    assert all((w == -1).all() for w in fsdp.full_params(after).values())
    assert not kept.count_nonzero()


def test_gradients_of_frozen_leaves_are_ignored() -> None:
    state = begin(fsdp.sgd(lr=1.0), trainable={"blocks.0": False})
    grads = tree(1.0)
    grads["blocks"][0]["w"] = torch.ones(99)
    state = fsdp.reduce(state, grads)
    assert set(state.grads) == {"wte", "blocks.1"}
    assert torch.equal(fsdp.full_params(fsdp.step(state))["blocks"][0]["w"], tree()["blocks"][0]["w"])


def test_a_wholly_frozen_unit_by_unit() -> None:
    state = begin(fsdp.sgd(lr=1.0), trainable={"blocks.0": False})
    for unit in state.units:
        state, w = fsdp.unshard(state, unit)
        state = fsdp.reduce(state, {key: torch.ones_like(p) for key, p in w.items()}, unit)
        state = fsdp.release(state, unit)
    after = fsdp.full_params(fsdp.step(state))
    assert torch.equal(after["blocks"][0]["w"], tree()["blocks"][0]["w"])
    torch.testing.assert_close(after["blocks"][1]["w"], tree()["blocks"][1]["w"] - 1)


def one_other(grad: Any) -> Any:
    grads = tree(1.0)
    grads["blocks"][1]["w"] = grad
    return grads


HEADLESS = {key: leaf for key, leaf in tree(1.0).items() if key != "head"}
STRUCTURE = r"reduce\(state, grads\): the gradient tree has another structure.*"
SHAPE = r"reduce: the gradient of 'blocks\.1\.w' has "
MISFITS: list[tuple[Any, str | None, str]] = [
    (HEADLESS, None, STRUCTURE + r"it lacks 'head' \(5 leaves, expected 6\)"),
    ({**tree(1.0), "blocks": tree(1.0)["blocks"][:1]}, None,
     STRUCTURE + r"it lacks 'blocks\.1\.w' and 1 more \(4 leaves, expected 6\)"),
    ({**tree(1.0), "extra": ONES}, None, STRUCTURE + r"it has the unknown 'extra' \(7 leaves, expected 6\)"),
    ([ONES], None, STRUCTURE + r"it lacks 'wte' and 5 more and has the unknown '0' \(1 leaves, expected 6\)"),
    (None, None, STRUCTURE + r"has the unknown ''"),
    (one_other(torch.ones(3, 4)), None, SHAPE + r"shape \(3, 4\); expected .* global shape \(3, 3\)"),
    (one_other(torch.ones(9)), None, SHAPE + r"shape \(9,\); expected"),
    (one_other(torch.ones(())), None, SHAPE + r"shape \(\); expected"),
    (one_other(3.0), None, SHAPE + r"a float; expected a tensor"),
    ({"w": torch.ones(3, 3)}, "blocks.0", r"reduce\(state, grads, 'blocks\.0'\): .* it lacks 'b'"),
    ({"w": None, "b": None, "c": None}, "blocks.0", r"has the unknown 'c'"),
    ([torch.ones(3, 3), ONES], "blocks.0", r"grads: expected \{key: tensor\}, and got a list"),
    ({"w": ONES, "b": None}, "blocks.0", r"the gradient of 'blocks\.0\.w' has shape \(3,\)"),
]  # fmt: skip


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(("grads", "unit", "text"), MISFITS)
def test_gradients_that_do_not_fit(grads: Any, unit: str | None, text: str, begun: bool) -> None:
    state = base = begin()
    if begun:
        state, _ = fsdp.unshard(base)
    with pytest.raises(TreeError, match=text):
        fsdp.reduce(state, grads, unit)
    assert base.between_steps  # checked before anything happened
    fsdp.step(fsdp.reduce(state, tree(1.0)))  # the state that reduce refused is still the newest


def test_a_step_with_no_gradients() -> None:
    base = begin()
    with pytest.raises(ScheduleError, match=r"step: this state has no gradients\. .* reduce\(state, grads\) first\."):
        fsdp.step(base)
    with pytest.raises(ScheduleError, match=r"finish_reductions: this state has no gradients"):
        fsdp.finish_reductions(base)
    middle, _ = fsdp.unshard(base)
    with pytest.raises(ScheduleError, match="no gradients"):
        fsdp.step(middle)
    assert bits(fsdp.step(fsdp.reduce(middle, tree(1.0)))) == bits(one_step(begin()))


def test_a_step_without_an_optimizer() -> None:
    base = fsdp.shard(tree(), Spec(fsdp.local_mesh(), units=["blocks.*", "wte"]))
    assert base.opt == {}
    state = fsdp.reduce(base, tree(1.0))
    assert fsdp.local_shards(state, "grads")["wte"].tolist() == [2.0] * 15
    with pytest.raises(ScheduleError, match=r"step: this state has no optimizer\. .* shard\(params, spec, optimizer\)"):
        fsdp.step(state)
    assert fsdp.local_shards(state, "grads")["wte"].tolist() == [2.0] * 15


def test_a_tree_with_nothing_to_train() -> None:
    state = begin(trainable={"*": False})
    state, params = fsdp.unshard(state)
    torch.testing.assert_close(params["wte"], tree()["wte"])
    with pytest.raises(ScheduleError, match="nothing is trainable"):
        fsdp.step(fsdp.reduce(state, tree(1.0)))


# -------------------------------------------------------------------------------- steps that fail


def failing(when: str, error: BaseException) -> tuple[Optimizer, list[bool]]:
    """sgd with lr 1 that fails as long as the list is not empty: before, or in the middle of its in-place update."""
    fail = [True]
    sgd = fsdp.sgd(lr=1.0)

    def update(grads: Any, opt: Any, main: Any, count: torch.Tensor) -> tuple[Any, Any]:
        if fail and when == "before":
            raise error
        if fail and when in ("torch op", "fused"):
            first = next(iter(main))
            part = ({first: grads[first]}, opt, {first: main[first]}, count)
            if when == "fused":
                sgd.update(*part)
            else:
                main[first].local.sub_(grads[first].local)
            raise error
        return sgd.update(grads, opt, main, count)

    return Optimizer(lambda main: (), update), fail


@pytest.mark.parametrize("again", [False, True])
def test_a_step_whose_optimizer_raised_may_be_tried_again_or_begun_anew(again: bool) -> None:
    pair, fail = failing("before", ValueError("mine"))
    base = begin(pair)
    reduced = fsdp.reduce(base, tree(1.0))
    with pytest.raises(ValueError, match="mine"):
        fsdp.step(reduced)
    torch.testing.assert_close(fsdp.full_params(base), tree())
    fail.clear()
    after = fsdp.step(reduced if again else fsdp.reduce(base, tree(1.0)))
    assert bits(after) == bits(fsdp.step(fsdp.reduce(begin(fsdp.sgd(lr=1.0)), tree(1.0))))
    assert after.count.item() == 1


@pytest.mark.parametrize("how", ["torch op", "fused"])
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_update_that_was_stopped_half_way_is_never_mistaken_for_a_good_state(how: str, error: BaseException) -> None:
    pair, _ = failing(how, error)
    base = begin(pair)
    reduced = fsdp.reduce(base, tree(1.0))
    with pytest.raises(type(error)):
        fsdp.step(reduced)
    for use in (fsdp.unshard, fsdp.full_params, copy.deepcopy, lambda s: fsdp.reduce(s, tree(1.0))):
        with pytest.raises(StaleStateError) as caught:
            use(base)
        text = str(caught.value)
        assert f"step() number 1 was stopped by {type(error).__name__} while it was updating the weights" in text
        assert "half updated. Load the last checkpoint." in text
    assert repr(base).splitlines()[0].endswith("step 0, of no more use")


MOVES: dict[str, Callable[[State], State]] = {
    "redistribute": lambda s: fsdp.redistribute(s, Spec(fsdp.local_mesh(), fsdp.ddp("data"))),
    "freeze": lambda s: fsdp.freeze(s, "wte"),
    "unfreeze": lambda s: fsdp.unfreeze(s, "wte"),
}


@pytest.mark.parametrize("verb", list(MOVES))
def test_newest_follows_what_a_state_held(verb: str) -> None:
    """Also before the first step, and twice."""
    base = begin()
    old = one_step(base)
    moved = MOVES[verb](old)
    assert repr(old).splitlines()[0].endswith(f"step 1, taken by {verb}()")
    assert repr(base).splitlines()[0].endswith("step 1, consumed by step() number 1")
    with pytest.raises(StaleStateError, match=rf"{verb}\(\) has taken what this state held. .*fsdp.newest gives it"):
        fsdp.unshard(old)
    wanted = bits(moved)
    del moved
    for state in (base, old):
        assert bits(fsdp.newest(state)) == wanted
        assert fsdp.newest(state).between_steps
    last = one_step(fsdp.newest(old))
    assert fsdp.newest(base).steps == 2
    assert bits(fsdp.newest(old)) == bits(last)
    again = MOVES["redistribute"](last)
    assert bits(fsdp.newest(base)) == bits(again)


def test_a_state_keeps_what_it_held_only_as_long_as_somebody_has_it() -> None:
    old = begin()
    moved = weakref.ref(fsdp.freeze(old, "wte").main["wte"].local)
    assert moved() is not None
    del old
    gc.collect()
    assert moved() is None


def test_a_move_that_was_stopped_leaves_nothing_to_go_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = fsdp.adamw(lr=0.1)
    old = one_step(begin(pair))

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_freeze, "initial", stopped)
    with pytest.raises(KeyboardInterrupt):
        fsdp.freeze(old, "wte")
    for use in (fsdp.unshard, fsdp.newest):
        with pytest.raises(StaleStateError, match=r"freeze\(\) was stopped while it was moving what this state held"):
            use(old)
    assert repr(old).splitlines()[0].endswith("step 1, taken by freeze()")


# -------------------------------------------------------------------------------- transforms and types


@pytest.mark.parametrize("verb", ["unshard", "release", "reduce", "step", "pmean"])
@pytest.mark.parametrize("transform", ["grad", "vmap", "vjp"])
def test_verbs_refuse_to_run_inside_a_transform(verb: str, transform: str) -> None:
    base = begin()

    def loss(x: torch.Tensor) -> torch.Tensor:
        USES[verb](base)
        return x.sum()

    run: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(loss)(torch.ones(2)),
        "vmap": lambda: torch.vmap(loss)(torch.ones(2, 2)),
        "vjp": lambda: torch.func.vjp(loss, torch.ones(2)),
    }
    with pytest.raises(ScheduleError, match=rf"{verb} was called inside a torch\.func transform .* Call unshard be"):
        run[transform]()
    one_step(base)


@pytest.mark.parametrize("verb", [fsdp.unshard, fsdp.step, fsdp.pmean, fsdp.reduce, fsdp.release])
def test_the_first_argument_is_a_state(verb: Any) -> None:
    with pytest.raises(TypeError, match=rf"{verb.__name__}\(state, \.\.\.\): .* argument is a State, not dict\."):
        verb({}, tree(1.0))


def test_verbs_run_without_autograd() -> None:
    params = pytree.tree_map(lambda p: p.requires_grad_(), tree())
    state = fsdp.shard(params, Spec(fsdp.local_mesh(), units=["blocks.*", "wte"]), fsdp.sgd())
    state, weights = fsdp.unshard(state)
    assert not any(w.requires_grad for w in pytree.tree_leaves(weights))
    state = fsdp.step(fsdp.reduce(state, pytree.tree_map(lambda p: p * 1.0, params)))
    assert not any(t.requires_grad for t in pytree.tree_leaves(state))


# -------------------------------------------------------------------------------- pmean


def test_pmean_does_not_change_what_it_was_given() -> None:
    loss = torch.tensor(2.0, requires_grad=True)
    _, found = fsdp.pmean(begin(), loss)
    assert found.item() == 2.0
    assert found is not loss
    assert not found.requires_grad


# -------------------------------------------------------------------------------- what a notebook shows


def test_trees_of_buffers_print_a_short_line_a_bucket() -> None:
    state = fsdp.shard(
        {f"layers.{i}.w": torch.zeros(1000, 100) for i in range(20)}, Spec(fsdp.local_mesh()), fsdp.adamw()
    )
    assert repr(state.main["layers.0"]) == (
        "FlatBuffer('layers.0', 1 leaf, 100,096 elements, float32, data: Sharded)"
    )  # 782 × 128
    reduced = fsdp.reduce(*fsdp.unshard(state))
    for tree in (state.main, reduced.grads):
        assert len(repr(tree)) < 20 * 120
        assert "tensor(" not in repr(tree)
        assert "Leaf(" not in repr(tree)
    lines = [" ".join(line.split()) for line in repr(state.opt).splitlines()]
    assert lines[0] == "AdamState"
    assert lines[3:5] == ["mean 20 7.6 MiB float32 data: Sharded", "square 20 7.6 MiB float32 data: Sharded"]
    assert len(lines) < 10


def test_gradients_are_in_the_order_of_main_weights() -> None:
    names = [f"layers.{i}" for i in (0, 1, 10, 2)]
    params = {f"{name}.w": torch.ones(3) for name in names} | {"frozen.w": torch.ones(2)}
    base = fsdp.shard(params, Spec(fsdp.local_mesh(), trainable={"frozen.*": False}), fsdp.sgd())
    want = [name for name in base.main if name in base.layout.trainable]
    assert [*fsdp.reduce(*fsdp.unshard(base)).grads] == want
    for order in (want[::-1], want, [want[2], want[0], want[3], want[1]]):
        state = base
        for unit in order:
            state = fsdp.reduce(state, {"w": torch.ones(3)}, unit, last_microbatch=False)
        assert [*state.grads] == want
        state = fsdp.reduce(state, {"w": torch.ones(3)}, order[0])  # once more
        assert [*fsdp.finish_reductions(state).grads] == want
    state = fsdp.finish_reductions(fsdp.reduce(base, {"w": torch.ones(3)}, want[-1]))
    assert [*state.grads] == want
    assert fsdp.local_shards(state, "grads")[want[-1] + ".w"].sum() == 3
    assert fsdp.step(state).steps == 1


# ---------------------------------------------------------------- state dicts


class Halved(nn.Linear):
    """Version 2 keeps its weight as it is used; in older state dicts it is twice as large."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.scale = 1.0

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (metadata.get("version") or 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] / 2
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


class Nested(nn.Module):
    """The same part at two paths, and one in another."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(Halved(), nn.BatchNorm1d(3))
        self.b = self.a[1]


def test_a_state_dict_says_what_only_the_module_knows() -> None:
    module = Nested()
    module.a[0].scale = 2.0  # type: ignore[assignment]
    params, model = fsdp.functionalize(module)
    state = fsdp.shard(params, Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1), buffers=fsdp.buffers(module))
    for one in (module, model):
        found, want = fsdp.state_dict(state, one), module.state_dict()
        assert found.keys() == want.keys()
        assert found._metadata == want._metadata  # type: ignore[attr-defined]
        for into in (Nested(), Nested()):
            into.load_state_dict(copy.deepcopy(found) if one is module else torch.load(saved(found), weights_only=True))
            assert into.a[0].scale == 2.0
            assert all(torch.equal(a, b) for a, b in zip(into.parameters(), module.parameters(), strict=True))
