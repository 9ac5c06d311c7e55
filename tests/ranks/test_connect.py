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


class Connection:
    """Lanes whose collectives wait until they are let go, and the groups that each has connected."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gone: bool = False) -> None:
        self.go, self.found = threading.Event(), list[Any]()
        self.both = threading.Barrier(2, timeout=60)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(stream_lanes, "all_gather_single", self.all_gather)
        monkeypatch.setattr(stream_lanes, "reduce_scatter_single", self.reduce_scatter)
        groups = {(lane, "data"): lane for lane in ("gather", "reduce", "outer")}
        run = SimpleNamespace(groups=groups, sizes={"data": 2}, size=2, gone=lambda: [1] * gone)
        streams = dict.fromkeys(("gather", "reduce"))
        lanes: Any = SimpleNamespace(run=run, device=torch.device("cpu"), lanes=streams, connecting=[])
        lanes._connect = lambda lane: StreamLanes._connect(lanes, lane)
        self.lanes = lanes
        StreamLanes.connect(lanes, ["gather", "reduce"])

    def all_gather(self, every: torch.Tensor, one: torch.Tensor, group: str) -> None:
        self.issued(group, every.numel(), one.numel())

    def reduce_scatter(self, one: torch.Tensor, every: torch.Tensor, group: str) -> None:
        self.issued(group, every.numel(), one.numel())

    def issued(self, *said: Any) -> None:
        self.both.wait()  # each waits for the other, as ranks that begin with another one would
        self.go.wait(60)
        self.found.append(said)
        raise RuntimeError("the network")  # whoever uses it next hears of it


def test_lanes_connect_at_once_and_whoever_makes_a_state_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the state is made."""
    one = Connection(monkeypatch)
    assert (one.found, len(one.lanes.connecting)) == ([], 2)
    one.go.set()
    StreamLanes.connected(one.lanes)
    assert (sorted(one.found), one.lanes.connecting) == ([("gather", 2, 1), ("reduce", 2, 1)], [])


def test_nobody_waits_for_a_connection_with_a_rank_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Connection(monkeypatch, gone=True)
    StreamLanes.connected(one.lanes)
    assert (one.found, one.lanes.connecting) == ([], [])
    one.go.set()
