"""Carrier: what one lineage of states has of a transport on this rank. This one calls collectives, as most would.

    gather   Place ──fill──▶ a job: cast each shard into its own slice, gather in place        gather lane
    reduce   staged gradients ──▶ the collectives of a route; `exchange` is an exact sum's      reduce lane

Its memory comes and goes with a step, unless it keeps an arena, or `staging` gives bytes that stay.

What a transport of one's own can change: every gather that the plan names (`gathers`, and `gather` or `fill`), and the
first collective of an exact sum (`reduces` and `exchange`). All other reductions are collectives of a route, issued by
`_engine.staging`. What no plan names is gathered by collectives: whole trees, and units in a driven step before its
order of use is known. Steps that are compiled whole have collectives only.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from .._common.record import Collective
from .._distributed.lanes import Mark, Steps, together
from .._plan.layout import Bucket, Layout, LeafInfo, Unit, plan_layout
from .._plan.plan import Plan
from .._plan.route import Route
from .._runtime.runtime import Runtime, runtime_of
from .._spec.spec import Spec
from .._spec.transport import Traits, Transport
from .._storage.place import BucketPlace, Filling, Place
from .._storage.weights import Stored, read

__all__ = ["Carrier", "CollectiveTransport", "Portions", "resolve_transport"]

GatherSteps = tuple[tuple[Collective, torch.Tensor], ...]  # collectives, and where each one lands
PLAIN = Traits()


class Portions:
    """The portions of each rank's summand [n] in which it is used, one beside the coming of the next.

    Args:
        cuts: the elements [start, stop) of each, in a row; none: it is used as a whole.

    Attributes:
        there: the points, on the lane that brings them, from which on each portion has come from all ranks; none: they
            are there when all is.
    """

    def __init__(self, cuts: Sequence[tuple[int, int]] = ()) -> None:
        self.cuts = cuts
        self.there: list[Mark] = []


class Carrier:
    """Collectives, and memory that comes and goes.

    Where this rank is: `self.run.sizes[axis]` ranks along an axis of the mesh, `self.run.coordinate[axis]` among them.

    Attributes:
        inside: whether collectives read and write its own memory only: a shard is copied there first, whatever its
            dtype, and what was reduced is copied from there.
        keeps_arena: whether `arena` gives bytes, which stay. read: whether other ranks read them.
        nbytes: of the memory that stays, on this rank.
    """

    inside = False
    keeps_arena = False
    read = False
    nbytes = 0

    def __init__(self, run: Runtime, layout: Layout, traits: Traits = PLAIN) -> None:
        self.run, self.layout, self.traits = run, layout, traits

    # ---- memory

    def prepare(self, plan: Plan) -> bool:
        """Make all memory that ranks share for this plan, and that not every rank has. Collective, if there is some.

        Returns whether something is new.
        """
        return False

    def arena(self, nbytes: int) -> torch.Tensor:
        """At least so many bytes [uint8] for gathered units, where `keeps_arena`."""
        raise NotImplementedError

    def staging(self, unit: Unit, nbytes: int) -> torch.Tensor | None:
        """At least so many bytes [uint8] in which all of a unit's gradients are staged, which stay; or None: then
        staging comes and goes, and `reduces` is not asked."""
        return None

    # ---- gathers

    def gathers(self, bucket: Bucket, whole: torch.Tensor, steps: GatherSteps) -> GatherSteps:
        """The collectives that bring a bucket to its place `whole`, in the place of those that were planned.

        Args:
            steps: (record, where it lands), one for each axis, in this order. It lands in the slices of all ranks along
                that axis, in their order. The own slice is there before: of the first axis it is `part.own`, of a later
                one what the axis before has completed.

        Returns:
            `part.steps` of `gather`, which has to issue just these records in this order. Nothing checks that it does.
            A step may become several, or none; its place may come back as it is, or as any tensor that `gather` needs.

        A record's kind is one of those of `Collective`; another one is not refused, but taken for a reduction. What one
        rank sends to one other is an "all_to_all" with `splits`. Its `numel` is the most that comes or goes on any
        rank. `splits` is a value, whose `at(coordinate)` gives (elements that come, elements that go), by rank along
        the axis. It prints the same on every rank, can be pickled and has a hash, as a NamedTuple does: ranks compare
        records by how they print.
        """
        return steps

    def fill(self, place: Place, state: Stored) -> Filling:
        """The job that gathers a unit, from the shards of its buckets: parts travel together."""
        if len(place.parts) == 1:
            (part,) = place.parts
            return place.issued, self.gather(place, part, read(state, part.bucket).local, True), place.single
        parts = enumerate(place.parts)
        jobs = [self.gather(place, part, read(state, part.bucket).local, i == 0) for i, part in parts]
        return place.issued, together(jobs), place.single

    def gather(self, place: Place, part: BucketPlace, source: torch.Tensor, first: bool = False) -> Steps:
        """Bring one bucket to its place, as a part of a job: `yield from self.run.collective(record, out, given)`.

        Args:
            part: the bucket, its `whole` place, this rank's `own` slice of that, and the `steps` of `gathers`.
            source: this rank's shard, in the dtype that is stored; it may have to be cast.
            first: whether the bucket is the first of its unit. After its cast `place.cast` may be marked: from there on
                the job only communicates, and on GPUs compute may begin. Without a mark it begins later.
        """
        given = part.own
        if source.dtype is part.whole.dtype and not self.inside:
            given = source  # no cast: the first gather reads the shard itself
        else:
            part.own.copy_(source)
            if first:
                place.cast = self.run.lanes.mark(place.cast)
        for one, out in part.steps:
            yield from self.run.collective(one, out, given)
            given = out
        if not part.steps and given is source:
            part.own.copy_(source)

    def spared(self, place: Place | None = None) -> list[range]:
        """The bytes of the arena that other ranks may be reading: all such, or those of a unit that was just
        released."""
        return []

    def step_begins(self) -> None:
        """A step begins, or is begun anew, and others may still be in the one before."""

    # ---- reductions

    def reduces(self, way: Route) -> Route:
        """What carries out a reduction of what is staged in this transport's bytes, those of `staging`.

        Only the records of the first step of an exact sum (`way.exact`) are free: they go to `exchange`. Of other steps
        the first record is issued, as it stands.
        """
        return way

    def exchange(
        self, collectives: tuple[Collective, ...], stage: torch.Tensor, came: torch.Tensor, portions: Portions
    ) -> Generator[Any, None, bool]:
        """For an exact sum: `stage` [ranks · n] -> `came` [ranks · n], each rank's summand of this rank's part, by
        rank. Returns whether the own one is left out, and only in `stage`.

        Args:
            portions: in which what comes is used. A transport that brings one after the other may say when each is
                there: `portions.there.append(self.run.lanes.mark())`, once for each of `portions.cuts`, in their order,
                on the lane of this job. All or none.
            collectives: of the first step, as `reduces` left them; as they were planned where gradients are staged in
                other bytes than those of `staging` (beside the plan). The last one is not to be issued here where the
                sum stays whole: it gathers that.
        """
        yield from self.run.collective(collectives[0], came, stage)
        return False


class CollectiveTransport(Transport):
    """NCCL or gloo, on lanes beside compute."""

    name = "collective"

    def on(self, run: Runtime, layout: Layout) -> Carrier:
        return Carrier(run, layout)


def resolve_transport(
    spec: Spec, leaves: Sequence[LeafInfo], order: Sequence[str], layout: Layout
) -> tuple[Spec, Layout]:
    """The spec with a transport that is on this machine, the same on every rank, and its layout. Collective where the
    transport is "auto". `layout`: that of the spec as it is."""
    transport = spec.transport.resolve_transport(runtime_of(spec.mesh), layout)
    if transport is spec.transport:
        return spec, layout
    alike = transport.exact == spec.transport.exact  # all that a layout depends on
    spec = spec.with_transport(transport)
    return spec, layout if alike else plan_layout(leaves, spec, order)
