"""Placements, precision and Spec: the presets are the documented table; what cannot be honoured is refused."""

from __future__ import annotations

import inspect
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import functional_fsdp as fsdp
from functional_fsdp import Placement, Precision, Schedule, Spec, SpecError

DATA, SHARD, BOTH = ("data",), ("shard",), ("replica", "shard")
# a preset, the axes of its weights, gradients, main weights and data, and its name: the table, row by row
TABLE: list[tuple[Placement, tuple[tuple[str, ...], ...], str]] = [
    (fsdp.ddp("data"), ((), (), (), DATA), "ddp(data)"),
    (fsdp.zero1("data"), ((), (), DATA, DATA), "zero1(data)"),
    (fsdp.zero2("data"), ((), DATA, DATA, DATA), "zero2(data)"),
    (fsdp.zero3("data"), (DATA, DATA, DATA, DATA), "zero3(data)"),
    (fsdp.hsdp("replica", "shard"), (SHARD, SHARD, SHARD, BOTH), "hsdp(replica, shard)"),
    (fsdp.hfsdp("replica", "shard"), (SHARD, SHARD, BOTH, BOTH), "hfsdp(replica, shard)"),
]
PRESETS = (fsdp.ddp, fsdp.zero1, fsdp.zero2, fsdp.zero3)


# -------------------------------------------------------------------------------- placements


@pytest.mark.parametrize(("placement", "axes", "name"), TABLE, ids=[row[-1] for row in TABLE])
def test_presets_are_the_table(placement: Placement, axes: tuple[tuple[str, ...], ...], name: str) -> None:
    assert (placement.weights, placement.grads, placement.main, placement.data) == axes
    assert str(placement) == name


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_take_several_axes(preset: Any) -> None:
    placement = preset("node", "gpu")
    assert placement.data == ("node", "gpu")
    assert str(placement) == f"{preset.__name__}(node, gpu)"
    assert preset is fsdp.ddp or placement.main == ("node", "gpu")


def test_a_placement_written_out_equals_its_preset() -> None:
    written = Placement(grads=("data",), main=("data",))
    assert str(written) == "weights=-, grads=data, main=data"
    listed = Placement(main=["data"])  # type: ignore[arg-type]
    for placement, preset in ((written, fsdp.zero2("data")), (listed, fsdp.zero1("data"))):
        assert placement == preset
        assert hash(placement) == hash(preset)


def test_the_innermost_axis_splits_first() -> None:
    assert fsdp.zero3("node", "gpu").order == ("gpu", "node")
    assert fsdp.hfsdp("replica", "shard").order == ("shard", "replica")
    assert fsdp.hsdp("replica", "shard").order == ("shard",)
    assert fsdp.ddp("data").order == ()
    assert Placement(("c",), ("b", "c"), ("a", "b", "c")).order == ("c", "b", "a")


axes = st.sets(st.sampled_from("abc")).map(lambda s: tuple(sorted(s)))


@settings(max_examples=200, deadline=None)
@given(axes, axes, axes, axes)
def test_the_subset_law(
    weights: tuple[str, ...], grads: tuple[str, ...], main: tuple[str, ...], data: tuple[str, ...]
) -> None:
    lawful = set(weights) <= set(grads) <= set(main) <= set(data or main)
    if lawful:
        placement = Placement(weights, grads, main, data)
        order = placement.order
        assert set(order) == set(main)
        assert len(order) == len(main)
        for kind in ("weights", "grads", "main"):  # every kind is sharded over leading axes of the order
            sharded = getattr(placement, kind)
            assert set(order[: len(sharded)]) == set(sharded)
    else:
        with pytest.raises(SpecError, match="must satisfy weights ⊆ grads ⊆ main ⊆ data"):
            Placement(weights, grads, main, data)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("wrong", [(), (3,), (("data",),)])
def test_presets_want_names(preset: Any, wrong: tuple[Any, ...]) -> None:
    with pytest.raises(SpecError, match="expected names of mesh axes, as " + preset.__name__):
        preset(*wrong)


