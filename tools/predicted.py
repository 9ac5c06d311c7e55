"""Predicted beside measured: runs of docs/benchmarks.md, and what `fsdp.predict` says of each without a GPU.

    python tools/predicted.py            # the table of docs/benchmarks.md
    python tools/predicted.py --parts    # and what each prediction is made of

The figures below are those of docs/results, milliseconds and MiB, of runs of this project on H100 and H200. Where there
are several runs of one row the one in the fullest table is here. A row that is measured in eager mode hangs
on its host: hosts differ by a factor of two there.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import benchmark_memory
from _benchmark_models import MODELS
from benchmark_budget import MORE

import functional_fsdp as fsdp
from functional_fsdp._predict.prediction import Prediction, Rehearsal, predicted, rehearsed

MIB = 1 << 20


@dataclass(frozen=True)
class Run:
    """A measured run. mesh: ranks, or replicas × ranks; way: as rows of benchmark.py are named; sums: of gradients."""

    model: str
    gpu: str
    ranks: int
    way: str
    ms: float
    mib: float
    batch: int = 0
    seq: int = 0
    depth: int = 0
    replicas: int = 1
    fitted: bool = True  # whether the shares of the hardware were fitted to it

    @property
    def graph(self) -> bool:
        return "graph" in self.way

    @property
    def compiled(self) -> bool:
        return "compiled" in self.way

    @property
    def placement(self) -> str:
        return next((one for one in ("hfsdp", "hsdp") if one in self.way), "zero3")


RUNS = [
    Run("0.16b", "H200", 4, "unit by unit", 20.1, 4272),
    Run("0.16b", "H200", 2, "driven", 24.8, 4734),
    Run("0.16b", "H200", 2, "graph compiled", 12.9, 4574),
    Run("0.16b", "H200", 2, "copy engine graph compiled", 12.0, 4746),
    Run("0.16b", "H100", 2, "copy engine graph compiled", 13.2, 4647),
    Run("1.2b", "H200", 1, "driven", 74.5, 21103),
    Run("1.2b", "H200", 1, "graph compiled", 65.4, 20255),
    Run("1.2b", "H200", 4, "driven", 70.9, 11176),
    Run("1.2b", "H200", 2, "unit by unit", 72.8, 14472),
    Run("1.2b", "H200", 2, "compiled", 65.9, 13592),
    Run("1.2b", "H200", 2, "graph compiled", 64.1, 13624),
    Run("1.2b", "H200", 4, "graph compiled", 62.7, 10361),
    Run("1.2b", "H200", 2, "copy engine graph compiled", 60.2, 13748),
    Run("1.2b", "H200", 4, "copy engine graph compiled", 59.1, 10434),
    Run("1.2b", "H100", 2, "copy engine graph compiled", 63.6, 13748),
    Run("1.2b", "H100", 2, "copy engine graph compiled kept", 62.2, 15735),
    Run("1.2b", "H200", 2, "copy engine graph compiled hsdp", 69.8, 20380, replicas=2),
    Run("1.2b", "H200", 2, "copy engine graph compiled hfsdp", 66.6, 15961, replicas=2),
    Run("1.2b", "H200", 4, "copy engine graph compiled hsdp", 64.0, 13846, replicas=2),
    Run("1.2b", "H200", 4, "copy engine graph compiled hfsdp", 63.7, 11657, replicas=2),
    Run("6.7b", "H200", 4, "unit by unit", 380.0, 40697),
    Run("6.7b", "H200", 2, "unit by unit", 388.5, 59983),
    Run("6.7b", "H200", 4, "unit by unit", 147.2, 27845, seq=1024),
    Run("6.7b", "H200", 4, "unit by unit", 116.6, 27744, seq=256),
    Run("6.7b", "H200", 4, "copy engine", 360.5, 42377),
    Run("6.7b", "H200", 4, "copy engine graph compiled", 335.4, 38498),
    Run("6.7b", "H200", 4, "copy engine graph compiled kept", 334.9, 51833),
    Run("6.7b", "H200", 4, "copy engine graph compiled", 635.1, 57781, batch=2),
    Run("6.7b", "H100", 2, "copy engine graph compiled", 358.8, 57777),
    Run("llama", "H200", 2, "driven", 97.8, 15562, fitted=False),
    Run("llama", "H200", 2, "graph compiled", 66.2, 13218, fitted=False),
    Run("llama", "H200", 2, "copy engine graph compiled", 61.3, 13635, fitted=False),
    Run("moe", "H200", 2, "driven", 107.5, 11934, fitted=False),
    Run("moe", "H200", 2, "graph", 65.6, 11965, fitted=False),
    Run("moe", "H200", 2, "copy engine graph compiled", 35.1, 11254, fitted=False),
    Run("parts", "H100", 2, "plain", 87.9, 13.55 * 1024, fitted=False),
    Run("parts", "H100", 2, "all remat", 136.9, 9.43 * 1024, fitted=False),
    Run("parts", "H100", 2, "mlp offloaded", 151.5, 10.42 * 1024, fitted=False),
    Run("parts", "H200", 1, "plain", 242.2, 40.44 * 1024, batch=8, fitted=False),
    Run("parts", "H200", 1, "all remat", 287.4, 20.70 * 1024, batch=8, fitted=False),
    Run("parts", "H200", 1, "half remat", 265.7, 30.09 * 1024, batch=8, fitted=False),
    Run("parts", "H200", 1, "attn saved", 263.8, 28.60 * 1024, batch=8, fitted=False),
    Run("parts", "H200", 1, "products", 248.9, 32.53 * 1024, batch=8, fitted=False),
    Run("llama3-8b", "H200", 2, "copy engine graph compiled", 216.6, 43287, seq=4096, depth=16, fitted=False),
]


def spec_of(run: Run, units: Any = None) -> fsdp.Spec:
    mesh = {"data": run.ranks}
    if run.replicas > 1:
        mesh = {"replica": run.replicas, "shard": run.ranks // run.replicas}
    return fsdp.Spec(
        mesh, getattr(fsdp, run.placement)(*mesh), units=units, precision=fsdp.Precision(compute=torch.bfloat16),
        schedule=fsdp.Schedule(overlap_update=True, keep="all" if "kept" in run.way else None),
        transport="copy_engine" if "copy engine" in run.way else "collective",
    )  # fmt: skip


@cache
def rehearsal(model: str, batch: int, seq: int, depth: int, way: str) -> Rehearsal:
    """One for all runs of a model."""
    if model == "parts":  # of benchmark_memory.py
        shape = benchmark_memory.MODELS["1.2b"]
        shape = replace(shape, batch=batch or shape.batch)
        with torch.device("meta"):
            whole: Any = benchmark_memory.GPT(shape)
        whole = whole if way == "plain" else MORE[way](whole, shape)
        tokens = torch.empty(shape.batch, shape.seq + 1, dtype=torch.int64, device="meta")
        return rehearsed(whole, benchmark_memory.loss_fn, tokens, spec_of(RUNS[0]))
    c = MODELS[model]
    c = replace(c, batch=batch or c.batch, seq=seq or c.seq, depth=depth or c.depth)
    with torch.device("meta"):
        whole = c.build()
    tokens = torch.empty(c.batch, c.seq + 1, dtype=torch.int64, device="meta")
    return rehearsed(whole, c.loss, tokens, spec_of(RUNS[0], c.units()), compiled=True)


def prediction(run: Run, hardware: Any = None) -> Prediction:
    c = MODELS.get(run.model)
    units = replace(c, depth=run.depth or c.depth).units() if c else None
    way = run.way if run.model == "parts" else ""
    found = rehearsal(run.model, run.batch, run.seq, run.depth, way)
    return predicted(found, spec_of(run, units), None, hardware or run.gpu, run.graph, run.compiled)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", action="store_true")
    args = parser.parse_args()
    print("| model | GPUs | row | ms | predicted | off by | peak MiB | predicted | off by |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|")
    times, peaks = [], []
    for run in RUNS:
        found = prediction(run)
        ms, mib = 1e3 * found.seconds, found.peak / MIB
        times.append(ms / run.ms - 1)
        peaks.append(mib / run.mib - 1)
        size = ""
        if run.batch or run.seq:
            c = MODELS.get(run.model) or benchmark_memory.MODELS["1.2b"]
            layers = f", {run.depth} layers" * bool(run.depth)
            size = f" ({run.batch or c.batch}×{run.seq or c.seq}{layers})"
        cells = [f"{run.model}{size}", f"{run.ranks} {run.gpu}", run.way, f"{run.ms:.1f}", f"{ms:.1f}"]
        cells += [f"{100 * times[-1]:+.1f} %", f"{run.mib:,.0f}", f"{mib:,.0f}", f"{100 * peaks[-1]:+.1f} %"]
        print(f"| {' | '.join(cells)} |")
        if args.parts:
            print("  ", {name: round(1e3 * s, 1) for name, s in found.parts.items()}, found.bound)
    for what, off, most in (("time", times, 0.10), ("peak", peaks, 0.03)):
        sizes = [abs(one) for one in off]
        within = sum(one <= most for one in sizes)
        print(f"\n{what}: median {100 * median(sizes):.1f} %, {within} of {len(sizes)} within {100 * most:.0f} %")


if __name__ == "__main__":
    main()
