"""Schedule: what a user says about when units are gathered and what stays gathered. `plan` works it out on a layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ._errors import SpecError
from ._tree import match

__all__ = ["Schedule", "means"]


@dataclass(frozen=True, init=False)
class Schedule:
    """What is used when, how far ahead it is gathered, and what stays gathered. Frozen, hashable, equal by value.

    Args:
        order: the units in order of use, with repeats; None: all units forward, then backward.
        prefetch: how many uses ahead of its own a unit's gather starts; 0 gathers when the unit is asked for. A mapping
            sets it per unit: `{"embed": 0, "blocks.*": 2}`, first match wins, 1 where nothing matches.
        keep: what stays gathered from its first use to its last. None: what would occupy its bytes in between anyway
            (the last one used; at depth d, the last d // 2 + 1). Names or patterns: exactly these. "all": everything.
            A number of bytes: beside the default, the set that saves the most gathers and holds no more than that.
        debug: released bytes are filled with NaN, so that a weight used past its release shows.

    Raises:
        SpecError: a value of the wrong kind, a negative depth or budget, an empty order.

    >>> Schedule(prefetch=2, keep={"head"}) == Schedule(prefetch=2, keep=["head"])
    True
    """

    order: tuple[str, ...] | None
    prefetch: int | tuple[tuple[str, int], ...]
    keep: Literal["all"] | int | tuple[str, ...] | None
    debug: bool

    def __init__(
        self,
        order: Sequence[str] | None = None,
        prefetch: int | Mapping[str, int] = 1,
        keep: Literal["all"] | int | Collection[str] | None = None,
        debug: bool = False,
    ) -> None:
        if order is not None:
            if isinstance(order, str) or not all(map(_text, order)):
                raise SpecError(
                    f"Schedule(order={order!r}): expected the names of units in order of use, as ('a', 'b', 'b', 'a')."
                )
            if not order:
                raise SpecError(
                    "Schedule(order=()): expected at least 1 use, got 0. None means forward, then backward."
                )
        depths = prefetch if isinstance(prefetch, Mapping) else {"*": prefetch}
        for name, depth in depths.items():
            if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
                where = (
                    f"Schedule(prefetch): {name!r} maps to" if isinstance(prefetch, Mapping) else "Schedule(prefetch):"
                )
                raise SpecError(f"{where} {depth!r}; expected a number of uses of at least 0 (0 gathers on demand).")
        if isinstance(keep, Collection):
            wrong = keep != "all" and (isinstance(keep, str) or not all(map(_text, keep)))
        else:
            wrong = keep is not None and (isinstance(keep, bool) or not isinstance(keep, int))
        if wrong:
            one = keep if isinstance(keep, str) else "blocks.0"
            raise SpecError(
                f"Schedule(keep={keep!r}): expected None, 'all', a set of units, or a number of bytes (an int). "
                f"One unit is {{{one!r}}}; nothing is ()."
            )
        if isinstance(keep, int) and keep < 0:
            raise SpecError(f"Schedule(keep={keep}): a budget is at least 0 bytes. () keeps nothing.")
        put = object.__setattr__
        put(self, "order", None if order is None else tuple(order))
        put(self, "prefetch", tuple(prefetch.items()) if isinstance(prefetch, Mapping) else prefetch)
        put(self, "keep", keep if keep is None or isinstance(keep, int | str) else tuple(sorted(set(keep))))
        put(self, "debug", bool(debug))

    def depth(self, unit: str) -> int:
        """How many uses ahead of its own this unit's gather starts."""
        if isinstance(self.prefetch, int):
            return self.prefetch
        return next((depth for pattern, depth in self.prefetch if means(pattern, unit)), 1)


def _text(value: object) -> bool:
    return isinstance(value, str)


def means(pattern: str, unit: str) -> bool:
    """Whether a name or pattern of a schedule means this unit."""
    return pattern == unit or match(pattern, unit) is not None
