"""What a user asks for: a Spec ties placements, precision, units, a schedule and a transport to a mesh.

Nothing here touches a device or a process group.

Transport: what carries the gathers of a plan and exact sums in eager steps, as a value in a Spec. Pure.

    Spec(transport=...)   Transport   which one, its options, what of it shows in a layout and in records
                              │ on(run, layout)
                              ▼
    executor              Carrier     what one lineage of states has of it on this rank: memory, jobs (`carrier`)

A new transport is a file in `_transports` with a Transport and a Carrier, and a line in `_transports.auto`. Nobody
else asks which one it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from .._common.calls import provided
from .._common.errors import SpecError, expect
from .._common.tree import first_match
from .placement import Placement, zero3
from .precision import Precision
from .schedule import Schedule, schedule_of
from .units import ByName, freeze_units


class Traits(NamedTuple):
    """What of a transport shows in the records. gathers: the lane of its gathers. averages: whether its collectives can
    average; else they add up, and the result is divided."""

    gathers: str = "gather"
    averages: bool = True


class Transport:
    """What carries the gathers of a plan, and exact sums, in eager steps. Equal by class and options, which are its
    attributes. The top of `_engine.gathers` says what goes by it, and what never does.

    Attributes:
        name: what it is called in `Spec(transport=...)` and where specs are printed.
        stays: whether it has memory that ranks share, which is made by `shard` and stays: whether `Carrier.prepare` is
            called. (Memory of this rank only needs no `prepare`.)
        exact: whether it adds up gradients in float32, in the order of ranks, where the precision leaves that open. A
            float64 wire is added up by the backend all the same.
        traits: what of it shows in the records of what is communicated.
    """

    name: ClassVar[str] = "transport"
    stays: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    traits: Traits = Traits()

    def on(self, run: Any, layout: Any) -> Any:
        """What one lineage of states has of it, on this rank of a mesh of several ranks: a `Carrier`.

        Args:
            run: the Runtime of the mesh: `run.sizes` and `run.coordinate` by axis, `run.collective`.
            layout: the Layout of the states.
        """
        raise NotImplementedError(f"{type(self).__name__} has no on(run, layout). Write one that returns a Carrier.")

    def resolve_transport(self, run: Any, layout: Any) -> Transport:
        """The transport that this one comes to on the machine of these ranks, the same on every rank. Collective, if it
        tries anything."""
        return self

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).items()))

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in vars(self).items() if key != "traits")
        return f"{self.name}({options})" if options else self.name

    def __fsdp_settings__(self) -> Any:
        return repr(self)


#: by name, without options
NAMES: dict[str, Transport] = {}


def transport_of(said: object) -> Transport:
    """A transport from its name, or itself.

    Raises:
        SpecError: there is none of that name.
    """
    if isinstance(said, Transport):
        return said
    if isinstance(said, str) and said in NAMES:
        return NAMES[said]
    instance = f" Make one of this class: {said.__name__}()." if isinstance(said, type) else ""
    raise SpecError(
        f"Spec(transport={said!r}): expected one of {', '.join(map(repr, NAMES))}, or a transport with options, as "
        f"fsdp.symmetric(zero_cta=True).{instance}"
    )


Rules = tuple[tuple[str, Any], ...]
_alongs, _cuts_of, _spec_table = provided("axes.alongs"), provided("axes.cuts_of"), provided("look.spec_table")


def _rules(what: str, value: Mapping[str, Any] | None, kind: type) -> Rules:
    value = {} if value is None else value
    if not isinstance(value, Mapping) or not all(isinstance(one, kind) for one in value.values()):
        raise SpecError(f"Spec({what}={value!r}): expected {{pattern: {kind.__name__}}}, and patterns are texts.")
    return tuple(value.items())


@dataclass(frozen=True, init=False, repr=False)
class Spec:
    """How a pytree of parameters is placed on a mesh. Frozen, hashable, equal by value; printing it gives a table.

    Args:
        mesh: a torch `DeviceMesh` with named axes, or `{"data": 1024}` to plan without a process group.
        placement: a `Placement`, or rules `{pattern: Placement}` (first match wins). Default: `zero3` over all axes
            that `own` does not name.
        own: for axes along which the model communicates itself (tensor, sequence, expert parallel), how leaves lie
            along them, `{pattern: rule}` (first match wins): `("tp", 0)` is a slice along dim 0, "tp" is equal on every
            rank, an `Along` says more; a list has several axes. Leaves are given whole, and states are saved and
            exported whole; compute sees this rank's part. Every leaf lies by a rule, or its placement averages over the
            axis.
        precision: a `Precision`, or rules `{pattern: Precision}` (first match wins; what matches none has the default).
        units: how leaves are grouped. None finds them from the paths: the outermost repeated blocks (`blocks.0`,
            `blocks.1`, ...), and of the rest the largest parts that contain no block. Numbered layers that hold their
            leaves themselves (a convolution, a norm) join the part that they are in, where that is no larger than the
            largest block. A list of patterns makes one unit of each distinct prefix that a pattern matches, and of each
            tuple of patterns one unit. `{name: pattern or patterns}` names them. What matches nothing is grouped as the
            rest. A function from a leaf's path to the name of its unit, or to None for the rest, as
            `lambda path: path.split(".")[0]`; the same one on every rank.
        labels: `{pattern: label}` for optimizers (weight decay, learning rate); first match wins, else "default".
        trainable: `{pattern: bool}`, first match wins. Otherwise parameters of modules go by their `requires_grad`,
            plain tensors are trainable when they are of a floating dtype.
        average: gradients are averaged over the data ranks ("mean") or summed ("sum").
        schedule: when units are gathered and what stays gathered. Default: forward, then backward, one use ahead.
        transport: what carries gathers and reductions of eager steps (those of compiled ones are the compiler's), by
            name, or with options, as `fsdp.symmetric(zero_cta=True)`. "collective": NCCL or gloo, on lanes beside
            compute. "copy_engine": ranks read each other's memory, on one host or in one NVLink domain along each axis
            that shards; sums are in float32 in the order of ranks, unless the precision says `sum="native"`.
            "symmetric": NCCL with its symmetric kernels, on memory that stays registered with it. "auto": below 1 GiB
            of weights collective, else the first that every rank's machine has of copy_engine, symmetric and
            collective; chosen by `shard` and logged.

    Raises:
        SpecError: an axis that the mesh does not have, a mesh whose axes have no names, or a value of the wrong kind.

    >>> Spec({"data": 4, "tp": 2}, own={"*.up.*": ("tp", 0), "*.down.weight": ("tp", 1), "*": "tp"}).data
    ('data',)
    >>> Spec({"data": 8}).placement_of("blocks.0.weight") == zero3("data")
    True
    """

    # Of an argument that may be rules by pattern the field's name is the plural, and holds (pattern, value) pairs.
    mesh: DeviceMesh | tuple[tuple[str, int], ...]
    placements: tuple[tuple[str, Placement], ...]
    precisions: tuple[tuple[str, Precision], ...]
    units: Hashable
    labels: Rules
    trainable: Rules
    average: str
    schedule: Schedule
    transport: Transport
    own: tuple[tuple[str, tuple[Any, ...]], ...] = ()

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
        transport: str | Transport = "collective",
        own: Mapping[str, Any] | None = None,
    ) -> None:
        put: Callable[[str, Any], None] = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        said = "a DeviceMesh, as fsdp.local_mesh(), or {axis: ranks}; the mesh comes first, as in Spec(mesh, placement)"
        expect("Spec(mesh)", mesh, (DeviceMesh, Mapping), said)
        put("mesh", mesh if isinstance(mesh, DeviceMesh) else tuple(mesh.items()))
        names = tuple(self.axes)
        ways = expect("Spec(own)", own or {}, Mapping, "{pattern: rule}, as {'*.up.*': ('tp', 0)}")
        put("own", tuple((pattern, _alongs(pattern, value, self.axes)) for pattern, value in ways.items()))
        if placement is None:
            placement = zero3(*(name for name in names if name not in self.own_axes))
        rules = placement if isinstance(placement, Mapping) else {"*": placement}
        for pattern, rule in rules.items():
            expect(f"Spec(placement) of {pattern!r}", rule, Placement, "a Placement, as zero3('data')")
            missing = [axis for axis in rule.data if axis not in names]
            if missing:
                raise SpecError(
                    f"Spec(placement): {rule} names the axis {missing[0]!r}, which the mesh does not have. Its axes "
                    f"are {', '.join(map(repr, names))}. Use one of them, or name the mesh's axes accordingly."
                )
        if average not in ("mean", "sum"):
            raise SpecError(f"Spec(average={average!r}): expected 'mean' or 'sum' over the data ranks.")
        put("placements", tuple(rules.items()))
        dtypes = precision if isinstance(precision, Mapping) else {"*": Precision() if precision is None else precision}
        for pattern, one in dtypes.items():
            expect(f"Spec(precision) of {pattern!r}", one, Precision, "a Precision, as Precision(sum='fp32')")
        put("precisions", tuple(dtypes.items()))
        put("units", freeze_units(units))
        put("labels", _rules("labels", labels, str))
        put("trainable", _rules("trainable", trainable, bool))
        put("average", average)
        put("schedule", schedule_of("Spec(schedule)", schedule))
        put("transport", transport_of(transport))

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

    @property
    def own_axes(self) -> tuple[str, ...]:
        """The mesh axes that `own` names, in the mesh's order."""
        named = {one.axis for _, some in self.own for one in some}
        return tuple(axis for axis in self.axes if axis in named)

    def with_schedule(self, schedule: Schedule) -> Spec:
        """The same with another schedule."""
        return self._but("schedule", schedule_of("with_schedule", schedule))

    def with_trainable(self, trainable: Mapping[str, bool]) -> Spec:
        """The same with other rules for what trains."""
        return self._but("trainable", _rules("trainable", trainable, bool))

    def with_placement(self, placement: Placement) -> Spec:
        """The same with one placement for all leaves."""
        return self._but("placements", (("*", placement),))

    def with_own(self, own: tuple[tuple[str, tuple[Any, ...]], ...]) -> Spec:
        """The same with other rules for axes of the model's own."""
        return self._but("own", own)

    def with_transport(self, transport: str | Transport) -> Spec:
        """The same with another transport."""
        return self._but("transport", transport_of(transport))

    def _but(self, name: str, value: Any) -> Spec:
        new = copy.copy(self)
        object.__setattr__(new, name, value)
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

    def part_of(self, path: str, shape: Sequence[int], *aliases: str) -> tuple[int, ...]:
        """The shape of a rank's part of the leaf at `path`, whose whole shape this is."""
        return tuple(_cuts_of(path, shape, first_match(self.own, (path, *aliases)) or (), self.axes)[1])

    def __repr__(self) -> str:
        return _spec_table(self)
