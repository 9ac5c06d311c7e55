"""Ranks that torchrun starts again, over a store in which there still is what their predecessors said."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from functional_fsdp._launch.launch import _name

SOON = timedelta(seconds=20)


def names(store: Any, world: int, late: float = 0.0) -> set[str]:
    """The names that the ranks of an attempt agree on, the last of which comes late."""

    def rank(place: int) -> str:
        time.sleep(late if place == world - 1 else 0)
        return _name(store, place, world, SOON)

    with ThreadPoolExecutor(world) as threads:
        return set(threads.map(rank, range(world)))


def test_ranks_of_one_attempt_agree_on_a_name_that_no_earlier_one_had() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    seen: set[str] = set()
    for world in (2, 3, 1, 3):
        for late in (0.0, 0.1):
            found = names(store, world, late)
            assert len(found) == 1
            assert not found & seen
            seen |= found


def test_a_rank_that_is_not_there_yet_is_not_taken_for_the_one_that_was_killed_before_it() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError):  # killed before the first rank came
        _name(store, 1, 3, timedelta(seconds=0.05))
    with pytest.raises(RuntimeError, match="1 of 3 ranks came"):  # and a first rank, before any of the others came
        _name(store, 0, 3, timedelta(seconds=0.05))
    assert len(names(store, 3, late=0.1)) == 1
