"""async_save: the same checkpoint as `save` writes, beside the training; what it meets, and who keeps what."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.commands import command
from support.driven import refused
from support.problems import LOOPS, batch, mesh_and_placement, net
from support.ranks import each_rank
from support.strikes import bits

import functional_fsdp as fsdp
from functional_fsdp import CheckpointError, launch
from functional_fsdp._io import background as _background
from functional_fsdp._io import background as _writer_process
from functional_fsdp._io.folder import prune, reading
from functional_fsdp._runtime.runtime import runtime_of


def begun(preset: str = "zero3") -> tuple[fsdp.State, Any]:
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net(torch.float32))
    extras = {"seen": torch.zeros((), dtype=torch.int64), "none": torch.zeros(0)}
    return fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.adamw(lr=1e-2))._evolve(extras=extras), model


def trained(state: fsdp.State, model: Any, steps: int) -> fsdp.State:
    for _ in range(steps):
        state = fsdp.step(LOOPS["whole"](model, state, batch(state.steps, dist.get_rank()), True)[0])
    return state


def told(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, but for which save it is of and where bytes lie."""
    note = json.loads((folder / "layout.json").read_text())
    tensors = {name: (kind, shape, [[*c[:2], c[-1][1:]] for c in chunks]) for name, (kind, shape, chunks) in
               note["tensors"].items()}  # fmt: skip
    return {**{k: note[k] for k in ("step", "leaves", "paths", "tree", "extras", "optimizer")}, "tensors": tensors}


@pytest.mark.parametrize(
    ("preset", "ranks"),
    [("zero3", 2), *(pytest.param(*row, marks=pytest.mark.large) for row in (("zero3", 1), ("hsdp", 4)))],
)
@each_rank("ranks", processes=True)
def test_it_writes_what_save_writes_while_the_state_is_trained_on(preset: str, ranks: int, tmp_path: Path) -> None:
    state, model = begun(preset)
    state = trained(state, model, 2)
    wanted = bits(state)
    fsdp.save(state, tmp_path / "plain")
    future = fsdp.async_save(state, tmp_path / "beside")
    assert isinstance(future, Future)
    state = trained(state, model, 2)
    assert future.result(60) == tmp_path / "beside"
    assert future.done()
    dist.barrier()
    assert told(tmp_path / "plain") == told(tmp_path / "beside")
    assert all(map(torch.equal, bits(fsdp.load(tmp_path / "beside", like=state)), wanted))
    files = sorted(os.listdir(tmp_path / "beside"))
    assert (files[0], files[-1]) == (".metadata", "layout.json")
    assert not [name for name in files if "done" in name or "lock" in name]


def failures(folder: str) -> list[str]:
    """What is raised, where, on this rank."""
    path, said = Path(folder), []
    state, _ = begun()
    rank = dist.get_rank()

    def tried(do: Any) -> None:
        try:
            do()
            said.append("nothing")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}".replace(folder, "."))

    (path / "taken").mkdir(exist_ok=True)
    dist.barrier()
    tried(lambda: fsdp.async_save(state, path / "taken"))  # in the call
    tried(lambda: fsdp.async_save(state, path / f"mine_{rank}"))
    tried(lambda: fsdp.async_save(state, path / "step_1", max_to_keep=0))
    tried(lambda: fsdp.async_save(state, path / "best", max_to_keep=2))
    tried(lambda: fsdp.async_save(fsdp.unshard(state)[0], path / "middle"))
    dist.barrier()
    state, _ = begun()

    future = fsdp.async_save(state._evolve(extras={"seen": torch.full((), rank)}), path / "differs")
    tried(lambda: future.result(60))
    tried(lambda: fsdp.async_save(state, path / "after").result(60))  # asked for already

    fsdp.async_save(state._evolve(extras={"seen": torch.full((), rank)}), path / "differs")
    tried(lambda: fsdp.save(state, path / "next"))  # nobody has asked
    tried(lambda: fsdp.save(state, path / "next"))

    background = _background._made[runtime_of(state.spec.mesh)]
    with background.lock:  # what this rank's own process writes is asked for by a thread, which waits
        future = fsdp.async_save(state, path / "killed")
        assert background.process is not None
        if rank == 1:
            background.process.kill()
    tried(lambda: future.result(60))
    tried(lambda: fsdp.async_save(state, path / "again").result(60))

    pid = _background._made[runtime_of(state.spec.mesh)].process.pid  # type: ignore[union-attr]
    for full in (0, 1):
        if rank == full:
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        tried(lambda: fsdp.async_save(state, path / "full").result(60))
        if rank == full:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    return said


