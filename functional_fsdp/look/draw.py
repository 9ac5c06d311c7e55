"""Pictures of what is asked for and of what follows: a spec, a layout, a plan, a cursor, the collectives of a step.

| of                    | shows                                                                                        |
|-----------------------|----------------------------------------------------------------------------------------------|
| `Spec`, `{title: Spec}` | for each rank, which part of weights, gradients and main weights it keeps                  |
| `{title: Layout}`     | bytes on a rank: main weights, gradients, compute copies, arena                              |
| `Layout`              | each bucket to scale: its leaves, its padding, and where it is cut into slices               |
| `Plan`                | use by use: which units are gathered, where they lie in the arena                            |
| `Cursor`              | the same, and which use comes next                                                           |
| `Lowered`             | its collectives in order of issue: kind, axis, bytes                                         |

All are pure: no ranks, no device, no tensors. Pictures over time are made by `timeline`.

What pictures are made of: pages measured in inches, boxes with labels that fit, a colour for each unit, a key.

    page = Page()                           10 inches wide; as high as what is put on it
    axes = page.panel(2.0, (10, 3))         2 inches high, from (0, 0) to (10, 3) in its own units
    axes.box(0, 1, 4, 1, "blocks.0")        the label is written across, or upright, or not at all: `axes.unnamed`
    page.save("picture.svg")                the ending says the format; without one it is a PNG

matplotlib is imported where a page is made, and nowhere else.
"""

from __future__ import annotations

import colorsys
import itertools
from collections.abc import Callable, Mapping, Sequence
from math import prod
from os import PathLike, fspath
from textwrap import wrap
from typing import Any

import torch

from .._common.errors import SpecError, as_path
from .._common.record import Collective
from .._common.tree import bytes_text
from .._plan.cursor import Cursor
from .._plan.layout import ALIGN, Bucket, Layout, LeafInfo, plan_layout
from .._plan.plan import Plan, keeps_copy, make_plan
from .._spec.placement import Placement
from .._spec.spec import Spec

Colour = str | tuple[float, float, float]
INK, GREY, FAINT, EXPOSED = "#22262e", "#5b6270", "#e4e6eb", "#c9414b"
LEAST, MOST = 6.0, 9.0  # points, of a label


def colours_of(names: Sequence[str]) -> dict[str, Colour]:
    """One hue a name, in order, neighbours apart in lightness too."""
    found: dict[str, Colour] = {}
    for i, name in enumerate(names):
        hue = 0.58 + 0.72 * i / max(len(names) - 1, 1)
        found[name] = colorsys.hls_to_rgb(hue % 1.0, 0.63 if i % 2 else 0.74, 0.55)
    return found


def binary_scale(nbytes: int) -> tuple[int, str]:
    """How many bytes the unit has in which so many are told, and its name.

    >>> binary_scale(5 << 20)
    (1048576, 'MiB')
    """
    sizes = {1 << 30: "GiB", 1 << 20: "MiB", 1 << 10: "KiB", 1: "B"}
    scale = next((size for size in sizes if nbytes >= 2 * size), 1)
    return scale, sizes[scale]


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'drawing a plan needs matplotlib, which is not installed: pip install "functional-fsdp[plots]".'
        ) from error
    return Figure(figsize=(width, height), dpi=180, facecolor="white")


class Panel:
    """A part of a page with coordinates of its own. `unnamed`: labels that did not fit into their boxes."""

    def __init__(self, axes: Any, rectangle: Any, inches: tuple[float, float], extent: tuple[float, float]) -> None:
        self.axes, self.rectangle = axes, rectangle
        self.inches = inches[0] / extent[0], inches[1] / extent[1]  # of a unit of x, of y
        self.unnamed: list[str] = []
        self.ticked = ""  # "x", "y" or both: where numbers are written

    def box(self, x: float, y: float, w: float, h: float, label: str = "", **style: Any) -> None:
        """A rectangle, and the whole label in its middle: across if that can be read, else upright, else not."""
        width, height = w * self.inches[0] * 72, h * self.inches[1] * 72  # in points
        line = min(0.6, width / 8)
        self.axes.add_patch(self.rectangle((x, y), w, h, **{"linewidth": line, "edgecolor": "white", **style}))
        if not label:
            return
        long = 0.62 * len(label) + 0.6  # of a line, in sizes of its font
        across, upright = min(MOST, height * 0.7, width / long), min(MOST, width * 0.7, height / long)
        size, turned = (across, 0) if across >= min(LEAST + 0.5, upright) else (upright, 90)
        if size < LEAST:
            self.unnamed.append(label)
            return
        middle = {"ha": "center", "va": "center", "rotation_mode": "anchor"}
        self.axes.text(x + w / 2, y + h / 2, label, fontsize=size, color=INK, rotation=turned, **middle)

    def rows(self, names: Mapping[str, float]) -> None:
        """Names of rows, each at its height, to the left."""
        self.axes.set_yticks(list(names.values()), list(names), fontsize=10)


