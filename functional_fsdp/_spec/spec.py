"""What a run is asked for, as values: a Spec ties placements, precision, units, a schedule and a transport to a mesh.

    Schedule     when units are gathered, and what stays gathered; `plan` works it out on a layout
    Transport    what carries the gathers of a plan, and exact sums, in eager steps
    Spec         all of it

Nothing here touches a device or a process group. Of a transport a Spec has the name and the options only:

    Spec(transport=...)   Transport   which one, its options, what of it shows in a layout and in records
                              │ on(run, layout)
                              ▼
    executor              Carrier     what one lineage of states has of it on this rank: memory, jobs

A new transport is a file in `_transports` with a Transport and a Carrier, and a line in `_transports.auto`. Nobody
else asks which one it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from .._common.calls import provided
from .._common.errors import SpecError, expect
from .._common.tree import PathIndex, bytes_text, first_match
from .placement import Placement, zero3
from .precision import Precision
from .units import ByName, freeze_units

Order = tuple[str | tuple[str, ...], ...]  # units in order of use; a tuple of them is used at once
Rules = tuple[tuple[str, Any], ...]  # (pattern, value), first match wins
_alongs, _cuts_of, _spec_table = provided("axes.alongs"), provided("axes.cuts_of"), provided("look.spec_table")


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
