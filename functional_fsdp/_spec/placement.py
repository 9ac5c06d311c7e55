"""Placements and their presets: over which mesh axes each kind of state is sharded; everywhere else it is replicated.

| preset                      | weights | grads | main           | Megatron's name     | DeepSpeed's |
|-----------------------------|---------|-------|----------------|---------------------|-------------|
| ddp("data")                 | -       | -     | -              | no_shard            | ZeRO-0      |
| zero1("data")               | -       | -     | data           | optim               | ZeRO-1      |
| zero2("data")               | -       | data  | data           | optim_grads         | ZeRO-2      |
| zero3("data")               | data    | data  | data           | optim_grads_params  | ZeRO-3      |
| hsdp("replica", "shard")    | shard   | shard | shard          | HSDP                | MiCS        |
| hfsdp("replica", "shard")   | shard   | shard | replica, shard | HFSDP               | hpZ         |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from .._common.errors import SpecError

__all__ = ["Placement", "ddp", "hfsdp", "hsdp", "zero1", "zero2", "zero3"]


@dataclass(frozen=True)
class Placement:
    """Over which mesh axes each kind of state is sharded; over the other axes of `data` it is replicated.

    Attributes:
        weights: axes that shard what compute sees, outermost first.
        grads: axes that shard what is accumulated; contains `weights`.
        main: axes that shard main weights and optimizer state; contains `grads`.
        data: the axes over which gradients are averaged; contains `main` (default: `main`).
        name: what tables print.

    Raises:
        SpecError: if `weights ⊆ grads ⊆ main ⊆ data` does not hold.

    >>> Placement(grads=("data",), main=("data",)) == zero2("data")
    True
    """

    weights: tuple[str, ...] = ()
    grads: tuple[str, ...] = ()
    main: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    name: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.data:
            object.__setattr__(self, "data", self.main)
        kinds = ("weights", "grads", "main", "data")
        for kind in kinds:
            axes = getattr(self, kind)
            if isinstance(axes, str) or len(set(axes)) != len(axes):
                raise SpecError(
                    f"Placement.{kind}={axes!r}: expected a tuple of distinct mesh axis names, as ('data',)."
                )
            object.__setattr__(self, kind, tuple(axes))
        for small, large in pairwise(kinds):
            extra = [a for a in getattr(self, small) if a not in getattr(self, large)]
            if extra:
                raise SpecError(
                    f"Placement must satisfy weights ⊆ grads ⊆ main ⊆ data, but {small}={getattr(self, small)} is "
                    f"sharded over {extra} and {large}={getattr(self, large)} is not. Add {extra} to {large}, or drop "
                    f"it from {small}."
                )

    def apart(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """The axes of a mesh along which ranks have leaves of their own (experts, replicas that train apart): those of
        more than one rank that `data` leaves out."""
        return tuple(axis for axis, size in sizes.items() if size > 1 and axis not in self.data)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The axes that split a bucket, first split first: of weights, then of grads, then of main; innermost first.

        Every kind's shards are then contiguous, and a shard of main lies inside the shard of weights of the same rank.
        """
        order: list[str] = []
        for axes in (self.weights, self.grads, self.main):
            order += [a for a in reversed(axes) if a not in order]
        return tuple(order)

    def __fsdp_settings__(self) -> dict[str, tuple[str, ...]]:
        return {kind: getattr(self, kind) for kind in ("weights", "grads", "main", "data")}

    def __str__(self) -> str:
        if self.name:
            return self.name
        return ", ".join(f"{k}={'×'.join(getattr(self, k)) or '-'}" for k in ("weights", "grads", "main"))


def ddp(*axes: str) -> Placement:
    """Everything replicated over `axes`; gradients all-reduced. DDP, ZeRO-0, Megatron's `no_shard`."""
    return Placement(data=_axes("ddp", axes), name=_call("ddp", axes))


def zero1(*axes: str) -> Placement:
    """Main weights and optimizer state sharded over `axes`. ZeRO-1, Megatron's `optim`."""
    return Placement(main=_axes("zero1", axes), name=_call("zero1", axes))


def zero2(*axes: str) -> Placement:
    """Main weights, optimizer state and gradients sharded over `axes`. ZeRO-2, Megatron's `optim_grads`."""
    return Placement(grads=_axes("zero2", axes), main=axes, name=_call("zero2", axes))


def zero3(*axes: str) -> Placement:
    """Everything sharded over `axes`, weights gathered on use. ZeRO-3, FSDP, Megatron's `optim_grads_params`."""
    return Placement(weights=_axes("zero3", axes), grads=axes, main=axes, name=_call("zero3", axes))


def hsdp(replica: str, shard: str) -> Placement:
    """Everything sharded over `shard` (inner) and replicated over `replica` (outer). HSDP."""
    s = (shard,)
    return Placement(
        weights=s, grads=s, main=s, data=_axes("hsdp", (replica, shard)), name=_call("hsdp", (replica, shard))
    )


def hfsdp(replica: str, shard: str) -> Placement:
    """As `hsdp`, with main weights and optimizer state sharded over both axes. HFSDP."""
    both = _axes("hfsdp", (replica, shard))
    return Placement(weights=(shard,), grads=(shard,), main=both, name=_call("hfsdp", both))


def _axes(preset: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    if not axes or not all(isinstance(a, str) for a in axes):
        raise SpecError(f"{preset}{axes!r}: expected names of mesh axes, as {preset}('data').")
    return axes


def _call(preset: str, axes: tuple[str, ...]) -> str:
    return f"{preset}({', '.join(axes)})"
