"""Two axes, data × tp: FSDP2 with `parallelize_module` beside this package, of the same Llama on the same batches.

    python examples/benchmark_axes.py                          # CPU, 4 processes: a small one, losses
    python examples/benchmark_axes.py --full --data 2 --tp 2   # GPUs: 1.26 B in bfloat16, milliseconds and GiB
    python examples/benchmark_axes.py --full --size 8b --data 4 --tp 2

| row                        | what it is                                                                            |
|----------------------------|---------------------------------------------------------------------------------------|
| FSDP2 + parallelize_module | `fully_shard` of each layer and of the model, which torchtitan's plan has cut; also   |
|                            | ", compiled": with `layer.compile()`                                                  |
| DTensors                   | this package, of the module that the same plan has cut                                |
| DTensors, graph            | the same, a step as a CUDA graph                                                      |
| collectives                | this package, of a module that calls `T.collectives`: `Spec(own=)`                    |
| collectives, graph         | the same, a step as a CUDA graph; also ", compiled": with compiled layers; also       |
|                            | ", copy engine": gathers and reductions along "data" by `Spec(transport=)`            |

Rows take turns, `--rounds` times, each in processes that have nothing else on the GPU. Of a row the table has the
median of the rounds, and in brackets the least and the most; the most bytes that any rank had allocated; and time and
peak beside the fastest row of FSDP2. A round of a row is printed when it is over. On the CPU graphs are plain steps.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from typing import Any

import _axes_llama as llama
import torch

import functional_fsdp as fsdp

SIZES = {
    "small": llama.Config(),
    "1b": llama.Config(width=2048, heads=16, hidden=5632, depth=22, vocab=32000, length=2048, rows=2),
    "8b": llama.Config(width=4096, heads=32, hidden=14336, depth=32, vocab=128256, length=2048, rows=1),
}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "FSDP2 + parallelize_module": ("theirs", {}),
    "FSDP2 + parallelize_module, compiled": ("theirs", {"compiled": True}), "DTensors": ("dtensors", {}),
    "DTensors, graph": ("dtensors", {"graph": True}), "collectives": ("ours", {}),
    "collectives, graph": ("ours", {"graph": True}),
    "collectives, graph, compiled": ("ours", {"graph": True, "compiled": "units"}),
    "collectives, graph, compiled, copy engine": (
        "ours", {"graph": True, "compiled": "units", "transport": "copy_engine"}
    ),
}  # fmt: skip


def run(row: str, size: str, axes: dict[str, int], steps: int, compute: torch.dtype | None) -> llama.Found:
    """One row, on this rank."""
    gc.collect()  # FSDP2's modules go round in circles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    way, how = ROWS[row]
    found: llama.Found = getattr(llama, way)(SIZES[size], axes, steps, compute, **how)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="on GPUs, at full size")
    parser.add_argument("--size", default="1b", choices=["1b", "8b"])
    parser.add_argument("--data", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of a row in a round; the first third is not measured")
    parser.add_argument("--rows", default="", help="those that begin so, by semicolons; all that can be")
    args = parser.parse_args()
    size, axes = args.size if args.full else "small", {"data": args.data, "tp": args.tp}
    wanted = tuple(args.rows.split(";"))
    small = ("FSDP2 + parallelize_module", "DTensors", "collectives")
    rows = [row for row in ROWS if row.startswith(wanted) and (args.full or row in small or args.rows)]
    rounds, steps = (args.rounds, args.steps) if args.full else (1, 3)
    compute = torch.bfloat16 if args.full else None
    found: dict[str, list[Any]] = {row: [] for row in rows}
    for _ in range(rounds):
        for row in rows:
            try:
                ranks = fsdp.launch(run, (row, size, axes, steps, compute), nprocs=args.data * args.tp)
            except fsdp.LaunchError as error:
                print(f"{row}: {str(error)[-400:]}", flush=True)
                continue
            found[row].append(ranks)
            print(f"{row}: {max(one.seconds for one in ranks) * 1e3:.1f} ms", flush=True)
    print(f"{size}, {axes}, {torch.cuda.get_device_name() if args.full else 'CPU'}, torch {torch.__version__}")
    print(f"{'':42}{'ms':>9}{'':18}{'GiB':>8}{'theirs / this':>15}{'GiB / theirs':>14}  losses, first and last")
    best: tuple[float, float] | None = None
    for row, some in found.items():
        if not some:
            continue
        times = [max(one.seconds for one in ranks) * 1e3 for ranks in some]
        ms, peak = statistics.median(times), max(one.peak for ranks in some for one in ranks) / 2**30
        if row.startswith("FSDP2") and (best is None or ms < best[0]):
            best = ms, peak
        beside = f"{best[0] / ms:15.3f}{peak / max(best[1], 1e-9):14.2f}" if best else f"{'':29}"
        around = f"({min(times):.1f} - {max(times):.1f})"
        losses = some[0][0].losses
        print(f"{row:42}{ms:9.1f} {around:17}{peak:8.2f}{beside}  {losses[0]:.4f} {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
