"""Routes, without a process group: the collectives that each placement's verbs come down to, for any ranks."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import functional_fsdp as fsdp
from functional_fsdp._common.record import Collective
from functional_fsdp._plan.layout import Bucket
from functional_fsdp._plan.route import Axis, How, Partial, Replicated, Sharded, Step, route, states_of

ONE = {"data": 1024}
TWO = {"replica": 8, "shard": 128}
HOW = How(torch.float32, torch.float32, ("side", "side"), "mean")


def bucket(placement: fsdp.Placement, axes: dict[str, int]) -> Bucket:
    tree = {"w": torch.empty(4096, 1000, device="meta")}
    return next(iter(fsdp.make_layout(tree, fsdp.Spec(axes, placement)).buckets.values()))


def hops(b: Bucket, source: str, target: str, **here: int) -> list[tuple[str, str]]:
    """Kinds and axes of the hops between two kinds of state; "sum" is what autograd gives, Partial everywhere."""
    everywhere = {"sum": Partial, "whole": Replicated}
    sides = [
        tuple((axis, everywhere[kind]) for axis in b.placement.data) if kind in everywhere else states_of(b, kind)
        for kind in (source, target)
    ]
    coordinate = tuple((axis, here.get(axis, 0)) for axis, _ in b.sizes)
    return [(one.kind, one.axis) for one in route(b, *sides, coordinate, HOW).collectives]


@pytest.mark.parametrize(
    ("placement", "axes", "unshard", "reduce"),
    [
        (fsdp.ddp("data"), ONE, [], [("all_reduce", "data")]),
        (fsdp.zero1("data"), ONE, [], [("reduce_scatter", "data")]),
        (fsdp.zero2("data"), ONE, [], [("reduce_scatter", "data")]),
        (fsdp.zero3("data"), ONE, [("all_gather", "data")], [("reduce_scatter", "data")]),
        (
            fsdp.hsdp("replica", "shard"),
            TWO,
            [("all_gather", "shard")],
            [("reduce_scatter", "shard"), ("all_reduce", "replica")],
        ),
        (
            fsdp.hfsdp("replica", "shard"),
            TWO,
            [("all_gather", "shard")],
            [("reduce_scatter", "shard"), ("reduce_scatter", "replica")],
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, fsdp.Placement) else "",
)
def test_verbs_issue_what_the_placement_table_says(
    placement: fsdp.Placement, axes: dict[str, int], unshard: list[tuple[str, str]], reduce: list[tuple[str, str]]
) -> None:
    b = bucket(placement, axes)
    assert hops(b, "weights", "whole") == unshard
    assert hops(b, "sum", "main") == reduce


def test_the_refresh_after_a_step_gathers_only_over_the_axes_between() -> None:
    assert hops(bucket(fsdp.hfsdp("replica", "shard"), TWO), "main", "weights") == [("all_gather", "replica")]
    assert hops(bucket(fsdp.zero1("data"), ONE), "main", "weights") == [("all_gather", "data")]
    assert hops(bucket(fsdp.zero3("data"), ONE), "main", "weights") == []


def test_gathered_parts_land_where_the_rank_belongs() -> None:
    b = bucket(fsdp.hfsdp("replica", "shard"), TWO)
    part = b.numel // 128
    for shard, replica in product((0, 1, 127), (0, 7)):
        coordinate = (("replica", replica), ("shard", shard))
        way = route(b, states_of(b, "main"), (("replica", Replicated), ("shard", Replicated)), coordinate, HOW)
        first, second = (
            Collective("all_gather", axis, n, torch.float32, "", "side", b.name)
            for axis, n in (("replica", part), ("shard", b.numel))
        )
        assert way.steps == (Step("gather", (first,), shard * part, part), Step("gather", (second,), 0, b.numel))
        assert way.collectives == (first, second)
        assert way.numel == b.numel
        assert not way.sums


def test_a_slice_of_what_is_whole_costs_nothing() -> None:
    b = bucket(fsdp.zero3("data"), ONE)
    way = route(b, (("data", Replicated),), (("data", Sharded),), (("data", 5),), HOW)
    assert way.steps == (Step("slice", (), 5 * b.numel // 1024, b.numel // 1024),)
    assert way.collectives == ()


@pytest.mark.parametrize(("have", "want"), [(Sharded, Partial), (Replicated, Partial)])
def test_nothing_becomes_partial(have: Axis, want: Axis) -> None:
    b = bucket(fsdp.zero3("data"), ONE)
    with pytest.raises(fsdp.SpecError, match=rf"{have} -> {want} on the axis 'data' is not a transition"):
        route(b, (("data", have),), (("data", want),), (("data", 0),), HOW)
