"""The optimizer's part of a step with Muon: owners of matrices beside other ways, in one run.

    python examples/benchmark_muon.py                                 # CPU, 2 ranks, a tiny GPT's layers
    python examples/benchmark_muon.py --model 1.2b --ranks 2          # GPUs

| row            | what it is                                                                                    |
|----------------|-----------------------------------------------------------------------------------------------|
| owners         | `fsdp.muon`: each matrix goes to one rank, and back                                           |
| every rank     | each rank gathers every matrix and orthogonalizes all of them, in batches as `fsdp.muon` does |
| whole matrices | weights, gradients and momentum lie whole on every rank; each owner orthogonalizes its        |
|                | matrices, in batches, and an all-gather gives the updates to all: more memory, no all-to-all  |
| FSDP2          | torch.optim.Muon on the parameters of `fully_shard`                                           |

Gradients are there already, random; the matrices of the layers only. They take turns. Milliseconds on the slowest rank,
medians of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _benchmark_models import MODELS, Config
from torch import nn
from torch.distributed.fsdp import fully_shard

import functional_fsdp as fsdp
from functional_fsdp import extend
from functional_fsdp._optim_extra.muon import orthogonalized

LR = 0.02
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Row(NamedTuple):
    """What is done before each step, and the step, which is timed."""

    ready: Callable[[], Any]
    step: Callable[[Any], None]


def layers(config: Config) -> nn.ModuleList:
    """The matrices of a model's layers, by shape."""
    model = config.build()
    stack = nn.ModuleList()
    for path in config.units():
        if path not in ("embed", "head"):
            matrices = [p for p in model.get_submodule(path).parameters() if p.dim() == 2]
            stack.append(nn.ParameterList(nn.Parameter(p.detach()) for p in matrices))
    return stack


class EveryRank:
    """Muon without owners: an all-gather of every matrix's update."""

    def __init__(self) -> None:
        self.muon = fsdp.muon(lr=LR)

    def init(self, main: Any) -> Any:
        return {name: buffer.but(torch.zeros_like(buffer.local)) for name, buffer in main.items()}

    def update(self, grads: Any, opt: Any, main: Any, count: torch.Tensor) -> Any:
        shapes: dict[Any, list[tuple[str, str, torch.Tensor]]] = {}
        for name in main:
            opt[name].local.lerp_(grads[name].local, 1 - self.muon.momentum)
            change = grads[name].but(grads[name].local.lerp(opt[name].local, self.muon.momentum).bfloat16())
            for path, whole in extend.gather_leaves(change, torch.bfloat16).items():
                shapes.setdefault(whole.shape, []).append((name, path, whole))
        done: dict[tuple[str, str], torch.Tensor] = {}
        for shape, some in shapes.items():
            stack = orthogonalized(torch.stack([one for _, _, one in some]), COEFFICIENTS, 5, 1e-7)
            ratio = max(1.0, shape[0] / shape[1]) ** 0.5
            done |= {(name, path): one * ratio for (name, path, _), one in zip(some, stack, strict=True)}
        for name, buffer in main.items():
            for leaf, start, local in extend.leaf_shards(buffer):
                change = done[name, leaf.path].reshape(-1)[start : start + local.numel()]
                local.mul_(1 - LR * 0.1).add_(change, alpha=-LR)
        return main, opt


