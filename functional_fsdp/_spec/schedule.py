"""Schedule: what a user says about when units are gathered and what stays gathered. `plan` works it out on a layout."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .._common.errors import SpecError, expect
from .._common.tree import PathIndex, bytes_text

Order = tuple[str | tuple[str, ...], ...]  # units in order of use; a tuple of them is used at once


@dataclass(frozen=True, init=False)
class Schedule:
    """What is used when, how far ahead it is gathered, and what stays gathered. Frozen, hashable, equal by value.

    Args:
        order: the units in order of use, with repeats; None: all units forward, then backward, a tied one again where
            its further paths lie. A group is used at once: `("embed", "b0", ("embed", "head"), "b0", "embed")`.
            "recorded": the order is recorded in the first step.
        prefetch: how many uses ahead of its own a unit's gather starts; 0 gathers when the unit is asked for. A mapping
            sets it per unit: `{"embed": 0, "blocks.*": 2}`, first match wins, 1 where nothing matches.
        keep: what stays gathered from its first use to its last. None: what would occupy its bytes in between anyway
            (the last one used; at depth d, the last d // 2 + 1). Names or patterns: exactly these. "all": everything.
            "frozen": beside the default, units of which more bytes are frozen than trained, as packed bases. A number
            of bytes: beside the default, the set that saves the most gathers and holds no more than that.
            What is kept so that nothing else lies in its bytes (all of "all") is gathered once a step, for all of its
            microbatches; in a driven step whose order is only found, from the second step on.
        debug: released bytes are filled with NaN, so that a weight used past its release shows. In the first step
            gradients of leaves that are equal along axes of the model's own (`Spec(own=)`) are compared along these.
        overlap_update: on GPUs, `step` updates a bucket from the moment when its gradient is reduced, on a lane of its
            own, beside what is left of the backward; in a CUDA graph, and wherever the host is ahead of the device.
            Then between `reduce` and `step` main weights, optimizer state and whatever an update reads beside them (a
            tensor that a learning rate is computed from) are neither to be read nor to be changed: they may be new
            already. It is for optimizers that have `by_bucket` and for sharded main weights; where something looks at
            all gradients or weights before `step`, as clipping or `unshard(state)` does, the update follows it as ever.
            A step that is traced is the compiler's to order. In `T.cuda_graph` a bucket whose gradients come once a
            step is updated where they arrive, in pieces that stay in the GPU's cache, with the same bits, if the
            optimizer has `for_step`: there are no main gradients then, and whoever reads those calls
            `finish_reductions` first, in every step.

    Raises:
        SpecError: a value of the wrong kind, a negative depth or budget, an empty order or group, a group that
            names a unit twice.

    >>> Schedule(prefetch=2, keep={"head"}) == Schedule(prefetch=2, keep=["head"])
    True
    >>> print(Schedule(prefetch=2, keep={"head"}))
    forward, then backward; prefetch 2; keeps head
    """

    order: Order | Literal["recorded"] | None
    prefetch: int | tuple[tuple[str, int], ...]
    keep: Literal["all", "frozen"] | int | tuple[str, ...] | None
    debug: bool
    overlap_update: bool

    def __init__(
        self,
        order: Sequence[str | Sequence[str]] | Literal["recorded"] | None = None,
        prefetch: int | Mapping[str, int] = 1,
        keep: Literal["all", "frozen"] | int | Collection[str] | None = None,
        debug: bool = False,
        overlap_update: bool = False,
    ) -> None:
        depths = prefetch if isinstance(prefetch, Mapping) else {"*": prefetch}
        for name, depth in depths.items():
            if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
                said = "expected a number of uses of at least 0 (0 gathers on demand)"
                raise SpecError(f"Schedule(prefetch): {name!r} maps to {depth!r}; {said}.")
        if isinstance(keep, Collection):
            wrong = keep not in ("all", "frozen") and (isinstance(keep, str) or not all(map(_text, keep)))
        else:
            wrong = keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 0)
        if wrong:
            one = keep if isinstance(keep, str) else "blocks.0"
            raise SpecError(
                f"Schedule(keep={keep!r}): expected None, 'all', 'frozen', a set of units, or a number of bytes (an "
                f"int, at least 0). One unit is {{{one!r}}}; nothing is ()."
            )
        put = object.__setattr__
        put(self, "order", order if order is None or order == "recorded" else _order(order))
        put(self, "prefetch", tuple(prefetch.items()) if isinstance(prefetch, Mapping) else prefetch)
        put(self, "keep", keep if keep is None or isinstance(keep, int | str) else tuple(sorted(set(keep))))
        put(self, "debug", bool(debug))
        put(self, "overlap_update", bool(overlap_update))

    def depth(self, unit: str) -> int:
        """How many uses ahead of its own this unit's gather starts."""
        return self.depths([unit])[unit]

    def depths(self, units: Sequence[str]) -> dict[str, int]:
        """How many uses ahead of its own each unit's gather starts."""
        if isinstance(self.prefetch, int):
            return dict.fromkeys(units, self.prefetch)
        rules = PathIndex(units).first_rules(self.prefetch)
        return {unit: 1 if n is None else self.prefetch[n][1] for unit, n in zip(units, rules, strict=True)}

    def ordered(self, order: Sequence[str | Sequence[str]] | None) -> Schedule:
        """The same with this order: what a recorded schedule becomes after its first step."""
        depths = self.prefetch if isinstance(self.prefetch, int) else dict(self.prefetch)
        return Schedule(order, depths, self.keep, self.debug, self.overlap_update)

    def __str__(self) -> str:
        order = "forward, then backward"
        if self.order is not None:
            order = (
                "order recorded in the first step" if self.order == "recorded" else f"{len(self.order)} uses in order"
            )
        prefetch = self.prefetch if isinstance(self.prefetch, int) else ", ".join(f"{k}: {v}" for k, v in self.prefetch)
        said = [order, f"prefetch {prefetch}"]
        if self.keep is not None:
            kept = "what is frozen" if self.keep == "frozen" else "everything"
            kept = ", ".join(self.keep) or "nothing" if isinstance(self.keep, tuple) else kept
            said.append(f"keeps {f'{bytes_text(self.keep)} more' if isinstance(self.keep, int) else kept}")
        if self.overlap_update:
            said.append("updates overlap")
        return "; ".join([*said, "debug"] if self.debug else said)


def schedule_of(where: str, schedule: Schedule | None) -> Schedule:
    """What was given as a schedule; the default for None."""
    said = "a Schedule, as fsdp.Schedule(prefetch=2)"
    return expect(where, Schedule() if schedule is None else schedule, Schedule, said)


def _text(value: object) -> bool:
    return isinstance(value, str)


def _order(order: Sequence[str | Sequence[str]]) -> Order:
    """Lists as tuples. A group of one is that unit."""
    order = order if isinstance(order, str) or not isinstance(order, Iterable) else tuple(order)
    groups: list[Any] = [None if isinstance(one, str) else one for one in order] if isinstance(order, tuple) else [0]
    if not all(isinstance(g, Sequence) and all(map(_text, g)) for g in groups if g is not None):
        raise SpecError(
            f"Schedule(order={order!r}): expected the names of units in order of use, as ('a', 'b', 'b', 'a'), a tuple "
            "of names where several are used at once, or 'recorded'."
        )
    if not order:
        raise SpecError("Schedule(order=()): expected at least 1 use, got 0. None means forward, then backward.")
    for k, group in enumerate(groups):
        if group is not None and not 0 < len(group) == len(set(group)):
            raise SpecError(
                f"Schedule(order): use {k} is the group {tuple(group)!r}; expected at least 1 unit, each once. What is "
                "used at once is named once."
            )
    return tuple(one if isinstance(one, str) else one[0] if len(one) == 1 else tuple(one) for one in order)


def named(patterns: Sequence[str], units: Sequence[str]) -> set[str]:
    """The units that names or patterns of a schedule mean."""
    index = PathIndex(units)
    return {units[i] for pattern in patterns for i in index.hits(pattern)}
