"""The mesh of the ranks that are there, and functions on every rank of this machine.

Launchers: which program started this process as one of several ranks, by the variables that it sets.

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

`local_mesh`, the mesh of the ranks that are there, and `launch`, a function on every rank of this machine.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .._common.errors import CommError, expect
from .._shared.torch_names import gloo_options
from . import meshes
from .transfer import without_numpy
from .worker import STORE, TIMEOUT
from .workers import Simulation, WorkerGroup, call_of, default_nprocs


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


T = TypeVar("T")
SHARED_GPUS = "FUNCTIONAL_FSDP_SHARED_GPUS"  # set where ranks may share a GPU, as tests do
_kept: dict[tuple[int, int, bool], WorkerGroup] = {}  # by the caller's process, the number of ranks, and of what kind
_numbers = itertools.count()  # of the process groups that this process was in: each has keys of its own in the store


def local_mesh(device: str | None = None, /, **axes: int) -> DeviceMesh:
    """The mesh of all ranks, whose process group is created if there is none: one rank needs no set-up at all.

    Ranks that torchrun starts again (`--max-restarts`) see nothing of what those before them said in its store. A
    program that makes the process group itself needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for that.

    Args:
        device: "cpu" or "cuda"; by default CUDA where there is any.
        **axes: sizes by name, outermost first, one of which may be -1. Default: one axis, `data=-1`.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks, or a rank has no GPU of its own.
        CommError: not all ranks came; or `mpirun` started tasks on several hosts, and MASTER_ADDR is not set.

    >>> local_mesh(replica=1, shard=-1).mesh_dim_names
    ('replica', 'shard')
    """
    expect("local_mesh(device)", device, str | None, "a kind of device, as 'cpu'; sizes go by name, as data=8")
    if not dist.is_initialized():
        _init_process_group(device or ("cuda" if torch.cuda.device_count() else "cpu"))
    device = device or ("cuda" if "nccl" in dist.get_backend_config() else "cpu")
    axes = axes or meshes.default_axes
    if meshes.made.get("of") is not dist.group.WORLD:
        meshes.made.clear()  # whose process groups were destroyed
        meshes.made["of"] = dist.group.WORLD
    names, sizes = tuple(axes), _sizes(axes, dist.get_world_size())
    key = device, names, sizes
    if key not in meshes.made:
        with _reached(call_of("local_mesh", axes)):
            meshes.made[key] = init_device_mesh(
                device, sizes, mesh_dim_names=names, backend_override=_patient(device, names, sizes)
            )
    return meshes.made[key]


def _patient(device: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> Any:
    """For the groups of axes, on CPUs: as long a timeout as that of all ranks. (torch would wait for half an hour for a
    rank that has died meanwhile. An axis of all ranks has their group.)"""
    if device != "cpu" or dist.get_backend() != "gloo":
        return None
    options, world = gloo_options(), dist.get_world_size()
    return {name: ("gloo", options) for name, size in zip(names, sizes, strict=True) if size < world} or None


@contextmanager
def _reached(what: str) -> Iterator[None]:
    """What torch says of ranks that do not come, or are gone, as an error of this package's."""
    try:
        yield
    except RuntimeError as error:
        rank, world = os.environ.get("RANK", "?"), os.environ.get("WORLD_SIZE", "?")
        raise CommError(
            f"{what}: rank {rank} of {world} could not reach all the others: a rank died, or did not start within the "
            f"timeout, or cannot be reached over the network. Restart the job. torch says: {str(error)[:300]}"
        ) from error


def _init_process_group(device: str) -> None:
    if STORE not in os.environ and not {"RANK", "WORLD_SIZE"} <= {*os.environ}:
        take_task()
    if device == "cuda":
        local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if SHARED_GPUS in os.environ:  # NCCL refuses two ranks of one host on a GPU
            os.environ["NCCL_HOSTID"], local = f"rank {local}", local % gpus
        if local >= gpus:
            raise ValueError(
                f"local_mesh(): this machine has {gpus} GPU(s), none for local rank {local}. "
                f'Start at most {gpus} rank(s) here, or use local_mesh("cpu", ...)'
            )
        torch.cuda.set_device(local)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    timeout = timedelta(seconds=float(os.environ.get(TIMEOUT, "600")))
    if STORE in os.environ:  # a file: a TCPStore looks up every peer's host name, which can take seconds
        file = dist.FileStore(os.environ[STORE])  # type: ignore[attr-defined]
        store: Any = dist.PrefixStore(f"group/{next(_numbers)}", file)  # type: ignore[attr-defined]
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        with _reached("local_mesh()"):
            store, rank, world = store_of_this_attempt(timeout)
    else:
        store, rank, world = dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    with _reached("local_mesh()"):
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    # gloo's threads need the interpreter once more to drop the last collective's tensors; without it they abort.
    atexit.register(time.sleep, 0.1)


