"""What benchmark.py says: rows as a table on the terminal, as a file, and as a chart.

Row      one contestant's figures, with its ratios
Table    the rows of one set of processes, and what they were measured on; `print` gives Markdown
merged   the tables of several sets of processes as one
chart    step times as horizontal bars
"""

from __future__ import annotations

import json
import os
import platform
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _benchmark_models import Config
from _benchmark_rows import BOUNDS, CONTESTANTS, PEER

import functional_fsdp as fsdp


@dataclass(frozen=True)
class Row:
    name: str
    step_ms: float
    fastest_ms: float
    slowest_ms: float
    host_ms: float | None
    peak_bytes: int
    reserved_bytes: int | None
    device_bytes: int | None
    loss: float
    ratio: float | None = None  # FSDP2's time / this row's
    best_ratio: float | None = None  # the fastest peer's time / this row's
    best_peer: str | None = None  # which that is, if it is not FSDP2
    to_bound: float | None = None  # this row's time / that of the bound
    bound: str | None = None  # which row that is
    by_hand: float | None = None  # this row's time / that of the loop by hand
    tokens_s: float | None = None  # of each rank; this and the next four with --efficiency
    tflops: float | None = None  # of each rank
    share: float | None = None  # of the GPU's peak
    joules: float | None = None  # a token, of the GPU alone
    sixth_s: float | None = None  # from the building of the model to the end of the sixth step
    between: str = ""  # what moved data between GPUs in a step, if that was asked for
    processes: int = 1  # which set of processes it ran in


def number(value: float | None, digits: int, scale: float = 1) -> str:
    return "-" if value is None else f"{value / scale:.{digits}f}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "step ms": lambda row: number(row.step_ms, 1),
    "spread ms": lambda row: f"{row.fastest_ms:.1f} – {row.slowest_ms:.1f}",
    "host ms": lambda row: number(row.host_ms, 1),
    "peak MiB": lambda row: number(row.peak_bytes, 0, 2**20),
    "reserved MiB": lambda row: number(row.reserved_bytes, 0, 2**20),
    "device MiB": lambda row: number(row.device_bytes, 0, 2**20),
    "tokens/s": lambda row: number(row.tokens_s, 0),
    "TFLOP/s": lambda row: number(row.tflops, 1),
    "% of peak": lambda row: number(row.share, 1, 0.01),
    "J / token": lambda row: number(row.joules, 4),
    "sixth step s": lambda row: number(row.sixth_s, 1),
    "loss": lambda row: number(row.loss, 4),
    "FSDP2 / this": lambda row: number(row.ratio, 3),
    "best / this": lambda row: number(row.best_ratio, 3),
    "this / bound": lambda row: number(row.to_bound, 3),
    "this / hand": lambda row: number(row.by_hand, 3),
}


@dataclass(frozen=True)
class Table:
    """Rows, and what they were measured on."""

    about: dict[str, Any]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, rows: list[Row], args: Namespace, config: Config, dtype: torch.dtype) -> Table:
        """Made on a rank."""
        about = {
            "machine": machine(), "torch": torch.__version__, "functional_fsdp": fsdp.__version__,
            "ranks": dist.get_world_size(), "parameters": config.parameters(),
            "dtype": str(dtype).removeprefix("torch."), "config": asdict(config),
            "arguments": {name: value for name, value in vars(args).items() if name not in ("json", "chart", "notes")},
        }  # fmt: skip
        return cls(about, rows, compared_with(rows))

    def title(self) -> str:
        about, args, config = self.about, self.about["arguments"], self.about["config"]
        return (
            f"{args['model']}: {about['parameters'] / 1e6:.1f} M parameters, {config['batch']}×{config['seq']} tokens "
            f"a rank, {about['ranks']} ranks, {about['dtype']} compute and wire, {args['placement']}"
        )

    def __str__(self) -> str:
        args, about = self.about["arguments"], self.about
        head = (
            f"\n{self.title()}\n"
            f"{args['rounds']} rounds of {args['steps']} steps, after {args['warmup']} steps to warm up\n"
            f"{about['machine']}; torch {about['torch']}, functional-fsdp {about['functional_fsdp']}\n\n"
        )
        columns = {"": [row.name for row in self.rows]}
        columns |= {name: [show(row) for row in self.rows] for name, show in COLUMNS.items()}
        columns = {name: cells for name, cells in columns.items() if {*cells} != {"-"}}
        widths = [max(len(cell) for cell in (name, *cells)) for name, cells in columns.items()]
        lines = [[*columns], *(list(cells) for cells in zip(*columns.values(), strict=True))]
        text = ["| " + " | ".join(map(aligned, line, widths, range(len(line)))) + " |" for line in lines]
        rule = "|" + "|".join("-" * (width + 2 - (i > 0)) + ":" * (i > 0) for i, width in enumerate(widths)) + "|"
        between = [f"between GPUs, {row.name}: {row.between}" for row in self.rows if row.between]
        notes = "".join(f"\n{note}" for note in [*self.notes, *between])
        return head + "\n".join([text[0], rule, *text[1:]]) + ("\n" + notes if notes else "")

    def write(self, file: Path) -> None:
        whole = {**self.about, "notes": self.notes, "rows": [asdict(row) for row in self.rows]}
        file.write_text(json.dumps(whole, indent=2, default=str) + "\n")

    @classmethod
    def read(cls, file: Path) -> Table:
        about = json.loads(file.read_text())
        notes, rows = about.pop("notes"), about.pop("rows")
        return cls(about, [Row(**row) for row in rows], notes)


