"""Placements and their presets: over which mesh axes each kind of state is sharded; everywhere else it is replicated.

| preset                      | weights | grads | main           | Megatron's name     | DeepSpeed's |
|-----------------------------|---------|-------|----------------|---------------------|-------------|
| ddp("data")                 | -       | -     | -              | no_shard            | ZeRO-0      |
| zero1("data")               | -       | -     | data           | optim               | ZeRO-1      |
| zero2("data")               | -       | data  | data           | optim_grads         | ZeRO-2      |
| zero3("data")               | data    | data  | data           | optim_grads_params  | ZeRO-3      |
| hsdp("replica", "shard")    | shard   | shard | shard          | HSDP                | MiCS        |
| hfsdp("replica", "shard")   | shard   | shard | replica, shard | HFSDP               | hpZ         |

A new preset is a function here. `docs/guide/strategies.md` and `docs/concepts.md` have this table, too. CONTRIBUTING.md
says which tables of tests name presets. All else follows from the four tuples: nobody asks for a preset by its name.

Each takes `memory_kind="pinned_host"`, JAX's word (jax.sharding, "memory_kind"): what persists then lies in pinned
memory of the host.

Cuts: which part of a whole leaf a rank has, along mesh axes of the model's own. Pure.

whole [12, m], two ranks along "tp", parts (4, 1, 1)          q q q q q q q q | k k | v v
rank 0    [6, m]                                              q q q q         | k   | v
rank 1    [6, m]                                                      q q q q |   k |   v
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from .._common.errors import SpecError
from .along import Along

__all__ = [
    "MEMORY_KINDS",
    "Cut",
    "Cuts",
    "Placement",
    "boxes",
    "cut_of",
    "cuts_of",
    "ddp",
    "hfsdp",
    "hsdp",
    "join",
    "part_shape",
    "whole_shape",
    "zero1",
    "zero2",
    "zero3",
]  # fmt: skip

MEMORY_KINDS = ("device", "pinned_host")
KINDS = ("weights", "grads", "main")
Memory = str | Mapping[str, str]


@dataclass(frozen=True)
class Placement:
    """Over which mesh axes each kind of state is sharded; over the other axes of `data` it is replicated.

    Attributes:
        weights: axes that shard what compute sees, outermost first.
        grads: axes that shard what is accumulated; contains `weights`.
        main: axes that shard main weights and optimizer state; contains `grads`.
        data: the axes over which gradients are averaged; contains `main` (default: `main`).
        memory_kind: "device", or "pinned_host": all of the state lies in the host's memory, and a GPU has two buffers,
            through which `step` updates it. A mapping chooses: `{"main": "pinned_host"}` is main weights and optimizer
            state, without which there are no others; "grads" main gradients; "weights" the compute copy that gathers
            then read. Where that is not sharded as main weights are, it stays on the device.
        name: what tables print.

    Raises:
        SpecError: if `weights ⊆ grads ⊆ main ⊆ data` does not hold; another kind of memory.

    >>> Placement(grads=("data",), main=("data",)) == zero2("data")
    True
    """

    weights: tuple[str, ...] = ()
    grads: tuple[str, ...] = ()
    main: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    memory_kind: str | Mapping[str, str] | tuple[str, ...] = "device"
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
        object.__setattr__(self, "memory_kind", _on_host(self.memory_kind))

    @property
    def on_host(self) -> tuple[str, ...]:
        """The kinds that lie in the host's memory."""
        kinds: tuple[str, ...] = KINDS if self.memory_kind == "pinned_host" else ()
        return self.memory_kind if isinstance(self.memory_kind, tuple) else kinds

    @property
    def copy_on_host(self) -> bool:
        """Whether the compute copy, which gathers read, lies there. One that is whole, or that ranks refresh by a
        collective, stays on the device."""
        return "weights" in self.on_host and bool(self.weights) and {*self.weights} == {*self.main}

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

    @cached_property
    def hops(self) -> tuple[str, ...]:
        """The axes along which gradients are reduced, in order: those that shard main weights first."""
        order = [axis for axis in self.order if axis in self.main]
        return (*order, *(axis for axis in self.data if axis not in order))

    def __fsdp_settings__(self) -> dict[str, object]:
        return {kind: getattr(self, kind) for kind in ("weights", "grads", "main", "data", "memory_kind")}

    def __str__(self) -> str:
        if self.name:
            return self.name
        said = ", ".join(f"{k}={'×'.join(getattr(self, k)) or '-'}" for k in ("weights", "grads", "main"))
        return f"{said}{_said(self.memory_kind)}"