# -------------------------------------------------------------------------------- precision

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("precision", "leaf", "resolved"),
    [
        (Precision(), F32, (F32, F32, F32, F32, "native")),
        (Precision(), F64, (F64, F64, F64, F64, "native")),
        (Precision(), BF16, (F32, BF16, F32, BF16, "native")),
        (Precision(compute=BF16), F32, (F32, BF16, F32, BF16, "native")),
        (Precision(compute=BF16), F64, (F64, BF16, F64, BF16, "native")),
        (Precision(main=F64), F32, (F64, F64, F64, F64, "native")),
        (Precision(main=BF16), F32, (BF16, BF16, BF16, BF16, "native")),
        (Precision(main=F32, compute=BF16, grads=BF16), F32, (F32, BF16, BF16, BF16, "native")),
        (Precision(main=BF16, grads=F32), F32, (BF16, BF16, F32, BF16, "native")),
        (Precision(compute=BF16, wire=F32, sum="native"), F32, (F32, BF16, F32, F32, "native")),
        (Precision(wire=BF16, sum="fp32"), F32, (F32, F32, F32, BF16, "fp32")),
        (Precision(main=F64, compute=F32, grads=BF16), torch.int64, (*(torch.int64,) * 4, "native")),
        (Precision(wire=BF16, sum="fp32"), torch.bool, (*(torch.bool,) * 4, "native")),
    ],
)
def test_resolve(precision: Precision, leaf: torch.dtype, resolved: tuple[Any, ...]) -> None:
    found = precision.resolve(leaf)
    assert found[:5] == resolved
    assert found.gather is found.compute  # unless another is named: see test_float8_weight.py


EIGHT = {"data": 8}
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (Placement, {"weights": ("data",), "main": ("data",)},
     r"weights=\('data',\) is sharded over \['data'\] and grads=\(\) is not.*Add \['data'\] to grads, or drop it"),
    *((Placement, {"main": wrong}, r"Placement\.main=.*expected a tuple of distinct mesh axis names")
      for wrong in ("data", ("data", "data"))),
    *((Precision, {kind: torch.float16}, rf"Precision\({kind}=torch.float16\).*loss scaling.*Use torch.bfloat16")
      for kind in ("main", "compute", "grads", "wire")),
    *((Precision, {kind: dtype}, rf"Precision\({kind}={dtype}\): expected one of torch.float64, torch.float32, torch")
      for kind in ("main", "compute", "grads") for dtype in (torch.int32, torch.complex64, torch.float8_e4m3fn)),
    *((Precision, {"sum": how}, rf"Precision\(sum={how!r}\): expected 'auto', 'native' or 'fp32'")
      for how in ("wire", "fp64", None)),
    *((Precision, {"sum": "fp32", kind: F64}, r"of a float64 wire would lose digits\. Sums in float32 are of")
      for kind in ("wire", "compute", "main")),
    (Precision(sum="fp32").resolve, {"leaf": F64}, "of a float64 wire would lose digits"),
    (Spec, {"precision": {"*": BF16}}, r"Spec\(precision\) of '\*': expected a Precision, .*, and got a dtype"),
    *((Spec, {"placement": placement}, rf"names the axis '{axis}', which the mesh does not have. Its axes are 'data'\.")
      for placement, axis in ((fsdp.zero3("dta"), "dta"), (fsdp.ddp("x"), "x"), (fsdp.hsdp("r", "data"), "r"))),
    (Spec, {"placement": {"experts.*": fsdp.zero3("expert"), "*": fsdp.zero3("data")}}, "names the axis 'expert'"),
    (Spec, {"placement": fsdp.zero3("dta")}, r"zero3\(dta\)"),
    *((Spec, {"placement": {"*": wrong}}, r"of '\*': expected a Placement, as zero3\('data'\), and got ")
      for wrong in ("zero3", None, ("data",))),
    *((Spec, {"placement": wrong}, r"expected a Placement, as zero3\('data'\)") for wrong in ("zero3", fsdp.zero3, 3)),
    *((Spec, {"average": wrong}, "expected 'mean' or 'sum'") for wrong in ("median", "", None)),
    *((Spec, {"schedule": wrong}, r"Spec\(schedule\): expected a Schedule, as fsdp.Schedule\(prefetch=2\)")
      for wrong in ("recorded", 2, ("a", "a"), Schedule)),
    (Spec, {"units": "blocks.*"}, r"Spec\(units='blocks\.\*'\): expected a list of patterns, as \['blocks\.\*'\]"),
    (Spec(EIGHT, {"blocks.*": fsdp.zero3("data")}).placement_of, {"path": "head.weight"},
     r"no rule matches the leaf 'head\.weight'; the patterns are 'blocks\.\*'"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "given", "said"), REFUSED)
