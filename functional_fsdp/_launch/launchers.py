"""Launchers: which program started this process as one of several ranks, by the variables that it sets.

torchrun    RANK, WORLD_SIZE, ...          taken as they are
srun        SLURM_PROCID, ...              rank 0 is on the first host of the step's list
mpirun      OMPI_COMM_WORLD_RANK, ...      on one host rank 0 is here; on several MASTER_ADDR has to be set
            PMI_RANK, ...
"""

from __future__ import annotations

import os
import re
import sys
from typing import NamedTuple

from .._common.errors import CommError

__all__ = ["LAUNCHERS", "first_host", "take_task"]


class Launcher(NamedTuple):
    """A launcher's variables: the rank, how many ranks there are, the rank on this host, and how many there."""

    name: str
    rank: str
    world: str
    local: str
    locals: str
    job: str  # alike in all tasks of a job, and different in others


LAUNCHERS = (
    Launcher(
        "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE",
    ),
    Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_JOB_ID"),
    Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_JOB_ID"),
    Launcher("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID"),
)  # fmt: skip
HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
PORTS = 20_000  # from this one on, so many


def take_task() -> bool:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of another launcher; those that
    are set stay. Rank 0 prints which were taken.

    Returns:
        whether there was such a launcher, with more than one task. False: this process is a world of one.

    Raises:
        CommError: there is, and its variables do not say on which host rank 0 is.
    """
    env = os.environ
    for one in LAUNCHERS:
        if one.world == "SLURM_NTASKS" and env.get(one.rank) == "0":
            continue  # the script of `sbatch` has these too, and what it starts without `srun` is one process
        if one.rank in env and env.get(one.world, "1") != "1":
            host = env.get("MASTER_ADDR") or _host(one)
            if not host or one.local not in env:
                raise _unknown(one)
            found = {
                "RANK": env[one.rank], "WORLD_SIZE": env[one.world], "LOCAL_RANK": env[one.local],
                "MASTER_ADDR": host, "MASTER_PORT": str(_port(env.get(one.job, ""))),
            }  # fmt: skip
            for name, value in found.items():
                env.setdefault(name, value)
            if env["RANK"] == "0":
                print(
                    f"local_mesh(): {env['WORLD_SIZE']} ranks, started by {one.name} ({one.rank}, {one.world}); they "
                    f"meet at {env['MASTER_ADDR']}:{env['MASTER_PORT']}",
                    file=sys.stderr,
                )
            return True
    return False


def _host(one: Launcher) -> str:
    """Where rank 0 is, if the variables say so."""
    if one.name == "srun":
        return next((first_host(os.environ[name]) for name in HOSTS if os.environ.get(name)), "")
    alone = os.environ.get(one.locals) == os.environ[one.world]  # all ranks are on this host
    return "127.0.0.1" if alone else ""


def first_host(names: str) -> str:
    """The first host of a list as Slurm writes it.

    >>> first_host("gpu[007-012,020],login1"), first_host("a1,a2"), first_host("rack[1-2]n[08-09]")
    ('gpu007', 'a1', 'rack1n08')
    """
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])*", names.strip())
    return re.sub(r"\[([^\]]*)\]", lambda some: re.split(r"[-,]", some[1])[0], found[0]) if found else ""


def _port(job: str) -> int:
    """A port that tasks of one job have in common: from the job's number, or of the process that started them all."""
    digits = re.sub(r"\D", "", job)
    return PORTS + (int(digits) if digits else os.getppid()) % PORTS


def _unknown(one: Launcher) -> CommError:
    env = os.environ
    return CommError(
        f"local_mesh(): {one.name} started this process as task {env[one.rank]} of {env[one.world]} ({one.rank}, "
        f"{one.world}), and its variables do not say where rank 0 is, or which rank of its host this is. Start the "
        "ranks with torchrun, or set in each task, before Python starts:\n"
        f"    export RANK=${one.rank} WORLD_SIZE=${one.world} LOCAL_RANK=${one.local}\n"
        "    export MASTER_ADDR=<host of rank 0> MASTER_PORT=29500\n"
        "To have a world of one in this task: export RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=localhost "
        "MASTER_PORT=<a free port>."
    )
