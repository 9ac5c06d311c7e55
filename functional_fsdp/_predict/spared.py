"""Spared: what compiled code keeps less for the backward than eager code does, use by use.

A compiler that sees a unit's forward and backward at once keeps the cheapest tensors from which what the backward reads
can be computed again by elementwise operations and reductions. Of these it computes nothing again that a product or an
attention reads in the backward, since that has to be written anyway. So the bytes that it keeps are a smallest cut of
the forward's tensors, as of torch's partitioner.

Source: the min-cut partitioner of torch's functorch compiler (https://dev-discuss.pytorch.org/t/467).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from .operations import Logged

__all__ = ["smallest_cut", "spared"]

INFINITE = 1 << 60


def spared(log: Sequence[Logged], forward: int, compiled: Collection[int]) -> list[int]:
    """Bytes that the forward uses of a rehearsal keep more in compiled code than eagerly: negative where it keeps less.

    Args:
        log: of the rehearsal's operations. forward: how many of its uses are the forward. compiled: which of these are
            compiled.
    """
    home: dict[int, int] = {}  # the use that has made a tensor
    size: dict[int, int] = {}
    read: dict[int, set[int]] = {}  # the uses that read it
    whole: set[int] = set()  # what a product or an attention reads in the backward
    for one in log:
        for key in one.inputs:
            read.setdefault(key, set()).add(one.use)
            if one.use >= forward and not one.joined:
                whole.add(key)
        for key, nbytes in one.outputs:
            home.setdefault(key, one.use)
            size.setdefault(key, nbytes)
    found = [0] * forward
    for use in compiled:
        mine = {key for key, where in home.items() if where == use}
        needed = {key for key in mine if any(other >= forward for other in read.get(key, ()))}
        leaves = {key for key in mine if any(use < other < forward for other in read.get(key, ()))}
        forced = (needed & whole) | leaves
        eager = sum(size[key] for key in needed | leaves)
        cut = smallest_cut([one for one in log if one.use == use], size, needed - forced, forced, read, forward)
        found[use] = sum(size[key] for key in forced) + cut - eager
    return found


def smallest_cut(
    ops: Sequence[Logged], size: dict[int, int], wanted: Collection[int], kept: Collection[int],
    read: dict[int, set[int]], forward: int,
) -> int:  # fmt: skip
    """Bytes of the cheapest tensors to keep from which those wanted follow, where some are kept anyway."""
    if not wanted:
        return 0
    capacity: dict[tuple[object, object], int] = {}
    next_to: dict[object, set[object]] = {}

    def edge(a: object, b: object, n: int) -> None:
        capacity[a, b] = capacity.get((a, b), 0) + n
        capacity.setdefault((b, a), 0)
        next_to.setdefault(a, set()).add(b)
        next_to.setdefault(b, set()).add(a)

    made: dict[int, Logged] = {}
    for op in ops:
        for key, _ in op.outputs:
            made.setdefault(key, op)
    there = {key for op in ops for key in (*op.inputs, *(key for key, _ in op.outputs))}
    for key in there:
        free = key in kept or key not in size or (key not in made and any(use >= forward for use in read[key]))
        edge((key, 0), (key, 1), 0 if free else size[key])  # what is free to keep cuts its way at once
        maker = made.get(key)
        if maker is None or not maker.joined:
            edge("source", (key, 0), INFINITE)
        else:
            for given in maker.inputs:
                if given != key:
                    edge((given, 1), (key, 0), INFINITE)
    for key in wanted:
        edge((key, 1), "sink", INFINITE)
    total = 0
    while True:
        before: dict[object, object] = {"source": "source"}
        todo: deque[object] = deque(["source"])
        while todo and "sink" not in before:
            a = todo.popleft()
            for b in next_to.get(a, ()):
                if b not in before and capacity[a, b] > 0:
                    before[b] = a
                    todo.append(b)
        if "sink" not in before:
            return total
        path: list[tuple[object, object]] = []
        at: object = "sink"
        while at != "source":
            path.append((before[at], at))
            at = before[at]
        least = min(capacity[step] for step in path)
        for one, other in path:
            capacity[one, other] -= least
            capacity[other, one] += least
        total += least
