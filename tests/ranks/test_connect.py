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
from functional_fsdp._runtime.agreement import Log
from functional_fsdp._runtime.lanes import HostLanes
from functional_fsdp._runtime.stream_lanes import StreamLanes
from functional_fsdp._state import shard

SGD = fsdp.sgd(lr=1e-2)


def lanes_that_connect(
    monkeypatch: pytest.MonkeyPatch, missing: Any, connect: Any = lambda lanes: None, waits: Any = lambda: None
) -> None:
    """Lanes on the CPU say of themselves that they connect. `missing`: which lanes of a rank are not connected."""
    monkeypatch.setattr(HostLanes, "connects", True)
    monkeypatch.setattr(HostLanes, "unconnected", missing, raising=False)
    monkeypatch.setattr(HostLanes, "connect", lambda self, lanes: connect(lanes), raising=False)
    monkeypatch.setattr(HostLanes, "connected", lambda self: waits(), raising=False)


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
    lanes_that_connect(monkeypatch, lambda self: missing, found.extend, lambda: found.append("waits"))
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
    lanes_that_connect(monkeypatch, lambda self: ["gather"], waits=lambda: found.append("waits"))

    def leave(*_: Any) -> None:
        raise error("left")

    def making() -> None:
        with pytest.raises(error, match="left"):
            fsdp.shard({"w": torch.ones(8)}, fsdp.Spec(fsdp.local_mesh()), SGD)

    monkeypatch.setattr(shard, "agree", leave)
    with fsdp.simulate(data=2) as ranks:
        ranks(making)
    assert len(found) == waits


def test_all_wait_for_what_they_have_begun_where_all_know_that_a_rank_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What they do next would else come before it on some ranks, and after it on others."""
    found: list[str] = []
    lanes_that_connect(monkeypatch, lambda self: ["gather"], waits=lambda: found.append("waits"))
    real = shard.given

    def stopped(*args: Any) -> Any:
        if torch.distributed.get_rank() == 0:
            raise KeyboardInterrupt
        return real(*args)

    def making() -> str:
        with pytest.raises((KeyboardInterrupt, fsdp.RestartError)) as caught:
            fsdp.shard({"w": torch.ones(8)}, fsdp.Spec(fsdp.local_mesh()), SGD)
        return caught.type.__name__

    monkeypatch.setattr(shard, "given", stopped)
    with fsdp.simulate(data=2) as ranks:
        assert ranks(making).get() == ["KeyboardInterrupt", "RestartError"]
    assert found == ["waits"] * 2


def test_lanes_that_only_one_rank_has_connected_are_connected_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looks at another time, where some are under way since a call that was left."""
    found: list[Any] = []
    missing = [["reduce"], ["gather", "reduce"]]
    lanes_that_connect(monkeypatch, lambda self: missing[self.run.coordinate["data"]], found.append)
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
        logs = {lane: Log() for lane in ("gather", "reduce")}
        run = SimpleNamespace(groups=groups, sizes={"data": 2}, size=2, gone=lambda: [1] * gone, logs=logs)
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
    assert {lane: log.count for lane, log in one.lanes.run.logs.items()} == {"gather": 1, "reduce": 2}


def test_nobody_waits_for_a_connection_with_a_rank_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Connection(monkeypatch, gone=True)
    StreamLanes.connected(one.lanes)
    assert (one.found, one.lanes.connecting) == ([], [])
    one.go.set()


class Meanwhile:
    """A thread in whose place a rank issues at once, and waits for nothing until it is asked."""

    def __init__(self, target: Any, args: Any, daemon: bool) -> None:
        self.target, self.args = target, args

    def start(self) -> None:
        self.works = self.target(*self.args)

    def join(self, timeout: float) -> None:
        for work in self.works:
            work.wait()

    def is_alive(self) -> bool:
        return not all(work.is_completed() for work in self.works)


def begun(lanes: Any, firsts: Any) -> list[Any]:
    """What `StreamLanes._connect` issues, on the host's lanes."""
    works = []
    for first in firsts:
        every, one = torch.zeros(lanes.run.size), torch.zeros(1)
        given = (every, one) if first.kind == "all_gather" else (one, every)
        works += [call() for calls in lanes.run.collective(first, *given) for call in calls]
    return works


def left_before() -> list[float]:
    """This rank leaves `shard` where others have begun to connect, and gathers weights of another state."""
    mesh = fsdp.local_mesh()
    state = fsdp.shard({"w": torch.arange(6.0)}, fsdp.Spec(mesh), SGD)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(state.version.lineage.runtime.lanes, "connects", True, raising=False)
        with pytest.raises((KeyboardInterrupt, fsdp.RestartError)):
            fsdp.shard({"w": torch.ones(8)}, fsdp.Spec(mesh), SGD)
    state, weights = fsdp.unshard(state, state.units[0])
    return weights["w"].tolist()


@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
def test_who_has_left_before_it_connects_does_so_before_anything_else(
    who: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the others' few bytes would meet its weights."""

    def connect(lanes: Any, some: Any) -> None:
        if lanes.run.coordinate["data"] in who:
            raise KeyboardInterrupt
        StreamLanes.connect(lanes, some)

    under_way = property(lambda self: vars(self).setdefault("under_way", []))
    monkeypatch.setattr(stream_lanes, "threading", SimpleNamespace(Thread=Meanwhile))
    monkeypatch.setattr(HostLanes, "connecting", under_way, raising=False)
    monkeypatch.setattr(HostLanes, "unconnected", lambda self: ["gather", "reduce"], raising=False)
    monkeypatch.setattr(HostLanes, "_connect", begun, raising=False)
    monkeypatch.setattr(HostLanes, "connect", connect, raising=False)
    monkeypatch.setattr(HostLanes, "connected", StreamLanes.connected, raising=False)
    monkeypatch.setattr(HostLanes, "synchronize", StreamLanes.connected)
    with fsdp.simulate(data=2) as ranks:
        assert ranks(left_before).get() == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 2
