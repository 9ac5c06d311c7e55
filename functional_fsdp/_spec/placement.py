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
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from .._common.errors import SpecError, as_names

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
            names = as_names(f"Placement.{kind}", axes)
            if isinstance(axes, str) or len(set(names)) != len(names):
                raise SpecError(f"Placement.{kind}={axes!r}: expected a tuple of distinct mesh axis names, ('data',).")
            object.__setattr__(self, kind, names)
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
