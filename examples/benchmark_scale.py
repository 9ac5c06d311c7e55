"""What comes before the first step, in CPU seconds of one process, by leaves and units; beside FSDP2 and DCP.

    python examples/benchmark_scale.py                       # every row; some take minutes
    python examples/benchmark_scale.py 1000x64 10000x512     # leaves x units
    python examples/benchmark_scale.py 50000x64 --without step    # no steps, which take longest

Leaves are small, [4, 4], so that what is measured is the work a leaf and a unit cost, and not their bytes. Layout and
plan are those of one rank, on 8, 1,024 and 16,384 ranks on paper. The others are on one rank, without a GPU; FSDP2
wraps each unit and then the model, and DCP saves and loads the same tensors. The last row of each size has what this
package takes over what the others take. What is measured is shown on standard error as it comes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import functional_fsdp as fsdp
import functional_fsdp.transforms as T

ROWS = [(1_000, 64), (10_000, 64), (10_000, 512), (8_192, 2_048), (50_000, 64), (50_000, 2_048)]
RANKS = (8, 1_024, 16_384)


class Block(nn.Module):
    def __init__(self, leaves: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(leaves))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((part(x) for part in self.parts), x)


class Net(nn.Module):
    def __init__(self, leaves: int, units: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(leaves // units) for _ in range(units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = 0.01 * block(x)
        return x


def seconds(found: dict[str, float], what: str, work: Callable[[], Any]) -> Any:
    begin = time.process_time()
    made = work()
    found[what] = time.process_time() - begin
    print(f"{what} {found[what]:.2f}", end="  ", file=sys.stderr, flush=True)
    return made


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def ours(leaves: int, units: int, folder: Path, steps: bool) -> dict[str, float]:
    found: dict[str, float] = {}
    params, model = fsdp.functionalize(Net(leaves, units))
    for ranks in RANKS:
        spec = fsdp.Spec({"data": ranks})
        seconds(found, f"plan {ranks}", lambda: fsdp.make_plan(fsdp.make_layout(params, spec)))  # noqa: B023
    spec, batch = fsdp.Spec(fsdp.local_mesh()), torch.ones(2, 4)
    state = seconds(found, "shard", lambda: fsdp.shard(params, spec, fsdp.adamw(lr=1e-3)))
    forward_backward = T.forward_backward(model, loss_of)

    def step() -> Any:
        after, _ = forward_backward(state, batch)
        return fsdp.step(after)

    for what in ("first step", "a step") if steps else ():
        state = seconds(found, what, step)
    seconds(found, "save", lambda: fsdp.save(state, folder / "ours"))
    seconds(found, "load", lambda: fsdp.load(folder / "ours", like=state))
    return found


def theirs(leaves: int, units: int, folder: Path, steps: bool) -> dict[str, float]:
    found: dict[str, float] = {}
    mesh, net, batch = fsdp.local_mesh(), Net(leaves, units), torch.ones(2, 4)

    def wrap() -> None:
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)

    seconds(found, "shard", wrap)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def step() -> None:
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for what in ("first step", "a step") if steps else ():
        seconds(found, what, step)
    kept = {
        f"{kind}.{path}": torch.ones(16) for kind in ("main", "mean", "square") for path, _ in net.named_parameters()
    }
    checkpoint: Any = dcp
    seconds(found, "save", lambda: checkpoint.save(kept, checkpoint_id=folder / "theirs", no_dist=True))
    seconds(found, "load", lambda: checkpoint.load(kept, checkpoint_id=folder / "theirs", no_dist=True))
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sizes", nargs="*", help="leaves x units, as 1000x64")
    parser.add_argument("--without", choices=["step"], help="what is not measured")
    args = parser.parse_args()
    chosen = [tuple(map(int, one.split("x"))) for one in args.sizes] or ROWS
    columns = [*(f"plan {ranks}" for ranks in RANKS), "shard", "first step", "a step", "save", "load"]
    print(f"| leaves | units | | {' | '.join(columns)} |\n|{'---|' * (3 + len(columns))}")
    for who in (ours, theirs):  # what the first one imports
        with tempfile.TemporaryDirectory() as folder:
            who(8, 2, Path(folder), True)
    for leaves, units in chosen:
        rows: dict[str, dict[str, float]] = {}
        for name, who in (("functional-fsdp", ours), ("FSDP2, DCP", theirs)):
            print(f"\n{name}, {leaves:,} leaves, {units:,} units:", end="  ", file=sys.stderr)
            with tempfile.TemporaryDirectory() as folder:
                rows[name] = who(leaves, units, Path(folder), args.without != "step")
        here, there = rows.values()
        rows["ratio"] = {name: here[name] / value for name, value in there.items()}
        print(file=sys.stderr)
        for name, found in rows.items():
            cells = " | ".join(f"{found[column]:.2f}" if column in found else "" for column in columns)
            print(f"| {leaves:,} | {units:,} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