def test_what_goes_wrong_is_raised_on_every_rank_in_the_call_or_by_the_future(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = launch(failures, (str(tmp_path),), nprocs=2)
    assert first[0] == "FileExistsError: save: ./taken exists. Choose another folder, or remove it first."
    assert second[0].startswith("FileExistsError: async_save: rank 0 met")
    for said in (first, second):
        assert said[1].startswith("CheckpointError: async_save: rank 0 names the folder ./mine_0, rank 1 names")
        assert said[2].endswith("max_to_keep is 0; expected a whole number, at least 1, or None to keep all.")
        assert "max_to_keep=2 with the folder 'best'" in said[3]
        assert said[4].startswith("StaleStateError: async_save: this State is in the middle of a step.")
        assert said[6] == "nothing"
        assert said[7].startswith("CheckpointError: the save before this one has failed: ") or "rank 0 met" in said[7]
        assert said[8] == "nothing"
        assert said[10] == "nothing"
    assert first[5].startswith("TreeError: async_save: State.extras holds a plain tensor at 'seen' that differs")
    assert second[5].startswith(
        "TreeError: async_save: rank 0 met TreeError: State.extras holds a plain tensor at 'seen'"
    )
    assert first[9] == "CheckpointError: async_save: the process that writes for rank 1 has ended."
    assert second[9] == "CheckpointError: async_save: the process that writes has ended, with exit code -9."
    for full, (at, ranks) in enumerate([(11, (first, second)), (12, (second, first))]):
        assert ranks[0][at].startswith("OSError: [Errno 27] File too large: './full.partial-")
        assert ranks[0][at].endswith(f"/__{full}_0.distcp'")
        assert ranks[1][at] == f"OSError: async_save: rank {full} met {ranks[0][at]}"
    assert sorted(os.listdir(tmp_path)) == ["after", "again", "next", "taken"]


@each_rank(2, processes=True)
def test_the_newest_are_kept_and_those_that_are_being_read(tmp_path: Path) -> None:
    state, model = begun()
    for name in ("best", "step_note"):
        (tmp_path / name).mkdir(exist_ok=True)
    for number in (9, 10, 11):
        state = trained(state, model, 1)
        (fsdp.save(state, tmp_path / f"step_{number}", max_to_keep=2) if number < 11 else
         fsdp.async_save(state, tmp_path / f"step_{number}", max_to_keep=2).result(60))  # fmt: skip
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == ["best", "step_10", "step_11", "step_note"]
    with reading(tmp_path / "step_10"):
        fsdp.save(trained(state, model, 1), tmp_path / "step_12", max_to_keep=1)
        dist.barrier()
        assert sorted(os.listdir(tmp_path)) == ["best", "step_10", "step_12", "step_note"]
        dist.barrier()
    fsdp.save(trained(fsdp.newest(state), model, 1), tmp_path / "step_13", max_to_keep=1)
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == ["best", "step_13", "step_note"]


@each_rank(2, processes=True)
def test_an_interrupt_in_the_call_costs_nothing_and_the_pool_grows(tmp_path: Path) -> None:
    """Interrupts wherever the call waits, and a larger state after a smaller one."""
    state, _ = begun()
    background = _background.background_of(runtime_of(state.spec.mesh))
    ask = background._ask

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    def joins(*given: Any) -> Any:
        return interrupt() if given[0] == "join" else ask(*given)

    for attribute, put in (("_ask", joins), ("copy", interrupt), ("write", interrupt)):
        with mock.patch.object(background, attribute, put), pytest.raises(KeyboardInterrupt):
            fsdp.async_save(state, tmp_path / f"step_{attribute}")
        dist.barrier()
        fsdp.async_save(state, tmp_path / f"again_{attribute}").result(60)
    first = fsdp.async_save(state, tmp_path / "first")
    assert not first.cancel()
    larger = state._evolve(extras={"seen": torch.zeros(100_000)})
    before = background.pool.place
    fsdp.async_save(larger, tmp_path / "larger").result(60)
    assert first.done()
    assert background.pool.place[1] > before[1]
    there = fsdp.load(tmp_path / "larger", like=larger)
    assert torch.equal(there.extras["seen"], larger.extras["seen"])
    assert sorted(os.listdir(tmp_path)) == ["again__ask", "again_copy", "again_write", "first", "larger"]


@each_rank(2, processes=True)
def test_an_interrupt_while_it_waits_for_the_save_before_forgets_nothing(tmp_path: Path) -> None:
    """That is still there, and its error too."""
    state, _ = begun()
    differs = state._evolve(extras={"seen": torch.full((), dist.get_rank())})
    future: Any = fsdp.async_save(differs, tmp_path / "step_1")
    interrupt = mock.patch.object(Future, "exception", side_effect=KeyboardInterrupt)
    with interrupt, pytest.raises(KeyboardInterrupt):
        fsdp.async_save(state, tmp_path / "step_2")
    refused((lambda: fsdp.async_save(state, tmp_path / "step_2"), "the save before this one has failed"))
    fsdp.async_save(state, tmp_path / "step_2").result(60)
    assert future.done()


@each_rank(2, processes=True)
def test_a_checkpoint_that_was_removed_for_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    """One rank comes late, to a checkpoint that was just removed."""
    state, _ = begun()
    fsdp.save(state, tmp_path / "step_1")
    late = CheckpointError("has just been removed")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank():
            patch.setattr("functional_fsdp._io.checkpoint.reading", mock.Mock(side_effect=late))
        refused((lambda: fsdp.load(tmp_path / "step_1", like=state), "has just been removed"))
    assert fsdp.load(tmp_path / "step_1", like=state).steps == 0


def test_checkpoints_of_other_runs_are_not_counted(tmp_path: Path) -> None:
    for name in ("seed1_step_100", "seed1_step_200", "7b_step_1", "7b_step_2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "layout.json").write_text(json.dumps({"step": int(name.rpartition("_")[2])}))
    prune(tmp_path / "7b_step_2", 1)
    assert sorted(os.listdir(tmp_path)) == ["7b_step_2", "seed1_step_100", "seed1_step_200"]


def never_asked(folder: str) -> int:
    state, model = begun()
    fsdp.async_save(trained(state, model, 1), Path(folder, "step_1"))
    return 1


def test_a_call_ends_when_its_saves_have(tmp_path: Path) -> None:
    assert launch(never_asked, (str(tmp_path),), nprocs=2) == [1, 1]
    assert os.listdir(tmp_path) == ["step_1"]


def by_group(folder: str) -> list[str]:
    """Two meshes of one rank each, which save at once: to folders of their own, and to one."""
    rank = fsdp.local_mesh().get_rank()
    groups = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "data"))
    params = {"a": torch.arange(12.0)}
    state = fsdp.shard(params, fsdp.Spec(groups["data"]), fsdp.sgd(lr=0.1))
    said = []
    for name in (f"own_{rank}", "one"):
        try:
            fsdp.async_save(state, Path(folder, name)).result(60)
            said.append("there")
        except FileExistsError as error:
            said.append(type(error).__name__)
    return said


