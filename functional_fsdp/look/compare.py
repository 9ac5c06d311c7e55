"""compare: where two runs part, from their fingerprints. Pure: numbers in, a verdict out, perhaps a picture.

What comes first in time is the cause; its kind, with what was alike before it, says the class.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike

from .draw import FAINT, GREY, INK, Page, colours_of
from .fingerprint import LANES, Fingerprinted, Key, Prints, Row, Step

__all__ = ["Comparison", "Difference", "compare"]

Source = Prints | Fingerprinted | str | PathLike[str]
#: relative differences that another order of sums may make, by dtype of what is compared
ROUNDING = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 1e-4, "float64": 1e-10}
JUMP = 30.0  # times the largest difference so far: what rounding does not grow to from one use to the next
STAYS = ("input", "output", "result")  # by rank, of a part of the batch: over ranks they add up
CLASSES = {"input": "inputs", "main": "weights", "weight": "weights", "moment": "optimizer", "given": "optimizer",
           "reduced": "order of a sum", "update": "optimizer"}  # fmt: skip
NORMS = ("main", "weight", "output", "reduced", "update")  # whose growth is drawn
DRIFT = 1e-3  # of the largest leaf's norm: below it, a leaf's own norm is no measure


@dataclass(frozen=True)
class Difference:
    """The first thing that differs between two runs.

    Attributes:
        cls: "inputs", "weights", "compute", "order of a sum", "dropout" or "optimizer".
        kind, lane, unit, leaf: what it is, see `fingerprint`; leaf: a path, of inputs and outputs that in the tree.
        step: how many steps were taken before; use: of the cursor, or None; nth: how often it came before in the step.
        ranks: where it differs; () if it is of all ranks together.
        size: relative: the norm of the difference, as projections tell it, over that of what differs.
        note: what else is known.
    """

    cls: str
    kind: str
    lane: str
    unit: str
    leaf: str
    step: int
    use: int | None
    nth: int
    ranks: tuple[int, ...]
    size: float
    note: str = ""

    def __repr__(self) -> str:
        parts = [repr(self.leaf) if self.leaf else "", f"unit {self.unit!r}" if self.unit else ""]
        what = " of ".join(part for part in parts if part)
        which = f", time {self.nth + 1}" if self.nth else ""
        if self.use is not None:
            which = f", use {self.use} of the cursor"
        some = ", ".join(map(str, self.ranks[:8])) + ("..." if len(self.ranks) > 8 else "")
        where = f", on rank{'s' * (len(self.ranks) > 1)} {some}" if self.ranks else ""
        said = f"{self.cls}: the {self.kind} ({self.lane} lane) {what} in step {self.step + 1}{which}{where}"
        return f"{said}; relative difference {self.size:.1e}{f'. {self.note}.' if self.note else ''}"


@dataclass
class Comparison:
    """What `compare` returns. Printing it says where the runs part. True if they do not.

    Attributes:
        first: the first difference that counts, or None.
        rounding: the first one that another order of sums explains, or None.
        exact: whether every bit counts: the runs have the same ranks and settings.
        steps: the numbers of the steps that were compared.
        growth: {kind: the largest relative difference in each of these}.
        missing: kinds and units that only one of them has, in words.
    """

    first: Difference | None
    rounding: Difference | None
    exact: bool
    steps: list[int]
    growth: dict[str, list[float]] = field(default_factory=dict)
    missing: str = ""

    def __bool__(self) -> bool:
        return self.first is None

    def __repr__(self) -> str:
        of = f"{len(self.steps)} step{'s' * (len(self.steps) != 1)}"
        how = "every bit" if self.exact else "up to the rounding of sums"
        lines = [f"no difference in {of}, {how}" if self.first is None else f"{self.first!r}"]
        if self.rounding is not None and self.first is None:
            lines.append(f"bits differ first, as in another order of sums: {self.rounding!r}")
        if self.missing:
            lines.append(f"only in one of them: {self.missing}")
        if self.first is not None and len(self.steps) > 1:
            for kind, sizes in self.growth.items():
                lines.append(f"  {kind:8} " + "  ".join(f"{size:.0e}" for size in sizes[:12]))
        return "\n".join(lines)

    def draw(self, path: str | PathLike[str]) -> None:
        """Draw how the difference grows over steps: a line for each kind, relative, on a logarithmic scale.

        Args:
            path: a PNG, or what its ending says: .svg, .pdf.

        Raises:
            ImportError: matplotlib is missing.
        """
        page = Page()
        found = [size for sizes in self.growth.values() for size in sizes if 0 < size < math.inf]
        low = math.floor(math.log10(min(found, default=1e-9)))
        high = max(math.ceil(math.log10(max(found, default=1.0))), low + 1)
        title = (
            "No difference" if self.first is None else f"The runs part in step {self.first.step + 1}: {self.first.cls}"
        )
        page.text(title, 15, INK, 0.36, weight="bold")
        page.text(repr(self.first or self.rounding or self).splitlines()[0])
        last = max(len(self.steps) - 1, 1)
        panel = page.panel(3.0, (last * 1.02, float(high - low)), below=0.6)
        colours = colours_of([*self.growth])
        for kind, sizes in self.growth.items():
            dots = [(i, math.log10(min(s, 10.0**high)) - low) for i, s in enumerate(sizes) if s > 0]
            if dots:
                panel.axes.plot(*map(list, zip(*dots, strict=True)), color=colours[kind], marker="o", markersize=4)
        panel.rows({f"1e{n:+d}": float(n - low) for n in range(low, high + 1, max(1, (high - low) // 8))})
        panel.axes.grid(color=FAINT, linewidth=0.7)
        panel.axes.set_ylabel("relative difference", fontsize=10, color=GREY)
        panel.axes.set_xlabel("steps", fontsize=10, color=GREY)
        panel.ticked = "xy"
        page.key(colours)
        page.save(path)


def compare(a: Source, b: Source, *, exact: bool | None = None) -> Comparison:
    """Where two runs part: the first use that differs, and what that says. Needs no ranks.

    | class            | what differs first, while all before it is alike                                        |
    |------------------|------------------------------------------------------------------------------------------|
    | "inputs"         | an argument of the train step                                                           |
    | "weights"        | main weights before a step, or what a gather brings                                     |
    | "dropout"        | an output or a gradient, where random numbers were drawn, and others                    |
    | "compute"        | another output or gradient                                                              |
    | "order of a sum" | gradients after the reduction: another order, or another precision on the way           |
    | "optimizer"      | an update, what the optimizer keeps, or gradients between their reduction and the step  |

    Args:
        a, b: what `fingerprint` returned, its `prints`, or a file that `Prints.save` wrote.
        exact: whether every bit counts. None: if both have the same ranks and settings. Else a difference counts if it
            is larger than rounding is, in its dtype, or than thirty times the largest before it; ranks are compared
            together: of inputs and outputs all rows in any order, of gradients the mean, or what `Spec` says.

    Steps are matched by their number. What only one of the runs has is left out, and gradients and outputs where the
    numbers of microbatches differ.

    Raises:
        ValueError: a file of another kind; no step in common; `exact=True` for other numbers of ranks.

    Collective: none.

    Example: `print(fsdp.compare("yesterday.json", "today.json"))`.
    """
    one, two = _read(a), _read(b)
    if exact is None:
        exact = (one.ranks, one.setting) == (two.ranks, two.setting)
    if exact and one.ranks != two.ranks:
        raise ValueError(
            f"compare(exact=True): the first ran on {one.ranks} ranks, the second on {two.ranks}, whose sums have "
            "another order. Leave exact out."
        )
    others = _by_number(two)
    pairs = [(step, others[key]) for key, step in _by_number(one).items() if key in others]
    if not pairs:
        raise ValueError(
            f"compare: no step in common: the first has steps {_span(one)}, the second {_span(two)}. Take the "
            "fingerprints of the same steps, as from the same checkpoint."
        )
    run = _Comparing(one, two, exact, pairs)
    for pair in pairs:
        run.step(*pair)
    return Comparison(run.first, run.rounding, exact, [step.number for step, _ in pairs], run.growth, run.missing())


def _read(source: Source) -> Prints:
    if isinstance(source, Fingerprinted):
        return source.prints
    return source if isinstance(source, Prints) else Prints.load(source)


def _by_number(prints: Prints) -> dict[tuple[int, int], Step]:
    """Steps by their number, and which of those that have it: one that is not taken has the next one's."""
    seen: Counter[int] = Counter()
    found = {}
    for step in prints.steps:
        found[step.number, seen[step.number]] = step
        seen[step.number] += 1
    return found