def test_what_is_refused(make: Callable[..., Any], given: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=f"(?s){said}"):
        make(EIGHT, **given) if make is Spec else make(**given)


def test_precision_by_pattern() -> None:
    spec = Spec(
        {"data": 8}, precision={"*norm*": Precision(), "head": Precision(wire=F32), "*": Precision(compute=BF16)}
    )
    assert spec.precision_of("blocks.0.norm.weight") == Precision()
    assert spec.precision_of("blocks.0.up") == Precision(compute=BF16)
    assert Spec({"data": 8}, precision={"a": Precision(wire=F32)}).precision_of("b") == Precision()
    assert "*norm*: main float32" in str(spec)


def test_precision_is_a_value() -> None:
    assert Precision(compute=BF16) == Precision(compute=BF16) != Precision()
    assert len({Precision(compute=BF16), Precision(compute=BF16), Precision()}) == 2


# -------------------------------------------------------------------------------- Spec


def test_the_default_is_zero3_over_all_axes() -> None:
    assert Spec({"data": 8}).placements == (("*", fsdp.zero3("data")),)
    assert Spec({"a": 2, "b": 4}).placement_of("x") == fsdp.zero3("a", "b")


def test_axes_of_a_plan_and_of_a_mesh() -> None:
    assert Spec({"a": 2, "b": 4}).axes == {"a": 2, "b": 4}
    assert Spec(fsdp.local_mesh()).axes == {"data": 1}


def test_a_mesh_without_names_is_refused() -> None:
    fsdp.local_mesh()
    with pytest.raises(SpecError, match=r"axes of this mesh of shape \(1,\) have no names"):
        Spec(init_device_mesh("cpu", (1,)))


def test_rules_first_match_wins() -> None:
    spec = Spec({"data": 8}, {"*.norm": fsdp.ddp("data"), "blocks.*": fsdp.zero2("data"), "*": fsdp.zero3("data")})
    assert spec.placement_of("blocks.0.norm.weight") == fsdp.ddp("data")
    assert spec.placement_of("blocks.0.w") == fsdp.zero2("data")
    assert spec.placement_of("head") == fsdp.zero3("data")


def test_labels_first_match_wins_else_default() -> None:
    spec = Spec({"data": 8}, labels={"*.bias": "no_decay", "*norm*": "norm"})
    paths = ("a.bias", "norm.bias", "norm.weight", "a.weight")
    assert [spec.label_of(path) for path in paths] == ["no_decay", "no_decay", "norm", "default"]


def test_the_schedule_is_the_default_unless_given() -> None:
    assert Spec({"data": 8}).schedule == Schedule()
    assert Spec({"data": 8}, schedule=Schedule()) == Spec({"data": 8}) == Spec({"data": 8}, schedule=None)
    assert Spec({"data": 8}, schedule=Schedule(prefetch=3)).schedule.depth("a") == 3


