"""What pictures are made of: pages measured in inches, boxes with labels that fit, a colour for each unit, a key.

    page = Page()                           10 inches wide; as high as what is put on it
    axes = page.panel(2.0, (10, 3))         2 inches high, from (0, 0) to (10, 3) in its own units
    axes.box(0, 1, 4, 1, "blocks.0")        the label is written across, or upright, or not at all: `axes.unnamed`
    page.save("picture.svg")                the ending says the format; without one it is a PNG

matplotlib is imported where a page is made, and nowhere else.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from textwrap import wrap
from typing import Any

__all__ = ["EXPOSED", "FAINT", "GREY", "INK", "Page", "Panel", "binary_scale", "colours_of"]

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
