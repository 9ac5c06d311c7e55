"""Given: which leaves got a gradient in a step, on any rank that shares them. The others keep weights and moments.

    reduce    notes the leaves of a unit that came (None means none), as a bitmask; ALL where all did, nearly always
    step      the vote carries whether this rank has them all; if none has, ranks exchange a row of bytes
    update    a leaf that no rank has is left as it is

The row has one byte a leaf; of leaves that ranks have each their own (experts) one for each of them:

    [ blocks.0: w, bias | experts of rank 0: w, bias | of rank 1: w, bias ]       0 another rank's
      2          1        2                   2        0            0             1 got none, 2 got one

The largest of each is what any rank got. A captured step has what it found when it was captured, and votes FIXED if
that was not everything: replays of the same step then compare one number, and no rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._common.errors import ScheduleError
from .._common.record import Collective

if TYPE_CHECKING:
    from .._plan.layout import Bucket, Layout
    from .agreement import Agreement

ALL = -1
OTHERS, NONE, ONE = 0, 1, 2  # in a row
LACKS, FULL, FIXED = 0, 1, 2  # in the vote
EAGER = 1 << 32  # no checksum of a row

Leaves = Mapping[str, tuple[bool, ...]]  # by bucket: for each of its leaves, whether it got a gradient


class Lacking(NamedTuple):
    """Where a leaf got no gradient.

    given: this rank's buckets in which a leaf got none. anywhere: those, and where ranks have leaves of their own,
    other ranks', too: the same on every rank.
    """

    given: Leaves
    anywhere: tuple[str, ...]


WHOLE = Lacking({}, ())


class NewCounts(ScheduleError):
    """While a step is captured the optimizer's state would grow: the step has to be taken eagerly once."""


class Seat(NamedTuple):
    """A bucket's places in the row: `each` for each set of its leaves, this rank's from `start` on."""

    bucket: Bucket
    bits: tuple[int, ...]  # of each leaf in its unit's mask; 0 if it has no elements
    each: range
    start: int