def aligned(cell: str, width: int, column: int) -> str:
    return f"{cell:>{width}}" if column else f"{cell:{width}}"


def compared_with(rows: Sequence[Row]) -> list[str]:
    said = {"best peer": {row.best_peer for row in rows}, "bound": {row.bound for row in rows}}
    return [f"{what}: {name}" for what, found in said.items() for name in sorted(filter(None, found))]


def merged(tables: Sequence[Table], order: Sequence[str]) -> Table:
    """One table of all sets of processes. What ran in several has the row of the first, its other times in a note."""
    rows: dict[str, Row] = {}
    again: dict[str, list[float]] = {}
    notes = []
    for processes, table in enumerate(tables, 1):
        for row in table.rows:
            if row.name in rows:
                again.setdefault(row.name, []).append(row.step_ms)
            else:
                rows[row.name] = replace(row, processes=processes)
        if best := table.rows[0].best_peer:
            fresh = [row.name for row in rows.values() if row.processes == processes]
            notes.append(f"best peer beside {', '.join(fresh)}: {best}")
    if bound := next((row.bound for row in rows.values() if row.bound), None):
        notes.append(f"bound: {bound}")
    for name, times in again.items():
        notes.append(f"{name} in the sets of processes after: {', '.join(f'{ms:.1f}' for ms in times)} ms")
    ranked = sorted(rows.values(), key=lambda row: order.index(row.name) if row.name in order else len(order))
    return Table(tables[0].about, ranked, notes)


def agree(rows: Sequence[Row]) -> None:
    """To 3 digits; with those that multiply in float8 to 2."""
    losses = {row.name: row.loss for row in rows if row.name not in BOUNDS}
    exact = {name: loss for name, loss in losses.items() if "float8" not in name}
    for some, digits in ((exact, 3), (losses, 2)):
        if some:
            low, high = min(some.values()), max(some.values())
            assert high - low <= 10**-digits * abs(high), f"the losses do not agree to {digits} digits: {some}"


def machine() -> str:
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return f"{torch.cuda.device_count()}× {torch.cuda.get_device_name()}, NCCL {nccl}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores of {name}, gloo, 1 thread a rank"


# ---------------------------------------------------------------- the chart

HERE, PEERS, BOUND, INK = "#08519c", "#bdbdbd", "#d94801", "#252525"


def chart(table: Table, file: Path) -> None:
    """Step times as bars, the fastest on top, with the fastest and slowest round; the bound is a dashed line."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bound = next((row for name in BOUNDS for row in table.rows if row.name == name), None)
    rows = sorted((row for row in table.rows if row is not bound), key=lambda row: row.step_ms, reverse=True)
    colors = {"here": HERE, "peer": PEERS, "bound": "white"}
    kinds = [CONTESTANTS[row.name].whose for row in rows]
    times = [row.step_ms for row in rows]
    whiskers = [
        [row.step_ms - row.fastest_ms for row in rows],
        [row.slowest_ms - row.step_ms for row in rows],
    ]
    most = max([*(row.slowest_ms for row in rows), bound.step_ms if bound else 0])

    figure = Figure(figsize=(9, 1.7 + 0.36 * len(rows)), dpi=150, layout="constrained")
    axes: Any = figure.add_subplot()
    axes.barh(
        range(len(rows)), times, height=0.68, color=[colors[kind] for kind in kinds],
        edgecolor=[BOUND if kind == "bound" else colors[kind] for kind in kinds],
        xerr=whiskers, error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 3},
    )  # fmt: skip
    for place, row in enumerate(rows):
        ratio = f"   {row.ratio:.2f}× {PEER}" if row.ratio is not None and row.name != PEER else ""
        axes.text(row.slowest_ms + 0.012 * most, place, f"{row.step_ms:.1f}{ratio}", va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=10)
    axes.set(xlim=(0, 1.24 * most), ylim=(-0.6, len(rows) - 0.4))
    label = "ms a step: median, fastest and slowest round"
    if any(row.ratio is not None for row in rows):
        label += f"; how many times {PEER}'s speed"
    if len({row.processes for row in table.rows}) > 1:
        label += ", beside it: compare these"
    axes.set_xlabel(label, fontsize=9)

    legend: list[Any] = [
        Patch(color=colors[kind], label=label)
        for kind, label in (("here", "this project"), ("peer", "peers"))
        if kind in kinds
    ]
    if "bound" in kinds:
        legend.append(Patch(facecolor="white", edgecolor=BOUND, label="nothing sent, eager"))
    if bound:
        axes.axvline(bound.step_ms, color=BOUND, linestyle="--", linewidth=1.5, zorder=3)
        label = f"bound: {bound.name}, {bound.step_ms:.1f}"
        legend.append(Line2D([], [], color=BOUND, linestyle="--", label=label))
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False, fontsize=9)
    about = table.about
    figure.suptitle(table.title(), x=0.01, ha="left", fontsize=11, color=INK)
    axes.set_title(f"{about['machine']}; torch {about['torch']}", loc="left", fontsize=9, color=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    figure.savefig(file)
