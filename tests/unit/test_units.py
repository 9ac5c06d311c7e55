"""Units: which leaves are gathered together, found from paths, from patterns or from module types."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn

import functional_fsdp as fsdp
from functional_fsdp import Spec, SpecError

Tree = dict[str, torch.Tensor]


def leaves(*paths: str, **sizes: int) -> Tree:
    """A flat tree with these paths; 8 elements each, unless a size is given (with _ for the dots)."""
    tree = {path: torch.empty(8, device="meta") for path in paths}
    return tree | {path.replace("_", "."): torch.empty(n, device="meta") for path, n in sizes.items()}


def grouped(tree: Any, **spec: Any) -> dict[str, tuple[str, ...]]:
    """{unit: paths} of the layout of `tree`; toy trees have small blocks, which is not what is looked at here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="What no block covers")
        return {unit.name: unit.paths for unit in fsdp.make_layout(tree, Spec({"data": 2}, **spec)).units}


GPT = (
    "wte.weight",
    "wpe.weight",
    *(f"blocks.{i}.{leaf}" for i in range(3) for leaf in ("ln.weight", "attn.qkv", "mlp.up.weight", "mlp.up.bias")),
    "ln_f.weight",
)


# -------------------------------------------------------------------------------- found from paths


def test_repeated_blocks_and_top_level_names() -> None:
    found = grouped(leaves(*GPT, **{"head_weight": 4}))
    assert list(found) == ["wte", "wpe", "blocks.0", "blocks.1", "blocks.2", "ln_f", "head"]
    assert found["blocks.1"] == tuple(path for path in GPT if path.startswith("blocks.1."))
    assert found["head"] == ("head.weight",)


UNET = {
    "inc.0.weight": 200, "inc.1.weight": 8, "inc.3.weight": 400, "inc.4.weight": 16, "down.0.weight": 800,
    "down.1.weight": 16, "down.3.weight": 1600, "down.4.weight": 32, "deep.0.weight": 3200, "deep.1.weight": 32,
    "deep.3.weight": 6400, "deep.4.weight": 64, "up.up.weight": 1600, "up.conv.0.weight": 1600, "up.conv.1.weight": 32,
    "outc.weight": 16,
}  # fmt: skip


def test_small_numbered_layers_join_the_part_that_they_are_in() -> None:
    tree = {path: torch.empty(n, device="meta") for path, n in UNET.items()}
    found = grouped(tree)
    alone = [path.removesuffix(".weight") for path in UNET if path.startswith("deep")]  # together they outweigh all
    assert list(found) == ["inc", "down", *alone, "up", "outc"]
    assert found["up"] == ("up.up.weight", "up.conv.0.weight", "up.conv.1.weight")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"h.0.w": 9, "h.1.w": 9, "head.w": 90}, ["h.0", "h.1", "head"]),  # equal ones, as layers are
        ({"h.0.a.w": 90, "mlp.0.w": 40, "mlp.2.w": 50}, ["h.0", "mlp"]),
        ({"h.0.a.w": 90, "mlp.0.w": 40, "mlp.2.w": 51}, ["h.0", "mlp.0", "mlp.2"]),  # larger than the largest block
        ({"h.0.a.w": 90, "net.0.w": 4, "net.1.a.w": 5}, ["h.0", "net.0", "net.1"]),  # a block is in between
        ({"h.0.a.w": 90, "net.0.w": 4, "net.0.b": 1}, ["h.0", "net.0"]),  # one alone
        ({"0.w": 4, "1.w": 1, "2.w": 9}, ["0", "1", "2"]),  # the model itself is no part
    ],
)
def test_what_numbered_layers_join(sizes: dict[str, int], expected: list[str]) -> None:
    assert list(grouped({path: torch.empty(n, device="meta") for path, n in sizes.items()})) == expected