@pytest.mark.large  # each rank begins a process that writes; `test_checkpoint` has it of `save`
def test_of_two_groups_that_save_to_one_folder_one_wins(tmp_path: Path) -> None:
    first, second = launch(by_group, (str(tmp_path),), nprocs=2)
    assert first[0] == second[0] == "there"
    assert sorted([first[1], second[1]]) == ["FileExistsError", "there"]
    assert sorted(os.listdir(tmp_path)) == ["one", "own_0", "own_1"]


def dies(folder: str) -> None:
    """Rank 1 is killed while both write."""
    state, _ = begun()
    fsdp.save(state, Path(folder, "step_0"))
    slow = _background.background_of(runtime_of(state.spec.mesh))
    before = slow._ask

    def ask(*request: Any) -> None:
        if request[0] == "write" and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        before(*request)

    slow._ask = ask  # type: ignore[method-assign]
    fsdp.async_save(state, Path(folder, "step_1"))
    time.sleep(60)


def test_a_rank_that_is_killed_leaves_no_checkpoint_and_takes_none_along(tmp_path: Path) -> None:
    with pytest.raises(fsdp.LaunchError, match="SIGKILL"):
        launch(dies, (str(tmp_path),), nprocs=2)
    latest = fsdp.latest_checkpoint(tmp_path)
    assert latest is not None
    assert latest.name == "step_0"
    deadline = time.monotonic() + 20  # the other's process ends with it
    while time.monotonic() < deadline and [p for p in tmp_path.iterdir() if p.name == "step_1"]:
        time.sleep(0.1)
    assert not (tmp_path / "step_1").exists()


def test_an_error_that_cannot_be_sent_is_told_in_words() -> None:
    class Local(Exception):
        pass

    error = pickle.loads(_writer_process._pickled(Local("of its own")))
    assert (type(error), str(error)) == (CheckpointError, "Local: of its own")
    assert pickle.loads(_writer_process._pickled(None)) is None


PROGRAM = """
import gc, sys
import torch
import functional_fsdp as fsdp

fsdp.local_mesh("cpu")
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
state = fsdp.shard({"a": torch.ones(1000)}, fsdp.Spec(mesh), fsdp.adamw())
fsdp.async_save(state, sys.argv[1])
del mesh, state
gc.collect()
"""


def test_python_waits_for_a_save_at_the_end_of_the_program_which_outlives_its_mesh(tmp_path: Path) -> None:
    done = command(sys.executable, "-W", "error", "-c", PROGRAM, tmp_path / "step_1")
    assert (done.returncode, done.stderr) == (0, "")
    assert fsdp.latest_checkpoint(tmp_path) == tmp_path / "step_1"
