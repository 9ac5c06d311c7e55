"""`T.budget` beside lists of modules made by hand, at equal peaks.

    python examples/benchmark_budget.py --model 1.2b --batch 8 --steps 5    # an H200 or H100; each row as it comes
    python examples/benchmark_budget.py --model 1.2b --batch 8 --graph --compile
    python examples/benchmark_budget.py --model llama3-8b --ranks 2         # sharded; the slowest rank's time counts
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
a replay uses and the state), and for budgets: time over that of the best list, and bytes over the budget. A list that
does not fit the GPU is said, and left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from _benchmark_models import MODELS as CONFIGS
from benchmark_memory import GIB, GPT, LR, MODELS, Shape, loss_fn

import functional_fsdp as fsdp
from functional_fsdp import transforms as T


@dataclass(frozen=True)
class Subject:
    """What is trained. blocks: the path of the list of blocks; attn, mlp: of their two parts."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    shape: Any  # with batch, seq, vocab and depth
    units: Any = None
    blocks: str = "blocks"
    attn: str = "attn"
    mlp: str = "mlp"


def subject(name: str, batch: int | None, layers: int | None) -> Subject:
    shape: Any = MODELS[name] if name in MODELS else CONFIGS[name]
    shape = replace(shape, batch=batch or shape.batch, depth=layers or shape.depth)
    if isinstance(shape, Shape):
        return Subject(lambda: GPT(shape), loss_fn, shape)
    return Subject(shape.build, shape.loss, shape, shape.units(), shape.layers.removesuffix(".*"), "self_attn")


def every(s: Subject, step: int = 1) -> list[str]:
    return [f"{s.blocks}.{i}" for i in range(0, s.shape.depth, step)]


LISTS: dict[str, Callable[[nn.Module, Subject], nn.Module]] = {
    "none": lambda model, s: model,
    "all remat": lambda model, s: T.remat(model, *every(s)),
    "half remat": lambda model, s: T.remat(model, *every(s, 2)),
    "attn saved": lambda model, s: T.remat(model, *every(s), save=(s.attn,)),
    "mlp offloaded": lambda model, s: T.remat(model, *every(s), save=(s.attn,), offload=(s.mlp,)),
    "offloaded": lambda model, s: T.offload(model, *every(s)),
}
PRODUCTS = "products"
MORE = LISTS | {PRODUCTS: lambda model, s: T.remat(model, *every(s), products=(s.attn, s.mlp))}


def measured(name: str, budget: int | None, args: argparse.Namespace) -> dict[str, Any]:
    """Of the model that this list changes, or a budget: milliseconds, bytes, losses, and what was chosen (whose peak is
    then known). On this rank."""
    s, cuda = subject(args.model, args.batch, args.layers), args.device == "cuda"
    gc.collect()
    before = 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
    mesh = fsdp.local_mesh(args.device)
    precision = fsdp.Precision(compute=torch.bfloat16 if cuda else torch.float32)
    spec = fsdp.Spec(mesh, precision=precision, units=s.units, schedule=fsdp.Schedule(overlap_update=True))
    state, model = fsdp.init(s.build, spec, fsdp.adamw(lr=LR), seed=0)
    changed = MORE[name](model, s) if budget is None else T.budget(model, budget)
    forward_backward = T.forward_backward(changed, s.loss, compile=args.compile)
    draw = torch.Generator().manual_seed(mesh.get_local_rank("data"))
    size = (args.steps + 4, s.shape.batch, s.shape.seq + 1)
    data = torch.randint(0, s.shape.vocab, size, generator=draw).to(args.device)
    listed = T.step_memory(forward_backward, state, data[0]).peak if budget is None else 0

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
    add("--model", choices=(*MODELS, *(name for name in CONFIGS if name not in MODELS)), default="tiny")
    add("--batch", type=int, help="sequences of a step and rank")
    add("--layers", type=int, help="how many of the model's")
    add("--ranks", type=int, default=1)
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.device_count() else "cpu")
    add("--steps", type=int, default=8)
    add("--graph", action="store_true", help="each step as a CUDA graph")
    add("--compile", action="store_true", help="blocks compiled")
    add("--lists", nargs="*", choices=tuple(MORE), default=list(LISTS))
    add("--budgets", nargs="*", choices=tuple(LISTS), help="the lists whose peaks are budgets; default: all")
    add("--json", type=Path)
    args = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}

    def keep(name: str, found: dict[str, Any]) -> None:
        rows[name] = found
        print(row(name, found), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))

    with fsdp.workers(nprocs=args.ranks) as ranks:

        def slowest(name: str, budget: int | None = None) -> dict[str, Any]:
            found = ranks(measured, name, budget, args).get()
            most = {key: max(one[key] for one in found) for key in ("ms", "peak", "predicted") if key in found[0]}
            return found[0] | most

        for name in args.lists:
            try:
                keep(name, slowest(name))
            except fsdp.LaunchError as error:
                if "OutOfMemoryError" not in str(error):
                    raise
                print(f"{name:22} does not fit", flush=True)
        lists = {name: found for name, found in rows.items() if name != PRODUCTS}
        last = lists["none"]["predicted"] if "none" in lists else 0
        for name, given in sorted(lists.items(), key=lambda item: -item[1]["predicted"]):
            budget = given["predicted"]
            if 0.99 * last < budget <= last or (args.budgets is not None and name not in args.budgets):
                continue
            last = budget
            fits = [one for one in lists if lists[one]["predicted"] <= budget]
            beside = min(fits, key=lambda one: lists[one]["ms"])
            found = slowest(name, budget)
            found |= {"beside": beside, "ratio": found["ms"] / lists[beside]["ms"], "budget": budget}
            found["over"] = max(found["predicted"], found.get("peak", 0)) - budget
            print(f"{found['chosen']}\nfirst step {found['choosing']:.1f} s", flush=True)
            keep(f"budget: {name}", found)
    ratios = [found["ratio"] for found in rows.values() if "ratio" in found]
    print(f"time over the best list's at no larger a peak: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")


if __name__ == "__main__":
    main()