def whole(config: Config) -> Row:
    params = [p.detach() for p in layers(config).parameters()]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    named = {f"{i}": p for i, p in enumerate(params)}
    (plan,) = fsdp.muon().owners(fsdp.make_layout(named, fsdp.Spec({"data": ranks})).trainable.values())
    owner = {int(one.path): one.owner for one in plan.owned}
    grads, kept = [torch.randn_like(p) for p in params], [torch.zeros_like(p) for p in params]
    by_rank = [[i for i in owner if owner[i] == r] for r in range(ranks)]
    room = max(sum(params[i].numel() for i in some) for some in by_rank)
    every = torch.empty(ranks * room, dtype=torch.bfloat16, device=params[0].device)

    def step(_: Any) -> None:
        shapes: dict[Any, list[int]] = {}
        for i in by_rank[rank]:
            shapes.setdefault(params[i].shape, []).append(i)
            kept[i].lerp_(grads[i], 0.05)
        at = {i: sum(params[j].numel() for j in by_rank[rank][:k]) for k, i in enumerate(by_rank[rank])}
        for some in shapes.values():
            stack = torch.stack([grads[i].lerp(kept[i], 0.95).bfloat16() for i in some])
            for i, one in zip(some, orthogonalized(stack, COEFFICIENTS, 5, 1e-7), strict=True):
                every[rank * room + at[i] :][: one.numel()].view(one.shape).copy_(one)
        dist.all_gather_into_tensor(every, every[rank * room :][:room])
        for r, some in enumerate(by_rank):
            sizes = [params[i].numel() for i in some]
            changes = every[r * room :][: sum(sizes)].split(sizes)
            for i, change in zip(some, changes, strict=True):
                rows, columns = params[i].shape
                params[i].mul_(1 - LR * 0.1).add_(
                    change.view(rows, columns), alpha=-LR * max(1.0, rows / columns) ** 0.5
                )

    return Row(lambda: None, step)


def ours(config: Config, optimizer: Any) -> Row:
    params, _ = fsdp.functionalize(layers(config))
    units = [[f"{i}.*"] for i in range(config.depth)]
    spec = fsdp.Spec(fsdp.local_mesh(), units=units, precision=fsdp.Precision(compute=torch.bfloat16))
    state = fsdp.shard(params, spec, optimizer)
    state, whole = fsdp.unshard(state)
    grads = {path: torch.randn_like(p) for path, p in whole.items()}
    state = fsdp.step(fsdp.finish_reductions(fsdp.reduce(state, grads)))
    kept = [state]

    def ready() -> fsdp.State:
        return fsdp.finish_reductions(fsdp.reduce(fsdp.unshard(kept[0])[0], grads))

    def step(state: fsdp.State) -> None:
        kept[0] = fsdp.step(state)

    return Row(ready, step)


def theirs(config: Config) -> Row:
    stack = layers(config)
    for layer in stack:
        fully_shard(layer, mesh=fsdp.local_mesh())
    optimizer = torch.optim.Muon(stack.parameters(), lr=LR)
    for p in stack.parameters():
        p.grad = torch.randn_like(p)

    return Row(lambda: None, lambda _: optimizer.step())


def synchronize() -> None:
    if fsdp.local_mesh().device_type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def measured(name: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each row in each round, on this rank."""
    config = MODELS[name]
    with torch.device(fsdp.local_mesh().device_type):
        torch.manual_seed(0)
        rows = {
            "owners": ours(config, fsdp.muon(lr=LR)),
            "every rank": ours(config, EveryRank()),
            "whole matrices": whole(config),
            "FSDP2": theirs(config),
        }
    return in_turns(rows, rounds)


def in_turns(rows: dict[str, Row], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each row in each round, after one to warm up."""
    found: dict[str, list[float]] = {}
    for i in range(rounds + 1):
        for what, row in rows.items():
            ready = row.ready()
            synchronize()
            begun = time.perf_counter()
            row.step(ready)
            if fsdp.local_mesh().device_type == "cuda":
                torch.cuda.synchronize()
            if i:
                found.setdefault(what, []).append(1e3 * (time.perf_counter() - begun))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Muon with owners beside other ways")
    parser.add_argument("--model", default="tiny", choices=[name for name, one in MODELS.items() if one.kind == "gpt"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    ranks = fsdp.launch(measured, (args.model, args.rounds), nprocs=args.ranks)
    slowest = {what: [max(times) for times in zip(*(rank[what] for rank in ranks), strict=True)] for what in ranks[0]}
    middle = {what: statistics.median(times) for what, times in slowest.items()}
    print("|                | ms | spread | this row / owners |\n|---|---:|---:|---:|")
    for what, times in slowest.items():
        ratio = middle[what] / middle["owners"]
        print(f"| {what:14} | {middle[what]:8.1f} | {min(times):.1f}–{max(times):.1f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
