"""Issued: what an engine starts, beside what `advance` alone says of the same events, without ranks."""

from __future__ import annotations

from typing import Any

import functional_fsdp as fsdp
from functional_fsdp._plan.cursor import Cursor, advance

from .verdict import Wrong


class Issued:
    """Watches the executor of a state."""

    def __init__(self, state: fsdp.State) -> None:
        self.executor: Any = state._executor
        self.events: list[Any] = []  # (plan, cursor, event, the cursor after it)
        self.gathers: list[str] = []
        self.reductions: list[int] = []
        self.states: list[Any] = []
        executor: Any = self.executor
        progress, gathers = executor.progress, executor.gathers
        make, start, follow = progress.make, gathers.start, executor.follow

        def made(move: Any) -> Any:
            position = progress.position
            event = next((event for event, known in position.items() if known is move), None)
            if event is not None:  # else it is off the plan
                self.events.append((progress.plan, position.cursor, event, move[0].cursor))
            return make(move)

        def gathered(state: Any, index: int) -> None:
            self.gathers.append(progress.plan.gathers[index].unit)
            start(state, index)

        def followed(plan: Any) -> None:
            follow(plan)
            if plan is not None:
                self._watch_reductions()

        progress.make, gathers.start, executor.follow = made, gathered, followed
        self._watch_reductions()

    def _watch_reductions(self) -> None:
        reduce = self.executor.reductions.staging.reduce

        def reduced(index: int, *args: Any) -> None:
            reduce(index, *args)
            self.reductions.append(index)

        self.executor.reductions.staging.reduce = reduced

    def keep(self, state: fsdp.State) -> None:
        """A state, whose cursor is not to change any more."""
        self.states.append((state, state.cursor, repr(state.cursor)))

    def check(self) -> None:
        """Item by item."""
        gathers: list[str] = []
        reductions: list[int] = []
        before: Cursor | None = None
        for number, (plan, cursor, event, after) in enumerate(self.events):
            if before is not None and cursor not in (before, Cursor(plan)):
                raise Wrong(f"event {number}, {event}, came at {cursor!r}, and the one before had led to {before!r}")
            before, actions = advance(plan, cursor, event)
            if before != after:
                raise Wrong(f"event {number}, {event}, led to {after!r}, and alone to {before!r}")
            gathers += [plan.gathers[what].unit for kind, what in actions if kind == "gather"]
            reductions += [i for kind, what in actions if kind == "reduce" for i, _ in what]
        if gathers != self.gathers:
            raise Wrong(f"the engine gathered {self.gathers}, and advance alone says {gathers}")
        if reductions != self.reductions:
            raise Wrong(f"the engine reduced {self.reductions}, and advance alone says {reductions}")
        for state, cursor, printed in self.states:
            if state.cursor != cursor or repr(state.cursor) != printed:
                raise Wrong("the cursor of an old state has changed")
