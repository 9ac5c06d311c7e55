"""Prints: the fingerprints of steps, as a value: plain numbers, saved to a file and read again, without ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["LANES", "Key", "Prints", "Row", "Step"]

FORMAT = 1
#: what is digested, and the lane that it comes from
LANES = {
    "input": "compute",
    "main": "update",
    "moment": "update",
    "weight": "gather",
    "output": "compute",
    "gradient": "compute",
    "reduced": "reduce",
    "given": "update",
    "update": "update",
    "result": "compute",
    "rng": "compute",
}


class Key(NamedTuple):
    """What a row of numbers is of.

    Attributes:
        kind: one of `LANES`.
        unit: by its name; "" for what is the step's.
        leaf: the path of a leaf, or the path of a tensor in a batch or in outputs.
        nth: how often it came in this step before.
    """

    kind: str
    unit: str
    leaf: str
    nth: int


class Row(NamedTuple):
    """The numbers of one rank, or of all together: hash, sum of squares, two projections, see `digest`."""

    hash: int
    squares: float
    first: float
    second: float


@dataclass
class Step:
    """One step: for each key the rows of all ranks, in order; one row where it is the same for all.

    Attributes:
        number: how many steps were taken before it.
        rows: in order of time.
        uses: of weights, which use of the cursor each was.
        dtypes: by kind, unit and leaf.
    """

    number: int
    rows: dict[Key, tuple[Row, ...]] = field(default_factory=dict)
    uses: dict[Key, int] = field(default_factory=dict)
    dtypes: dict[Key, str] = field(default_factory=dict)


def _step(said: Any, ranks: int) -> Step:
    """A step, of what `Prints.save` wrote of it."""
    step = Step(int(said["number"]))
    for kind, unit, leaf, nth, use, dtype, rows in said["rows"]:
        key = Key(kind, unit, leaf, nth)
        texts = all(isinstance(text, str) for text in (kind, unit, leaf, dtype))
        if not texts or type(nth) is not int or kind not in LANES or not 1 <= len(rows) <= ranks:
            raise ValueError(f"{len(rows)} rows of {key!r}")
        step.rows[key] = tuple(Row(int(h), float(squares), float(p), float(q)) for h, squares, p, q in rows)
        if use is not None:
            step.uses[key] = use
        step.dtypes[key] = dtype
    return step


@dataclass
class Prints:
    """The fingerprints of some steps of a run.

    Attributes:
        ranks: how many there were.
        setting: what decides bits: mesh, placements, precisions, the average of gradients, the device.
        average: "mean" or "sum", as `Spec` has it.
        steps: in order.
    """

    ranks: int = 0
    setting: str = ""
    average: str = "mean"
    steps: list[Step] = field(default_factory=list)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write them as JSON. Where several ranks have them, let one of them do it."""
        said: dict[str, Any] = {"format": FORMAT, "ranks": self.ranks, "setting": self.setting, "average": self.average}
        said["steps"] = [
            {
                "number": step.number,
                "rows": [[*key, step.uses.get(key), step.dtypes.get(key, ""), rows] for key, rows in step.rows.items()],
            }
            for step in self.steps
        ]
        path = Path(path)
        path.write_text(json.dumps(said))
        return path

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Prints:
        """Read what `save` wrote.

        Raises:
            ValueError: it is no such file.
        """
        try:
            said = json.loads(Path(path).read_text())
            known = said["format"]
            if known == FORMAT:
                ranks, setting, average = said["ranks"], said["setting"], said["average"]
                if type(ranks) is not int or not isinstance(setting, str) or average not in ("mean", "sum"):
                    raise ValueError(f"{ranks!r} ranks, the setting {setting!r}, the average {average!r}")
                return cls(ranks, setting, average, [_step(one, ranks) for one in said["steps"]])
        except (ValueError, KeyError, TypeError, OverflowError, IsADirectoryError) as error:
            raise ValueError(
                f"{str(path)[:200]} is no file of fingerprints: {error!r}. Give one that Prints.save wrote."
            ) from None
        raise ValueError(f"{path} has fingerprints of format {known}; this version reads format {FORMAT}.")

    def __repr__(self) -> str:
        of = f"{len(self.steps)} steps" if len(self.steps) != 1 else "1 step"
        return f"Prints of {of} on {self.ranks} rank{'s' * (self.ranks != 1)}: {self.setting}"
