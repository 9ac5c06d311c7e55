"""GraphPlan: what the traced verbs need of a layout, a plan and a mesh, worked out once, as tuples of plain values.

While torch.compile traces a step it runs Python slowly and guards what it reads; so nothing is planned there.

    layout + plan + mesh ──▶ GraphPlan ──▶ `_graph.traced`'s verbs: which collectives, of which group, cut where
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from .._common.errors import FsdpError, ScheduleError
from .._common.provided import provide
from .._common.torch_names import disable_current_modes
from .._distributed.lanes import LANES
from .._plan.layout import Bucket, Layout, Unit
from .._plan.plan import make_plan
from .._plan.records import Records, keeps_copy, records
from .._runtime.given import ALL, Seats
from .._runtime.runtime import Runtime
from .._spec.spec import Spec

__all__ = ["BucketPlan", "GraphPlan", "UnitRecipe", "graph_plan"]

Groups = Mapping[tuple[str, str], str]  # (lane, axis) -> the name of the group


class BucketPlan(NamedTuple):
    """What happens to a bucket.

    copied: whether there is a compute copy between steps. records: which collectives.
    pieces: (elements, shape, which of the unit's leaves) in the order of the bucket; -1 is padding.
    empty: (which of the unit's leaves, shape) of leaves without elements.
    """

    bucket: Bucket
    copied: bool
    records: Records
    pieces: tuple[tuple[int, tuple[int, ...], int], ...]
    empty: tuple[tuple[int, tuple[int, ...]], ...]


class UnitRecipe(NamedTuple):
    """A unit's buckets, and the names of its leaves: in the unit, and in the tree."""

    name: str
    keys: tuple[str, ...]
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, ...]  # of the leaves that train
    buckets: tuple[BucketPlan, ...]


class GraphPlan:
    """All of it, and the program of gathers: uses, what is due at each, and how long a gather's bytes are good.

    Args:
        sizes, coordinate: of the mesh's axes, and this rank's place.
        groups: the communicators' names, by lane and axis.
    """

    def __init__(
        self, layout: Layout, spec: Spec, sizes: Mapping[str, int], coordinate: Mapping[str, int], groups: Groups,
        run: Runtime | None = None,
    ) -> None:  # fmt: skip
        for bucket in layout.buckets.values():
            packed = next((leaf for leaf in bucket.leaves if leaf.form is not None), None)
            if packed is not None:
                raise ScheduleError(
                    f"a step that is compiled whole does not gather packed leaves, as {packed.path!r} is, by "
                    f"{packed.form and packed.form.codec}. Compile the units: T.forward_backward(model, loss_fn, "
                    "compile=True), with T.cuda_graph around the step; or unpack it by another spec."
                )
            if bucket.codec is not None:
                raise ScheduleError(
                    f"a step that is compiled whole does not send gradients in a codec, as Precision(wire="
                    f"{bucket.codec}) says of {bucket.leaves[0].path!r}. Compile the units: T.forward_backward(model, "
                    "loss_fn, compile=True), with T.cuda_graph around the step; or leave wire out."
                )
            if bucket.in_float8 or bucket.gather_codec is not None:
                how = "in float8" if bucket.in_float8 else "in a codec"
                said = bucket.gather_codec or bucket.gather
                raise ScheduleError(
                    f"a step that is compiled whole does not gather {how}, as Precision(gather={said}) "
                    f"says of {bucket.leaves[0].path!r}. Compile the units: T.forward_backward(model, loss_fn, "
                    "compile=True), with T.cuda_graph around the step; or leave gather out."
                )
        self.sizes, self.coordinate, self.groups = dict(sizes), dict(coordinate), dict(groups)
        self.seats, self.run, self.layout = Seats(layout, sizes, coordinate), run, layout.hash
        self.trained = tuple(self.seats.units)
        self.data = spec.data
        self.average, self.traits = spec.average, spec.transport.traits._replace(gathers="gather")
        _ = layout.trainable  # cached: Dynamo does not trace the first time
        schedule = spec.schedule if spec.schedule.order != "recorded" else spec.schedule.ordered(None)
        program = make_plan(layout, schedule)
        self.uses = tuple(use.unit for use in program.uses)
        self.due, self.stays = program.due, program.stays
        self.gathers = tuple((gather.unit, gather.first, gather.last) for gather in program.gathers)
        self.units = {unit.name: self._unit(unit) for unit in layout.units}

    def group(self, lane: str, axis: str) -> str:
        """The name of a lane's communicator on an axis."""
        return self.groups[lane, axis]

    def lacking(self, masks: tuple[int, ...]) -> tuple[tuple[str, str], Any, tuple[str, ...]]:
        """The error to raise and its text, if any, and `Lacking`'s fields, of a step in which the leaves of `trained`
        got gradients by these masks; without any, all did.

        Called while a step is traced. Ranks that share a leaf must have gradients for it alike: their graphs cannot ask
        each other. They compare that when one of them first traces such a step.

        Collective, on the host: when masks are new to this layout.
        """
        noted = dict(zip(self.trained, masks or (ALL,) * len(self.trained), strict=True))
        mine = self.seats.row(noted)
        rows = [mine]
        if self.run is not None:
            try:
                with disable_current_modes():  # ranks really do it, while a graph is made
                    rows = _rows(self.run, self.layout, mine)
            except FsdpError as error:  # Dynamo would wrap it
                return (type(error).__name__, str(error)), (), ()
        lacking, parted, amiss = self.seats.lacking(bytes(map(max, *rows, mine))), self.seats.parted(rows), ("", "")
        if parted:
            amiss = (
                "ScheduleError",
                f"in this compiled step the leaf {parted!r} gets a gradient on some ranks only, and graphs cannot ask "
                "each other. Give zeros in the place of None there, or None on every rank.",
            )
        return amiss, tuple(lacking.given.items()), lacking.anywhere

    lacking._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch._dynamo.assume_constant_result's mark

    def _unit(self, unit: Unit) -> UnitRecipe:
        buckets = tuple(self._bucket(unit, bucket) for bucket in unit.buckets)
        return UnitRecipe(unit.name, unit.keys, unit.paths, unit.trains, buckets)

    def _bucket(self, unit: Unit, bucket: Bucket) -> BucketPlan:
        _ = bucket.labels, bucket.ranks, bucket.counts  # cached: Dynamo does not trace the first time
        leaf_at = dict(zip(bucket.leaf_pieces, bucket.leaves, strict=True))
        pieces = []
        for i, shape in enumerate(bucket.pieces):
            leaf = leaf_at.get(i)
            pieces.append((prod(shape), shape, -1 if leaf is None else unit.paths.index(leaf.path)))
        empty = tuple((unit.paths.index(leaf.path), leaf.shape) for leaf in bucket.empty)
        found = records(bucket, tuple(self.coordinate.items()), self.average, self.traits)
        return BucketPlan(bucket, keeps_copy(bucket), found, tuple(pieces), empty)


_ROWS: WeakKeyDictionary[Runtime, dict[tuple[str, bytes], list[bytes]]] = WeakKeyDictionary()


def _rows(run: Runtime, layout: str, row: bytes) -> list[bytes]:
    """Every rank's row of leaves with gradients. Collective, on the host, when the row is new to this layout."""
    known = _ROWS.setdefault(run, {})
    if (layout, row) not in known:
        known[layout, row] = run.everyone(row, "leaves with gradients")
    return known[layout, row]


def graph_plan(layout: Layout, spec: Spec, run: Runtime) -> GraphPlan:
    """The graph plan of a state that runs. Collective where a mesh of CPUs has none yet."""
    axes = [axis for axis, ranks in run.sizes.items() if ranks > 1]
    groups = {(lane, axis): run.group(run.lanes.traced(lane), axis).group_name for lane in LANES for axis in axes}
    return GraphPlan(layout, spec, run.sizes, run.coordinate, groups, run)


provide("graph", graph_plan)
