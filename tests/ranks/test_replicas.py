"""Replicas that train apart: an axis that the placement's data axes leave out, as DiLoCo has it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.driven import raised, refused
from support.ranks import each_rank

import functional_fsdp as fsdp


def optimizer() -> Any:
    return fsdp.sgd(lr=0.5, momentum=0.9)


def spec_of(mesh: Any, *data: str) -> fsdp.Spec:
    return fsdp.Spec(mesh, {"*": fsdp.zero3(*data)})


def value(state: fsdp.State) -> float:
    return float(fsdp.full_params(state)["b"][0])


@each_rank(4)
def test_replicas_are_told_apart_and_become_one_only_where_they_hold_the_same(tmp_path: Path) -> None:
    mesh = fsdp.local_mesh(replica=2, data=2)
    spec, one = spec_of(mesh, "data"), spec_of(fsdp.local_mesh(data=4), "data")
    four = spec_of(fsdp.local_mesh(replica=4, data=1), "data")
    at, both = mesh.get_local_rank("replica"), ["replicas"]
    params = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5)}
    state = fsdp.shard(params, spec, optimizer())
    assert "mean over data ranks; none over replica, where ranks have weights of their own" in repr(spec)
    assert "none over" not in repr(one)

    kept = fsdp.save(state, tmp_path / "alike")
    alike = fsdp.redistribute(fsdp.load(kept, spec, optimizer()), one, allow=both)
    assert value(alike) == 1.0
    for there in (one, four):
        assert value(fsdp.load(kept, there, optimizer(), allow=both)) == 1.0
    assert value(fsdp.load(fsdp.save(alike, tmp_path / "one"), spec, optimizer(), allow=both)) == 1.0
    assert value(fsdp.redistribute(alike, spec, allow=both)) == 1.0
    not_said = raised(lambda: fsdp.load(kept, one, optimizer()))
    assert not_said.startswith("SpecError: load: ")
    assert "'main.a of replica 0' and 1 more, and this state wants 'main.a'" in not_said

    state, weights = fsdp.unshard(state)
    state = fsdp.step(fsdp.reduce(state, {path: torch.full_like(w, 1.0 + at) for path, w in weights.items()}))
    mine = 1 - 0.5 * (1 + dist.get_rank() // 2)
    assert value(state) == mine
    apart = fsdp.save(state, tmp_path / "apart")
    assert value(fsdp.load(apart, like=state)) == mine
    load, other = partial(fsdp.load, apart, one, optimizer()), "ranks have 'a' of their own along 'replica' (2 ranks)"
    refused(
        (lambda: load(allow=both), "'main.a of replica 0' and 'main.a of replica 1', which differ"),
        (lambda: load(allow=[*both, "optimizer"]), "which differ"),
        (lambda: fsdp.redistribute(state, one), f"{other}, and by the spec along no axis"),
        (
            lambda: fsdp.redistribute(state, one, allow=both),
            "redistribute: ranks 0 and 2 hold different values, which they would share by the spec: State.main",
        ),
        (
            lambda: fsdp.save_safetensors(state, tmp_path / "out"),
            "ranks along ['replica'] have 'a' of their own",
        ),
    )
    assert value(state) == mine


@each_rank(2)
def test_each_leaf_is_compared_that_ranks_come_to_share() -> None:
    """Leaves of one bucket, of which one is to be shared: it differs; then it does not."""
    mesh = fsdp.local_mesh(replica=2, data=1)
    old, new = fsdp.ddp("data"), {"m.a": fsdp.ddp("replica", "data"), "*": fsdp.ddp("data")}
    at = float(mesh.get_local_rank("replica"))

    def moved(a: float) -> fsdp.State:
        params = {"m": {"a": torch.full((4,), a), "b": torch.full((4,), at)}}
        return fsdp.redistribute(fsdp.shard(params, fsdp.Spec(mesh, old)), fsdp.Spec(mesh, new), allow=["replicas"])

    refused((lambda: moved(at), "ranks 0 and 1 hold different values", "'m.a'"))
    whole = fsdp.full_params(moved(7.0))["m"]
    assert [float(whole["a"][0]), float(whole["b"][0])] == [7.0, float(dist.get_rank())]
