"""Flight records: what each rank says of itself when ranks time out or lose one of them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.processes import survivors

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp._launch.launch import stop_workers
from functional_fsdp._runtime.agreement import ON_LOSS
from functional_fsdp.look.__main__ import main
from functional_fsdp.look.flight import NAME, read_flight, said_of_flight


def made() -> fsdp.State:
    params, _ = fsdp.functionalize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    return fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), units=["0", "1"]), fsdp.adamw(lr=0.1))


def sleeps_here() -> None:
    time.sleep(5)


def hangs(folder: str) -> str:
    fsdp.flight_record(folder)
    state = made()
    state, _ = fsdp.unshard(state, "0")
    state = fsdp.release(state, "0")
    if dist.get_rank() == 1:
        sleeps_here()
        return ""
    state, _ = fsdp.unshard(state, "1")  # rank 1 has issued that gather ahead
    with pytest.raises(fsdp.CommError) as error:
        fsdp.full_params(state)
    return str(error.value)


def test_a_rank_that_hangs_says_where(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stop_workers()  # groups that are there keep their timeout
    try:
        text = launch(hangs, (str(tmp_path),), nprocs=2, timeout=2.0)[0]
    finally:
        stop_workers()
    assert "a rank died, hangs, or issued another collective" in text
    (path,) = tmp_path.glob("flight_*.json")
    found = read_flight(path)
    waits, sleeps = found["ranks"]
    assert found["by"] == 0
    assert found["why"] in text
    assert sleeps["line"].startswith(f"{__file__}:")
    assert any(line.endswith(" sleeps_here") for line in sleeps["stacks"]["MainThread"])
    assert sleeps["states"][0]["at"] == 1
    assert sleeps["states"][0]["next"] == "1"
    assert any(last == ["all_gather 1"] for last in waits["lanes"]["gather"]["last"])
    assert waits["lanes"]["control"]["issued"] > sleeps["lanes"]["control"]["issued"]
    printed = capfd.readouterr().err
    assert said_of_flight(found, stacks=False) in printed
    assert f"kept in {path}" in printed
    assert main([str(path)]) == 0
    printed = capfd.readouterr().out
    assert said_of_flight(found) in printed
    assert "sleeps_here" in printed


def hangs_before_the_vote(folder: str) -> str:
    fsdp.flight_record(folder)
    state, params = fsdp.unshard(made())
    state = fsdp.reduce(state, {path: torch.zeros_like(leaf) for path, leaf in params.items()})
    if dist.get_rank() == 1:
        sleeps_here()
        return ""
    with pytest.raises(fsdp.CommError) as error:
        fsdp.step(state)
    return str(error.value)


@pytest.mark.large
def test_a_rank_that_does_not_vote_says_where(tmp_path: Path) -> None:
    stop_workers()
    try:
        text = launch(hangs_before_the_vote, (str(tmp_path),), nprocs=2, timeout=2.0)[0]
    finally:
        stop_workers()
    (path,) = tmp_path.glob("flight_*.json")
    votes, sleeps = read_flight(path)["ranks"]
    assert "vote" in text
    assert votes["lanes"]["control"]["issued"] == sleeps["lanes"]["control"]["issued"] + 1
    assert votes["lanes"]["control"]["last"][-1] == ["all_reduce vote"]
    assert sleeps["lanes"]["reduce"] == votes["lanes"]["reduce"]
    assert sleeps["line"].startswith(f"{__file__}:")


def loses_one(folder: str) -> None:
    fsdp.flight_record(folder)
    state = made()
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    fsdp.full_params(state)


def test_a_rank_that_died_is_in_the_table(tmp_path: Path) -> None:
    for said in survivors(loses_one, 3, str(tmp_path)):
        assert said.startswith("CommError")
    path, *_ = tmp_path.glob("flight_*.json")
    found = read_flight(path)
    assert found["ranks"][2] == {"gone": True}
    assert all("stacks" in one for one in found["ranks"][:2])  # both that are left are heard
    assert "2     its process has ended" in said_of_flight(found)


def test_it_is_off_unless_asked_for() -> None:
    import threading

    def alive() -> bool:
        return any(thread.name == NAME for thread in threading.enumerate())

    assert ON_LOSS == []
    assert not alive()
    fsdp.flight_record("nowhere")
    assert len(ON_LOSS) == 1
    fsdp.flight_record("nowhere")
    assert len(ON_LOSS) == 1
    assert alive()
    fsdp.flight_record(None)
    assert ON_LOSS == []
    until = time.monotonic() + 10
    while alive() and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive()
    assert not Path("nowhere").exists()


def test_files_of_another_kind_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text("[]")
    assert main([str(path)]) == 2
    assert f"{path} is no flight record" in capsys.readouterr().err
    path.write_text(json.dumps({"format": 9, "ranks": [], "why": ""}))
    with pytest.raises(ValueError, match="of format 9; this version reads format 1"):
        read_flight(path)
    assert main([]) == 2
    assert main([str(tmp_path / "none")]) == 2
    assert "usage: python -m functional_fsdp.look" in capsys.readouterr().err


def test_fingerprints_are_read_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train_step(state: fsdp.State, x: torch.Tensor) -> Any:
        state, params = fsdp.unshard(state)
        grads = torch.func.grad(lambda p: (p["0.weight"] * x).sum())(params)
        return fsdp.step(fsdp.reduce(state, grads))

    for name in ("a", "b"):
        step = fsdp.fingerprint(train_step)
        torch.manual_seed(0)
        step(made(), torch.full((4, 4), 2.0 if name == "b" else 1.0))
        step.prints.save(tmp_path / name)
    assert main([str(tmp_path / "a")]) == 0
    assert main([str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    said = capsys.readouterr().out
    assert "Prints of 1 step on 1 rank" in said
    assert "inputs: the input" in said