def ddp(*axes: str, memory_kind: Memory = "device") -> Placement:
    """Everything replicated over `axes`; gradients all-reduced. DDP, ZeRO-0, Megatron's `no_shard`."""
    return _preset("ddp", axes, memory_kind)


def zero1(*axes: str, memory_kind: Memory = "device") -> Placement:
    """Main weights and optimizer state sharded over `axes`. ZeRO-1, Megatron's `optim`."""
    return _preset("zero1", axes, memory_kind, main=axes)


def zero2(*axes: str, memory_kind: Memory = "device") -> Placement:
    """Main weights, optimizer state and gradients sharded over `axes`. ZeRO-2, Megatron's `optim_grads`."""
    return _preset("zero2", axes, memory_kind, grads=axes, main=axes)


def zero3(*axes: str, memory_kind: Memory = "device") -> Placement:
    """Everything sharded over `axes`, weights gathered on use. ZeRO-3, FSDP, Megatron's `optim_grads_params`."""
    return _preset("zero3", axes, memory_kind, weights=axes, grads=axes, main=axes)


def hsdp(replica: str, shard: str, *, memory_kind: Memory = "device") -> Placement:
    """Everything sharded over `shard` (inner) and replicated over `replica` (outer). HSDP."""
    s = (shard,)
    return _preset("hsdp", (replica, shard), memory_kind, weights=s, grads=s, main=s)


def hfsdp(replica: str, shard: str, *, memory_kind: Memory = "device") -> Placement:
    """As `hsdp`, with main weights and optimizer state sharded over both axes. HFSDP."""
    s, both = (shard,), (replica, shard)
    return _preset("hfsdp", both, memory_kind, weights=s, grads=s, main=both)


def _on_host(memory_kind: Any) -> str | tuple[str, ...]:
    """ "device", "pinned_host", or the kinds that lie in the host's memory where only some do."""
    if memory_kind in MEMORY_KINDS or (isinstance(memory_kind, tuple) and memory_kind and {*memory_kind} < {*KINDS}):
        return memory_kind
    if not isinstance(memory_kind, Mapping):
        raise SpecError(
            f"Placement(memory_kind={memory_kind!r}): expected one of {', '.join(map(repr, MEMORY_KINDS))}, or a "
            "mapping, as {'main': 'pinned_host'}."
        )
    for kind, memory in memory_kind.items():
        if kind not in KINDS or memory not in MEMORY_KINDS:
            raise SpecError(
                f"Placement(memory_kind={{{kind!r}: {memory!r}}}): expected one of {', '.join(map(repr, KINDS))}, and "
                f"one of {', '.join(map(repr, MEMORY_KINDS))}."
            )
    there = tuple(kind for kind in KINDS if memory_kind.get(kind) == "pinned_host")
    if there and "main" not in there:
        raise SpecError(
            f"Placement(memory_kind={dict(memory_kind)!r}): main weights would lie on the device, and "
            f"{', '.join(there)} would not. Add 'main': 'pinned_host', which is the largest part."
        )
    return "device" if not there else "pinned_host" if there == KINDS else there


def _said(memory_kind: Any) -> str:
    if memory_kind == "device":
        return ""
    some = memory_kind if isinstance(memory_kind, str) else f"pinned_host of {' and '.join(memory_kind)}"
    return f", memory_kind={some}"


def _preset(preset: str, axes: tuple[str, ...], memory_kind: Memory, **kinds: tuple[str, ...]) -> Placement:
    """The placement over these data axes, named by its call."""
    if not axes or not all(isinstance(a, str) for a in axes):
        raise SpecError(f"{preset}{axes!r}: expected names of mesh axes, as {preset}('data').")
    name = f"{preset}({', '.join(axes)}{_said(_on_host(memory_kind))})"
    return Placement(**kinds, data=axes, memory_kind=memory_kind, name=name)


