"""The pure layout: offsets, slices and padding are arithmetic, for 1 rank and for 16,384, and need no process group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise, product
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_fsdp as fsdp
from functional_fsdp import Bucket, Layout, Placement, Precision, Spec, SpecError, TreeError
from functional_fsdp._engine.reductions import staged
from functional_fsdp._plan.layout import ALIGN, LeafInfo, plan_layout
from functional_fsdp._storage import leaves_of

ONE_AXIS = [fsdp.ddp("data"), fsdp.zero1("data"), fsdp.zero2("data"), fsdp.zero3("data")]
TWO_AXES = [
    fsdp.hsdp("replica", "shard"),
    fsdp.hfsdp("replica", "shard"),
    fsdp.zero3("replica", "shard"),
    fsdp.zero1("replica", "shard"),
    fsdp.ddp("replica", "shard"),
    Placement(grads=("shard",), main=("replica", "shard")),
    Placement(main=("replica",), data=("replica", "shard")),
]
KINDS = ("weights", "grads", "main")


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def llama_layer(hidden: int = 4096, intermediate: int = 11008) -> dict[str, torch.Tensor]:
    tree = {f"attn.{name}": meta(hidden, hidden) for name in ("q", "k", "v", "o")}
    tree |= {"mlp.gate": meta(intermediate, hidden), "mlp.up": meta(intermediate, hidden)}
    return tree | {"mlp.down": meta(hidden, intermediate), "norm1": meta(hidden), "norm2": meta(hidden)}


def one_bucket(tree: Any, spec: Spec | None = None) -> fsdp.Bucket:
    (bucket,) = fsdp.make_layout({"unit": tree}, spec or Spec({"data": 2})).buckets.values()
    return bucket


# -------------------------------------------------------------------------------- by hand


def test_the_drawing() -> None:
    bucket = one_bucket({"weight": meta(3, 100), "bias": meta(250)}, Spec({"data": 4}))
    assert [(leaf.key, leaf.offset, leaf.numel) for leaf in bucket.leaves] == [("weight", 0, 300), ("bias", 384, 250)]
    assert bucket.numel == 1024
    assert [bucket.span(("data",), {"data": r}) for r in range(4)] == [(0, 256), (256, 512), (512, 768), (768, 1024)]
    assert bucket.pieces == ((3, 100), (84,), (250,), (390,))
    assert bucket.leaf_pieces == (0, 2)


def test_leaves_are_aligned_to_128_elements_whatever_their_dtype() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.bool):
        bucket = one_bucket({"a": meta(1, dtype=dtype), "b": meta(129, dtype=dtype), "c": meta(2, dtype=dtype)})
        assert [leaf.offset for leaf in bucket.leaves] == [0, 128, 384]
        assert bucket.numel == 512


def test_two_axes_split_the_innermost_first() -> None:
    spec = Spec({"replica": 2, "shard": 3}, fsdp.hfsdp("replica", "shard"))
    bucket = one_bucket({"w": meta(700)}, spec)
    assert bucket.numel == 768
    spans = {
        c: bucket.span(("replica", "shard"), dict(zip(("replica", "shard"), c, strict=True)))
        for c in product(range(2), range(3))
    }
    assert spans == {
        (0, 0): (0, 128),
        (1, 0): (128, 256),
        (0, 1): (256, 384),
        (1, 1): (384, 512),
        (0, 2): (512, 640),
        (1, 2): (640, 768),
    }
    assert bucket.span(("shard",), {"replica": 1, "shard": 1}) == (256, 512)


# -------------------------------------------------------------------------------- real sizes


def test_a_whole_llama_at_16384_ranks() -> None:
    tree = {"embed": meta(32000, 4096), "layers": [llama_layer() for _ in range(32)], "norm": meta(4096)}
    units = ["layers.*", "embed", "norm", "head"]
    precision = Precision(compute=torch.bfloat16)
    spec = Spec({"replica": 16, "shard": 1024}, fsdp.hfsdp("replica", "shard"), precision=precision, units=units)
    layout = fsdp.make_layout({**tree, "head": meta(32000, 4096)}, spec)
    assert len(layout.units) == 35
    for bucket in layout.buckets.values():
        assert bucket.numel % (16384 * ALIGN) == 0
        last = bucket.span(bucket.placement.main, {"replica": 15, "shard": 1023})
        assert last == (bucket.numel - bucket.numel // 16384, bucket.numel)
    numel = sum(bucket.numel for bucket in layout.buckets.values())
    assert layout.nbytes("main") == 4 * numel // 16384
    assert layout.nbytes("weights") == 2 * numel // 1024
    assert layout.nbytes("grads") == 4 * numel // 1024
    elements = sum(leaf.numel for bucket in layout.buckets.values() for leaf in bucket.leaves)
    assert 0 < layout.padding() == pytest.approx(1 - elements / numel)
    assert layout.padding() < 0.01


def test_frozen_leaves_have_no_gradient_bytes() -> None:
    tree = {"a": {"w": meta(128), "n": meta(128, dtype=torch.int64)}}
    layout = fsdp.make_layout(tree, Spec({"data": 1}))
    assert list(layout.trainable) == ["a:0"]
    assert layout.nbytes("main") == 128 * 4 + 128 * 8
    assert layout.nbytes("grads") == 128 * 4


# -------------------------------------------------------------------------------- buckets


def test_buckets_are_split_by_dtype_trainability_and_placement_only() -> None:
    tree = {
        "u": {
            "w": meta(3),
            "d": meta(3, dtype=torch.float64),
            "h": meta(3, dtype=torch.bfloat16),
            "n": meta(3, dtype=torch.int64),
            "flag": meta(3, dtype=torch.bool),
            "frozen": meta(3),
            "bias": meta(3),
            "w2": meta(3),
        }
    }
    rules = {"*.bias": fsdp.ddp("data"), "*": fsdp.zero3("data")}
    spec = Spec({"data": 2}, rules, trainable={"u.frozen": False}, labels={"u.w2": "other"})
    layout = fsdp.make_layout(tree, spec)
    assert [tuple(leaf.key for leaf in bucket.leaves) for bucket in layout.buckets.values()] == [
        ("w", "w2"),
        ("d",),
        ("h",),
        ("n",),
        ("flag",),
        ("frozen",),
        ("bias",),
    ]
    assert list(layout.buckets) == [f"u:{i}" for i in range(7)]
    assert [b.trainable for b in layout.buckets.values()] == [True, True, True, False, False, False, True]
    assert layout.by_name["u"].keys == ("w", "d", "h", "n", "flag", "frozen", "bias", "w2")
    dtypes = [(b.main, b.compute) for b in layout.buckets.values()]
    assert dtypes[1] == (torch.float64, torch.float64)
    assert dtypes[2] == (torch.float32, torch.bfloat16)
    assert dtypes[3:5] == [(torch.int64,) * 2, (torch.bool,) * 2]


def test_compute_dtype_decides_not_the_leafs_own() -> None:
    spec = Spec({"data": 2}, precision=Precision(main=torch.float32, compute=torch.bfloat16))
    layout = fsdp.make_layout({"u": {"w": meta(3), "h": meta(3, dtype=torch.bfloat16)}}, spec)
    assert [bucket.name for bucket in layout.buckets.values()] == ["u"]


def test_labels_lie_together_in_the_order_of_their_first_leaf() -> None:
    names = ("w1", "b1", "w2", "b2", "n")
    spec = Spec({"data": 2}, labels={"*.b?": "bias", "*.n": "norm"})
    bucket = one_bucket({name: meta(200) for name in names}, spec)
    assert [(leaf.key, leaf.label) for leaf in bucket.leaves] == [
        ("w1", "default"),
        ("w2", "default"),
        ("b1", "bias"),
        ("b2", "bias"),
        ("n", "norm"),
    ]
    assert bucket.labels == (("default", 0, 512), ("bias", 512, 1024), ("norm", 1024, 1280))


def test_labels_next_to_empty_leaves() -> None:
    spec = Spec({"data": 1}, labels={"*.e": "empty", "*.w": "w"})
    bucket = one_bucket({"e": meta(0, 3), "w": meta(5), "x": meta(5)}, spec)
    assert bucket.labels == (("empty", 0, 0), ("w", 0, 128), ("default", 128, 256))


def test_modules_go_by_requires_grad_plain_tensors_by_dtype() -> None:
    tree = {
        "a": nn.Parameter(meta(3), requires_grad=False),
        "b": nn.Parameter(meta(3)),
        "c": meta(3),
        "d": meta(3).long(),
    }
    layout = fsdp.make_layout(tree, Spec({"data": 2}))
    assert {bucket.name: bucket.trainable for bucket in layout.buckets.values()} == {
        "a": False,
        "b": True,
        "c": True,
        "d": False,
    }
    layout = fsdp.make_layout(tree, Spec({"data": 2}, trainable={"a": True, "b": False, "d": False}))
    assert {bucket.name: bucket.trainable for bucket in layout.buckets.values()} == {
        "a": True,
        "b": False,
        "c": True,
        "d": False,
    }


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool])
def test_an_integer_leaf_marked_trainable(dtype: torch.dtype) -> None:
    with pytest.raises(SpecError) as caught:
        fsdp.make_layout({"u": {"steps": meta(3, dtype=dtype), "w": meta(3)}}, Spec({"data": 2}, trainable={"*": True}))
    text = str(caught.value)
    assert f"Spec(trainable): the leaf 'u.steps' is marked trainable, but its dtype is {dtype}" in text
    assert "Put {'u.steps': False} before that rule." in text
    fixed = {"u.steps": False, "*": True}
    assert list(
        fsdp.make_layout(
            {"u": {"steps": meta(3, dtype=dtype), "w": meta(3)}}, Spec({"data": 2}, trainable=fixed)
        ).trainable
    )


def test_a_leaf_of_another_mesh_axis() -> None:
    rules = {"experts*": fsdp.zero3("expert"), "*": fsdp.zero3("data")}
    layout = fsdp.make_layout({"experts": meta(100), "rest": meta(100)}, Spec({"data": 4, "expert": 2}, rules))
    assert (layout.buckets["experts"].numel, layout.buckets["rest"].numel) == (256, 512)
    assert layout.buckets["experts"].sizes == (("expert", 2),)


# -------------------------------------------------------------------------------- trees it refuses


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({}, "has no leaves"),
        ({"a": meta(2), "b": 3.0}, r"the leaf 'b' .*: expected a tensor; keep .*, and got 3.0"),
        ({"a": None}, r"the leaf 'a' .*: expected a tensor; keep .*, and got None"),
        ({math.nan: meta(2), float("nan"): meta(2)}, r"two leaves have the path 'nan.\[nan\]': their keys read alike"),
        ({"a": torch.empty(2, dtype=torch.float16)}, r"the leaf 'a' is float16, which needs loss scaling"),
        (
            {"a": torch.empty(2, dtype=torch.complex64)},
            r"the leaf 'a' is a Tensor of .*complex64; expected a plain, dense, real",
        ),
        ({"a": torch.empty(2, dtype=torch.float8_e4m3fn)}, r"the leaf 'a' .*float8_e4m3fn"),
        ({"a": torch.eye(2).to_sparse()}, r"the leaf 'a' is a Tensor of layout torch\.sparse_coo"),
    ],
)
def test_trees_it_refuses(tree: Any, text: str) -> None:
    with pytest.raises((TreeError, SpecError), match=text):
        fsdp.make_layout(tree, Spec({"data": 2}))


@pytest.mark.parametrize("tree", [meta(3), {"": meta(3)}], ids=["a tensor is a pytree", "an empty key"])
def test_a_leaf_whose_path_is_empty(tree: Any) -> None:
    layout = fsdp.make_layout(tree, Spec({"data": 2}, labels={"*": "all"}))
    (bucket,) = layout.buckets.values()
    assert layout.paths == ("",)
    assert (bucket.numel, bucket.leaves[0].label) == (256, "all")


# -------------------------------------------------------------------------------- the fingerprint


def base_tree() -> dict[str, Any]:
    return {"a": {"w": meta(3, 5), "b": meta(7)}, "c": meta(9)}


def hash_of(tree: Any = None, mesh: dict[str, int] | None = None, placement: Any = None, **spec: Any) -> str:
    return fsdp.make_layout(tree or base_tree(), Spec(mesh or {"data": 4}, placement, **spec)).hash


def test_the_hash_differs_when_anything_that_moves_bytes_differs() -> None:
    shared = meta(9)
    different = {
        "as it is": hash_of(),
        "world": hash_of(mesh={"data": 8}),
        "placement": hash_of(placement=fsdp.zero2("data")),
        "axis name": hash_of(mesh={"dp": 4}),
        "main dtype": hash_of(precision=Precision(main=torch.float64)),
        "compute dtype": hash_of(precision=Precision(compute=torch.bfloat16)),
        "grads dtype": hash_of(precision=Precision(grads=torch.bfloat16)),
        "labels": hash_of(labels={"a.b": "bias"}),
        "units": hash_of(units=[("a", "c")]),
        "trainable": hash_of(trainable={"c": False}),
        "shape": hash_of({"a": {"w": meta(5, 3), "b": meta(7)}, "c": meta(9)}),
        "path": hash_of({"a": {"w": meta(3, 5), "bb": meta(7)}, "c": meta(9)}),
        "order": hash_of({"a": {"b": meta(7), "w": meta(3, 5)}, "c": meta(9)}),
        "tied": hash_of({"a": {"w": meta(3, 5), "b": meta(7)}, "c": shared, "d": shared}),
        "untied": hash_of({"a": {"w": meta(3, 5), "b": meta(7)}, "c": shared, "d": meta(9)}),
        "leaf dtype": hash_of({"a": {"w": meta(3, 5), "b": meta(7)}, "c": meta(9).double()}),
    }
    twins = [(one, two) for one in different for two in different if one < two and different[one] == different[two]]
    assert twins == []
    assert all(len(h) == 16 and int(h, 16) >= 0 for h in different.values())


def test_the_hash_knows_which_leaves_are_tied_to_which() -> None:
    one, two = meta(3), meta(3)
    crossed = {"a": one, "b": two, "c": two, "d": one}
    assert hash_of({"a": one, "b": two, "c": one, "d": two}) != hash_of(crossed)


def test_the_hash_is_the_same_for_what_moves_no_bytes() -> None:
    assert hash_of(average="sum") == hash_of()
    nested = {"a": {"w": meta(3, 5), "b": meta(7)}, "c": meta(9)}
    flat = {"a.w": meta(3, 5), "a.b": meta(7), "c": meta(9)}
    assert hash_of(nested) == hash_of(flat)
    assert hash_of(labels={"*": "default"}) == hash_of()


def test_equal_placements_hash_alike_whatever_they_are_called() -> None:
    written = Placement(("data",), ("data",), ("data",))
    assert written == fsdp.zero3("data")
    assert hash_of(placement=written) == hash_of(placement=fsdp.zero3("data"))


# -------------------------------------------------------------------------------- text


def test_a_layout_prints_as_a_table() -> None:
    tree = {"a": {"w": meta(1000), "n": meta(3, dtype=torch.int64)}, "h": meta(100)}
    spec = Spec({"data": 2}, fsdp.zero2("data"), precision=Precision(compute=torch.bfloat16))
    lines = repr(fsdp.make_layout(tree, spec)).splitlines()
    assert lines[0].split("  ")[0] == "bucket"
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "a:0 1 1000 24 zero2(data) float32/bfloat16 2.0 KiB 2.0 KiB 2.0 KiB",
        "a:1 1 3 253 zero2(data) int64 1.0 KiB 2.0 KiB frozen",
        "h 1 100 156 zero2(data) float32/bfloat16 512 B 512 B 512 B",
        "2 units, the largest of 91% of all elements: 'a'",
    ]


# -------------------------------------------------------------------------------- properties

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
leaf_lists = st.lists(st.tuples(shapes, dtypes, st.sampled_from("xyz")), min_size=1, max_size=7)


def relaxed(test: Any) -> Any:
    """Of some trees a unit has most bytes, which warns."""
    return pytest.mark.filterwarnings("ignore:The unit .* has .* of all bytes:UserWarning")(
        settings(max_examples=60)(test)
    )


@st.composite
def layouts(draw: Any) -> tuple[Layout, dict[str, int]]:
    """A random layout on a random mesh of one or two axes, and the mesh's sizes."""
    infos = [LeafInfo(f"{unit}.l{i}", shape, dtype) for i, (shape, dtype, unit) in enumerate(draw(leaf_lists))]
    if draw(st.booleans()):
        mesh = {"data": draw(st.integers(1, 9))}
        placement = draw(st.sampled_from(ONE_AXIS))
    else:
        mesh = {"replica": draw(st.integers(1, 4)), "shard": draw(st.integers(1, 5))}
        placement = draw(st.sampled_from(TWO_AXES))
    labels = {f"*.l{i}": f"label{i % 3}" for i in range(0, len(infos), 2)} if draw(st.booleans()) else None
    return plan_layout(infos, Spec(mesh, placement, labels=labels)), mesh