def _span(prints: Prints) -> str:
    return f"{prints.steps[0].number} to {prints.steps[-1].number}" if prints.steps else "of no number"


class _Comparing:
    def __init__(self, a: Prints, b: Prints, by_rank: bool, pairs: list[tuple[Step, Step]]) -> None:
        self.a, self.b, self.by_rank = a, b, by_rank  # and then every bit counts
        self.pairs = pairs
        self.first: Difference | None = None
        self.rounding: Difference | None = None
        self.noise = 0.0
        self.parted: dict[str, float] = {}  # leaves whose gradients differ by rounding, and by how much
        self.growth: dict[str, list[float]] = {}
        self.lacking: dict[str, set[str]] = {}

    def missing(self) -> str:
        return ", ".join(
            f"{kind} of {', '.join(map(repr, sorted(units)[:3]))}{'...' if len(units) > 3 else ''}"
            if all(units)
            else kind
            for kind, units in self.lacking.items()
            if kind != "rng"
        )

    def step(self, a: Step, b: Step) -> None:
        scales = _scales(a, b)
        most: dict[str, float] = {}
        for key in _shared(a, b, self.lacking):
            if key.kind == "rng":
                continue
            mine, theirs = a.rows[key], b.rows[key]
            size, ranks = self._differs(key, mine, theirs, scales.get(key.kind, 0.0))
            if key.kind in NORMS:
                most[key.kind] = max(most.get(key.kind, 0.0), size or 0.0)
            if size is None or self.first is not None:
                continue
            found = self._difference(key, a, b, size, ranks)
            if self.by_rank or self._counts(key, a, size, found):
                self.first = found
            else:
                self.rounding = self.rounding or found
                if key.kind not in ("update", "moment"):
                    self.noise = max(self.noise, size)
                if key.kind in ("reduced", "given"):
                    self.parted[key.leaf] = max(self.parted.get(key.leaf, 0.0), size)
        for kind in NORMS:
            if kind in most:
                self.growth.setdefault(kind, []).append(most[kind])

    def _counts(self, key: Key, step: Step, size: float, found: Difference) -> bool:
        """Whether a difference is more than rounding makes."""
        if key.kind == "input":
            return True
        limit = ROUNDING.get(step.dtypes.get(key, ""), 1e-4)
        if key.kind in ("main", "weight"):  # updates have added up
            limit *= 10
        elif key.kind in ("update", "moment"):  # an optimizer may divide by a gradient that is all rounding
            limit = max(30 * limit, 100 * self.parted.get(key.leaf.partition(" ")[0], 0.0))
        return size > max(limit, JUMP * self.noise)

    def _differs(
        self, key: Key, a: tuple[Row, ...], b: tuple[Row, ...], scale: float
    ) -> tuple[float | None, tuple[int, ...]]:
        """How large the difference is, None if there is none, and on which ranks."""
        if self.by_rank:
            n = max(len(a), len(b))
            every = [(i, one, two) for i, (one, two) in enumerate(zip(_spread(a, n), _spread(b, n), strict=True))]
            apart = [(i, one, two) for i, one, two in every if one.hash != two.hash]
            if not apart:
                return None, ()
            size = max(_size(one, two, scale, key.kind) for _, one, two in apart)
            return size, tuple(i for i, *_ in apart) if 1 < n == self.a.ranks else ()
        one, two = self._whole(key, a, self.a), self._whole(key, b, self.b)
        return (None if one.hash == two.hash else _size(one, two, scale, key.kind)), ()

    def _whole(self, key: Key, rows: tuple[Row, ...], of: Prints) -> Row:
        """What ranks have, together."""
        if key.kind not in (*STAYS, "gradient", "weight"):
            return rows[0]
        rows = _spread(rows, of.ranks) if key.kind in STAYS or key.kind == "gradient" else rows
        total = Row(*(_total(column) if i else sum(column) for i, column in enumerate(zip(*rows, strict=True))))  # type: ignore[arg-type]
        mean = key.kind == "weight" or (key.kind == "gradient" and of.average == "mean") or key.kind == "result"
        if key.kind == "weight" and len({*rows}) == 1:
            return rows[0]
        if mean:
            return Row(total.hash if key.kind != "result" else 0, *(x / len(rows) for x in total[1:]))
        return total._replace(hash=(total.hash + 2**63) % 2**64 - 2**63)

    def _difference(self, key: Key, a: Step, b: Step, size: float, ranks: tuple[int, ...]) -> Difference:
        cls = CLASSES.get(key.kind, "compute")
        note = ""
        if cls == "compute" and self._drawn(key, a, b, ranks):
            cls = "dropout"
        if key.kind == "input":
            note = self._batch(key, a, b, ranks)
        if key.kind == "reduced" and 2.0**-12 < size < 2.0**-6:
            note = "As large as rounding to bfloat16 on the way"
        elif key.kind == "reduced" and size < 1e-6:
            note = "As large as another order of a sum in float32"
        elif key.kind == "weight":
            note = "Main weights are alike: the gather, or a compute copy"
        return Difference(
            cls, key.kind, LANES[key.kind], key.unit, key.leaf, a.number, a.uses.get(key), key.nth, ranks, size, note
        )

    def _drawn(self, key: Key, a: Step, b: Step, ranks: tuple[int, ...]) -> bool:
        """Whether random numbers were drawn up to there, and not the same ones."""

        def at(step: Step, which: Key, rank: int) -> Row | None:
            rows = step.rows.get(which)
            return None if rows is None else rows[min(rank, len(rows) - 1)]

        pairs = (
            key._replace(kind="rng", leaf="", nth=2 * key.nth),
            key._replace(kind="rng", leaf="", nth=2 * key.nth + 1),
        )
        if key.kind != "output":  # from the step's begin to the first reduction, as far as is known
            marks = [one for one in a.rows if one.kind == "rng" and one in b.rows]
            pairs = (marks[0], next((one for one in marks if one.unit == key.unit), marks[-1]))
            if any(one.kind == "output" for one in a.rows):
                return False  # outputs would have shown it
        for rank in ranks or range(max(self.a.ranks, self.b.ranks)):
            before, after = [[at(step, one, rank) for step in (a, b)] for one in pairs]
            drew = before[0] != after[0] or before[1] != after[1]
            if drew and (before[0] != before[1] or after[0] != after[1]):
                return True
        return False

    def _batch(self, key: Key, a: Step, b: Step, ranks: tuple[int, ...]) -> str:
        """Whether an input is there elsewhere: on another rank, or in another step."""
        if not self.by_rank:
            return ""
        rank = ranks[0] if ranks else 0
        wanted = _spread(b.rows[key], self.b.ranks)[rank].hash
        for other, row in enumerate(_spread(a.rows[key], self.a.ranks)):
            if row.hash == wanted and other != rank:
                return f"The second has on rank {rank} what the first has on rank {other}"
        for step, _ in self.pairs:
            if step is not a and key in step.rows and any(row.hash == wanted for row in step.rows[key]):
                return f"The second has there what the first has in step {step.number + 1}"
        return ""


