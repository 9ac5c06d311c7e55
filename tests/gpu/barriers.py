"""Barriers of the copy engine's gathers and reductions: by stream memory operations, and by torch's kernels.

    PYTHONPATH=tests python tests/gpu/barriers.py      # on two GPUs or more; a table, milliseconds a step

A step of `test_overlap.py`'s stack is captured twice, each with barriers of one kind, and replayed in turn. In between
one rank begins each step late, by what `--late` says: then a kernel that waits for it holds a multiprocessor, beside
the products of whoever is there already.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from gpu.test_overlap import Chain, train_step
from support.problems import mesh_and_placement

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp._runtime.runtime import runtime_of

WAYS = {"stream memory operations": True, "kernels": False}
CYCLES = 1_900_000  # of torch.cuda._sleep, about a millisecond


def measured(rounds: int, steps: int, late: float) -> dict[str, list[float]]:
    """Milliseconds a step in each round, by the kind of barrier, on this rank."""
    mesh, placement = mesh_and_placement("zero3")
    precision = fsdp.Precision(compute=torch.bfloat16)
    spec = fsdp.Spec(mesh, placement, precision=precision, transport="copy_engine")
    x = torch.randn(Chain.TOKENS, Chain.WIDTH, device=mesh.device_type, dtype=torch.bfloat16)
    lanes: Any = runtime_of(mesh).lanes
    ready: dict[str, tuple[Any, list[fsdp.State]]] = {}
    for way, batched in WAYS.items():
        state, model = fsdp.init(Chain, spec, fsdp.adamw(lr=1e-4))
        state, _ = train_step(state, model, x)
        signals = [*lanes.signals.values()]
        if not signals or not (ready or all(one.batched for one in signals)):
            raise SystemExit("there is nothing to compare: this driver takes no stream memory operations here")
        for one in signals:
            one.batched = batched  # what is captured from now on has barriers of this kind
        step = T.cuda_graph(lambda state, x, model=model: train_step(state, model, x))
        for _ in range(5):
            state, _ = step(state, x)
        ready[way] = step, [state]
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds):
        for way in [*WAYS][:: 1 if turn % 2 else -1]:
            step, kept = ready[way]
            dist.all_reduce(torch.zeros((), device=x.device))
            torch.cuda.synchronize()
            since = time.perf_counter()
            for _ in range(steps):
                if late and dist.get_rank():
                    torch.cuda._sleep(int(late * CYCLES))
                kept[0], _ = step(kept[0], x)
            torch.cuda.synchronize()
            seconds[way].append(1e3 * (time.perf_counter() - since) / steps)
    for one in lanes.signals.values():
        one.batched = True  # as they were
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--late", type=float, nargs="*", default=[0.0, 0.2], help="milliseconds, of all ranks but one")
    args = parser.parse_args()
    print("| ranks that begin late by | " + " | ".join(WAYS) + " |\n|---|" + "---:|" * len(WAYS))
    for late in args.late:
        ranks = fsdp.launch(measured, (args.rounds, args.steps, late))
        slowest = {way: [max(times) for times in zip(*(rank[way] for rank in ranks), strict=True)] for way in WAYS}
        said = [f"{median(ms):.2f} ({min(ms):.2f}–{max(ms):.2f})" for ms in slowest.values()]
        print(f"| {late} ms | " + " | ".join(said) + " |")


if __name__ == "__main__":
    main()
