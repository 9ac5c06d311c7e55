"""Ranks that die, hang or leave: the others hear of it soon, by one error, and nothing hangs afterwards."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.driven import refused
from support.problems import LOOPS, batch, net
from support.processes import survivors
from support.ranks import each_rank, launch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import functional_fsdp as fsdp
from functional_fsdp import _distributed as _groups
from functional_fsdp._distributed import Processes
from functional_fsdp._runtime.runtime import runtime_of


def start(mesh: DeviceMesh | None = None) -> tuple[fsdp.State, Any]:
    params, model = fsdp.functionalize(net(torch.float32))
    mesh = mesh or fsdp.local_mesh()
    return fsdp.shard(params, fsdp.Spec(mesh, fsdp.zero3(mesh.mesh_dim_names[0])), fsdp.adamw(lr=1e-2)), model  # type: ignore[index]


def apart() -> DeviceMesh:
    """A mesh whose ranks take themselves for ranks on hosts of their own, which see nothing of each other."""
    fsdp.local_mesh()
    groups: Any = _groups
    real, groups.here = groups.here, lambda: (f"host {dist.get_rank()}", os.getpid())
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
        run = runtime_of(mesh)
    finally:
        groups.here = real
    assert run.host_vote is None
    assert run.arrivals is not None
    return mesh


def dies_while_others_restart(separate: bool) -> None:
    """All ranks abandon a step; the last one dies then, the others go back to the state before it."""
    state, _ = start(apart() if separate else None)
    fsdp.unshard(state)
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    fsdp.unshard(state)


@pytest.mark.parametrize("separate", [False, True], ids=["seen", "elsewhere"])
def test_a_rank_that_dies_while_others_restart_is_missed_at_once(separate: bool) -> None:
    for said in survivors(dies_while_others_restart, 4, separate):
        assert "CommError: restart: waiting for the other ranks" in said
        assert ("have ended" in said or "the process of rank 3 has ended" in said) is not separate


def dies_while_communicators_are_made() -> None:
    """The last rank has met the others, and dies before it makes the second communicator with them."""
    fsdp.local_mesh()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    if dist.get_rank() == dist.get_world_size() - 1:
        made, real = itertools.count(), Processes.group

        def dies(*args: Any, **settings: Any) -> Any:
            if next(made):
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **settings)

        Processes.group = staticmethod(dies)
    runtime_of(mesh)


def test_a_rank_that_dies_while_communicators_are_made_is_missed_soon() -> None:
    for said in survivors(dies_while_communicators_are_made, 3):
        assert "CommError: communicators for the ranks [0, 1, 2]" in said
        assert "could not be made: a rank died" in said


def dies_in(where: str) -> None:
    """The last rank dies where the others come to a call that takes all of them."""
    fsdp.local_mesh()
    last = dist.get_rank() == dist.get_world_size() - 1
    state, _ = start()
    dist.barrier()
    if last:
        os.kill(os.getpid(), signal.SIGKILL)
    if where == "shard" or where == "a new mesh":
        start()
    elif where == "everyone":
        runtime_of(state.spec.mesh).everyone("here", "a test")
    elif where == "pmean":
        fsdp.pmean(state, torch.ones(3))
    else:
        fsdp.full_params(state)


@pytest.mark.parametrize("where", ["shard", "everyone", "pmean", "full_params"])
def test_a_rank_that_died_is_one_error_wherever_all_are_needed(where: str) -> None:
    for said in survivors(dies_in, 3, where):
        assert said.startswith("CommError")
        assert "Restart the job from its last checkpoint" in said


def goes_on_after() -> list[str]:
    """The last rank never comes; what the others hear first, and what from then on, of this state and another."""
    state, _ = start()
    other, _ = start()
    if dist.get_rank() == dist.get_world_size() - 1:
        dist.distributed_c10d._get_default_store().wait(["0 is done", "1 is done"])
        return []
    said = []
    middle = state
    for call in (
        lambda: fsdp.unshard(state, state.units[0]),
        lambda: fsdp.unshard(middle, state.units[0]),
        lambda: fsdp.unshard(other),
        lambda: fsdp.pmean(other, 1.0),
        lambda: fsdp.full_params(other),
        lambda: runtime_of(state.spec.mesh).everyone(0, "zeros"),
        start,
    ):
        begun = time.monotonic()
        with pytest.raises(fsdp.CommError) as caught:
            call()
        said.append(str(caught.value))
        assert time.monotonic() - begun < (3.8 if said[1:] else 10)
    assert fsdp.local_shards(state)
    dist.distributed_c10d._get_default_store().set(f"{dist.get_rank()} is done", "1")
    return said


def test_states_whose_ranks_cannot_communicate_any_more_say_so_at_once() -> None:
    for first, *then in launch(goes_on_after, nprocs=3, timeout=4.0, processes=True)[:2]:
        assert "failed after" in first or "was given up after" in first
        for said in then:
            assert "this state's ranks cannot communicate any more" in said


def test_a_restart_is_not_the_end() -> None:
    assert not issubclass(fsdp.RestartError, fsdp.CommError)
    assert issubclass(fsdp.RestartError, fsdp.FsdpError)


@pytest.mark.parametrize("begins", [True, False])
@each_rank(2, processes=True)
def test_a_state_of_a_process_group_that_was_destroyed_says_so(begins: bool, tmp_path: Path) -> None:
    """Where a step begins, and wherever ranks are needed."""
    state, model = start()
    dist.destroy_process_group()
    lost = "dist.destroy_process_group() was called after the mesh was made"
    gone = "The process group that they were made with was destroyed"
    if begins:
        refused((lambda: fsdp.unshard(state), "CommError", gone))
    else:
        refused(
            (lambda: fsdp.save(state, tmp_path), "CommError", lost),
            (lambda: fsdp.load(tmp_path, like=state), "CommError", lost),
            (lambda: fsdp.local_shards(state), "CommError", lost),
            (lambda: fsdp.shard({"w": torch.ones(4)}, state.spec), "CommError", lost),
            (lambda: next(iter(fsdp.stream(state))), "CommError", lost),
            (lambda: fsdp.full_params(state), "CommError", gone),
        )
    again, _ = start()
    assert LOOPS["whole"](model, again, batch(0, 0), True)


# ---------------------------------------------------------------- exchanges


def stopped_in_an_exchange() -> list[str]:
    """Rank 1 is interrupted in an exchange, then comes to another; rank 0 waits in the first."""
    run: Any = runtime_of(fsdp.local_mesh())
    met = []

    def stopped(vote: Any) -> Any:
        del run.tally
        raise KeyboardInterrupt

    for attempt in range(2):
        if dist.get_rank() and not attempt:
            run.tally = stopped
        try:
            met.append(str(run.everyone((dist.get_rank(), "x" * 1000), f"attempt {attempt}")[1][0]))
        except (KeyboardInterrupt, fsdp.RestartError) as error:
            met.append(type(error).__name__)
    return met


def test_a_rank_that_leaves_an_exchange_is_met_again() -> None:
    assert launch(stopped_in_an_exchange, nprocs=2, processes=True) == [
        ["RestartError", "1"],
        ["KeyboardInterrupt", "1"],
    ]


@each_rank(2)
def test_an_exchange_and_a_step_are_told_apart() -> None:
    run, rank = runtime_of(fsdp.local_mesh()), dist.get_rank()
    middle = fsdp.reduce(*fsdp.unshard(start()[0]))
    said = "this rank came to exchange 'one thing', another one to something else" if rank else "different collectives"
    with pytest.raises(fsdp.ScheduleError, match=said):
        run.everyone(1, "one thing") if rank else fsdp.step(middle)
    assert run.everyone(rank, "the same") == [0, 1]


# ---------------------------------------------------------------- metrics of other shapes

TREES: dict[str, tuple[Any, Any]] = {
    "shapes": (torch.ones(3), torch.ones(4)),
    "dtypes": (torch.ones(3), torch.ones(3, dtype=torch.float64)),
    "structures": ({"loss": torch.ones(2)}, {"norm": torch.ones(2)}),
    "numbers of leaves": ([torch.ones(2)], [torch.ones(2), torch.ones(1)]),
}


@pytest.mark.parametrize("known", [False, True], ids=["new", "known to one"])
@each_rank(2)
def test_metrics_that_differ_are_the_same_error_on_every_rank(known: bool) -> None:
    """And ranks go on. `known`: rank 0 reduces what came last time, and is expected."""
    state, _ = start()
    for mine, theirs in TREES.values():
        if known:
            for _ in range(2):
                state, _ = fsdp.pmean(state, mine)
        before = fsdp.local_shards(state)
        text = r"ranks have different metrics: rank 0 has pmean\(.*rank 1 has pmean\("
        with pytest.raises(fsdp.TreeError, match=text) as said:
            fsdp.pmean(state, theirs if dist.get_rank() else mine)
        assert len({*runtime_of(state.spec.mesh).everyone(str(said.value), "texts")}) == 1
        state, mean = fsdp.pmean(state, float(dist.get_rank()))
        assert float(mean) == 0.5
        state = fsdp.step(fsdp.reduce(*fsdp.unshard(state)))
        assert before.keys() == fsdp.local_shards(state).keys()


@each_rank(2)
def test_metrics_are_compared_only_where_they_are_not_expected() -> None:
    """How many ballots metrics take: of one form, of two in turn, and again."""
    state, _ = start()
    control = runtime_of(state.spec.mesh).issued["control"]
    counts = [control.count]
    for names in ("aaaaaa", "ababab", "ababab"):
        for name in names:
            state, _ = fsdp.pmean(state, {name: 1.0})
        counts.append(control.count)
    one, two, again = (b - a for a, b in pairwise(counts))
    assert one == 2
    assert two <= 3
    assert again == 0


# ---------------------------------------------------------------- nothing stays


def counted() -> tuple[int, int, int]:
    """Descriptors, threads and runtimes."""
    from functional_fsdp._runtime import runtime as _runtime

    gc.collect()
    runtimes = len(_runtime._RUNTIMES) + len(_runtime._unused)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), runtimes


@pytest.mark.parametrize("gone", ["meshes", "process groups"])
@each_rank(2, processes=True)
def test_communicators_of_what_nobody_holds_are_given_back(gone: str) -> None:
    """Of meshes that nobody holds, and of process groups that are destroyed."""
    counts = []
    for i in range(4):
        fsdp.local_mesh()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(f"mesh{i}",)) if gone == "meshes" else None
        state, _ = start(mesh)
        state = fsdp.step(fsdp.reduce(*fsdp.unshard(state)))
        del state, mesh
        counts.append(counted())
        if gone == "process groups":
            dist.destroy_process_group()
    assert counts[-1] == counts[1]


def zeros_instead(length: int, after: int) -> list[Any]:
    """Rank 1 is stopped in a job of an exchange, whose collective is issued with zeros, since rank 0 waits for it."""
    run: Any = runtime_of(fsdp.local_mesh())
    met: list[Any] = []
    real, jobs = run.collective, itertools.count()

    def stopped() -> Any:
        raise KeyboardInterrupt

    def collective(hop: Any, out: Any, given: Any) -> Any:
        if hop.kind == "all_gather" and next(jobs) == after:
            del run.collective
            return iter(stopped, None)
        return real(hop, out, given)

    if dist.get_rank():
        run.collective = collective
    try:
        run.everyone("x" * length, "a test")
    except (KeyboardInterrupt, fsdp.RestartError) as error:
        met.append(type(error).__name__)
    return [*met, [len(one) for one in run.everyone("x" * length, "a test")]]


@pytest.mark.parametrize(("length", "after"), [(1, 0), (1000, 0), (1000, 1)])
def test_what_is_sent_in_the_place_of_an_exchange_is_not_taken_for_it(length: int, after: int) -> None:
    assert launch(zeros_instead, (length, after), nprocs=2, processes=True) == [
        ["RestartError", [length] * 2],
        ["KeyboardInterrupt", [length] * 2],
    ]
