"""The order of streams that GPUs have, without one: what lanes and compute do to memory is held apart by waits, also
where main weights, gradients and what an optimizer keeps lie in the host's memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.streams import WAYS, Order, Ordered, ordered, trained
from support.tables import marked

import functional_fsdp as fsdp
from functional_fsdp import _host_memory
from functional_fsdp._engine.reductions import Staging
from functional_fsdp._runtime.runtime import runtime_of

HOST = "pinned_host"
MAIN = {"main": HOST}

# ---------------------------------------------------------------- what is seen


def lanes_of(order: Order) -> Ordered:
    lanes = runtime_of(fsdp.local_mesh()).lanes
    assert isinstance(lanes, Ordered)
    return lanes


def job(lanes: Ordered, mark: Any, work: Callable[[], Any]) -> Any:
    lanes.wait(mark)
    work()
    yield from ()


def test_what_no_wait_holds_apart_is_a_race() -> None:
    with ordered() as order:
        lanes = lanes_of(order)
        a = torch.zeros(8)
        lanes.enqueue("fetch", job(lanes, lanes.mark(), lambda: a[:4].add_(1)))
        a[4:].add_(1)  # other bytes
        assert not order.races
        read = lanes.enqueue("store", job(lanes, lanes.mark(), lambda: a[4:].sum()))
        a[4:].sum()  # two that read
        assert not order.races
        a[4:].add_(1)
        assert order.races == ["aten.add_.Tensor (4,) on compute, aten.sum.default (4,) on store"]
        order.races.clear()
        lanes.wait(read)
        a[4:].add_(1)
        lanes.join("fetch")
        a.add_(1)
        assert not order.races
        lanes.enqueue("update", job(lanes, read, lambda: a.sum()))  # a mark of what was before the last writes
        assert "aten.sum.default (8,) on update, aten.add_.Tensor (8,) on compute" in order.races


def test_memory_is_made_and_given_back_in_an_order() -> None:
    with ordered() as order:
        lanes = lanes_of(order)
        a = torch.zeros(8)
        lanes.enqueue("fetch", job(lanes, None, lambda: a.fill_(1)))
        assert len(order.races) == 2  # it was made, and filled
        order.races.clear()
        lanes.join("fetch")
        a.untyped_storage().resize_(0)
        a.untyped_storage().resize_(32)
        assert not order.races
        lanes.enqueue("fetch", job(lanes, None, lambda: a.fill_(1)))
        assert order.races == ["aten.fill_.Scalar (8,) on fetch, resize_(32) on compute"]
        order.races.clear()
        a.untyped_storage().resize_(0)
        assert order.races == ["resize_(0) on compute, aten.fill_.Scalar (8,) on fetch"]
        order.races.clear()
        for keeps in (False, True):
            b = torch.zeros(8)
            lanes.enqueue("fetch", job(lanes, lanes.mark(), partial(torch.sum, b)))
            if keeps:
                lanes.keep(b)
            del b
            gc.collect()
        assert order.races == ["memory of compute goes, and aten.sum.default (8,) on fetch"]


# ---------------------------------------------------------------- steps


ROWS = [
    (kind, overlap, way, preset)
    for kind in ("device", HOST, MAIN)
    for overlap in (False, True)
    for way in WAYS
    for preset in ("zero3", "zero1", "ddp")
]
QUICK = [(HOST, True, way, "zero3") for way in WAYS] + [
    (HOST, False, "", "zero3"), (HOST, False, "lacking", "zero3"), (HOST, True, "", "ddp"),
    (MAIN, True, "", "zero3"), (MAIN, False, "", "zero1"), ("device", True, "lacking", "zero3"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "overlap", "way", "preset"), marked(ROWS, QUICK))
def test_steps_race_with_nothing_and_have_the_same_bits(kind: Any, overlap: bool, way: str, preset: str) -> None:
    found, races = trained(preset, kind, overlap, way, watched=True)
    assert not races
    plain, _ = trained(preset, "device", overlap, way, watched=False)
    assert all(torch.equal(found[path], plain[path]) for path in plain)


def test_two_lineages_share_lanes_and_race_with_nothing() -> None:
    with ordered() as order:
        schedule = fsdp.Schedule(overlap_update=True)
        spec = fsdp.Spec(fsdp.local_mesh(), fsdp.zero3("data", memory_kind=HOST), schedule=schedule)
        params = {"a": torch.ones(300), "b": torch.ones(200)}
        one, two = (fsdp.shard(params, spec, fsdp.adamw(lr=0.1)) for _ in range(2))
        for _ in range(3):
            first, second = fsdp.reduce(one, params), fsdp.reduce(two, params)
            two, one = fsdp.step(second), fsdp.step(first)
        assert torch.equal(fsdp.full_params(one)["a"], fsdp.full_params(two)["a"])
        assert not order.races


# ---------------------------------------------------------------- each wait is needed


class NeverFresh(_host_memory.Streamed):
    """Its buffers are used as if compute had never had their memory."""

    @property
    def fresh(self) -> bool:
        return False

    @fresh.setter
    def fresh(self, value: bool) -> None:
        pass


def left_out(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, taken, settle = _host_memory._copies, _host_memory._taken, Staging.settle
    if what in ("fetch", "store"):
        back = ("fetch", "store").index(what)
        monkeypatch.setattr(
            _host_memory,
            "_copies",
            lambda lanes, after, pairs, way: copies(lanes, after if way != back else [], pairs, way),
        )
    elif what == "update":
        monkeypatch.setattr(_host_memory, "_taken", lambda lanes, after, *rest: taken(lanes, [], *rest))
    elif what == "reduction":
        monkeypatch.setattr(_host_memory, "_taken", lambda lanes, after, *rest: taken(lanes, after[:1], *rest))
    elif what == "fresh":
        monkeypatch.setattr(_host_memory, "Streamed", NeverFresh)
    else:

        def settled(staging: Staging) -> None:
            staging.marks.pop("store", None)
            settle(staging)

        monkeypatch.setattr(Staging, "settle", settled)


@pytest.mark.parametrize(
    ("what", "kind", "overlap", "by"),
    [
        ("fetch", HOST, False, "fetch"), ("fetch", HOST, True, "fetch"), ("store", HOST, False, "store"),
        ("store", HOST, True, "store"), ("update", HOST, False, "compute"), ("update", HOST, True, "update"),
        ("reduction", MAIN, True, "update"), ("fresh", HOST, True, "fetch"), ("the end", HOST, True, "store"),
    ],
)  # fmt: skip
def test_a_wait_that_is_left_out_is_a_race(
    what: str, kind: Any, overlap: bool, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out(what, monkeypatch)
    _, races = trained("zero3", kind, overlap, "", watched=True)
    assert any(f"on {by}" in race for race in races)
