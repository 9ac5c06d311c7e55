"""No two names meet, whatever the keys of a tree are: every leaf is found where it was put, with the values it had."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_fsdp as fsdp
from functional_fsdp import Spec, SpecError, TreeError

KEYS = st.one_of(
    st.sampled_from(
        ["", "a", "b", "a.b", "a.b.c", "w", "w:0", "w:1", "w::0", "0", "1", "10", "2", "a[0]", "['a']", "*"]
    ),
    st.sampled_from(["a+b", "a.*", "a.**", "b.*", ".", "..", ":", ":0", "a b", "[0]", "0.[0]", "0.['0']", "²", "é\n"]),
    st.text("a.:0[]'*", max_size=4),
    st.integers(0, 12),
    st.booleans(),
)
LEAVES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, min_size=1, max_size=5), st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=12,
)


def numbered(tree: Any, draw: Any) -> Any:
    """A tree of dtypes as tensors of 1 to 5 equal elements, each with a number of its own; some are the same tensor."""
    made: list[torch.Tensor] = []

    def make(dtype: torch.dtype) -> torch.Tensor:
        if made and draw(st.integers(0, 5)) == 0:
            return draw(st.sampled_from(made))
        made.append(torch.full((draw(st.integers(1, 5)),), len(made) + 1).to(dtype))
        return made[-1]

    return pytree.tree_map(make, tree)


def chosen(draw: Any, paths: tuple[str, ...]) -> Any:
    """Units as a spec may give them: found, patterns, names, a function."""
    some = draw(st.lists(st.sampled_from(paths), max_size=3, unique=True))
    names = draw(st.lists(st.one_of(KEYS.map(str), st.sampled_from(paths)), min_size=3, max_size=3, unique=True))
    kind = draw(st.sampled_from(["found", "patterns", "groups", "names", "function"]))
    if kind == "names" and some:
        return dict(zip(names, some, strict=False))
    if kind == "function":
        return dict(zip(some, names, strict=False)).get
    return {"patterns": some or None, "groups": [tuple(some)] if some else None}.get(kind)


@pytest.mark.filterwarnings("ignore:What no block covers")
@settings(max_examples=100, deadline=None)
@given(TREES, st.data())
def test_every_leaf_is_found_where_it_was_put(shape: Any, data: Any) -> None:
    tree = numbered(shape, data.draw)
    plain = Spec(fsdp.local_mesh())
    paths = fsdp.make_layout(tree, plain).paths
    try:
        spec = Spec(fsdp.local_mesh(), units=chosen(data.draw, paths))
        layout = fsdp.make_layout(tree, spec)
    except SpecError as error:
        if not re.search("is in two units|Choose another name", str(error)):  # what only the user can decide
            raise
        spec, layout = plain, fsdp.make_layout(tree, plain)

    units = [unit.name for unit in layout.units]
    buckets = [bucket.name for unit in layout.units for bucket in unit.buckets]
    leaves = [leaf.path for unit in layout.units for bucket in unit.buckets for leaf in bucket.leaves]
    assert len(set(units)) == len(units)
    assert len(set(buckets)) == len(buckets)
    assert all(buckets)
    assert sorted(leaves) == sorted(set(layout.source))
    assert len(set(layout.paths)) == len(layout.paths) == len(pytree.tree_leaves(tree))
    for unit in layout.units:
        assert len(set(unit.keys)) == len(unit.keys)
        assert sorted(leaf.path for bucket in unit.buckets for leaf in bucket.leaves) == sorted(unit.paths)

    state = fsdp.shard(tree, spec)
    same(fsdp.full_params(state), tree)
    state, params = fsdp.unshard(state)
    same(params, tree)
    values = dict(zip(layout.paths, pytree.tree_leaves(tree), strict=True))
    for unit in layout.units:
        state, weights = fsdp.unshard(state, unit.name)
        assert list(weights) == list(unit.keys)
        same(list(weights.values()), [values[path] for path in unit.paths])
        state = fsdp.release(state, unit.name)


def same(found: Any, expected: Any) -> None:
    assert pytree.tree_structure(found) == pytree.tree_structure(expected)
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        assert torch.equal(a, b.to(a.dtype))


def steps(tree: Any, spec: Spec) -> Iterator[Any]:
    """Weights after steps of gradients that are the weights themselves, whole and by unit."""
    state = fsdp.shard(tree, spec, fsdp.sgd(lr=0.5))
    yield fsdp.full_params(fsdp.step(fsdp.reduce(state, tree)))
    state = fsdp.shard(tree, spec, fsdp.sgd(lr=0.5))
    values = dict(zip(state.layout.paths, pytree.tree_leaves(tree), strict=True))
    for unit in reversed(state.layout.units):
        state = fsdp.reduce(
            state, {key: values[path] for key, path in zip(unit.keys, unit.paths, strict=True)}, unit.name
        )
    yield fsdp.full_params(fsdp.step(state))


def full(*numbers: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


COLLIDE: dict[str, tuple[Any, Any, list[str], list[str]]] = {
    "a leaf as a bucket": (
        {"w": {"a": full(1), "b": full(2, dtype=torch.bfloat16)}, "w:0": full(3)},
        None, ["w", "w:0"], ["w::0", "w::1", "w:0"],
    ),
    "a bucket as a unit that comes later": (
        {"w": {"a": full(1), "b": full(2, dtype=torch.bfloat16)}, "w::0": full(3), "w:1": full(4)},
        None, ["w", "w::0", "w:1"], ["w:::0", "w:::1", "w::0", "w:1"],
    ),
    "a leaf above a unit": ({"a": full(1), "a.b": full(2)}, ["a.b"], ["a", "a.b"], ["a", "a.b"]),
    "a leaf above a block": ({"a": full(1), "a.0.b": full(2)}, None, ["a", "a.0"], ["a", "a.0"]),
    "one path": ({"a": {"b": full(1)}, "a.b": full(2)}, None, ["a"], ["a"]),
    "a number and its text": ({0: full(1), "0": full(2)}, None, ["0"], ["0"]),
    "no key": ({"": full(1), "a": full(2)}, None, ["", "a"], [":0", "a"]),
    "no key, and a name as its bucket's": ({"": full(1), ":0": full(2)}, None, ["", ":0"], ["::0", ":0"]),
}  # fmt: skip


@pytest.mark.parametrize("case", COLLIDE)
def test_names_that_once_met(case: str) -> None:
    tree, patterns, units, buckets = COLLIDE[case]
    spec = Spec(fsdp.local_mesh(), units=patterns)
    layout = fsdp.make_layout(tree, spec)
    assert [unit.name for unit in layout.units] == units
    assert list(layout.buckets) == buckets
    for found in steps(tree, spec):
        same(found, pytree.tree_map(lambda x: x / 2, tree))


def test_a_part_of_the_tree_with_the_name_of_a_tied_leaf() -> None:
    shared = full(1)
    tree: Any = {"wte": shared, "wte.bias": full(2), "wte.*": full(3), "head": shared}
    layout = fsdp.make_layout(tree, Spec({"data": 2}))
    assert {unit.name: (unit.paths, unit.keys) for unit in layout.units} == {
        "wte": (("wte",), ("wte",)),
        "wte.*": (("wte.bias", "wte.*"), ("bias", "*")),
    }
    tree = {"wte": shared, "wte.bias": full(2), "head": shared, "wte.*": full(3), "a": {"b": full(4)}}
    names = [unit.name for unit in fsdp.make_layout(tree, Spec({"data": 2}, units=["a.b", "wte.[*]"])).units]
    assert names == ["wte", "wte.bias", "wte.*", "a.b"]


@pytest.mark.parametrize(
    ("tree", "units", "text"),
    [
        ({"a.w": 1, "b.w": 2}, {"b": "a"}, "the name 'b' is also the unit of 'b.w', which no pattern covers. Cho"),
        ({"a.w": 1, "b": 2, "c": 2}, {"b": "a"}, "the name 'b' is also the unit of 'b', a tied leaf, which is a"),
        ({"a": 1, "b": 2, "a+b": 3}, [("a", "b")], r"the name 'a\+b' is also the unit of 'a\+b', which no patt"),
        ({"a.w": 1, "b.w": 2}, lambda path: "b" if path == "a.w" else None, "the name 'b' is also the unit of 'b.w'"),
    ],
)  # fmt: skip
def test_a_name_that_the_tree_has_already(tree: dict[str, int], units: Any, text: str) -> None:
    numbers = {n: full(n) for n in tree.values()}
    with pytest.raises(SpecError, match=text):
        fsdp.make_layout({path: numbers[n] for path, n in tree.items()}, Spec({"data": 2}, units=units))


def test_any_path_is_a_pattern_that_matches_it() -> None:
    tree = {"a[0]": full(1), "a[!b]": full(2), "*": full(3), "?": full(4)}
    for path in tree:
        labels = {unit.name: unit.buckets[0].leaves[0].label for unit in
                  fsdp.make_layout(tree, Spec({"data": 2}, labels={path: "x"})).units}  # fmt: skip
        assert labels[path] == "x"


def test_paths_that_read_alike_are_told_apart_in_any_order() -> None:
    tree = {"a": {"b": full(1)}, "a.b": full(2), "c": full(3)}
    other = {"c": full(3), "a.b": full(2), "a": {"b": full(1)}}
    expected = {"a.b.['a']['b']": 1, "a.b.['a.b']": 2, "c": 3}
    for one in (tree, other):
        values = [int(leaf) for leaf in pytree.tree_leaves(one)]
        assert dict(zip(fsdp.make_layout(one, Spec({"data": 2})).paths, values, strict=True)) == expected


def test_gradients_in_another_order_go_to_their_leaves() -> None:
    tree: Any = {0: full(1), "0": full(2), "0.['0']": full(3)}
    state = fsdp.shard(tree, Spec(fsdp.local_mesh()), fsdp.sgd(lr=1.0))
    state = fsdp.step(fsdp.reduce(state, {key: tree[key] for key in reversed(tree)}))
    same(fsdp.full_params(state), {key: full(0) for key in tree})


def test_a_parameter_and_a_buffer_of_one_name(tmp_path: Path) -> None:
    """A state may have them. What goes by name alone is refused."""
    state = fsdp.shard({"a": {"b": full(1)}}, Spec(fsdp.local_mesh()), buffers={"a.b": full(2), "c": full(3)})
    with pytest.raises(TreeError, match=r"state_dict: a parameter and a buffer are both called 'a\.b'"):
        fsdp.state_dict(state)
    since, there = fsdp.snapshot(state), fsdp.save(state, tmp_path / "there")
    uses: dict[str, Callable[[], Any]] = {
        "stream": lambda: fsdp.stream(state), "delta": lambda: fsdp.delta(since, state),
        "save_dcp": lambda: fsdp.save_dcp(state, tmp_path / "dcp"),
    }  # fmt: skip
    for what, use in uses.items():
        with pytest.raises(SpecError, match=rf"{what}: a parameter and a buffer are both called 'a\.b'"):
            use()
    with pytest.raises(fsdp.CheckpointError, match=r"a parameter and a buffer .* both called 'a\.b'\. Read it by"):
        fsdp.open_checkpoint(there)
    state = fsdp.load(there, like=state)
    same(fsdp.full_params(state), {"a": {"b": full(1)}})
    same(state.buffers, {"a.b": full(2), "c": full(3)})


def test_names_that_read_like_a_place_of_ranks(tmp_path: Path) -> None:
    """Files call what ranks have of their own "w of expert 1". A leaf, a buffer or an extra may be called so, too."""
    params, held = {"w": full(1), "w of b 1": full(2)}, {"": full(4), "n of b 1": full(3)}
    spec = Spec(fsdp.local_mesh())
    state = fsdp.step(fsdp.reduce(fsdp.shard(params, spec, fsdp.adamw(lr=0.1), buffers=held), params))
    state = fsdp.replace_extras(state, **{"e of b 1": full(5)})
    there = fsdp.open_checkpoint(fsdp.save(state, tmp_path / "there"))
    same(dict(there), {**fsdp.full_params(state), **held})
    assert {*there.optimizer} == {*params}
    assert there.left == ("extras.e of b 1",)
    fresh = fsdp.load_weights(fsdp.shard(params, spec, buffers=held), there)
    same([fsdp.full_params(fresh), fresh.buffers], [fsdp.full_params(state), held])


def test_names_that_are_no_text() -> None:
    spec = Spec(fsdp.local_mesh())
    named = Spec(fsdp.local_mesh(), units={"\ud800": ["w"]})
    for key, one, buffers in (("\ud800", spec, {}), ("w", spec, {"\ud800": full(1)}), ("w", named, {})):
        with pytest.raises(TreeError, match=r"a (leaf|buffer|unit) is called '\\ud800', which is no Unicode text"):
            fsdp.shard({key: full(1)}, one, buffers=buffers)
