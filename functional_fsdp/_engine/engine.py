"""Engine: what the parts of an `Executor` share: where the program stands, and what carries it out."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from .._distributed.lanes import Mark
from .._plan.cursor import Cursor
from .._plan.layout import Layout
from .._plan.order import DefaultOrder, FixedOrder, Known
from .._plan.plan import Plan
from .._plan.positions import Move, Position, Positions
from .._runtime.given import Given
from .._runtime.runtime import Runtime
from .._spec.spec import Spec
from .._storage.flat import FlatBuffer
from .._storage.place import Place
from .._storage.stored import Stored
from .._transports.carrier import Carrier
from .arena import Arena
from .arrival import Arrival
from .staging import Staging
from .unplanned import Unplanned

__all__ = ["Engine"]


class Engine:
    """Set by `Executor`, which says what each is."""

    run: Runtime
    layout: Layout
    spec: Spec
    plan: Plan
    order: Known
    positions: Positions
    position: Position
    arena: Arena
    staging: Staging
    unplanned: Unplanned
    given: Given
    carrier: Carrier
    stays: bool
    digests: list[int]
    arriving: tuple[str, ...]
    arrivals: dict[str, Arrival]
    skipped: set[str]
    grads: dict[str, FlatBuffer]
    fence: bool
    newest: Mark
    flying: dict[str, Place]
    released: dict[str, Mark]
    occupied: dict[str, Any]
    written: list[str]

    @property
    def cursor(self) -> Cursor:
        return self.position.cursor

    @property
    def _planned(self) -> bool:
        """Whether there is an order of use that is not only a guess."""
        return isinstance(self.order, FixedOrder | DefaultOrder)

    def move(self, kind: str, units: tuple[str, ...] = ()) -> Move:
        """What follows from an event. Changes nothing.

        Raises:
            ScheduleError: as `advance`.
        """
        found = self.position.moves.get((kind, units))  # nearly always
        return self.positions.move(self.position, (kind, units)) if found is None else found

    if TYPE_CHECKING:

        def share(self) -> None: ...
        def carry_out(self, state: Stored, move: Move) -> None: ...
        def beside(self, state: Stored) -> AbstractContextManager[None]: ...
        def adopt(self, grads: object) -> None: ...
        def _gather(self, state: Stored, index: int) -> None: ...
