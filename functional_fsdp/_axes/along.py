"""Along: how a leaf lies along a mesh axis of the model's own (tensor, sequence, expert parallel), as a value.

    Along("tp", 0)                 a slice along dim 0: [n / tp, m] of [n, m]
    Along("tp", 0, parts=3)        of a fused leaf [q; k; v] the rank's slice of each part, end to end
    Along("tp")                    the same on every rank; gradients are the same, too
    Along("tp", grads="sum")       the same on every rank; each rank has a summand of the gradient

Source: slices and equal leaves are what shard_map calls "varying" and "invariant" along an axis (JAX's documentation).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .._common.calls import provide
from .._common.errors import SpecError, expect

RULES = ("equal", "sum")


@dataclass(frozen=True)
class Along:
    """How a leaf lies along a mesh axis along which the model itself communicates, for `Spec(own=)`.

    Args:
        axis: of the mesh; no placement of the leaf averages over it.
        dim: the dim that is cut into one slice for each rank, in order of ranks; None: every rank has all of it.
        parts: of a fused leaf, how many parts lie along the dim, or their relative sizes, as (4, 1, 1) for queries,
            keys and values of grouped attention. Each is cut on its own; a rank has its slices end to end.
        grads: of a leaf that every rank has. "equal": each rank comes to the same gradient, and nothing is sent; in
            debug mode the first step compares them. "sum": each rank has a summand, as of a norm over tokens that are
            cut along the axis: they are added up, whatever `average` says of the data.

    Raises:
        SpecError: a rule that there is not, one for a leaf that is cut, parts of a leaf that is not, or of no size.

    >>> Along("tp", 0, parts=(4, 1, 1))
    Along('tp', 0, parts=(4, 1, 1))
    """

    axis: str
    dim: int | None = None
    parts: int | tuple[int, ...] = 1
    grads: str = "equal"

    def __post_init__(self) -> None:
        expect("Along(parts)", self.parts, (int, Iterable), "a number of parts, or their relative sizes")
        sizes = self.parts if isinstance(self.parts, int) else tuple(self.parts)
        object.__setattr__(self, "parts", sizes)
        if not isinstance(self.axis, str) or not isinstance(self.dim, int | None):
            raise SpecError(f"{self}: expected the name of a mesh axis, and a dim or None.")
        every = (sizes,) if isinstance(sizes, int) else sizes
        if not every or any(not isinstance(n, int) or n < 1 for n in every):
            raise SpecError(f"{self}: expected a number of parts, or their relative sizes, from 1 on.")
        if self.dim is None and sizes != 1:
            raise SpecError(f"{self}: it has parts and no dim, along which they lie. Say which.")
        if self.grads not in RULES:
            raise SpecError(f"{self!r}: expected grads to be one of {', '.join(map(repr, RULES))}.")
        if self.dim is not None and self.grads != "equal":
            raise SpecError(f"{self}: a rule for gradients of a leaf that is cut, of which each rank has its own.")

    @property
    def shares(self) -> tuple[int, ...]:
        """Relative sizes of the parts."""
        return (1,) * self.parts if isinstance(self.parts, int) else self.parts

    def __repr__(self) -> str:
        said = [repr(self.axis)] + ([] if self.dim is None else [repr(self.dim)])
        said += [f"parts={self.parts!r}"] * (self.parts != 1) + [f"grads={self.grads!r}"] * (self.grads != "equal")
        return f"Along({', '.join(said)})"

    def __str__(self) -> str:
        if self.dim is None:
            rule = {"equal": "gradients already equal", "sum": "gradients summed"}
            return f"equal along {self.axis}, {rule[self.grads]}"
        parts = "" if self.parts == 1 else f", each of {self.parts} parts"
        return f"cut along {self.axis} in dim {self.dim}{parts}"


def alongs(pattern: str, value: Any, axes: Mapping[str, int]) -> tuple[Along, ...]:
    """What `Spec(own=)` says of a pattern, as one for each axis: "tp", ("tp", 0), an Along, or a list of these.

    Raises:
        SpecError: something else; an axis that the mesh does not have, or that is there twice.
    """
    some = value if isinstance(value, list) or (isinstance(value, tuple) and not _pair(value)) else [value]
    found = tuple(_one(pattern, one) for one in some)
    names = [one.axis for one in found]
    for name in names:
        if name not in axes:
            raise SpecError(
                f"Spec(own): {pattern!r} names the axis {name!r}, which the mesh does not have. Its axes are "
                f"{', '.join(map(repr, axes))}."
            )
        if names.count(name) > 1:
            raise SpecError(f"Spec(own): {pattern!r} names the axis {name!r} twice. Say once how leaves lie along it.")
    return found


def _pair(value: Iterable[Any]) -> bool:
    return [type(one) for one in value] == [str, int]


def _one(pattern: str, value: Any) -> Along:
    if isinstance(value, Along):
        return value
    if isinstance(value, str):
        return Along(value)
    if isinstance(value, tuple) and _pair(value):
        return Along(*value)
    raise SpecError(
        f"Spec(own): {pattern!r} maps to {value!r}; expected 'tp' for a leaf that is equal along the axis, ('tp', 0) "
        "for one that is cut along dim 0, an Along, or a list of these."
    )


provide("axes", alongs)