class Page:
    """Panels and lines of text, from above to below. Heights are inches."""

    def __init__(self, width: float = 10.0, left: float = 0.95, right: float = 0.25) -> None:
        _figure(width, 1.0)  # whoever lacks matplotlib hears of it before anything is worked out
        self.width, self.left, self.across = width, left, width - left - right
        self.at = 0.3
        self.parts: list[tuple[float, float, tuple[float, float], Panel]] = []
        self.texts: list[tuple[float, float, str, dict[str, Any]]] = []
        self.swatches: list[tuple[float, float, str, Any]] = []

    def indent(self, names: Sequence[str]) -> None:
        """Leave room for such names to the left of what follows."""
        wider = max(0.0, 0.095 * max(map(len, names), default=0) + 0.2 - self.left)
        self.left, self.across = self.left + wider, self.across - wider

    def text(self, said: str, size: float = 10.5, color: str = GREY, height: float = 0.3, **style: Any) -> None:
        """A text, in as many lines as it takes."""
        parts = wrap(said, int(self.across * 72 / (0.56 * size)))
        said, lines = "\n".join(parts), len(parts)
        style = {"fontsize": size, "color": color, "va": "center", "linespacing": 1.35, **style}
        self.texts.append((self.left, self.at + height * lines / 2, said, style))
        self.at += height * lines

    def panel(self, height: float, extent: tuple[float, float], below: float = 0.15) -> Panel:
        """A panel from (0, 0) to `extent`; `below` is left free for its axis."""
        from matplotlib.patches import Rectangle

        panel = Panel(_Later(), Rectangle, (self.across, height), extent)
        self.parts.append((self.at, height, extent, panel))
        self.at += height + below
        return panel

    def key(self, colours: Mapping[str, Colour]) -> None:
        """What each colour is, in columns."""
        longest = max((len(name) for name in colours), default=0)
        wide = 0.078 * longest + 0.5
        columns = max(1, int(self.across / wide))
        for i, (name, colour) in enumerate(colours.items()):
            self.swatches.append((self.left + i % columns * wide, self.at + 0.12 + 0.22 * (i // columns), name, colour))
        self.at += 0.22 * -(-len(colours) // columns) + 0.1

    def save(self, path: str | PathLike[str]) -> None:
        """Write the picture, in the format that the path's ending names (PNG without one)."""
        path = as_path("draw: path", path)
        height = self.at + 0.15
        figure = _figure(self.width, height)
        for at, high, extent, panel in self.parts:
            place = (self.left / self.width, 1 - (at + high) / height, self.across / self.width, high / height)
            axes = figure.add_axes(place)
            axes.set_xlim(0, extent[0])
            axes.set_ylim(0, extent[1])
            axes.set_axisbelow(True)
            axes.tick_params(length=0, labelcolor=INK)
            axes.set(**{f"{side}ticks": [] for side in "xy" if side not in panel.ticked})
            for side in axes.spines.values():
                side.set_visible(False)
            panel.axes.replay(axes)
        for x, y, said, style in self.texts:
            figure.text(x / self.width, 1 - y / height, said, **style)
        for x, y, name, colour in self.swatches:
            figure.text(x / self.width, 1 - y / height, "■", fontsize=11, color=colour, va="center")
            figure.text((x + 0.2) / self.width, 1 - y / height, name, fontsize=8.5, color=INK, va="center")
        ending = fspath(path).rsplit(".", 1)[-1].lower()
        known = ending if ending in ("svg", "pdf") else "png"
        dateless = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(known)
        figure.savefig(path, format=known, metadata=dateless)


class _Later:
    """Calls on axes that are made when the height of the page is known."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))

    def replay(self, axes: Any) -> None:
        for name, args, kwargs in self.calls:
            getattr(axes, name)(*args, **kwargs)


KINDS = {"weights": "weights, as compute sees them", "grads": "gradients", "main": "main weights, optimizer state"}
COLOURS = dict(zip(KINDS, ("#5b8fc9", "#e09a4f", "#6aa56c"), strict=True))
STORED = {"main weights": COLOURS["main"], "gradients": COLOURS["grads"],
          "a copy of weights for compute": COLOURS["weights"], "the arena, for gathered units": "#b9d0ea"}  # fmt: skip
OF_KINDS = {"all_gather": "#5b8fc9", "reduce_scatter": "#e09a4f", "all_reduce": "#d9737b", "all_to_all": "#8d6ab8",
            "barrier": "#9aa0ab"}  # fmt: skip
RANKS, BUCKETS = 16, 40  # that can be told apart

Path = str | PathLike[str]


def draw(what: Any, path: Path) -> None:
    """Draw a value that decides what happens in a step. Pure: needs no ranks and no GPU.

    | `what`                | the picture                                                                          |
    |-----------------------|--------------------------------------------------------------------------------------|
    | `Spec`, `{title: Spec}` | the part of weights, gradients and main weights that each rank keeps; 16 ranks at most |
    | `{title: Layout}`     | the bytes that each takes on a rank, the arena included                              |
    | `Layout`              | each bucket to scale: leaves, padding, slices                                        |
    | `Plan`, `state.cursor` | for each use, the units that are gathered and where they lie in the arena           |
    | `Lowered`             | the collectives of a step in order of issue                                          |

    Args:
        what: one of these values.
        path: a PNG, or what its ending says: .svg, .pdf.

    Raises:
        TypeError: a value of another kind. SpecError: a spec of more ranks than can be told apart.
        ImportError: matplotlib is missing: `pip install "functional-fsdp[plots]"`.

    Example: `fsdp.draw({"ZeRO-3": fsdp.Spec({"data": 4}), "DDP": fsdp.Spec({"data": 4}, fsdp.ddp("data"))}, "a.png")`.
    """
    page = Page()
    _picture_of(what)(what, page)
    page.save(path)


def _picture_of(what: Any) -> Callable[[Any, Page], None]:
    values = list(what.values()) if isinstance(what, Mapping) else []
    if isinstance(what, Spec):
        return lambda spec, page: _specs({"": spec}, page)
    if values and all(isinstance(one, Spec) for one in values):
        return _specs
    if values and all(isinstance(one, Layout) for one in values):
        return _bytes_of_layouts
    if isinstance(what, Layout):
        return _layout
    if isinstance(what, Plan):
        return _plan
    if isinstance(what, Cursor):
        return lambda cursor, page: _plan(cursor.plan, page, cursor)
    if isinstance(getattr(what, "collectives", None), tuple):
        return _collectives
    raise TypeError(
        f"draw: got {type(what).__name__}; expected a Spec, a Layout, a dict of one of these by title, a Plan, a "
        f"state's cursor, or what `fsdp.lower` returns."
    )


# ---------------------------------------------------------------- what each rank keeps


def _specs(specs: Mapping[str, Spec], page: Page) -> None:
    many = next((n for spec in specs.values() if (n := prod(spec.axes.values())) > RANKS), None)
    if many is not None:
        raise SpecError(
            f"draw: a spec of {many:,} ranks; expected at most {RANKS}, which a picture can tell apart. Fewer "
            f'ranks show the same: Spec({{"data": 4}}, ...).'
        )
    rows: list[tuple[str, Spec, Placement]] = []
    for title, spec in specs.items():
        alone = len(spec.placements) == 1
        for pattern, rule in spec.placements:
            name = title or str(rule)
            rows.append((name if alone else f"{title + ': ' if title else ''}{pattern}: {rule}", spec, rule))
    page.text("What each rank keeps", 15, INK, 0.36, weight="bold")
    page.text("a bar is the whole of it; what is filled lies on that rank")
    for title, spec, rule in rows:
        ranks = [*itertools.product(*(range(size) for size in spec.axes.values()))]
        page.text(title, 11, INK, 0.3, weight="bold")
        panel = page.panel(0.9, (len(ranks), 4.0), below=0.12)
        for i, place in enumerate(ranks):
            here = dict(zip(spec.axes, place, strict=True))
            panel.axes.text(i, 3.5, ", ".join(f"{axis} {n}" for axis, n in here.items()), fontsize=8, color=GREY)
            for (kind, colour), y in zip(COLOURS.items(), (2.18, 1.13, 0.08), strict=True):
                begin, end = _kept(rule, kind, spec.axes, here)
                panel.box(i, y, 0.93, 0.9, facecolor="none", edgecolor="#c9cdd6")
                panel.box(i + 0.93 * begin, y, 0.93 * (end - begin), 0.9, facecolor=colour)
    page.key({KINDS[kind]: colour for kind, colour in COLOURS.items()})


def _kept(rule: Placement, kind: str, axes: Mapping[str, int], here: dict[str, int]) -> tuple[float, float]:
    """Where what a rank keeps begins and ends, in parts of the whole."""
    leaf = LeafInfo("w", (ALIGN * RANKS,), torch.float32)
    (bucket,) = plan_layout([leaf], Spec(dict(axes), rule)).buckets.values()
    begin, end = bucket.span(getattr(rule, kind), here)
    return begin / bucket.numel, end / bucket.numel


def _bytes_of_layouts(layouts: Mapping[str, Layout], page: Page) -> None:
    found = {title: _kept_bytes(layout) for title, layout in layouts.items()}
    most = max(sum(kinds.values()) for kinds in found.values())
    size, unit = binary_scale(most)
    page.text("Bytes on a rank", 15, INK, 0.36, weight="bold")
    far = any(layout.host_nbytes("main") for layout in layouts.values())
    left_out = "optimizer state, which lies as main weights do" + ", and without what lies in the host's memory" * far
    page.text(f"without {left_out}; staging and activations come beside it")
    page.indent(list(found))
    panel = page.panel(0.42 * len(found), (most / size * 1.02 or 1.0, len(found)), below=0.55)
    for y, kinds in enumerate(reversed(found.values())):
        at = 0.0
        for kind, nbytes in kinds.items():
            panel.box(at, y + 0.14, nbytes / size, 0.72, bytes_text(nbytes), facecolor=STORED[kind])
            at += nbytes / size
    panel.rows({title: len(found) - i - 0.5 for i, title in enumerate(found)})
    panel.ticked = "xy"
    panel.axes.set_xlabel(unit, fontsize=10, color=INK)
    page.key(STORED)


def _kept_bytes(layout: Layout) -> dict[str, int]:
    copies = sum(b.nbytes("weights") for b in layout.buckets.values() if keeps_copy(b) and not b.copy_on_host)
    main, grads = (layout.nbytes(kind) - layout.host_nbytes(kind) for kind in ("main", "grads"))
    kept = (main, grads, copies, make_plan(layout).arena)
    return {kind: nbytes for kind, nbytes in zip(STORED, kept, strict=True) if nbytes}


# ---------------------------------------------------------------- buckets


def _layout(layout: Layout, page: Page) -> None:
    alike: list[list[Bucket]] = []
    for bucket in layout.buckets.values():
        if alike and _shape(alike[-1][0]) == _shape(bucket):
            alike[-1].append(bucket)
        else:
            alike.append([bucket])
    shown, most = alike[:BUCKETS], max((some[0].numel for some in alike), default=1)
    page.text(f"{len(layout.buckets)} buckets of {len(layout.units)} units", 15, INK, 0.36, weight="bold")
    page.text(
        f"to scale, in elements; {layout.padding():.2%} are padding (hatched); a rank keeps what is between two ticks"
    )
    colours = colours_of([some[0].name for some in shown])
    for some in shown:
        bucket, last = some[0], some[-1]
        names = bucket.name if last is bucket else f"{bucket.name} … {last.name} ({len(some)} alike)"
        cuts = bucket.slices("main")
        sliced = f"{cuts} slices of {bucket.numel // cuts:,}" if cuts > 1 else "whole on each rank"
        leaves = f"{len(bucket.leaves)} {'leaf' if len(bucket.leaves) == 1 else 'leaves'}"
        page.text(f"{names}: {leaves}, {bucket.numel:,} elements, {sliced}", 9.5, INK, 0.26)
        panel = page.panel(0.5, (most * 1.002, 1.0), below=0.1)
        panel.box(0, 0.1, bucket.numel, 0.8, facecolor="white", edgecolor=GREY, hatch="////", alpha=0.75)
        for leaf in bucket.leaves:
            if leaf.numel:
                panel.box(leaf.offset, 0.1, leaf.numel, 0.8, leaf.key, facecolor=colours[bucket.name])
        for k in range(1, cuts if cuts <= 8 * RANKS else 1):
            for ends in ([0, 0.14], [0.86, 1]):
                panel.axes.plot([k * bucket.numel / cuts] * 2, ends, color=INK, linewidth=1.3)
    if len(alike) > BUCKETS:
        page.text(f"and {len(alike) - BUCKETS} kinds of buckets more")


def _shape(bucket: Bucket) -> tuple[Any, ...]:
    leaves = tuple((leaf.key, leaf.shape, leaf.offset) for leaf in bucket.leaves)
    return (
        leaves,
        bucket.numel,
        bucket.placement,
        bucket.main,
        bucket.compute,
        bucket.gather_codec or bucket.gather,
        bucket.trainable,
    )


# ---------------------------------------------------------------- uses, and the arena


def _plan(plan: Plan, page: Page, cursor: Cursor | None = None) -> None:
    uses = len(plan.uses)
    size, unit_of_size = binary_scale(plan.arena)
    top = plan.arena / size or 1.0
    colours = colours_of([unit.name for unit in plan.units])
    page.text(f"{uses} uses, {len(plan.gathers)} gathers, arena {bytes_text(plan.arena)}", 15, INK, 0.36, weight="bold")
    said = "the arena, use by use: pale, being gathered; half full, ready and waiting; full, in use"
    at = None if cursor is None else cursor.at % uses
    if at is not None:
        said += f"    ·    the cursor: use {at} comes next ({plan.uses[at].unit})"
    page.text(said)
    head = page.panel(0.62, (uses, 1.0), below=0.08)
    for k, use in enumerate(plan.uses):
        head.box(k, 0.12, 1, 0.76, use.unit, facecolor=colours[use.unit])
        if use.reduces:
            head.axes.plot([k + 0.08, k + 0.92], [0.02, 0.02], color=EXPOSED, linewidth=2)
    head.rows({"use": 0.5})
    head.ticked = "y"
    body = page.panel(2.8, (uses, top * 1.04), below=0.6)
    for unit in plan.units:
        y, h, colour = unit.address / size, unit.nbytes / size, colours[unit.name]
        gathers = [gather for gather in plan.gathers if gather.unit == unit.name]
        for gather in gathers:
            body.box(gather.start, y, gather.first - gather.start, h, facecolor=colour, alpha=0.25)
            body.box(gather.first, y, gather.last + 1 - gather.first, h, facecolor=colour, alpha=0.55)
            for k in unit.uses:
                if gather.first <= k <= gather.last:
                    body.box(k, y, 1, h, unit.name, facecolor=colour)
    for panel in (head, body):
        panel.axes.axvline(plan.turn, color=INK, linewidth=0.9, linestyle=":")
        if at is not None:
            panel.axes.axvline(at, color=EXPOSED, linewidth=2.5)
    body.axes.axhline(top, color=INK, linewidth=0.9)
    body.axes.set_ylabel(f"arena address ({unit_of_size})", fontsize=10, color=INK)
    body.axes.set_xlabel("use; dotted: the backward begins; red below a use: its gradient is reduced", fontsize=10)
    body.ticked = "xy" if plan.arena else "x"
    if head.unnamed or body.unnamed:
        page.key(colours)


# ---------------------------------------------------------------- what is sent


def _collectives(lowered: Any, page: Page) -> None:
    sent: Sequence[Collective] = lowered.collectives
    size, unit = binary_scale(max((one.nbytes for one in sent), default=0))
    most = max((one.nbytes for one in sent), default=1) / size or 1.0
    total = sum(one.nbytes for one in sent)
    page.text(f"{len(sent)} collectives, {bytes_text(total)}", 15, INK, 0.36, weight="bold")
    page.text("in order of issue; as high as the larger side has bytes")
    panel = page.panel(2.6, (max(len(sent), 1), most * 1.05), below=0.6)
    for i, one in enumerate(sent):
        colour = OF_KINDS.get(one.kind, GREY)
        panel.box(i + 0.05, 0, 0.9, one.nbytes / size, one.bucket, facecolor=colour)
    panel.ticked = "xy"
    panel.axes.set_ylabel(unit, fontsize=10, color=INK)
    panel.axes.set_xlabel("collective", fontsize=10, color=INK)
    kinds = dict.fromkeys((one.kind, one.axis) for one in sent)
    for kind, axis in kinds:
        some = [one for one in sent if (one.kind, one.axis) == (kind, axis)]
        said = f"{kind} along {axis or 'all axes'}: {len(some)}, {bytes_text(sum(one.nbytes for one in some))}"
        page.key({said: OF_KINDS.get(kind, GREY)})