VARIANTS: list[dict[str, Any]] = [
    {},
    {"mesh": {"data": 4}},
    {"mesh": {"data": 8, "model": 1}, "placement": fsdp.zero3("data")},
    {"placement": fsdp.ddp("data")},
    {"placement": {"*.bias": fsdp.ddp("data"), "*": fsdp.zero3("data")}},
    {"precision": Precision(compute=BF16)},
    {"units": ["a.*"]},
    {"units": [("a.*", "b")]},
    {"units": {"first": "a.*"}},
    {"labels": {"*.bias": "x"}},
    {"trainable": {"*.bias": False}},
    {"average": "sum"},
    {"schedule": Schedule(prefetch=2)},
    {"schedule": Schedule("recorded")},
    {"schedule": Schedule(("a", ("a", "b")))},
    {"transport": "copy_engine"},
    {"mesh": {"data": 8, "model": 1}, "placement": fsdp.zero3("data"), "own": {"*": "model"}},
]


def test_specs_are_equal_by_value_and_hash_alike() -> None:
    for change in VARIANTS:
        one, two = (Spec(**{"mesh": {"data": 8}, **change}) for _ in range(2))
        assert one == two
        assert hash(one) == hash(two)


def test_every_argument_counts_for_equality_and_is_printed() -> None:
    specs = [Spec(**{"mesh": {"data": 8}, **change}) for change in VARIANTS]
    assert {name for change in VARIANTS for name in change} == {*inspect.signature(Spec).parameters}
    for one, two in itertools.combinations(specs, 2):
        assert one != two
    assert len(set(specs)) == len(set(map(str, specs))) == len(specs)


def test_a_mapping_given_to_spec_may_change_afterwards() -> None:
    labels = {"*.bias": "a"}
    spec = Spec({"data": 2}, labels=labels)
    labels["*.bias"] = "b"
    assert spec.label_of("x.bias") == "a"


def test_specs_are_frozen() -> None:
    with pytest.raises(AttributeError, match="cannot assign"):
        Spec({"data": 2}).average = "sum"  # type: ignore[misc]


def test_a_plan_spec_can_be_pickled() -> None:
    spec = Spec({"data": 8}, fsdp.zero1("data"), units=["a.*"], schedule=Schedule(("a", ("a", "b"))))
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert hash(again) == hash(spec)


def test_a_spec_prints_as_a_table() -> None:
    spec = Spec({"replica": 2, "shard": 4}, fsdp.hsdp("replica", "shard"), labels={"*.bias": "no_decay"}, average="sum")
    lines = str(spec).splitlines()
    assert lines[0].strip() == "Spec"
    assert set(lines[1]) == {"-", " "}
    rows = dict(line.split(maxsplit=1) for line in lines[2:])
    assert rows == {
        "mesh": "replica 2 × shard 4",
        "placement": "hsdp(replica, shard)",
        "precision": "main float32 (float64 where leaves are), compute as the leaf, grads as main, wire as compute, "
        "sum as the transport does",
        "units": "found by what repeats in the paths; small numbered layers joined, containers divided",
        "labels": "*.bias: no_decay",
        "trainable": "as given",
        "gradients": "sum over data ranks",
        "schedule": "forward, then backward; prefetch 1",
        "transport": "collective",
    }


def test_the_table_says_rules_dtypes_and_patterns() -> None:
    rules = {"*.bias": fsdp.ddp("data"), "*": fsdp.zero3("data")}
    low = Precision(main=F32, compute=BF16, grads=BF16)
    text = repr(Spec({"data": 8}, rules, precision=low, units=["blocks.*"], trainable={"head": False}))
    for expected in (
        "*.bias: ddp(data), *: zero3(data)",
        "main float32, compute bfloat16, grads bfloat16",
        "blocks.*",
        "head: False",
        "mean over data ranks",
    ):
        assert expected in text


def test_the_mesh_comes_first() -> None:
    with pytest.raises(SpecError, match=r"Spec\(mesh\): expected a DeviceMesh.*the mesh comes first.* got a Placement"):
        Spec(fsdp.zero3("data"))  # type: ignore[arg-type]
