"""What it costs that a state lies in the host's memory, told before there is a state, and where it is told."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import functional_fsdp as fsdp
from functional_fsdp.look import draw

HOST = "pinned_host"
N = 1024  # elements of a layer, and as many of a bucket, on two ranks
PARAMS = {f"layers.{i}": {"w": torch.empty(32, 32, device="meta")} for i in range(3)}
BF16 = fsdp.Precision(compute=torch.bfloat16)


def abstract(placement: Any, optimizer: Any = None) -> fsdp.State:
    return fsdp.abstract_state(PARAMS, fsdp.Spec({"data": 2}, placement, precision=BF16), optimizer or fsdp.adamw())


def test_bytes_each_way_are_known_of_shapes_alone() -> None:
    mine = 3 * N // 2  # elements on a rank
    found = fsdp.host_transfer(abstract(fsdp.zero3("data", memory_kind=HOST)))
    assert found.update == mine * (3 * 4 + 4)  # main weights and two moments; gradients
    assert found.stored == mine * (3 * 4 + 2)  # those; compute shards
    assert found.beside == (3 + 2) * N // 2 * 2  # the last layer is gathered once
    assert found.gradients == mine * 4
    assert (found.to_device, found.to_host) == (found.update + found.beside, found.stored + found.gradients)
    assert math.isnan(found.bandwidth)
    assert math.isnan(found.seconds)
    assert "GB/s" not in repr(found)
    at = fsdp.host_transfer(abstract(fsdp.zero3("data", memory_kind=HOST)), 1e9)
    assert at.seconds == (at.update + at.beside + at.gradients) / 1e9
    assert repr(at) == (
        "a step moves 29.0 KiB to the device and 27.0 KiB to the host (in step 24.0 KiB and 21.0 KiB, beside compute "
        "5.0 KiB and 6.0 KiB): at most 0.000 s at 1.0 GB/s each way"
    )


def test_what_stays_on_the_device_costs_nothing() -> None:
    main = fsdp.host_transfer(abstract(fsdp.zero3("data", memory_kind={"main": HOST}), fsdp.sgd(momentum=0.9)))
    assert main[:4] == (2 * 4 * 3 * N // 2, 2 * 4 * 3 * N // 2, 0, 0)
    whole = fsdp.host_transfer(abstract(fsdp.ddp("data", memory_kind=HOST), fsdp.sgd()))
    assert whole[:4] == (2 * 4 * 3 * N, 4 * 3 * N, 0, 4 * 3 * N)  # compute copies are whole, and on the device
    none = fsdp.host_transfer(abstract(fsdp.zero3("data")))
    assert none[:4] == (0, 0, 0, 0)
    assert repr(none) == "a step moves nothing between the host's memory and the device"
    some = {"layers.0*": fsdp.zero3("data", memory_kind=HOST), "*": fsdp.zero3("data")}
    assert fsdp.host_transfer(abstract(some)).gradients == 4 * N // 2


@pytest.mark.parametrize("bandwidth", [0, -1.0, math.inf, math.nan, "50 GB/s"])
def test_a_bandwidth_is_a_number(bandwidth: Any) -> None:
    with pytest.raises(fsdp.SpecError, match=r"host_transfer\(bandwidth=.*expected bytes a second"):
        fsdp.host_transfer(abstract(fsdp.zero3("data", memory_kind=HOST)), bandwidth)


def test_a_spec_says_what_lies_there_and_where_to_ask_for_bytes() -> None:
    def said(placement: Any) -> str:
        lines = repr(fsdp.Spec({"data": 2}, placement)).splitlines()
        return next((line.partition("memory")[2].strip() for line in lines if line.startswith("host's memory")), "")

    ask = "(bytes: print(layout); what a step moves: host_transfer(state))"
    every = "main weights, optimizer state, main gradients"
    assert said(fsdp.zero3("data", memory_kind=HOST)) == f"{every}, compute shards {ask}"
    assert said(fsdp.zero2("data", memory_kind=HOST)) == f"{every} {ask}"
    rules = {
        "a": fsdp.zero3("data", memory_kind={"main": HOST}),
        "b": fsdp.zero3("data"),
        "*": fsdp.ddp("data", memory_kind=HOST),
    }
    assert said(rules) == f"a: main weights, optimizer state; *: {every} {ask}"
    assert said(fsdp.zero3("data")) == ""


def test_layouts_and_states_say_how_many_bytes() -> None:
    state = abstract(fsdp.zero3("data", memory_kind=HOST))
    assert repr(state.layout).splitlines()[-1] == (
        "in the host's memory, on a rank: main 6.0 KiB, weights 3.0 KiB, grads 6.0 KiB, and what an optimizer keeps; "
        "host_transfer(state) says what a step moves, of an abstract_state, too"
    )
    assert repr(state).splitlines()[-1] == (
        "a step moves 29.0 KiB to the device and 27.0 KiB to the host (in step 24.0 KiB and 21.0 KiB, beside compute "
        "5.0 KiB and 6.0 KiB); see host_transfer(state)"
    )
    rows = {line.split()[0]: line for line in repr(state).splitlines() if line}
    for field, size in (("main", "6.0 KiB"), ("weights", "3.0 KiB"), ("opt", "12.0 KiB")):
        assert rows[field].endswith(f"{size} in host memory")
    near = abstract(fsdp.zero3("data"))
    assert "host" not in repr(near) + repr(near.layout)
    assert [state.layout.host_nbytes(kind) for kind in ("main", "weights", "grads")] == [6144, 3072, 6144]
    assert near.layout.host_nbytes("main") == 0


def test_a_picture_of_bytes_leaves_them_out() -> None:
    far, near = (abstract(fsdp.zero3("data", memory_kind=kind)).layout for kind in (HOST, "device"))
    assert {*draw._kept_bytes(near)} - {*draw._kept_bytes(far)} >= {"main weights", "gradients"}
