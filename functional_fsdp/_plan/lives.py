"""Lives: which gathers a program needs, and how long what was gathered stays. By simulation; no addresses yet.

Three units in the default order, at depth 1 (`g` gathered meanwhile, `U` used):

    use      0    1    2    3    4    5
    unit     a    b    c    c    b    a
    a        gU                  g    U      start 0, first 0, last 0; start 4, first 5, last 5
    b        g    U         g    U           start 0, first 1, last 1; start 3, first 4, last 4
    c             g    U----U                start 1, first 2, last 3
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from itertools import accumulate
from typing import NamedTuple

from .._spec.schedule import Schedule, named
from .program import Program

__all__ = ["Gather", "choose_kept", "simulate"]

TRIED = 1 << 20  # sets of units that are tried for a budget; of more kinds of units all or none stay


class Gather(NamedTuple):
    """One gather of a unit: its bytes are live from the use `start` to the use `last`, both included.

    Attributes:
        start: the use whose `unshard` starts it.
        first: the use that waits for it.
        last: the use whose `release` frees the bytes.
    """

    unit: str
    start: int
    first: int
    last: int


def simulate(
    schedule: Schedule, program: Program, sizes: Mapping[str, int], kept: Collection[str]
) -> dict[str, list[Gather]]:
    """Each unit's gathers, those of `kept` once. A group counts as one use ahead, resident units do not count."""
    found: dict[str, list[Gather]] = {name: [] for name in sizes}
    depths = schedule.depths([*sizes])
    order = program.order
    moments = [(a, b) for a, b in dict.fromkeys(program.groups) if any(sizes[name] for name in order[a : b + 1])]
    before: dict[str, int] = {}
    for i, (first, end) in enumerate(moments):
        for k in range(first, end + 1):
            name = order[k]
            if not sizes[name]:
                continue
            begin = max(0, i - depths[name])
            if name in before:
                begin = max(begin, before[name] + 1)  # its bytes are in use until then
                idle = begin > before[name] + 1
                if name in kept or not (idle or isinstance(schedule.keep, tuple)):
                    found[name][-1] = found[name][-1]._replace(last=end)
                    before[name] = i
                    continue
            found[name].append(Gather(name, moments[begin][0], k, end))
            before[name] = i
    return found


def choose_kept(schedule: Schedule, program: Program, sizes: Mapping[str, int]) -> set[str]:
    """The units that stay gathered from first use to last, beside those that do so anyway."""
    keep = schedule.keep
    if keep is None or keep == "all":
        return set(sizes) if keep else set()
    if isinstance(keep, tuple):
        return named(keep, [*sizes])
    saves: dict[int, list[str]] = {}
    for name, gathers in simulate(schedule, program, sizes, ()).items():
        if len(gathers) > 1:
            saves.setdefault(len(gathers) - 1, []).append(name)
    # Among units that save as many gathers each, the smallest first (of equal ones the last, whose lives are short), so
    # it remains to choose how many of each kind: gathers saved -> (fewest bytes, those units).
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for save, names in saves.items():
        names.reverse()
        names.sort(key=lambda name: sizes[name])
        costs = list(accumulate((sizes[name] for name in names), initial=0))
        grown: dict[int, tuple[int, tuple[int, ...]]] = {}
        few = len(best) * len(costs) <= TRIED
        for saved, (spent, counts) in best.items():
            most = bisect_right(costs, keep - spent)
            for n in range(most) if few else (0, most - 1):
                total = saved + n * save
                if total not in grown or spent + costs[n] < grown[total][0]:
                    grown[total] = (spent + costs[n], (*counts, n))
        best = grown
    _, counts = best[max(best)]
    return {name for names, n in zip(saves.values(), counts, strict=True) for name in names[:n]}