class Seats:
    """The row. Pure.

    Args:
        sizes, coordinate: of the mesh's axes, and this rank's place.
    """

    def __init__(self, layout: Layout, sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> None:
        self.units = [unit.name for unit in layout.units if unit.trained]
        self.seats: list[Seat] = []
        self.own = False  # whether ranks have leaves of their own
        at = 0
        for bucket in layout.trainable.values():
            paths = layout.by_name[bucket.unit].paths
            bits = tuple(1 << paths.index(leaf.path) if leaf.numel else 0 for leaf in bucket.leaves)
            index = 0
            axes = bucket.apart(sizes)
            for axis in axes:
                index = index * sizes[axis] + coordinate[axis]
            n, sets = len(bits), prod(sizes[axis] for axis in axes)
            self.seats.append(Seat(bucket, bits, range(at, at + n * sets), at + n * index))
            self.own |= sets > 1
            at += n * sets
        self.numel = at

    def row(self, noted: Mapping[str, int]) -> bytes:
        """This rank's row, from the masks of the units that were reduced."""
        row = bytearray(self.numel)
        for bucket, bits, _, start in self.seats:
            mask = noted.get(bucket.unit, 0)
            row[start : start + len(bits)] = bytes([ONE if not bit or mask & bit else NONE for bit in bits])
        return bytes(row)

    def lacking(self, row: bytes) -> Lacking:
        """What a row of all ranks says; an empty one, that every leaf got a gradient."""
        if NONE not in row:
            return WHOLE
        given = {}
        for bucket, bits, _, start in self.seats:
            mine = row[start : start + len(bits)]
            if NONE in mine:
                given[bucket.name] = tuple([one == ONE for one in mine])
        anywhere = [seat.bucket.name for seat in self.seats if NONE in row[seat.each.start : seat.each.stop]]
        return Lacking(given, tuple(anywhere))

    def parted(self, rows: Sequence[bytes]) -> str:
        """The first leaf that some ranks have a gradient for, of those that share it, and others not; "" if none."""
        for bucket, bits, each, _ in self.seats:
            for i in each:
                if {NONE, ONE} <= {row[i] for row in rows}:
                    return bucket.leaves[(i - each.start) % len(bits)].path
        return ""

    def names(self, row: bytes) -> str:
        """The leaves of this rank that have none, for error texts."""
        given = self.lacking(row).given
        paths = [
            leaf.path for bucket, *_ in self.seats if bucket.name in given
            for leaf, one in zip(bucket.leaves, given[bucket.name], strict=True) if not one
        ]  # fmt: skip
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        return ", ".join(map(repr, paths[:3])) + more if paths else "no leaf"


class GradientMask:
    """Which leaves of the step in progress got a gradient on this rank, by unit, and what ranks made of it."""

    def __init__(self, layout: Layout, sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> None:
        self.seats = Seats(layout, sizes, coordinate)
        self.full: set[str] = set()  # units of which all leaves did
        self.noted: dict[str, int] = {}  # masks of those of which only some did
        self.row = b""  # this rank's in the last vote; empty: every leaf has a gradient
        self.agreed = b""  # and that of all ranks

    def note(self, unit: str, came: int) -> None:
        """Gradients of a unit came, of some of its leaves: one bit each as `Unit.paths`. Calls add up."""
        self.noted[unit] = self.noted.get(unit, 0) | came

    def fill(self) -> None:
        """Every leaf has a gradient: noise, say."""
        self.full.update(self.seats.units)

    def begin(self) -> tuple[set[str], dict[str, int]]:
        """Note from the beginning. Returns what was noted, for `resume`."""
        before, self.full, self.noted = (self.full, self.noted), set(), {}
        return before

    def resume(self, before: tuple[set[str], dict[str, int]]) -> None:
        self.full, self.noted = before

    def vote(self) -> int:
        """FULL if this rank has a gradient for every leaf, or was given gradients without `reduce`; else LACKS."""
        self.row = b""
        if len(self.full) == len(self.seats.units) or not (self.full or self.noted):
            return FULL
        row = self.seats.row({**self.noted, **dict.fromkeys(self.full, ALL)})
        if NONE not in row:
            return FULL
        self.row = row
        return LACKS

    def agree(self, run: Agreement, seen: tuple[int, int]) -> Lacking:
        """Which leaves got no gradient on any rank that shares them, after a vote in which all came.

        Args:
            seen: the least and the most of all ranks' votes.

        Collective: where no rank has them all, an all-reduce of a byte a leaf, on the host.
        """
        self.agreed = agreed_row(run, self.seats, seen, self.row)
        return self.seats.lacking(self.agreed)


def agreed_row(run: Agreement, seats: Seats, seen: tuple[int, int], row: bytes, fixed: bytes | None = None) -> bytes:
    """The row of all ranks. Empty ones: every leaf got a gradient. `fixed`: what a captured step had found."""
    if run.size == 1:
        return row
    least, most = seen
    if most == FULL and (least == FULL or not seats.own):
        return b""
    if most == FIXED and run.alike("captured", EAGER if fixed is None else zlib.crc32(fixed)):
        return fixed or b""
    found = _largest(run, row or seats.row(dict.fromkeys(seats.units, ALL)))
    if most == FIXED or seats.own:
        differs = fixed is not None and seats.lacking(found) != seats.lacking(fixed)
        if run.most("captured", int(differs)):
            raise ScheduleError(
                "a rank takes a step that was captured when other leaves got gradients than now; in this step none "
                f"came for: {seats.names(found)}. The step was not taken. Capture it anew (T.cuda_graph(train_step)), "
                "or give zeros in the place of None."
            )
    return found if NONE in found else b""


def _largest(run: Agreement, row: bytes) -> bytes:
    flat = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    hop = Collective("all_reduce", "", len(row), flat.dtype, "max", "control", "leaves with gradients")
    run.lanes.wait(run.lanes.submit("control", (hop,), run.collective(hop, flat, flat)))
    return bytes(flat.tolist())