PAIR = [{"w": torch.empty(2)}, {"w": torch.empty(2)}]
FOUND: list[tuple[Any, dict[str, Any], Any]] = [  # of a tree and a spec: the units' names, or their paths too
    (leaves("stages.0.layers.0.w", "stages.0.layers.1.w", "stages.1.layers.0.w"), {}, ["stages.0", "stages.1"]),
    (leaves("model.embed", "model.layers.0.w", "model.layers.1.w", "lm.w"), {},
     ["model.embed", "model.layers.0", "model.layers.1", "lm"]),  # deep in the tree
    (leaves("z.0.w", "a.w", "z.0.b", "m.0.w"), {}, {"z.0": ("z.0.w", "z.0.b"), "a": ("a.w",), "m.0": ("m.0.w",)}),
    ({"scales": [torch.empty(3), torch.empty(4)]}, {}, {"scales": ("scales.0", "scales.1")}),  # a list of tensors
    ({f"scales.{k}": p for k, p in nn.ParameterList([torch.empty(3), torch.empty(4)]).named_parameters()}, {},
     {"scales": ("scales.0", "scales.1")}),
    (PAIR, {}, {"0": ("0.w",), "1": ("1.w",)}),
    ({"layers": PAIR, "out": torch.empty(1)}, {}, ["layers.0", "layers.1", "out"]),
    (leaves("blocks.0.w", "blocks.1.w", "out.w"), {},  # keys with dots are as nested ones
     grouped({"blocks": PAIR, "out": {"w": torch.empty(8)}})),
    (leaves("fc1.weight", "fc1.bias", "fc2.weight"), {}, ["fc1", "fc2"]),  # no blocks at all
    (leaves("net.embed.w", "net.embed.norm.w", "net.h.0.w", "net.norm.w", "net.scale", "head.a.w"), {},
     {"net.embed": ("net.embed.w", "net.embed.norm.w"), "net.h.0": ("net.h.0.w",), "net.norm": ("net.norm.w",),
      "net.scale": ("net.scale",), "head": ("head.a.w",)}),  # what no block covers, where blocks are below
    (leaves(*GPT), {"units": ["blocks.0"]}, ["wte", "wpe", "blocks.0", "blocks.1", "blocks.2", "ln_f"]),
    (leaves(*GPT), {"units": ["blocks.*", "blocks.*"]}, grouped(leaves(*GPT), units=["blocks.*"])),
    (leaves(*GPT), {"units": [("blocks.*",)]},
     {"wte": GPT[:1], "wpe": GPT[1:2], "blocks.*": GPT[2:-1], "ln_f": GPT[-1:]}),
    (leaves(*GPT), {"units": [("wte", "wpe"), "blocks.*"]}, ["wte+wpe", "blocks.0", "blocks.1", "blocks.2", "ln_f"]),
    (leaves(*GPT), {"units": {"embeddings": ["wte", "wpe"], "trunk": "blocks.*"}},
     {"embeddings": GPT[:2], "trunk": GPT[2:-1], "ln_f": GPT[-1:]}),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "spec", "expected"), FOUND)
def test_units_of_a_tree(tree: Any, spec: dict[str, Any], expected: Any) -> None:
    found = grouped(tree, **spec)
    assert (found if isinstance(expected, dict) else [*found]) == expected


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["h.0.w", "h.1.w", "h.10.w", "h.2.w"], ["h.0", "h.1", "h.2", "h.10"]),
        (["wte", "h.0.w", "h.1.w", "h.10.w", "h.2.w", "head"], ["wte", "h.0", "h.1", "h.2", "h.10", "head"]),
        (["b_0.w", "b_10.w", "b_9.w", "head.w", "wte.w"], ["b_0", "b_9", "b_10", "head", "wte"]),
        (["a.0.w", "a.10.w", "a.2.w", "b.1.w", "b.11.w", "b.3.w"], ["a.0", "a.2", "a.10", "b.1", "b.3", "b.11"]),
        (["h.10.w", "h.9.w"], ["h.9", "h.10"]),  # all of the tree is sorted
        (["wte", "h.10.w", "h.9.w"], ["wte", "h.10", "h.9"]),  # it is not
        (["h.2.w", "h.1.w", "h.0.w"], ["h.2", "h.1", "h.0"]),  # nor as texts
        (["h.3.w", "h.20.w", "h.1.w"], ["h.3", "h.20", "h.1"]),
        (["a.0.w", "b.0.w", "a.10.w", "b.10.w", "a.2.w", "b.2.w"], ["a.0", "b.0", "a.10", "b.10", "a.2", "b.2"]),
    ],
)
def test_numbered_units_come_in_the_order_of_their_numbers_where_a_library_sorted_them_as_texts(
    paths: list[str], expected: list[str]
) -> None:
    found = fsdp.make_layout(leaves(*paths), Spec({"data": 2}))
    assert [unit.name for unit in found.units] == expected
    assert found.paths == tuple(paths)
    assert [use.unit for use in fsdp.make_plan(found).uses][: len(expected)] == expected


