"""Replicas that train apart: an axis that the placement's data axes leave out, as DiLoCo has it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.driven import raised

import functional_fsdp as fsdp
from functional_fsdp import launch


def optimizer() -> Any:
    return fsdp.sgd(lr=0.5, momentum=0.9)


def spec_of(mesh: Any, *data: str) -> fsdp.Spec:
    return fsdp.Spec(mesh, {"*": fsdp.zero3(*data)})


def values(state: fsdp.State) -> list[float]:
    return [float(fsdp.full_params(state)["b"][0])]


def apart(folder: str) -> dict[str, Any]:
    mesh = fsdp.local_mesh(replica=2, data=2)
    spec, one = spec_of(mesh, "data"), spec_of(fsdp.local_mesh(data=4), "data")
    four = spec_of(fsdp.local_mesh(replica=4, data=1), "data")
    at = mesh.get_local_rank("replica")
    params = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5)}
    state = fsdp.shard(params, spec, optimizer())
    found: dict[str, Any] = {"spec": repr(spec), "alike": repr(one)}

    alike = fsdp.redistribute(
        fsdp.load(fsdp.save(state, f"{folder}/alike"), spec, optimizer()), one, allow=["replicas"]
    )
    found["alike values"] = values(alike)
    found["to one"] = values(fsdp.load(f"{folder}/alike", one, optimizer(), allow=["replicas"]))
    found["to four"] = values(fsdp.load(f"{folder}/alike", four, optimizer(), allow=["replicas"]))
    fsdp.save(alike, f"{folder}/one")
    found["from one"] = values(fsdp.load(f"{folder}/one", spec, optimizer(), allow=["replicas"]))
    found["back"] = values(fsdp.redistribute(alike, spec, allow=["replicas"]))
    found["not said"] = raised(lambda: fsdp.load(f"{folder}/alike", one, optimizer()))

    state, weights = fsdp.unshard(state)
    state = fsdp.step(fsdp.reduce(state, {path: torch.full_like(w, 1.0 + at) for path, w in weights.items()}))
    found["trained"] = values(state)
    fsdp.save(state, f"{folder}/apart")
    found["same mesh"] = values(fsdp.load(f"{folder}/apart", like=state))
    for key, allow in (("differ", ["replicas"]), ("differ still", ["replicas", "optimizer"])):
        found[key] = raised(partial(fsdp.load, f"{folder}/apart", one, optimizer(), allow=allow))
    found["not moved"] = raised(lambda: fsdp.redistribute(state, one))
    found["differ here"] = raised(lambda: fsdp.redistribute(state, one, allow=["replicas"]))
    found["not exported"] = raised(lambda: fsdp.save_safetensors(state, f"{folder}/out"))
    found["still here"] = values(state)
    return found


def test_replicas_are_told_apart_and_become_one_only_where_they_hold_the_same(tmp_path: Path) -> None:
    for rank, found in enumerate(launch(apart, (str(tmp_path),), nprocs=4)):
        assert "mean over data ranks; none over replica, where ranks have weights of their own" in found["spec"]
        assert "none over" not in found["alike"]
        for key in ("alike values", "to one", "to four", "from one", "back"):
            assert found[key] == [1.0], key
        assert found["not said"].startswith("SpecError: load: ")
        assert "'main.a of replica 0' and 1 more, and this state wants 'main.a'" in found["not said"]
        mine = [1 - 0.5 * (1 + rank // 2)]
        assert found["trained"] == found["same mesh"] == found["still here"] == mine
        assert "'main.a of replica 0' and 'main.a of replica 1', which differ" in found["differ"]
        assert "which differ" in found["differ still"]
        assert (
            "ranks have 'a' of their own along 'replica' (2 ranks), and by the spec along no axis" in found["not moved"]
        )
        assert (
            "redistribute: ranks 0 and 2 hold different values, which they would share by the spec: State.main"
            in (found["differ here"])
        )
        assert "ranks along ['replica'] have 'a' of their own" in found["not exported"]


def some_apart() -> tuple[str, list[float]]:
    """Leaves of one bucket, of which one is to be shared: it differs; then it does not."""
    mesh = fsdp.local_mesh(replica=2, data=1)
    old, new = fsdp.ddp("data"), {"m.a": fsdp.ddp("replica", "data"), "*": fsdp.ddp("data")}
    at = mesh.get_local_rank("replica")

    def moved(a: float) -> fsdp.State:
        params = {"m": {"a": torch.full((4,), a), "b": torch.full((4,), float(at))}}
        return fsdp.redistribute(fsdp.shard(params, fsdp.Spec(mesh, old)), fsdp.Spec(mesh, new), allow=["replicas"])

    refused = raised(lambda: moved(float(at)))
    whole = fsdp.full_params(moved(7.0))["m"]
    return refused, [float(whole["a"][0]), float(whole["b"][0])]


def test_each_leaf_is_compared_that_ranks_come_to_share() -> None:
    for rank, (refused, found) in enumerate(launch(some_apart, nprocs=2)):
        assert "ranks 0 and 1 hold different values" in refused
        assert "'m.a'" in refused
        assert found == [7.0, float(rank)]
