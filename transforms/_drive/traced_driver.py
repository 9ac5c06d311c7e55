"""Driven modules where a graph is made of a step: the same unit calls and uses, with nothing in flight.

    eager     unshard, release and reduce as they come; the backward's gather goes where the forward's was
    traced    they are operations of the graph; where the backward has gathered a unit again a mark says so, and what
              would be read from the forward's gather is read from this one (`_graph.graph`)

Each graph has a copy of the model of its own: what a forward leaves in a module, as a cache, is of no use to others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from functional_fsdp import ScheduleError, State
from functional_fsdp._seams import GraphBuild, base_of, coordinate_of, given_in, torch_private, tracing_now
from functional_fsdp.extend import refuse

from .buffers import Buffers, Rule, place, written
from .driver import Driver, NoSession, caller, refuse_nesting
from .placeholders import check_dtypes
from .settings import Settings
from .unit_uses import UnitUse


class TracedDriver(Driver):
    """A driver whose verbs are operations of a graph."""

    def __init__(self, model: nn.Module, graph: GraphBuild) -> None:
        super().__init__(model)
        self.graph = graph

    @contextmanager
    def running(self, state: State, verb: str, trains: bool = False) -> Iterator[int]:
        """As `Driver.running`; there is no lineage to advance."""
        refuse_nesting(self.caller)
        self._stop()
        with torch_private.disable_current_modes():  # what is made is not of the graph
            self.attach(state)
            for unit_call in self.unit_calls:
                unit_call.rebound = []  # fake weights have nothing to point to
        self.debug = False
        try:
            self.caller, self.state, self.session = caller(), state, NoSession()
            yield 0
            self.look_back()
            self.release()
            if trains:
                self.graph.orders.setdefault(state.layout.hash, (*self.trace[0], *self.trace[1]))
        finally:
            self._stop()

    def refuse_tracer(self) -> None:
        """This tracer is the package's own."""

    def regathered(self, call: UnitUse) -> None:
        """Leave the mark: from here on this gather stands for the forward's."""
        assert call.unit_call is not None
        pairs = [(a, b) for a, b in zip(call.lent, self.tensors(call.unit_call.leaves), strict=True) if a.numel()]
        if pairs:  # in the step's own graph, and of no use there: tracing keeps it, and the pass takes it out
            first, second = ([*map(torch.Tensor.detach, found)] for found in zip(*pairs, strict=True))
            torch.ops.functional_fsdp.again(second[0], first, second)

    def note(self, path: str, copied: torch.Tensor) -> None:
        """As `Driver.note`; nothing is alive while a graph is made."""
        self.copies.append((path, copied, copied._version))


class Writes(torch_private.TorchDispatchMode):
    """Notes which storages operations write to, by what they say of themselves. Versions do not tell: the one of batch
    norm that is traced leaves them as they are. And has them refuse dtypes as they do when they run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Any] = {}  # and keeps them, so that no other gets their name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check_dtypes(func, args)
        for value in written(func, args, kwargs or {}):
            self.found[place(value)[0]] = value
        return func(*args, **(kwargs or {}))


class TracedBuffers(Buffers):
    """Buffers whose values nobody can look at: one that an operation writes to has changed."""

    writes: Writes | None = None

    def lend(self, state: State, device: torch.device, collects: bool = True, compares: bool = True) -> None:
        super().lend(state, device, collects, compares)
        self.writes = Writes()
        self.writes.__enter__()

    def restore(self) -> None:
        if self.writes is not None:
            self.writes.__exit__(None, None, None)
            self.writes = None
        super().restore()

    def note(self) -> None:
        self.live = set()
        self.before = {path: (held[name], held[name]._version, None)
                       for path, (held, name) in self.rest.items() if path not in self.places}  # fmt: skip

    def spoilt(self, t: torch.Tensor, counted: int, copied: torch.Tensor | None) -> bool:
        assert self.writes is not None
        return t._version != counted or place(t)[0] in self.writes.found

    def move(self, device: torch.device, given: Collection[str]) -> None:
        with torch_private.disable_current_modes():
            super().move(device, given)

    def compare(self, state: State) -> None:
        pass  # values are no part of a graph; the same model compares when it runs eagerly

    def told(self, t: torch.Tensor | None, path: str) -> bool:
        return t is None or t is not self.lent[path] or self.spoilt(t, self.versions[path], None)

    def other(self, t: torch.Tensor, path: str) -> bool:
        return True

    def coordinate(self, state: State) -> Mapping[str, int]:
        return coordinate_of(state)


class Twin(NamedTuple):
    """What a transform drives while a graph is made."""

    driver: TracedDriver
    buffers: TracedBuffers

    def begin_round(self, state: State) -> None:
        """As `extend.begin_round`."""
        if given_in(state) and base_of(state) in self.driver.graph.rounds:
            raise ScheduleError(
                "forward_backward: this State has the gradients of a whole round already (the call before had "
                "last_microbatch=True, the default), and no step has taken them: they would count twice. Take the "
                "step. Where microbatches add up, say last_microbatch=False in all calls but the last."
            )

    def end_round(self, state: State, last: bool) -> None:
        rounds = self.driver.graph.rounds
        (rounds.add if last else rounds.discard)(base_of(state))


def graph_for(verb: str) -> GraphBuild:
    """The graph that is being made. T.compile and `lower` trace what runs, and make one; torch.compile reads Python,
    and cannot follow a driver."""
    graph = tracing_now()
    if graph is None:
        said = (
            f"{verb} drives the schedule from Python, as it runs, which torch.compile cannot trace. Compile the step "
            "with T.compile(train_step); or compile units: T.forward_backward(..., compile=True)."
        )
        refuse("ScheduleError", said)
    return graph


def traced(graph: GraphBuild, transform: Any, driver: Driver, rule: Rule, settings: Settings) -> Twin:
    """The twin of a transform's driver for this graph, which holds for the model's modes."""
    if transform not in graph.driven:
        with torch_private.disable_current_modes():

            def modes() -> list[bool]:
                settings.follow()
                return settings.training

            graph.guards.append(modes)
            modes()
            own = TracedDriver(driver.bare(), graph)
            graph.driven[transform] = Twin(own, TracedBuffers(own.model, rule))
    found: Twin = graph.driven[transform]
    return found
