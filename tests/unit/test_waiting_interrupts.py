"""Interrupts: one that waits goes on waiting until the state that `step` returned is in its callers' hands."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from unittest import mock

import pytest

from functional_fsdp._common import calls


@pytest.fixture
def waiting() -> Iterator[None]:
    """An interrupt came while a step was taken."""
    assert threading.current_thread() is threading.main_thread()
    with mock.patch.object(calls, "_waiting", [time.monotonic()]):
        yield
    calls._places.clear()


def callers() -> list[str]:
    return [frame.f_code.co_name for frame, _ in calls._places]


@pytest.mark.usefixtures("waiting")
def test_it_waits_until_the_caller_of_step_has_come_to_another_line() -> None:
    def step() -> bool | None:
        # on one line
        return [calls.arrive(True), calls._in_transit(sys._getframe())][1]  # type: ignore[func-returns-value]

    assert step()
    assert not calls._in_transit(sys._getframe())
    assert callers()[:2] == ["step", "test_it_waits_until_the_caller_of_step_has_come_to_another_line"]


@pytest.mark.usefixtures("waiting")
def test_another_thread_s_step_does_not_say_where_the_main_thread_is() -> None:
    other = threading.Thread(target=calls.arrive, args=(True,))
    other.start()
    other.join()
    assert callers() == []


def test_without_one_nothing_is_looked_at() -> None:
    calls.arrive(others=True)
    assert callers() == []