class Cut(NamedTuple):
    """A leaf is cut along a mesh axis of so many ranks: of each part along `dim` a rank has a slice.

    sizes: elements of the parts along `dim`, before this cut.
    """

    axis: str
    ranks: int
    dim: int
    sizes: tuple[int, ...]

    def spans(self, rank: int) -> list[tuple[int, int]]:
        """(start, count) along `dim` of what a rank has of each part."""
        found, at = [], 0
        for size in self.sizes:
            found.append((at + rank * (size // self.ranks), size // self.ranks))
            at += size
        return found


Cuts = tuple[Cut, ...]


def cuts_of(
    path: str, shape: Sequence[int], alongs: Sequence[Along], sizes: Mapping[str, int]
) -> tuple[Cuts, list[int]]:
    """The cuts of a leaf, and the shape that a rank then has.

    Raises:
        SpecError: no such dim; parts that do not divide.
    """
    local, found = list(shape), []
    for one in alongs:
        if one.dim is None:
            continue
        if not -len(local) <= one.dim < len(local):
            raise SpecError(
                f"Spec(own): {path!r} is {list(shape)} and has no dim {one.dim}, along which {one!r} cuts it. Give one "
                f"of {len(local)} dims."
            )
        dim = one.dim % len(local)
        total, ranks, n = local[dim], sizes[one.axis], sum(one.shares)
        parts = tuple(total // n * share for share in one.shares)
        if total % n or any(part % ranks for part in parts):
            what = f"{list(parts)} elements of its parts" if len(parts) > 1 and not total % n else f"{total} elements"
            raise SpecError(
                f"Spec(own): {path!r} is {list(shape)}, and {one!r} cuts the {what} along dim {dim} for {ranks} ranks, "
                f"which does not divide{f' into parts {one.shares}' if total % n else ''}. Choose another dim or other "
                "parts, or pad the leaf."
            )
        found.append(Cut(one.axis, ranks, dim, parts))
        local[dim] = total // ranks
    return tuple(found), local


def part_shape(whole: Sequence[int], cuts: Cuts) -> tuple[int, ...]:
    """Of a rank's part, from the leaf."""
    shape = list(whole)
    for cut in cuts:
        shape[cut.dim] //= cut.ranks
    return tuple(shape)


def whole_shape(local: Sequence[int], cuts: Cuts) -> tuple[int, ...]:
    """Of the leaf, from a rank's part."""
    shape = list(local)
    for cut in cuts:
        shape[cut.dim] *= cut.ranks
    return tuple(shape)


def cut_of(whole: torch.Tensor, cuts: Cuts, coordinate: Mapping[str, int]) -> torch.Tensor:
    """A rank's part of a whole leaf: a view, where it is one."""
    for cut in cuts:
        spans = cut.spans(coordinate[cut.axis])
        parts = [whole.narrow(cut.dim, start, count) for start, count in spans]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)
    return whole


def join(parts: Sequence[torch.Tensor], cut: Cut) -> torch.Tensor:
    """What ranks have along one cut, in their order, as it was before the cut."""
    dim, each = cut.dim, [size // cut.ranks for size in cut.sizes]
    by_part = [part.split(each, dim) for part in parts]
    return torch.cat([one[k] for k in range(len(each)) for one in by_part], dim)


Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def boxes(whole: Sequence[int], cuts: Cuts, coordinate: Mapping[str, int]) -> list[Box]:
    """What a rank has, as boxes: where each begins in the whole leaf, where in the rank's part, and its size."""
    zero = (0,) * len(whole)
    found: list[Box] = [(zero, zero, tuple(whole))]
    for cut in cuts:
        dim, at, again = cut.dim, 0, []
        for start, count in cut.spans(coordinate[cut.axis]):
            for there, here, size in found:
                a, b = max(start, here[dim]), min(start + count, here[dim] + size[dim])
                if a < b:
                    again.append((
                        _put(there, dim, there[dim] + a - here[dim]), _put(here, dim, at + a - start),
                        _put(size, dim, b - a),
                    ))  # fmt: skip
            at += count
        found = again
    return found


def _put(numbers: tuple[int, ...], i: int, n: int) -> tuple[int, ...]:
    return (*numbers[:i], n, *numbers[i + 1 :])
