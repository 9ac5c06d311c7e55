"""Agreement: what ranks are to have been given alike, compared before a State is made of it.

    rank 0   work() ── lines ── digests ──┐
    rank 1   work() ── lines ── digests ──┴─ one exchange ── alike: go on
                                                          └─ not: another, of the lines; all raise, naming the first

A line says one thing: a leaf and its shape, the checksum of its values, one setting. Where ranks may differ along some
axes of the mesh (experts, of which each has its own), a line is compared among ranks of one place on those axes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .._common.errors import FsdpError
from .joint import Joint

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["Topic", "agree"]

T = TypeVar("T")
Axes = tuple[str, ...]
LONG = 160  # characters of a line in an error


class Topic(NamedTuple):
    """Lines to be compared, and what is said where they differ.

    Attributes:
        lines: the same on all ranks, in the same order.
        own: for each line the mesh axes along which ranks may differ; `()` for none at all.
        error: what is raised, with a text like "shard: ranks have different `what`. The first `one` that differs: ...
            `remedy`".
    """

    lines: list[str]
    error: type[FsdpError]
    what: str
    one: str
    remedy: str
    own: Sequence[Axes] = ()

    def axes(self, line: int) -> Axes:
        return self.own[line] if line < len(self.own) else ()


def agree(joint: Joint, part: str, work: Callable[[], tuple[T, list[Topic]]]) -> T:
    """The result of `work` on this rank, if no rank raised in it and all have the same lines. Host; waits for all.

    Args:
        part: of the joint call, as it has several.

    Raises:
        BaseException: what `work` raised here; where it raised elsewhere, one of the same kind that names the rank.
        FsdpError: that of the first topic whose lines differ, the same on every rank.
    """
    run, where = joint.run, joint.what
    if run.size == 1:
        return work()[0]
    made: list[tuple[T, list[Topic]]] = []

    def do() -> dict[tuple[int, Axes], str]:
        made.append(work())
        return _digests(made[0][1])

    found = joint(do, part)
    result, topics = made.pop()
    places = [_place(run, rank) for rank in run.ranks]
    if _alike(found, places):
        return result
    everyone = joint(lambda: [topic.lines for topic in topics], f"{part}, line by line")
    for t, topic in enumerate(topics):
        for i in range(max(len(lines[t]) for lines in everyone)):
            first: dict[tuple[int, ...], tuple[int, str]] = {}
            for rank, lines in enumerate(everyone):
                line = lines[t][i] if i < len(lines[t]) else "nothing"
                at = tuple(places[rank][axis] for axis in topic.axes(i))
                other, expected = first.setdefault(at, (rank, line))
                if line != expected:
                    raise topic.error(
                        f"{where}: ranks have different {topic.what}. The first {topic.one} that differs: rank "
                        f"{run.ranks[other]} has {_short(expected)}, rank {run.ranks[rank]} has {_short(line)}. "
                        f"{topic.remedy}"
                    )
    raise FsdpError(f"{where}: ranks have the same, and differ in which of it may differ. Give all of them one Spec.")


def _digests(topics: list[Topic]) -> dict[tuple[int, Axes], str]:
    """A digest of the lines of each topic that are compared among the same ranks."""
    lines: dict[tuple[int, Axes], list[str]] = {}
    for t, topic in enumerate(topics):
        for i, line in enumerate(topic.lines):
            lines.setdefault((t, topic.axes(i)), []).append(line)
    return {
        key: hashlib.sha256(repr(some).encode(errors="backslashreplace")).hexdigest() for key, some in lines.items()
    }


def _alike(found: list[dict[tuple[int, Axes], str]], places: list[dict[str, int]]) -> bool:
    if any(digests.keys() != found[0].keys() for digests in found):
        return False
    for key in found[0]:
        seen: dict[Any, str] = {}
        for digests, place in zip(found, places, strict=True):
            if seen.setdefault(tuple(place[axis] for axis in key[1]), digests[key]) != digests[key]:
                return False
    return True


def _place(run: Runtime, rank: int) -> dict[str, int]:
    """Where a rank stands on each axis of the mesh."""
    at = (run.grid == rank).nonzero()[0].tolist()
    return dict(zip(run.sizes, at, strict=True))


def _short(line: str) -> str:
    return line if len(line) <= LONG else f"{line[:LONG]}..."
