"""Tokens a second of each GPU, on more and more of them: does a step take longer where more ranks share it?

    python examples/benchmark_scaling.py                                     # 1, 2, 4, ... GPUs of this machine
    python examples/benchmark_scaling.py --ranks 1,2 --model tiny            # CPU: a tiny GPT, under a minute
    python examples/benchmark_scaling.py --chart scaling.png -- --rounds 5   # after --: options of benchmark.py

For each number of ranks `benchmark.py` runs once, with the rows of `--only` beside each other. Every rank has the same
tokens in a step, however many ranks there are, so that a line that stays level is perfect. `tok/s/GPU` is tokens a rank
by the median step of the slowest rank; "FSDP2 compiled / this" is the ratio within the run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _benchmark_report import BOUND, HERE, INK, PEERS, Table
from _benchmark_rows import CONTESTANTS

Rates = Mapping[str, Mapping[int, float]]  # row -> ranks -> tokens a second of each


def rates(tables: Mapping[int, Table]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for ranks, table in tables.items():
        config = table.about["config"]
        for row in table.rows:
            found.setdefault(row.name, {})[ranks] = config["batch"] * config["seq"] / (1e-3 * row.step_ms)
    return found


def text(found: Rates, baseline: str) -> str:
    """As Markdown: rows by numbers of ranks."""
    ranks = sorted({count for of in found.values() for count in of})
    lines = [["tok/s/GPU", *(str(count) for count in ranks)]]
    for name, of in found.items():
        lines.append([name, *(f"{of[count]:,.0f}" if count in of else "-" for count in ranks)])
    base = found.get(baseline, {})
    for name, of in found.items():
        if name != baseline and base:
            ratios = [f"{of[count] / base[count]:.3f}" if count in of and count in base else "-" for count in ranks]
            lines.append([f"{baseline} / {name}", *ratios])
    head, *rest = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|---|" + "---:|" * len(ranks), *rest])


def read(page: str) -> dict[str, dict[int, float]]:
    """The rates in the first table of `text` on a page."""
    lines = [line.strip("| ").split(" | ") for line in page[page.index("| tok/s/GPU") :].split("\n\n")[0].splitlines()]
    ranks = [int(count) for count in lines[0][1:]]
    rows = {name: cells for name, *cells in lines[2:] if name in CONTESTANTS}
    return {
        name: {count: float(cell.replace(",", "")) for count, cell in zip(ranks, cells, strict=True) if cell != "-"}
        for name, cells in rows.items()
    }


def chart(found: Rates, title: str, file: Path, each: str) -> None:
    """A line for each row: tokens a second of each GPU, over the number of GPUs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes: Any = figure.add_subplot()
    colours = {"here": HERE, "peer": PEERS, "bound": BOUND}
    ranks = sorted({count for of in found.values() for count in of})
    for name, of in found.items():
        whose = CONTESTANTS[name].whose
        at = sorted(of)
        axes.plot(
            range(len(at)), [of[count] for count in at], color=colours[whose], linewidth=2.2,
            linestyle="--" if whose == "bound" else "-", marker="o", label=name,
        )  # fmt: skip
        last = (len(at) - 1, of[at[-1]])
        said = f"{name}\n{last[1]:,.0f}"
        label = axes.annotate(said, last, (10, 0), textcoords="offset points", va="center", fontsize=9)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
    most = max(rate for of in found.values() for rate in of.values())
    axes.set_xticks(range(len(ranks)), [str(count) for count in ranks])
    axes.set(
        xlabel=f"{each}s",
        ylabel=f"tokens a second of each {each}",
        ylim=(0, 1.15 * most),
        xlim=(-0.2, len(ranks) - 1 + 0.5 * max(1, len(ranks) - 1)),
    )
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    figure.savefig(file)


def run(ranks: int, args: argparse.Namespace) -> Table:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.json"
        script = str(Path(__file__).with_name("benchmark.py"))
        options = ["--model", args.model, "--only", args.only, "--ranks", str(ranks), "--json", str(file), *args.rest]
        done = subprocess.run([sys.executable, script, *options], text=True)
        if done.returncode:
            sys.exit(f"{ranks} ranks: benchmark.py ended with {done.returncode}; its output is above")
        return Table.read(file)


def counts(given: str | None) -> Sequence[int]:
    if given:
        return [int(part) for part in given.split(",")]
    return [2**i for i in range(8) if 2**i <= max(2, torch.cuda.device_count())]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--model", default="1.2b" if cuda else "tiny")
    parser.add_argument("--ranks", help="numbers of ranks, as 1,2,4; default: powers of two up to all GPUs")
    parser.add_argument("--only", default="copy engine graph compiled,FSDP2 compiled" if cuda else "unit by unit,FSDP2")
    parser.add_argument("--baseline", default="FSDP2 compiled" if cuda else "FSDP2", help="the row to compare with")
    parser.add_argument("--chart", type=Path, metavar="PNG")
    parser.add_argument("rest", nargs="*", help="after --: options of benchmark.py")
    args = parser.parse_args()
    tables = {ranks: run(ranks, args) for ranks in counts(args.ranks)}
    found = rates(tables)
    print("\n" + text(found, args.baseline))
    if args.chart:
        title = f"{args.model}, {next(iter(tables.values())).about['machine']}"
        chart(found, title, args.chart, "GPU" if torch.cuda.is_available() else "rank")


if __name__ == "__main__":
    main()
