"""Launchers: which program started this process as one of several ranks, by the variables that it sets.

torchrun    RANK, WORLD_SIZE, ...          taken as they are
srun        SLURM_PROCID, ...              rank 0 is on the first host of the step's list
mpirun      OMPI_COMM_WORLD_RANK, ...      on one host rank 0 is here; on several MASTER_ADDR has to be set
            PMI_RANK, ...

A store of their own for the ranks that torchrun starts together: its store outlives them, with all that they said.

After a restart (`--max-restarts`) ranks would read addresses of processes that are gone. The number of restarts that
torchrun tells each of them is no name for what is theirs: each host counts its own. So the first rank draws a name.

    ranks/R          a number that rank R has just drawn, until it replaces that of its predecessor
    answers/NUMBER   the name, from the first rank, to whoever drew this number
    heard/NAME       how many have it
"""

from __future__ import annotations

import os
import re
import sys
import time
import uuid
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from .._common.errors import CommError

__all__ = ["LAUNCHERS", "first_host", "store_of_this_attempt", "take_task"]


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


POLL = 0.01  # seconds


def store_of_this_attempt(timeout: timedelta) -> tuple[Any, int, int]:
    """The store of `env://`, the rank, and how many ranks there are. Nothing that an earlier attempt said is in it."""
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # else the store belongs to a rank, and ends with it
        meeting = dist.PrefixStore("functional_fsdp/attempts", store)  # type: ignore[attr-defined]
        store = dist.PrefixStore(_name(meeting, rank, world, timeout), store)  # type: ignore[attr-defined]
    return store, rank, world


def _name(store: Any, rank: int, world: int, timeout: timedelta) -> str:
    """A name that all of these ranks know, and that no others had. RuntimeError if they do not come."""
    drawn = uuid.uuid4().hex
    if rank:
        store.set(f"ranks/{rank}", drawn)
        store.wait([f"answers/{drawn}"], timeout)
        name: str = store.get(f"answers/{drawn}").decode()
        store.delete_key(f"answers/{drawn}")
        store.add(f"heard/{name}", 1)
        return name
    answered, end = {""}, time.monotonic() + timeout.total_seconds()
    while store.add(f"heard/{drawn}", 0) < world - 1:
        if time.monotonic() > end:
            raise RuntimeError(f"{store.add(f'heard/{drawn}', 0) + 1} of {world} ranks came")
        for other in range(1, world):
            number = store.get(f"ranks/{other}").decode() if store.check([f"ranks/{other}"]) else ""
            if number not in answered:
                answered.add(number)
                store.set(f"answers/{number}", drawn)
        time.sleep(POLL)
    return drawn
