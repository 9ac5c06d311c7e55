"""`T.budget` beside lists of modules made by hand, at equal peaks, on one GPU.

    python examples/benchmark_budget.py --model 1.2b --batch 8 --steps 5    # an H200 or H100; each row as it comes
    python examples/benchmark_budget.py --model 1.2b --batch 8 --graph --compile
    python examples/benchmark_budget.py --model tiny                        # CPU: that it works; its times say nothing

| row           | what blocks do                                                                          |
|---------------|-----------------------------------------------------------------------------------------|
| none          | keep everything                                                                         |
| all remat     | `T.remat(model, "blocks.*")`: keep their input                                          |
| half remat    | the same of every second block                                                          |
| attn saved    | `T.remat(model, "blocks.*", save=("attn",))`                                            |
| mlp offloaded | `T.remat(model, "blocks.*", save=("attn",), offload=("mlp",))`                          |
| offloaded     | `T.offload(model, "blocks.*")`                                                          |
| products      | `T.remat(model, "blocks.*", products=("attn", "mlp"))`; no budget is taken from it      |
| budget: name  | what `T.budget` chooses with the peak of that row as its budget                         |

A list that fits a budget may be used there, so each budget is compared with the fastest list whose peak is no larger.
Of peaks within 1 % of each other the largest is a budget. That of "none" is none: the model is then as it is.
Columns: milliseconds a step (median), the peak that `T.step_memory` says, what the allocator gave (with `--graph` what
a replay uses and the state), and for budgets: time over that of the best list, and bytes over the budget.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from benchmark_memory import GIB, GPT, LR, MODELS, Shape, loss_fn

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

HALF = tuple(f"blocks.{i}" for i in range(0, 256, 2))
LISTS: dict[str, Callable[[nn.Module, Shape], nn.Module]] = {
    "none": lambda model, shape: model,
    "all remat": lambda model, shape: T.remat(model, "blocks.*"),
    "half remat": lambda model, shape: T.remat(model, *HALF[: (shape.depth + 1) // 2]),
    "attn saved": lambda model, shape: T.remat(model, "blocks.*", save=("attn",)),
    "mlp offloaded": lambda model, shape: T.remat(model, "blocks.*", save=("attn",), offload=("mlp",)),
    "offloaded": lambda model, shape: T.offload(model, "blocks.*"),
}
PRODUCTS = "products"
MORE = LISTS | {PRODUCTS: lambda model, shape: T.remat(model, "blocks.*", products=("attn", "mlp"))}


def measured(
    change: Callable[[nn.Module], nn.Module], shape: Shape, args: argparse.Namespace, predict: bool = True
) -> dict[str, Any]:
    """Of a model that is changed so: milliseconds, bytes, losses, and what was chosen (whose peak is then known)."""
    cuda = args.device == "cuda"
    gc.collect()
    before = 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
    precision = fsdp.Precision(compute=torch.bfloat16 if cuda else torch.float32)
    schedule = fsdp.Schedule(overlap_update=True)
    spec = fsdp.Spec(fsdp.local_mesh(args.device), precision=precision, schedule=schedule)
    state, model = fsdp.init(lambda: GPT(shape), spec, fsdp.adamw(lr=LR), seed=0)
    forward_backward = T.forward_backward(change(model), loss_fn, compile=args.compile)
    draw = torch.Generator().manual_seed(0)
    size = (args.steps + 4, shape.batch, shape.seq + 1)
    data = torch.randint(0, shape.vocab, size, generator=draw).to(args.device)
    listed = T.step_memory(forward_backward, state, data[0]).peak if predict else 0

    def train_step(state: fsdp.State, tokens: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, tokens)
        return fsdp.step(state), loss

    step: Any = T.cuda_graph(train_step) if args.graph else train_step
    losses, times = [], []
    for i, tokens in enumerate(data):
        if cuda and i == 3:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        state, loss = step(state, tokens)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
        losses.append(float(loss))
    choice = forward_backward.choice
    found: dict[str, Any] = {"ms": 1e3 * statistics.median(times[4:]), "losses": losses}
    found["predicted"] = listed if choice is None else choice.peak
    if cuda:
        found["peak"] = torch.cuda.max_memory_allocated() - before
    if args.graph:
        found["peak"] = torch.cuda.memory_allocated() - before + max(graph.peak for graph in step.graphs.values())
    if choice is not None:
        found |= {"chosen": repr(choice), "choosing": times[0]}
    return found


def row(name: str, found: dict[str, Any]) -> str:
    peaks = f"says {found['predicted'] / GIB:7.3f} GiB"
    if "peak" in found:
        peaks += f"  peak {found['peak'] / GIB:7.3f} GiB"
    said = f"{name:22} {found['ms']:8.1f} ms  {peaks}  loss {found['losses'][-1]:.4f}"
    if "ratio" in found:
        said += f"  {found['ratio']:.3f} of {found['beside']!r}, over the budget {found['over'] / 2**20:.1f} MiB"
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", choices=tuple(MODELS), default="tiny")
    add("--batch", type=int, help="sequences of a step")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--steps", type=int, default=8)
    add("--graph", action="store_true", help="each step as a CUDA graph")
    add("--compile", action="store_true", help="blocks compiled")
    add("--lists", nargs="*", choices=tuple(MORE), default=list(LISTS))
    add("--budgets", nargs="*", choices=tuple(LISTS), help="the lists whose peaks are budgets; default: all")
    add("--json", type=Path)
    args = parser.parse_args()
    shape = MODELS[args.model]
    shape = replace(shape, batch=args.batch or shape.batch)
    rows: dict[str, dict[str, Any]] = {}

    def keep(name: str, found: dict[str, Any]) -> None:
        rows[name] = found
        print(row(name, found), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))

    for name in args.lists:
        keep(name, measured(lambda model, name=name: MORE[name](model, shape), shape, args))  # type: ignore[misc]
    lists = {name: found for name, found in rows.items() if name != PRODUCTS}
    last = lists["none"]["predicted"] if "none" in lists else 0
    for name, given in sorted(lists.items(), key=lambda item: -item[1]["predicted"]):
        budget = given["predicted"]
        if 0.99 * last < budget <= last or (args.budgets is not None and name not in args.budgets):
            continue
        last = budget
        beside = min((one for one in lists if lists[one]["predicted"] <= budget), key=lambda one: lists[one]["ms"])
        found = measured(lambda model, budget=budget: T.budget(model, budget), shape, args, False)  # type: ignore[misc]
        found |= {"beside": beside, "ratio": found["ms"] / lists[beside]["ms"], "budget": budget}
        found["over"] = max(found["predicted"], found.get("peak", 0)) - budget
        print(f"{found['chosen']}\nfirst step {found['choosing']:.1f} s", flush=True)
        keep(f"budget: {name}", found)
    ratios = [found["ratio"] for found in rows.values() if "ratio" in found]
    print(f"time over the best list's at no larger a peak: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")


if __name__ == "__main__":
    main()
