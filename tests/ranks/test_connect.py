"""Which communicators are connected where a state is made: those of the collectives that each step has."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import functional_fsdp as fsdp
from functional_fsdp._runtime.lanes import HostLanes
from functional_fsdp._runtime.stream_lanes import StreamLanes

SGD = fsdp.sgd(lr=1e-2)


def made(placement: Any, optimizer: Any, transports: tuple[str, ...]) -> None:
    mesh = fsdp.local_mesh()
    transport = transports[sum(mesh.get_coordinate() or ()) % len(transports)]
    with suppress(fsdp.SpecError):  # settings differ; copy engines are for GPUs
        fsdp.shard({"w": torch.ones(8, 8)}, fsdp.Spec(mesh, placement, transport=transport), optimizer)


@pytest.mark.parametrize(
    ("mesh", "placement", "optimizer", "transports", "expected"),
    [
        ({"data": 2}, fsdp.zero3("data"), SGD, ("collective",), ("gather", "reduce")),
        ({"data": 2}, fsdp.zero3("data"), None, ("collective",), ("gather",)),
        ({"data": 2}, fsdp.zero3("data"), SGD, ("copy_engine",), None),
        ({"data": 2}, fsdp.zero3("data"), SGD, ("collective", "copy_engine"), None),
        ({"replica": 2, "data": 2}, fsdp.hsdp("replica", "data"), SGD, ("collective",), None),
        ({"data": 1}, fsdp.zero3("data"), SGD, ("collective",), None),
    ],
)
def test_lanes_that_a_step_uses_are_connected(
    mesh: Any, placement: Any, optimizer: Any, transports: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where ranks were given different specs: they would wait for each other, and not say what differs."""
    found: list[Any] = []
    monkeypatch.setattr(HostLanes, "connects", True)
    monkeypatch.setattr(HostLanes, "connect", lambda self, lanes: found.append(lanes), raising=False)
    with fsdp.simulate(**mesh) as ranks:
        ranks(made, placement, optimizer, transports)
    assert found == [expected] * 2 * (expected is not None)


def test_communicators_are_connected_at_once_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By NCCL, on the device; not where a collective has done so."""
    found: list[Any] = []
    both = threading.Barrier(2, timeout=60)
    device = torch.device("cuda", 3)

    def group(name: str, there: bool) -> Any:
        def connect(device: torch.device) -> None:
            both.wait()  # each waits for the other, as ranks that begin with another one would
            found.append((name, device))

        backend = SimpleNamespace(_is_initialized=lambda: there, eager_connect_single_device=connect)
        return SimpleNamespace(_get_backend=lambda device: backend)

    monkeypatch.setattr(torch.cuda, "device", lambda device: memoryview(b""))  # a context that does nothing
    there = {"gather": False, "reduce": False, "outer": False, "side": True}
    groups = {(name, "data"): group(name, known) for name, known in there.items()}
    lanes: Any = SimpleNamespace(run=SimpleNamespace(groups=groups), device=device)
    StreamLanes.connect(lanes, ("gather", "reduce", "side"))
    assert sorted(found) == [("gather", device), ("reduce", device)]
