"""The pictures of the pages, drawn by the library from plans: `python docs/_pictures.py FOLDER` writes them as PNG.

`make docs` draws them as SVG into the site. A page says ![...](pictures/NAME.svg).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import benchmark_scaling

import functional_fsdp as fsdp
from functional_fsdp._plan.cursor import Cursor
from functional_fsdp.look.draw import EXPOSED, FAINT, GREY, INK, Page, colours_of

PICTURES: dict[str, Callable[[Path], object]] = {}
FOUR, TWO = {"data": 4}, {"replica": 2, "shard": 2}
STRATEGIES = {
    'ddp("data")': fsdp.Spec(FOUR, fsdp.ddp("data")),
    'zero1("data")': fsdp.Spec(FOUR, fsdp.zero1("data")),
    'zero2("data")': fsdp.Spec(FOUR, fsdp.zero2("data")),
    'zero3("data"), the default': fsdp.Spec(FOUR, fsdp.zero3("data")),
    'hsdp("replica", "shard")': fsdp.Spec(TWO, fsdp.hsdp("replica", "shard")),
    'hfsdp("replica", "shard")': fsdp.Spec(TWO, fsdp.hfsdp("replica", "shard")),
}
BFLOAT16 = fsdp.Precision(compute=torch.bfloat16)
SPEEDS: dict[str, Any] = {
    "gather": 60e9,
    "reduce": 60e9,
    "compute": {"embed": 3e-5, "norm": 3e-5, "head": 5e-4, "blocks.*": 6e-4},
}


def gpt(width: int, depth: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """The shapes of a GPT."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocabulary, width)}
    for i in range(depth):
        shapes |= {
            f"blocks.{i}.norm.weight": (width,),
            f"blocks.{i}.qkv.weight": (3 * width, width),
            f"blocks.{i}.out.weight": (width, width),
            f"blocks.{i}.up.weight": (4 * width, width),
            f"blocks.{i}.down.weight": (width, 4 * width),
        }
    shapes |= {"norm.weight": (width,), "head.weight": (vocabulary, width)}
    return {path: torch.empty(shape, device="meta") for path, shape in shapes.items()}


SMALL, LARGE = gpt(48, 3, 300), gpt(1024, 6, 16384)


def picture(draw: Callable[[Path], object]) -> Callable[[Path], object]:
    PICTURES[draw.__name__] = draw
    return draw


def plan(**schedule: object) -> fsdp.Plan:
    layout = fsdp.make_layout(LARGE, fsdp.Spec({"data": 8}, precision=BFLOAT16))
    return fsdp.make_plan(layout, fsdp.Schedule(**schedule))  # type: ignore[arg-type]


@picture
def strategies(path: Path) -> None:
    fsdp.draw(STRATEGIES, path)


@picture
def memory(path: Path) -> None:
    axes = {name: (spec.axes, spec.placements[0][1]) for name, spec in STRATEGIES.items()}
    made = {n: fsdp.make_layout(LARGE, fsdp.Spec(mesh, rule, precision=BFLOAT16)) for n, (mesh, rule) in axes.items()}
    fsdp.draw(made, path)


@picture
def layout(path: Path) -> None:
    fsdp.draw(fsdp.make_layout(SMALL, fsdp.Spec(FOUR)), path)


@picture
def arena(path: Path) -> None:
    fsdp.draw(plan(), path)


@picture
def lanes(path: Path) -> None:
    fsdp.timeline(plan(), path, **SPEEDS)


@picture
def lanes_without_prefetch(path: Path) -> None:
    fsdp.timeline(plan(prefetch=0), path, **SPEEDS)


@picture
def lanes_kept(path: Path) -> None:
    fsdp.timeline(plan(keep="all"), path, **SPEEDS)


@picture
def cursor(path: Path) -> None:
    fsdp.draw(Cursor(plan(), at=5), path)


@picture
def collectives(path: Path) -> None:
    state = fsdp.abstract_state(SMALL, fsdp.Spec(TWO, fsdp.hsdp("replica", "shard")), fsdp.sgd(lr=0.1))

    def train_step(state: fsdp.State, x: torch.Tensor) -> fsdp.State:
        state, params = fsdp.unshard(state)
        grads = torch.func.grad(lambda p: sum((w * x).square().sum() for w in p.values()))(params)
        return fsdp.step(fsdp.reduce(state, grads))

    fsdp.draw(fsdp.lower(train_step, state, torch.ones(())), path)


@picture
def state(path: Path) -> None:
    """The fields of a State and their bytes on a rank, a colour a bucket."""
    held = fsdp.abstract_state(SMALL, fsdp.Spec(FOUR, fsdp.zero2("data"), precision=BFLOAT16), fsdp.adamw(lr=1e-3))
    colours = colours_of(held.units)
    grads = {name: bucket.nbytes("grads") for name, bucket in held.layout.trainable.items()}
    rows = {
        "main": [(b, one.local.nbytes) for b, one in held.main.items()],
        "weights": [(b, one.local.nbytes) for b, one in held.weights.items()],
        "grads": [*grads.items()],
        "opt": [(b, 2 * one.local.nbytes) for b, one in held.main.items()],
    }
    most = max(sum(size for _, size in row) for row in rows.values()) / 1024
    page = Page()
    page.text("The state of one rank of four, by zero2 with AdamW", 15, INK, 0.36, weight="bold")
    page.text("KiB of each field; main float32, weights bfloat16. There are gradients from reduce to step only")
    panel = page.panel(2.0, (most * 1.02, len(rows)), below=0.55)
    for y, row in enumerate(reversed(rows.values())):
        at = 0.0
        for name, size in row:
            panel.box(at, y + 0.12, size / 1024, 0.76, name, facecolor=colours[name])
            at += size / 1024
    panel.rows({name: len(rows) - i - 0.5 for i, name in enumerate(rows)})
    panel.ticked = "xy"
    page.text("beside these: buffers, count (steps taken), rng (the seed), extras; and static: spec, layout, optimizer")
    page.save(path)


