"""The communicators of a mesh: beside other groups of the program's, and where a rank does not come."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import functional_fsdp as fsdp
from functional_fsdp import CommError, launch
from functional_fsdp._graph import traced
from functional_fsdp._launch.launch import stop_workers


def mesh_of(name: str) -> DeviceMesh:
    """All ranks, under a name of its own: its communicators are not there yet."""
    fsdp.local_mesh()  # begins what there is to begin
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def stepped(mesh: DeviceMesh, way: str) -> int:
    """The steps that a state has taken."""
    (name,) = mesh.mesh_dim_names or ()
    params = {unit: {"w": torch.ones(5)} for unit in ("first", "second")}
    state = fsdp.shard(params, fsdp.Spec(mesh, fsdp.zero3(name), units=["first", "second"]), fsdp.sgd(lr=0.1))

    def train_step(state: fsdp.State) -> fsdp.State:
        state, params = fsdp.unshard(state)
        return fsdp.step(fsdp.reduce(state, params))

    step = torch.compile(train_step, fullgraph=True, backend="eager") if way == "traced" else train_step
    return step(state).steps


def beside_others() -> list[int]:
    """Groups that only some ranks are in come before ours, and between ours; so does a state on ranks 1 and 2."""
    mesh = mesh_of("beside")
    dist.new_group([0])
    taken = [stepped(mesh, "eager")]
    dist.new_group([0, 1])
    dist.new_group([0])
    small = DeviceMesh("cpu", [1, 2], mesh_dim_names=("small",))
    taken += [stepped(small, "eager")] if dist.get_rank() else []
    return [*taken, stepped(mesh, "traced"), stepped(mesh_of("after"), "eager")]


def test_groups_and_meshes_of_some_ranks_are_in_nobodys_way() -> None:
    assert launch(beside_others, nprocs=3) == [[1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]


def waited_for(absent: int) -> str:
    """What the other rank hears when one does not make the state."""
    mesh = mesh_of(f"without {absent}")
    if dist.get_rank() == absent:
        time.sleep(2)
        return ""
    try:
        stepped(mesh, "eager")
    except CommError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_does_not_come_is_named() -> None:
    stop_workers()  # processes keep the timeout that they began with
    for absent in (0, 1):
        said = launch(waited_for, (absent,), nprocs=2, timeout=1)
        assert f"for the ranks [0, 1]: after 1 s ranks [{absent}] have not come" in said[1 - absent]
    stop_workers()


def interfaces(name: str) -> str:
    """What comes of torch's variable that says which network interface gloo takes."""
    mesh = mesh_of(name)
    stepped(mesh, "eager")
    os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        return str(stepped(mesh, "traced"))
    except RuntimeError as error:
        return str(error)
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def test_all_groups_take_the_interface_that_is_named() -> None:
    assert launch(interfaces, ("lo,lo",), nprocs=2) == ["1", "1"]


def test_an_interface_that_is_not_there_is_an_error() -> None:
    for said in launch(interfaces, ("nosuch0",), nprocs=2):
        assert "nosuch0" in said


def test_groups_of_functional_collectives_have_one_thread() -> None:
    """Two corrupt the heap, now and then, see `one_thread`."""
    group = SimpleNamespace(store=dist.HashStore(), group_rank=0, group_size=1, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]
    group.global_ranks_in_group, group.group_id = [0], "alone"
    assert traced._gloo_with_one_thread(group, None).options._threads == 1