def test_numbers_at_several_levels() -> None:
    paths = sorted(f"stages.{i}.layers.{j}.w" for i in (0, 2, 10) for j in (0, 2, 10))
    found = list(grouped(leaves(*paths), units=["stages.*.layers.*"]))
    assert found == [f"stages.{i}.layers.{j}" for i in (0, 2, 10) for j in (0, 2, 10)]


def test_a_tied_leaf_is_used_again_where_its_block_comes() -> None:
    shared = torch.empty(8, device="meta")
    tree = {key: torch.empty(8, device="meta") for key in ("h.0.w", "h.1.w", "h.10.w", "h.2.w", "wte")}
    tree = dict(sorted({**tree, "h.0.s": shared, "h.10.s": shared}.items()))
    found = fsdp.make_layout(tree, Spec({"data": 2}))
    uses = [use.unit for use in fsdp.make_plan(found).uses]
    forward = ["h.0.s", "h.0", "h.1", "h.2", "h.0.s", "h.10", "wte"]
    assert uses == [*forward, *reversed(forward)]
    numbered = {key: tree[key] for key in ("h.0.s", "h.0.w", "h.1.w", "h.2.w", "h.10.s", "h.10.w", "wte")}
    assert [use.unit for use in fsdp.make_plan(fsdp.make_layout(numbered, Spec({"data": 2}))).uses] == uses


# -------------------------------------------------------------------------------- containers


def blocks(inside: str, names: Sequence[str], numel: int = 8) -> Tree:
    """Blocks of two linear layers at these names."""
    parts = ("up.weight", "up.bias", "down.weight")
    shapes = {"up.weight": (numel, 4), "up.bias": (4,), "down.weight": (4, numel)}
    return {f"{inside}{name}.{part}": torch.empty(shapes[part], device="meta") for name in names for part in parts}


