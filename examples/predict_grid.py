"""A grid of settings, measured beside what `fsdp.predict` says of them: milliseconds a step, and the peak.

    python examples/predict_grid.py                                   # on all GPUs, 0.16 B and 1.2 B
    python examples/predict_grid.py --models 1.2b --ranks 2 --limit 240
    python examples/predict_grid.py --models tiny --ranks 2 --device cpu      # a dry run: no times of worth
    python examples/predict_grid.py --models 1.2b --ranks 4 --tune --limit 420     # 40 settings beside tune's choice
    python examples/predict_grid.py --tune --cases 12 --between 0.6 0.3 --limit 170    # 12, two budgets more

| column       | what it is                                                                                       |
|--------------|--------------------------------------------------------------------------------------------------|
| ms           | of a step, the median of `--steps`, the slowest rank's                                           |
| by table     | as `fsdp.predict` says it of this GPU's table, without having measured anything                  |
| by links     | the same, with the links that `fsdp.measure_links` found here                                    |
| peak         | MiB, the most that the caching allocator gave in a step, and shared memory; of a graph as it was |
|              | captured                                                                                         |

With `--tune` every setting of a grid is measured: placements, prefetch, kept units, transports, recomputed blocks; and
what `fsdp.tune` chooses where everything may be taken, and for each budget that this choice does not keep (`--budget`,
GiB a rank; or `--between`, shares of the way from what recomputing every block takes, as predicted, to what that choice
takes). A budget in which nothing fits is said, and left out. A choice is measured first and last. *choice / best* is
the choice's time by that of the fastest setting within the budget, *rank* its place among them; *faster by more than
3 %* counts those that tune should have taken.

Below the table are the links, the host's share of the eager steps, and the lines for docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import gc
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from _benchmark_models import MODELS, Config

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

MIB = 1 << 20
LR = 3e-5


@dataclass(frozen=True)
class Case:
    """A setting. keep: of gathered units; remat: of the blocks, "" for none."""

    placement: str = "zero3"
    graph: bool = False
    compiled: bool = False
    keep: Any = None
    remat: str = ""
    transport: str = "collective"
    prefetch: int = 1
    spec: Any = None  # in the place of all that, on paper: of `fsdp.tune`
    ways: tuple[tuple[str, str], ...] = ()  # by path of a block what becomes of what it saves: of `fsdp.tune`
    said: str = ""

    def __str__(self) -> str:
        if self.said:
            return self.said
        words = [self.placement, "graph" if self.graph else "eager"]
        words += [f"prefetch {self.prefetch}"] * (self.prefetch != 1)
        words += ["compiled"] * self.compiled + ["kept"] * (self.keep is not None)
        words += [self.remat] * bool(self.remat) + ["copy engine"] * (self.transport == "copy_engine")
        return ", ".join(words)


CASES = [
    Case(), Case(graph=True), Case(graph=True, keep="all"), Case(remat="recomputed"),
    Case(graph=True, remat="recomputed"), Case("zero2"), Case("zero2", graph=True), Case("ddp"),
    Case("ddp", graph=True), Case(graph=True, transport="copy_engine"), Case(remat="mlp moved"),
    Case(graph=True, compiled=True), Case(graph=True, compiled=True, transport="copy_engine"),
]  # fmt: skip


def grid(compiled: bool) -> list[Case]:
    """40 settings, all as graphs, the usual ones first."""
    transports, blocks = ("collective", "copy_engine"), ("", "half recomputed", "recomputed")
    every = [
        Case("zero3", True, compiled, keep, remat, transport, prefetch)
        for prefetch in (1, 2, 3) for keep in (None, "all") for transport in transports for remat in ("", "recomputed")
    ]  # fmt: skip
    every += [
        Case("zero3", True, compiled, keep, "half recomputed", transport)
        for keep in (None, "all") for transport in transports
    ]  # fmt: skip
    every += [
        Case(placement, True, compiled, None, remat, transport)
        for placement in ("zero2", "ddp") for transport in transports for remat in blocks
    ]  # fmt: skip
    rare = {case: case.remat == "half recomputed" or (case.placement != "zero3" and case.remat != "") for case in every}
    return sorted(every, key=lambda case: case.prefetch - 1 + rare[case])


def chosen(found: fsdp.Tuned, compiled: bool) -> Case:
    """What tune chose, for `measured`."""
    best = found.best
    return Case(
        graph=True, compiled=compiled, spec=best.spec, ways=tuple(best.ways.items()), said=f"tune's choice: {best}"
    )


def treated(model: Any, ways: tuple[tuple[str, str], ...]) -> Any:
    """A model whose blocks keep, recompute or move what `Candidate.ways` says of them."""
    groups: dict[str, list[str]] = {}
    for path, way in ways:
        groups.setdefault(way, []).append(path)
    for way, paths in groups.items():
        if way == "moved":
            model = T.offload(model, *paths)
        elif way != "kept":
            parts = {
                what: tuple(named.split(", "))
                for named, what in re.findall(r"(?:but |; ?)([^;]+?) (products kept|kept|moved)", way)
            }
            model = T.remat(
                model, *paths, save=parts.get("kept", ()), offload=parts.get("moved", ()),
                products=parts.get("products kept", ()),
            )  # fmt: skip
    return model


def changed(model: Any, case: Case) -> Any:
    if case.ways:
        return treated(model, case.ways)
    if case.remat == "half recomputed":
        count = len(model.blocks)
        return T.remat(model, *(f"blocks.{i}" for i in range(count // 2)))
    if case.remat == "recomputed":
        return T.remat(model, "blocks.*")
    if case.remat == "mlp moved":
        return T.offload(model, "blocks.0", "blocks.1")
    return model


def spec_of(case: Case, config: Config, mesh: Any) -> fsdp.Spec:
    if case.spec is not None:
        return fsdp.Spec(
            mesh, case.spec.placements[0][1], precision=fsdp.Precision(compute=torch.bfloat16), units=config.units(),
            schedule=replace(case.spec.schedule, overlap_update=True), transport=case.spec.transport,
        )  # fmt: skip
    names = tuple(mesh) if isinstance(mesh, dict) else mesh.mesh_dim_names
    schedule = fsdp.Schedule(keep=case.keep, prefetch=case.prefetch, overlap_update=True)
    return fsdp.Spec(
        mesh, getattr(fsdp, case.placement)(*names), precision=fsdp.Precision(compute=torch.bfloat16),
        units=config.units(), schedule=schedule, transport=case.transport,
    )  # fmt: skip


def predictions(config: Config, cases: list[Case], ranks: int, hardware: Any, links: Any) -> list[Any]:
    """Of each case, with a table's links or measured ones."""
    found = []
    for case in cases:
        with torch.device("meta"):
            model = changed(config.build(), case)
        tokens = torch.empty(config.batch, config.seq + 1, dtype=torch.int64, device="meta")
        spec = spec_of(case, config, {"data": ranks})
        settings: Any = {"hardware": hardware, "graph": case.graph, "compiled": case.compiled}
        found.append(fsdp.predict(model, config.loss, tokens, spec, fsdp.adamw(lr=LR), links=links, **settings))
    return found