def _shared(a: Step, b: Step, lacking: dict[str, set[str]]) -> Iterator[Key]:
    """The keys that can be compared, in order of time."""
    counts: list[dict[tuple[str, ...], int]] = [{}, {}]
    for count, step in zip(counts, (a, b), strict=True):
        for key in step.rows:
            if key.kind in ("gradient", "output", "reduced"):
                count[key[:3]] = count.get(key[:3], 0) + 1
    for key in a.rows:
        if key not in b.rows:
            lacking.setdefault(key.kind, set()).add(key.unit)
        elif counts[0].get(key[:3]) == counts[1].get(key[:3]):
            yield key
    for key in b.rows:
        if key not in a.rows:
            lacking.setdefault(key.kind, set()).add(key.unit)


def _scales(a: Step, b: Step) -> dict[str, float]:
    """By kind, the largest norm of a leaf; of updates, of a move."""
    found: dict[str, float] = {}
    for step in (a, b):
        for key, rows in step.rows.items():
            found[key.kind] = max(found.get(key.kind, 0.0), *(_norm(row, key.kind == "update") for row in rows))
    return {kind: DRIFT * size for kind, size in found.items()}


def _total(column: Sequence[float]) -> float:
    """Their sum; of numbers that are not finite what that leads to."""
    return math.fsum(column) if math.isfinite(sum(map(abs, column))) else sum(column)


def _norm(row: Row, moved: bool = False) -> float:
    size = math.sqrt((row.first**2 + row.second**2) / 2) if moved else math.sqrt(row.squares)
    return size if math.isfinite(size) else 0.0


def _size(a: Row, b: Row, scale: float, kind: str) -> float:
    moved = kind == "update"
    if (repr(a.first), repr(a.second)) == (repr(b.first), repr(b.second)):  # NaN in both says no more than that
        return 0.0
    apart = math.sqrt(((a.first - b.first) ** 2 + (a.second - b.second) ** 2) / 2)
    if not math.isfinite(apart):
        return math.inf
    return apart / max(_norm(a, moved), _norm(b, moved), scale) if apart else 0.0


def _spread(rows: tuple[Row, ...], n: int) -> tuple[Row, ...]:
    return rows * n if len(rows) == 1 else rows + rows[-1:] * (n - len(rows))