def numbers(count: int) -> list[str]:
    return [str(i) for i in range(count)]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (blocks("0.layers.", numbers(6)) | leaves("1.weight"), [*(f"0.layers.{i}" for i in range(6)), "1"]),
        (  # SentenceTransformer
            leaves("0.bert.embed.weight") | blocks("0.bert.layer.", numbers(4)) | leaves("1.weight"),
            ["0.bert.embed", *(f"0.bert.layer.{i}" for i in range(4)), "1"],
        ),
        (  # towers, of two kinds
            blocks("towers.0.layers.", numbers(4)) | leaves("towers.0.head.w") | blocks("towers.1.h.", numbers(3), 9),
            [*(f"towers.0.layers.{i}" for i in range(4)), "towers.0.head", *(f"towers.1.h.{i}" for i in range(3))],
        ),
        (  # stages: the large one is divided
            {k: v for s, n in enumerate((2, 2, 18, 2)) for k, v in blocks(f"stages.{s}.", numbers(n)).items()},
            ["stages.0", "stages.1", *(f"stages.2.{i}" for i in range(18)), "stages.3"],
        ),
        (blocks("features.", ["block0", "block1", "block2"]), [f"features.block{i}" for i in range(3)]),
        (  # DenseNet: the larger block is divided, into layers whose shapes differ
            leaves("f.conv0.weight")
            | blocks("f.block1.", ["layer1", "layer2"], 4)
            | {k: v for i in range(5) for k, v in blocks("f.block2.", [f"layer{i}"], 8 + 2 * i).items()}
            | leaves("classifier.weight"),
            ["f.conv0", "f.block1", *(f"f.block2.layer{i}" for i in range(5)), "classifier"],
        ),
        (  # RegNet: the first block of a stage has a form of its own
            blocks("s1.", ["b1"], 2) | leaves("s2.b1.proj.weight") | blocks("s2.", ["b1", "b2", "b3", "b4"]),
            ["s1", "s2.b1", "s2.b2", "s2.b3", "s2.b4"],
        ),
        (  # a container in a container
            blocks("model.0.0.net.", ["a", "b", "c", "d"]) | leaves("model.0.1.weight", "model.1.weight"),
            [*(f"model.0.0.net.{i}" for i in "abcd"), "model.0.1", "model.1"],
        ),
        (  # convolutions in a row
            {f"0.features.{i}.weight": torch.empty(3, 3, device="meta") for i in range(0, 10, 2)} | leaves("1.weight"),
            [*(f"0.features.{i}" for i in range(0, 10, 2)), "1"],
        ),
    ],
)
def test_a_container_is_divided_by_what_repeats_in_it(tree: Tree, expected: list[str]) -> None:
    found = grouped(tree)
    assert list(found) == expected
    assert [path for paths in found.values() for path in paths] == list(tree)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (  # experts repeat in each of three blocks
            {k: v for i in range(3) for k, v in blocks(f"h.{i}.experts.", numbers(4)).items()},
            ["h.0", "h.1", "h.2"],
        ),
        (blocks("h.", numbers(2)), ["h.0", "h.1"]),  # more than a third, and nothing repeats in it
        (leaves("h.0.mlp.0.weight", "h.0.mlp.2.weight", "h.0.out.weight"), ["h.0"]),  # layers of one block
        (leaves("net.q.weight", "net.k.weight", "net.v.weight", "net.o.weight"), ["net"]),
    ],
)
def test_what_is_no_container_is_not_divided(tree: Tree, expected: list[str]) -> None:
    assert list(grouped(tree)) == expected


def test_a_container_has_the_units_of_the_model_in_it() -> None:
    model = nn.ModuleDict({"emb": nn.Embedding(30, 8), "stack": nn.ModuleList([Block() for _ in range(5)])})
    alone = grouped(fsdp.functionalize(model)[0])
    inside = grouped(fsdp.functionalize(nn.Sequential(model, nn.Linear(8, 2)))[0])
    assert list(inside) == [*(f"0.{name}" for name in alone), "1"]


def test_most_of_a_model_in_one_unit_warns() -> None:
    tree = {f"net.{k}.weight": torch.empty(512, 256 + i, device="meta") for i, k in enumerate("abc")}
    tree |= leaves("head.weight")
    with pytest.warns(UserWarning, match=r"The unit 'net' has 100% of all bytes \(1.5 MiB of 1.5 MiB\)") as caught:
        fsdp.make_layout(tree, Spec({"data": 2}))
    assert len(caught) == 1
    assert "nothing was found that repeats in it. Divide it: Spec(units=['net.*', ...])" in str(caught[0].message)
    fsdp.make_layout(tree, Spec({"data": 2}, units=["net"]))  # warnings are errors here
    fsdp.make_layout(tree, Spec({"data": 2}, units=["net.*"]))


def test_what_is_printed_says_how_units_are_found_and_which_is_the_largest() -> None:
    spec = Spec({"data": 2})
    assert "found by what repeats in the paths; small numbered layers joined, containers divided" in repr(spec)
    last = repr(fsdp.make_layout(blocks("0.h.", numbers(4)) | leaves("1.weight"), spec)).splitlines()[-1]
    assert last == "5 units, the largest of 24% of all elements: '0.h.0'"


# -------------------------------------------------------------------------------- patterns


def test_a_pattern_makes_a_unit_of_each_prefix_that_it_matches() -> None:
    found = grouped(leaves(*GPT), units=["blocks.*.attn", "blocks.*.mlp"])
    assert list(found)[:2] == ["wte", "wpe"]
    assert found["blocks.1.attn"] == ("blocks.1.attn.qkv",)
    assert found["blocks.1.mlp"] == ("blocks.1.mlp.up.weight", "blocks.1.mlp.up.bias")
    assert found["blocks.1.ln"] == ("blocks.1.ln.weight",)