# ---------------------------------------------------------------- on each rank


def links_here(device: str) -> dict[str, fsdp.Link]:
    return fsdp.measure_links(fsdp.local_mesh(device, data=-1))


def measured(config: Config, case: Case, steps: int, device: str) -> dict[str, float]:
    """Milliseconds and bytes of one case, on this rank."""
    cuda = device == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if cuda else 0
    mesh = fsdp.local_mesh(device, data=-1)
    state, model = fsdp.init(config.build, spec_of(case, config, mesh), fsdp.adamw(lr=LR), seed=0)
    forward_backward = T.forward_backward(changed(model, case), config.loss, compile=case.compiled)

    def train_step(state: fsdp.State, tokens: torch.Tensor) -> Any:
        state, loss = forward_backward(state, tokens)
        return fsdp.step(state), loss

    step: Callable[..., Any] = T.cuda_graph(train_step, warmup=2) if case.graph and cuda else train_step
    where = "cuda" if cuda else "cpu"
    generator = torch.Generator(device=where).manual_seed(mesh.get_local_rank("data"))
    shape = (config.batch, config.seq + 1)
    data = [torch.randint(0, config.vocab, shape, generator=generator, device=where) for _ in range(3)]
    times, hosts = [], []
    for i in range(4 + steps):
        if i == 3 and cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        state, _ = step(state, data[i % 3])
        hosts.append(time.perf_counter() - begun)
        if cuda and i in (3, 3 + steps):  # in between steps follow each other, as in a run
            torch.cuda.synchronize()
            times.append(time.perf_counter())
    found = {"host": 1e3 * median(hosts[4:]), "ms": 1e3 * median(hosts[4:])}
    if cuda:
        found["ms"] = 1e3 * (times[1] - times[0]) / steps
        most = torch.cuda.max_memory_allocated() - before
        graphs = getattr(step, "graphs", {})
        if graphs:
            most = max(most, torch.cuda.memory_allocated() - before + max(graph.peak for graph in graphs.values()))
        found["peak"] = most + state.shared_bytes
    return found


