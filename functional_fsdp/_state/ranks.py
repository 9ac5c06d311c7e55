"""Ranks: who computes with a state, as a transform sees it: its mesh, this rank, the lineage, and random numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from .._common.device import default_generator
from .._common.tracing import refuse, traced_as
from .._runtime.runtime import Runtime, runtime_of
from .lineage import Lineage
from .state import State

__all__ = ["Lineage", "Ranks", "check_between_steps", "lineage_of", "ranks_of", "seeds"]


class Ranks:
    """The ranks of a state's mesh, and which of them this one is.

    Attributes:
        device: where this rank's tensors are.
        size: how many ranks there are; index: which of them this is; rank: its number in torch.distributed.
        coordinate: {axis: this rank's place along it}.
        generators: {microbatch: torch.Generator} that captured steps draw from; draws: {(microbatch, place): offset}
            of what a step draws again, in a recomputation; again: generators for it. lanes: those of the mesh, which on
            GPUs have `joined` and `catch_up`. For what captures graphs.
    """

    def __init__(self, run: Runtime) -> None:
        self._run = run
        self.device, self.size, self.coordinate = run.device, run.size, run.coordinate
        self.index, self.rank = run.rank, run.ranks[run.rank]
        self.generators, self.draws, self.again = run.generators, run.draws, run.again
        self.lanes: Any = run.lanes

    @property
    def generator(self) -> Any:
        """The torch.Generator that a GPU draws from by default; None on the CPU, which draws from the host's."""
        return default_generator(self.device)

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

    def any(self, mine: bool, what: str) -> bool:
        """Whether it is so on any rank, where every rank asks `what`. As `everyone`, with 16 bytes.

        Collective: a vote on the host, which waits for all.
        """
        self._run.meet(what)
        return self._run.most(what, int(mine)) > 0


def ranks_of(state: State) -> Ranks:
    """The ranks of a state's mesh.

    Example: `extend.ranks_of(state).device`.
    """
    return Ranks(runtime_of(state.spec.mesh))


NO_HOST = "reads state.rng on the host, which a compiled step cannot. Call it outside torch.compile."


@traced_as(lambda state, *what, step=None: refuse("ScheduleError", f"seeds: {NO_HOST}"))
def seeds(state: State, *what: Any, step: int | None = None) -> Callable[..., int]:
    """A function from names to seeds, the same whenever the step is taken again: from (what, state.rng, steps, names).

    A rank that is to draw numbers of its own has its index among the names. Reads `state.rng`, once, on the host.

    Args:
        step: how many steps were taken, where the lineage does not know.

    Raises:
        ScheduleError: in a compiled step.

    Example: `generator.manual_seed(extend.seeds(state, "noise")(leaf.path))`.
    """
    where = " ".join(map(str, (*what, int(state.rng), state.steps if step is None else step)))

    def seed(*names: Any) -> int:
        text = " ".join(map(str, (where, *names)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")

    return seed


def check_between_steps(state: State, what: str) -> None:
    """Raise StaleStateError unless this is a valid state between steps, as whoever copies or keeps it needs.

    Args:
        what: who asks, for the error.

    Example: `extend.check_between_steps(state, "my_capture")`.
    """
    state._resting(what)


def lineage_of(state: State) -> Lineage:
    """The lineage of a state: the same object for every state of it, and weakly referable.

    Example: `extend.lineage_of(state) is extend.lineage_of(fsdp.step(state))`.
    """
    return state.version.lineage