@pytest.mark.parametrize(
    "units", [["block.*"], ["blocks.*", "hed"], [("wte", "wpx")], {"a": "blocks.9"}, {"a": ["wte", "nope"]}]
)
def test_a_pattern_that_matches_nothing(units: Any) -> None:
    with pytest.raises(SpecError, match=r"Spec\(units\): the pattern '.*' matches nothing\. .* wte\.weight, wp"):
        grouped(leaves(*GPT), units=units)


@pytest.mark.parametrize("rule", ["labels", "trainable", "placement"])
def test_other_rules_that_match_nothing(rule: str) -> None:
    value: Any = fsdp.ddp("data") if rule == "placement" else False if rule == "trainable" else "x"
    with pytest.raises(SpecError, match=rf"Spec\({rule}\): the pattern 'nope\.\*' matches nothing"):
        grouped(leaves("a.w"), **{rule: {"nope.*": value, "*": value}})


@pytest.mark.parametrize(
    ("units", "one", "two"),
    [
        (["blocks.*", "blocks.0.mlp"], "blocks.0", "blocks.0.mlp"),
        ({"a": "blocks.0", "b": "blocks.*"}, "a", "b"),
        ([("wte", "blocks.0"), "blocks.*"], "wte+blocks.0", "blocks.0"),
    ],
)
def test_a_leaf_in_two_units(units: Any, one: str, two: str) -> None:
    with pytest.raises(SpecError) as caught:
        grouped(leaves(*GPT), units=units)
    text = str(caught.value)
    assert text.startswith("Spec(units): the leaf 'blocks.0.")
    assert f"is in two units, '{one}' and '{two}'. A leaf belongs to one unit: make the patterns disjoint." in text


# -------------------------------------------------------------------------------- functions


def halves(path: str) -> str | None:
    number = path.split(".")[1]
    return f"half {int(number) // 2}" if number.isdigit() else None


def by(names: dict[str, str]) -> Any:
    return lambda path: names.get(path)


def test_a_function_names_units() -> None:
    tree = leaves("h.0.w", "h.1.w", "h.2.w", "h.2.b", "x.w", "x.b")
    found = grouped(tree, units=halves)
    assert found == {"half 0": ("h.0.w", "h.1.w"), "half 1": ("h.2.w", "h.2.b"), "x": ("x.w", "x.b")}
    assert grouped(tree, units=lambda path: "all") == {"all": tuple(tree)}
    assert grouped(tree, units=lambda path: None) == {"h": tuple(tree)[:4], "x": tuple(tree)[4:]}
    assert list(grouped(tied("blocks.0.w"), units=lambda path: "all")) == ["wte.weight", "all"]


def test_a_function_that_gives_no_name() -> None:
    with pytest.raises(SpecError, match=r"Spec\(units\): what the function gave for the leaf 'a\.w': .* and got 3"):
        grouped(leaves("a.w"), units=lambda path: 3)


def test_specs_with_equal_functions_are_equal() -> None:
    mesh = {"data": 2}
    one, two = Spec(mesh, units=by({"a": "b"})), Spec(mesh, units=by({"a": "b"}))
    assert one == two
    assert hash(one) == hash(two)
    assert one != Spec(mesh, units=by({"a": "c"}))
    assert one != Spec(mesh, units=halves)
    assert one != Spec(mesh)
    assert pickle.loads(pickle.dumps(Spec(mesh, units=halves))) == Spec(mesh, units=halves)
    assert copy.deepcopy(one) == one
    assert "by the function test_units.halves" in str(Spec(mesh, units=halves))


def test_what_of_a_function_cannot_be_compared_is_said() -> None:
    lock: Any = threading.Lock()
    spec = Spec({"data": 2}, units=by(lock))
    assert "(ranks cannot compare function.names: _thread.lock)" in str(spec)
    assert spec != Spec({"data": 2}, units=by(lock))  # another function, and who knows
    assert spec == copy.copy(spec)


