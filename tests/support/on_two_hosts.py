"""A script: what each of four ranks does, two on each of two hosts. It writes what came of it as JSON.

RANK=... python tests/support/on_two_hosts.py FOLDER    which both hosts share
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.hosts import sent
from support.problems import batch, net
from support.resumed import resumed, start, train
from torch.distributed.device_mesh import DeviceMesh

import functional_fsdp as fsdp
from functional_fsdp._runtime.runtime import runtime_of

PATIENCE = 5.0  # seconds, of the ranks that are cut off


def sees() -> dict[str, Any]:
    """Whom a rank sees, and how the ranks of a mesh vote."""
    run = runtime_of(fsdp.local_mesh())
    places = sorted(run.watch.places.values()) if run.watch else []
    return {"sees": places, "in_memory": run.host_vote is not None, "meet_by_gloo": run.arrivals is not None}


def votes() -> dict[str, Any]:
    """The last rank fails in a step; all take it again, and end where a run without that ends."""
    ends = []
    heard = ""
    for fails in (False, True):
        state, model = start("zero3")
        state = train(state, model, 0, 1)
        if fails:
            try:
                loop_that_fails(state, model)
            except (ValueError, fsdp.RestartError) as error:
                heard = type(error).__name__
        ends.append(fsdp.full_params(train(state, model, 1, 3)))
    return {"heard": heard, "same": all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])}


def loop_that_fails(state: fsdp.State, model: Any) -> None:
    state, params = fsdp.unshard(state)
    x, y = batch(1, dist.get_rank())
    grads = torch.func.grad(lambda p: torch.nn.functional.mse_loss(fsdp.bind(model, p)(x)[..., 0], y.float()))(params)
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("bad data")
    fsdp.step(fsdp.reduce(state, grads))


def copies() -> str:
    """The transport of one host only is refused."""
    params, _ = fsdp.functionalize(net(torch.float32))
    try:
        fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), transport="copy_engine"), fsdp.sgd(lr=0.1))
    except fsdp.SpecError as error:
        return str(error)
    return ""


def cut_off(folder: Path) -> dict[str, Any]:
    """Steps, until something is said."""
    group: Any = dist.new_group(timeout=timedelta(seconds=PATIENCE))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("apart",))  # not the one that there is
    params, model = fsdp.functionalize(net(torch.float32))
    state = fsdp.shard(params, fsdp.Spec(mesh, fsdp.zero3("apart")), fsdp.adamw(lr=1e-2))
    said = []
    for step in range(100_000):
        begun = time.monotonic()
        try:
            state = train(state, model, step, step + 1)
        except Exception as error:
            said.append((type(error).__name__, str(error), time.monotonic() - begun))
            break
        if step == 3:
            (folder / f"trains_{dist.get_rank()}").touch()
    begun = time.monotonic()
    try:
        fsdp.full_params(state)
    except Exception as error:
        said.append((type(error).__name__, str(error), time.monotonic() - begun))
    return {"said": said}


def main(folder: Path) -> None:
    found: dict[str, Any] = {}

    def play(name: str, fn: Callable[..., Any], *args: Any) -> None:
        before = sent()
        found[name] = fn(*args)
        found[f"sent for {name}"] = sent() - before

    play("who", sees)
    for preset in ("zero3", "hsdp"):
        play(preset, resumed, preset, str(folder / preset))
    play("votes", votes)
    play("copies", copies)
    play("cut off", cut_off, folder)
    (folder / f"found_{dist.get_rank()}.new").write_text(json.dumps(found))
    (folder / f"found_{dist.get_rank()}.new").replace(folder / f"found_{dist.get_rank()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
