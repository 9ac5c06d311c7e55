"""Where a step's milliseconds go that the bound does not take: a profile of both, by kinds of kernels and copies.

    python examples/benchmark_gap.py --model 1.2b --json gap.json           # all GPUs
    python examples/benchmark_gap.py --model 1.2b --only "graph compiled,resident graph compiled"
    python examples/benchmark_gap.py                                        # CPU: that it works; it has no kernels

Rows are those of benchmark.py; the last one is the bound. They take turns without a profile (*step*), then some steps
of each are profiled, on every rank; the table is rank 0's. A step of the profile is cut into disjoint parts:

| part        | what it is                                                                                         |
|-------------|----------------------------------------------------------------------------------------------------|
| compute     | at least one kernel of the model runs: a matrix product, attention, compiled or other elementwise  |
| alone: kind | no kernel of the model, but the first of these: copies between GPUs, sums of gradients, the update,  |
|             | casts and staging, other copies                                                                    |
| idle        | nothing runs: waits for other ranks, barriers, launches                                            |

Then, of each kind, how many run in a step, their milliseconds in all, and how many of them lie beside compute. Last,
what compute's kernels take longer than the same kernels of the bound, by what ran beside each; kinds of which the
bound has other kernels, or in another order, are left out.
"""

from __future__ import annotations

import argparse
import json
import re
from argparse import Namespace
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from _benchmark_meter import Meter, hushed
from _benchmark_models import MODELS, batches
from _benchmark_setting import Setting
from benchmark import Runner

import functional_fsdp as fsdp

COPIES = "copies between GPUs"
KINDS = [
    (COPIES, r"nccl|PtoP|barrier"),
    ("sums", r"^summed"),
    ("update", r"adam"),
    ("attention", r"flash|fmha|sdpa|attention|mha"),
    ("matrix products", r"gemm|gemv|nvjet|cutlass|xmma|splitk|^aten::mm"),
    ("compiled", r"^triton"),
    ("casts and staging", r"copy_kernel|CopyFunctor|copy_device"),
    ("other copies", r"^mem(cpy|set)"),
    ("other kernels", r""),
]  # the first that fits
COMPUTE = ("attention", "matrix products", "compiled", "other kernels")
BESIDE = [kind for kind, _ in KINDS if kind not in COMPUTE]
Interval = tuple[float, float]  # milliseconds: from, to


class Event(NamedTuple):
    """A kernel or a copy: its name, its kind, and when it ran."""

    name: str
    kind: str
    begin: float
    end: float


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))


