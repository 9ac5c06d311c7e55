"""Checkpoints beside torch.distributed.checkpoint with FSDP2: the same model, weights and optimizer, in one run.

    python examples/benchmark_checkpoints.py                                  # CPU, 2 ranks, 5.5 M parameters
    python examples/benchmark_checkpoints.py --model 1.2b --ranks 2 --folder /tmp

Each writes main weights and both moments of AdamW in float32, to a new folder each time, to disk; each reads them back
into a state that stands. They take turns. Figures are of the slowest rank, in seconds, medians of the rounds after the
first; the first, in which caches are cold and pools are made, stands apart.

| column           | what it is                                                                        |
|------------------|-----------------------------------------------------------------------------------|
| save, load       | until the call returns; save has then synced its files                            |
| async_save       | until the call returns: what training is held up                                  |
| DCP save, load   | `dcp.save` and `dcp.load` of `get_state_dict`; the files synced (its default)     |
| DCP async        | `dcp.async_save`, until the call returns                                          |
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _benchmark_models import MODELS, Config
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import functional_fsdp as fsdp


def ours(config: Config, folder: Path) -> dict[str, Callable[[int], None]]:
    mesh = fsdp.local_mesh()
    units = fsdp.Spec(mesh, units=list(config.units().values()))
    state, _ = fsdp.init(config.build, units, fsdp.adamw(lr=1e-4), seed=0)
    for tree in (state.opt.mean, state.opt.square):
        for buffer in tree.values():
            buffer.local.normal_()

    def load(i: int) -> None:
        fsdp.load(folder / f"ours_{i}", like=state)

    pending: list[Any] = []

    def hold(i: int) -> None:
        pending.append(fsdp.async_save(state, folder / f"held_{i}"))

    return {
        "save": lambda i: void(fsdp.save(state, folder / f"ours_{i}")),
        "load": load,
        "async_save": hold,
        "async_save, wait": lambda i: void(pending.pop().result()),
    }


def theirs(config: Config, folder: Path) -> dict[str, Callable[[int], None]]:
    mesh = fsdp.local_mesh()
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model = config.build()
    for names in config.units().values():
        for name in names:
            fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.zero_grad()

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def load(i: int) -> None:
        found = state()
        state_dict_loader.load(found, checkpoint_id=str(folder / f"theirs_{i}"))
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    pending: list[Any] = []
    group = dist.new_group(backend="gloo")

    def hold(i: int) -> None:
        path = str(folder / f"theirs_held_{i}")
        pending.append(state_dict_saver.async_save(state(), checkpoint_id=path, process_group=group))

    return {
        "DCP save": lambda i: void(state_dict_saver.save(state(), checkpoint_id=str(folder / f"theirs_{i}"))),
        "DCP load": load,
        "DCP async": hold,
        "DCP async, wait": lambda i: void(pending.pop().result()),
    }


def void(_: Any) -> None:
    """Of what a call gives, nothing is wanted."""


def measured(name: str, rounds: int, folder: str) -> dict[str, list[float]]:
    """Seconds of each call in each round, on this rank."""
    cuda = fsdp.local_mesh().device_type == "cuda"
    config = MODELS[name]
    sides = [ours(config, Path(folder)), theirs(config, Path(folder))]
    found: dict[str, list[float]] = {}
    for i in range(rounds):
        for side in sides[:: 1 if i % 2 else -1]:
            for what, call in side.items():
                if cuda:
                    torch.cuda.synchronize()
                dist.barrier()
                begun = time.perf_counter()
                call(i)
                if cuda:
                    torch.cuda.synchronize()
                found.setdefault(what, []).append(time.perf_counter() - begun)
                if what.endswith(("load", "wait")):  # the disk has room for one at a time
                    dist.barrier()
                    if dist.get_rank() == 0:
                        for path in Path(folder).iterdir():
                            shutil.rmtree(path)
                    dist.barrier()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Checkpoints beside torch.distributed.checkpoint")
    parser.add_argument("--model", default="tiny", choices=MODELS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", default=None, help="on the disk that is to be measured")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        ranks = fsdp.launch(measured, (args.model, args.rounds, folder), nprocs=args.ranks)
    slowest = {what: [max(times) for times in zip(*(rank[what] for rank in ranks), strict=True)] for what in ranks[0]}
    middle = {what: statistics.median(times[1:]) for what, times in slowest.items()}
    print("|                  | seconds | first |           spread | DCP / this |\n|---|---:|---:|---:|---:|")
    beside = {"save": "DCP save", "load": "DCP load", "async_save": "DCP async"}
    for what, times in slowest.items():
        ratio = f"{middle[beside[what]] / middle[what]:.3f}" if what in beside else ""
        print(
            f"| {what:16} | {middle[what]:7.3f} | {times[0]:5.2f} | {min(times[1:]):7.3f}–{max(times[1:]):.3f} | "
            f"{ratio:>10} |"
        )
    print(f"\nsave held up by async_save: {middle['async_save'] / middle['save']:.4f} of save")


if __name__ == "__main__":
    main()
