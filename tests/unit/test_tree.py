"""Paths, patterns and tables: the vocabulary that every error and every rule speaks."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_fsdp._common import tree as _tree


class Layer(NamedTuple):
    w: Any
    b: Any


@dataclass
class Block:
    attn: Any
    mlp: Any


pytree.register_dataclass(Block)


class Box:
    """Registered by the test, with both libraries."""

    def __init__(self, first: Any, second: Any, tag: str = "") -> None:
        self.first, self.second, self.tag = first, second, tag


_tree.register(
    Box,
    lambda b: ((b.first, b.second), b.tag),
    ("first", "second"),
    lambda tag, children: Box(children[0], children[1], tag),
)


# -------------------------------------------------------------------------------- paths


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"a": 1, "b": {"c": 2}}, ("a", "b.c")),
        ({"a": [1, 2], "b": (3,)}, ("a.0", "a.1", "b.0")),
        ({"layer": Layer(1, [2, 3])}, ("layer.w", "layer.b.0", "layer.b.1")),
        ({"block": Block({"q": 1}, 2)}, ("block.attn.q", "block.mlp")),
        ({"blocks.0.w": 1, "head": 2}, ("blocks.0.w", "head")),
        ({0: 1, 7: {3: 2}}, ("0", "7.3")),
        (OrderedDict(z=1, a=2), ("z", "a")),
        ({"z": 1, "a": None, "b": 3}, ("z", "a", "b")),  # as inserted; None is a leaf
        ({"box": Box(1, 2)}, ("box.first", "box.second")),
        ([], ()),
    ],
)
def test_paths(tree: Any, paths: tuple[str, ...]) -> None:
    found, leaves, treedef = _tree.flatten(tree)
    assert found == paths
    assert leaves == pytree.tree_leaves(tree)
    assert treedef == pytree.tree_structure(tree)


def test_prefixes() -> None:
    assert list(_tree.prefixes("a.b.c")) == ["a", "a.b", "a.b.c"]
    assert list(_tree.prefixes("a")) == ["a"]


# -------------------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("pattern", "path", "found"),
    [
        ("blocks.*", "blocks.0.mlp.weight", "blocks.0"),
        ("blocks", "blocks.0.mlp.weight", "blocks"),
        ("blocks.0", "blocks.0.mlp.weight", "blocks.0"),
        ("blocks.0", "blocks.01.weight", None),
        ("blocks.1", "blocks.10.weight", None),
        ("block", "blocks.0.weight", None),
        ("*", "anything.at.all", "anything"),
        ("*norm*", "blocks.0.norm1.weight", "blocks.0.norm1"),
        ("*.bias", "head.weight", None),
        ("*.bias", "blocks.0.mlp.bias", "blocks.0.mlp.bias"),
        ("*.mlp", "blocks.0.mlp.bias", "blocks.0.mlp"),
        ("blocks.?", "blocks.3.w", "blocks.3"),
        ("blocks.?", "blocks.13.w", None),
        ("blocks.[01]", "blocks.1.w", "blocks.1"),
        ("blocks.[01]", "blocks.2.w", None),
        ("weight", "head.weight", None),
        ("Head", "head.weight", None),
        ("head.weight.more", "head.weight", None),
    ],
)
def test_a_pattern_finds_the_shortest_leading_part(pattern: str, path: str, found: str | None) -> None:
    assert _tree.match(pattern, path) == found


parts = st.lists(st.text("abc01", min_size=1, max_size=3), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(parts)
def test_every_leading_part_matches_itself_and_its_star(keys: list[str]) -> None:
    path = ".".join(keys)
    for prefix in _tree.prefixes(path):
        assert _tree.match(prefix, path) == prefix
        assert _tree.match("*", path) == keys[0]
        assert _tree.match(prefix + ".nothing", path) is None


# -------------------------------------------------------------------------------- registration


def test_a_registered_class_is_a_node_of_both_libraries() -> None:
    box = Box(torch.ones(2), {"x": torch.zeros(1)}, tag="kept")
    maps: list[Any] = [pytree.tree_map, optree.tree_map]
    for double in maps:
        twice = double(lambda t: t * 2, box)
        assert type(twice) is Box
        assert twice.tag == "kept"
        assert twice.first.tolist() == [2.0, 2.0]
        assert twice.second["x"].tolist() == [0.0]


def test_both_libraries_name_the_children_alike() -> None:
    box: Any = Box(1, [2, 3])
    ours = _tree.flatten(box)[0]
    assert ours == ("first", "second.0", "second.1")
    assert [".".join(map(str, path)) for path in optree.tree_paths(box)] == list(ours)


def test_the_context_decides_equality_of_structures() -> None:
    same, other = (pytree.tree_structure(Box(1, 2, tag=tag)) for tag in ("a", "b"))
    assert same == pytree.tree_structure(Box(5, 6, tag="a"))
    assert same != other
    one: Any = Box(1, 2, tag="a")
    two: Any = Box(1, 2, tag="b")
    assert optree.tree_structure(one) != optree.tree_structure(two)


# -------------------------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (1 << 40, "1.0 TiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_bytes_text(n: int, text: str) -> None:
    assert _tree.bytes_text(n) == text


def test_a_table_aligns_text_to_the_left_and_numbers_to_the_right() -> None:
    assert _tree.table(("name", "bytes", "what"), [("w", 5, "x"), ("bias", 1024, "yy")]).splitlines() == [
        "name  bytes  what",
        "----  -----  ----",
        "w         5  x",
        "bias   1024  yy",
    ]


def test_a_dash_counts_as_a_number_and_a_word_does_not() -> None:
    lines = _tree.table(("a", "n", "s"), [("x", "-", "frozen"), ("y", "12.5 KiB", "1 B")]).splitlines()
    assert lines[2] == "x         -  frozen"
    assert lines[3] == "y  12.5 KiB  1 B"


def test_a_table_without_rows_is_its_header() -> None:
    assert _tree.table(("a", "long"), []) == "a  long\n-  ----"