def coordinates(mesh: dict[str, int]) -> list[dict[str, int]]:
    return [dict(zip(mesh, c, strict=True)) for c in product(*(range(n) for n in mesh.values()))]


@relaxed
@given(layouts())
def test_leaves_are_aligned_inside_the_bucket_and_do_not_overlap(given_: tuple[Layout, dict[str, int]]) -> None:
    layout, mesh = given_
    for bucket in layout.buckets.values():
        assert bucket.numel % (prod(mesh.values()) * ALIGN) == 0
        at = 0
        for leaf in bucket.leaves:
            assert leaf.offset % ALIGN == 0
            assert leaf.offset >= at
            at = leaf.offset + leaf.numel
        assert at <= bucket.numel
        needed = sum(-(-leaf.numel // ALIGN) * ALIGN for leaf in bucket.leaves)
        assert bucket.numel - needed < prod(mesh.values()) * ALIGN
    placed = [leaf.path for bucket in layout.buckets.values() for leaf in bucket.leaves]
    assert sorted(placed) == sorted(layout.paths)


@relaxed
@given(layouts())
def test_slices_tile_the_bucket_and_nest_and_ranks_of_one_are_replicas(given_: tuple[Layout, dict[str, int]]) -> None:
    layout, mesh = given_
    for bucket in layout.buckets.values():
        for kind in KINDS:
            axes = getattr(bucket.placement, kind)
            spans: dict[tuple[int, int], set[tuple[int, ...]]] = {}  # and where the replicas of each are
            for c in coordinates(mesh):
                spans.setdefault(bucket.span(axes, c), set()).add(tuple(c[a] for a in axes))
            assert len(spans) == bucket.slices(kind) or not bucket.numel
            assert all(len(where) == 1 for where in spans.values()) or not bucket.numel
            edges = sorted(spans)
            assert edges[0][0] == 0
            assert edges[-1][1] == bucket.numel
            assert all(a[1] == b[0] for a, b in pairwise(edges))
            assert len({stop - start for start, stop in spans}) == 1
        for c in coordinates(mesh):
            weights, grads, main = (bucket.span(getattr(bucket.placement, kind), c) for kind in KINDS)
            assert weights[0] <= grads[0] <= main[0] <= main[1] <= grads[1] <= weights[1]


@relaxed
@given(layouts())
def test_labels_are_runs_that_cover_the_bucket(given_: tuple[Layout, dict[str, int]]) -> None:
    layout, _ = given_
    for bucket in layout.buckets.values():
        names = [label for label, _, _ in bucket.labels]
        assert len(set(names)) == len(names)  # each label is one run
        assert bucket.labels[0][1] == 0
        assert bucket.labels[-1][2] == bucket.numel
        assert all(a[2] == b[1] for a, b in pairwise(bucket.labels))
        runs = {label: (start, stop) for label, start, stop in bucket.labels}
        for leaf in bucket.leaves:
            start, stop = runs[leaf.label]
            assert start <= leaf.offset
            assert leaf.offset + leaf.numel <= stop


@relaxed
@given(layouts(), st.data())
def test_the_leaves_of_some_labels_are_where_they_were(given_: tuple[Layout, dict[str, int]], data: Any) -> None:
    layout, _ = given_
    for bucket in layout.buckets.values():
        every = [label for label, _, _ in bucket.labels]
        some = data.draw(st.lists(st.sampled_from([*every, "another"]), unique=True))
        mine = tuple(leaf for leaf in bucket.leaves if leaf.label in some)
        part = bucket.only(some)
        if not mine or mine == bucket.leaves:
            assert part is (bucket if mine else None)
            continue
        assert part is not None
        assert (part.leaves, part.numel, part.name) == (mine, bucket.numel, bucket.name)
        held = {at for _, start, stop in part.labels for at in range(start, stop)}
        assert held >= {leaf.offset + i for leaf in mine for i in range(leaf.numel)}
        others = {leaf.offset + i for leaf in bucket.leaves if leaf not in mine for i in range(leaf.numel)}
        assert not held & others
        assert part.only(some) is part
        assert [leaf.path for leaf in part.counts.leaves] == [leaf.path for leaf in mine]
        assert sum(map(prod, part.pieces)) == bucket.numel
        flags = [data.draw(st.booleans()) for _ in mine]
        given_runs = {at for _, start, stop in part.runs(flags) for at in range(start, stop)}
        given_leaves = [leaf for leaf, on in zip(mine, flags, strict=True) if on]
        chosen = {leaf.offset + i for leaf in given_leaves for i in range(leaf.numel)}
        assert chosen <= given_runs <= held


@relaxed
@given(layouts())
def test_pieces_tile_the_bucket(given_: tuple[Layout, dict[str, int]]) -> None:
    layout, _ = given_
    for bucket in layout.buckets.values():
        starts, at = [], 0
        for shape in bucket.pieces:
            starts.append(at)
            at += prod(shape)
        assert at == bucket.numel
        assert [starts[i] for i in bucket.leaf_pieces] == [leaf.offset for leaf in bucket.leaves]
        assert [bucket.pieces[i] for i in bucket.leaf_pieces] == [leaf.shape for leaf in bucket.leaves]


def write_leaves(bucket: Bucket, whole: torch.Tensor, values: Mapping[str, torch.Tensor | None]) -> None:
    """Gradients on their way: copied and cast into staging."""
    nowhere: Any = SimpleNamespace(collectives=())
    staged(bucket, [*values], whole, whole[:0], {True: nowhere, False: nowhere}).write([*values.values()])


@settings(max_examples=40, deadline=None)
@pytest.mark.filterwarnings("ignore:The unit .* has .* of all bytes:UserWarning")  # of some trees
@given(layouts(), st.integers(0, 2**16))
def test_leaves_written_are_read_back(given_: tuple[Layout, dict[str, int]], seed: int) -> None:
    layout, _ = given_
    generator = torch.Generator().manual_seed(seed)
    for bucket in layout.buckets.values():
        dtype = bucket.main
        values = {leaf.path: torch.randint(0, 2, leaf.shape, generator=generator).to(dtype) for leaf in bucket.leaves}
        whole = torch.ones(bucket.numel, dtype=dtype)
        write_leaves(bucket, whole, values)
        found = leaves_of(bucket, whole)
        assert found.keys() == values.keys()
        for path, value in values.items():
            assert found[path].shape == value.shape
            assert found[path].dtype == dtype
            assert torch.equal(found[path], value)
        assert whole.double().sum() == sum(value.double().sum() for value in values.values())  # the padding is zero


# -------------------------------------------------------------------------------- leaves and buffers


def test_leaves_are_views_of_the_whole() -> None:
    bucket = one_bucket({"w": meta(3, 5), "s": meta(), "e": meta(0, 4), "b": meta(130)})
    whole = torch.zeros(bucket.numel)
    views = leaves_of(bucket, whole)
    assert [tuple(view.shape) for view in views.values()] == [(3, 5), (), (0, 4), (130,)]
    for value, view in enumerate(views.values(), 1):
        view.fill_(value)
    by_leaf = {leaf.path: whole[leaf.offset : leaf.offset + leaf.numel].unique().tolist() for leaf in bucket.leaves}
    assert by_leaf == {"unit.w": [1.0], "unit.s": [2.0], "unit.e": [], "unit.b": [4.0]}


def test_none_writes_zeros_and_values_are_cast() -> None:
    bucket = one_bucket({"a": meta(3), "b": meta(2, 2), "e": meta(0)})
    whole = torch.full((bucket.numel,), 7.0)
    write_leaves(bucket, whole, {"unit.a": None, "unit.b": torch.ones(2, 2, dtype=torch.float64), "unit.e": None})
    assert whole.sum() == 4
    assert leaves_of(bucket, whole)["unit.b"].dtype is torch.float32


def test_values_need_not_be_contiguous() -> None:
    bucket = one_bucket({"a": meta(3, 5)})
    value = torch.arange(15.0).view(5, 3).t()
    whole = torch.empty(bucket.numel)
    write_leaves(bucket, whole, {"unit.a": value})
    assert torch.equal(leaves_of(bucket, whole)["unit.a"], value)


def test_a_bucket_of_nothing_but_empty_leaves() -> None:
    bucket = one_bucket({"a": meta(0, 3), "b": meta(2, 0)}, Spec({"data": 4}))
    assert bucket.numel == 0
    assert [bucket.span(("data",), {"data": r}) for r in range(4)] == [(0, 0)] * 4
    whole = torch.empty(0)
    write_leaves(bucket, whole, {"unit.a": torch.empty(0, 3), "unit.b": None})
    assert {path: tuple(leaf.shape) for path, leaf in leaves_of(bucket, whole).items()} == {
        "unit.a": (0, 3),
        "unit.b": (2, 0),
    }
