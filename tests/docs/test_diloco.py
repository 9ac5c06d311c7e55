"""DiLoCo of the examples beside plain torch: replicas as modules, AdamW in each, SGD with Nesterov momentum outside."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diloco
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.commands import EXAMPLES, run_as
from support.driven import raised
from support.ranks import launch
from torch.distributed.checkpoint.filesystem import FileSystemReader

import functional_fsdp as fsdp
from functional_fsdp.codecs import Form

Tree = dict[str, torch.Tensor]
REPLICAS, SHARDS, EVERY, STEPS = 2, 2, 3, 11
SAVED = 8  # after so many steps: in the middle of a round, the outer momentum not zero


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x[:, :3].sin()).square().mean()


def plainly(wire: Any = None) -> Iterator[list[Tree]]:
    """Weights of each replica after each step. `wire`: in which replicas pack what they send, and what that loses of a
    replica's way is added to its next one."""
    lost: list[Tree] = [{} for _ in range(REPLICAS)]

    def sent(replica: int, name: str, way: torch.Tensor) -> torch.Tensor:
        if wire is None:
            return way
        way, form = way + lost[replica].get(name, 0), Form(wire, tuple(way.shape), torch.float32)
        packed = form.unpack(form.pack(way.float()))
        lost[replica][name] = way - packed
        return packed.double()

    whole = net()
    outer = torch.optim.SGD(whole.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    replicas = [copy.deepcopy(whole) for _ in range(REPLICAS)]
    inner = [torch.optim.AdamW(one.parameters(), lr=1e-2, weight_decay=0.1) for one in replicas]
    for step in range(STEPS):
        for r, (one, optimizer) in enumerate(zip(replicas, inner, strict=True)):
            optimizer.zero_grad()
            for s in range(SHARDS):
                (loss_fn(one, batch(step, SHARDS * r + s)) / SHARDS).backward()
            optimizer.step()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                for (name, p), *theirs in zip(
                    whole.named_parameters(), *[one.parameters() for one in replicas], strict=True
                ):
                    p.grad = torch.stack([sent(r, name, p - now) for r, now in enumerate(theirs)]).mean(0)
                outer.step()
                for one in replicas:
                    one.load_state_dict(whole.state_dict())
        yield [{name: p.detach().clone() for name, p in one.named_parameters()} for one in replicas]


def spec(preset: str = "zero3", **more: Any) -> fsdp.Spec:
    return fsdp.Spec(fsdp.local_mesh(replica=REPLICAS, shard=SHARDS), getattr(fsdp, preset)("shard"), **more)


def inner() -> Any:
    return fsdp.adamw(lr=1e-2, weight_decay=0.1)


def trained(folder: str, files: bool, wire: Any = None) -> tuple[list[Tree], dict[str, Any]]:
    """Weights after each step; `files`: it goes on from a checkpoint in the middle of a round."""
    params, model = fsdp.functionalize(net())
    state = diloco.begin(fsdp.shard(params, spec(), inner()))
    seen, found = [], {"spec": repr(spec())}
    for step in range(STEPS):
        state, weights = fsdp.unshard(state)
        x = batch(step, dist.get_rank())
        grads = torch.func.grad(lambda p, x: loss_fn(fsdp.bind(model, p), x))(weights, x)
        state = fsdp.step(fsdp.reduce(state, grads))
        if (step + 1) % EVERY == 0:
            state = diloco.outer_step(state, wire=wire)
        if files and step + 1 == SAVED:
            fsdp.save(state, f"{folder}/middle")
            state = fsdp.load(f"{folder}/middle", spec(), inner())
            state = fsdp.redistribute(state, spec("zero1", units=["*"]))  # the extras move along
        if files and step + 1 == 2 * EVERY:
            fsdp.save(state, f"{folder}/met")
        seen.append({name: p.clone() for name, p in fsdp.full_params(state).items()})
    if files and wire is None:  # else replicas owe ways of their own, which no state of one replica has
        one = fsdp.Spec(fsdp.local_mesh(data=4), fsdp.zero3("data"))
        allow = ["replicas", "optimizer"]
        found["met"] = fsdp.full_params(fsdp.load(f"{folder}/met", one, inner(), allow=allow))
        found["apart"] = raised(lambda: fsdp.load(f"{folder}/middle", one, inner(), allow=allow))
    return seen, found


@pytest.mark.parametrize("files", [False, True])
def test_replicas_are_those_of_plain_torch(files: bool, tmp_path: Path) -> None:
    wanted = [*plainly()]
    for rank, (seen, found) in enumerate(launch(trained, (str(tmp_path), files), nprocs=REPLICAS * SHARDS)):
        for step, (mine, replicas) in enumerate(zip(seen, wanted, strict=True)):
            for path, p in replicas[rank // SHARDS].items():
                assert (mine[path] - p).abs().max() < 1e-9, (step, path)
        assert "none over replica, where ranks have weights of their own" in found["spec"]
        if files:
            met = wanted[2 * EVERY - 1][0]
            assert all((found["met"][path] - p).abs().max() < 1e-9 for path, p in met.items())
            assert "'main.0.weight of replica 0' and 'main.0.weight of replica 1', which differ" in found["apart"]
    assert (wanted[SAVED - 1][0]["0.weight"] - wanted[SAVED - 1][1]["0.weight"]).abs().max() > 1e-3
    assert torch.equal(wanted[EVERY - 1][0]["0.weight"], wanted[EVERY - 1][1]["0.weight"])
    if files:
        there = FileSystemReader(tmp_path / "middle").read_metadata().state_dict_metadata
        for tree in ("main", "opt.mean", "extras.start", "extras.momentum"):
            assert {f"{tree}.0.weight of replica {r}" for r in range(REPLICAS)} <= there.keys(), tree


@pytest.mark.parametrize("codec", [fsdp.int4(), pytest.param(fsdp.int8(64), marks=pytest.mark.large)], ids=str)
def test_outer_steps_in_few_bits(codec: fsdp.Codec, tmp_path: Path) -> None:
    """Ways travel packed, with feedback: as plain torch packs them, whatever shards hold, and across files."""
    wanted, plain = [*plainly(codec)], [*plainly()]
    found = launch(trained, (str(tmp_path), False, codec), nprocs=REPLICAS * SHARDS)
    again = launch(trained, (str(tmp_path), True, codec), nprocs=REPLICAS * SHARDS)
    for rank, ((seen, _), (other, _)) in enumerate(zip(found, again, strict=True)):
        for step, (mine, same, replicas) in enumerate(zip(seen, other, wanted, strict=True)):
            for path, p in replicas[rank // SHARDS].items():
                assert (mine[path] - p).abs().max() < 1e-7, (step, path)  # sums are in float32
                assert (same[path] - p).abs().max() < 1e-7, (step, path)
    assert (wanted[-1][0]["0.weight"] - plain[-1][0]["0.weight"]).abs().max() > 1e-5


@pytest.mark.large  # its functions run above
@run_as
def test_the_example_learns_and_says_what_is_apart(run: Callable[..., str]) -> None:
    printed = run("diloco.py")
    assert "none over replica, where ranks have weights of their own" in printed
    losses = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step ")]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 4


def test_it_fits_on_a_screen() -> None:
    assert len((EXAMPLES / "diloco.py").read_text().splitlines()) <= 80
