"""Checkpoints: the same bits back, for every placement; another layout refused; written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problems import LOOPS, batch, mesh_and_placement, net

import functional_fsdp as fsdp
from functional_fsdp import launch

PRESETS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp")


def start(preset: str) -> tuple[fsdp.State, Any]:
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net(torch.float32))
    return fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.adamw(lr=1e-2)), model


def train(state: fsdp.State, model: Any, first: int, last: int) -> fsdp.State:
    for step in range(first, last):
        state, _ = LOOPS["whole"](model, state, batch(step, dist.get_rank()), True)
        state = fsdp.step(state)
    return state


def resumed(preset: str, folder: str) -> tuple[bool, int, str]:
    state, model = start(preset)
    state = train(state, model, 0, 3)
    path = fsdp.save(state, f"{folder}/step_3")
    straight = fsdp.full_params(train(state, model, 3, 5))  # save did not consume the state
    again = fsdp.load(start(preset)[0], path)
    count = int(again.count)
    back = fsdp.full_params(train(again, model, 3, 5))
    return all(torch.equal(straight[key], back[key]) for key in straight), count, str(fsdp.latest(folder))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("ranks", [1, 4])
def test_resuming_gives_the_same_bits(preset: str, ranks: int, tmp_path: Path) -> None:
    for same, count, latest in launch(resumed, ranks, preset, str(tmp_path)):
        assert same
        assert count == 3
        assert latest == str(tmp_path / "step_3")
    assert [p.name for p in tmp_path.iterdir()] == ["step_3"]


def saved(preset: str, folder: str) -> None:
    fsdp.save(start(preset)[0], folder)


def refused(preset: str, folder: str) -> str:
    with pytest.raises(fsdp.SpecError) as error:
        fsdp.load(start(preset)[0], folder)
    return str(error.value)


def test_another_placement_or_world_size_is_refused_by_name(tmp_path: Path) -> None:
    folder = str(tmp_path / "a")
    launch(saved, 2, "zero3", folder)
    text = launch(refused, 2, "zero2", folder)[1]
    assert "'*: zero3(data)' there, '*: zero2(data)' here" in text
    text = launch(refused, 4, "zero3", folder)[0]
    assert "mesh 'data 2' there, 'data 4' here" in text


def interrupted(folder: str) -> tuple[bool, bool]:
    """The save that dies halfway leaves no checkpoint; the next one succeeds in the same place."""
    state, _ = start("zero3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.save", _die)
        with pytest.raises(OSError, match="disk full"):
            fsdp.save(state, f"{folder}/one")
    dist.barrier()
    nothing = fsdp.latest(folder) is None and not Path(folder, "one").exists()
    dist.barrier()
    fsdp.save(state, f"{folder}/one")
    return nothing, fsdp.latest(folder) == Path(folder, "one")


def _die(*args: Any, **kwargs: Any) -> None:
    raise OSError("disk full")


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    assert launch(interrupted, 2, str(tmp_path)) == [(True, True)] * 2


def test_clear_errors_for_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    state, model = start("zero3")
    with pytest.raises(FileNotFoundError, match="not a complete checkpoint"):
        fsdp.load(state, tmp_path)
    fsdp.save(state, tmp_path / "x")
    with pytest.raises(FileExistsError, match="exists"):
        fsdp.save(state, tmp_path / "x")
    middle, _ = LOOPS["whole"](model, state, batch(0, 0), True)
    with pytest.raises(fsdp.StaleStateError, match="in the middle of a step"):
        fsdp.save(middle, tmp_path / "y")


def cannot_be_written(folder: str) -> tuple[str, int]:
    state = fsdp.shard({"w": torch.ones(5)}, fsdp.Spec(fsdp.local_mesh()), fsdp.adamw())
    with pytest.raises(OSError, match=r"saved\.partial") as error:
        fsdp.save(state, folder)
    return type(error.value).__name__, int(fsdp.step(fsdp.reduce(*fsdp.unshard(state))).count)


def test_what_the_first_rank_cannot_write_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert launch(cannot_be_written, 2, str(tmp_path / "file" / "saved")) == [("NotADirectoryError", 1)] * 2


def test_a_number_in_the_optimizer_state_is_refused_not_dropped(tmp_path: Path) -> None:
    optimizer = fsdp.Optimizer(lambda main: {"steps": 3}, lambda grads, opt, main, count: (main, opt))
    state = fsdp.shard({"w": torch.ones(5)}, fsdp.Spec(fsdp.local_mesh()), optimizer)
    with pytest.raises(fsdp.TreeError, match=r"State\.opt holds a int at 'steps'"):
        fsdp.save(state, tmp_path / "saved")