# -------------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("tree", "spec", "unit", "keys"),
    [
        (leaves(*GPT), {}, "blocks.2", ("ln.weight", "attn.qkv", "mlp.up.weight", "mlp.up.bias")),
        (leaves(*GPT), {}, "wte", ("weight",)),
        (leaves("wpe", "a.w"), {}, "wpe", ("wpe",)),
        (leaves("wte.weight", "wpe.weight", "x"), {"units": [("wte", "wpe")]}, "wte+wpe", ("wte.weight", "wpe.weight")),
        (leaves("a.b.c", "x"), {"units": ["a.b.c"]}, "a.b.c", ("c",)),
    ],
)
def test_keys_are_relative_to_the_unit(tree: Tree, spec: dict[str, Any], unit: str, keys: tuple[str, ...]) -> None:
    assert fsdp.make_layout(tree, Spec({"data": 2}, **spec)).by_name[unit].keys == keys


def test_the_weights_of_a_block_bind_to_its_module() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    params, skeleton = fsdp.functionalize(model)
    for unit in fsdp.make_layout(params, Spec({"data": 2})).units:
        weights = {key: params[path] for key, path in zip(unit.keys, unit.paths, strict=True)}
        part = skeleton.get_submodule(unit.name)
        x = torch.ones(1, int(part.in_features))  # type: ignore[arg-type]
        assert torch.equal(fsdp.bind(part, weights)(x), model.get_submodule(unit.name)(x))


# -------------------------------------------------------------------------------- units(model, ...)