def union(some: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals, in order."""
    found: list[Interval] = []
    for begin, end in sorted(some):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif begin < end:
            found.append((begin, end))
    return found


def length(some: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in union(some))


def shared(one: Interval, others: list[Interval]) -> float:
    """How long disjoint intervals in order lie within one."""
    total, i = 0.0, bisect_left(others, one[0], key=lambda other: other[1])
    while i < len(others) and others[i][0] < one[1]:
        total += min(one[1], others[i][1]) - max(one[0], others[i][0])
        i += 1
    return total


def intervals(events: list[Event], *kinds: str) -> list[Interval]:
    return union((one.begin, one.end) for one in events if one.kind in kinds)


def in_parts(events: list[Event], steps: int) -> dict[str, float]:
    """Milliseconds of a step that are compute, alone by kind, and idle. Their sum is a step."""
    covered = intervals(events, *COMPUTE)
    found = {"compute": length(covered) / steps}
    for kind in BESIDE:
        more = union(covered + intervals(events, kind))
        found[f"alone: {kind}"] = (length(more) - length(covered)) / steps
        covered = more
    whole = max(one.end for one in events) - min(one.begin for one in events)
    return found | {"idle": (whole - length(covered)) / steps}


def by_kind(events: list[Event], steps: int) -> dict[str, list[float]]:
    """Of each kind: how many in a step, milliseconds in all, and of them beside compute."""
    compute, found = intervals(events, *COMPUTE), {}
    for kind, _ in KINDS:
        some = [one for one in events if one.kind == kind]
        if some:
            beside = 0.0 if kind in COMPUTE else sum(shared((one.begin, one.end), compute) for one in some)
            found[kind] = [n / steps for n in (len(some), sum(one.end - one.begin for one in some), beside)]
    return found


def slowed(events: list[Event], bound: list[Event], steps: int) -> dict[str, list[float]]:
    """By what ran beside most of a kernel of compute: how many in a step, the milliseconds of the same kernels of the
    bound, and how many more they take here. Kinds of which the bound has others, or in another order, are left out."""
    lanes = {kind: intervals(events, kind) for kind in BESIDE}
    found: dict[str, list[float]] = {}
    for compute in COMPUTE:
        ours, theirs = ([one for one in each if one.kind == compute] for each in (events, bound))
        if [one.name for one in ours] != [one.name for one in theirs]:
            continue
        for mine, its in zip(ours, theirs, strict=True):
            over = {kind: shared((mine.begin, mine.end), some) for kind, some in lanes.items()}
            most, before = max(over, key=lambda kind: over[kind]), its.end - its.begin
            beside = most if over[most] > (mine.end - mine.begin) / 2 else "mostly nothing"
            row = found.setdefault(f"{compute}, beside {beside}", [0.0, 0.0, 0.0])
            for i, value in enumerate((1.0, before, mine.end - mine.begin - before)):
                row[i] += value / steps
    return found


def measure(args: Namespace) -> dict[str, dict[str, Any]]:
    """Of each row its milliseconds without a profile, and the events of a profile. On every rank."""
    mesh = fsdp.local_mesh(args.device, data=-1)
    cuda = mesh.device_type == "cuda"
    meter = Meter(torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"))
    config, dtype = MODELS[args.model], torch.bfloat16 if cuda else torch.float32
    setting = Setting(mesh, None, config, "zero3", dtype)
    data = batches(config, 4 + (args.rounds + 1) * (args.steps + 1) + 1, meter.device)
    runners = [Runner(name, config, setting, data, meter) for name in args.only]
    for runner in runners:
        runner.warm_up(3)
    for _ in range(args.rounds):
        for runner in runners:
            runner.turn(args.steps)
    found = {}
    for runner in runners:
        events = profiled(runner, args.steps, meter)
        found[runner.name] = {"step": 1e3 * median(meter.slowest(runner.seconds)), "events": events}
    return found


def profiled(runner: Runner, steps: int, meter: Meter) -> list[Event]:
    activities = torch.profiler.ProfilerActivity
    meter.meet()
    with hushed(), torch.profiler.profile(activities=[activities.CUDA if meter.cuda else activities.CPU]) as profile:
        runner.run(1 + steps)  # the first one is not counted: a replay that a profiler sees for the first time
        meter.synchronize()
    profiler: Any = profile.profiler
    where = "CUDA" if meter.cuda else "CPU"
    found = []
    for event in profiler.kineto_results.events():
        if where in str(event.device_type()) and event.duration_ns():
            begin, name = event.start_ns() / 1e6, event.name()
            found.append(Event(name, kind_of(name), begin, begin + event.duration_ns() / 1e6))
    found.sort(key=lambda one: one.begin)
    return found[len(found) // (steps + 1) :]


def report(found: dict[str, dict[str, Any]], steps: int) -> dict[str, Any]:
    """Print the tables; the same as values."""
    *_, bound = found
    values: dict[str, Any] = {}
    for name, one in found.items():
        values[name] = {"step ms": one["step"], "parts": in_parts(one["events"], steps)}
        values[name]["kinds"] = by_kind(one["events"], steps)
        values[name]["slowed"] = None if name == bound else slowed(one["events"], found[bound]["events"], steps)
    print(f"| part, ms a step | {' | '.join(values)} |\n|---|{'---:|' * len(values)}")
    rows = {"step, no profile": [one["step ms"] for one in values.values()]}
    rows |= {part: [one["parts"][part] for one in values.values()] for part in values[bound]["parts"]}
    for part, some in rows.items():
        print(f"| {part} | {' | '.join(f'{ms:.2f}' for ms in some)} |")
    for name, one in values.items():
        print(f"\n| {name} | a step | ms | beside compute |\n|---|---:|---:|---:|")
        for kind, (count, ms, beside) in one["kinds"].items():
            print(f"| {kind} | {count:.0f} | {ms:.2f} | {'' if kind in COMPUTE else f'{beside:.2f}'} |")
        if one["slowed"]:
            print("\n| compute's kernels | a step | bound ms | more ms |\n|---|---:|---:|---:|")
            for kind, (count, ms, more) in one["slowed"].items():
                print(f"| {kind} | {count:.0f} | {ms:.2f} | {more:+.2f} |")
    step, least = (values[name] for name in (next(iter(values)), bound))
    print(f"\nstep / bound: {step['step ms'] / least['step ms']:.4f}")
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    cuda = torch.cuda.device_count()
    add("--model", choices=tuple(MODELS), default="1.2b" if cuda else "tiny")
    add("--ranks", type=int, default=cuda or 2)
    add("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    add("--only", help="rows, the bound last")
    add("--steps", type=int, default=4)
    add("--rounds", type=int, default=4)
    add("--json", type=Path)
    args = parser.parse_args()
    rows = "copy engine graph compiled,resident graph compiled" if args.device == "cuda" else "unit by unit,resident"
    args.only = [name.strip() for name in (args.only or rows).split(",")]
    found = fsdp.launch(measure, (args,), nprocs=args.ranks)[0]
    print(
        f"{args.model}, {args.ranks} × {torch.cuda.get_device_name() if cuda else 'CPU'}, torch {torch.__version__}\n"
    )
    values = report(found, args.steps)
    if args.json:
        args.json.write_text(json.dumps(values, indent=1))


if __name__ == "__main__":
    main()