def _sizes(axes: dict[str, int], world: int) -> tuple[int, ...]:
    """The axis sizes with -1 worked out.

    >>> _sizes({"replica": 2, "shard": -1}, 8)
    (2, 4)
    """
    call = call_of("local_mesh", axes)
    free = [name for name, size in axes.items() if size == -1]
    bad = [name for name, size in axes.items() if not isinstance(size, int) or (size < 1 and size != -1)]
    if bad or len(free) > 1:
        reason = f"{bad[0]}={axes[bad[0]]} is no size" if bad else f"{' and '.join(free)} are all -1"
        raise ValueError(
            f"{call}: {reason}. Give whole numbers from 1 on, one of which may be -1 (the rest of the ranks)"
        )
    given = math.prod(size for size in axes.values() if size != -1)
    if world % given or (not free and given != world):
        hint = "a divisor of it" if free else "exactly that, or give one axis as -1"
        raise ValueError(f"{call}: the sizes multiply to {given}, the world has {world} rank(s). Make it {hint}")
    return tuple(world // given if size == -1 else size for size in axes.values())


def launch(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nprocs: int | None = None,
    timeout: float | None = None,
    simulate: bool = False,
) -> list[T]:
    """Runs `fn(*args, **kwargs)` on `nprocs` ranks of this machine and returns every rank's result, in rank order.

    The one-shot form of `workers`: what a call returns is sent back. The processes stay for the next call with the same
    `nprocs`: process groups, compiled code and globals of modules are still there. They end with the caller, also one
    that is killed. `fn` and what it refers to are sent anew each time, as the caller sees them now. What ranks print is
    shown, other ranks than 0 with their number before it. Calls from several threads take turns. Ctrl-C stops the call.

    Args:
        fn: any function; one from a notebook cell, `__main__`, a lambda or a closure takes cloudpickle.
        args, kwargs: what it is called with.
        nprocs: number of ranks. Default: one for each GPU, or 2 where there is none.
        timeout: seconds a collective may wait for the other ranks, for the groups that are created in this call.
            Default: 600.
        simulate: on ranks that take turns in this process, see `simulate`.

    Raises:
        LaunchError: a rank raised or died. The workers survive if every rank came to an end.
        RuntimeError: this process is itself a rank, or the call came from inside another one (a signal handler, say).
        TypeError: `fn` or its arguments hold something that cannot be sent.
        ValueError: `nprocs` is less than 1; a `timeout` for simulated ranks.

    >>> launch(lambda x: x * 2, (21,), nprocs=2)  # doctest: +SKIP
    [42, 42]
    """
    if not isinstance(args, tuple | list):
        raise TypeError(
            f"launch(): args is {args!r}; expected a tuple, as in launch(fn, (1, 2)). The number of ranks is nprocs="
        )
    if simulate:
        _no_timeout("launch", timeout)
    count = default_nprocs() if nprocs is None else nprocs
    key = os.getpid(), count, simulate
    if key not in _kept:
        _kept[key] = Simulation(count, {}, "launch") if simulate else WorkerGroup(count, None, "launch")
    return _kept[key]._run(fn, args, kwargs or {}, keep=False, timeout=timeout)


def _no_timeout(call: str, timeout: float | None) -> None:
    if timeout is not None:
        raise ValueError(
            f"{call}(timeout={timeout}, simulate=True): simulated ranks wait for no clock: when none can go on, an "
            "error says at once which waits for what. Leave timeout out, or leave simulate out for processes."
        )


@overload
def workers(
    nprocs: int | None = None, *, timeout: float | None = None, simulate: Literal[False] = False
) -> WorkerGroup: ...
@overload
def workers(nprocs: int | None = None, *, timeout: None = None, simulate: Literal[True]) -> Simulation: ...
def workers(nprocs: int | None = None, *, timeout: float | None = None, simulate: bool = False) -> WorkerGroup:
    """Start worker processes that are the ranks of this machine, and keep what calls return.

    Each is a process with the environment of torchrun, so `local_mesh()` in a function that they run spans them. They
    are started by a process of their own, never forked from the caller, who may have run a backward or used CUDA; they
    start while the caller goes on. They end with `close()`, with the `with` block, or with the caller, however it ends.
    If one dies, what they held is lost: handles raise, and the next call without one starts new workers.

    Args:
        nprocs: number of ranks. Default: one for each GPU, or 2 where there is none.
        timeout: seconds a collective may wait for the other ranks, for groups that are created from now on.
            Default: 600.
        simulate: ranks that take turns in this process in the place of processes, see `simulate`. Their `traffic` says
            what they sent.

    Raises:
        RuntimeError: this process is itself a rank.
        ValueError: `nprocs` is less than 1; a `timeout` for simulated ranks.

    >>> with workers(nprocs=2) as w:  # doctest: +SKIP
    ...     value = w(lambda x: x * 2, 21)
    ...     value.get()
    [42, 42]
    """
    if simulate:
        _no_timeout("workers", timeout)
    count = default_nprocs() if nprocs is None else nprocs
    what = f"workers(nprocs={count}{', simulate=True' if simulate else ''})"
    return Simulation(count, {}, what) if simulate else WorkerGroup(count, timeout, what)


def stop_workers() -> None:
    """Ends the workers of every `launch` so far; the next call starts new ones."""
    for key in [key for key in _kept if key[0] == os.getpid()]:
        _kept.pop(key).close()


without_numpy()
