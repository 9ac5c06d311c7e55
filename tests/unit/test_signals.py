"""Signals: what the ranks' stream memory operations make of the words, in any order in which they may run."""

from __future__ import annotations

import ctypes
import struct

from hypothesis import given
from hypothesis import strategies as st

from functional_fsdp._transports.peer_memory import FENCE, WAIT, Operation, _packed, operations

BARRIERS = 4


@given(st.integers(2, 6), st.randoms(use_true_random=False))
def test_a_barrier_holds_every_rank_until_all_are_there(ranks: int, random: object) -> None:
    """Each rank's operations run in order, ranks in any; nobody is through barrier k before all have come to it."""
    words = [[0] * (2 * ranks) for _ in range(ranks)]
    steps = [operations(ranks, me) for me in range(ranks)]
    at, through = [0] * ranks, [0] * ranks
    while any(count < BARRIERS for count in through):
        able = []
        for me in range(ranks):
            if through[me] < BARRIERS:
                kind, place, word, value = steps[me][at[me]]
                if kind != WAIT or words[place][word] == value:
                    able.append(me)
        assert able, f"nobody can go on: {words} after {at}, {through}"
        me = random.choice(able)  # type: ignore[attr-defined]
        kind, place, word, value = steps[me][at[me]]
        if kind != WAIT:
            assert words[place][word] != value, "a signal was given twice, and one is lost"
            words[place][word] = value
        at[me] += 1
        if at[me] == len(steps[me]):
            at[me], through[me] = 0, through[me] + 1
            assert all(through[other] >= through[me] or at[other] for other in range(ranks))
    assert not any(map(any, words)), "the words are not as they were before the first barrier"


def test_ranks_begin_with_different_peers() -> None:
    """So that no rank's memory is written by all others at once."""
    first = [next(o.place for o in operations(4, me) if o.kind != WAIT and o.place != me) for me in range(4)]
    assert sorted(first) == [0, 1, 2, 3]


def test_operations_are_as_the_driver_reads_them() -> None:
    """CUstreamBatchMemOpParams of cuda.h: the kind at 0, the address at 8, the value at 16, flags at 24."""
    packed = _packed([Operation(WAIT, 1, 3, 1), Operation(2, 0, 2, 0)], [1000, 2000])
    raw = [ctypes.string_at(one.getPtr(), 28) for one in packed]
    assert [struct.unpack("<i4xQQI", one) for one in raw] == [(1, 2012, 1, 1), (2, 1008, 0, FENCE)]