@picture
def units(path: Path) -> None:
    """Paths of leaves, and the units in which they go."""
    made = fsdp.make_layout(SMALL, fsdp.Spec(FOUR))
    colours = colours_of([unit.name for unit in made.units])
    page = Page(left=0.3)
    page.text("Leaves by path, and the units that are found from the paths", 15, INK, 0.36, weight="bold")
    page.text("a unit is gathered, released and reduced as one")
    panel = page.panel(2.2, (len(made.units), 6.2), below=0.1)
    for i, unit in enumerate(made.units):
        panel.box(i + 0.02, 5.05, 0.96, 1.0, unit.name, facecolor=colours[unit.name])
        for j, leaf in enumerate(unit.paths):
            panel.box(i + 0.02, 4.05 - j, 0.96, 0.9, leaf, facecolor=colours[unit.name], alpha=0.45)
    page.save(path)


@picture
def axes(path: Path) -> None:
    """A mesh of two axes, and who communicates along each."""
    page = Page(left=0.3)
    page.text("A mesh of 8 ranks: replica 2 × shard 4", 15, INK, 0.36, weight="bold")
    page.text("an axis has a name and a number of ranks; a collective goes along one axis")
    panel = page.panel(2.6, (13.0, 5.0), below=0.1)
    colours = colours_of([f"shard {i}" for i in range(4)])
    for r in range(2):
        for s in range(4):
            box = (1.9 + 2.1 * s, 3.0 - 1.7 * r, 1.7, 1.0)
            panel.box(*box, f"rank {4 * r + s}: shard {s}", facecolor=colours[f"shard {s}"])
        panel.axes.text(0, 3.5 - 1.7 * r, f"replica {r}", fontsize=10, color=INK, va="center")
        panel.box(1.75, 2.85 - 1.7 * r, 8.3, 1.3, facecolor="none", edgecolor=GREY)
    arrow = {"arrowstyle": "<->", "color": EXPOSED, "lw": 1.6}
    panel.axes.annotate("", (1.9, 4.45), (9.9, 4.45), arrowprops=arrow)
    panel.axes.text(5.9, 4.7, "along shard: all-gather, reduce-scatter", fontsize=10, color=EXPOSED, ha="center")
    panel.axes.annotate("", (10.4, 1.3), (10.4, 4.0), arrowprops=arrow)
    panel.axes.text(10.6, 2.6, "along replica:\nall-reduce (hsdp)", fontsize=10, color=EXPOSED, va="center")
    panel.axes.text(0, 0.3, "each rank of a column has the same shard; a row has the whole", fontsize=9, color=GREY)
    page.save(path)


@picture
def transaction(path: Path) -> None:
    """What is valid when, from one state between steps to the next."""
    page = Page(left=0.3)
    page.text("A step is a transaction", 15, INK, 0.36, weight="bold")
    page.text("until the ranks have voted in step, the state that the step started from stays valid")
    panel = page.panel(3.0, (26, 6.4), below=0.1)
    verbs = ["unshard", "release", "reduce", "vote", "update"]
    panel.box(0, 3.4, 3.2, 1.6, "state, step 7", facecolor="#a9c7e8")
    panel.box(22.6, 3.4, 3.2, 1.6, "state, step 8", facecolor="#a9d3ab")
    for i, verb in enumerate(verbs):
        colour = {"vote": "#f2d58c", "update": "#efb6ba"}.get(verb, FAINT)
        panel.box(4.4 + 3.6 * i, 3.55, 2.6, 1.3, verb, facecolor=colour)
    arrow = {"arrowstyle": "->", "color": INK, "lw": 1.2}
    ends = [3.2, *(7.0 + 3.6 * i for i in range(5))]
    starts = [*(4.4 + 3.6 * i for i in range(5)), 22.6]
    for begin, end in zip(ends, starts, strict=True):
        panel.axes.annotate("", (end, 4.2), (begin, 4.2), arrowprops=arrow)
    back = {"arrowstyle": "->", "color": EXPOSED, "lw": 1.6, "connectionstyle": "arc3,rad=-0.22"}
    panel.axes.annotate("", (1.6, 3.3), (16.5, 3.5), arrowprops=back)
    said = "an exception, an interrupt, a rank that fails: back to the state of step 7, bit for bit"
    panel.axes.text(9.0, 0.35, said, fontsize=10, color=EXPOSED, ha="center")
    panel.axes.plot([18.3, 18.3], [2.6, 5.8], color=INK, linewidth=1.0, linestyle=":")
    panel.axes.text(18.1, 5.75, "the state of step 7 is valid", fontsize=9.5, color=GREY, ha="right")
    panel.axes.text(18.5, 5.75, "consumed: StaleStateError", fontsize=9.5, color=GREY)
    page.save(path)


@picture
def scaling(path: Path) -> None:
    """Tokens a second of each GPU over the number of GPUs: the table of benchmarks.md as lines."""
    found = benchmark_scaling.read(Path(__file__).with_name("benchmarks.md").read_text())
    benchmark_scaling.chart(found, "GPT 1.2 B, 2×2048 tokens a GPU, H200", path, "GPU")


def drawn() -> dict[str, bytes]:
    """Each picture as SVG, by the name of its file."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, draw in PICTURES.items():
            path = Path(folder) / f"{name}.svg"
            draw(path)
            found[path.name] = path.read_bytes()
    return found


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        draw(Path(sys.argv[1]) / f"{name}.png")
