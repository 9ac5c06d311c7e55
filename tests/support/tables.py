"""Tables of cases: `make test` runs chosen rows, all pairs of two columns' values, or each value of each column;
`make test-all` runs all."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

Row = tuple[Any, ...]
R = TypeVar("R", bound=Row)
FULL = os.environ.get("LAWS") == "full"  # `make test-all` and `make laws`: sizes and numbers of examples, too


def product(*columns: Iterable[Any]) -> list[Any]:
    """The product of these columns, for `parametrize`."""
    rows = list(itertools.product(*columns))
    return marked(rows, covering(rows))


def each(*columns: Iterable[Any]) -> list[Any]:
    """The product of these columns, of which as many rows are chosen as the longest has: each value comes in one."""
    lists = [[*column] for column in columns]
    chosen = [tuple(some[i % len(some)] for some in lists) for i in range(max(map(len, lists)))]
    return marked([*itertools.product(*lists)], chosen)


def marked(rows: Sequence[Row], chosen: Sequence[Row]) -> list[Any]:
    """Rows for `parametrize`, of which those that are not chosen are large."""
    kept = [repr(row) for row in chosen]
    return [
        pytest.param(*row, marks=() if repr(row) in kept else pytest.mark.large, id="-".join(map(str, row)))
        for row in rows
    ]


def covering(rows: Sequence[R]) -> list[R]:
    """Rows that contain every pair of values of two columns that there is in all of them, found greedily."""
    pairs = {
        row: {*itertools.combinations(enumerate(map(repr, row)), 2)} for row in sorted(rows, key=repr)
    }  # in an order that is the same in every process
    left, chosen = set().union(*pairs.values()), []
    while left:
        chosen.append(max(pairs, key=lambda row: len(pairs[row] & left)))
        left -= pairs[chosen[-1]]
    return chosen