def compare_with_tune(args: argparse.Namespace) -> None:
    """Measure tune's choices and every setting of the grid, and print them, the fastest first."""
    begun = time.perf_counter()
    with fsdp.workers(nprocs=args.ranks) as ranks:
        links = ranks(links_here, args.device).get()[0]
        name = ranks(device_name, args.device).get()[0]
        hardware = args.hardware or next((one for one in fsdp.Hardware.names() if one in name), "H100")
        for number, model in enumerate(args.models):
            config = replace(MODELS[model], batch=2) if model == "tiny" else MODELS[model]
            with torch.device("meta"):
                shapes = config.build()
            tokens = torch.empty(config.batch, config.seq + 1, dtype=torch.int64, device="meta")
            choices: dict[Case, int] = {}
            takes = 0  # what the first choice takes
            frugal = Case("zero3", True, args.compiled, remat="recomputed")
            least = predictions(config, [frugal], args.ranks, hardware, links)[0].peak if args.between else 0
            for budget in (None, *(int(one * 2**30) for one in args.budget), *args.between):
                if isinstance(budget, float):
                    budget = int(least + budget * (takes - least))
                if budget is not None and takes <= budget:
                    continue
                try:
                    found = fsdp.tune(
                        shapes, config.loss, tokens, mesh={"data": args.ranks}, hardware=hardware, links=links,
                        budget=budget, optimizer=fsdp.adamw(lr=LR), units=config.units(), compiled=args.compiled,
                    )  # fmt: skip
                except fsdp.SpecError as error:
                    print(f"{model}: {error}", flush=True)
                    continue
                print(f"{model}, {args.ranks} × {name}\n{found}\n", flush=True)
                takes = takes or found.best.peak
                choices[chosen(found, args.compiled)] = found.budget
            rows: list[tuple[Case, float, float | None]] = []
            until = args.limit * (number + 1) / len(args.models)
            for case in [*choices, *grid(args.compiled)[: args.cases or None], *choices]:
                if time.perf_counter() - begun > until and case not in choices:
                    print(f"{case}: left out after {until:.0f} s", flush=True)
                    continue
                try:
                    every = ranks(measured, config, case, args.steps, args.device).get()
                except Exception as error:
                    print(f"{case}: {type(error).__name__}: {str(error)[:160]}", flush=True)
                    continue
                peaks = [one["peak"] for one in every if "peak" in one]
                rows.append((case, max(one["ms"] for one in every), max(peaks) if peaks else None))
            print(f"{beside_choices(rows, choices)}\n{time.perf_counter() - begun:.0f} s\n", flush=True)


