"""Engine: what the parts of an `Executor` share: where the program stands, and what carries it out."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ._arena import Arena
from ._carrier import Carrier
from ._cursor import Cursor
from ._flat import FlatBuffer
from ._given import Given
from ._lanes import Mark
from ._layout import Layout
from ._order import DefaultOrder, FixedOrder, Known
from ._place import Place
from ._plan import Plan
from ._positions import Move, Position, Positions
from ._runtime import Runtime
from ._spec import Spec
from ._staging import Staging
from ._stored import Stored
from ._unplanned import Unplanned

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
    digests: list[int]
    skipped: set[str]
    grads: dict[str, FlatBuffer]
    fence: bool
    newest: Mark
    flying: dict[str, Place]
    released: dict[str, Mark]
    occupied: set[str]

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
