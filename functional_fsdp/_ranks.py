"""Ranks: who computes with a state, as a transform sees it: its mesh, this rank, the lineage, and random numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Protocol, cast

from ._runtime import Runtime, runtime_of
from ._state import State

__all__ = ["Lineage", "Ranks", "lineage", "ranks_of", "seeds"]


class Ranks:
    """The ranks of a state's mesh, and which of them this one is.

    Attributes:
        device: where this rank's tensors are.
        size: how many ranks there are; index: which of them this is; rank: its number in torch.distributed.
        coordinate: {axis: this rank's place along it}.
        generators: {microbatch: torch.Generator} that captured steps draw from; streams: of the lanes, on GPUs, or
            None. For what captures graphs.
    """

    def __init__(self, run: Runtime) -> None:
        self._run = run
        self.device, self.size, self.coordinate = run.device, run.size, run.coordinate
        self.index, self.rank = run.rank, run.ranks[run.rank]
        self.generators, self.streams = run.generators, run.streams

    @property
    def capturing(self) -> bool:
        """Whether a step is being captured into a CUDA graph."""
        return self._run.capturing

    def everyone(self, value: Any, what: str) -> list[Any]:
        """Every rank's value, by index: a small object that pickles.

        Args:
            what: what it is for, the same on every rank.

        Raises:
            CommError: a rank is gone, or never came. ScheduleError: a rank came with another exchange. RestartError: a
            rank was stopped in it.

        Collective: a gather on the host, which waits for all.
        """
        return self._run.everyone(value, what)


def ranks_of(state: State) -> Ranks:
    """The ranks of a state's mesh.

    Example: `extend.ranks_of(state).device`.
    """
    return Ranks(runtime_of(state.spec.mesh))


def seeds(state: State, *what: Any, step: int | None = None) -> Callable[..., int]:
    """A function from names to seeds, the same whenever the step is taken again: from (what, state.rng, steps, names).

    A rank that is to draw numbers of its own has its index among the names. Reads `state.rng`, once, on the host.

    Args:
        step: how many steps were taken, where the lineage does not know.

    Example: `generator.manual_seed(extend.seeds(state, "noise")(leaf.path))`.
    """
    where = " ".join(map(str, (*what, int(state.rng), state.steps if step is None else step)))

    def seed(*names: Any) -> int:
        text = " ".join(map(str, (where, *names)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")

    return seed


class Lineage(Protocol):
    """A `shard`, `init` or `load` and all steps from it: one object for all of its states.

    commits: how many steps were taken, as far as the host knows: of compiled ones in a row it knows one. broken: why
    its states are of no more use; "" if they are. offset: int64 [], steps that the count of its states leaves out.
    """

    commits: int
    broken: str
    offset: Any

    def follow(self) -> None:
        """Know of compiled steps that were taken, of which no Python ran."""

    def stepped(self, state: State) -> State:
        """The state after a compiled step that was taken from `state`, of which no Python ran. Consumes `state`."""
        ...


def lineage(state: State) -> Lineage:
    """The lineage of a state: the same object for every state of it, and weakly referable.

    Example: `extend.lineage(state) is extend.lineage(fsdp.step(state))`.
    """
    return cast(Lineage, state.token.ledger)
