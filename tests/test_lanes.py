"""Lanes: the order of streams around graphs that are replayed, with streams that only remember what came before."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from functional_fsdp._lanes import Streams

LANES = ("gather", "reduce", "update")


class Stream:
    """What was given to it, and what that comes after."""

    def __init__(self) -> None:
        self.before: set[int] = set()

    def wait_event(self, event: Event) -> None:
        self.before |= event.before

    def wait_stream(self, stream: Stream) -> None:
        self.before |= stream.before


class Event:
    def __init__(self) -> None:
        self.before: set[int] = set()

    def record(self, stream: Stream) -> None:
        self.before = set(stream.before)


class Remembered(Streams):
    def __init__(self) -> None:
        self.lanes: Any = {name: Stream() for name in LANES}
        self.homes: Any = [Stream(), Stream()]
        self.home = 0
        self.used, self.behind = set(), set()
        self.graph: Any = Event()

    def current(self) -> Any:
        return self.homes[self.home]


events = st.one_of(
    st.sampled_from(LANES), st.tuples(st.integers(0, 1), st.sampled_from(["replayed", "launched", "refused"]))
)


@given(st.lists(events, max_size=30))
def test_graphs_come_after_what_lanes_have_and_before_what_they_are_given_next(program: list[Any]) -> None:
    streams = Remembered()
    graphs: set[int] = set()
    every: set[int] = set()
    for number, event in enumerate(program):
        if isinstance(event, str):
            lane: Any = streams.lane(event)
            assert graphs <= lane.before
            lane.before.add(number)
            every.add(number)
        else:
            streams.home, how = event
            with suppress(InterruptedError), streams.joined():  # it is refused, or interrupted once it was launched
                home = streams.current()
                assert every <= home.before
                if how == "refused":
                    raise InterruptedError
                home.before.add(number)
                graphs.add(number)
                every.add(number)
                if how == "launched":
                    raise InterruptedError
