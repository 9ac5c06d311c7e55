"""What a user asks for: placements and their presets, precision, and the Spec that ties them to a mesh.

Nothing here touches a device or a process group. A placement says, for each kind of state, over which mesh axes it is
sharded (everywhere else it is replicated):

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

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from ._errors import SpecError
from ._schedule import Schedule
from ._tree import first_match, table
from ._units import ByName, freeze_units

__all__ = ["Placement", "Precision", "Spec", "ddp", "hfsdp", "hsdp", "zero1", "zero2", "zero3"]

FLOATS = (torch.float64, torch.float32, torch.bfloat16)


def _name(dtype: torch.dtype | None) -> str:
    return "-" if dtype is None else str(dtype).removeprefix("torch.")


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


class Dtypes(NamedTuple):
    """The dtype of each stage of one leaf, and where its gradients are summed: "native" or "fp32"."""

    main: torch.dtype
    compute: torch.dtype
    grads: torch.dtype
    wire: torch.dtype
    sum: str

    def __str__(self) -> str:
        said = (f"{kind} {_name(dtype)}" for kind, dtype in zip(self._fields[:4], self[:4], strict=True))
        return f"{', '.join(said)}, sum {self.sum}"


_NO_SUM = (
    "Precision(sum='fp32') of a float64 wire would lose digits. Sums in float32 are of bfloat16 or float32 wires; "
    "leave sum out, or set wire=torch.float32."
)


@dataclass(frozen=True)
class Precision:
    """The dtype of each stage of a weight's and a gradient's life.

    Attributes:
        main: main weights and optimizer state. None: float32, or float64 for float64 leaves.
        compute: gathered weights, and so compute. None: as `main` if that was given, else each leaf's own dtype.
        grads: main gradients, in which reduced gradients are accumulated. None: as `main`. `step` casts them to `main`
            for the optimizer, so fused kernels never see a mix.
        wire: what travels in a reduction: gradients are cast to it once, when they are staged. None: as `compute`.
        sum: where a reduction is added up. "native": by the backend, in the wire's dtype and its own order. "fp32":
            each rank gets the summands of its part (an all-to-all) and adds them up in float32 in the order of the
            ranks, ((r0 + r1) + r2) + ..., the same bits in every run; further axes carry float32. It doubles the
            staging. "auto": "fp32" on the `copy_engine` transport, which adds up itself, else "native".
        inputs: cast floating inputs of a driven model's parts to the dtype that they compute in, as FSDP2 does.

    Integer and boolean leaves keep their dtype throughout.

    Raises:
        SpecError: for float16 (use bfloat16, which needs no loss scaling), for other dtypes than float64, float32 and
            bfloat16, and for `sum="fp32"` of a float64 wire.

    >>> print(Precision(compute=torch.bfloat16).resolve(torch.float32))
    main float32, compute bfloat16, grads float32, wire bfloat16, sum native
    """

    main: torch.dtype | None = None
    compute: torch.dtype | None = None
    grads: torch.dtype | None = None
    wire: torch.dtype | None = None
    sum: str = "auto"
    inputs: bool = False

    def __post_init__(self) -> None:
        for kind in ("main", "compute", "grads", "wire"):
            dtype = getattr(self, kind)
            if dtype is torch.float16:
                raise SpecError(
                    f"Precision({kind}=torch.float16): float16 needs loss scaling, which is not supported. "
                    f"Use torch.bfloat16, which has float32's range."
                )
            if dtype is not None and dtype not in FLOATS:
                raise SpecError(f"Precision({kind}={dtype}): expected one of {', '.join(map(str, FLOATS))} or None.")
        if self.sum not in ("auto", "native", "fp32"):
            raise SpecError(f"Precision(sum={self.sum!r}): expected 'auto', 'native' or 'fp32'.")
        if not isinstance(self.inputs, bool):
            raise SpecError(f"Precision(inputs={self.inputs!r}): expected True or False.")
        if self.sum == "fp32" and (self.wire or self.compute or self.main) is torch.float64:
            raise SpecError(_NO_SUM)

    def resolve(self, leaf: torch.dtype, transport: str = "collective") -> Dtypes:
        """The dtypes of a leaf whose own dtype is `leaf`; nothing is left to be decided."""
        if not leaf.is_floating_point:
            return Dtypes(leaf, leaf, leaf, leaf, "native")
        main = self.main or torch.promote_types(leaf, torch.float32)
        compute = self.compute or self.main or leaf
        wire = self.wire or compute
        if self.sum == "fp32" and wire is torch.float64:
            raise SpecError(_NO_SUM)
        exact = self.sum == "fp32" or (self.sum == "auto" and transport == "copy_engine" and wire is not torch.float64)
        return Dtypes(main, compute, self.grads or main, wire, "fp32" if exact else "native")

    def __str__(self) -> str:
        main = _name(self.main) if self.main else "float32 (float64 where leaves are)"
        compute = _name(self.compute) if self.compute else "as main" if self.main else "as the leaf"
        grads, wire = _name(self.grads) if self.grads else "as main", _name(self.wire) if self.wire else "as compute"
        added = "as the transport does" if self.sum == "auto" else self.sum
        return f"main {main}, compute {compute}{' (inputs too)' * self.inputs}, grads {grads}, wire {wire}, sum {added}"


Rules = tuple[tuple[str, Any], ...]


def _rules(value: Mapping[str, Any] | None) -> Rules:
    return tuple((value or {}).items())


@dataclass(frozen=True, init=False, repr=False)
class Spec:
    """How a pytree of parameters is placed on a mesh. Frozen, hashable, equal by value; printing it gives a table.

    Args:
        mesh: a torch `DeviceMesh` with named axes, or `{"data": 1024}` to plan without a process group.
        placement: a `Placement`, or rules `{pattern: Placement}` (first match wins). Default: `zero3` over all axes.
        precision: a `Precision`, or rules `{pattern: Precision}` (first match wins; what matches none has the default).
        units: how leaves are grouped. None finds them from the paths: the outermost repeated blocks (`blocks.0`,
            `blocks.1`, ...), and of the rest the largest parts that contain no block. A list of patterns makes one unit
            of each distinct prefix that a pattern matches, and of each tuple of patterns one unit.
            `{name: pattern or patterns}` names them. What matches nothing is grouped as the rest. A function from a
            leaf's path to the name of its unit, or to None for the rest, as `lambda path: path.split(".")[0]`; the same
            one on every rank.
        labels: `{pattern: label}` for optimizers (weight decay, learning rate); first match wins, else "default".
        trainable: `{pattern: bool}`, first match wins. Otherwise parameters of modules go by their `requires_grad`,
            plain tensors are trainable when they are of a floating dtype.
        average: gradients are averaged over the data ranks ("mean") or summed ("sum").
        schedule: when units are gathered and what stays gathered. Default: forward, then backward, one use ahead.

    Raises:
        SpecError: an axis that the mesh does not have, a mesh whose axes have no names, or a value of the wrong kind.

    >>> Spec({"data": 8}).placement_of("blocks.0.weight") == zero3("data")
    True
    """

    mesh: DeviceMesh | tuple[tuple[str, int], ...]
    placements: tuple[tuple[str, Placement], ...]
    precisions: tuple[tuple[str, Precision], ...]
    units: Hashable
    labels: Rules
    trainable: Rules
    average: str
    schedule: Schedule

    def __init__(
        self,
        mesh: DeviceMesh | Mapping[str, int],
        placement: Placement | Mapping[str, Placement] | None = None,
        *,
        precision: Precision | Mapping[str, Precision] | None = None,
        units: Sequence[str | Sequence[str]] | Mapping[str, str | Sequence[str]] | ByName | None = None,
        labels: Mapping[str, str] | None = None,
        trainable: Mapping[str, bool] | None = None,
        average: Literal["mean", "sum"] = "mean",
        schedule: Schedule | None = None,
    ) -> None:
        put: Callable[[str, Any], None] = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        if not isinstance(mesh, (DeviceMesh, Mapping)):
            raise SpecError(
                f"Spec(mesh): expected a DeviceMesh, as fsdp.local_mesh(), or {{axis: ranks}}, not "
                f"{type(mesh).__name__}. The mesh comes first: Spec(mesh, placement)."
            )
        put("mesh", mesh if isinstance(mesh, DeviceMesh) else tuple(mesh.items()))
        names = tuple(self.axes)
        if placement is None:
            placement = zero3(*names)
        rules = placement if isinstance(placement, Mapping) else {"*": placement}
        for pattern, rule in rules.items():
            if not isinstance(rule, Placement):
                raise SpecError(
                    f"Spec(placement): {pattern!r} maps to {rule!r}; expected a Placement, as zero3('data')."
                )
            missing = [axis for axis in rule.data if axis not in names]
            if missing:
                raise SpecError(
                    f"Spec(placement): {rule} names the axis {missing[0]!r}, which the mesh does not have. Its axes "
                    f"are {', '.join(map(repr, names))}. Use one of them, or name the mesh's axes accordingly."
                )
        if average not in ("mean", "sum"):
            raise SpecError(f"Spec(average={average!r}): expected 'mean' or 'sum' over the data ranks.")
        if not isinstance(schedule, Schedule | None):
            raise SpecError(f"Spec(schedule={schedule!r}): expected a Schedule, as fsdp.Schedule(prefetch=2).")
        put("placements", tuple(rules.items()))
        dtypes = precision if isinstance(precision, Mapping) else {"*": precision or Precision()}
        for pattern, one in dtypes.items():
            if not isinstance(one, Precision):
                raise SpecError(
                    f"Spec(precision): {pattern!r} maps to {one!r}; expected a Precision, as "
                    "Precision(compute=torch.bfloat16)."
                )
        put("precisions", tuple(dtypes.items()))
        put("units", freeze_units(units))
        put("labels", _rules(labels))
        put("trainable", _rules(trainable))
        put("average", average)
        put("schedule", schedule or Schedule())

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axes and their sizes (ranks), outermost first."""
        if not isinstance(self.mesh, DeviceMesh):
            return dict(self.mesh)
        names = self.mesh.mesh_dim_names
        if not names:
            raise SpecError(
                f"Spec(mesh): the axes of this mesh of shape {tuple(self.mesh.shape)} have no names. "
                f"Give them: init_device_mesh(..., mesh_dim_names=('data',))."
            )
        return dict(zip(names, self.mesh.shape, strict=True))

    @property
    def data(self) -> tuple[str, ...]:
        """The mesh axes over which any leaf's gradients are averaged."""
        return tuple(axis for axis in self.axes if any(axis in rule.data for _, rule in self.placements))

    def with_schedule(self, schedule: Schedule) -> Spec:
        """The same with another schedule."""
        new = copy.copy(self)
        object.__setattr__(new, "schedule", schedule)
        return new

    def placement_of(self, path: str, *aliases: str) -> Placement:
        """The placement of the leaf at `path`. Raises SpecError when no rule matches."""
        found = first_match(self.placements, (path, *aliases))
        if isinstance(found, Placement):
            return found
        raise SpecError(
            f"Spec(placement): no rule matches the leaf {path!r}; the patterns are "
            f"{', '.join(repr(p) for p, _ in self.placements)}. Add a last rule {{'*': ...}}."
        )

    def precision_of(self, path: str, *aliases: str) -> Precision:
        """The precision of the leaf at `path`."""
        found = first_match(self.precisions, (path, *aliases))
        return found if isinstance(found, Precision) else Precision()

    def label_of(self, path: str, *aliases: str) -> str:
        """The label of the leaf at `path`, "default" when no pattern matches."""
        return str(first_match(self.labels, (path, *aliases)) or "default")

    def __repr__(self) -> str:
        def rules(pairs: Rules) -> str:
            return ", ".join(f"{k}: {v}" for k, v in pairs)

        whole = len(self.placements) == 1 and self.placements[0][0] == "*"
        rows = [
            ("mesh", " × ".join(f"{axis} {size}" for axis, size in self.axes.items())),
            ("placement", str(self.placements[0][1]) if whole else rules(self.placements)),
            ("precision", rules(self.precisions) if self.precisions[0][0] != "*" else str(self.precisions[0][1])),
            ("units", "found from the paths" if self.units is None else str(self.units)),
            ("labels", rules(self.labels) or "default"),
            ("trainable", rules(self.trainable) or "as given"),
            ("gradients", f"{self.average} over data ranks"),
            ("schedule", str(self.schedule)),
        ]
        return table(("Spec", ""), rows)