def beside_choices(rows: list[tuple[Case, float, float | None]], choices: dict[Case, int]) -> str:
    """The table of `--tune`. Of a setting that was measured twice the faster time counts."""
    times: dict[Case, float] = {}
    peaks: dict[Case, float | None] = {}
    for case, ms, peak in rows:
        times[case], peaks[case] = min(ms, times.get(case, ms)), peak
    lines = ["| setting | ms | peak MiB |", "|---|---:|---:|"]
    for case in sorted(times, key=lambda case: times[case]):
        peak = peaks[case]
        lines.append(f"| {case} | {times[case]:.2f} | {'-' if peak is None else f'{peak / MIB:,.0f}'} |")
    for choice, budget in choices.items():
        fits = [case for case in times if (peaks[case] or 0) <= budget and (case == choice or case not in choices)]
        if choice not in fits:
            lines.append(f"\n{budget / 2**30:.1f} GiB a rank: the choice was not measured, or is over the budget")
            continue
        best = min(fits, key=lambda case: times[case])
        rank = sum(times[case] < times[choice] for case in fits) + 1
        much = sum(1.03 * times[case] < times[choice] for case in fits)
        lines.append(
            f"\n{budget / 2**30:.1f} GiB a rank: choice / best {times[choice] / times[best]:.3f}, rank {rank} of "
            f"{len(fits)} that fit, {much} faster by more than 3 %; best: {best}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    cuda = torch.cuda.device_count()
    add("--models", nargs="*", default=["0.16b", "1.2b"], choices=tuple(MODELS))
    add("--ranks", type=int, default=max(1, cuda))
    add("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    add("--hardware", default=None, help="default: by the GPU's name, or H100")
    add("--steps", type=int, default=10)
    add("--limit", type=float, default=330, help="seconds after which no further case begins")
    add("--cases", type=int, help="how many of the cases; default: all")
    add("--tune", action="store_true", help="a grid of 40 settings beside tune's choice")
    add("--budget", type=float, nargs="*", default=[], help="GiB a rank, of --tune, beside tune's own")
    add("--between", type=float, nargs="*", default=[], help="such budgets, between the least peak and the choice's")
    add("--compiled", action="store_true", help="of --tune: units are compiled")
    args = parser.parse_args()
    if args.tune:
        compare_with_tune(args)
        return
    begun = time.perf_counter()
    rows: list[tuple[str, Case, Any, Any, dict[str, float]]] = []
    with fsdp.workers(nprocs=args.ranks) as ranks:
        links = ranks(links_here, args.device).get()[0]
        name = ranks(device_name, args.device).get()[0]
        hardware = args.hardware or next((one for one in fsdp.Hardware.names() if one in name), "H100")
        print(f"{args.ranks} × {name}, predicted as {hardware}; links: {links}", flush=True)
        for model in args.models:
            config = MODELS[model]
            if model == "tiny":
                config = replace(config, batch=2)
            cases = CASES[: args.cases or None]
            said = predictions(config, cases, args.ranks, hardware, None)
            with_links = predictions(config, cases, args.ranks, hardware, links)
            for case, by_table, by_links in zip(cases, said, with_links, strict=True):
                if time.perf_counter() - begun > args.limit:
                    print(f"{model}, {case}: left out after {args.limit:.0f} s", flush=True)
                    continue
                try:
                    every = ranks(measured, config, case, args.steps, args.device).get()
                except Exception as error:
                    print(f"{model}, {case}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                    continue
                worst = {key: max(one[key] for one in every) for key in every[0]}
                rows.append((model, case, by_table, by_links, worst))
                print(line(*rows[-1]), flush=True)
    print()
    print(report(rows, name, args.ranks))


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "a CPU"


def off(predicted: float, taken: float) -> str:
    return f"{100 * (predicted / taken - 1):+.1f} %"


def line(model: str, case: Case, by_table: Any, by_links: Any, found: dict[str, float]) -> str:
    ms, one, two = found["ms"], 1e3 * by_table.seconds, 1e3 * by_links.seconds
    cells = [
        model,
        str(case),
        f"{ms:.1f}",
        f"{found['host']:.1f}",
        f"{one:.1f}",
        off(one, ms),
        f"{two:.1f}",
        off(two, ms),
    ]
    peak, said = found.get("peak"), by_table.peak / MIB
    cells += [f"{peak / MIB:,.0f}", f"{said:,.0f}", off(said, peak / MIB)] if peak else ["-", f"{said:,.0f}", "-"]
    return f"| {' | '.join(cells)} |"


def report(rows: list[Any], name: str, ranks: int) -> str:
    head = "| model | setting | ms | host ms | by table | off by | by links | off by | peak MiB | predicted | off by |"
    lines = [f"{ranks} × {name}", "", head, "|---|---|" + "---:|" * 9, *(line(*row) for row in rows)]
    for what, index in (("table", 2), ("links", 3)):
        sizes = [abs(1e3 * row[index].seconds / row[4]["ms"] - 1) for row in rows]
        if sizes:
            within = sum(one <= 0.10 for one in sizes)
            lines.append(f"\ntime by {what}: median {100 * median(sizes):.1f} %, {within} of {len(sizes)} within 10 %")
    peaks = [abs(row[2].peak / row[4]["peak"] - 1) for row in rows if "peak" in row[4]]
    if peaks:
        within = sum(one <= 0.03 for one in peaks)
        lines.append(f"\npeak: median {100 * median(peaks):.1f} %, {within} of {len(peaks)} within 3 %")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