class Block(nn.Module):
    def __init__(self, inner: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        if inner:
            self.inner = Block()


def test_units_of_types_are_the_outermost_submodules() -> None:
    model = nn.ModuleDict({"emb": nn.Embedding(3, 2), "stack": nn.ModuleList([Block(inner=True), Block()])})
    assert fsdp.units(model, Block) == ["stack.0", "stack.1"]
    assert fsdp.units(model, Block, nn.Embedding) == ["emb", "stack.0", "stack.1"]
    assert fsdp.units(model, nn.Linear) == ["stack.0.fc", "stack.0.inner.fc", "stack.1.fc"]


def test_units_of_types_do_not_confuse_names_that_begin_alike() -> None:
    model = nn.ModuleDict({"block": Block(), "block2": Block(), "block_3": Block()})
    assert fsdp.units(model, Block) == ["block", "block2", "block_3"]


def test_the_model_itself_is_no_unit() -> None:
    assert fsdp.units(Block(inner=True), Block) == ["inner"]


def test_units_of_types_go_into_a_spec() -> None:
    model = nn.ModuleDict({"emb": nn.Embedding(3, 2), "stack": nn.ModuleList([Block(), Block()])})
    params, skeleton = fsdp.functionalize(model)
    assert fsdp.units(skeleton, Block) == fsdp.units(model, Block)
    assert list(grouped(params, units=fsdp.units(model, Block))) == ["emb", "stack.0", "stack.1"]


def test_a_type_that_the_model_does_not_have() -> None:
    with pytest.raises(SpecError, match=r"units\(model, Conv2d\): .* no such submodule\. It has Linear, Seq"):
        fsdp.units(nn.Sequential(nn.Linear(2, 2)), nn.Conv2d)


# -------------------------------------------------------------------------------- what is left over


def test_a_leftover_that_outweighs_the_largest_unit_warns() -> None:
    tree = leaves(**{"blocks_0_w": 100, "blocks_1_w": 1000, "experts_a": 600, "experts_b": 600, "head_w": 100})
    with pytest.warns(UserWarning, match="outweighs") as caught:
        fsdp.make_layout(tree, Spec({"data": 2}))
    text = str(caught[0].message)
    assert len(caught) == 1
    assert "What no block covers ('experts', 4.7 KiB)" in text
    assert "outweighs the largest unit, 'blocks.1' (3.9 KiB)" in text
    assert "Spec(units=" in text


@pytest.mark.parametrize(
    ("tree", "spec"),
    [
        (leaves(**{"blocks_0_w": 100, "head_w": 100}), {}),  # no heavier than the largest
        (leaves(**{"blocks_0_w": 100, "embed_w": 80, "head_w": 80}), {}),  # only together, as in many a language model
        (leaves(**{"fc1_w": 100, "fc2_w": 1000}), {}),  # no blocks at all
        (leaves(**{"blocks_0_w": 10, "head_w": 100}), {"units": ["blocks.*", "head"]}),  # all of it named
    ],
)
def test_no_warning_without_need(tree: Tree, spec: dict[str, Any]) -> None:
    assert fsdp.make_layout(tree, Spec({"data": 2}, **spec)).units  # warnings are errors here


def test_a_forgotten_pattern_warns_too() -> None:
    tree = leaves(**{"blocks_0_w": 100, "others_0_w": 100, "others_1_w": 100})
    with pytest.warns(UserWarning, match=r"What no block covers \('others', 800 B\)"):
        fsdp.make_layout(tree, Spec({"data": 2}, units=["blocks.*"]))


# -------------------------------------------------------------------------------- tied leaves


def tied(*more: str) -> Tree:
    shared = torch.empty(4, 8, device="meta")
    return {"wte.weight": shared, "wte.bias": torch.empty(2, device="meta"), **leaves(*more), "head.weight": shared}


def test_a_tied_leaf_is_a_unit_of_its_own() -> None:
    tree = tied("blocks.0.w")
    found = fsdp.make_layout(tree, Spec({"data": 2}))
    assert {unit.name: unit.paths for unit in found.units} == {
        "wte.weight": ("wte.weight",),
        "wte": ("wte.bias",),
        "blocks.0": ("blocks.0.w",),
    }
    assert found.paths == tuple(tree)
    assert found.source == ("wte.weight", "wte.bias", "blocks.0.w", "wte.weight")
    assert found.by_name["wte.weight"].keys == ("weight",)


def test_a_tied_leaf_stays_its_own_unit_whatever_the_patterns() -> None:
    assert list(grouped(tied("blocks.0.w"), units=["blocks.*", "wte"])) == ["wte.weight", "wte", "blocks.0"]


def test_leaves_tied_between_blocks() -> None:
    shared = torch.empty(3, device="meta")
    tree = {
        "b.0.w": torch.empty(4, device="meta"),
        "b.0.s": shared,
        "b.1.w": torch.empty(4, device="meta"),
        "b.1.s": shared,
    }
    assert grouped(tree) == {"b.0": ("b.0.w",), "b.0.s": ("b.0.s",), "b.1": ("b.1.w",)}


def test_a_heavy_tied_leaf_is_no_leftover() -> None:
    shared = torch.empty(1000, device="meta")
    tree = {"wte": shared, **leaves("blocks.0.w"), "head": shared}
    found = fsdp.make_layout(tree, Spec({"data": 2}))  # warnings are errors here
    assert [unit.name for unit in found.units] == ["wte", "blocks.0"]


def test_a_pattern_may_name_a_tied_leaf_by_any_of_its_paths() -> None:
    assert list(grouped(tied("blocks.0.w"), units=["blocks.*", "head"])) == ["wte.weight", "wte", "blocks.0"]


@pytest.mark.parametrize("name", ["wte.weight", "head.weight"])
def test_rules_reach_a_tied_leaf_by_any_of_its_paths(name: str) -> None:
    rules = {"placement": {name: fsdp.ddp("data"), "*": fsdp.zero3("data")}, "labels": {name: "tied"}}
    bucket = fsdp.make_layout(tied(), Spec({"data": 2}, trainable={name: False}, **rules)).buckets["wte.weight"]  # type: ignore[arg-type]
    assert (bucket.placement, bucket.leaves[0].label, bucket.trainable) == (fsdp.ddp("data"), "tied", False)


def test_views_of_the_same_bytes_are_tied_and_others_are_not() -> None:
    base = torch.zeros(4, 4)
    assert list(grouped({"a": base, "b": base.view(4, 4)})) == ["a"]
    assert list(grouped({"a": base, "b": base.t(), "c": base[:2], "d": base.clone()})) == ["a", "b", "c", "d"]
    assert list(grouped({"a": torch.empty(0), "b": torch.empty(0)})) == ["a", "b"]
