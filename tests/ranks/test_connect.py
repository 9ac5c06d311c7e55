"""Which communicators are connected while a state is made: those of the collectives that each step has."""

from __future__ import annotations

import threading
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import functional_fsdp as fsdp
from functional_fsdp._runtime import stream_lanes
from functional_fsdp._runtime.lanes import HostLanes
from functional_fsdp._runtime.stream_lanes import StreamLanes
from functional_fsdp._state import shard

SGD = fsdp.sgd(lr=1e-2)


def made(placement: Any, optimizer: Any, transports: tuple[str, ...]) -> None:
    mesh = fsdp.local_mesh()
    transport = transports[sum(mesh.get_coordinate() or ()) % len(transports)]
    with suppress(fsdp.SpecError):  # settings differ; copy engines are for GPUs
        fsdp.shard({"w": torch.ones(8, 8)}, fsdp.Spec(mesh, placement, transport=transport), optimizer)


@pytest.mark.parametrize(
    ("mesh", "placement", "optimizer", "transports", "there", "expected"),
    [
        ({"data": 2}, fsdp.zero3("data"), SGD, ("collective",), [], ["gather", "reduce", "waits"]),
        ({"data": 2}, fsdp.zero3("data"), SGD, ("collective",), ["gather"], ["reduce", "waits"]),
        ({"data": 2}, fsdp.zero3("data"), None, ("collective",), [], ["gather", "waits"]),
        ({"data": 2}, fsdp.zero3("data"), None, ("collective",), ["gather"], ["waits"]),
        ({"data": 2}, fsdp.zero3("data"), SGD, ("copy_engine",), [], ["waits"]),
        ({"data": 2}, fsdp.zero3("data"), SGD, ("collective", "copy_engine"), [], ["waits"]),
        ({"replica": 2, "data": 2}, fsdp.hsdp("replica", "data"), SGD, ("collective",), [], []),
        ({"data": 1}, fsdp.zero3("data"), SGD, ("collective",), [], []),
    ],
)
def test_lanes_that_a_step_uses_are_connected(
    mesh: Any, placement: Any, optimizer: Any, transports: Any, there: Any, expected: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Not where ranks were given different specs: they would wait for each other, and not say what differs."""
    found: list[Any] = []
    missing = [lane for lane in ("gather", "reduce") if lane not in there]
    monkeypatch.setattr(HostLanes, "connects", True)
    monkeypatch.setattr(HostLanes, "unconnected", lambda self: missing, raising=False)
    monkeypatch.setattr(HostLanes, "connect", lambda self, lanes: found.extend(lanes), raising=False)
    monkeypatch.setattr(HostLanes, "connected", lambda self: found.append("waits"), raising=False)
    with fsdp.simulate(**mesh) as ranks:
        ranks(made, placement, optimizer, transports)
    assert sorted(found) == sorted(expected * 2)


@pytest.mark.parametrize(
    ("error", "waits"),
    [(fsdp.TreeError, 2), (ValueError, 2), (fsdp.CommError, 0), (fsdp.RestartError, 0), (KeyboardInterrupt, 0)],
)
def test_nobody_waits_for_a_rank_that_has_left(
    error: type[BaseException], waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not have begun to connect."""
    found: list[str] = []
    monkeypatch.setattr(HostLanes, "connects", True)
    monkeypatch.setattr(HostLanes, "unconnected", lambda self: ["gather"], raising=False)
    monkeypatch.setattr(HostLanes, "connect", lambda self, lanes: None, raising=False)
    monkeypatch.setattr(HostLanes, "connected", lambda self: found.append("waits"), raising=False)

    def leave(*_: Any) -> None:
        raise error("left")

    def making() -> None:
        with pytest.raises(error, match="left"):
            fsdp.shard({"w": torch.ones(8)}, fsdp.Spec(fsdp.local_mesh()), SGD)

    monkeypatch.setattr(shard, "agree", leave)
    with fsdp.simulate(data=2) as ranks:
        ranks(making)
    assert len(found) == waits


def test_lanes_that_only_one_rank_has_connected_are_connected_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looks at another time, where some are under way since a call that was left."""
    found: list[Any] = []
    missing = [["reduce"], ["gather", "reduce"]]
    monkeypatch.setattr(HostLanes, "connects", True)
    monkeypatch.setattr(HostLanes, "unconnected", lambda self: missing[self.run.coordinate["data"]], raising=False)
    monkeypatch.setattr(HostLanes, "connect", lambda self, lanes: found.append(lanes), raising=False)
    monkeypatch.setattr(HostLanes, "connected", lambda self: None, raising=False)
    with fsdp.simulate(data=2) as ranks:
        ranks(made, fsdp.zero3("data"), SGD, ("collective",))
    assert found == [["gather", "reduce"]] * 2


class Connection:
    """Lanes whose collectives wait until they are let go, and the groups that each has connected."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gone: bool = False) -> None:
        self.go, self.begun, self.found = threading.Event(), threading.Event(), list[Any]()
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(stream_lanes, "all_gather_single", self.all_gather)
        monkeypatch.setattr(stream_lanes, "reduce_scatter_single", self.reduce_scatter)
        groups = {(lane, "data"): lane for lane in ("gather", "reduce", "outer")}
        run = SimpleNamespace(groups=groups, sizes={"data": 2}, size=2, gone=lambda: [1] * gone)
        streams = dict.fromkeys(("gather", "reduce"))
        lanes: Any = SimpleNamespace(run=run, device=torch.device("cpu"), lanes=streams, connecting=[])
        lanes._connect = lambda lanes_: StreamLanes._connect(lanes, lanes_)
        lanes.unconnected = lambda: ["gather", "reduce"]
        self.lanes = lanes
        StreamLanes.connect(lanes, ["gather", "reduce"])

    def all_gather(self, every: torch.Tensor, one: torch.Tensor, group: str) -> None:
        self.issued(group, every.numel(), one.numel())

    def reduce_scatter(self, one: torch.Tensor, every: torch.Tensor, group: str) -> None:
        self.issued(group, every.numel(), one.numel())

    def issued(self, *said: Any) -> None:
        self.begun.set()
        self.go.wait(60)
        self.found.append(said)
        raise RuntimeError("the network")  # whoever uses it next hears of it


def test_lanes_connect_one_after_the_other_and_whoever_makes_a_state_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the state is made."""
    one = Connection(monkeypatch)
    assert one.begun.wait(60)
    assert (one.found, len(one.lanes.connecting)) == ([], 1)
    one.go.set()
    StreamLanes.connected(one.lanes)
    assert (one.found, one.lanes.connecting) == ([("gather", 2, 1), ("reduce", 2, 1)], [])


def test_what_is_under_way_is_not_begun_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since a call that was left; peers that had not begun would else hear of one collective too many."""
    one = Connection(monkeypatch)
    StreamLanes.connect(one.lanes, ["gather", "reduce"])
    one.go.set()
    StreamLanes.connected(one.lanes)
    assert one.found == [("gather", 2, 1), ("reduce", 2, 1)]
    one.lanes.unconnected = lambda: ["reduce"]
    StreamLanes.connect(one.lanes, ["gather", "reduce"])
    StreamLanes.connected(one.lanes)
    assert one.found[2:] == [("reduce", 2, 1)]


def test_nobody_waits_for_a_connection_with_a_rank_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Connection(monkeypatch, gone=True)
    StreamLanes.connected(one.lanes)
    assert (one.found, one.lanes.connecting) == ([], [])
    one.go.set()
