"""local_mesh() under srun and mpirun: two processes each, with the variables that these set; and what is refused."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import ROOT

import functional_fsdp as fsdp
from functional_fsdp._launch import launch
from functional_fsdp._launch.worker import STORE

SLURM = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost"}
TASKS = {
    "srun": lambda rank: SLURM | {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": rank},
    "Open MPI": lambda rank: {
        "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "MPI": lambda rank: {"PMI_RANK": rank, "PMI_SIZE": "2", "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": "2"},
    "torchrun": lambda rank: {
        "RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(10_000 + os.getpid() % 10_000),
    },
}  # fmt: skip
PROGRAM = """  # forks of a process that has imported all and done nothing
import json, os, sys, torch, functional_fsdp as fsdp

def begin():
    mesh = fsdp.local_mesh()
    state = fsdp.shard({"w": torch.zeros(4)}, fsdp.Spec(mesh), fsdp.sgd(lr=1.0))
    state, params = fsdp.unshard(state)
    state = fsdp.step(fsdp.reduce(state, {"w": torch.full((4,), 1.0 + mesh.get_rank())}))
    print(mesh.size(), os.environ["LOCAL_RANK"], fsdp.full_params(state)["w"].tolist(), flush=True)
    torch.distributed.barrier()  # the first rank ends with the store, which others may need until they have printed

for name, tasks in json.loads(sys.argv[1]).items():
    for rank, variables in enumerate(tasks):
        if not os.fork():
            os.environ.update(variables)
            for file in (1, 2):
                os.dup2(os.open(f"{name} {rank} {file}", os.O_WRONLY | os.O_CREAT), file)
            try:
                begin()
            finally:
                os._exit(0)
    for _ in tasks:
        os.wait()
"""


def test_two_processes_are_one_world(tmp_path: Path) -> None:
    tasks = json.dumps({name: [task(rank) for rank in "01"] for name, task in TASKS.items()})
    command = [sys.executable, "-c", PROGRAM, tasks]
    subprocess.run(command, env=without_launchers(), cwd=tmp_path, timeout=250, check=True)
    for launcher, rank in itertools.product(TASKS, (0, 1)):
        out, errors = ((tmp_path / f"{launcher} {rank} {file}").read_text() for file in (1, 2))
        assert out.split("\n")[0] == f"2 {rank} [-1.5, -1.5, -1.5, -1.5]", errors
        taken = f"local_mesh(): 2 ranks, started by {launcher} (" in errors
        assert taken == (rank == 0 and launcher != "torchrun"), errors


def without_launchers() -> dict[str, str]:
    """The environment, without variables that say where a rank is."""
    known = {name for one in launch.LAUNCHERS for name in one[1:] if name} | {*launch.HOSTS}
    gone = known | {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", STORE}
    env = {name: value for name, value in os.environ.items() if name not in gone}
    return env | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def set_only(monkeypatch: pytest.MonkeyPatch, **task: str) -> None:
    known = {name for one in launch.LAUNCHERS for name in one[1:] if name} | {*launch.HOSTS}
    for name in known | {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", STORE}:
        monkeypatch.setenv(name, "")  # so that it is put back, whoever sets it
        monkeypatch.delenv(name)
    for name, value in task.items():
        monkeypatch.setenv(name, value)


def test_the_first_host_of_a_list_of_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456"}
    set_only(monkeypatch, **task, SLURM_STEP_NODELIST="gpu[007-008]", SLURM_JOB_NODELIST="gpu[001-008]")
    assert launch.take_task()
    found = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")]
    assert found == ["9", "16", "1", "gpu007", str(20_000 + 123_456 % 20_000)]


def test_what_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "3"}
    set_only(monkeypatch, **task, MASTER_ADDR="head", MASTER_PORT="1234")
    assert launch.take_task()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("head", "1234")


@pytest.mark.parametrize("task", [
    {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "3"},
    {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"},
])  # fmt: skip
def test_tasks_that_do_not_know_where_rank_0_is_are_refused(
    task: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_only(monkeypatch, **task)
    rank, world, local = [*task][:3]
    with pytest.raises(fsdp.CommError, match=f"as task {task[rank]} of 8") as raised:
        launch.take_task()
    assert f"export RANK=${rank} WORLD_SIZE=${world} LOCAL_RANK=${local}\n" in str(raised.value)
    assert "RANK" not in os.environ


@pytest.mark.parametrize("task", [
    {},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},  # the script of sbatch itself
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"},
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
])  # fmt: skip
def test_one_task_of_another_launcher_is_a_world_of_one(task: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, **task)
    assert not launch.take_task()
    assert not {"RANK", "WORLD_SIZE"} & {*os.environ}
