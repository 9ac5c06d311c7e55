"""Traffic: what simulated ranks have sent each other."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .._common.record import Collective

__all__ = ["Traffic"]

BY = ("axis", "lane", "unit", "kind")


class Traffic:
    """The collectives of this package that simulated ranks issued, and the bytes that each rank received. Those of
    `T.collectives` in a model are on the lane "compute".

    Printing it shows a table by axis, lane, unit and kind, of all ranks together.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.clear()

    def clear(self) -> None:
        """Count from here on."""
        self.found: Counter[tuple[int, str, str, str, str]] = Counter()
        self.received: Counter[tuple[int, str, str, str, str]] = Counter()

    def note(self, rank: int, hop: Collective, ranks: int) -> None:
        key = rank, hop.axis or "(all)", hop.lane, hop.bucket, hop.kind
        self.found[key] += 1
        self.received[key] += hop.received(ranks)

    def bytes(self, **only: Any) -> int:
        """Received, by all ranks together or by those that are asked for.

        Args:
            **only: of rank, axis, lane, unit and kind, those that count.

        Example: `w.traffic.bytes(axis="shard", lane="gather", rank=0)`.
        """
        return _sum(self.received, only)

    def collectives(self, **only: Any) -> int:
        """How many were issued, each counted by every rank; otherwise as `bytes`."""
        return _sum(self.found, only)

    def __repr__(self) -> str:
        rows: dict[tuple[str, ...], list[int]] = {}
        for key, count in self.found.items():
            row = rows.setdefault(key[1:], [0, 0])
            row[0] += count
            row[1] += self.received[key]
        lines: list[tuple[str, ...]] = [(*BY, "collectives", "bytes received")]
        lines += [(*key, f"{count:,}", f"{nbytes:,}") for key, (count, nbytes) in sorted(rows.items())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        sides = ("<",) * len(BY) + (">", ">")
        return "\n".join(
            "  ".join(f"{text:{side}{width}}" for text, side, width in zip(line, sides, widths, strict=True))
            for line in lines
        )


def _sum(counted: Counter[tuple[int, str, str, str, str]], only: dict[str, Any]) -> int:
    names = ("rank", *BY)
    if unknown := only.keys() - {*names}:
        raise TypeError(f"traffic: {sorted(unknown)[0]!r} is unknown; expected some of {', '.join(names)}")
    chosen = [(names.index(name), value) for name, value in only.items()]
    return sum(n for key, n in counted.items() if all(key[i] == value for i, value in chosen))
